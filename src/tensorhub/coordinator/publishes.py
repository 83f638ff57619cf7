"""Publish and rollback: how versions come, and how a new lineage begins (R1, R2).

The first call of a publish stages a number, each call is a vote, and the decision makes the version
visible. A rollback begins a lineage that inherits the versions up to a number; the later versions
are retired and fenced. No entry on its way to the store is undone, and nothing is recorded into a
lineage that is about to end.

Not responsible for which number may be published, nor for the meaning of `latest` (`versions`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tensorhub.coordinator import actions
from tensorhub.coordinator.actions import Publication
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.coverage import Coverage
from tensorhub.coordinator.entities import (
    FORGOTTEN_KEPT_MAX,
    Holding,
    Model,
    Operation,
    PendingWrite,
    RankPart,
)
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.operations import Operations
from tensorhub.coordinator.refusals import Blame
from tensorhub.coordinator.restoring import STORED_MAX
from tensorhub.coordinator.states import OperationState, PartState
from tensorhub.coordinator.testimonies import Testimonies
from tensorhub.coordinator.versions import Versions
from tensorhub.errors import (
    CoordinatorUnavailable,
    GroupAborted,
    ManifestMismatch,
    StateError,
    TensorHubError,
    VersionConflict,
)
from tensorhub.messages import Publish, Rollback
from tensorhub.model.digests import head_of
from tensorhub.types import Medium


@dataclass(eq=False, repr=False)
class Publishes:
    """The handler of operations that begin with complete memory."""

    _cluster: Cluster
    _versions: Versions
    _holdings: Holdings
    _testimonies: Testimonies
    _coverage: Coverage

    def called(self, part: RankPart) -> Blame | None:
        """The rank's memory is open under a new generation: that is its vote."""
        operation, call = part.operation, part.call
        assert isinstance(call, Publish)
        if part.member.said.medium is Medium.HOST:
            return Blame(
                StateError("publish: a copy in the library's host memory is never published"),
                part.rank,
            )
        history = operation.group.model.history
        if call.in_lineage not in (None, history.lineage):
            text = f"{operation.group.model.name!r} was rolled back since its coordinator restarted"
            return Blame(GroupAborted(f"{text}; call again"), part.rank)
        if operation.version is None:
            conflict = self._versions.conflict(operation.group.model, call.version)
            if conflict is not None:
                return Blame(conflict)
            self._cluster.bind(operation, self._versions.stage(operation, call.version))
        if part.member.holding is not None:
            return Blame(StateError("publish: this rank's memory is published already"), part.rank)
        self._cluster.become(part, PartState.VOTED, "publishes")
        return None

    def advance(self, operation: Operation) -> Blame | None:
        """Every rank has called. The number may have been overtaken since the first one did, or
        while a rank has checked.
        """
        if operation.running and not operation.covers:
            return None
        version = operation.bound
        conflict = self._versions.overtaken(operation.group.model, version.number)
        if conflict is not None:
            return Blame(conflict)
        if operation.running:
            return None
        self._cluster.become(operation, OperationState.RUNNING, "every rank called")
        version.lay_out(operation.group.layout)
        nbytes = sum(part.member.said.nbytes for part in operation.parts.values())
        if nbytes > STORED_MAX:
            text = f"version {version.number} of {version.info.model!r} cannot have {nbytes} bytes"
            return Blame(StateError(f"publish: {text}"))
        info = version.info
        version.info = replace(info, nbytes=nbytes)
        self._cluster.note(version)
        for part in operation.parts.values():
            self._cluster.learn(
                version,
                version.holdings,
                part.shard,
                part.member.said.manifest,
                part.member.said.parts,
            )
        version.manifest_ids = self._cluster.ids_of(version.holdings)
        return _unlike(operation) if any(version.holdings.parts.values()) else None

    def may_commit(self, operation: Operation) -> bool:
        """Its ranks hold nothing else. Together they hold every byte."""
        return self._coverage.is_whole(operation)

    def entry(self, operation: Operation) -> Publication:
        """What `latest` means is always recorded first."""
        version, info = operation.bound, operation.bound.info
        return Publication(
            model=info.model,
            lineage=version.lineage,
            number=info.version,
            content_id=info.content_id,
            nbytes=info.nbytes,
            world_size=info.world_size,
            layout_id=version.layout_id,
            key=operation.key,
            manifest_ids=version.manifest_ids,
        )

    def commit(self, operation: Operation) -> None:
        """The memory of the ranks, but for those lost meanwhile, becomes the first replica. The
        version is visible now.
        """
        cluster, version = self._cluster, operation.bound
        replica = self._holdings.new_or_torn_replica(
            version, next(iter(operation.parts.values())).member
        )
        for part in operation.parts.values():
            if cluster.members.get(part.member.registration) is part.member:
                assert isinstance(part.call, Publish)
                holding = Holding(
                    replica, part.member, part.call.generation, True, True, version.holdings
                )
                self._holdings.add(holding)
                self._testimonies.of(version, part.shard).publisher = holding
        self._holdings.make_ready(replica, "committed")
        self._versions.show(version, operation.group.model)
        self._testimonies.compare_replicas(version)

    def abort(self, operation: Operation) -> None:
        """The number stays unused. (No replica was made, and the ranks close their memory by
        themselves.)
        """
        if operation.version is not None:
            self._versions.discard(operation.version, operation.group.model)


