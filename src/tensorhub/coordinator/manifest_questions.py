"""What a Register names by an id, and is not known: one rank is asked for each manifest or part, and the others wait for it.

So a coordinator that has restarted is told each manifest once, and not by each of a thousand workers that come back at
once. Nothing is registered meanwhile: whoever has waited says Register again, as things are then. A rank that lacks
something which another one was asked for waits for that first. So it is asked for the rest once.

Not responsible for manifests that are kept (`manifests`), nor for registering (`membership`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from math import inf, nextafter

from tensorhub.coordinator import limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.manifest import id_of
from tensorhub.messages import PARTS_ASKED_MAX, Register, RegisterAgain

ANSWER = 1 / 8  # of a lease, that the one who is asked has; then all others are asked as well
ANSWER_S_MAX = 5.0  # the same, however long a lease is: callers wait for it

Parts = tuple[bytes, ...]


class ManifestQuestions:
    """Those of one coordinator."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # By id that was asked for: (session, request, whether it is a part) of the others.
        self._waiting: dict[str, deque[tuple[int, int, bool]]] = {}
        self._count = 0  # of all those

    def __repr__(self) -> str:
        return f"<ManifestQuestions: {len(self._waiting)} asked, {self._count} wait>"

    def with_manifests(self, message: Register) -> tuple[Register, Parts, Parts] | None:
        """With the manifests themselves, the parts, and those of what is held; None: one of them has to be asked for."""
        find, held = self._cluster.manifests.find, message.held
        mine = message.manifest or (find(message.manifest_id) if message.manifest_id else b"")
        parts = self._parts(message, message.part_ids)
        if mine is None or parts is None:
            return None
        if held is None:
            return replace(message, manifest=mine), parts, ()
        its = held.manifest or (find(held.manifest_id) if held.manifest_id else b"")
        held_parts = self._parts(message, held.part_ids)
        if its is None or held_parts is None:
            return None
        return replace(message, manifest=mine, held=replace(held, manifest=its)), parts, held_parts

    def _parts(self, message: Register, part_ids: tuple[str, ...]) -> Parts | None:
        """Those that the message brings, or that are known."""
        if not part_ids:
            return ()
        said = {id_of(blob): blob for blob in message.parts if blob}
        found = [said.get(ident) or self._cluster.manifests.find(ident) for ident in part_ids]
        return tuple([blob for blob in found if blob]) if all(found) else None

    def ask(self, session: int, message: Register) -> None:
        """This Register names what is not known. Sooner or later the rank is told to say it again."""
        cluster, missing = self._cluster, dict(self._missing(message))
        for ident, is_part in missing.items():
            if ident in self._waiting and self._count < limits.WAIT_FOR_MANIFESTS_MAX:
                self._waiting[ident].append((session, message.request, is_part))
                self._count += 1
                return
        for ident in missing:
            if ident not in self._waiting and len(self._waiting) < limits.WAIT_FOR_MANIFESTS_MAX:
                self._waiting[ident] = deque()
                cluster.timers.set("manifest", ident, cluster.now + min(cluster.options.lease_s * ANSWER, ANSWER_S_MAX))
        parts = tuple([ident for ident, is_part in missing.items() if is_part])[:PARTS_ASKED_MAX]
        named = [each.manifest_id for each in (message, message.held) if each is not None and each.manifest_id]
        whole = any(cluster.manifests.find(ident) is None for ident in named)  # also where it was said now: it is not kept
        cluster.send(session, RegisterAgain(message.request, whole=whole, part_ids=parts))

    def _missing(self, message: Register) -> Iterator[tuple[str, bool]]:
        """The ids of what is neither said nor known, and whether each is a part's."""
        find, held = self._cluster.manifests.find, message.held
        said = {id_of(blob) for blob in message.parts}
        for each in (message,) if held is None else (message, held):
            if not each.manifest and each.manifest_id and find(each.manifest_id) is None:
                yield each.manifest_id, False
            for ident in each.part_ids:
                if ident not in said and find(ident) is None:
                    yield ident, True

    def came(self, message: Register) -> None:
        """This Register was taken: whoever waits for what it names need not wait longer."""
        for each in (message,) if message.held is None else (message, message.held):
            for ident in (each.manifest_id, *each.part_ids):
                if ident in self._waiting and self._cluster.manifests.find(ident) is not None:
                    self._cluster.timers.set("manifest", ident, self._cluster.now)

    def due(self, ident: str) -> None:
        """That is there, or was waited for long enough. A few are told so, and the others in the next steps."""
        waiting, is_known = self._waiting[ident], self._cluster.manifests.find(ident) is not None
        for _ in range(min(len(waiting), limits.WOKEN_PER_STEP)):
            session, request, is_part = waiting.popleft()
            self._count -= 1
            if session in self._cluster.sessions:
                whole, parts = not (is_known or is_part), (ident,) if is_part and not is_known else ()
                self._cluster.send(session, RegisterAgain(request, whole=whole, part_ids=parts))
        if waiting:
            self._cluster.timers.set("manifest", ident, nextafter(self._cluster.now, inf))  # not within this step
        else:
            del self._waiting[ident]
