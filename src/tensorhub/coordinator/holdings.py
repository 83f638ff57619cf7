"""How the content of a rank's memory begins and ends, and with it the replica of the rank's group;
leave requests (R4, R5).

A leave is granted in one step, once no retained version is lost by it. While the version must stay,
the holding serves as before, and `handovers` finds a successor. Then the readers of the holding are
moved, or have a grace, and the holding ends with the last reader. A reader without a connection has
no grace: its process may have been killed.

Not responsible for what becomes of readers (`readers`), nor for whether a holding must stay
(`retention`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator import ways
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import (
    Holding,
    Member,
    Model,
    ReadLease,
    Replica,
    Version,
    Withdrawal,
    Worker,
)
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.source_choice import Feeding
from tensorhub.coordinator.states import LeaseState, ReplicaState
from tensorhub.messages import Fenced, LeaveGranted, LeaveRequest, Revoked


@dataclass(eq=False, repr=False)
class Holdings:
    """Changes holdings and replicas; no other component does."""

    _cluster: Cluster
    _feeding: Feeding
    _readers: Readers

    def add(self, holding: Holding) -> None:
        """From now on it may be read."""
        holding.replica.holdings[holding.rank] = holding
        holding.layout.add(holding, holding.member.said.nbytes, holding.member.said.chunks)
        self._cluster.reckon(holding)
        member, parts = holding.member, None
        # else it may have other regions
        if not holding.bridges and not holding.layout.manifests.get(holding.shard):
            parts = ways.as_known(member, holding.version, member.said.parts)
        self._cluster.learn(
            holding.version, holding.layout, holding.shard, holding.member.said.manifest, parts
        )
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
        """The holding has every chunk, or some chunks have to be read again after all."""
        holding.verified = is_so
        self._feeding.feed(holding)

    def completed(self, holding: Holding) -> None:
        """The holding has every chunk, with agreed digests."""
        holding.complete = holding.verified = True
        self._readers.place(holding)
        self._feeding.feed(holding)

    # -- the end

    def order_out(self, holding: Holding, reason: str) -> None:
        """The version is retired: the holding has no readers any more, and its owner is to fence
        and forget it.
        """
        self.leave(holding, reason)
        self._readers.cut_readers(holding, reason, moved=False)
        owner = holding.member
        self._cluster.tell(
            owner, Revoked(owner.registration, holding.version.info.content_id, reason)
        )

    def overwrite(self, holding: Holding) -> None:
        """Its owner is about to fence and overwrite it (R7): readers are moved or cut, never waited
        for.
        """
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
        """Its worker is LOST, and may still serve its bytes: readers without another source keep
        their lease.
        """
        self.leave(holding, "worker lost", on_purpose=False)
        for lease in list(holding.readers.values()):
            if lease.state is LeaseState.FENCING:
                self._readers.confirm_fenced(lease, "owner lost")
            else:
                self._readers.move(lease)
        self._end(holding, cut=False)

    def quarantine(self, holding: Holding) -> None:
        """The bytes of the holding have changed: it has no readers any more. It stays the holding
        of its owner until the owner takes it back.
        """
        holding.trust.quarantined = True
        info, owner = holding.version.info, holding.member.worker.name
        self._cluster.happened("corrupt", info.model, info.version, owner, "its bytes have changed")
        self.leave(holding, "its bytes have changed", on_purpose=False)
        self._readers.cut_readers(holding, "the source's bytes have changed", moved=True)

    def tear(self, holding: Holding) -> None:
        """The fill of the holding was broken off: it is no source, and its owner changes the
        generation by itself.
        """
        self.leave(holding, "fill broken off", on_purpose=False)
        self._readers.cut_readers(holding, "the source's own fill was broken off", moved=True)

    def leave(self, holding: Holding, why: str, *, on_purpose: bool = True) -> None:
        if holding.leaving:
            return
        holding.leaving = True
        version, member, replica = holding.version, holding.member, holding.replica
        holding.layout.remove(holding)
        member.group.model.notices.unaware.pop(member.registration, None)
        layout = holding.layout
        if replica.state is ReplicaState.READY and on_purpose:
            # its other ranks are no sources any more either
            self._cluster.become(replica, ReplicaState.DRAINING, why)
        if on_purpose and holding.committed and version.visible and not layout.have_sources():
            layout.abandoned = True
        if layout.abandoned or (holding.complete and not layout.have_sources()):
            self._reconsider_readers(version)
        if holding.bridges:
            self._feeding.feed(holding)
        if member.holding is holding:
            member.holding = None
        member.leaving.append(holding)
        self._cluster.note(member, replica)
        self._cluster.touch(member.group.model)

    def _reconsider_readers(self, version: Version) -> None:
        """Its readers, also those that have not begun, may have to end, or to complete one
        another.
        """
        for operation in version.bound.values():
            self._cluster.wake(operation)

    def _end(self, holding: Holding, *, cut: bool = True) -> None:
        """Nothing of it is left: its leases are fenced, and its replica goes with its last
        holding.
        """
        if cut:
            self._readers.cut_readers(holding, "the source is gone", moved=True)
            for lease in list(holding.readers.values()):
                self._readers.confirm_fenced(lease, "the owner's fence stands")
        if holding in holding.member.leaving:
            holding.member.leaving.remove(holding)
        if holding.is_published:
            # it cannot say its digests any more: the source's count
            self._cluster.wake_all(holding.version.starving)
        replica = holding.replica
        self._cluster.note(holding.member, replica)
        if replica.holdings.get(holding.rank) is holding:
            del replica.holdings[holding.rank]
        self.settle_replica(replica)

    # -- replicas

    def new_replica(self, version: Version, member: Member) -> Replica:
        """What this rank's group holds of the version, or will."""
        group = member.group
        replica = Replica(
            self._cluster.new_id(), version, group, member.said.medium, member.said.purpose
        )
        group.replicas.append(replica)
        return replica

    def new_or_torn_replica(self, version: Version, member: Member) -> Replica:
        """A new replica; or the torn replica that a broken fill of this group has left."""
        torn = next((r for r in member.group.replicas if r.state is ReplicaState.TORN), None)
        if torn is None:
            return self.new_replica(version, member)
        torn.version = version
        return torn

    def make_ready(self, replica: Replica, why: str) -> None:
        """Every shard of it is complete and counts (G4); it is GONE at once if no memory is left by
        now.
        """
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