def _unlike(operation: Operation) -> Blame | None:
    """A reader across layouts verifies chunks of all ranks in one way. Digests of another kind
    would look like wrong bytes.
    """
    kinds: dict[str, int] = {}
    for part in operation.parts.values():
        kinds.setdefault(head_of(part.member.said.manifest)[0], part.rank)
    if len(kinds) == 1:
        return None
    (one, first), (other, second), *_ = kinds.items()
    text = (
        f"publish of {operation.group.model.name!r}: rank {first} of group "
        f"{operation.group.name!r} makes digests of kind "
        f"{one!r}, and rank {second} of kind {other!r}: connect all ranks with the same "
        f"Options(digest=, integrity=)"
    )
    return Blame(ManifestMismatch(text, differences=(text,)))


ROLLBACKS_PER_MODEL_MAX = 64  # that wait


@dataclass(eq=False, repr=False)
class Lineages:
    """Changes the lineages of models; no other component does."""

    _cluster: Cluster
    _versions: Versions
    _holdings: Holdings
    _operations: Operations

    def ask(self, session: int | None, message: Rollback) -> None:
        """A trainer goes back to an older version."""
        model = self._cluster.models.get(message.model)
        if model is None:
            self._cluster.answer(session, message.request, self._refusal(None, message))
            return
        known = next(
            (write for write in model.history.rollbacks if _call(write).ident == message.ident),
            None,
        )
        if known is not None:
            known.repeat(replace(message, to=_call(known).to), session)  # the recorded call stays
        elif len(model.history.rollbacks) >= ROLLBACKS_PER_MODEL_MAX:
            error = CoordinatorUnavailable(
                f"too many rollbacks of {model.name!r} wait to be recorded; call again"
            )
            self._cluster.answer(session, message.request, error)
        else:
            model.history.rollbacks.append(PendingWrite(model, message, session, self._cluster.now))
            self._cluster.touch(model)

    def settle(self, model: Model) -> None:
        """Let the first one go on as soon as nothing else of this model is being recorded."""
        while (
            model.history.rollbacks
            and model.history.rollbacks[0].record is None
            and not self._is_recording(model)
        ):
            write = model.history.rollbacks[0]
            message = _call(write)
            error, done = (
                self._refusal(model, message),
                message.ident in model.history.rolled_back_by.split("\n")[:-1],
            )
            if done or error is not None:
                self._decide(write, None if done else error)
                continue
            entry = actions.Rollback(
                model.name, model.history.lineage + 1, message.to, message.ident
            )
            self._cluster.record(write, entry)

    def _is_recording(self, model: Model) -> bool:
        return any(operation.group.model is model for operation in self._cluster.records.values())

    @staticmethod
    def _refusal(model: Model | None, message: Rollback) -> VersionConflict | None:
        if model is None or model.mark is None:
            return VersionConflict(
                f"{message.model!r} cannot be rolled back: nothing was published under it yet"
            )
        if message.to > model.mark:
            return VersionConflict(
                f"{message.model!r} cannot be rolled back to {message.to}: its newest number is "
                f"{model.mark}; "
                f"give {model.mark} or less"
            )
        return None

    def recorded(self, write: PendingWrite) -> None:
        """The new lineage is durable: it begins."""
        model, message = write.model, _call(write)
        before = model.history
        self._versions.begin_lineage(
            model,
            before.lineage + 1,
            message.to,
            actions.rolled_back_by(message.ident, before.rolled_back_by),
            actions.bounded(before.bounds, before.lineage + 1, message.to),
            before.origin,
        )
        self._operations.rolled_back(model, message.to)
        known = model.history.forgotten
        forgotten = {number: known[number] for number in known if number <= message.to}
        if len(known) == FORGOTTEN_KEPT_MAX and not forgotten:
            # so long ago that the decision is forgotten: it may have been published
            forgotten = {message.to: None}
        model.history.forgotten = forgotten
        model.history.lost = tuple(sorted(forgotten)[-2:])
        reason = f"{model.name!r} was rolled back to {message.to}"
        self._cluster.happened("rolled_back", model.name, message.to, "", reason)
        for version in [v for v in model.versions.values() if v.number > message.to]:
            for holding in [
                h for layout in version.layouts for holdings in layout.values() for h in holdings
            ]:
                self._holdings.order_out(holding, reason)
            for pin in [pin for pin in model.pins.values() if pin.number == version.number]:
                self._cluster.remove_pin(model, pin.pin)
            self._versions.retire(version, model, reason)
        self._versions.refresh(model)  # a worker that hears Done has heard of the newest version
        # `latest` and `latest-1` may name other versions now
        self._cluster.wake_all(model.waiting.unbound)
        self._decide(write, None)

    def not_recorded(self, write: PendingWrite, reason: str) -> None:
        text = (
            f"the coordinator cannot make the rollback of {write.model.name!r} durable: "
            f"{reason}; see its state_dir"
        )
        self._decide(write, CoordinatorUnavailable(text))

    def _decide(self, write: PendingWrite, error: TensorHubError | None) -> None:
        """A rollback is over: its asker hears how, and what waited for it goes on."""
        write.model.history.rollbacks.remove(write)
        self._cluster.answer(write.session, write.message.request, error)
        self._operations.reconsider(write.model)
        self._cluster.touch(write.model)


def _call(write: PendingWrite) -> Rollback:
    assert isinstance(write.message, Rollback)
    return write.message
