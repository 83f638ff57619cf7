"""Group operations: publish, replicate, update, prefetch and fetch, in two phases (R6, R7).

A fetch is a fill of memory that serves nobody: it makes no replica and no holding; only its leases are
seen.

Responsible for G4: all ranks of an operation act on one version and hear one decision. Each handler records a fact;
`settle` works out what follows, so that the order in which facts arrive does not matter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from tensorhub.coordinator.actions import Decision, Entry, Publication
from tensorhub.coordinator.entities import (
    DECIDED_KEPT_MAX,
    Blame,
    Cluster,
    Group,
    Holding,
    Member,
    Model,
    Operation,
    RankPart,
    Replica,
    Version,
)
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.states import OperationState, ReplicaState, VersionState
from tensorhub.coordinator.versions import Versions
from tensorhub.errors import (
    CoordinatorUnavailable,
    GroupAborted,
    IntegrityError,
    ManifestMismatch,
    OperationTimeout,
    StateError,
    TransportUnavailable,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.messages import (
    Abandon,
    AddSource,
    DropSource,
    EpochChanged,
    ErrorInfo,
    Fill,
    Grant,
    OrderedOut,
    Outcome,
    Publish,
    ReadFailed,
    Start,
    Write,
)
from tensorhub.types import Medium, OpKey, OpKind, Purpose, VersionInfo

FAULTS_TOLD_MAX = 3  # in an error
LATER_PER_RANK_MAX = 4  # messages of a new epoch that wait for an older one's decision


class Operations:
    """Changes operations and replicas' states; nobody else does."""

    def __init__(self, cluster: Cluster, versions: Versions, readers: Readers, retentions: Retentions) -> None:
        self._cluster = cluster
        self._versions = versions
        self._readers = readers
        self._retentions = retentions

    # ------------------------------------------------------------------------------------------------------- facts

    def arrive(self, member: Member, call: Publish | Fill) -> None:
        """One rank calls."""
        group, key = member.group, call.key
        if self._waits(member, call):
            return
        if key.epoch != group.epoch or key.sequence < group.sequence:
            if key.epoch == group.epoch and member.rank not in group.decided.get(key, {member.rank: None}):
                # It ended without this rank, which comes late: the call counts for what the others do now.
                self._cluster.tell(member, EpochChanged(key.model, key.group, group.epoch, group.sequence))
            else:
                self._answer_decided(member, key)
            return
        kind = OpKind.PUBLISH if isinstance(call, Publish) else call.kind
        operation = self._begin(member, key, kind)
        if member.rank in operation.parts:
            return  # a retry of a call that is on its way
        part = RankPart(operation, member, call, self._cluster.now + call.timeout_s)
        operation.parts[member.rank] = part
        operation.story.note(self._cluster.cause, self._cluster.now, f"rank {member.rank} called")
        self._first_or_same(operation, part)

    def _begin(self, member: Member, key: OpKey, kind: OpKind) -> Operation:
        """The group's undecided operation of this key; one of an older key was given up by this rank."""
        group = member.group
        if group.operation is not None and group.operation.key.sequence < key.sequence:
            left = GroupAborted(f"rank {member.rank} gave {group.operation.kind} up and called again")
            self._abort(group.operation, Blame(left, member.rank))
        if group.operation is None:
            group.operation = Operation(key, kind, group)
            group.sequence = key.sequence
        return group.operation

    def _first_or_same(self, operation: Operation, part: RankPart) -> None:
        """The first arrival binds kind and selector; one that differs aborts all at once and names both calls."""
        if (operation.kind is OpKind.FETCH) is part.member.serves:
            error = StateError(f"{operation.kind}: memory either serves others, or is fetched into")
            self._abort(operation, Blame(error, part.rank))
            return
        first = next(iter(operation.parts.values()))
        ours, theirs = _describe(part.call), _describe(first.call)
        if ours != theirs:
            causes = {first.rank: f"called {theirs}", part.rank: f"called {ours}"}
            text = (
                f"the ranks of group {operation.group.name!r} made different calls: {theirs} on rank "
                f"{first.rank}, {ours} on rank {part.rank}"
            )
            self._abort(operation, Blame(GroupAborted(text, causes=causes, retryable=False)))
            return
        if isinstance(part.call, Publish) and first is part:
            conflict = self._versions.conflict(operation.group.model, part.call.version)
            if conflict is not None:
                self._abort(operation, Blame(conflict))
                return
            operation.version = self._versions.stage(operation, part.call.version)
        if isinstance(part.call, Publish):
            if part.member.holding is not None:
                self._abort(
                    operation,
                    Blame(StateError("publish: this rank's memory is published already"), part.rank),
                )
                return
            part.voted, part.needs_bytes = True, False
        self._set_deadline(operation)
        self._changed(operation)

    @staticmethod
    def _waits(member: Member, message: Publish | Fill | Abandon) -> bool:
        """Whether an operation of an older epoch is still being recorded: those of the new one wait for its decision."""
        operation, epoch = member.group.operation, member.group.epoch
        if operation is None or operation.key.epoch == epoch or message.key.epoch != epoch:
            return False
        if len(operation.later) < LATER_PER_RANK_MAX * member.group.world_size:
            operation.later.append((member, message))
        return True

    def ready_to_write(self, member: Member, key: OpKey) -> None:
        part = self._part(member, key)
        if part is not None and part.operation.state is OperationState.RUNNING:
            part.ready = True
            self._changed(part.operation)

    def prepared(self, member: Member, key: OpKey) -> None:
        """This rank has verified every chunk: it can no longer be timed out or cancelled alone."""
        part = self._part(member, key)
        if part is None or part.operation.state is not OperationState.RUNNING or not part.reading:
            return
        part.voted = True
        if part.holding is not None:
            part.holding.complete = True
            part.holding.depth = 0
            part.holding.chunks_verified = member.chunks
        self._readers.release_all(part, "verified")
        self._set_deadline(part.operation)
        self._cluster.touch(member.group.model)
        self._changed(part.operation)

    def abandon(self, member: Member, message: Abandon) -> None:
        """This rank ends the operation, unless it has voted in it or it is decided."""
        group, key = member.group, message.key
        if self._waits(member, message):
            return
        if key.epoch == group.epoch and key.sequence >= group.sequence:
            self._begin(member, key, OpKind.PUBLISH)  # if nobody has called yet, it is aborted before
        operation = group.operation
        if operation is None or operation.key != key:
            self._answer_decided(member, key)
            return
        part = operation.parts.get(member.rank)
        filled = part is not None and part.voted and part.needs_bytes
        if operation.state is not OperationState.PREPARED and not filled:
            self._abort(operation, Blame(message.error.error(), member.rank), also_late=True)
            if part is None:
                self._answer_decided(member, key)

    def resolve(self, member: Member, key: OpKey) -> None:
        """This rank may have missed something: tell it the outcome, or, while there is none, where it stands."""
        operation = member.group.operation
        if operation is None or operation.key != key:
            self._answer_decided(member, key)
            return
        part = operation.parts.get(member.rank)
        if part is not None and part.needs_bytes and operation.running and operation.version is not None:
            grants = tuple(self._readers.to_grant(lease) for lease in part.leases.values() if not lease.dropping)
            manifest_id = _manifest_id(operation.version.manifests[part.shard])
            start = Start(key, member.rank, operation.version.info, manifest_id, operation.writing, grants)
            self._cluster.tell(member, start)
            for lease in part.leases.values():
                if lease.dropping:
                    self._cluster.tell(member, DropSource(key, part.rank, lease.id, "the source leaves"))

    def read_failed(self, member: Member, message: ReadFailed) -> None:
        part = self._part(member, message.key)
        if part is not None:
            self._readers.failed(part, message.lease, message.reason, message.detail)
            self._changed(part.operation)

    def progress(self, member: Member, key: OpKey, chunks_verified: int) -> None:
        part = self._part(member, key)
        if part is not None and part.holding is not None and not part.holding.complete:
            part.holding.chunks_verified = min(chunks_verified, member.chunks)

    def member_gone(self, member: Member, why: str) -> None:
        """A rank is lost, replaced or closed: before the decision, its group's operation is over."""
        operation = member.group.operation
        if operation is None:
            return
        part = operation.parts.get(member.rank)
        if part is not None:
            self._readers.reader_lost(part)
        if operation.state is not OperationState.PREPARED:
            self._abort(operation, Blame(GroupAborted(why, causes={member.rank: why}), member.rank))

    def rolled_back(self, model: Model, to: int) -> None:
        """A new lineage begins after `to`: what is bound to a later version, or would publish one, is over."""
        for operation in self._of(model):
            if operation.version is None or operation.version.number <= to:
                continue
            what = f"version {operation.version.number} of {model.name!r}"
            if operation.kind is OpKind.PUBLISH:
                text = f"{what} cannot be published: {model.name!r} was rolled back to {to} meanwhile; take its next number"
                self._abort(operation, Blame(VersionConflict(text)))
            else:
                text = f"{what} is no more: {model.name!r} was rolled back to {to}; ask again for a version that is left"
                self._abort(operation, Blame(VersionUnavailable(text)))

    def reconsider(self, model: Model) -> None:
        """What held this model's operations up may be over."""
        for operation in self._of(model):
            self._changed(operation)

    @staticmethod
    def _of(model: Model) -> list[Operation]:
        return [group.operation for group in model.groups.values() if group.operation is not None]

    def persisted(self, record: int) -> None:
        operation = self._cluster.records.pop(record, None)
        if operation is not None:
            self._commit(operation)

    def persist_failed(self, record: int, reason: str) -> None:
        operation = self._cluster.records.pop(record, None)
        if operation is not None:
            text = f"the coordinator cannot make {operation.kind} {operation.key} durable: {reason}; see its state_dir"
            self._abort(operation, Blame(CoordinatorUnavailable(text)))

    def retry_due(self, key: str) -> None:
        for operation in self._cluster.operations():
            if str(operation.key) == key:
                self._readers.set_retry_timer(operation)
                self._changed(operation)

    # -------------------------------------------------------------------------------------------------- deadlines

    def _set_deadline(self, operation: Operation) -> None:
        """The earliest deadline of the ranks that may still give up; a rank that voted in a fill may not."""
        may_end = [p.deadline for p in operation.parts.values() if operation.kind is OpKind.PUBLISH or not p.voted]
        name = str(operation.key)
        if may_end and operation.state is not OperationState.PREPARED:
            self._cluster.timers.set("operation", name, min(may_end))
        else:
            self._cluster.timers.cancel("operation", name)

    def deadline_passed(self, key: str) -> None:
        operation = next((op for op in self._cluster.operations() if str(op.key) == key), None)
        if operation is None or operation.state is OperationState.PREPARED:
            return
        late = min(
            (p for p in operation.parts.values() if operation.kind is OpKind.PUBLISH or not p.voted),
            key=lambda p: p.deadline,
        )
        self._abort(operation, self._timeout(operation, late))

    def _timeout(self, operation: Operation, late: RankPart) -> Blame:
        group, what = operation.group, f"{operation.kind} of {operation.group.model.name!r}"
        if not operation.gathered:
            missing = sorted(set(range(group.world_size)) - set(operation.parts))
            ranks = ", ".join(f"{rank}{'' if rank in group.members else ' (not registered)'}" for rank in missing)
            text = f"{what}: waited {late.call.timeout_s:g} s for group {group.name!r}; these ranks did not call: {ranks}"
            return Blame(OperationTimeout(text))
        target = operation.version or (self._target(operation) if isinstance(late.call, Fill) else None)
        if target is not None and not operation.writing and target.has_live_source():
            staying = self._staying(operation, target)
            if staying:
                error = self._retentions.refusal(staying[0], f"{what} to version {target.number}: nothing was written: ")
                return Blame(error, staying[0].rank, tuple(h.rank for h in staying[1:]))
        if operation.state is OperationState.GATHERING and isinstance(late.call, Fill):
            why = self._versions.waiting_text(group.model, late.call.selector, late.call.at_least)
            return Blame(VersionUnavailable(f"{what}: {why}; waited {late.call.timeout_s:g} s"))
        number = operation.version.number if operation.version else "?"
        if operation.version is not None and not operation.writing and not operation.version.has_live_source():
            return Blame(VersionUnavailable(f"{what}: version {number} has lost its last source; none came back in time"))
        if operation.version is not None and not (operation.writing or self._all_find_a_source(operation)):
            text = f"{what}: no holder of version {number} can be reached now (suspected, or it has just failed)"
            return Blame(VersionUnavailable(text))
        for part in operation.parts.values():
            if not part.voted and part.faults and all(reason == "corrupt" for reason, _ in part.faults.values()):
                return Blame(self._corrupt(f"{what}: version {number}", part), part.rank)
        starving = [p for p in operation.parts.values() if p.wants_source]
        if starving:
            text = f"{what}: version {number} has lost its last source (rank {starving[0].rank}), none came back in time"
            return Blame(VersionUnavailable(text + _faults(starving)))
        slow = sorted((p for p in operation.parts.values() if not p.voted), key=lambda p: p.rank)
        named = [p.rank for p in slow]
        text = f"{what}: version {number} was not complete after {late.call.timeout_s:g} s on rank(s) {named}"
        return Blame(OperationTimeout(text + _faults(slow)))

    @staticmethod
    def _corrupt(what: str, part: RankPart) -> IntegrityError:
        return IntegrityError(
            f"{what}: every source that rank {part.rank} tried sent bytes that do not have their digest{_faults([part])}. "
            "Either the source's memory was written after it was published (by a way that torch does not count), or a "
            "machine or the way damages bytes: have it published anew, then call again"
        )

    # ------------------------------------------------------------------------------------------------ consequences

    def settle(self, operation: Operation) -> None:
        """Do whatever the facts allow now."""
        if operation.state is OperationState.GATHERING and operation.gathered:
            if operation.kind is OpKind.PUBLISH:
                self._all_publish(operation)
            else:
                self._bind(operation)
        if operation.running and operation.kind is not OpKind.PUBLISH:
            self._settle_fill(operation)
        if operation.running and all(p.voted for p in operation.parts.values()) and not self._held_up(operation):
            self._prepare(operation)
        waiting = operation.group.model.waiting
        starving = not (operation.writing or operation.unchanged) or any(p.wants_source for p in operation.parts.values())
        if not operation.decided and operation.gathered and starving:
            waiting[operation.key] = operation
        else:
            waiting.pop(operation.key, None)

    def _held_up(self, operation: Operation) -> bool:
        """While a rollback of the model waits or is being recorded, nothing else of it begins to be."""
        return bool(operation.group.model.rollbacks) and self._entry(operation) is not None

    def _all_publish(self, operation: Operation) -> None:
        """Every rank has called; the number may have been overtaken since the first one did."""
        assert operation.version is not None
        conflict = self._versions.overtaken(operation.group.model, operation.version.number)
        if conflict is not None:
            self._abort(operation, Blame(conflict))
        else:
            self._become(operation, OperationState.RUNNING, "every rank called")

    def _bind(self, operation: Operation) -> None:
        """R12: bind only once that number has a live source, or the group holds it; until then, wait.

        R7: also until what the group holds may be given up, so that no `before_write` pauses an engine for that.
        """
        try:
            version = self._target(operation)
        except VersionUnavailable as error:
            self._abort(operation, Blame(error))
            return
        if version is None:
            return
        misfit = self._misfit(operation, version)
        if misfit is not None:
            self._abort(operation, Blame(ManifestMismatch(misfit, differences=(misfit,))))
            return
        for part in operation.parts.values():
            offered = self._readers.offered_in_vain(part, version)
            if offered:
                mine = ", ".join(endpoint.transport for endpoint in part.member.worker.endpoints) or "none"
                text = f"rank {part.rank} has {mine}, and version {version.number} is offered over {', '.join(offered)} only"
                self._abort(operation, Blame(TransportUnavailable(text)))
                return
        holders = {
            rank: part.member.holding is not None and part.member.holding.version is version
            for rank, part in operation.parts.items()
        }
        if not all(holders.values()) and (not version.has_live_source() or self._staying(operation, version)):
            return
        operation.version = version
        operation.unchanged = all(holders.values())
        self._become(operation, OperationState.RUNNING, f"bound to {version.number}")
        for rank, part in operation.parts.items():
            assert isinstance(part.call, Fill)
            part.needs_bytes = not holders[rank]
            part.voted = part.ready = holders[rank]
        self._set_deadline(operation)
        if not operation.unchanged:
            self._start(operation)

    @staticmethod
    def _misfit(operation: Operation, version: Version) -> str | None:
        """Why this group's ranks cannot take that version's shards, if they cannot."""
        group, info = operation.group, version.info
        fetched = next((part.shard for part in operation.parts.values() if not part.member.serves), None)
        if fetched is not None:
            if fetched < info.world_size:
                return None
            return (
                f"version {info.version} of {info.model!r} has no rank {fetched}: its world_size is {info.world_size}, "
                f"so fetch one of the ranks 0 to {info.world_size - 1}"
            )
        if (version.layout_id, info.world_size) == (group.layout_id, group.world_size):
            return None
        return (
            f"version {info.version} of {info.model!r} is laid out as {version.layout_id!r} over "
            f"{info.world_size} rank(s), group {group.name!r} as {group.layout_id!r} over "
            f"{group.world_size}: readers of another layout are not supported yet"
        )

    def _target(self, operation: Operation) -> Version | None:
        """The visible version that its ranks ask for, or None while there is none. Raises as `Versions.resolve`."""
        call = next(iter(operation.parts.values())).call
        assert isinstance(call, Fill)
        at_least = [p.call.at_least for p in operation.parts.values() if isinstance(p.call, Fill) and p.call.at_least]
        return self._versions.resolve(operation.group.model, call.selector, max(at_least, default=None))

    def _staying(self, operation: Operation, version: Version) -> list[Holding]:
        """What its ranks hold and must not overwrite with `version` now: a retained version would be lost (G5)."""
        old = [part.member.holding for part in operation.parts.values() if part.member.holding is not None]
        return [h for h in old if h.version is not version and self._retentions.must_stay(h)]

    def _start(self, operation: Operation) -> None:
        """Where no rank has a hook or holds anything, all can be overwritten at once: their Start is their Write."""
        assert operation.version is not None
        fillers = [part for part in operation.parts.values() if part.needs_bytes]
        bare = not any((isinstance(p.call, Fill) and p.call.hold) or p.member.holding is not None for p in fillers)
        at_once = bare and self._all_find_a_source(operation)
        if at_once:
            self._begin_write(operation)
        for part in fillers:
            manifest_id = _manifest_id(operation.version.manifests[part.shard])
            grants = self._first_grants(part) if at_once else ()
            start = Start(operation.key, part.rank, operation.version.info, manifest_id, at_once, grants)
            self._cluster.tell(part.member, start)

    def _settle_fill(self, operation: Operation) -> None:
        version = operation.version
        assert version is not None
        if not operation.writing and not operation.unchanged:
            if version.abandoned and not version.has_live_source():
                self._abort_abandoned(operation)
                return
            ready = all(part.ready for part in operation.parts.values())
            if ready and self._all_find_a_source(operation) and not self._staying(operation, version):
                self._begin_write(operation)
                for part in operation.parts.values():
                    if part.needs_bytes:
                        self._cluster.tell(part.member, Write(operation.key, part.rank, self._first_grants(part)))
        for part in operation.parts.values():
            if part.wants_source:
                grant = self._readers.grant(part)
                if grant is not None:
                    self._cluster.tell(part.member, AddSource(operation.key, part.rank, grant))
                elif version.abandoned and not version.has_live_source():
                    self._abort_abandoned(operation)
                    return

    def _all_find_a_source(self, operation: Operation) -> bool:
        """R7: before anything is overwritten, every shard that is to be read can be read."""
        version = operation.version
        assert version is not None
        readers = [part for part in operation.parts.values() if part.needs_bytes]
        return version.has_live_source() and all(self._readers.finds_source(part) for part in readers)

    def _abort_abandoned(self, operation: Operation) -> None:
        number = operation.version.number if operation.version else "?"
        text = (
            f"version {number} of {operation.group.model.name!r}: its last holder has left on purpose; "
            "ask again for a newer version, or retain versions that late readers need"
        )
        self._abort(operation, Blame(VersionUnavailable(text)))

    def _first_grants(self, part: RankPart) -> tuple[Grant, ...]:
        grant = self._readers.grant(part)
        return () if grant is None else (grant,)

    def _begin_write(self, operation: Operation) -> None:
        """Every rank is ready: the old replica leaves, the new one begins. Past this point an abort tears."""
        operation.writing = True
        for part in operation.parts.values():
            part.reading = part.needs_bytes
        if operation.kind is not OpKind.FETCH:
            self._begin_replica(operation)

    def _begin_replica(self, operation: Operation) -> None:
        cluster, group, version = self._cluster, operation.group, operation.version
        assert version is not None
        torn = group.torn_replica()
        call = next(iter(operation.parts.values())).call
        assert isinstance(call, Fill)
        if torn is not None:
            replica, torn.version = torn, version
            replica.become(ReplicaState.FILLING, cluster.cause, cluster.now, f"filled with {version.number}")
        else:
            replica = Replica(cluster.new_id(), group, version, call.medium, call.purpose)
            group.replicas.append(replica)
        for part in operation.parts.values():
            old = part.member.holding
            if part.needs_bytes:
                if old is not None:
                    self._readers.overwrite(old)
                assert isinstance(part.call, Fill)
                part.holding = Holding(replica, part.member, part.rank, part.call.generation, False, False)
                self._readers.add_holding(part.holding)

    # --------------------------------------------------------------------------------------------------- deciding

    def _prepare(self, operation: Operation) -> None:
        """Every rank has voted. What several ranks must agree on, and what `latest` means, is recorded first."""
        self._become(operation, OperationState.PREPARED, "every rank voted")
        self._set_deadline(operation)
        entry = self._entry(operation)
        if entry is None:
            self._commit(operation)
        else:
            operation.record = self._cluster.persist(entry)
            self._cluster.records[operation.record] = operation

    def _entry(self, operation: Operation) -> Entry | None:
        version, group = operation.version, operation.group
        assert version is not None
        if operation.kind is OpKind.PUBLISH:
            nbytes = sum(part.member.nbytes for part in operation.parts.values())
            old = version.info
            version.info = VersionInfo(old.model, old.version, old.content_id, nbytes, old.world_size)
            return Publication(
                model=old.model,
                lineage=version.lineage,
                number=old.version,
                content_id=old.content_id,
                nbytes=nbytes,
                world_size=old.world_size,
                layout_id=version.layout_id,
                key=operation.key,
            )
        if group.world_size == 1:
            return None
        return _decision(operation, version)

    def _commit(self, operation: Operation) -> None:
        cluster, group, version = self._cluster, operation.group, operation.version
        assert version is not None
        self._become(operation, OperationState.COMMITTED, "decided")
        if group.world_size > 1:
            cluster.decisions[operation.key.model, operation.key.group] = _decision(operation, version)
        alive = [p for p in operation.parts.values() if cluster.members.get(p.member.registration) is p.member]
        if operation.kind is OpKind.PUBLISH:
            replica = group.torn_replica()
            if replica is None:
                replica = Replica(cluster.new_id(), group, version, Medium.DEVICE, Purpose.USE)
                group.replicas.append(replica)
            replica.version = version
            for part in operation.parts.values():
                version.manifests[part.rank] = part.member.manifest
            for part in alive:
                assert isinstance(part.call, Publish)
                holding = Holding(replica, part.member, part.rank, part.call.generation, True, True)
                holding.chunks_verified = part.member.chunks
                self._readers.add_holding(holding)
            self._become_ready(replica)
            self._versions.show(version, group.model)
        elif not operation.unchanged and operation.kind is not OpKind.FETCH:
            self._commit_fill(operation)
        outcomes = {
            p.rank: Outcome(
                operation.key, p.rank, True, p.needs_bytes or operation.kind is OpKind.PUBLISH, version.info, None
            )
            for p in operation.parts.values()
        }
        self._close(operation, outcomes)

    def _commit_fill(self, operation: Operation) -> None:
        filled = [p.holding for p in operation.parts.values() if p.holding is not None]
        for holding in filled:
            holding.committed = True
        replica = filled[0].replica
        if replica.state is not ReplicaState.FILLING:
            return  # every rank that filled it is gone
        for part in operation.parts.values():
            if not part.needs_bytes and part.member.holding is not None:
                self._readers.move_holding(part.member.holding, replica)
        self._become_ready(replica)

    def _become_ready(self, replica: Replica) -> None:
        replica.become(ReplicaState.READY, self._cluster.cause, self._cluster.now, "committed")
        self._readers.settle_replica(replica)
        self._cluster.touch(replica.group.model)

    def _abort(self, operation: Operation, blame: Blame, *, also_late: bool = False) -> None:
        """End it on all ranks: the rank to blame gets its own error, the others GroupAborted with the cause.

        A rank that has not called yet joins the others' next operation, or (`also_late`) finds this one ended.
        """
        self._become(operation, OperationState.ABORTED, str(blame.error))
        version = operation.version
        if version is not None and version.state is VersionState.STAGED and version.publisher == operation.key:
            self._versions.discard(version, operation.group.model)
        replica = next((p.holding.replica for p in operation.parts.values() if p.holding is not None), None)
        for part in operation.parts.values():
            self._readers.release_all(part, "operation aborted")
            if part.holding is not None and not part.holding.leaving:
                self._readers.tear(part.holding)
        if replica is not None and replica.state is ReplicaState.FILLING:
            replica.become(ReplicaState.TORN, self._cluster.cause, self._cluster.now, "operation aborted")
            self._readers.settle_replica(replica)
        concerned: Iterable[int] = range(operation.group.world_size) if also_late else operation.parts
        self._close(operation, {rank: self._aborted(operation, blame, rank) for rank in concerned})

    @staticmethod
    def _aborted(operation: Operation, blame: Blame, rank: int) -> Outcome:
        error = blame.error
        if blame.rank is not None and rank not in (blame.rank, *blame.others):
            text = f"{operation.kind} of group {operation.group.name!r} ended on all ranks: rank {blame.rank}: {error}"
            error = GroupAborted(text, causes={blame.rank: str(error)}, retryable=error.retryable)
        return Outcome(operation.key, rank, False, False, None, ErrorInfo.of(error))

    def _close(self, operation: Operation, outcomes: dict[int, Outcome]) -> None:
        group, name = operation.group, str(operation.key)
        current = group.model.groups.get(group.name)
        for rank in operation.parts:  # whoever has taken a lost rank's place asks for the same key
            member = current.members.get(rank) if current is not None else None
            if member is not None:
                self._cluster.tell(member, outcomes[rank])
        for kind in ("operation", "retry"):
            self._cluster.timers.cancel(kind, name)
        group.model.waiting.pop(operation.key, None)
        self._cluster.changed_operations.pop(operation.key, None)
        group.operation = None
        if operation.key.epoch == group.epoch:
            group.sequence = operation.key.sequence + 1
        group.decided[operation.key] = outcomes
        while len(group.decided) > DECIDED_KEPT_MAX:
            group.decided.pop(next(iter(group.decided)))
        self._cluster.touch(group.model)
        for member, message in operation.later:
            if group.members.get(member.rank) is not member:
                continue
            if isinstance(message, Abandon):
                self.abandon(member, message)
            else:
                self.arrive(member, message)

    def _answer_decided(self, member: Member, key: OpKey) -> None:
        """A call or question about an operation that is over, or that this coordinator never saw."""
        if any(operation.key == key for operation in self._cluster.records.values()):
            return  # the answer comes with the decision
        outcome = member.group.decided.get(key, {}).get(member.rank)
        if outcome is None:
            info = self._recorded(member.group.model, key)
            if info is not None:
                outcome = Outcome(key, member.rank, True, True, info, None)
            else:
                text = f"the membership of group {member.group.name!r} changed, or its coordinator restarted; call again"
                outcome = Outcome(key, member.rank, False, False, None, ErrorInfo.of(GroupAborted(text)))
        self._cluster.tell(member, outcome)
        info = outcome.version
        if info is not None:
            version = member.group.model.versions.get(info.version)
            if version is None or version.info.content_id != info.content_id:
                gone = f"version {info.version} of {info.model!r} is retired"
                self._cluster.tell(member, OrderedOut(member.registration, info.content_id, gone))

    def _recorded(self, model: Model, key: OpKey) -> VersionInfo | None:
        """The version that an operation has committed to, by what is durable."""
        decision = self._cluster.decisions.get((key.model, key.group))
        if decision is not None and decision.key == key:  # its version may be forgotten, or rolled back
            return VersionInfo(model.name, decision.number, decision.content_id, decision.nbytes, decision.world_size)
        published = (v.info for v in model.versions.values() if v.visible and v.publisher == key)
        return next(published, None)

    # ---------------------------------------------------------------------------------------------------- helpers

    @staticmethod
    def _part(member: Member, key: OpKey) -> RankPart | None:
        operation = member.group.operation
        return operation.parts.get(member.rank) if operation is not None and operation.key == key else None

    def _changed(self, operation: Operation) -> None:
        if not operation.decided:
            self._cluster.changed_operations[operation.key] = operation

    def _become(self, operation: Operation, state: OperationState, why: str) -> None:
        operation.become(state, self._cluster.cause, self._cluster.now, why)


def _describe(call: Publish | Fill) -> str:
    if isinstance(call, Publish):
        return f"publish({call.version})"
    staged = ", staged=True" if call.staged else ""
    at_least = "" if call.at_least is None else f", at_least={call.at_least}"
    return f"{call.kind}({call.selector!r}{at_least}{staged})"


def _decision(operation: Operation, version: Version) -> Decision:
    info = version.info
    return Decision(operation.key, info.model, info.version, info.content_id, info.nbytes, info.world_size)


def _faults(parts: list[RankPart]) -> str:
    """How these ranks' sources failed last, for an error."""
    told = [text for part in parts for _, text in part.faults.values()][:FAULTS_TOLD_MAX]
    return f"; reads that failed: {'; '.join(told)}" if told else ""


def _manifest_id(manifest: bytes) -> str:
    return hashlib.blake2b(manifest, digest_size=16).hexdigest()


def new_group(cluster: Cluster, model_name: str, name: str, world_size: int, layout_id: str) -> Group:
    """A group begins with its first registration."""
    model = cluster.model(model_name)
    group = model.groups[name] = Group(model, name, world_size, layout_id, cluster.mint_epoch())
    return group
