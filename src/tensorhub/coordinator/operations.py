"""Group operations: how the calls of the ranks become one operation, what moves it on (R6), and
when its ranks give up.

All ranks of an operation act on one call and one version (the first half of G4). Each handler of a
message records a fact; `settle` works out what follows, so that the order in which facts arrive
does not matter. `Deadlines` sets the deadline of an operation, and finds the error that says what
the ranks have waited for in vain.

Not responsible for the steps of a publish or a fill (`publishes`, `fills`), nor for how an
operation ends (`decisions`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import assert_never

from tensorhub.coordinator import limits, refusals, ways
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.corruption_checks import CorruptionChecks
from tensorhub.coordinator.coverage import Coverage
from tensorhub.coordinator.decisions import Decisions, OperationHandler
from tensorhub.coordinator.entities import (
    Group,
    Member,
    Model,
    Operation,
    RankPart,
    Version,
    Worker,
)
from tensorhub.coordinator.fills import Fills
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.refusals import Blame, damaged, held_text, only_elsewhere
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.states import OperationState, PartState
from tensorhub.coordinator.testimonies import Testimonies
from tensorhub.coordinator.versions import Versions
from tensorhub.coordinator.waiting import awaits_hook, needs_source
from tensorhub.errors import (
    CoordinatorUnavailable,
    GroupAborted,
    IntegrityError,
    ManifestMismatch,
    OperationTimeout,
    StateError,
    VersionConflict,
    VersionUnavailable,
    some,
)
from tensorhub.messages import (
    Abandon,
    AboutOperation,
    Compared,
    Covered,
    EpochChanged,
    Fill,
    Prepared,
    Progress,
    Publish,
    ReadFailed,
    ReadyToWrite,
    Resolve,
)
from tensorhub.types import OpKey, OpKind, Purpose

# a rank's newest messages about later operations, which wait for one's decision
LATER_PER_RANK_MAX = 4


@dataclass(eq=False, repr=False)
class Operations:
    """Changes operations until they end, with the handlers and `Decisions`."""

    _cluster: Cluster
    _readers: Readers
    _testimonies: Testimonies
    _corruption_checks: CorruptionChecks
    _handlers: Mapping[OpKind, OperationHandler]
    _decisions: Decisions
    _deadlines: Deadlines
    _fills: Fills
    _coverage: Coverage

    # ----------------------------------------------------------------------------------------------
    # facts

    def hear(self, worker: Worker, message: AboutOperation) -> None:
        """A rank says something about its group's operation. Only the rank's present registration
        is heard (G9).
        """
        key, member = message.key, self._member(message.key, message.rank)
        if member is None or member.worker is not worker:
            return
        self._cluster.noted[member] = None
        match message:
            case Progress() | ReadyToWrite() | Covered() | Prepared() | ReadFailed() | Compared():
                part = member.part
                now = part.operation.key if part is not None else None  # of this group
                if (
                    part is not None
                    and now is not None
                    and (now.epoch, now.sequence) == (key.epoch, key.sequence)
                ):
                    self._hear_of(part, message)
                elif isinstance(message, ReadFailed):
                    self._readers.left(member, message.lease)
            case Publish() | Fill():
                self._arrive(member, message)
            case Abandon():
                self._abandon(member, message)
            case Resolve():
                self._resolve(member, message)
            case _:
                assert_never(message)

    def _member(self, key: OpKey, rank: int) -> Member | None:
        model = self._cluster.models.get(key.model)
        group = model.groups.get(key.group) if model is not None else None
        return group.members.get(rank) if group is not None else None

    def is_rank(self, worker: Worker, key: OpKey, rank: int) -> bool:
        """Whether the worker is that rank of the group now."""
        member = self._member(key, rank)
        return member is not None and member.worker is worker

    def _hear_of(
        self,
        part: RankPart,
        message: ReadyToWrite | Covered | Prepared | Compared | ReadFailed | Progress,
    ) -> None:
        """A rank says how its part in the group's undecided operation goes."""
        operation = part.operation
        match message:
            case Progress():
                self._readers.progressed(part, message)
            case ReadyToWrite() if operation.running:
                blame = self._fills.ready(part, message)
                if blame is not None:
                    self._decisions.abort(operation, blame)
            case Covered() if operation.running:
                blame = self._coverage.heard(part, message)
                if blame is not None:
                    self._decisions.abort(operation, blame)
            case Prepared() if part.state in (PartState.READING, PartState.CLAIMING):
                self._testimonies.claim(part, message)
            case Compared() if operation.running:
                self._testimonies.compared(part, message)
            case ReadyToWrite() | Covered() | Prepared() | Compared():
                pass  # it was said already, or too late
            case ReadFailed():
                lease = self._readers.failed(part, message.lease, message.reason, message.detail)
                if lease is not None and message.reason == "corrupt" and message.chunk is not None:
                    self._corruption_checks.ask(part, lease.holding, message.chunk, lease.need)
                self._cluster.changed(operation)
            case _:
                assert_never(message)

    def _arrive(self, member: Member, call: Publish | Fill) -> None:
        """One rank calls."""
        group, call = member.group, _in_names_of(member.group, call)
        key = call.key
        if self._waits(member, call):
            return
        if key.epoch != group.epoch or key.sequence < group.sequence:
            if key.epoch == group.epoch and self._decisions.ended_without(member, key):
                # This rank comes late: its call counts for the present operation of its group.
                self._cluster.tell(
                    member, EpochChanged(key.model, key.group, group.epoch, group.sequence)
                )
            else:
                self._decisions.answer(member, key)
            return
        kind = OpKind.PUBLISH if isinstance(call, Publish) else call.kind
        operation = self._begin(member, key, kind)
        if member.rank in operation.parts:
            return  # a retry of a call that is on its way
        part = RankPart(
            operation,
            member,
            call,
            self._cluster.now + call.timeout_s,
            self._cluster.now,
            isinstance(call, Fill),
        )
        operation.parts[member.rank] = part
        self._cluster.observations.called(self._cluster.now, part)
        operation.story.note(self._cluster.cause, self._cluster.now, "rank", member.rank, "called")
        blame = (
            self._not_together(operation, part)
            or self._unlike(operation, part)
            or self._unfenced(part)
            or self._handlers[operation.kind].called(part)
        )
        if blame is not None:
            self._decisions.abort(operation, blame)
        else:
            self._cluster.changed(operation)

    def _begin(self, member: Member, key: OpKey, kind: OpKind) -> Operation:
        """The group's undecided operation of this key. If there is one of an older key, this rank
        has given it up.
        """
        group = member.group
        if group.operation is not None and group.operation.key.sequence < key.sequence:
            left = GroupAborted(
                f"rank {member.rank} gave {group.operation.kind} up and called again"
            )
            self._decisions.abort(group.operation, Blame(left, member.rank))
        if group.operation is None:
            operation = Operation(_key_of(group, key), kind, group)
            group.begin(operation)
            self._cluster.undecided[operation.name] = operation
            return operation
        return group.operation

    @staticmethod
    def _not_together(operation: Operation, part: RankPart) -> Blame | None:
        """A publish that was made to a former coordinator, too, counts with the calls of the same
        operation there. A rank that calls anew may have heard the end of that operation, and have
        written its memory since.
        """
        call = part.call
        if not isinstance(call, Publish):
            return None
        agreed = operation.agreed
        agreed.is_repeated = agreed.is_repeated or call.in_lineage is not None
        if len(operation.parts) == 1:
            agreed.former = frozenset(call.former)
            return None
        agreed.former = agreed.former.intersection(call.former)
        if agreed.former or not agreed.is_repeated:
            return None
        ranks = sorted(operation.parts)[:RANKS_TOLD_MAX]
        text = (
            f"{refusals.BEGUN} on some of the ranks {ranks}, and another one of them has made a new"
        )
        return Blame(GroupAborted(f"{text} call since; call again"))

    @staticmethod
    def _unlike(operation: Operation, part: RankPart) -> Blame | None:
        """The first call binds kind and selector. One that differs ends the operation at once; the
        error names both.
        """
        if (operation.kind is OpKind.FETCH) is part.member.said.serves:
            error = StateError(f"{operation.kind}: memory either serves others, or is fetched into")
            return Blame(error, part.rank)
        first = next(iter(operation.parts.values()))
        if first is part:
            return None
        ours, theirs = _describe(part.call), _describe(first.call)
        if _as_update(ours) == _as_update(theirs):
            return None
        causes = {first.rank: f"called {theirs}", part.rank: f"called {ours}"}
        text = (
            f"the ranks of group {operation.group.name!r} made different calls: {theirs} on rank "
            f"{first.rank}, {ours} on rank {part.rank}: call the same on all ranks (update() fills "
            f"empty memory, too)"
        )
        return Blame(GroupAborted(text, causes=causes, retryable=False))

    @staticmethod
    def _unfenced(part: RankPart) -> Blame | None:
        """A rank reports its fences before it calls again. One that never does leaves more and more
        generations here.
        """
        count = len(part.member.leaving)
        if count < limits.LEAVING_OF_RANK_MAX:
            return None
        return Blame(
            StateError(
                f"{count} generations of this rank's memory were taken "
                "back and never said to be fenced"
            ),
            part.rank,
        )

    @staticmethod
    def _waits(member: Member, message: Publish | Fill | Abandon | Resolve) -> bool:
        """Whether this message is for an operation after an operation being recorded: then it waits
        for the decision.
        """
        operation, key = member.group.operation, message.key
        if operation is None or operation.state is not OperationState.PREPARED:
            return False
        if key.epoch != member.group.epoch or key <= operation.key:
            return False
        mine = [each for each in operation.later if each[0].rank == member.rank]
        if len(mine) >= LATER_PER_RANK_MAX:
            operation.later.remove(mine[0])  # of a call that this rank has given up since
        operation.later.append((member, message))
        return True

    def _abandon(self, member: Member, message: Abandon) -> None:
        """This rank ends the operation, unless it has voted in it or it is decided."""
        group, key = member.group, message.key
        if self._waits(member, message):
            return
        if key.epoch == group.epoch and key.sequence >= group.sequence:
            # Even if no rank has called yet. Which call it would be is known only for a host copy.
            self._begin(
                member,
                key,
                OpKind.PREFETCH if member.said.purpose is Purpose.PREFETCH else OpKind.PUBLISH,
            )
        operation = group.operation
        if operation is None or operation.key != key:
            self._decisions.answer(member, key)
            return
        part = operation.parts.get(member.rank)
        filled = part is not None and part.voted and part.needs_bytes
        if operation.state is not OperationState.PREPARED and not filled:
            error = message.error.brief(limits.ERROR_CHARS_MAX).error()
            is_of_all = (
                part is not None and part.checks != "" and isinstance(error, ManifestMismatch)
            )
            # as at a deadline here: its clock, or the way to it, has been faster
            is_overdue = part is not None and isinstance(
                error, OperationTimeout | CoordinatorUnavailable
            )
            blame = Blame(error, None if is_of_all else member.rank)
            self._decisions.abort(operation, blame, also_late=not is_overdue)
            if part is None:
                self._decisions.answer(member, key)

    def _resolve(self, member: Member, message: Resolve) -> None:
        """This rank may have missed something: tell it the outcome or, while there is none, what it
        was told before.
        """
        operation, key = member.group.operation, message.key
        if self._waits(member, message):
            return
        if operation is None or operation.key != key:
            self._decisions.answer(member, key)
            return
        part = operation.parts.get(member.rank)
        if part is not None and operation.kind is OpKind.PUBLISH:
            self._coverage.ask_again(part)
        elif part is not None:
            self._fills.restate(part)

    def member_gone(self, member: Member, why: str) -> None:
        """A rank is lost, replaced or closed: before the decision, its group's operation is
        over.
        """
        self._readers.reader_lost(member)
        operation = member.group.operation
        if operation is not None and operation.state is not OperationState.PREPARED:
            self._decisions.abort(
                operation, Blame(GroupAborted(why, causes={member.rank: why}), member.rank)
            )

    def rolled_back(self, model: Model, to: int) -> None:
        """A new lineage begins after `to`: operations that fill from a later version, or publish
        one, are over.
        """
        later, left = (
            [version for version in model.versions.values() if version.number > to],
            held_text(model),
        )
        for operation in [o for version in later for o in version.bound.values()]:
            what = f"version {operation.bound.number} of {model.name!r}"
            if operation.kind is OpKind.PUBLISH:
                text = (
                    f"{what} cannot be published: {model.name!r} was rolled back to {to} "
                    f"meanwhile; take its next number"
                )
                self._decisions.abort(operation, Blame(VersionConflict(text)))
            else:
                text = (
                    f"{what} is no more: {model.name!r} was rolled back to {to}; ask again for "
                    f"a version that is left; "
                )
                self._decisions.abort(
                    operation, refusals.gone(operation, VersionUnavailable(text + left))
                )

    def reconsider(self, model: Model) -> None:
        """What held this model's operations up may be over."""
        for group in model.serving.values():
            if group.operation is not None:
                self._cluster.wake(group.operation)

    def written(self, record: int, failure: str | None) -> None:
        """The store has an entry, or (`failure`) cannot take it. An entry of an operation is its
        decision; messages about later operations that came meanwhile are handled now.
        """
        self._testimonies.recorded(record, failed=failure is not None)
        self._cluster.described(record, failed=failure is not None)
        decided = (
            self._decisions.recorded(record)
            if failure is None
            else self._decisions.not_recorded(record, failure)
        )
        for member, message in decided.later if decided is not None else ():
            if member.group.members.get(member.rank) is not member:
                continue
            match message:
                case Publish() | Fill():
                    self._arrive(member, message)
                case Abandon():
                    self._abandon(member, message)
                case Resolve():
                    self._resolve(member, message)
                case _:
                    assert_never(message)

    def retry_due(self, key: str) -> None:
        """A source that has failed a reader may be tried again."""
        operation = self._cluster.undecided.get(key)
        if operation is not None:
            self._readers.set_retry_timer(operation)
            self._readers.move_again(operation)
            self._cluster.wake(operation)

    def deadline_passed(self, key: str) -> None:
        """A rank gives up: before all have voted, the operation is over for all of them."""
        operation = self._cluster.undecided.get(key)
        if operation is not None and operation.state is not OperationState.PREPARED:
            self._decisions.abort(operation, self._deadlines.passed(operation))

    # ----------------------------------------------------------------------------------------------
    # consequences

    def settle(self, operation: Operation) -> None:
        """Do whatever the facts allow now."""
        if operation.gathered and operation.state is not OperationState.PREPARED:
            handler = self._handlers[operation.kind]
            blame = handler.advance(operation)
            if blame is not None:
                self._decisions.abort(operation, blame)
            elif (
                operation.all_voted
                and not self._decisions.held_up(operation)
                and handler.may_commit(operation)
            ):
                self._decisions.prepare(operation)
        if operation.decided:
            return
        self._deadlines.set(operation)
        self._cluster.file(operation)


