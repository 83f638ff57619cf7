"""Bugs of a coordinator that is behind with reading: it counts on who may have gone, or loses who
is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Worker
from tensorhub.coordinator.membership import Membership
from tensorhub.coordinator.states import WorkerState
from tensorhub.testing import Fault
from tests.testing.bugs import bug, replaced
from tests.testing.bugs.inside import around


@bug(
    "R4: whoever is heard counts, however long that has lain unread: it "
    "may be cut off, and have gone",
    faults=(Fault.BEHIND,),
)
def unread_words_count() -> Iterator[None]:
    def heard(
        before: Callable[..., None], self: Membership, worker: Worker, answers: float
    ) -> None:
        before(self, worker, self._cluster.now)

    with around(Membership, "heard", heard):
        yield


@bug(
    "R4: an echo is not looked at: a worker counts until half a lease after it was heard, and not "
    "after what it answers",
    faults=(Fault.BEHIND,),
)
def answers_not_looked_at() -> Iterator[None]:
    def heard(
        before: Callable[..., None], self: Membership, worker: Worker, answers: float
    ) -> None:
        before(self, worker, answers)
        if worker.state is WorkerState.SUSPECT and worker.session is not None:
            self._cluster.become(worker, WorkerState.LIVE, "heard again")

    counts = replaced(Cluster, "counts_on", lambda self, worker: worker.state is WorkerState.LIVE)
    with around(Membership, "heard", heard), counts:
        yield


@bug(
    "R11: a lease without a word makes a worker lost, though its words lie unread",
    faults=(Fault.BEHIND,),
)
def timer_alone_loses() -> Iterator[None]:
    def look(self: Any, worker: Worker, timer: str) -> None:
        if timer == "worker":
            self._give_up(worker)

    with replaced(Membership, "_look_for", look):
        yield


@bug(
    "R11: how long the end of a connection lay unread is taken for silence",
    faults=(Fault.CRASH, Fault.PARTITION, Fault.BEHIND),
)
def ended_connection_loses() -> Iterator[None]:
    def disconnected(before: Callable[..., None], self: Membership, session: Any) -> None:
        worker = session.worker
        heard_at = worker.heard_at if worker is not None else 0.0
        before(self, session)
        if worker is not None and worker.session is None and worker.state is WorkerState.SUSPECT:
            worker.heard_at = heard_at
            self._set_deadline(worker)

    with around(Membership, "disconnected", disconnected):
        yield


@bug("R11: who is away for a lease is lost, though he waits to be let in", faults=(Fault.BEHIND,))
def nobody_looks_at_the_door() -> Iterator[None]:
    def look(before: Callable[..., None], self: Any, worker: Worker, timer: str) -> None:
        if worker.session is None:
            self._give_up(worker)
        else:
            before(self, worker, timer)

    with around(Membership, "_look_for", look):
        yield
