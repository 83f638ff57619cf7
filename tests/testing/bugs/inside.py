"""Bugs by somebody who has read the checks, and tries to slip past them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from tensorhub.coordinator import Coordinator, fills
from tensorhub.coordinator.access import Access
from tensorhub.coordinator.cluster import Session
from tensorhub.coordinator.corruption_checks import CorruptionChecks
from tensorhub.coordinator.decisions import Decisions
from tensorhub.coordinator.entities import (
    Group,
    Handover,
    Holding as Held,
    Member,
    Model,
    Operation,
    RankPart,
    ReadLease,
    Version,
    Worker,
)
from tensorhub.coordinator.fills import Fills
from tensorhub.coordinator.handovers import Handovers
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.membership import Membership
from tensorhub.coordinator.publishes import Lineages
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.states import PartState
from tensorhub.coordinator.testimonies import Testimonies
from tensorhub.coordinator.versions import Versions
from tensorhub.messages import Join, Outcome, Register, Revoked, Start, Write
from tensorhub.scheduler.pull import Pull, SourceState
from tensorhub.scheduler.requests import Requests
from tensorhub.testing import Fault
from tensorhub.types import Purpose
from tensorhub.worker.active_call import GroupCall
from tensorhub.worker.budget import OUTRANKS, Budget
from tensorhub.worker.heartbeats import Heartbeats
from tensorhub.worker.host_copies import HostCopies
from tensorhub.worker.leases import Leases
from tensorhub.worker.local_copying import Copier
from tensorhub.worker.member import Member as Rank
from tensorhub.worker.owner import Owner
from tensorhub.worker.registration_session import RegistrationSession
from tensorhub.worker.router import Router
from tests.testing.bugs import bug, replaced


def around(owner: Any, name: str, wrap: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`owner.name(...)` is `wrap(that, ...)`."""
    before = getattr(owner, name)
    return replaced(owner, name, lambda *args, **named: wrap(before, *args, **named))


def nothing(*_: Any, **__: Any) -> None:
    """What was forgotten."""


# -- membership and epochs


@bug("G7: a group's epoch changes, and its ranks are not told")
def epoch_told_to_nobody() -> Iterator[None]:
    def change(self: Any, group: Group) -> None:
        self._cluster.note(group)
        group.epoch, group.sequence = self._cluster.mint_epoch(), 0

    with replaced(Membership, "_change_epoch", change):
        yield


@bug(
    "G9: a coordinator that comes back mints the epochs of the one before it again",
    faults=(Fault.COORDINATOR, Fault.CRASH, Fault.RESTART, Fault.CANCEL),
)
def epochs_minted_again() -> Iterator[None]:
    def make(before: Callable[..., None], self: Any, **named: Any) -> None:
        before(self, **named)
        self.cluster.epoch, self.cluster.epochs_minted = 1, 1 << 32

    with around(Coordinator, "__init__", make):
        yield


@bug("R6: a decided operation's number is still the group's next one")
def sequence_one_behind() -> Iterator[None]:
    def close(
        before: Callable[..., None], self: Any, operation: Operation, outcomes: dict[int, Outcome]
    ) -> None:
        before(self, operation, outcomes)
        if operation.key.epoch == operation.group.epoch:
            operation.group.sequence = operation.key.sequence

    with around(Decisions, "_close", close):
        yield


@bug(
    "R6: within an epoch, a rank's sequence goes back to what the coordinator has heard of: a key "
    "is taken twice"
)
def key_taken_twice() -> Iterator[None]:
    def move(self: Any, epoch: int, sequence: int) -> None:
        self._epoch, self._sequence = epoch, sequence

    with replaced(RegistrationSession, "_move_to", move):
        yield


# -- decisions


@bug("G9: a word about an older operation is heeded by the call that runs now")
def late_word_heeded() -> Iterator[None]:
    def receive(before: Callable[..., Any], self: Rank, message: Any, now: float) -> Any:
        call = self.running
        if (
            isinstance(message, Start | Write | Outcome)
            and call is not None
            and call.key is not None
        ):
            message = replace(message, key=call.key)
        return before(self, message, now)

    with around(Rank, "receive", receive):
        yield


@bug(
    "G4: a rank that has voted, and hears nothing, takes it for an abort",
    faults=(Fault.COORDINATOR, Fault.STORE_SLOW, Fault.HASTE, Fault.DROP),
)
def doubt_taken_for_abort() -> Iterator[None]:
    def doubt(self: Any, error: Exception) -> None:
        self.aborted(error)

    with replaced(GroupCall, "_doubt", doubt):
        yield


