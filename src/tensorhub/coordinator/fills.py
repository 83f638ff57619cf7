"""Fill: bind to a version with a live source, write when every rank is ready, find sources until all is verified (R7, R12).

Replicate, update, prefetch and fetch. A fetch is a fill of memory that serves nobody: it makes no replica and no holding;
only its leases are seen. Not responsible for which source a reader gets (`readers`), nor for how it all ends (`decisions`).
"""

from __future__ import annotations

import hashlib

from tensorhub.coordinator.actions import Decision
from tensorhub.coordinator.entities import Blame, Cluster, Holding, Operation, RankPart, Replica, Version
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.states import OperationState, ReplicaState
from tensorhub.coordinator.versions import Versions
from tensorhub.errors import IntegrityError, ManifestMismatch, TransportUnavailable, VersionUnavailable
from tensorhub.messages import AddSource, DropSource, Fill, Grant, Start, Write
from tensorhub.types import OpKind

CLEARED_MAX = 2  # sources whose bytes one reader got damaged and which have them unchanged: then it is not them


class Fills:
    """The kind of the operations that read."""

    def __init__(self, cluster: Cluster, versions: Versions, readers: Readers, retentions: Retentions) -> None:
        self._cluster = cluster
        self._versions = versions
        self._readers = readers
        self._retentions = retentions

    # -- questions

    def target(self, operation: Operation) -> Version | None:
        """The visible version that its ranks ask for, or None while there is none. Raises as `Versions.resolve`."""
        call = first_call(operation)
        at_least = [p.call.at_least for p in operation.parts.values() if isinstance(p.call, Fill) and p.call.at_least]
        return self._versions.resolve(operation.group.model, call.selector, max(at_least, default=None))

    def staying(self, operation: Operation, version: Version) -> list[Holding]:
        """What its ranks hold and must not overwrite with `version` now: a retained version would be lost (G5)."""
        old = [part.member.holding for part in operation.parts.values() if part.member.holding is not None]
        return [h for h in old if h.version is not version and self._retentions.must_stay(h)]

    def all_find_a_source(self, operation: Operation) -> bool:
        """R7: before anything is overwritten, every shard that is to be read can be read."""
        version = operation.version
        assert version is not None
        readers = [part for part in operation.parts.values() if part.needs_bytes]
        return version.has_live_source() and all(self._readers.finds_source(part) for part in readers)

    # -- an operation's steps

    def called(self, part: RankPart) -> Blame | None:
        """Nothing yet: a group waits for its last rank before it binds, so that it gets the newest version there is."""
        return None

    def advance(self, operation: Operation) -> Blame | None:
        """Bind if it can be, and go on from there."""
        if operation.state is OperationState.GATHERING:
            blame = self._bind(operation)
            if blame is not None:
                return blame
        if not operation.running:
            return None
        if not operation.writing and not operation.unchanged:
            blame = self._write_if_ready(operation)
            if blame is not None:
                return blame
        return self._feed(operation)

    def entry(self, operation: Operation) -> Decision | None:
        """What several ranks must agree on is recorded first."""
        return operation.decision() if operation.group.world_size > 1 else None

    def commit(self, operation: Operation) -> None:
        """What its ranks filled, and what they held already, is one replica, and counts."""
        filled = [p.holding for p in operation.parts.values() if p.holding is not None]
        if not filled:
            return  # a fetch, or nothing has changed
        for holding in filled:
            holding.committed = True
        replica = filled[0].replica
        if replica.state is not ReplicaState.FILLING:
            return  # every rank that filled it is gone
        for part in operation.parts.values():
            if not part.needs_bytes and part.member.holding is not None:
                self._readers.move_holding(part.member.holding, replica)
        self._readers.make_ready(replica, "committed")

    def abort(self, operation: Operation) -> None:
        """Nobody reads any more; what was written to is torn."""
        replica = next((p.holding.replica for p in operation.parts.values() if p.holding is not None), None)
        for part in operation.parts.values():
            self._readers.release_all(part, "operation aborted")
            if part.holding is not None and not part.holding.leaving:
                self._readers.tear(part.holding)
        if replica is not None and replica.state is ReplicaState.FILLING:
            self._cluster.become(replica, ReplicaState.TORN, "operation aborted")
            self._readers.settle_replica(replica)

    # -- binding

    def _bind(self, operation: Operation) -> Blame | None:
        """R12: bind only once that number has a live source, or the group holds it; until then, wait.

        R7: also until what the group holds may be given up, so that no `before_write` pauses an engine for that.
        """
        try:
            version = self.target(operation)
        except VersionUnavailable as error:
            return Blame(error)
        if version is None:
            return None
        misfit = self._misfit(operation, version) or self._no_way(operation, version)
        if misfit is not None:
            return misfit
        holders = {
            rank: part.member.holding is not None and part.member.holding.version is version
            for rank, part in operation.parts.items()
        }
        if not all(holders.values()) and (not version.has_live_source() or self.staying(operation, version)):
            return None
        operation.version = version
        operation.unchanged = all(holders.values())
        self._cluster.become(operation, OperationState.RUNNING, f"bound to {version.number}")
        for rank, part in operation.parts.items():
            part.needs_bytes = not holders[rank]
            part.voted = part.ready = holders[rank]
        if not operation.unchanged:
            self._start(operation)
        return None

    @staticmethod
    def _misfit(operation: Operation, version: Version) -> Blame | None:
        """Why this group's ranks cannot take that version's shards, if they cannot."""
        group, info = operation.group, version.info
        one = next((part.shard for part in operation.parts.values() if part.member.fits_any_layout), None)
        if one is not None:
            if one < info.world_size:
                return None
            text = (
                f"version {info.version} of {info.model!r} has no rank {one}: its world_size is {info.world_size}, "
                f"so fetch one of the ranks 0 to {info.world_size - 1}"
            )
        elif (version.layout_id, info.world_size) == (group.layout_id, group.world_size):
            return None
        else:
            text = (
                f"version {info.version} of {info.model!r} is laid out as {version.layout_id!r} over "
                f"{info.world_size} rank(s), group {group.name!r} as {group.layout_id!r} over "
                f"{group.world_size}: readers of another layout are not supported yet"
            )
        return Blame(ManifestMismatch(text, differences=(text,)))

    def _no_way(self, operation: Operation, version: Version) -> Blame | None:
        """Which rank has no transport in common with its shard's sources, if one has none."""
        for part in operation.parts.values():
            offered = self._readers.offered_in_vain(part, version)
            if offered:
                mine = ", ".join(endpoint.transport for endpoint in part.member.worker.endpoints) or "none"
                text = f"rank {part.rank} has {mine}, and version {version.number} is offered over {', '.join(offered)} only"
                return Blame(TransportUnavailable(text))
        return None

    # -- writing

    def _start(self, operation: Operation) -> None:
        """Where no rank has a hook or holds anything, all can be overwritten at once: their Start is their Write."""
        fillers = [part for part in operation.parts.values() if part.needs_bytes]
        bare = not any((isinstance(p.call, Fill) and p.call.hold) or p.member.holding is not None for p in fillers)
        if bare and self.all_find_a_source(operation):
            self._begin_write(operation)
        for part in fillers:
            self._tell_start(part, self._first_grants(part) if operation.writing else ())

    def restate(self, part: RankPart) -> None:
        """Tell a rank that may have missed something where it stands."""
        if not part.needs_bytes or not part.operation.running:
            return
        leases = part.leases.values()
        self._tell_start(part, tuple(self._readers.to_grant(lease) for lease in leases if not lease.dropping))
        for lease in leases:
            if lease.dropping:
                drop = DropSource(part.operation.key, part.rank, lease.id, "the source leaves")
                self._cluster.tell(part.member, drop)

    def _tell_start(self, part: RankPart, grants: tuple[Grant, ...]) -> None:
        operation, version = part.operation, part.operation.version
        assert version is not None
        manifest_id = hashlib.blake2b(version.manifests[part.shard], digest_size=16).hexdigest()
        start = Start(operation.key, part.rank, version.info, manifest_id, operation.writing, grants)
        self._cluster.tell(part.member, start)

    def _write_if_ready(self, operation: Operation) -> Blame | None:
        """Everything is as it was, until every rank is ready and everything that is needed is there at once."""
        version = operation.version
        assert version is not None
        if version.abandoned and not version.has_live_source():
            return _abandoned(version)
        ready = all(part.ready for part in operation.parts.values())
        if ready and self.all_find_a_source(operation) and not self.staying(operation, version):
            self._begin_write(operation)
            for part in operation.parts.values():
                if part.needs_bytes:
                    self._cluster.tell(part.member, Write(operation.key, part.rank, self._first_grants(part)))
        return None

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
        if torn is not None:
            replica, torn.version = torn, version
            cluster.become(replica, ReplicaState.FILLING, f"filled with {version.number}")
        else:
            replica = Replica(cluster.new_id(), version, next(iter(operation.parts.values())).member)
            group.replicas.append(replica)
        for part in operation.parts.values():
            old = part.member.holding
            if part.needs_bytes:
                if old is not None:
                    self._readers.overwrite(old)
                assert isinstance(part.call, Fill)
                part.holding = Holding(replica, part.member, part.call.generation, False, False)
                self._readers.add_holding(part.holding)

    def _feed(self, operation: Operation) -> Blame | None:
        """Find sources for each reader that starves; in vain for ever if the last one has left on purpose."""
        version = operation.version
        assert version is not None
        for part in operation.parts.values():
            if part.reading and not part.voted and len(part.cleared) >= CLEARED_MAX:
                return Blame(damaged(operation, part), part.rank)
            for grant in self._readers.feed(part):
                self._cluster.tell(part.member, AddSource(operation.key, part.rank, grant))
            alone = part.wants_source and all(lease.dropping for lease in part.leases.values())
            if alone and version.abandoned and not version.has_live_source():
                return _abandoned(version)
        return None


def first_call(operation: Operation) -> Fill:
    """The call that says what all ranks of a fill have called."""
    call = next(iter(operation.parts.values())).call
    assert isinstance(call, Fill)
    return call


def _abandoned(version: Version) -> Blame:
    text = (
        f"version {version.number} of {version.info.model!r}: its last holder has left on purpose; "
        "ask again for a newer version, or retain versions that late readers need"
    )
    return Blame(VersionUnavailable(text))


def damaged(operation: Operation, part: RankPart) -> IntegrityError:
    """What several sources have sent this rank arrives with other bytes than they have."""
    assert operation.version is not None
    sources, reader = ", ".join(map(repr, sorted(set(part.cleared.values())))), part.member.worker.name
    return IntegrityError(
        f"{operation.kind} of {operation.group.model.name!r}: version {operation.version.number}: what rank {part.rank} got "
        f"from {sources} does not have its digest, and they have digested it again: their bytes are unchanged. The machine "
        f"of worker {reader!r}, or the way to it, damages bytes: look at its memory and network, or use another one"
    )
