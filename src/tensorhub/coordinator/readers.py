"""Read leases: which reader reads from which source, and where a reader goes when its source
leaves.

Leases schedule and count; they protect nothing (R3): only the fence of an owner does. Not
responsible for the ranking of sources (`source_choice`), for the effects of a missing source
(`operations`), nor for the moment at which a source leaves (`holdings`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tensorhub.coordinator import limits, waiting, ways
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Holding, Member, Operation, RankPart, ReadLease, Worker
from tensorhub.coordinator.source_choice import GAIN_S, Feeding, SourceChoice, is_far
from tensorhub.coordinator.states import LeaseState, WorkerState
from tensorhub.coordinator.ways import Source
from tensorhub.messages import (
    AddSource,
    CutReader,
    DropSource,
    Flow,
    Grant,
    Need,
    Progress,
    ReaderCut,
)
from tensorhub.scheduler.links import SECONDS_MIN, Distance, distance
from tensorhub.scheduler.slowness import CLEARLY
from tensorhub.types import Purpose

RETRY_S_FIRST = 0.05  # before a source that has failed is tried again; doubles each time
RETRY_S_MAX = 2.0
# of a neighbour, one and a half seconds together, before its reader reads from another site
REFUSALS_MAX = 5
# so many times sooner a reader must have the rest elsewhere, to be moved while it reads
FASTER = CLEARLY
COMPARE_S = 1.0  # how often that is asked, at most
YIELDING_MAX = 8  # readers of a source, of which some yield; among more readers it matters little


@dataclass(eq=False, repr=False)
class Readers:
    """Changes leases; no other component does."""

    _cluster: Cluster
    _feeding: Feeding
    _choice: SourceChoice

    # -- granting

    def grant(self, part: RankPart) -> list[Grant]:
        """New leases on the best sources for this reader; fewer, where there is no candidate
        now.
        """
        return [self.lend(part, *source) for source in self.sources(part)]

    def sources(self, part: RankPart, needs: Sequence[Need] | None = None) -> list[Source]:
        """As `SourceChoice` finds them. Where they are in other sites, and a neighbour is about to
        read there, the reader waits, and follows. (If no reader can follow it: its update is
        staged. Else the neighbour does.)
        """
        found, attempts = self._choice.sources(part, needs), part.attempts
        if not part.operation.is_staged or not any(is_far(each, part) for _, each in found):
            return found
        by = self._choice.neighbour_is_served_by(part)
        if not self._cluster.now < by <= part.deadline - part.call.timeout_s / 2:
            return found
        attempts.follows_at = by
        self._cluster.timers.hasten("retry", part.operation.name, by)
        return []

    def lend(self, part: RankPart, need: Need | None, holding: Holding) -> Grant:
        """A new lease on a source that was chosen for this reader. Everything comes through it, or
        all of this need.
        """
        grant = self._lend(part, holding, partial=False, need=need)
        if part.holding is not None:
            self.place(part.holding)
        return grant

    def _lend(
        self, part: RankPart, holding: Holding, *, partial: bool, need: Need | None = None
    ) -> Grant:
        ident = self._cluster.new_id()
        flow, yields = Flow(ident, 0, 0.0), waiting.yields(part, holding)
        lease = ReadLease(
            ident,
            part,
            holding,
            partial,
            is_of_whole=holding.complete,
            flow=flow,
            yields=yields,
            need=need,
        )
        lease.story.note(self._cluster.cause, self._cluster.now, "granted")
        self._cluster.observations.lent(self._cluster.now, lease)
        self._cluster.leases[lease.id] = holding.readers[lease.id] = part.leases[lease.id] = lease
        model = holding.member.group.model
        model.leases[lease.id] = part.member.reads[lease.id] = lease
        holding.peers.patches += partial
        holding.traffic.active_readers += 1
        holding.traffic.yielding += yields
        readers = holding.traffic.active_readers
        self._cluster.reckon(holding)
        if part.holding is not None:
            self._feeding.begun(lease, part.holding)
        holding.traffic.readers_most = max(
            readers, holding.traffic.readers_most if readers > 1 else 0
        )
        self._cluster.note(lease, part.member, part.operation, holding.member, model)
        return self.to_grant(lease)

    def _feed(self, part: RankPart) -> None:
        """The sources of the rank's holding have changed."""
        if part.holding is not None:
            self.place(part.holding)
        self._feeding.feed(part.holding)

    @staticmethod
    def place(holding: Holding) -> None:
        """Set the holding's distance from a complete copy, and the slowness of its sources."""
        lasting = [lease.holding for lease in holding.fillers if waiting.lasts(lease)]
        if holding.complete:
            holding.traffic.depth = holding.traffic.behind = 0
        elif lasting:
            holding.traffic.depth = 1 + max(each.traffic.depth for each in lasting)
            holding.traffic.behind = max(each.slowness for each in lasting)

    def progressed(self, part: RankPart, message: Progress) -> None:
        """A rank says how far its read is."""
        progress = message.chunks_verified, message.bytes_read
        if progress != part.attempts.progress:
            part.attempts.progress = progress
            part.move(self._cluster.now)
            self._cluster.note(part.operation)
        self._learn(part, message.flows)
        self.improve(part)

    def _learn(self, part: RankPart, flows: Iterable[Flow]) -> None:
        """A reader reports what has come from its sources. Nothing is kept of a source that is
        lost, although it may serve on.
        """
        reader, to_weigh = part.member.worker, dict[Worker, None]()
        for flow in flows:
            lease = part.leases.get(flow.lease)
            if lease is None:
                continue
            nbytes, seconds = flow.nbytes - lease.flow.nbytes, flow.seconds - lease.flow.seconds
            if nbytes < 0 or seconds < SECONDS_MIN:
                continue  # or too little yet
            source = lease.holding.member.worker
            apart = distance(reader.location, source.location)
            # it may have waited for its bucket
            is_archived = lease.holding.member.said.purpose is Purpose.ARCHIVE
            sharers = (
                lease.holding.traffic.readers_most
                if lease.is_of_whole and len(part.leases) == 1 and not is_archived
                else None
            )
            self._cluster.links.heard(
                reader.incarnation, apart, nbytes, seconds, sharers, self._cluster.now
            )
            was_there = lease.is_only and lease.source_had > part.attempts.progress[0]
            if was_there and not is_archived:
                sharers = lease.holding.traffic.readers_most  # all that came since then was there
            if source.state is not WorkerState.LOST:
                heard = (
                    reader.incarnation,
                    source.incarnation,
                    apart,
                    nbytes,
                    seconds,
                    sharers,
                    self._cluster.now,
                )
                self._cluster.slowness.heard(*heard)
                rates = self._cluster.links.rates(self._cluster.now)
                is_slow = (
                    sharers is not None and CLEARLY * sharers * nbytes / seconds <= rates[apart]
                )
                to_weigh.update(
                    (each, None) for each in (reader, source) if is_slow or each.slowness
                )
            lease.flow, lease.source_had = flow, lease.holding.chunks_verified
            self._cluster.note(lease)
        # once, however much was said: it may have thousands of readers, and read as much
        for each in to_weigh:
            self._weigh(each)

    def _weigh(self, worker: Worker) -> None:
        """How slow it is now."""
        rates = self._cluster.links.rates(self._cluster.now)
        slowness = self._cluster.slowness.of(worker.incarnation, rates, self._cluster.now)
        if slowness == worker.slowness:
            return
        worker.slowness = slowness
        self._cluster.note(worker)
        self._cluster.reckon_all_of(worker)
        for lease in (
            lease for member in worker.members.values() for lease in member.reads.values()
        ):
            yields = waiting.yields(lease.part, lease.holding)
            if lease.state is LeaseState.ACTIVE and yields is not lease.yields:
                lease.holding.traffic.yielding += yields - lease.yields
                lease.yields = yields
                self._cluster.reckon(lease.holding)
                self._cluster.note(lease, lease.holding.member)

    def assign_sources(self, part: RankPart) -> list[Grant]:
        """New leases for a reader that lacks a source for some chunks: on a source or, while no
        rank holds the whole shard, on partial copies of other readers. Such readers wait together
        for the chunks that all of them lack (R9).
        """
        for lease in list(part.leases.values()):
            is_dry = not (lease.holding.is_fed or lease.dropping or lease.partial)
            if is_dry or (lease.holding.leaving and part.member.worker.read_only):
                self._move(lease)
        version = part.operation.version
        if version is None or not waiting.needs_source(part):
            return []
        if part.bridges:
            return self._bridge(part)
        if not version.holdings.is_whole(part.shard):
            patches = self._choice.partial_holdings(part, version.holdings[part.shard])
            return [self._lend(part, holding, partial=True) for holding in patches]
        is_fed = any(lease.holding.is_fed for lease in part.leases.values() if not lease.dropping)
        return [] if is_fed else self.grant(part)

    def _bridge(self, part: RankPart) -> list[Grant]:
        """`assign_sources` for a reader that bridges: the needs that it lacks of each class, and of
        its own layout.
        """
        lacking, own = _unfed(part), part.layout.of(part.shard)
        grants = (
            [self.lend(part, *source) for source in self.sources(part, lacking)] if lacking else []
        )
        if part.is_abandoned or waiting.can_be_whole(part) or not waiting.needs_source(part):
            return grants
        return grants + [
            self._lend(part, each, partial=True)
            for each in self._choice.partial_holdings(part, own)
        ]

    @staticmethod
    def to_grant(lease: ReadLease) -> Grant:
        """The lease as its reader sees it."""
        of = ("", 0) if lease.need is None else (lease.need.selection, lease.need.shard)
        return grant_of(lease.holding, lease.id, lease.holding.complete, *of)

    # -- a lease's end

    def release(self, lease: ReadLease, why: str) -> None:
        """Its reader reads no more."""
        if lease.state in (LeaseState.ACTIVE, LeaseState.FENCING):
            self._become(lease, LeaseState.RELEASED, why)
            self._forget(lease)

    def release_all(self, part: RankPart, why: str) -> None:
        for lease in list(part.leases.values()):
            self.release(lease, why)

    def failed(self, part: RankPart, lease_id: str, reason: str, detail: str) -> ReadLease | None:
        """The reader gave this source up. It gets another source, or after a while this source
        again. Returns the lease that is over.
        """
        lease = part.leases.get(lease_id) or self._cluster.leases.get(lease_id)
        if lease is None or lease.part is not part:
            return None
        self.release(lease, reason)
        if reason != "dropped":
            self._cluster.observations.read_failed(self._cluster.now, lease, reason, detail)
            self.avoid(part, lease.holding, reason, detail)
        return lease

    def left(self, member: Member, lease_id: str) -> None:
        """This reader reads no more under a lease of an operation that is over."""
        lease = member.reads.get(lease_id)
        if lease is not None:
            self.release(lease, "left after its operation's end")

    def avoid(self, part: RankPart, holding: Holding, reason: str, detail: str) -> None:
        """A read there has failed this reader: the source is tried again after a while, and
        last.
        """
        source, attempts = holding.member.worker, part.attempts
        incarnation = source.incarnation
        text = f"worker {source.name!r}: {detail or reason}"
        attempts.faults.pop(incarnation, None)
        attempts.faults[incarnation] = (reason, text[: limits.FAULT_CHARS_MAX])
        if len(attempts.faults) > limits.FAULTS_MAX:
            del attempts.faults[next(iter(attempts.faults))]
        if reason == "damaged":
            attempts.damaged[holding.member.registration] = text[: limits.FAULT_CHARS_MAX]
        failures = attempts.failures[incarnation] = attempts.failures.get(incarnation, 0) + 1
        wait_s = min(RETRY_S_FIRST * 2 ** min(failures - 1, 16), RETRY_S_MAX)
        retry_at = attempts.retry_at[incarnation] = self._cluster.now + wait_s
        is_in_time = retry_at <= part.deadline - part.call.timeout_s / 2
        is_near = distance(part.member.worker.location, source.location) is not Distance.FAR
        has_not_heard = reason == "refused" and failures <= REFUSALS_MAX and is_in_time
        if has_not_heard:
            attempts.served_by = retry_at + RETRY_S_FIRST
        if has_not_heard and is_near:
            attempts.spared.add(incarnation)
        else:
            attempts.spared.discard(incarnation)
        self._cluster.timers.hasten("retry", part.operation.name, retry_at)

    def set_retry_timer(self, operation: Operation) -> None:
        """Look again when the first source that has failed a reader may be tried again, or a reader
        waits for its neighbour no more.
        """
        attempts = [part.attempts for part in operation.parts.values()]
        times = [when for each in attempts for when in (*each.retry_at.values(), each.follows_at)]
        later = [when for when in times if when > self._cluster.now]
        if later:
            self._cluster.timers.set("retry", operation.name, min(later))

    def move_again(self, operation: Operation) -> None:
        """The readers of a source that leaves may have found no other source then, and may try a
        failed source now.
        """
        for lease in [
            each
            for part in operation.parts.values()
            for each in part.leases.values()
            if each.holding.leaving
        ]:
            self.move(lease)

    def fence(self, lease: ReadLease, why: str) -> None:
        """The lease must not count any more. It is FENCED once the owner has confirmed."""
        if lease.state is LeaseState.ACTIVE:
            self._become(lease, LeaseState.FENCING, why)
            lease.part.leases.pop(lease.id, None)
            self._reader_less(lease.holding)
            self._feed(lease.part)

    def confirm_fenced(self, lease: ReadLease, why: str) -> None:
        if lease.state is LeaseState.FENCING:
            self._become(lease, LeaseState.FENCED, why)
            self._forget(lease)

    def confirm_cut(self, worker: Worker, message: ReaderCut) -> None:
        """The owner has cut this lease's reader off."""
        lease = self._cluster.leases.get(message.lease)
        if lease is not None and lease.holding.member.worker is worker:
            self.confirm_fenced(lease, "the owner has cut its reader off")

    def reader_lost(self, member: Member) -> None:
        """The reader is gone: its sources are told to cut it off, even if the reader itself was
        told to stop before.
        """
        for lease in list(member.reads.values()):
            self.fence(lease, "reader lost")
            owner = lease.holding.member
            if self._cluster.members.get(owner.registration) is owner:
                self.tell_to_cut(lease)
            else:
                self.confirm_fenced(lease, "its owner is gone too")

    def tell_to_cut(self, lease: ReadLease) -> None:
        self._cluster.tell(
            lease.holding.member, CutReader(lease.id, lease.part.member.worker.incarnation)
        )

    def _forget(self, lease: ReadLease) -> None:
        holding, part = lease.holding, lease.part
        model = holding.member.group.model
        for known in (
            self._cluster.leases,
            model.leases,
            holding.readers,
            part.leases,
            part.member.reads,
        ):
            known.pop(lease.id, None)
        self._cluster.note(model, part.member)
        self._reader_less(lease.holding)
        self._feed(part)
        if waiting.wants_source(lease.part):
            self._cluster.wake(lease.part.operation)

    def _reader_less(self, holding: Holding) -> None:
        """A lease counts no more. If it was the last one, the owner may take back the memory that
        it has asked for.
        """
        model, registration = holding.member.group.model, holding.member.registration
        withdrawal = model.withdrawals.get(registration)
        if withdrawal is not None and not holding.traffic.active_readers:
            model.pressing[registration] = withdrawal
            self._cluster.touch(model)
        operation = holding.member.group.operation
        if (
            operation is not None
            and operation.grace_until is not None
            and operation.version is None
        ):
            self._cluster.wake(operation)

    # -- another source

    def move(self, lease: ReadLease) -> None:
        """Give the reader another source, if there is one, and let it leave this source. A
        read-only reader is given its source in its turn: there may be many of them, and each looks
        at all sources.
        """
        if lease.part.member.worker.read_only:
            self._cluster.wake(lease.part.operation)
        else:
            self._move(lease)

    def _move(self, lease: ReadLease) -> None:
        if lease.state is not LeaseState.ACTIVE or lease.dropping:
            return
        part = lease.part
        needs = waiting.lacking(part, without=lease) if part.bridges else []
        is_spare = waiting.is_spare(lease)
        sources = [] if is_spare else self.sources(part, needs)
        if is_spare or (sources and (not part.bridges or ways.are_enough(sources, needs))):
            self._leave_for(
                lease, [self.lend(part, *source) for source in sources], "the source leaves"
            )

    def improve(self, part: RankPart) -> None:
        """A reader reads on. If its source is slow or shared, the reader may have the rest much
        earlier from another source. Readers that yield leave the source to this reader, and read at
        the end of its chain instead.

        Each move costs a new connection, so the question has a minimal interval.
        """
        now = self._cluster.now
        lease = next(iter(part.leases.values()), None)
        if lease is None or part.attempts.compared_at + COMPARE_S > now:
            return
        holding, own = lease.holding, part.member.worker.slowness
        readers = holding.traffic.active_readers - (0 if lease.yields else holding.traffic.yielding)
        if readers > 1 or holding.slowness > own:
            part.attempts.compared_at = now
            self._improve(part, FASTER, GAIN_S)
        elif (
            not lease.yields
            and holding.traffic.yielding
            and holding.traffic.active_readers <= YIELDING_MAX
        ):
            part.attempts.compared_at = now
            for each in list(holding.readers.values()):
                attempts = each.part.attempts
                # else it loses what is on its way
                if each.yields and attempts.progress[0] > attempts.moved_with:
                    self._improve(each.part, 1.0)

    def _improve(self, part: RankPart, factor: float, gain_s: float = 0.0) -> None:
        """The rank moves if another source brings the rest `factor` times sooner, and `gain_s`
        sooner. (0: it yields.)
        """
        if not part.reads or part.bridges or part.member.worker.read_only:
            return
        if [lease.is_only and lease.holding.is_fed for lease in part.leases.values()] != [True]:
            return  # it has lost its source, or is being moved
        found = self._choice.faster(part, factor, gain_s)
        if found is not None:
            part.attempts.moved_with = part.attempts.progress[0]
            self._swap(part, found)

    def _swap(self, part: RankPart, holding: Holding) -> None:
        """The reader reads from that source instead."""
        (lease,) = part.leases.values()
        lease.dropping = True  # from now on the reader is not fed through this lease
        self._tell_to_add(part, self.lend(part, None, holding))
        self._leave_for(lease, (), "another source is better")

    def _leave_for(self, lease: ReadLease, grants: Iterable[Grant], why: str) -> None:
        part = lease.part
        lease.dropping = True
        self._feed(part)
        self._cluster.changed(part.operation)
        self._cluster.note(lease)
        for grant in grants:
            self._tell_to_add(part, grant)
        self.tell_to_drop(lease, why)

    def _tell_to_add(self, part: RankPart, grant: Grant) -> None:
        self._cluster.tell(part.member, AddSource(part.operation.key, part.rank, grant))

    def tell_to_drop(self, lease: ReadLease, why: str) -> None:
        part = lease.part
        self._cluster.tell(part.member, DropSource(part.operation.key, part.rank, lease.id, why))

    def _cut(self, lease: ReadLease, why: str) -> None:
        if not lease.dropping:
            self.tell_to_drop(lease, why)
        self.fence(lease, why)

    def cut(self, lease: ReadLease, why: str) -> None:
        """Its reader has to look for another source, and its source to cut that reader off."""
        self._cut(lease, why)
        self.tell_to_cut(lease)
        self._cluster.wake(lease.part.operation)

    def cut_readers(self, holding: Holding, why: str, *, moved: bool) -> None:
        for lease in list(holding.readers.values()):
            if lease.state is LeaseState.ACTIVE:
                if moved:
                    self.move(lease)
                self._cut(lease, why)
                if waiting.wants_source(lease.part):
                    self._cluster.wake(lease.part.operation)

    def _become(self, lease: ReadLease, state: LeaseState, why: str) -> None:
        holding = lease.holding
        if lease.state is LeaseState.ACTIVE:  # no state leads back there
            holding.traffic.active_readers -= 1
            holding.traffic.yielding -= lease.yields
            holding.peers.patches -= lease.partial
            self._cluster.reckon(holding)
        self._cluster.become(lease, state, why)
        self._cluster.note(lease.part.operation, lease.holding.member)


def grant_of(
    holding: Holding, lease: str, complete: bool, selection: str = "", shard: int = 0
) -> Grant:
    """The grant, as its reader is told it."""
    worker, member = holding.member.worker, holding.member
    where = (
        worker.name,
        worker.incarnation,
        member.registration,
        holding.generation,
        worker.endpoints,
        worker.location,
    )
    return Grant(lease, *where, complete, selection, shard, member.said.purpose)


def _unfed(part: RankPart) -> list[Need]:
    """The needs of a bridging reader that none of its sources is fed with."""
    fed = [
        lease.need for lease in part.leases.values() if lease.holding.is_fed and not lease.dropping
    ]
    return [] if None in fed else [need for need in waiting.lacking(part) if need not in fed]
