"""A rank's leave request (R4, R5): granted in one step, once no retained version is lost by it.

While the version must stay, the holding serves as before, and `handovers` finds a successor. Then its readers are moved, or
have a grace, and the holding goes with the last reader. Who is away has no grace: that may be a process that was killed.
Not responsible for whether a holding must stay (`retention`), nor for its readers (`readers`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Member, Model, ReadLease, Withdrawal, Worker
from tensorhub.coordinator.holdings import Holdings
from tensorhub.coordinator.readers import Readers
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.states import LeaseState
from tensorhub.messages import LeaveGranted, LeaveRequest


@dataclass(eq=False, repr=False)
class Withdrawals:
    """Changes withdrawals; nobody else does."""

    _cluster: Cluster
    _readers: Readers
    _holdings: Holdings
    _retentions: Retentions

    def restated(self, member: Member, generation: int | None, filling: Holding | None) -> bool:
        """After a lost connection the rank says under which generation it holds a version. It holds nothing else (R3).

        `filling`: the holding that its running operation fills, which the rank does not restate. Returns whether the rank
        holds or fills anything.
        """
        for holding in member.holdings:
            if holding is filling:
                self._tell_again(holding)
                continue
            withdrawal = self._of(holding)
            if withdrawal is not None:
                if withdrawal.session == member.worker.session and generation in (None, holding.generation):
                    continue  # the owner waits for our grant, and the memory is open until then
                self._forget(withdrawal)  # the owner gave its request up, with the connection or at its deadline
            if holding.generation == generation and (not holding.leaving or filling is not None):
                self._tell_again(holding)
                continue
            self._holdings.confirm_withdrawn(member, holding.generation)
        return filling is not None or member.holding is not None

    def _tell_again(self, holding: Holding) -> None:
        """Whom it is to cut: the first time may have been lost, or the answer."""
        for lease in holding.readers.values():
            if lease.state is LeaseState.FENCING:
                self._readers.tell_to_cut(lease)

    def ask(self, worker: Worker, message: LeaveRequest) -> None:
        """The owner wants its memory back. New readers are kept out; running ones are moved, or have their grace."""
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
                message.request, member.holding, session, deadline, message.abandon, message.closes, self._cluster.now
            )
            model.withdrawals[member.registration] = model.pressing[member.registration] = withdrawal
            self._cluster.timers.set("withdrawal", member.registration, deadline)
            self._cluster.touch(model)

    def due(self, registration: str) -> None:
        """Its deadline, or its readers' grace, is over."""
        member = self._cluster.members.get(registration)
        withdrawal = member.group.model.withdrawals.get(registration) if member is not None else None
        if member is None or withdrawal is None:
            return
        if withdrawal.begun:
            self._readers.cut_readers(withdrawal.holding, "the source's grace is over", moved=False)
            return
        self._forget(withdrawal)
        member.dropped = False
        alone = next(self._retentions.alone(withdrawal.holding, _going(withdrawal)), withdrawal.holding)
        error = self._retentions.refusal(alone)
        self._cluster.answer(member.worker.session, withdrawal.request, error)
        self._cluster.touch(member.group.model)  # it stays: perhaps no copy is needed any more

    def member_gone(self, member: Member) -> None:
        """Nobody waits for its answer any more."""
        withdrawal = member.group.model.withdrawals.get(member.registration)
        if withdrawal is not None:
            self._forget(withdrawal)

    def settle(self, model: Model) -> None:
        """Look at requests again: there may be another holder now, or the last reader may have ended. Very many may wait for
        their readers: they are not looked at.
        """
        for registration, withdrawal in list(model.pressing.items()):
            self._settle_one(withdrawal)
            if withdrawal.begun:
                model.pressing.pop(registration, None)

    def _settle_one(self, withdrawal: Withdrawal) -> None:
        """While its version would be lost, it serves as before. Then it takes no readers, and goes with the last."""
        holding = withdrawal.holding
        if not withdrawal.begun:
            waits = not (withdrawal.abandon or holding.leaving)
            if waits and self._retentions.must_stay(holding, _going(withdrawal)):
                return
            self._begin(withdrawal)
        if not withdrawal.granted and not holding.active_readers:
            withdrawal.granted = True
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
        """Its connection has ended. Most often its process has, too: no owner waits for what it reads."""
        for lease in [lease for member in worker.members.values() for lease in member.reads.values()]:
            withdrawal = self._of(lease.holding)
            if withdrawal is not None and withdrawal.begun:
                self._cut_away(lease)

    def _cut_away(self, lease: ReadLease) -> None:
        """A reader without a connection cannot be told to read elsewhere. When it is back, it gets another source."""
        if lease.state is LeaseState.ACTIVE:
            self._readers.cut(lease, "the source leaves, and its reader is away")

    def _forget(self, withdrawal: Withdrawal) -> None:
        member = withdrawal.holding.member
        self._cluster.note(member, member.group.model)
        member.group.model.withdrawals.pop(member.registration, None)
        member.group.model.pressing.pop(member.registration, None)
        self._cluster.timers.cancel("withdrawal", member.registration)

    def _of(self, holding: Holding) -> Withdrawal | None:
        withdrawal = holding.member.group.model.withdrawals.get(holding.member.registration)
        return withdrawal if withdrawal is not None and withdrawal.holding is holding else None


def _going(withdrawal: Withdrawal) -> Worker | None:
    """The worker, if it may end with this leave."""
    return withdrawal.holding.member.worker if withdrawal.closes else None
