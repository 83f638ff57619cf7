"""Manifests that a Register names by an id, and that are not known: one rank is asked for each, and the others wait for it.

So a coordinator that has restarted is told each manifest once, and not by each of a thousand workers that come back at once.
Nothing is registered meanwhile: whoever has waited says Register again, as things are then.

Not responsible for manifests that are kept (`manifests`), nor for registering (`membership`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import inf, nextafter

from tensorhub.coordinator import limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.messages import Register, RegisterAgain

ANSWER = 1 / 8  # of a lease, that the one who is asked has; then all others are asked as well
ANSWER_S_MAX = 5.0  # the same, however long a lease is: callers wait for it


class ManifestQuestions:
    """Those of one coordinator."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._waiting: dict[str, deque[tuple[int, int]]] = {}  # by id that was asked for: (session, request) of the others
        self._count = 0  # of all those

    def __repr__(self) -> str:
        return f"<ManifestQuestions: {len(self._waiting)} asked, {self._count} wait>"

    def with_manifests(self, message: Register) -> Register | None:
        """With the manifests themselves; None: one of them has to be asked for."""
        find, held = self._cluster.manifests.find, message.held
        mine = message.manifest or (find(message.manifest_id) if message.manifest_id else b"")
        if mine is None:
            return None
        if held is None:
            return replace(message, manifest=mine)
        its = held.manifest or (find(held.manifest_id) if held.manifest_id else b"")
        return None if its is None else replace(message, manifest=mine, held=replace(held, manifest=its))

    def ask(self, session: int, message: Register) -> None:
        """This Register names a manifest that is not known. Sooner or later the rank is told to say it again."""
        cluster, ident = self._cluster, message.manifest_id
        if message.held is not None and (message.manifest or not ident or cluster.manifests.find(ident) is not None):
            ident = message.held.manifest_id
        waiting = self._waiting.get(ident)
        if waiting is not None and self._count < limits.WAIT_FOR_MANIFESTS_MAX:
            waiting.append((session, message.request))
            self._count += 1
            return
        if waiting is None and len(self._waiting) < limits.WAIT_FOR_MANIFESTS_MAX:
            self._waiting[ident] = deque()
            cluster.timers.set("manifest", ident, cluster.now + min(cluster.options.lease_s * ANSWER, ANSWER_S_MAX))
        cluster.send(session, RegisterAgain(message.request, whole=True))

    def came(self, message: Register) -> None:
        """This Register was taken: whoever waits for its manifests need not wait longer."""
        idents = (message.manifest_id, message.held.manifest_id if message.held is not None else "")
        for ident in idents:
            if ident in self._waiting and self._cluster.manifests.find(ident) is not None:
                self._cluster.timers.set("manifest", ident, self._cluster.now)

    def due(self, ident: str) -> None:
        """That manifest is there, or was waited for long enough. A few are told so, and the others in the next steps."""
        waiting, whole = self._waiting[ident], self._cluster.manifests.find(ident) is None
        for _ in range(min(len(waiting), limits.WOKEN_PER_STEP)):
            session, request = waiting.popleft()
            self._count -= 1
            if session in self._cluster.sessions:
                self._cluster.send(session, RegisterAgain(request, whole=whole))
        if waiting:
            self._cluster.timers.set("manifest", ident, nextafter(self._cluster.now, inf))  # not within this step
        else:
            del self._waiting[ident]
