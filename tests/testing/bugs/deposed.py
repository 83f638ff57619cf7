"""Bugs of leaders that lead no more, of takeovers, and of writes of which nothing is known."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from tensorhub.coordinator import Entry, Persist, PersistFailed, Publication, membership
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.membership import Membership
from tensorhub.messages import Announce, Join
from tensorhub.testing import Fault
from tensorhub.testing.drivers.coordinator_process import CoordinatorProcess
from tensorhub.testing.sim.terms import Deposed, FencedStore, Term
from tensorhub.testing.sim.world import World
from tensorhub.worker.newest_told import NewestTold
from tests.testing.bugs import bug, replaced
from tests.testing.bugs.inside import around

OLDER = (Fault.OLDER_STATE, Fault.CUT)
DOUBT = (Fault.STORE_DOUBT, Fault.CUT)
SPLIT = (Fault.SPLIT, Fault.CUT, Fault.CANCEL)
UNSURE = (Fault.STORE_UNSURE, Fault.FAILOVER, Fault.CUT)


@bug("G9: the store takes what a deposed leader writes", faults=SPLIT)
def deposed_leader_writes() -> Iterator[None]:
    with replaced(FencedStore, "write", lambda self, epoch, entry: self.append(entry)):
        yield


@bug("G9: a deposed leader takes a refused write for done", faults=SPLIT)
def refused_write_is_done() -> Iterator[None]:
    def keep(before: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(Deposed):
            before(*args)

    with around(World, "keep", keep):
        yield


@bug(
    "G3: a leader that wakes up takes what has come meanwhile before it looks at its clock",
    faults=SPLIT,
)
def woken_leader_does_not_look() -> Iterator[None]:
    with replaced(CoordinatorProcess, "_is_over", lambda self, term: False):
        yield


@bug("G9: a takeover keeps the epoch of the leader before", faults=(Fault.FAILOVER, *SPLIT))
def takeover_keeps_the_epoch() -> Iterator[None]:
    def begin(self: FencedStore) -> tuple[int, list[Entry]]:
        self.epoch = 1
        return max(1, len(self) and 2), list(self)

    with replaced(FencedStore, "begin", begin):
        yield


@bug("G3: a takeover reads a copy that lacks the last records", faults=(Fault.FAILOVER, *SPLIT))
def takeover_reads_a_stale_copy() -> Iterator[None]:
    def begin(before: Callable[..., Any], self: FencedStore) -> tuple[int, list[Entry]]:
        epoch, found = before(self)
        return epoch, found[:-2]

    with around(FencedStore, "begin", begin):
        yield


@bug("G4: a write of which nothing is known is reported as failed", faults=UNSURE)
def unknown_write_has_failed() -> Iterator[None]:
    def lost(self: Any, persist: Persist, term: Term, late_s: float) -> None:
        del term.unstored[persist.record]
        self._world.step(PersistFailed(persist.record, "timeout"), term)

    with replaced(CoordinatorProcess, "_reply_is_lost", lost):
        yield


@bug("G4: of a split batch a commit record is durable before its publication", faults=UNSURE)
def part_of_a_publication_is_kept() -> Iterator[None]:
    def died(before: Callable[..., None], self: World, *, kept: float) -> None:
        running = list(self.unstored.values())
        before(self, kept=kept)
        for entry in (persist.entry for persist in running[round(kept * len(running)) :]):
            if isinstance(entry, Publication):
                self.keep(entry.decision())

    with around(World, "coordinator_died", died):
        yield


@bug("G3: a deposed leader welcomes a worker that its successor has welcomed", faults=SPLIT)
def worker_of_a_later_epoch_welcomed() -> Iterator[None]:
    def join(before: Callable[..., None], self: Any, session: Any, message: Join) -> None:
        before(self, session, replace(message, cluster="", epoch=0))

    with around(Membership, "join", join):
        yield


@bug(
    "G3: a coordinator on an older copy of its state heeds no worker that remembers more",
    faults=OLDER,
)
def older_state_is_not_noticed() -> Iterator[None]:
    with replaced(Cluster, "outlived", lambda self, reason: None):
        yield


@bug("G3: a read-only worker believes an older copy of the state", faults=OLDER, READERS_DRAWN=1.0)
def reader_believes_an_older_state() -> Iterator[None]:
    def goes_back(before: Callable[..., bool], self: NewestTold, message: Announce) -> bool:
        return before(self, message) and False

    with around(NewestTold, "goes_back", goes_back):
        yield


@bug("R6: an older copy of the state lacks a commit, and no rank says so", faults=OLDER)
def commit_is_not_remembered() -> Iterator[None]:
    with replaced(membership, "beyond_decisions", lambda cluster, message: None):
        yield


@bug("R2: a write that has failed, and may be durable, is taken for not written", faults=DOUBT)
def doubtful_write_is_forgotten() -> Iterator[None]:
    def failed(self: CoordinatorProcess, persist: Persist, term: Term) -> None:
        del term.unstored[persist.record]
        self._world.step(PersistFailed(persist.record, "disk full"), term)

    with replaced(CoordinatorProcess, "_is_in_doubt", failed):
        yield
