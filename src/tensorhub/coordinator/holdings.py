"""How what a rank's memory holds begins and ends, and with it its group's replica.

Responsible for holdings and replicas: they become sources, take no readers any more, and are gone. Not responsible for what
becomes of their readers (`readers`), nor for when a source may leave (`withdrawals`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator import bridges
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Member, Replica, Version, Worker
from tensorhub.coordinator.feeding import Feeding
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.states import LeaseState, ReplicaState
from tensorhub.messages import Fenced, Revoked


@dataclass(eq=False, repr=False)
class Holdings:
    """Changes holdings and replicas; nobody else does."""

    _cluster: Cluster
    _feeding: Feeding
    _readers: Readers

    def add(self, holding: Holding) -> None:
        """From now on it may be read."""
        holding.replica.holdings[holding.rank] = holding
        holding.verified = holding.is_fed = holding.complete
        holding.layout.add(holding, holding.member.nbytes, holding.member.chunks)
        self._cluster.reckon(holding)
        member, parts = holding.member, None
        if not holding.bridges and not holding.layout.manifests.get(holding.shard):  # else it may have other regions
            parts = bridges.as_known(member, holding.version, member.parts)
        self._cluster.learn(holding.version, holding.layout, holding.shard, holding.member.manifest, parts)
        holding.member.holding = holding
        if holding.bridges:
            self._feeding.feed(holding)  # it may need nothing
        self._cluster.note(holding.member, holding.replica)
        self._cluster.touch(holding.member.group.model)

    def move(self, holding: Holding, replica: Replica) -> None:
        """A holding that was there before becomes a part of its group's new replica."""
        before, holding.replica = holding.replica, replica
        before.holdings.pop(holding.rank, None)
        replica.holdings[holding.rank] = holding
        self._cluster.reckon(holding)
        self._cluster.note(holding.member, before, replica)
        self.settle_replica(before)

    def verified(self, holding: Holding, *, is_so: bool) -> None:
        """It has every chunk, or some have to be read again after all."""
        holding.verified = is_so
        self._feeding.feed(holding)

    def completed(self, holding: Holding) -> None:
        """It has all that was published."""
        holding.complete, holding.verified, holding.depth, holding.behind = True, True, 0, 0
        self._feeding.feed(holding)

    # -- the end

    def order_out(self, holding: Holding, reason: str) -> None:
        """Its version is retired: nobody reads it any more, and its owner is to fence and forget it."""
        self.leave(holding, reason)
        self._readers.cut_readers(holding, reason, moved=False)
        owner = holding.member
        self._cluster.tell(owner, Revoked(owner.registration, holding.version.info.content_id, reason))

    def overwrite(self, holding: Holding) -> None:
        """Its owner is about to fence and overwrite it (R7): readers are moved or cut, never waited for."""
        self.leave(holding, "overwritten")
        self._readers.cut_readers(holding, "the source takes another version", moved=True)

    def withdrawn(self, worker: Worker, message: Fenced) -> None:
        """The owner says that its fence stands."""
        member = worker.members.get(message.registration)
        if member is not None:
            self.confirm_withdrawn(member, message.generation)

    def confirm_withdrawn(self, member: Member, generation: int) -> None:
        """The owner's fence stands: nothing can be read under that generation any more."""
        if member.holding is not None and member.holding.generation == generation:
            self.leave(member.holding, "fenced by its owner")  # a local fence, without our grant
        for holding in [h for h in member.leaving if h.generation == generation]:
            self._end(holding)

    def lose(self, holding: Holding) -> None:
        """Its worker is LOST, and may still serve its bytes: readers without another source keep their lease."""
        self.leave(holding, "worker lost", on_purpose=False)
        for lease in list(holding.readers.values()):
            if lease.state is LeaseState.FENCING:
                self._readers.confirm_fenced(lease, "owner lost")
            else:
                self._readers.move(lease)
        self._end(holding, cut=False)

    def quarantine(self, holding: Holding) -> None:
        """Its bytes have changed: nobody reads it any more. It stays its owner's holding until the owner takes it back."""
        holding.quarantined = True
        self.leave(holding, "its bytes have changed", on_purpose=False)
        self._readers.cut_readers(holding, "the source's bytes have changed", moved=True)

    def tear(self, holding: Holding) -> None:
        """Its fill was broken off: nobody may read it, its owner changes the generation by itself."""
        self.leave(holding, "fill broken off", on_purpose=False)
        self._readers.cut_readers(holding, "the source's own fill was broken off", moved=True)

    def leave(self, holding: Holding, why: str, *, on_purpose: bool = True) -> None:
        if holding.leaving:
            return
        holding.leaving = True
        version, member, replica = holding.version, holding.member, holding.replica
        holding.layout.remove(holding)
        member.group.model.unaware.pop(member.registration, None)
        layout = holding.layout
        if replica.state is ReplicaState.READY and on_purpose:
            self._cluster.become(replica, ReplicaState.DRAINING, why)  # its other ranks are no sources any more either
        if on_purpose and holding.committed and version.visible and not layout.have_sources():
            layout.abandoned = True
        if layout.abandoned or (holding.complete and not (layout.are_whole() and layout.have_sources())):
            self._reconsider_readers(version)
        if holding.bridges:
            self._feeding.feed(holding)
        if member.holding is holding:
            member.holding = None
        member.leaving.append(holding)
        self._cluster.note(member, replica)
        self._cluster.touch(member.group.model)

    def _reconsider_readers(self, version: Version) -> None:
        """Its readers, also those that have not begun, may have to end, or to complete one another."""
        for operation in version.bound.values():
            self._cluster.wake(operation)

    def _end(self, holding: Holding, *, cut: bool = True) -> None:
        """Nothing of it is left: its leases are fenced, and its replica goes with its last holding."""
        if cut:
            self._readers.cut_readers(holding, "the source is gone", moved=True)
            for lease in list(holding.readers.values()):
                self._readers.confirm_fenced(lease, "the owner's fence stands")
        if holding in holding.member.leaving:
            holding.member.leaving.remove(holding)
        if (testimony := holding.version.testimonies.get(holding.shard)) is not None and testimony.publisher is holding:
            self._cluster.wake_all(holding.version.starving)  # it cannot say its digests any more: the source's count
        replica = holding.replica
        self._cluster.note(holding.member, replica)
        if replica.holdings.get(holding.rank) is holding:
            del replica.holdings[holding.rank]
        self.settle_replica(replica)

    # -- replicas

    def new_replica(self, version: Version, member: Member) -> Replica:
        """What this rank's group holds of the version, or will."""
        group = member.group
        replica = Replica(self._cluster.new_id(), version, group, member.medium, member.purpose)
        group.replicas.append(replica)
        return replica

    def new_or_torn_replica(self, version: Version, member: Member) -> Replica:
        """The same; where a fill of this group was broken off, what that has left."""
        torn = next((r for r in member.group.replicas if r.state is ReplicaState.TORN), None)
        if torn is None:
            return self.new_replica(version, member)
        torn.version = version
        return torn

    def make_ready(self, replica: Replica, why: str) -> None:
        """Every shard of it is complete and counts (G4); it is GONE at once if no memory is left by now."""
        self._cluster.become(replica, ReplicaState.READY, why)
        self.settle_replica(replica)
        self._cluster.touch(replica.group.model)

    def settle_replica(self, replica: Replica) -> None:
        """A replica without memory is GONE (a TORN one stays as long as its group has ranks)."""
        group = replica.group
        torn = replica.state is ReplicaState.TORN and group.members
        if not replica.holdings and replica.state is not ReplicaState.GONE and not torn:
            self._cluster.become(replica, ReplicaState.GONE, "no memory left")
            group.replicas.remove(replica)