def _key_of(group: Group, key: OpKey) -> OpKey:
    """An equal key in the names of the group: the names are kept once, however often a worker says
    them.
    """
    return OpKey(group.model.name, group.name, key.epoch, key.sequence)


def _in_names_of(group: Group, call: Publish | Fill) -> Publish | Fill:
    """The call as it is kept: all keys that it names are of this group, so only their numbers are
    kept with the call.
    """
    former = tuple(_key_of(group, key) for key in call.former)
    if isinstance(call, Publish):
        return replace(call, key=_key_of(group, call.key), former=former)
    resume = (
        None if call.resume is None else replace(call.resume, key=_key_of(group, call.resume.key))
    )
    return replace(call, key=_key_of(group, call.key), former=former, resume=resume)


def _describe(call: Publish | Fill) -> str:
    if isinstance(call, Publish):
        return f"publish({call.version})"
    staged = ", staged=True" if call.staged else ""
    at_least = "" if call.at_least is None else f", at_least={call.at_least}"
    return f"{call.kind}({call.selector!r}{at_least}{staged})"


def _as_update(described: str) -> str:
    """A replicate is the update of memory that holds no version, as that of a restarted rank."""
    return described.replace(OpKind.REPLICATE, OpKind.UPDATE, 1)


FAULTS_TOLD_MAX = 3  # in an error
RANKS_TOLD_MAX = 16