@dataclass(eq=False, repr=False)
class Withdrawals:
    """Changes withdrawals; no other component does."""

    _cluster: Cluster
    _readers: Readers
    _holdings: Holdings
    _retentions: Retentions

    def restated(self, member: Member, generation: int | None, filling: Holding | None) -> bool:
        """After a lost connection the rank says under which generation it holds a version. It holds
        nothing else (R3).

        `filling`: the holding that its running operation fills, which the rank does not restate.
        Returns whether the rank holds or fills anything.
        """
        for holding in member.holdings:
            if holding is filling:
                self._tell_again(holding)
                continue
            withdrawal = holding.withdrawal
            if withdrawal is not None:
                if withdrawal.session == member.worker.session and generation in (
                    None,
                    holding.generation,
                ):
                    continue  # the owner waits for our grant, and the memory is open until then
                # the owner gave its request up, with the connection or at its deadline
                self._forget(withdrawal)
            if holding.generation == generation and (not holding.leaving or filling is not None):
                self._tell_again(holding)
                continue
            self._holdings.confirm_withdrawn(member, holding.generation)
        return filling is not None or member.holding is not None

    def _tell_again(self, holding: Holding) -> None:
        """Tell the owner again which readers to cut: the first message may have been lost, or its
        answer.
        """
        for lease in holding.readers.values():
            if lease.state is LeaseState.FENCING:
                self._readers.tell_to_cut(lease)

    def ask(self, worker: Worker, message: LeaveRequest) -> None:
        """The owner wants its memory back. New readers are kept out; running ones are moved, or
        have their grace.
        """
        member = worker.members.get(message.registration)
        if member is None:
            self._cluster.send(worker.session, LeaveGranted(message.request))
            return
        self._cluster.note(member)
        model = member.group.model
        if member.holding is None or member.holding.generation != message.generation:
            self._cluster.tell(member, LeaveGranted(message.request))  # nothing here counts on it
        else:
            deadline = self._cluster.now + message.timeout_s
            session = member.worker.session
            withdrawal = Withdrawal(
                message.request,
                member.holding,
                session,
                deadline,
                message.abandon,
                message.closes,
                self._cluster.now,
            )
            model.withdrawals[member.registration] = model.pressing[member.registration] = (
                withdrawal
            )
            self._cluster.timers.set("withdrawal", member.registration, deadline)
            self._cluster.touch(model)

    def due(self, registration: str) -> None:
        """Its deadline, or its readers' grace, is over."""
        member = self._cluster.members.get(registration)
        withdrawal = (
            member.group.model.withdrawals.get(registration) if member is not None else None
        )
        if member is None or withdrawal is None:
            return
        if withdrawal.begun:
            self._readers.cut_readers(withdrawal.holding, "the source's grace is over", moved=False)
            return
        self._forget(withdrawal)
        member.drop(False)
        alone = next(
            self._retentions.alone(withdrawal.holding, _going(withdrawal)), withdrawal.holding
        )
        error = self._retentions.refusal(alone)
        self._cluster.answer(member.worker.session, withdrawal.request, error)
        self._cluster.touch(member.group.model)  # it stays: perhaps no copy is needed any more

    def member_gone(self, member: Member) -> None:
        """No rank waits for the answer any more."""
        withdrawal = member.group.model.withdrawals.get(member.registration)
        if withdrawal is not None:
            self._forget(withdrawal)

    def settle(self, model: Model) -> None:
        """Look at requests again: there may be another holder now, or the last reader may have
        ended. Very many may wait for their readers: they are not looked at.
        """
        for registration, withdrawal in list(model.pressing.items()):
            self._settle_one(withdrawal)
            if withdrawal.begun:
                model.pressing.pop(registration, None)

    def _settle_one(self, withdrawal: Withdrawal) -> None:
        """While its version would be lost, it serves as before. Then it takes no readers, and goes
        with the last.
        """
        holding = withdrawal.holding
        if not withdrawal.begun:
            waits = not (withdrawal.abandon or holding.leaving)
            if waits and self._retentions.must_stay(holding, _going(withdrawal)):
                return
            self._begin(withdrawal)
        if not holding.traffic.active_readers:
            self._forget(withdrawal)
            self._cluster.tell(holding.member, LeaveGranted(withdrawal.request))

    def _begin(self, withdrawal: Withdrawal) -> None:
        cluster, holding = self._cluster, withdrawal.holding
        withdrawal.begun = True
        left_s = max(0.0, withdrawal.deadline - cluster.now)  # half of it is for the owner's fence
        withdrawal.deadline = cluster.now + min(cluster.options.drain_grace_s, left_s / 2)
        cluster.timers.set("withdrawal", holding.member.registration, withdrawal.deadline)
        self._holdings.leave(holding, "withdrawn")
        for lease in list(holding.readers.values()):
            if lease.part.member.worker.session is None:
                self._cut_away(lease)
            else:
                self._readers.move(lease)

    def readers_away(self, worker: Worker) -> None:
        """Its connection has ended. Most often its process has, too: no owner waits for what it
        reads.
        """
        for lease in [
            lease for member in worker.members.values() for lease in member.reads.values()
        ]:
            withdrawal = lease.holding.withdrawal
            if withdrawal is not None and withdrawal.begun:
                self._cut_away(lease)

    def _cut_away(self, lease: ReadLease) -> None:
        """A reader without a connection cannot be told to read elsewhere. When it is back, it gets
        another source.
        """
        if lease.state is LeaseState.ACTIVE:
            self._readers.cut(lease, "the source leaves, and its reader is away")

    def _forget(self, withdrawal: Withdrawal) -> None:
        member = withdrawal.holding.member
        self._cluster.note(member, member.group.model)
        member.group.model.withdrawals.pop(member.registration, None)
        member.group.model.pressing.pop(member.registration, None)
        self._cluster.timers.cancel("withdrawal", member.registration)


def _going(withdrawal: Withdrawal) -> Worker | None:
    """The worker, if it may end with this leave."""
    return withdrawal.holding.member.worker if withdrawal.closes else None
