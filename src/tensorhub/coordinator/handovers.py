"""Handovers (R4, R5): a retained version is copied to host memory before its last reliable holder
leaves.

Theory of operation. A *handover* is one attempt to have one shard copied into a worker's host
memory. It has succeeded when the copy's own registration holds the shard and counts like any other
holder. Only then does the component that grants every leave (`holdings`) grant the leave that waits
for the copy. An attempt that fails (refused, its worker lost, no progress) is followed by an
attempt with another worker, if there is one.

Copies are wanted for the shards of each holder that waits to leave. If only the publisher could
keep a version, or only spot workers hold it, copies are wanted at once, in the background. Each
step works out anew which copies are wanted, and which copies are not needed any more. So no step
has to be undone when wishes change.

Responsible for handovers, and for telling workers to drop copies. Not responsible for which holder
may leave (`retention`), for how a copy is filled (it is a group of one, which calls replicate), nor
for its leave (it asks, like every holder).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import (
    Group,
    Handover,
    Holding,
    Member,
    Model,
    Replica,
    Version,
    Worker,
)
from tensorhub.coordinator.retention import Retentions
from tensorhub.coordinator.states import OperationState, VersionState, WorkerState
from tensorhub.messages import DropCopy, MakeCopy
from tensorhub.scheduler.links import distance
from tensorhub.types import Medium, OpKind, Purpose

HANDOVERS_PER_MODEL_MAX = 256  # at a time
# before a worker that could not make a copy is asked for it again; doubles each time
RETRY_S_FIRST = 1.0
RETRY_S_MAX = 60.0


class Wish(NamedTuple):
    """A shard to be copied."""

    holding: Holding  # the holding that is copied
    going: Worker | None = None  # a worker that may end with the leave: the copy is not made there
    here: bool = False  # the copy is made by the holder's own worker, or not at all


@dataclass(eq=False, repr=False)
class Handovers:
    """The only component that changes handovers."""

    _cluster: Cluster
    _retentions: Retentions

    # ----------------------------------------------------------------------------------------------
    # facts

    def failed(self, copy: str, worker: Worker | None = None) -> None:
        """`worker` cannot make that copy ("": any copy); None: that copy is gone, or its time is
        over.
        """
        for model, handover in self._under_way(copy):
            if worker in (None, handover.worker):
                self._fail(model, handover)

    def copy_gone(self, copy: Member) -> None:
        """A copy was given up, or its worker is lost."""
        self.failed(copy.registration)
        self.room_changed()

    def host_gone(self, worker: Worker) -> None:
        """A worker with host memory is lost."""
        self.failed("", worker)
        self.room_changed()

    def retry_due(self, model: str) -> None:
        """A worker that could not make a copy may be asked again."""
        self._cluster.touch(self._cluster.models[model])

    def back(self, worker: Worker) -> None:
        """A worker has connected again, and may have missed what it was told."""
        for _, handover in self._under_way():
            if handover.worker is worker and handover.copy not in self._cluster.members:
                self._tell_to_make(handover)

    def room_changed(self) -> None:
        """There may be room for copies that found none."""
        for model in self._cluster.models.values():
            self._cluster.touch(model)

    def _under_way(self, copy: str = "") -> Iterator[tuple[Model, Handover]]:
        """All handovers, or the handover of that copy."""
        for model in self._cluster.models.values():
            for handover in list(model.handovers.values()):
                if copy in ("", handover.copy):
                    yield model, handover

    # ----------------------------------------------------------------------------------------------
    # consequences

    def settle(self, model: Model) -> None:
        """Do what the facts ask for: end attempts, drop copies that are not needed, begin
        attempts.
        """
        for handover in list(model.handovers.values()):
            self._settle_handover(model, handover)
        for copy in list(model.copies.values()):
            self._settle_copy(model, copy)
        if self._cluster.hosts:
            for wish in self._wanted(model):
                if len(model.handovers) >= HANDOVERS_PER_MODEL_MAX:
                    break
                self._grant(model, wish)

    def _settle_handover(self, model: Model, handover: Handover) -> None:
        copy = model.copies.get(handover.copy)
        holding = copy.holding if copy is not None else None
        if holding is not None and self._retentions.is_reliable(holding):
            self._forget(model, handover)
        elif not self._counts(model, handover.version):
            self._forget(model, handover)
            self._tell_to_drop(handover.worker, handover.copy)

    def _settle_copy(self, model: Model, copy: Member) -> None:
        """Have a copy dropped if the version is kept without it. The copy asks for its leave like
        every holder.
        """
        if copy.registration in model.handovers:
            return
        holding = copy.holding
        if holding is None or not holding.committed or not self._is_needed(model, holding):
            self._tell_to_drop(copy.worker, copy.registration)

    def _is_needed(self, model: Model, copy: Holding) -> bool:
        """Whether no other reliable holder, in another worker, stays for now."""
        if not self._counts(model, copy.version):
            return False
        here = {copy.member.worker.incarnation}
        here |= {
            w.holding.member.worker.incarnation
            for w in model.withdrawals.values()
            if w.closes and not w.begun
        }

        def stays(other: Holding) -> bool:
            return (
                other.member.worker.incarnation not in here
                and not other.member.dropped
                and self._retentions.is_reliable(other)
                and not _wants_to_leave(other)
            )

        return not any(map(stays, copy.peers.steady))

    def _counts(self, model: Model, version: Version) -> bool:
        """Whether it is retained, and not lost."""
        known = model.versions.get(version.number) is version
        return (
            known and version.number in model.retained() and not self._retentions.is_lost(version)
        )

    # ----------------------------------------------------------------------------------------------
    # what is wanted

    def _wanted(self, model: Model) -> Iterator[Wish]:
        """The copies that are wanted now. (Each of them `_is_needed`: else it would be made and
        dropped for ever.)
        """
        leave: list[tuple[Holding, Worker | None]] = [
            (each.holding, each.holding.member.worker if each.closes else None)
            for each in model.pressing.values()
            if not each.begun and not each.abandon
        ]
        for operation in model.waiting.restless.values():
            leave += [(staying, None) for staying in operation.staying]
        asked = set[tuple[Replica, Worker | None]]()
        for holding, going in leave:
            # of all ranks of a replica the answer is the same
            if holding.is_source and (holding.replica, going) not in asked:
                asked.add((holding.replica, going))
                for alone in self._retentions.alone(holding, going):
                    yield Wish(alone, going)
        for number in model.retained():
            version = model.versions.get(number)
            if version is not None and version.state is VersionState.AVAILABLE:
                yield from self._in_background(model, version)

    def _in_background(self, model: Model, version: Version) -> Iterator[Wish]:
        """What one group alone keeps and no other could take over (its own workers copy it); what
        only spot workers hold.
        """
        for shard, holdings in version.holdings.items() if all(version.holdings.values()) else ():
            reliable = filter(self._retentions.may_count, version.holdings.of(shard).steady)
            one = next(reliable, None)
            if one is None:
                spot = next((h for h in holdings if h.is_source), None)
                if spot is not None:
                    yield Wish(spot, going=spot.member.worker)
            elif one.member.said.purpose is Purpose.USE and all(
                h.replica is one.replica for h in reliable
            ):
                others = (
                    group for group in model.steady.values() if group is not one.replica.group
                )
                if not any(_could_take(group, version) for group in others):
                    yield Wish(one, here=True)

    # ----------------------------------------------------------------------------------------------
    # attempts

    def _grant(self, model: Model, wish: Wish) -> None:
        """Begin an attempt, unless an attempt that will do is under way, or no worker can be asked
        now.
        """
        holding = wish.holding
        version, shard = holding.version, holding.shard
        if any(
            (h.version, h.shard) == (version, shard) and h.worker is not wish.going
            for h in model.handovers.values()
        ):
            return
        worker = self._successor(model, wish)
        if worker is None:
            return
        handover = Handover(
            self._cluster.new_id(), version, shard, worker, holding.member.said.nbytes
        )
        model.handovers[handover.copy] = handover
        # for its registration, and then for its fill: the worker gives each as long
        due = self._cluster.now + 2 * self._cluster.options.op_timeout_s
        self._cluster.timers.set("handover", handover.copy, due)
        self._tell_to_make(handover)

    def _successor(self, model: Model, wish: Wish) -> Worker | None:
        """The worker that makes the copy soonest: the holder's own, else the nearest, else the
        worker with most room. A worker that could not make the copy comes last, and not before a
        while has passed.
        """
        holding = wish.holding
        version, shard, near = holding.version, holding.shard, holding.member.worker
        copies = (copy for copy in model.copies.values() if copy.holding in holding.peers)
        have = {copy.worker.incarnation for copy in copies}
        fit: list[tuple[int, bool, int, int, str]] = []
        for worker in (near,) if wish.here else self._cluster.hosts.values():
            if (
                worker is wish.going
                or worker.incarnation not in self._cluster.hosts
                or worker.incarnation in have
            ):
                continue
            if worker.spot or worker.state is not WorkerState.LIVE:
                continue
            room = self._room(worker) - holding.member.said.nbytes
            if room < 0:
                continue
            failures, retry_at = version.refusals.get((shard, worker.incarnation), (0, 0.0))
            if retry_at > self._cluster.now:
                self._cluster.timers.hasten("handovers", model.name, retry_at)
                continue
            apart = distance(near.location, worker.location)
            fit.append((failures, worker is not near, apart, -room, worker.incarnation))
        return self._cluster.hosts[min(fit)[-1]] if fit else None

    def _room(self, worker: Worker) -> int:
        """Bytes of its host memory that are neither taken by a copy nor promised to one. A
        prefetched copy or a seed gives way, unless it has to stay itself: else two versions would
        evict one another for ever.
        """
        copies = (
            m.said.nbytes
            for m in worker.members.values()
            if m.said.medium is Medium.HOST and self._keeps_its_room(m)
        )
        promised = (
            h.nbytes
            for _, h in self._under_way()
            if h.worker is worker and h.copy not in self._cluster.members
        )
        return worker.host_bytes - sum(copies) - sum(promised)

    def _keeps_its_room(self, copy: Member) -> bool:
        if copy.said.purpose in (Purpose.RETENTION, Purpose.ARCHIVE):
            return copy.said.purpose is Purpose.RETENTION  # an archived version has room when read
        return copy.holding is not None and self._retentions.must_stay(copy.holding)

    def _fail(self, model: Model, handover: Handover) -> None:
        """Another worker is asked, if there is one."""
        version, key = handover.version, (handover.shard, handover.worker.incarnation)
        failures, _ = version.refusals.get(key, (0, 0.0))
        version.refusals[key] = (
            failures + 1,
            self._cluster.now + min(RETRY_S_FIRST * 2 ** min(failures, 16), RETRY_S_MAX),
        )
        self._cluster.note(version)
        self._forget(model, handover)
        self._tell_to_drop(handover.worker, handover.copy)
        self._cluster.touch(model)

    def _forget(self, model: Model, handover: Handover) -> None:
        del model.handovers[handover.copy]
        self._cluster.timers.cancel("handover", handover.copy)

    def _tell_to_make(self, handover: Handover) -> None:
        order = MakeCopy(handover.copy, handover.version.info, handover.shard)
        self._cluster.send(handover.worker.session, order)

    def _tell_to_drop(self, worker: Worker, ident: str) -> None:
        """A copy is not needed any more. If it is not registered yet, its attempt is given up."""
        copy = self._cluster.members.get(ident)
        if copy is None:
            self._cluster.send(worker.session, DropCopy(ident))
        elif not copy.dropped:
            copy.drop(True)
            self._cluster.tell(copy, DropCopy(ident))


def _wants_to_leave(holding: Holding) -> bool:
    """Whether a rank of its replica has asked for its leave (then all of the replica will stop
    serving), or its group is about to overwrite it.
    """
    if any(each.withdrawal for each in holding.replica.holdings.values()):
        return True
    operation = holding.member.group.operation
    if operation is None or operation.kind is OpKind.PUBLISH or operation.unchanged:
        return False
    bound = (
        operation.state is not OperationState.GATHERING and operation.version is not holding.version
    )
    return bound or bool(operation.staying)


def _could_take(group: Group, version: Version) -> bool:
    """Whether this group could become another reliable holder of all of it."""
    if group.spot or len(group.members) < group.world_size:
        return False
    used = all(
        member.said.serves and member.said.purpose is Purpose.USE
        for member in group.members.values()
    )
    return used and group.name != version.publisher.group and version.is_laid_out_as(group)