@dataclass(eq=False, repr=False)
class Deadlines:
    """Sets operations' deadlines and explains them; changes nothing else."""

    _cluster: Cluster
    _versions: Versions
    _retentions: Retentions
    _fills: Fills

    def set(self, operation: Operation) -> None:
        """The earliest deadline of the ranks that may still give up."""
        deadlines = [part.deadline for part in _impatient(operation)]
        if deadlines:
            self._cluster.timers.set("operation", operation.name, min(deadlines))
        else:
            self._cluster.timers.cancel("operation", operation.name)

    def passed(self, operation: Operation) -> Blame:
        """The blame for the missed deadline."""
        late = min(_impatient(operation), key=lambda part: part.deadline)
        what = f"{operation.kind} of {operation.group.model.name!r}"
        if not operation.gathered:
            return self._not_called(operation, late, what)
        if isinstance(late.call, Fill) and (not operation.writing or operation.all_voted):
            blame = self._not_begun(operation, late.call, what)
            if blame is not None:
                return blame
        return self._not_verified(operation, late, f"{what}: version {operation.bound.number}")

    @staticmethod
    def _not_called(operation: Operation, late: RankPart, what: str) -> Blame:
        group = operation.group
        missing = sorted(set(range(group.world_size)) - set(operation.parts))
        named = missing[:RANKS_TOLD_MAX]
        ranks = ", ".join(
            f"{rank}{'' if rank in group.members else ' (not registered)'}" for rank in named
        )
        ranks += f" and {len(missing) - len(named)} more" if len(missing) > len(named) else ""
        text = (
            f"{what}: waited {_rounded(late.call.timeout_s)} s for group {group.name!r}; these "
            f"ranks did not call: {ranks}"
        )
        return Blame(OperationTimeout(text))

    def _not_begun(self, operation: Operation, call: Fill, what: str) -> Blame | None:
        """Nothing was overwritten: because what the ranks hold had to stay, or there was no source
        to begin with.
        """
        bound = operation.version
        try:
            target = bound or self._fills.target(operation)
        except VersionUnavailable as unavailable:
            return Blame(unavailable)
        if target is not None and ways.of(target, operation).serves:
            staying = self._fills.staying(operation, target)
            if staying:
                error = self._retentions.refusal(
                    staying[0], f"{what} to version {target.number}: nothing was written: "
                )
                return Blame(error, staying[0].rank, tuple(h.rank for h in staying[1:]))
        if bound is None:
            why = "" if target is None else only_elsewhere(operation, target)
            why = why or self._versions.waiting_text(
                operation.group.model, call.selector, call.at_least, operation
            )
            if operation.resumes is not None and target is not None:
                why = f"version {target.number} has lost its last source, none came back in time"
                why += f"; {held_text(operation.group.model, operation)}"
            return Blame(VersionUnavailable(f"{what}: {why}; waited {_rounded(call.timeout_s)} s"))
        return self._sourceless(operation, bound, what)

    def _sourceless(self, operation: Operation, version: Version, what: str) -> Blame | None:
        if lost := only_elsewhere(operation, version):
            return Blame(VersionUnavailable(f"{what}: {lost}"))
        if not ways.serve(operation):
            text = (
                f"{what}: version {version.number} has lost its last source; none came back in time"
            )
        elif self._fills.first_sources(operation) is None:
            text = (
                f"{what}: no holder of version {version.number} can be reached now (silent, "
                f"full, or it has just failed)"
            )
        else:
            return None  # a rank's hook takes its time
        return Blame(VersionUnavailable(f"{text}; {held_text(operation.group.model, operation)}"))

    @staticmethod
    def _not_verified(operation: Operation, late: RankPart, what: str) -> Blame:
        """Some rank has not read all of it: by bad bytes, without a source, or too slowly."""
        parts = operation.parts.values()
        for part in parts:
            if (
                not part.voted
                and part.attempts.faults
                and all(reason == "corrupt" for reason, _ in part.attempts.faults.values())
            ):
                return Blame(
                    damaged(operation, part) if part.proof.exonerated else _corrupt(what, part),
                    part.rank,
                )
        unsure = sorted(part.rank for part in parts if part.state is PartState.CLAIMING)
        if unsure:
            text = (
                f"{what} is in place on rank(s) {unsure}, but no worker said in time which digests "
                f"its publisher has made"
            )
            return Blame(OperationTimeout(text))
        asked = (
            sorted(
                part.rank
                for part in parts
                if part.checks and part.rank not in operation.agreed.ranks
            )
            if operation.kind is OpKind.PUBLISH
            else []
        )
        if asked:
            text = (
                f"{what}: rank(s) {asked} did not check in time whether the ranks publish one "
                f"whole version"
            )
            return Blame(OperationTimeout(text))
        starving = [part for part in parts if needs_source(part)]
        if starving:
            text = f"{what} has lost its last source{_gone(starving)}, none came back in time"
            return Blame(
                VersionUnavailable(
                    f"{text}{_faults(starving)}; {held_text(operation.group.model, operation)}"
                )
            )
        slow = sorted((part for part in parts if not part.voted), key=lambda part: part.rank)
        before = operation.group.attempt_before if late.call.former else ""
        left = f"in the {_rounded(late.call.timeout_s)} s that the attempt before left it"
        after = left if before else f"after {_rounded(late.call.timeout_s)} s"
        before = f"; the attempt before ended: {before}" if before else ""
        if hooked := [part.rank for part in slow if awaits_hook(part)]:
            text = f"{what}: before_write did not return {after} on rank(s) {hooked}"
        else:
            text = f"{what} was not complete {after} on rank(s) {[part.rank for part in slow]}"
            text += _faults(slow) + _sources(slow)
        return Blame(OperationTimeout(text + before))


