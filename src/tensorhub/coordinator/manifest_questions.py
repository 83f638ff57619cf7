"""What a Register or a ReadyToWrite names by an id, and is not known: one rank is asked for each manifest or part, and the
others wait for it.

So a coordinator that has restarted is told each manifest once, and not by each of a thousand workers that come back at
once. Nothing is registered, or ready, meanwhile: whoever has waited says that again, as things are then. A rank that lacks
something which another one was asked for waits for that first. So it is asked for the rest once.

Not responsible for manifests that are kept (`manifests`), nor for registering (`membership`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf, nextafter

from tensorhub.coordinator import limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.messages import ReadyAgain, ReadyToWrite, Register, RegisterAgain
from tensorhub.model.manifest import id_of

ANSWER = 1 / 8  # of a lease, that the one who is asked has; then all others are asked as well
ANSWER_S_MAX = 5.0  # the same, however long a lease is: callers wait for it

Parts = tuple[bytes, ...]
Again = RegisterAgain | ReadyAgain


class ManifestQuestions:
    """Those of one coordinator."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # By id that was asked for: (session, what it will be told, whether that is a part's id) of the others.
        self._waiting: dict[str, deque[tuple[int, Again, bool]]] = {}
        self._count = 0  # of all those

    def __repr__(self) -> str:
        return f"<ManifestQuestions: {len(self._waiting)} asked, {self._count} wait>"

    def with_manifests(self, message: Register) -> tuple[Register, Parts, Parts] | None:
        """With the manifests themselves, the parts, and those of what is held, of which the last describes its origin if it
        has one. None: one of them has to be asked for.
        """
        find, held = self._cluster.manifests.find, message.held
        mine = message.manifest or (find(message.manifest_id) if message.manifest_id else b"")
        parts = self._parts(message.parts, message.part_ids)
        if mine is None or parts is None:
            return None
        if held is None:
            return replace(message, manifest=mine), parts, ()
        its = held.manifest or (find(held.manifest_id) if held.manifest_id else b"")
        held_parts = self._parts(message.parts, held_ids(message))
        if its is None or held_parts is None:
            return None
        return replace(message, manifest=mine, held=replace(held, manifest=its)), parts, held_parts

    def with_parts(self, session: int, message: ReadyToWrite) -> Parts | None:
        """What it names. None: some of that has to be said first, and it is asked for."""
        parts = self._parts(message.parts, message.part_ids)
        if parts is None:
            said = set(map(id_of, message.parts))
            unknown = [ident for ident in message.part_ids if self._cluster.manifests.find(ident) is None]
            missing = dict.fromkeys([ident for ident in unknown if ident not in said], True)
            self._ask(session, missing, ReadyAgain(message.key, message.rank, tuple(unknown)))
        return parts

    def _parts(self, blobs: Parts, part_ids: tuple[str, ...]) -> Parts | None:
        """Those that were said with them, or that are known."""
        if not part_ids:
            return ()
        said = {id_of(blob): blob for blob in blobs if blob}
        found = [said.get(ident) or self._cluster.manifests.find(ident) for ident in part_ids]
        return tuple([blob for blob in found if blob]) if all(found) else None

    def ask(self, session: int, message: Register) -> None:
        """This Register names what is not known. Sooner or later the rank is told to say it again."""
        named = [each.manifest_id for each in (message, message.held) if each is not None and each.manifest_id]
        find = self._cluster.manifests.find
        whole = any(find(ident) is None for ident in named)  # also where it was said now: it is not kept; so below
        parts = dict.fromkeys(ident for ident in (*message.part_ids, *held_ids(message)) if find(ident) is None)
        self._ask(session, dict(self._missing(message)), RegisterAgain(message.request, whole, tuple(parts)))

    def _ask(self, session: int, missing: Mapping[str, bool], again: Again) -> None:
        """Tell it this; or let it wait for one of these ids. Of each it is said whether it is a part's."""
        cluster = self._cluster
        for ident, is_part in missing.items():
            if ident in self._waiting and self._count < limits.WAIT_FOR_MANIFESTS_MAX:
                self._waiting[ident].append((session, again, is_part))
                self._count += 1
                return
        for ident in missing:
            if ident not in self._waiting and len(self._waiting) < limits.WAIT_FOR_MANIFESTS_MAX:
                self._waiting[ident] = deque()
                cluster.timers.set("manifest", ident, cluster.now + min(cluster.options.lease_s * ANSWER, ANSWER_S_MAX))
        cluster.send(session, again)

    def _missing(self, message: Register) -> Iterator[tuple[str, bool]]:
        """The ids of what is neither said nor known, and whether each is a part's."""
        find, held = self._cluster.manifests.find, message.held
        said = {id_of(blob) for blob in message.parts}
        for each in (message,) if held is None else (message, held):
            if not each.manifest and each.manifest_id and find(each.manifest_id) is None:
                yield each.manifest_id, False
            for ident in each.part_ids if each is message else held_ids(message):
                if ident not in said and find(ident) is None:
                    yield ident, True

    def came(self, *idents: str) -> None:
        """What names these was taken: whoever waits for them need not wait longer."""
        for ident in idents:
            if ident in self._waiting and self._cluster.manifests.find(ident) is not None:
                self._cluster.timers.set("manifest", ident, self._cluster.now)

    def due(self, ident: str) -> None:
        """That is there, or was waited for long enough. A few are told so, and the others in the next steps."""
        waiting, is_known = self._waiting[ident], self._cluster.manifests.find(ident) is not None
        for _ in range(min(len(waiting), limits.WOKEN_PER_STEP)):
            session, again, is_part = waiting.popleft()
            self._count -= 1
            if session in self._cluster.sessions:
                again = replace(again, part_ids=(ident,) if is_part and not is_known else ())
                if isinstance(again, RegisterAgain):
                    again = replace(again, whole=not (is_known or is_part))
                self._cluster.send(session, again)
        if waiting:
            self._cluster.timers.set("manifest", ident, nextafter(self._cluster.now, inf))  # not within this step
        else:
            del self._waiting[ident]


def held_ids(message: Register) -> tuple[str, ...]:
    """The ids of the parts of what it holds, and of what describes the origin of that."""
    held = message.held
    return () if held is None else (*held.part_ids, *((held.publication,) if held.publication else ()))