# -- versions


@bug("R1: the number of a publication that was refused counts as used")
def refused_number_stays_used() -> Iterator[None]:
    def discard(before: Callable[..., None], self: Any, version: Version, model: Model) -> None:
        before(self, version, model)
        model.mark = max(version.number, -1 if model.mark is None else model.mark)

    with around(Versions, "discard", discard):
        yield


@bug("G3: a version that nobody holds does not count as the newest")
def latest_falls_back() -> Iterator[None]:
    def newest(self: Model, skip: int = 0) -> Version | None:
        numbers = sorted(
            (v.number for v in self.versions.values() if v.visible and v.has_live_source()),
            reverse=True,
        )
        return self.versions[numbers[skip]] if len(numbers) > skip else None

    with replaced(Model, "newest_visible", newest):
        yield


@bug(
    "R12: `available` replaces what a rank holds by an older version",
    faults=(Fault.CRASH, Fault.RESTART, Fault.PREEMPT),
)
def available_goes_below() -> Iterator[None]:
    def resolve(
        before: Callable[..., Any], self: Any, operation: Operation, at_least: int | None
    ) -> Version | None:
        model = operation.group.model
        readable = sorted(
            (v.number for v in model.versions.values() if v.visible and v.can_be_read()),
            reverse=True,
        )
        return model.versions[readable[-1]] if readable else before(self, operation, at_least)

    with around(Versions, "available", resolve):
        yield


@bug("R12: `available` is an older version where the newest is held once only")
def available_skips_what_is_held_once() -> Iterator[None]:
    def newest(
        before: Callable[..., Any], self: Any, operation: Operation, least: int
    ) -> tuple[Version | None, bool]:
        found, waits = before(self, operation, least)
        if found is None or found.holdings.copies() != 1:
            return found, waits
        older = (
            v
            for v in operation.group.model.visible
            if least <= v.number < found.number and v.can_be_read()
        )
        return next(older, found), waits

    with around(Versions, "_newest_readable", newest):
        yield


@bug(
    "R12: after a restart `available` waits for nobody who is recorded to hold a newer one",
    faults=(Fault.COORDINATOR,),
)
def available_before_holders_are_back() -> Iterator[None]:
    with replaced(Versions, "_may_come_back", lambda self, version: False):
        yield


@bug("G7: watchers are not told when a rollback makes an older version the newest")
def watchers_not_told() -> Iterator[None]:
    def refresh(before: Callable[..., None], self: Any, model: Model) -> None:
        watchers, self._cluster.watchers = self._cluster.watchers, {}
        try:
            before(self, model)
        finally:
            self._cluster.watchers = watchers

    with around(Versions, "refresh", refresh):
        yield


# -- readers


@bug(
    "G7: a source that has failed once is never looked at again",
    faults=(Fault.CORRUPT, Fault.PARTITION, Fault.STALL),
)
def retry_lost() -> Iterator[None]:
    with replaced(Readers, "set_retry_timer", nothing):
        yield


@bug("G7: a reader does not report that a source has failed")
def failure_not_reported() -> Iterator[None]:
    def failed(
        before: Callable[..., None],
        self: Any,
        lane: str,
        reason: str,
        detail: str,
        chunk: int | None,
    ) -> None:
        if reason == "dropped":
            before(self, lane, reason, detail, chunk)
        else:
            lease = next((lease for lease, name in self._lane_names.items() if name == lane), None)
            if lease is not None:
                del self._lanes[lease], self._lane_names[lease]

    with around(Leases, "failed", failed):
        yield


@bug("G7: a lease is left: the owner's word that a reader is cut is not heeded")
def fenced_lease_leaks() -> Iterator[None]:
    def confirm(before: Callable[..., None], self: Any, lease: ReadLease, why: str) -> None:
        if not why.startswith("the owner has cut"):
            before(self, lease, why)

    with around(Readers, "confirm_fenced", confirm):
        yield


@bug("R9: a complete source's loss does not make its readers complete one another", seeds_max=400)
def readers_not_reconsidered() -> Iterator[None]:
    def leave(
        before: Callable[..., None], self: Any, holding: Held, why: str, **named: Any
    ) -> None:
        version = holding.version
        with replaced(version, "bound", {}):
            before(self, holding, why, **named)

    with around(Holdings, "leave", leave):
        yield


# -- suspicions