def _rounded(seconds: float) -> str:
    """The rest of the time of a call when its rank asked, for people."""
    return f"{round(seconds, 1 if seconds > 1 else 3):g}"


def _impatient(operation: Operation) -> list[RankPart]:
    """The ranks that may still give up: none once the operation is prepared, and in a fill none
    that has voted (R6). But all of them may, if a staged update waits until its ranks may give up
    what they hold.
    """
    if operation.state is OperationState.PREPARED:
        return []
    parts = operation.parts.values()
    if operation.kind is OpKind.PUBLISH or (operation.all_voted and operation.is_staged):
        return [*parts]
    return [part for part in parts if not part.voted]


def _corrupt(what: str, part: RankPart) -> IntegrityError:
    return IntegrityError(
        f"{what}: every source that rank {part.rank} tried sent bytes that do not have their "
        f"digest{_faults([part])}. "
        "Either the source's memory was written after it was published (by a way that torch does "
        "not count), or a "
        "machine or the way damages bytes: have it published anew, then call again"
    )


def _gone(starving: list[RankPart]) -> str:
    """The shards that these ranks read and that no rank holds as a whole: for an error."""
    shards = set[int]()
    for part in starving:
        if part.bridges and part.needs is not None:
            published = part.operation.bound.holdings
            shards.update(
                [need.shard for need in part.needs if not published.is_class_whole(need.shard)]
            )
        elif not part.layout.is_whole(part.shard):
            shards.add(part.shard)
    ranks = sorted([part.rank for part in starving])[:RANKS_TOLD_MAX]
    if not shards:
        return f" (rank(s) {ranks})"
    return f" of shard {some(list(map(str, sorted(shards))))}, which rank(s) {ranks} read"


def _sources(parts: list[RankPart]) -> str:
    """What these ranks read from, for an error."""
    workers = [lease.holding.member.worker for part in parts for lease in part.leases.values()]
    told = [f"{each.name!r} in site {each.location.site!r}" for each in dict.fromkeys(workers)]
    return f"; it was reading from {some(told, most=FAULTS_TOLD_MAX)}" if told else ""


def _faults(parts: list[RankPart]) -> str:
    """How these ranks' sources failed last, for an error."""
    told = list(
        dict.fromkeys([text for part in parts for _, text in part.attempts.faults.values()])
    )[:FAULTS_TOLD_MAX]
    return f"; reads that failed: {'; '.join(told)}" if told else ""
