"""Publish: the first call stages a number, each call is a vote, and the decision makes the version visible (R1, R2).

Not responsible for what a number may be, nor for what `latest` means: `versions` is.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator.actions import Publication
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.coverage import Coverage
from tensorhub.coordinator.entities import Holding, Operation, RankPart
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.operation_handlers import Blame
from tensorhub.coordinator.states import OperationState
from tensorhub.coordinator.testimonies import Testimonies
from tensorhub.coordinator.versions import Versions
from tensorhub.errors import ManifestMismatch, StateError
from tensorhub.messages import Publish
from tensorhub.model.digests import head_of
from tensorhub.types import Medium, VersionInfo


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
        if part.member.medium is Medium.HOST:
            return Blame(StateError("publish: a copy in the library's host memory is never published"), part.rank)
        if operation.version is None:
            conflict = self._versions.conflict(operation.group.model, call.version)
            if conflict is not None:
                return Blame(conflict)
            self._cluster.bind(operation, self._versions.stage(operation, call.version))
        if part.member.holding is not None:
            return Blame(StateError("publish: this rank's memory is published already"), part.rank)
        part.voted, part.needs_bytes = True, False
        return None

    def advance(self, operation: Operation) -> Blame | None:
        """Every rank has called. The number may have been overtaken since the first one did, or while a rank has checked."""
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
        nbytes = sum(part.member.nbytes for part in operation.parts.values())
        info = version.info
        version.info = VersionInfo(info.model, info.version, info.content_id, nbytes, info.world_size)
        self._cluster.note(version)
        for part in operation.parts.values():
            self._cluster.learn(version, version.holdings, part.shard, part.member.manifest, part.member.parts)
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
        """The memory of the ranks, but for those lost meanwhile, becomes the first replica. The version is visible now."""
        cluster, version = self._cluster, operation.bound
        replica = self._holdings.new_or_torn_replica(version, next(iter(operation.parts.values())).member)
        for part in operation.parts.values():
            if cluster.members.get(part.member.registration) is part.member:
                assert isinstance(part.call, Publish)
                holding = Holding(replica, part.member, part.call.generation, True, True, version.holdings)
                holding.chunks_verified = part.member.chunks
                self._holdings.add(holding)
                self._testimonies.of(version, part.shard).publisher = holding
        self._holdings.make_ready(replica, "committed")
        self._versions.show(version, operation.group.model)
        self._testimonies.compare_replicas(version)

    def abort(self, operation: Operation) -> None:
        """The number stays unused. (No replica was made, and the ranks close their memory by themselves.)"""
        if operation.version is not None:
            self._versions.discard(operation.version, operation.group.model)


def _unlike(operation: Operation) -> Blame | None:
    """Who reads across layouts verifies chunks of all ranks in one way. Other digests would look like other bytes."""
    kinds: dict[str, int] = {}
    for part in operation.parts.values():
        kinds.setdefault(head_of(part.member.manifest)[0], part.rank)
    if len(kinds) == 1:
        return None
    (one, first), (other, second), *_ = kinds.items()
    text = (
        f"publish of {operation.group.model.name!r}: rank {first} of group {operation.group.name!r} makes digests of kind "
        f"{one!r}, and rank {second} of kind {other!r}: connect all ranks with the same Options(digest=, integrity=)"
    )
    return Blame(ManifestMismatch(text, differences=(text,)))