@bug(
    "R8: an owner whose bytes have changed says that they have not",
    faults=(Fault.OVERWRITE, Fault.CUT, Fault.PAUSE),
)
def change_denied() -> Iterator[None]:
    def again(
        before: Callable[..., Any],
        self: Any,
        inquiry: str,
        generation: int,
        changed: bool | None,
        *more: Any,
        **named: Any,
    ) -> Any:
        return before(self, inquiry, generation, changed and False, *more, **named)

    with around(Rank, "digested_again", again):
        yield


@bug("R8: nobody asks an owner whose reader got other bytes", faults=(Fault.OVERWRITE,))
def owner_never_asked() -> Iterator[None]:
    with replaced(CorruptionChecks, "ask", nothing):
        yield


@bug(
    "R8: a vote counts, whatever digests its publisher has made",
    faults=(Fault.LIE, Fault.CRASH, Fault.RESTART),
)
def vote_not_compared() -> Iterator[None]:
    def settle(self: Any, operation: Operation) -> None:
        for part in operation.parts.values():
            if part.state is PartState.CLAIMING:
                self._accept(part)

    with replaced(Testimonies, "settle", settle):
        yield


@bug(
    "R8: what a reader finds to be other than published is not taken from those who read it there",
    faults=(Fault.LIE,),
)
def wrong_chunks_served_on() -> Iterator[None]:
    def revoke(self: Any, registration: Any, generation: int, chunks: Any) -> frozenset[int]:
        return frozenset()

    with replaced(Owner, "revoke", revoke):
        yield


# -- retention and handovers


@bug("R4: a holder that is told with its outcome counts as one that knows, and is not told")
def retained_not_restated() -> Iterator[None]:
    def tell(before: Callable[..., bool], self: Any, member: Member, content_id: str) -> bool:
        if before(self, member, content_id) and member.holding is not None:
            member.group.model.notices.unaware.pop(member.registration, None)
        return False

    with around(Retentions, "tell_with", tell):
        yield


@bug("R4: `retain` returns before every holder knows")
def retain_returns_early() -> Iterator[None]:
    def settle(before: Callable[..., None], self: Any, model: Model) -> None:
        before(self, model)
        for order in model.notices.unanswered:
            self._cluster.answer(order.session, order.message.request)
        model.notices.unanswered.clear()

    with around(Retentions, "settle", settle):
        yield


@bug("G7: a worker that could not make a copy is never asked again")
def handover_never_retried() -> Iterator[None]:
    def fail(before: Callable[..., None], self: Any, model: Model, handover: Handover) -> None:
        before(self, model, handover)
        failures, _ = handover.version.refusals[handover.shard, handover.worker.incarnation]
        handover.version.refusals[handover.shard, handover.worker.incarnation] = (
            failures,
            float("inf"),
        )

    with around(Handovers, "_fail", fail):
        yield


@bug("G7: a copy that is not needed any more is not dropped")
def copies_never_dropped() -> Iterator[None]:
    with replaced(Handovers, "_settle_copy", nothing):
        yield


@bug("G5: two last holders may both leave: who wants to leave still counts")
def draining_counts() -> Iterator[None]:
    def is_source(self: Held) -> bool:
        return self.committed and self.member.worker.state.value != "lost"

    with replaced(Held, "is_source", property(is_source)):
        yield


# -- the owner


@bug("R8: digests are kept when the memory is opened with other bytes")
def digests_kept() -> Iterator[None]:
    def open_(
        before: Callable[..., None],
        self: Any,
        registration: Any,
        generation: int,
        content_id: Any,
        sizes: Sequence[int],
        **named: Any,
    ) -> None:
        old = self._memories.get(registration)
        if old is not None and named["complete"] and len(old.own.sizes) == len(sizes):
            named["digests"] = old.own.digests
        before(self, registration, generation, content_id, sizes, **named)

    with around(Owner, "open", open_):
        yield


# -- the pull


@bug(
    "G8: what is in flight at a source that is dropped is wanted again at once, though its lane "
    "may still write it"
)
def chunk_given_to_two_lanes() -> Iterator[None]:
    def drop(before: Callable[..., None], self: Any, lease: Any) -> None:
        before(self, lease)
        source = self._sources[lease]
        if source.state is SourceState.LEAVING:
            for chunk in source.in_flight:
                self._states[chunk] = 0
                self._lowest = min(self._lowest, chunk)

    with around(Pull, "drop_source", drop):
        yield


