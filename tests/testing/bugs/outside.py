"""Deliberate bugs by somebody who had read the rules and the code, but none of the checks.

Each is a mistake that an engineer could make in good faith: a forgotten condition, a wrong order,
one word of a rule misread. Where it can it calls the code that it breaks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any

from tensorhub.coordinator import actions, operations
from tensorhub.coordinator.cluster import Session
from tensorhub.coordinator.core import Coordinator
from tensorhub.coordinator.decisions import Decisions
from tensorhub.coordinator.entities import (
    Holding,
    Member,
    Model,
    Operation,
    PendingWrite,
    Replica,
    Version,
    Worker,
)
from tensorhub.coordinator.fills import Fills
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.membership import Membership
from tensorhub.coordinator.operations import Operations
from tensorhub.coordinator.refusals import Blame
from tensorhub.coordinator.registrations import Announcements
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.source_choice import SourceChoice
from tensorhub.coordinator.states import OperationState, VersionState
from tensorhub.coordinator.versions import Versions
from tensorhub.messages import Join, Publish
from tensorhub.scheduler.pull import Pull
from tensorhub.testing import Fault
from tensorhub.types import ContentId, LeaseId, OpKind, RegistrationId
from tensorhub.worker.calls import OpenGeneration
from tensorhub.worker.filling import Filling
from tensorhub.worker.leaving import Leaving
from tensorhub.worker.member_context import MemberContext
from tensorhub.worker.member_memory import MemberMemory
from tensorhub.worker.owner import Owner
from tensorhub.worker.states import Phase
from tests.testing.bugs import bug, replaced

# ---------------------------------------------------------------------------------------------- the
# owner's memory


@bug(
    "G2, R3: a fence is taken to stand as soon as new accesses are refused; those that run are not "
    "waited for",
    faults=(Fault.DEVICE, Fault.SLOW, Fault.STALL),
)
def fence_does_not_wait() -> Iterator[None]:
    with replaced(Owner, "is_quiet", lambda self, registration: True):
        yield


@bug(
    "G2: a fence that cannot be completed in time ends as if it stood, instead of with "
    "DrainTimeout",
    faults=(Fault.DEVICE, Fault.HASTE, Fault.STALL),
)
def unpublish_gives_up_into_an_overwrite() -> Iterator[None]:
    with replaced(Leaving, "fence_failed", lambda self: self.fenced()):
        yield


@bug(
    "G9, R3: an owner asks a request only whether its memory is open, not under which generation",
    faults=(Fault.PARTITION, Fault.SLOW),
)
def request_of_an_old_generation_served() -> Iterator[None]:
    begin = Owner.begin

    def broken(self: Owner, registration: RegistrationId, generation: int, *args: Any) -> Any:
        known = self._memories.get(registration)
        return begin(self, registration, generation if known is None else known.generation, *args)

    with replaced(Owner, "begin", broken):
        yield


@bug(
    "R8, R9: digests are kept for the next content of the same layout, so that its chunks seem to "
    "be there already"
)
def digests_kept_for_another_content() -> Iterator[None]:
    open_ = Owner.open

    def broken(
        self: Owner,
        registration: RegistrationId,
        generation: int,
        content_id: ContentId,
        sizes: Sequence[int],
        **kwargs: Any,
    ) -> None:
        old = self._memories.get(registration)
        if old is not None and kwargs.get("digests") is None and len(old.own.sizes) == len(sizes):
            kwargs["digests"] = old.own.digests
        open_(self, registration, generation, content_id, sizes, **kwargs)

    with replaced(Owner, "open", broken):
        yield


@bug("G6: memory that is being filled is opened as if all of it were there")
def partial_copy_serves_everything() -> Iterator[None]:
    act = MemberContext.act

    def broken(self: MemberContext, action: Any) -> None:
        if isinstance(action, OpenGeneration):
            action = OpenGeneration(
                action.generation, action.content_id, action.manifest, complete=True
            )
        act(self, action)

    with replaced(MemberContext, "act", broken):
        yield


# --------------------------------------------------------------------------------------------------
# the reader


@bug(
    "G8: when a lane breaks off, all that it was asked for is wanted "
    "again, also what it has brought",
    faults=(Fault.STALL, Fault.CUT, Fault.CRASH),
)
def verified_chunks_asked_again() -> Iterator[None]:
    next_batch, lane_ended = Pull.next_batch, Pull.lane_ended

    def noting(self: Pull, lease: LeaseId, bytes_max: int) -> tuple[int, ...]:
        batch = next_batch(self, lease, bytes_max)
        vars(self)[lease] = {*vars(self).get(lease, ()), *batch}
        return batch

    def broken(self: Pull, lease: LeaseId) -> tuple[int, ...]:
        back = lane_ended(self, lease)
        for chunk in vars(self).pop(lease, ()) if back else ():
            if self.verified[chunk]:
                self._want_again(self._source(lease), chunk)
                self._unverified += 1
                self.bytes_verified -= self._sizes[chunk]
        return back

    with replaced(Pull, "next_batch", noting), replaced(Pull, "lane_ended", broken):
        yield


@bug(
    "G8: what a broken-off lane has brought is not taken over by the next "
    "pull: everything is read anew",
    faults=(Fault.CANCEL, Fault.CRASH, Fault.CORRUPT),
)
def chunks_that_are_there_not_counted() -> Iterator[None]:
    init = Pull.__init__

    def broken(self: Pull, sizes: Sequence[int], verified: Iterable[int] = ()) -> None:
        init(self, sizes)

    with replaced(Pull, "__init__", broken):
        yield


@bug(
    "G1, R10: a host copy of the content is taken to have all of it; a prefetch may have been "
    "ended half-way",
    faults=(Fault.CANCEL, Fault.CRASH, Fault.CORRUPT),
)
def half_prefetch_adopted_as_whole() -> Iterator[None]:
    copied = Filling.copied

    def broken(self: Filling, chunks: frozenset[int]) -> None:
        if chunks and self.manifest is not None:
            chunks = frozenset(range(self.manifest.chunk_count))
        copied(self, chunks)

    with replaced(Filling, "copied", broken):
        yield


@bug("R6: a rank that has voted and hears nothing until its deadline ends its call by itself")
def voted_rank_times_out() -> Iterator[None]:
    give_up = Filling._give_up

    def broken(self: Filling, error: Exception) -> None:
        if self.phase is Phase.VOTED and not self.stages:
            self._abandon(error)
            self._torn(error)
        else:
            give_up(self, error)

    with replaced(Filling, "_give_up", broken):
        yield


# ------------------------------------------------------------------------------------------
# versions and lineages


@bug(
    "R7: a staged update overwrites the memory as soon as it may read, not when it is committed",
    faults=(Fault.HOOK, Fault.CANCEL, Fault.CRASH),
)
def staged_update_overwrites_early() -> Iterator[None]:
    ready_to_write = Filling._ready_to_write

    def broken(self: Filling) -> None:
        if self.stages and self._call.hold:
            self.stages = False
            self._run_hook()
        else:
            self.stages = False
            ready_to_write(self)

    with replaced(Filling, "_ready_to_write", broken):
        yield


@bug(
    "G10: a fill without a connection has no deadline: the coordinator is thought to end it",
    faults=(Fault.PARTITION, Fault.HASTE, Fault.CANCEL),
)
def cut_off_call_waits_for_ever() -> Iterator[None]:
    next_deadline = Filling.next_deadline

    def broken(self: Filling) -> float:
        return next_deadline(self) if self._context.session.online else inf

    with replaced(Filling, "next_deadline", broken):
        yield


@bug(
    "G3, R2: `latest` is the newest version that somebody has announced to hold, not the newest "
    "that was recorded",
    faults=(Fault.CRASH, Fault.RESTART, Fault.PREEMPT),
)
def latest_of_what_is_held() -> Iterator[None]:
    def broken(self: Model, skip: int = 0) -> Version | None:
        held = sorted(n for n, v in self.versions.items() if v.state is VersionState.AVAILABLE)
        return self.versions[held[-1 - skip]] if len(held) > skip else None

    with replaced(Model, "newest_visible", broken):
        yield


@bug(
    "R12: where there is no version before the newest, `latest-1` is the newest",
    faults=(Fault.CRASH, Fault.RESTART, Fault.CANCEL),
)
def previous_falls_back() -> Iterator[None]:
    before = Model.newest_visible

    def broken(self: Model, skip: int = 0) -> Version | None:
        return before(self, skip) or before(self)

    with replaced(Model, "newest_visible", broken):
        yield


@bug(
    "R1: the newest number itself may be published again",
    faults=(Fault.DIFFER, Fault.CANCEL, Fault.HASTE),
)
def number_published_twice() -> Iterator[None]:
    overtaken = Versions.overtaken

    def broken(self: Versions, model: Model, number: int) -> Any:
        return None if number == model.mark else overtaken(self, model, number)

    with replaced(Versions, "overtaken", broken):
        yield


@bug(
    "R2: a publish is answered while its record is still on its way to the store",
    faults=(Fault.COORDINATOR, Fault.STORE_SLOW, Fault.STORE_FAIL),
)
def answered_before_durable() -> Iterator[None]:
    def broken(self: Decisions, operation: Operation) -> None:
        self._cluster.become(operation, OperationState.PREPARED, "every rank voted")
        entry = self._handlers[operation.kind].entry(operation)
        if entry is not None:
            self._cluster.persist(entry)
        self._commit(operation)

    with replaced(Decisions, "prepare", broken):
        yield


@bug(
    "R2: a rollback that is asked for again, after a lost connection, is done again",
    faults=(Fault.COORDINATOR, Fault.CUT, Fault.DROP),
)
def rollback_done_twice() -> Iterator[None]:
    with replaced(actions, "rolled_back_by", lambda ident, before: ""):
        yield


@bug(
    "R2: a rollback leaves fills of the versions that it retires alone",
    faults=(Fault.SLOW, Fault.STALL, Fault.DELAY),
)
def fill_survives_rollback() -> Iterator[None]:
    rolled_back = Operations.rolled_back

    def broken(self: Operations, model: Model, to: int) -> None:
        fills = [
            g
            for g in model.groups.values()
            if g.operation is not None and g.operation.kind is not OpKind.PUBLISH
        ]
        spared = [(group, group.operation) for group in fills]
        for group in fills:
            group.operation = None
        rolled_back(self, model, to)
        for group, operation in spared:
            group.operation = operation

    with replaced(Operations, "rolled_back", broken):
        yield


@bug(
    "R2: a rollback strikes the later versions from the coordinator's books, and does not tell "
    "their holders"
)
def rollback_does_not_order_out() -> Iterator[None]:
    def broken(self: Holdings, holding: Holding, reason: str) -> None:
        self.leave(holding, reason)
        self._readers.cut_readers(holding, reason, moved=False)

    with replaced(Holdings, "order_out", broken):
        yield


@bug(
    "R2: who announces a number that is recorded is believed to hold its content",
    faults=(Fault.PARTITION,),
)
def another_content_announced() -> Iterator[None]:
    announce = Announcements.heard

    def broken(self: Announcements, member: Member, held: Any, parts: Any, request: int) -> bool:
        version = member.group.model.versions.get(held.version)
        if version is not None:
            object.__setattr__(held, "content_id", version.info.content_id)
        return announce(self, member, held, parts, request)

    with replaced(Announcements, "heard", broken):
        yield


# --------------------------------------------------------------------------------------------------
# groups of ranks


@bug(
    "R6: a fill of several ranks is decided without a record of it",
    faults=(Fault.COORDINATOR, Fault.DELAY, Fault.PARTITION),
)
def commit_not_recorded() -> Iterator[None]:
    with replaced(Fills, "entry", lambda self, operation: None):
        yield


@bug(
    "R6: a coordinator that has come back answers who asks for an outcome that all was aborted, "
    "whatever was recorded",
    faults=(Fault.COORDINATOR, Fault.CUT, Fault.DROP),
)
def record_not_looked_at() -> Iterator[None]:
    with replaced(Decisions, "_recorded", lambda self, model, key: None):
        yield


@bug(
    "R6: a deadline ends an operation whose decision is on its way to the store",
    faults=(Fault.STORE_SLOW, Fault.HASTE, Fault.COORDINATOR),
)
def deadline_ends_what_is_prepared() -> Iterator[None]:
    deadline_passed = Operations.deadline_passed

    def broken(self: Operations, key: str) -> None:
        operation = self._cluster.undecided.get(key)
        if operation is not None and operation.record is not None:
            self._decisions.not_recorded(operation.record, "its deadline has passed")
        else:
            deadline_passed(self, key)

    everybody = replaced(operations, "_impatient", lambda operation: list(operation.parts.values()))
    with everybody, replaced(Operations, "deadline_passed", broken):
        yield


@bug(
    "R6: a rank that is lost ends its group's operation, although its decision is on its way to "
    "the store",
    faults=(Fault.STORE_SLOW, Fault.CRASH, Fault.COORDINATOR),
)
def lost_rank_ends_what_is_prepared() -> Iterator[None]:
    member_gone = Operations.member_gone

    def broken(self: Operations, member: Member, why: str) -> None:
        operation = member.group.operation
        member_gone(self, member, why)
        if (
            operation is not None
            and operation.state is OperationState.PREPARED
            and operation.record is not None
        ):
            self._decisions.not_recorded(operation.record, why)

    with replaced(Operations, "member_gone", broken):
        yield


@bug("R6: the ranks' calls are compared by their kind only, not by version and selector")
def differing_calls_accepted() -> Iterator[None]:
    with replaced(
        operations, "_describe", lambda call: "publish" if isinstance(call, Publish) else call.kind
    ):
        yield


@bug(
    "R6: the rank to blame hears of the abort; what the others hear is left to their deadlines",
    faults=(Fault.CANCEL, Fault.HOOK, Fault.HASTE),
)
def only_the_guilty_rank_is_told() -> Iterator[None]:
    abort = Decisions.abort

    def broken(self: Decisions, operation: Operation, blame: Blame, **kwargs: Any) -> None:
        if blame.rank in operation.parts and operation.state is OperationState.RUNNING:
            operation.parts = {blame.rank: operation.parts[blame.rank]}
        abort(self, operation, blame, **kwargs)

    with replaced(Decisions, "abort", broken):
        yield


@bug(
    "R6, R8: what was begun under a former coordinator goes on with the "
    "newest version, not with its own",
    faults=(Fault.COORDINATOR, Fault.SLOW, Fault.STALL),
)
def resumed_with_another_content() -> Iterator[None]:
    def broken(model: Model, info: Any) -> Version | None:
        return model.newest_visible()

    with replaced(Versions, "resumed", staticmethod(broken)):
        yield


# --------------------------------------------------------------------------------------------------
# retention


@bug(
    "R4: who has been granted its leave counts as a holder until its fence is confirmed, so that "
    "two can go"
)
def draining_holder_counts() -> Iterator[None]:
    leave = Holdings.leave

    def broken(self: Holdings, holding: Holding, why: str, **kwargs: Any) -> None:
        if why != "withdrawn":
            leave(self, holding, why, **kwargs)

    with replaced(Holdings, "leave", broken):
        yield


@bug(
    "R4: retain() and pin() are answered when holders were told, not when they know",
    faults=(Fault.PARTITION, Fault.CUT, Fault.DROP),
)
def told_is_taken_for_known() -> Iterator[None]:
    tell = Retentions._tell

    def broken(self: Retentions, holding: Holding) -> None:
        tell(self, holding)
        holding.member.group.model.notices.unaware.pop(holding.member.registration, None)

    with replaced(Retentions, "_tell", broken):
        yield


@bug(
    "R4: retain() is answered before it is durable",
    faults=(Fault.COORDINATOR, Fault.STORE_SLOW, Fault.STORE_FAIL),
)
def retain_not_durable() -> Iterator[None]:
    def broken(self: Retentions, order: PendingWrite, entry: Any) -> None:
        self._cluster.persist(entry)
        self.recorded(order)

    with replaced(Retentions, "_record", broken):
        yield


@bug(
    "R4: an owner that is cut off takes a retained version back at once",
    faults=(Fault.PARTITION, Fault.CUT, Fault.DROP),
)
def cut_off_owner_does_not_wait() -> Iterator[None]:
    free_at = Leaving._free_at

    def broken(self: Leaving[Any]) -> float:
        return free_at(self) if self._context.session.online else -inf

    with replaced(Leaving, "_free_at", broken):
        yield


@bug(
    "G5, R4: a copy that is being made counts as soon as its memory is registered",
    faults=(Fault.CRASH, Fault.SLOW, Fault.STALL),
)
def handover_ends_before_ready() -> Iterator[None]:
    alone = Retentions.alone

    def broken(self: Retentions, holding: Holding, going: Worker | None) -> Iterator[Holding]:
        model = holding.member.group.model
        under_way = [h for h in model.handovers.values() if h.copy in model.copies]
        for each in alone(self, holding, going):
            if not any(h.version is each.version and h.shard == each.shard for h in under_way):
                yield each

    with replaced(Retentions, "alone", broken):
        yield


@bug(
    "G5: a holder that may be preempted at any time counts for retention",
    faults=(Fault.PREEMPT, Fault.CRASH, Fault.RESTART),
)
def spot_holder_counts() -> Iterator[None]:
    def broken(self: Retentions, holding: Holding) -> bool:
        return (holding.member.keeps or holding.member.group.spot) and self.may_count(holding)

    with replaced(Holding, "is_spot", False), replaced(Retentions, "is_reliable", broken):
        yield


@bug("R5: for close(), a copy in the same process counts", faults=(Fault.PREEMPT,))
def own_copy_counts_for_close() -> Iterator[None]:
    alone = Retentions.alone

    def broken(self: Retentions, holding: Holding, going: Worker | None) -> Iterator[Holding]:
        return alone(self, holding, None)

    with replaced(Retentions, "alone", broken):
        yield


@bug(
    "R7, G5: an update overwrites the last copy of a retained version",
    faults=(Fault.CRASH, Fault.RESTART, Fault.CANCEL),
)
def update_does_not_ask_for_its_leave() -> Iterator[None]:
    with replaced(Fills, "staying", lambda self, operation, version: []):
        yield


@bug(
    "G5: what was to be retained is not read from the store when a coordinator comes back",
    faults=(Fault.COORDINATOR, Fault.CUT, Fault.STORE_SLOW),
)
def retention_not_recovered() -> Iterator[None]:
    recover = Coordinator._recover

    def broken(self: Coordinator, durable: Any) -> None:
        recover(self, durable)
        for model in self.cluster.models.values():
            model.retain = 0

    with replaced(Coordinator, "_recover", broken):
        yield


@bug(
    "G6: a copy that is being filled counts as a source like a whole one: for visibility, "
    "retention, and as a begin",
    faults=(Fault.CRASH, Fault.SLOW, Fault.STALL),
)
def partial_copy_counts() -> Iterator[None]:
    with replaced(Holding, "is_source", property(lambda self: self.takes_readers)):
        yield


@bug("G4: a replica that is announced again is READY with its first rank")
def one_rank_makes_a_replica() -> Iterator[None]:
    with replaced(
        Replica, "is_whole", property(lambda self: any(h.committed for h in self.holdings.values()))
    ):
        yield


# -----------------------------------------------------------------------------------------------
# readers, liveness


@bug(
    "R9: nobody looks whether a source is filled by the very reader that it is chosen for",
    faults=(Fault.SLOW, Fault.CANCEL, Fault.HASTE),
)
def wait_cycle() -> Iterator[None]:
    with replaced(SourceChoice, "_below", lambda self, holding: {}):
        yield


@bug(
    "R8: a holder whose bytes have changed loses its readers, and is chosen again",
    faults=(Fault.OVERWRITE, Fault.DEVICE, Fault.CORRUPT),
)
def quarantine_forgotten() -> Iterator[None]:
    def broken(self: Holdings, holding: Holding) -> None:
        self._readers.cut_readers(holding, "the source's bytes have changed", moved=True)

    with replaced(Holdings, "quarantine", broken):
        yield


@bug(
    "R8: memory whose bytes have changed is announced again after a lost connection",
    faults=(Fault.OVERWRITE, Fault.CUT, Fault.CORRUPT),
)
def spoiled_memory_announced() -> Iterator[None]:
    restate = MemberMemory.restate

    def broken(self: MemberMemory, **named: Any) -> None:
        if self.content is not None:
            self.content.spoiled = False
        restate(self, **named)

    with replaced(MemberMemory, "restate", broken):
        yield


@bug("G1: a stamp names a version as soon as its bytes begin to come", faults=(Fault.DELAY,))
def stamped_while_it_comes() -> Iterator[None]:
    fill = MemberMemory.fill

    def broken(self: MemberMemory, content: Any) -> None:
        fill(self, content)
        self.in_place = content

    with replaced(MemberMemory, "fill", broken):
        yield


@bug("G1: a stamp names memory that was taken back", faults=(Fault.DELAY,))
def stamped_after_it_was_taken_back() -> Iterator[None]:
    forget = MemberMemory.forget

    def broken(self: MemberMemory, why: str) -> None:
        content = self.content
        forget(self, why)
        self.in_place = content

    with replaced(MemberMemory, "forget", broken):
        yield


@bug(
    "R12: a last source that crashes is taken for one that left on "
    "purpose: its readers fail at once",
    faults=(Fault.CRASH, Fault.PREEMPT, Fault.SLOW),
)
def crash_taken_for_a_leave() -> Iterator[None]:
    leave = Holdings.leave

    def broken(self: Holdings, holding: Holding, why: str, *, on_purpose: bool = True) -> None:
        leave(self, holding, why, on_purpose=on_purpose or why == "worker lost")

    with replaced(Holdings, "leave", broken):
        yield


@bug(
    "R12: that a version's last source has left is remembered when others have come",
    faults=(Fault.CRASH, Fault.PREEMPT, Fault.SLOW),
)
def abandoned_for_ever() -> Iterator[None]:
    refresh = Versions.refresh

    def broken(self: Versions, model: Model) -> None:
        before = [
            layout for v in model.versions.values() for layout in v.layouts if layout.abandoned
        ]
        refresh(self, model)
        for layout in before:
            layout.abandoned = True

    with replaced(Versions, "refresh", broken):
        yield


@bug("R7: nobody makes sure of a source before memory is overwritten")
def overwritten_without_a_source() -> Iterator[None]:
    with replaced(Fills, "first_sources", lambda self, operation: {}):
        yield


# ---------------------------------------------------------------------------------------------- old
# incarnations


@bug(
    "G9: what arrives late over a worker's former connection is acted on",
    faults=(Fault.REORDER, Fault.CUT, Fault.DROP),
)
def former_connection_heard() -> Iterator[None]:
    join = Membership.join

    def broken(self: Membership, session: Session, message: Join) -> None:
        former = [
            s
            for s in self._cluster.sessions.values()
            if s.worker and s.incarnation == session.incarnation
        ]
        worker = former[0].worker if former else None
        join(self, session, message)
        for each in former:
            each.worker = worker

    with replaced(Membership, "join", broken):
        yield


@bug(
    "G9, R11: an incarnation that was lost comes back as if nothing had happened",
    faults=(Fault.PARTITION, Fault.PAUSE, Fault.DROP),
)
def lost_incarnation_comes_back() -> Iterator[None]:
    join = Membership.join

    def broken(self: Membership, session: Session, message: Join) -> None:
        self._cluster.lost.pop(session.incarnation, None)
        join(self, session, message)

    with replaced(Membership, "join", broken):
        yield


@bug(
    "G9: a confirmed fence ends whatever the registration holds by now, "
    "not the generation that it names",
    faults=(Fault.CRASH, Fault.CANCEL, Fault.SLOW),
)
def fence_of_another_generation() -> Iterator[None]:
    confirm = Holdings.confirm_withdrawn

    def broken(self: Holdings, member: Member, generation: int) -> None:
        confirm(self, member, generation if member.holding is None else member.holding.generation)

    with replaced(Holdings, "confirm_withdrawn", broken):
        yield


@bug(
    "G9, R6: a group whose rank was replaced goes on in the same membership epoch",
    faults=(Fault.CRASH, Fault.RESTART, Fault.CUT),
)
def epoch_not_changed() -> Iterator[None]:
    with replaced(Membership, "_change_epoch", lambda self, group: None):
        yield
