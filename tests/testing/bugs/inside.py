"""Bugs by somebody who has read the checks, and tries to slip past them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from typing import Any

from tensorhub.coordinator import Coordinator
from tensorhub.coordinator.custody import Custody
from tensorhub.coordinator.decisions import Decisions
from tensorhub.coordinator.entities import Group, Handover, Member, Model, Operation, RankPart, ReadLease, Version
from tensorhub.coordinator.entities import Holding as Held
from tensorhub.coordinator.fills import Fills
from tensorhub.coordinator.membership import Membership
from tensorhub.coordinator.operations import Operations
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.suspicions import Suspicions
from tensorhub.coordinator.versions import Versions
from tensorhub.coordinator.withdrawals import Withdrawals
from tensorhub.messages import Outcome, Start, Write
from tensorhub.scheduler.pull import Pull, SourceState
from tensorhub.testing import Fault
from tensorhub.types import OpKind
from tensorhub.worker.calls import FreeStaging
from tensorhub.worker.copies import Beside
from tensorhub.worker.enrolment import Enrolment
from tensorhub.worker.filling import Filling
from tensorhub.worker.holding import Content, Holding
from tensorhub.worker.leaving import Leaving
from tensorhub.worker.member import Member as Rank
from tensorhub.worker.owner import Access, Owner
from tensorhub.worker.running import GroupCall, Running
from tests.testing.bugs import bug, replaced


def around(owner: Any, name: str, wrap: Callable[..., Any]) -> AbstractContextManager[Any]:
    """`owner.name(...)` is `wrap(that, ...)`."""
    before = getattr(owner, name)
    return replaced(owner, name, lambda *args, **named: wrap(before, *args, **named))


def nothing(*_: Any, **__: Any) -> None:
    """What was forgotten."""


# -- membership and epochs


@bug("R6: a rank is replaced, and its group's epoch stays: what was said of the old rank counts for the new one")
def same_epoch_after_a_loss() -> Iterator[None]:
    with replaced(Membership, "_change_epoch", nothing):
        yield


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
    def close(before: Callable[..., None], self: Any, operation: Operation, outcomes: dict[int, Outcome]) -> None:
        before(self, operation, outcomes)
        if operation.key.epoch == operation.group.epoch:
            operation.group.sequence = operation.key.sequence

    with around(Decisions, "_close", close):
        yield


@bug("R6: within an epoch, a rank's sequence goes back to what the coordinator has heard of: a key is taken twice")
def key_taken_twice() -> Iterator[None]:
    def move(self: Any, epoch: int, sequence: int) -> None:
        self._epoch, self._sequence = epoch, sequence

    with replaced(Enrolment, "_move_to", move):
        yield


# -- decisions


@bug("R6: what several ranks agree on is not recorded", faults=(Fault.COORDINATOR, Fault.CUT, Fault.DELAY))
def decision_not_recorded() -> Iterator[None]:
    with replaced(Fills, "entry", lambda self, operation: None):
        yield


@bug("R6: a fill of two ranks is not recorded; larger ones are")
def decision_of_pairs_not_recorded() -> Iterator[None]:
    with replaced(Fills, "entry", lambda self, operation: operation.decision() if operation.group.world_size > 2 else None):
        yield


@bug("G9: a word about an older operation is heeded by the call that runs now")
def late_word_heeded() -> Iterator[None]:
    def receive(before: Callable[..., Any], self: Rank, message: Any, now: float) -> Any:
        call = self.running
        if isinstance(message, Start | Write | Outcome) and call is not None and call.key is not None:
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


@bug("R6: a rank that asks late is told that it was aborted, if its group was dissolved since")
def records_forgotten() -> Iterator[None]:
    with replaced(Decisions, "_recorded", lambda self, model, key: None):
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
        numbers = sorted((v.number for v in self.versions.values() if v.visible and v.has_live_source()), reverse=True)
        return self.versions[numbers[skip]] if len(numbers) > skip else None

    with replaced(Model, "newest_visible", newest):
        yield


@bug("G7: watchers are not told when a rollback makes an older version the newest")
def watchers_not_told() -> Iterator[None]:
    def refresh(before: Callable[..., None], self: Any, model: Model) -> None:
        watchers, model.watchers = model.watchers, set()
        try:
            before(self, model)
        finally:
            model.watchers = watchers

    with around(Versions, "refresh", refresh):
        yield


@bug("R2: a rollback leaves pins of what it retires")
def rolled_back_pin_stays() -> Iterator[None]:
    def recover(before: Callable[..., None], self: Any, pins: Iterable[Any]) -> None:
        before(self, [])

    with around(Retentions, "recover", recover):
        yield


# -- readers


@bug("G7: a source that has failed once is never looked at again")
def retry_lost() -> Iterator[None]:
    with replaced(Readers, "set_retry_timer", nothing):
        yield


@bug("G7: a reader does not report that a source has failed")
def failure_not_reported() -> Iterator[None]:
    def failed(before: Callable[..., None], self: Any, lane: str, reason: str, detail: str, chunk: int | None) -> None:
        if reason == "dropped":
            before(self, lane, reason, detail, chunk)
        else:
            lease = next((lease for lease, name in self._lane_names.items() if name == lane), None)
            if lease is not None:
                del self._lanes[lease], self._lane_names[lease]

    with around(Filling, "source_failed", failed):
        yield


@bug("G7: a reader reports every failure but that a source refuses it")
def refusal_not_reported() -> Iterator[None]:
    def failed(before: Callable[..., None], self: Any, lane: str, reason: str, detail: str, chunk: int | None) -> None:
        if reason != "refused":
            before(self, lane, reason, detail, chunk)

    with around(Filling, "source_failed", failed):
        yield


@bug("a lease: the owner's word that a reader is cut is not heeded")
def fenced_lease_leaks() -> Iterator[None]:
    def confirm(before: Callable[..., None], self: Any, lease: ReadLease, why: str) -> None:
        if not why.startswith("the owner has cut"):
            before(self, lease, why)

    with around(Readers, "confirm_fenced", confirm):
        yield


@bug("G7: while nobody holds all of it, only the first reader may read from the others")
def patches_for_one_reader() -> Iterator[None]:
    def patches(before: Callable[..., list[Held]], self: Any, part: RankPart, version: Version) -> list[Held]:
        there = version.holdings[part.shard]
        return before(self, part, version) if there and there[0] is part.holding else []

    with around(Readers, "_patches", patches):
        yield


@bug("R9: a complete source's loss does not make its readers complete one another")
def readers_not_reconsidered() -> Iterator[None]:
    with replaced(Readers, "_reconsider_readers", nothing):
        yield


@bug("R9: a reader may be sent to one that is filled from itself")
def wait_cycle() -> Iterator[None]:
    with replaced(Readers, "_reads_from", lambda holding, part: False):
        yield


# -- suspicions


@bug("R8: quarantine is lifted by connecting again")
def quarantine_lifted() -> Iterator[None]:
    def restate(before: Callable[..., None], self: Holding) -> None:
        content = self.content
        spoiled = content is not None and content.spoiled
        if content is not None:
            content.spoiled = False
        before(self)
        if content is not None:
            content.spoiled = spoiled

    with around(Holding, "restate", restate):
        yield


@bug("R8: an owner whose bytes have changed says that they have not", faults=(Fault.OVERWRITE, Fault.CUT, Fault.PAUSE))
def change_denied() -> Iterator[None]:
    def again(before: Callable[..., Any], self: Any, inquiry: str, generation: int, changed: bool | None, *more: Any) -> Any:
        return before(self, inquiry, generation, changed and False, *more)

    with around(Rank, "digested_again", again):
        yield


@bug("R8: nobody asks an owner whose reader got other bytes")
def owner_never_asked() -> Iterator[None]:
    with replaced(Suspicions, "ask", nothing):
        yield


# -- retention and custody


@bug("R4: a holder that is told with its outcome counts as one that knows, and is not told")
def retained_not_restated() -> Iterator[None]:
    def tell(before: Callable[..., bool], self: Any, member: Member, content_id: str) -> bool:
        if before(self, member, content_id) and member.holding is not None:
            member.holding.kept = True
        return False

    with around(Retentions, "tell_with", tell):
        yield


@bug("R4: `retain` returns before every holder knows")
def retain_returns_early() -> Iterator[None]:
    def settle(before: Callable[..., None], self: Any, model: Model) -> None:
        before(self, model)
        for order in model.unanswered:
            self._cluster.answer(order.session, order.message.request)
        model.unanswered.clear()

    with around(Retentions, "settle", settle):
        yield


@bug("R4: a holder counts before it has accepted that")
def counts_before_kept() -> Iterator[None]:
    with replaced(Retentions, "is_reliable", lambda self, holding: self.may_count(holding)):
        yield


@bug("R4: a spot rank makes only itself unreliable, not its group")
def spot_rank_only() -> Iterator[None]:
    def may(holding: Held) -> bool:
        member = holding.member
        spot = member.worker.spot if member.purpose.value == "retention" else member.spot
        return holding.is_source and not spot and member.worker.state.value == "live"

    with replaced(Retentions, "may_count", staticmethod(may)):
        yield


@bug("R5: a worker's own copy satisfies its close()")
def own_copy_satisfies_close() -> Iterator[None]:
    def alone(before: Callable[..., Any], self: Any, holding: Held, going: Any) -> Any:
        return before(self, holding, None)

    with around(Retentions, "alone", alone):
        yield


@bug("R4: a handover ends when the copy is registered")
def handover_ends_early() -> Iterator[None]:
    def settle(before: Callable[..., None], self: Any, model: Model, handover: Handover) -> None:
        if handover.copy in self._cluster.members:
            self._forget(model, handover)
        else:
            before(self, model, handover)

    with around(Custody, "_settle_handover", settle):
        yield


@bug("G7: custody has as much time again and again, without progress")
def handover_extended_for_ever() -> Iterator[None]:
    def due(self: Any, copy: str) -> None:
        for _, handover in self._handovers():
            if handover.copy == copy:
                self._set_deadline(handover)

    with replaced(Custody, "due", due):
        yield


@bug("G7: custody forgets that an attempt has failed, and makes no other")
def failed_attempt_forgotten() -> Iterator[None]:
    with replaced(Custody, "refused", nothing):
        yield


@bug("R4: custody forgets which attempts are under way, and begins others")
def attempts_forgotten() -> Iterator[None]:
    def grant(before: Callable[..., None], self: Any, model: Model, wish: Any) -> None:
        under_way, model.handovers = model.handovers, {}
        try:
            before(self, model, wish)
        finally:
            model.handovers = {**under_way, **model.handovers}

    with around(Custody, "_grant", grant):
        yield


@bug("G7: a worker that could not make a copy is never asked again")
def custody_never_retried() -> Iterator[None]:
    def fail(before: Callable[..., None], self: Any, model: Model, handover: Handover) -> None:
        before(self, model, handover)
        failures, _ = handover.version.refusals[handover.shard, handover.worker.incarnation]
        handover.version.refusals[handover.shard, handover.worker.incarnation] = failures, float("inf")

    with around(Custody, "_fail", fail):
        yield


@bug("G7: a copy that is not needed any more is not dropped")
def copies_never_dropped() -> Iterator[None]:
    with replaced(Custody, "_settle_copy", nothing):
        yield


@bug("G5: two last holders may both leave: who wants to leave still counts")
def draining_counts() -> Iterator[None]:
    def is_source(self: Held) -> bool:
        return self.committed and self.member.worker.state.value != "lost"

    with replaced(Held, "is_source", property(is_source)):
        yield


# -- leaving


@bug("G7: the coordinator's answer to a wish to leave never comes: its deadline is set again")
def withdrawal_extended_for_ever() -> Iterator[None]:
    def due(before: Callable[..., None], self: Any, registration: str) -> None:
        member = self._cluster.members.get(registration)
        withdrawal = member.group.model.withdrawals.get(registration) if member is not None else None
        if withdrawal is None or withdrawal.begun:
            before(self, registration)
        else:
            withdrawal.deadline += 10.0
            self._cluster.timers.set("withdrawal", registration, withdrawal.deadline)

    with around(Withdrawals, "due", due):
        yield


@bug("R4: who is cut off leaves at once, whatever it knows to be retained")
def cut_off_leaves_at_once() -> Iterator[None]:
    with replaced(Leaving, "_free_at", lambda self: float("-inf")):
        yield


@bug("R4: who is cut off waits for its lease without the margin, and counts it from its beginning")
def lease_over_too_early() -> Iterator[None]:
    def disconnected(before: Callable[..., None], self: Any, now: float) -> None:
        before(self, now)
        self.lease_over = now + self._lease_s / 4

    with around(Enrolment, "disconnected", disconnected):
        yield


@bug("R4: a host copy that is going itself counts as one that stays")
def any_copy_keeps() -> Iterator[None]:
    def keep(self: Beside, content_id: str) -> bool:
        return any(True for _ in self.copies.readable(content_id, self.shard))

    with replaced(Beside, "keep", keep):
        yield


@bug("R3: a fence that was given up lets readers in under the generation that was fenced")
def reopened_unchanged() -> Iterator[None]:
    def reopen(self: Holding) -> None:
        self.fencing = False
        self.restate()

    with replaced(Holding, "reopen", reopen):
        yield


# -- staged


@bug("R7: a staged update is over when it is committed; what it holds is announced under the old generation")
def staged_and_resumed() -> Iterator[None]:
    def lets_go(self: Any, operation: Operation) -> bool:
        return True

    with replaced(Fills, "lets_go", lets_go):
        yield


@bug("staged memory is dropped, and the coordinator is not told what is still held")
def staged_dropped_in_silence() -> Iterator[None]:
    def drop(self: Any) -> None:
        self.staged = None
        self._rank.act(FreeStaging())

    with replaced(Holding, "drop_staged", drop):
        yield


@bug("R2: what was retired while a staged update was being put in place is not asked about again")
def out_while_applying() -> Iterator[None]:
    def applied(before: Callable[..., None], self: Any, *, whole: bool) -> None:
        self._is_out = False
        before(self, whole=whole)

    with around(Holding, "applied", applied):
        yield


# -- deadlines


@bug("G10: a call whose deadline has passed gets as much again")
def deadline_extended_for_ever() -> Iterator[None]:
    def overdue(self: Running) -> None:
        self.deadline = self._rank.now + max(1.0, self.timeout_s)

    with replaced(Running, "overdue", overdue):
        yield


@bug("G7: a fill that was held up by a rollback is not looked at again")
def not_reconsidered() -> Iterator[None]:
    with replaced(Operations, "reconsider", nothing):
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
        old = self._holdings.get(registration)
        digests = old.digests if old is not None and named["complete"] else None
        before(self, registration, generation, content_id, sizes, digests=digests, complete=named["complete"])

    with around(Owner, "open", open_):
        yield


@bug("R3: memory that is opened again forgets the accesses that still run")
def access_forgotten() -> Iterator[None]:
    def reopen(before: Callable[..., None], self: Any, registration: Any, generation: int) -> None:
        before(self, registration, generation)
        self._holdings[registration].accesses = 0
        self._running = {n: r for n, r in self._running.items() if r != registration}

    def end(before: Callable[..., None], self: Any, access: Access) -> None:
        if access.number in self._running:
            before(self, access)

    with ExitStack() as stack:
        stack.enter_context(around(Owner, "reopen", reopen))
        stack.enter_context(around(Owner, "end", end))
        yield


@bug("R3: an older generation's chunk is marked available")
def old_generation_marked() -> Iterator[None]:
    def at(self: Any, registration: Any, generation: int) -> Any:
        return self._holdings.get(registration)

    with replaced(Owner, "_at", at):
        yield


# -- the pull


@bug("G8: what is in flight at a source that is dropped is wanted again at once, though its lane may still write it")
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


@bug("G8: what a source lacks is wanted again, and stays in flight there")
def lacking_stays_in_flight() -> Iterator[None]:
    def lacks(self: Any, lease: Any, chunks: Iterable[int], has: Any) -> None:
        self._sources[lease].has = tuple(has)
        for chunk in chunks:
            self._states[chunk] = 0
            self._lowest = min(self._lowest, chunk)

    with replaced(Pull, "lacks", lacks):
        yield


@bug("G7: what a source lacked is asked of nobody else")
def known_source_asked_again() -> Iterator[None]:
    with replaced(Pull, "_take_unheld", lambda self, source, bytes_max: []):
        yield


@bug("G7: a bad chunk is not asked for again")
def bad_chunk_given_up() -> Iterator[None]:
    def again(before: Callable[..., None], self: Any, source: Any, chunk: int) -> None:
        before(self, source, chunk)
        self._lowest = max(self._lowest, chunk + 1)

    with around(Pull, "_want_again", again):
        yield


_ = Content, OpKind