@bug("G7: a bad chunk is not asked for again")
def bad_chunk_given_up() -> Iterator[None]:
    def again(before: Callable[..., None], self: Any, source: Any, chunk: int) -> None:
        before(self, source, chunk)
        self._lowest = max(self._lowest, chunk + 1)

    with around(Pull, "_want_again", again):
        yield


# -- failures, blame and readers, by what was not looked at before


@bug("R2: a pin of a version that was rolled back goes on")
def pin_outlives_rollback() -> Iterator[None]:
    def record(before: Callable[..., None], self: Any, order: Any) -> None:
        pins = dict(order.model.pins)
        before(self, order)
        order.model.pins.update(pins)

    with around(Lineages, "recorded", record):
        yield


@bug(
    "R8: quarantined memory counts again once its worker has reconnected",
    faults=(Fault.OVERWRITE, Fault.CUT),
)
def quarantine_lifted() -> Iterator[None]:
    def again(
        before: Callable[..., None],
        self: Membership,
        member: Member,
        message: Register,
        *more: Any,
    ) -> None:
        lifted = [holding for holding in member.leaving if holding.trust.quarantined]
        if not lifted:
            before(self, member, message, *more)
            return
        for holding in lifted:
            member.leaving.remove(holding)
            member.holding, holding.leaving, holding.trust.quarantined = holding, False, False
            holding.version.holdings.add(holding, member.said.nbytes, member.said.chunks)
            self._cluster.reckon(holding)
        self._cluster.touch(member.group.model)
        member.said_in = member.worker.session
        self._tell_registered(member, message, True)

    with around(Membership, "_register_again", again):
        yield


@bug(
    "G7: a lease is left: a fill that was begun under a former coordinator "
    "ends, and its leases do not",
    faults=(Fault.COORDINATOR, Fault.SLOW, Fault.STALL),
)
def resumed_fill_keeps_leases() -> Iterator[None]:
    def release(before: Callable[..., None], self: Readers, part: RankPart, why: str) -> None:
        if part.begun is None:
            before(self, part, why)

    with around(Readers, "release_all", release):
        yield


@bug(
    "R8: an owner that was asked, and whose answer was lost, is not asked again",
    faults=(Fault.OVERWRITE, Fault.CORRUPT),
)
def asked_once_only() -> Iterator[None]:
    def ask(
        before: Callable[..., None],
        self: CorruptionChecks,
        part: RankPart,
        holding: Held,
        chunk: int,
        *more: Any,
    ) -> None:
        if not holding.trust.inquiries:
            before(self, part, holding, chunk, *more)

    with around(CorruptionChecks, "ask", ask):
        yield


@bug(
    "R8: that one source was cleared counts for all: a reader is the guilty one at once",
    faults=(Fault.CORRUPT,),
)
def cleared_at_once() -> Iterator[None]:
    with replaced(fills, "EXONERATED_MAX", 1):
        yield


@bug(
    "R5: nobody notes that a worker has spot memory: its host memory takes copies, and counts",
    faults=(Fault.PREEMPT, Fault.CRASH, Fault.RESTART),
)
def spot_worker_not_noted() -> Iterator[None]:
    with replaced(Worker, "spot", property(lambda self: False, lambda self, value: None)):
        yield


@bug(
    "G9: a Join that comes late, over a connection that its worker has given up, takes the newer "
    "one's place",
    faults=(Fault.REORDER, Fault.DELAY, Fault.DROP),
)
def late_join_heeded() -> Iterator[None]:
    def join(
        before: Callable[..., None], self: Membership, session: Session, message: Join
    ) -> None:
        worker = self._cluster.workers.get(session.incarnation)
        if worker is not None and worker.session is not None and worker.session > session.number:
            self.disconnected(self._cluster.sessions[worker.session])
        before(self, session, message)

    with around(Membership, "join", join):
        yield


# -- the worker's router


@bug("G4, G7: a worker tells the ranks of all its groups what is said of one group's operation")
def told_whatever_the_group() -> Iterator[None]:
    def rank_at(self: Any, model: str, group: str, rank: int) -> Any:
        here = [there for (_, _, number), there in self._at.items() if number == rank]
        return self.handles.get(here[-1]) if here else None

    with replaced(Router, "rank_at", rank_at):
        yield


@bug("G3: a worker drops what is ordered out of a memory that it holds")
def ordered_out_of_nowhere() -> Iterator[None]:
    def route(before: Any, router: Any, message: Any) -> Any:
        return [] if isinstance(message, Revoked) else before(router, message)

    with around(Router, "route", route):
        yield


