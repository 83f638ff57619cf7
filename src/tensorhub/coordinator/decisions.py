"""How an operation ends (G4, R6): recorded first where that is needed, then equal for all ranks,
and remembered.

Responsible for the outcome that each rank hears, at once or when it asks late. Not responsible for
the moment at which all ranks have voted (`operations`), nor for the effects of a commit or an abort
on versions and memory (the handler of the operation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from tensorhub.coordinator import limits
from tensorhub.coordinator.actions import Decision, Entry, Forgotten
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import DECIDED_KEPT_MAX, Member, Model, Operation, RankPart
from tensorhub.coordinator.refusals import Blame
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.states import OperationState
from tensorhub.errors import CoordinatorUnavailable, GroupAborted
from tensorhub.messages import EpochChanged, ErrorInfo, Outcome, Revoked
from tensorhub.types import OpKey, OpKind, VersionInfo


class OperationHandler(Protocol):
    """The steps of an operation, in their order. None of them ends it: a step that cannot go on
    returns the blame.
    """

    def called(self, part: RankPart) -> Blame | None:
        """One more rank has called, and its part is a part of the operation."""

    def advance(self, operation: Operation) -> Blame | None:
        """Every rank has called, and not every rank has voted: do whatever the facts allow now."""

    def may_commit(self, operation: Operation) -> bool:
        """Every rank has voted: whether it may be decided now. What the ranks still hold is given
        up with that.
        """

    def entry(self, operation: Operation) -> Entry | None:
        """Every rank has voted: what must be durable before any rank hears of a commit, if anything
        must.
        """

    def commit(self, operation: Operation) -> None:
        """The commit is decided: carry the operation out."""

    def abort(self, operation: Operation) -> None:
        """The abort is decided: undo the begun work."""


@dataclass(eq=False, repr=False)
class Decisions:
    """Ends operations and keeps the decisions; no other component does."""

    _cluster: Cluster
    _retentions: Retentions
    _handlers: Mapping[OpKind, OperationHandler]

    # -- deciding

    def prepare(self, operation: Operation) -> None:
        """Every rank has voted: commit, or have the decision recorded first."""
        self._cluster.become(operation, OperationState.PREPARED, "every rank voted")
        entry = self._handlers[operation.kind].entry(operation)
        if entry is None:
            self._commit(operation)
        else:
            operation.record = self._cluster.persist(entry)
            self._cluster.records[operation.record] = operation
            self._cluster.file(operation)

    def held_up(self, operation: Operation) -> bool:
        """Whether a rollback of the model comes first: while one waits or is being recorded,
        nothing else is.
        """
        return (
            bool(operation.group.model.history.rollbacks)
            and self._handlers[operation.kind].entry(operation) is not None
        )

    def recorded(self, record: int) -> Operation | None:
        """An entry is durable. Returns the operation that it commits, if any."""
        operation = self._cluster.records.pop(record, None)
        if operation is not None:
            self._commit(operation)
        return operation

    def not_recorded(self, record: int, reason: str) -> Operation | None:
        """An entry cannot be made durable. Returns the operation that this aborts, if any."""
        operation = self._cluster.records.pop(record, None)
        if operation is not None:
            text = (
                f"the coordinator cannot make {operation.kind} {operation.key} durable: "
                f"{reason}; see its state_dir"
            )
            self.abort(operation, Blame(CoordinatorUnavailable(text)))
        return operation

    def _commit(self, operation: Operation) -> None:
        self._cluster.become(operation, OperationState.COMMITTED, "decided")
        if operation.record is not None:
            self._remember(operation.decision())
        self._handlers[operation.kind].commit(operation)
        changed = operation.kind is OpKind.PUBLISH
        outcomes = {}
        for part in operation.parts.values():
            what = changed or part.needs_bytes, operation.bound.info, None
            outcomes[part.rank] = Outcome(
                operation.key, part.rank, True, *what, by_source=part.is_by_source
            )
        self._close(operation, outcomes)

    def _remember(self, decision: Decision) -> None:
        """Keep a decision as long as its group is there, and then for a while: of groups that are
        gone, the oldest goes.
        """
        decisions = self._cluster.decisions
        name = decision.key.model, decision.key.group
        decisions.pop(name, None)
        decisions[name] = decision
        # two, so that they become fewer again where many groups were there
        for oldest in list(islice(decisions, 2)):
            if len(decisions) <= limits.DECISIONS_MAX:
                return
            kept = decisions.pop(oldest)
            if self._is_in_use(*oldest):
                decisions[oldest] = kept  # it is looked at again only after all other decisions
            else:
                self._cluster.persist(Forgotten(*oldest))

    def _is_in_use(self, model_name: str, group: str) -> bool:
        """Whether the group is there, or a newer decision of it is being recorded."""
        model = self._cluster.models.get(model_name)
        keys = [operation.key for operation in self._cluster.records.values()]
        return (model is not None and group in model.groups) or any(
            (k.model, k.group) == (model_name, group) for k in keys
        )

    def abort(self, operation: Operation, blame: Blame, *, also_late: bool = False) -> None:
        """End an operation on all ranks. The rank to blame gets its own error, all other ranks
        GroupAborted with the cause.

        A rank that has not called yet joins its group in the next operation, or (`also_late`) finds
        this operation ended.
        """
        self._cluster.become(operation, OperationState.ABORTED, str(blame.error))
        observations = self._cluster.observations
        observations.failed(self._cluster.now, operation, blame.error, again=blame.again)
        self._handlers[operation.kind].abort(operation)
        # A rank that registers later begins with a later operation.
        concerned = (
            {*operation.parts, *operation.group.members} if also_late else operation.parts.keys()
        )
        error, key = blame.error, operation.key
        mine = others = ErrorInfo.of(error)
        if blame.rank is not None:
            # a rank that refuses before any rank calls does not say which call
            is_known = operation.parts or operation.kind is OpKind.PREFETCH
            text = (
                f"{operation.kind if is_known else 'the call'} of group "
                f"{operation.group.name!r} ended on all ranks: rank {blame.rank}: {error}"
            )
            causes = {blame.rank: str(error)}
            others = ErrorInfo.of(GroupAborted(text, causes=causes, retryable=error.retryable))
        told = {rank: mine if rank in (blame.rank, *blame.others) else others for rank in concerned}
        outcomes = {
            rank: Outcome(key, rank, False, False, None, told[rank], again=blame.again)
            for rank in concerned
        }
        self._close(operation, outcomes)
        operation.group.attempt_before = str(error) if blame.again else ""

    def _close(self, operation: Operation, outcomes: dict[int, Outcome]) -> None:
        """The operation is over: its ranks hear the outcome, its group may begin the next
        operation, and no call waits for this operation.
        """
        group, name = operation.group, operation.name
        current = group.model.groups.get(group.name)
        # also if another worker has taken a lost rank's place: it asks for the same key
        for rank in operation.parts:
            member = current.members.get(rank) if current is not None else None
            if member is not None:
                self._tell(member, outcomes[rank])
        for timer in ("operation", "retry"):
            self._cluster.timers.cancel(timer, name)
        if operation.version is not None:
            operation.version.bound.pop(operation.key, None)
            self._cluster.note(operation.version)
        for changed in (self._cluster.changed_operations, self._cluster.woken):
            changed.pop(operation.key, None)
        self._cluster.file(operation)
        self._cluster.undecided.pop(name, None)
        group.end(operation.key)
        group.attempt_before = ""
        group.decided[operation.key] = outcomes
        serves = any(member.said.serves for member in group.members.values())
        # memory that is fetched into has one call
        while len(group.decided) > (DECIDED_KEPT_MAX if serves else 1):
            group.decided.pop(next(iter(group.decided)))
        self._cluster.touch(group.model, wakes=not operation.is_read_only)

    # -- looking up decisions

    @staticmethod
    def ended_without(member: Member, key: OpKey) -> bool:
        """Whether that operation is known to be over, and was not this rank's."""
        outcomes = member.group.decided.get(key)
        return outcomes is not None and member.rank not in outcomes

    def answer(self, member: Member, key: OpKey) -> None:
        """Answer a call or question about an operation that is over, or that this coordinator has
        never seen.
        """
        if any(operation.key == key for operation in self._cluster.records.values()):
            return  # the answer comes with the decision
        outcome = member.group.decided.get(key, {}).get(member.rank)
        if outcome is None:
            info = self._recorded(member.group.model, key)
            if info is not None:
                is_publish = any(
                    version.publisher == key for version in member.group.model.versions.values()
                )
                outcome = Outcome(
                    key, member.rank, True, True, info, None, by_source=not is_publish
                )
            else:
                text = (
                    f"the membership of group {member.group.name!r} changed, or its coordinator "
                    f"restarted; call again"
                )
                error = ErrorInfo.of(GroupAborted(text))
                # a former coordinator has minted it
                unknown = key.epoch >> 32 != self._cluster.epoch
                outcome = Outcome(key, member.rank, False, False, None, error, unknown=unknown)
        self._tell(member, outcome)
        group = member.group
        if outcome.error is not None and key.epoch == group.epoch and key not in group.decided:
            # It ended so long ago that it is forgotten: the rank's next call counts for its group's
            # operation at that time.
            self._cluster.tell(
                member, EpochChanged(group.model.name, group.name, group.epoch, group.sequence)
            )
        info = outcome.version
        if info is not None:
            version = member.group.model.versions.get(info.version)
            if version is None or version.info.content_id != info.content_id:
                gone = f"version {info.version} of {info.model!r} is retired"
                self._cluster.tell(member, Revoked(member.registration, info.content_id, gone))

    def _tell(self, member: Member, outcome: Outcome) -> None:
        info = outcome.version
        retained = self._retentions.tell_with(member, info.content_id) if info is not None else None
        self._cluster.tell(
            member, outcome if retained is None else replace(outcome, retained=retained)
        )

    def _recorded(self, model: Model, key: OpKey) -> VersionInfo | None:
        """The version that an operation has committed to, by the durable entries. It may be
        forgotten, or rolled back; then its lineage is not known, and its holders are about to give
        it up.
        """
        decision = self._cluster.decisions.get((key.model, key.group))
        if decision is None or decision.key != key:
            return None
        version = model.versions.get(decision.number)
        if version is not None and version.info.content_id == decision.content_id:
            return version.info
        return VersionInfo(
            model.name, decision.number, decision.content_id, decision.nbytes, decision.world_size
        )