@bug("G7: what a worker has asked before a new session is taken for its answer, whoever asks then")
def answered_by_the_newest() -> Iterator[None]:
    def answer(self: Any, request: int) -> Any:
        there = self._asked.pop(request, "")
        return self.handles.get(there and next(reversed(self.handles)))

    with replaced(Router, "_answer", answer):
        yield


# -- host copies and their budget


@bug("R5: room is reserved whatever other copies have reserved")
def room_reserved_twice() -> Iterator[None]:
    with (
        replaced(Budget, "_missing", lambda self, ident, nbytes: 0),
        replaced(Budget, "check_invariants", nothing),
    ):
        yield


@contextmanager
def newest_copy_goes() -> Iterator[None]:
    """R5: of the copies that may have to make room, the newest one goes. Seeds hardly ever have two
    of them.
    """

    def plan(before: Callable[..., Any], self: Any, *asked: Any) -> Any:
        oldest_first, self._reserved = self._reserved, dict(reversed(self._reserved.items()))
        try:
            return before(self, *asked)
        finally:
            self._reserved = oldest_first

    with around(Budget, "plan", plan):
        yield


@bug("R5: a copy has to make room although there is some")
def copy_goes_needlessly() -> Iterator[None]:
    def plan(before: Callable[..., Any], self: Any, ident: str, purpose: Any, nbytes: int) -> Any:
        lower = [
            other
            for other, has in self._reserved.items()
            if other != ident and has.purpose in OUTRANKS[purpose]
        ]
        return before(self, ident, purpose, nbytes) or tuple(lower[:1])

    with around(Budget, "plan", plan):
        yield


@bug("R5: what is only prefetched takes the room of what was prefetched before")
def prefetch_takes_room() -> Iterator[None]:
    with patch.dict(OUTRANKS, {Purpose.PREFETCH: frozenset({Purpose.PREFETCH})}):
        yield


@contextmanager
def copy_has_no_leave() -> Iterator[None]:
    """R5: a handle that is closed takes its host copy along, which has no leave of its own. In
    seeds that copy is hardly ever the last holder of what is retained.
    """

    def close_copies(before: Callable[..., Any], self: Any, _: Any, until: float) -> Any:
        return before(self, None, until)

    with around(HostCopies, "_close_copies", close_copies):
        yield


# -- what the runtime's lanes, links and copies share with the simulated ones


@bug(
    "R8: what has arrived with another digest than its source has told counts as verified",
    faults=(Fault.CORRUPT,),
)
def damaged_chunk_counts() -> Iterator[None]:
    def sort_out(arrived: Any, made: Any, published: Any, *, is_digested: bool) -> Any:
        return [*arrived], []

    with replaced(Requests, "sort_out", staticmethod(sort_out)):
        yield


@bug(
    "R9: of what a host copy had, all that was asked of it counts as copied",
    faults=(Fault.CANCEL, Fault.CRASH, Fault.CORRUPT),
)
def whatever_was_asked_for_is_copied() -> Iterator[None]:
    def copy(before: Any, self: Any, sources: Any, count: int, there: frozenset[int]) -> Any:
        found = before(self, sources, count, there)
        return frozenset(range(count)) if found - there else found

    with around(Copier, "copy", copy):
        yield


@bug("G7: a worker does not give up a connection in which nothing comes back", faults=(Fault.DROP,))
def silence_is_not_noticed() -> Iterator[None]:
    with replaced(Heartbeats, "is_in_vain", lambda self: False):
        yield


@bug(
    "G5: a seed takes the next version although it alone keeps one that is retained",
    SEEDERS_DRAWN=1.0,
)
def seed_gives_up_what_is_retained() -> Iterator[None]:
    def staying(
        before: Callable[..., list[Held]], self: Fills, operation: Operation, version: Version
    ) -> list[Held]:
        seeds = all(part.member.said.purpose is Purpose.SEED for part in operation.parts.values())
        return [] if seeds else before(self, operation, version)

    with around(Fills, "staying", staying):
        yield


@bug("G10: at their cap read-only sessions take a full worker's place", READERS_DRAWN=1.0)
def read_only_session_takes_a_full_one() -> Iterator[None]:
    def end(before: Callable[..., None], self: Access, session: Session, error: object) -> None:
        others = self._cluster.sessions.values()
        before(self, next((each for each in others if not each.read_only), session), error)

    with around(Access, "_end", end):
        yield
