"""The data plane in virtual time: how long each step of a lane takes, and what goes wrong on its
way.

Both ends have a thread, as in `runtime`: the reader's asks and settles, the owner's begins an
access and sends. A send goes on while its reader takes nothing. Not responsible for what a step
does: see `pulling`.
"""

from __future__ import annotations

from random import Random

from tensorhub.errors import StateError
from tensorhub.model.accesses import Access, Refusal
from tensorhub.runtime.data.acceptor import PATIENCE_S
from tensorhub.testing.drivers.injecting import Injector
from tensorhub.testing.drivers.timeline import Timeline
from tensorhub.testing.sim.memory import CHUNK_BYTES
from tensorhub.testing.sim.pulling import Frame, LaneEnd, Reading, SimLane
from tensorhub.testing.sim.world import World

SLOW = 100  # times as slow
NICS_DRAWN = 0.2  # of all seeds; there workers differ in how fast they send and receive
NIC_TENS = (-1.5, 0.5)  # powers of ten, of the time of a chunk
CHUNK_S_MAX = 0.2  # slower ones would stall


class DataNetwork:
    """Moves lanes on."""

    def __init__(self, world: World, timeline: Timeline, faults: Injector, seed: int) -> None:
        self._world = world
        self._timeline = timeline
        self._faults = faults
        self.latency_s = timeline.random.choice((0.0002, 0.002, 0.02))
        self.chunk_s = timeline.random.choice((0.002, 0.02, 0.2))  # to send one chunk
        self.batch_chunks = timeline.random.choice((1, 2, 4))
        self.send_chunks = timeline.random.choice((1, 1, 3))
        nics = f"nics {seed}"
        self._seed_of_nics = nics if Random(nics).random() < NICS_DRAWN else ""

    def _chunk_s(self, lane: SimLane) -> float:
        """To send one over that lane."""
        if not self._seed_of_nics:
            return self.chunk_s
        names = (lane.reader.worker.name, lane.grant.source)
        slowest = max(
            10 ** Random(f"nic of {name}, {self._seed_of_nics}").uniform(*NIC_TENS)
            for name in names
        )
        return min(CHUNK_S_MAX, self.chunk_s * slowest)

    def latency(self) -> float:
        """Of one message between two workers."""
        return self.latency_s * (0.5 + self._timeline.random.random())

    def _blocked(self, lane: SimLane, *, asks: bool) -> float:
        """Until when nothing passes from the reader (`asks`), or to it; 0: it does."""
        timeline, ends = self._timeline, (lane.reader.worker.name, lane.grant.source)
        until = timeline.partitions.blocked_until(*(ends if asks else reversed(ends)))
        return until if until > timeline.now else 0.0

    # -- the reader's end

    def lane_made(self, lane: SimLane) -> None:
        lease = self._world.coordinator.cluster.leases.get(lane.grant.lease)
        lane.reading.patched = lane.reading.patched or (lease is not None and lease.partial)
        self._faults.spoils(lane)
        self._timeline.after(self.latency(), lane.reader.worker, self._connect, lane)

    def _connect(self, lane: SimLane) -> None:
        """The reader's thread connects."""
        timeline = self._timeline
        if lane.ended:
            return
        if lane.is_cut:
            lane.end()
            return
        if self._faults.lacks_descriptors(lane.reader.worker.name):
            self._cannot_open(lane)
            return
        blocked = max(
            self._blocked(lane, asks=True),
            self._blocked(lane, asks=False),
            self._faults.lacks_descriptors(lane.grant.source),
        )
        if blocked:
            gives_up = timeline.now + self._world.options.connect_timeout_s
            if blocked < gives_up:
                timeline.at(blocked, lane.reader.worker, self._connect, lane)
            else:
                timeline.at(gives_up, lane.reader.worker, self._fail, lane, "unreachable")
            return
        reason = lane.connect()
        if reason:
            self._fail(lane, reason)
            return
        lane.is_open = True
        lane.heard_at = timeline.now
        self._feed(lane)

    def _cannot_open(self, lane: SimLane) -> None:
        """That is the reader's own fault, and ends its fill."""
        reader, is_over = lane.reader, lane.reading.over
        lane.end()
        if not is_over and lane.reading is reader.pull:
            error = StateError("this process has too many files open", retryable=True)
            reader.apply(reader.member.pull_failed(error, reader.worker.now))

    def _fail(self, lane: SimLane, reason: str) -> None:
        """The reader's thread meets a failure, and ends."""
        if not lane.ended:
            if not lane.is_cut:
                self._world.took(f"source failed: {reason}")
            lane.end(reason)

    def lanes_wanted(self, reading: Reading) -> None:
        for lane in reading.lanes.values():
            if lane.is_open and not lane.ended and not lane.is_feeding:
                lane.is_feeding = True
                self._timeline.after(self._timeline.wake(), lane.reader.worker, self._feed, lane)

    def _feed(self, lane: SimLane) -> None:
        """The reader's thread asks for batches."""
        timeline = self._timeline
        lane.is_feeding = False
        assert lane.source is not None
        for batch in lane.submit(self.batch_chunks * lane.reading.chunk_bytes):
            lane.up_due = max(lane.up_due, timeline.now + self.latency())
            timeline.at(lane.up_due, lane.source.worker, self._asked, lane, batch)
        if lane.requests.asked and not lane.is_watched and not lane.ended:
            lane.is_watched = True
            lane.heard_at = max(lane.heard_at, timeline.now)
            timeline.after(
                self._world.options.stall_timeout_s, lane.reader.worker, self._watch, lane
            )

    def _watch(self, lane: SimLane) -> None:
        """The reader gives up a source that is silent for too long."""
        timeline = self._timeline
        lane.is_watched = False
        if lane.ended or lane.is_cut or not lane.requests.asked:
            return
        silent_s = timeline.now - lane.heard_at
        if silent_s >= self._world.options.stall_timeout_s - 1e-6:
            self._fail(lane, "stalled")
            return
        lane.is_watched = True
        timeline.after(
            self._world.options.stall_timeout_s - silent_s, lane.reader.worker, self._watch, lane
        )

    def _arrive(self, lane: SimLane, frame: Frame) -> None:
        """A frame is there: the reader's thread settles it."""
        timeline = self._timeline
        if lane.ended:
            return
        blocked = self._blocked(lane, asks=False)
        if blocked:
            lane.down_due = max(lane.down_due, blocked)
            timeline.at(blocked, lane.reader.worker, self._arrive, lane, frame)
            return
        lane.heard_at = timeline.now
        if frame.failure:
            self._fail(lane, frame.failure)
            return
        if frame.chunks and self._faults.damages(lane):
            first, *rest = frame.chunks
            frame = frame._replace(chunks=((first[0], "damaged", first[2]), *rest))
        verified = lane.reading.books.chunks_verified
        lane.settle(frame)
        if lane.reading.resumed and lane.reading.books.chunks_verified > verified:
            lane.reading.resumed = False
            self._world.took("resumed from verified chunks")

    def lane_cut(self, lane: SimLane) -> None:
        """The reader's thread is told to end."""
        self._timeline.after(self._timeline.wake(), lane.reader.worker, lane.end)

    def _lost(self, lane: SimLane) -> None:
        """The reader's thread finds the connection broken, unless it cannot even hear of that."""
        blocked = self._blocked(lane, asks=False)
        if blocked:
            self._timeline.at(blocked, lane.reader.worker, self._lost, lane)
        else:
            self._fail(lane, "lost")

    # -- the owner's end

    def _asked(self, lane: SimLane, batch: tuple[int, ...]) -> None:
        assert lane.source is not None
        blocked = self._blocked(lane, asks=True)
        if blocked:
            lane.up_due = max(lane.up_due, blocked)
            self._timeline.at(blocked, lane.source.worker, self._asked, lane, batch)
        elif not lane.is_stopped:
            lane.queue.append(batch)
            self._serve(lane)

    def chunks_offered(self, handle: LaneEnd) -> None:
        for lane in handle.serving:
            if lane.is_waiting and lane.source is not None:
                lane.is_waiting = False
                self._timeline.after(self._timeline.wake(), lane.source.worker, self._serve, lane)

    def _serve(self, lane: SimLane) -> None:
        """The owner's thread begins the next access, if it can."""
        timeline = self._timeline
        if lane.access is not None or not lane.queue or lane.is_stopped:
            return
        assert lane.source is not None
        if lane.stalled_until > timeline.now:
            timeline.at(lane.stalled_until, lane.source.worker, self._serve, lane)
            return
        wanted = lane.queue[0]
        begun = lane.begin(wanted, self.send_chunks * CHUNK_BYTES)
        match begun:
            case Access():
                lane.queue.popleft()
                if begun.rest:
                    lane.queue.appendleft(begun.rest)
                timeline.after(
                    self._send_s(lane, len(begun.chunks)),
                    lane.source.worker,
                    self._sent,
                    lane,
                    begun.number,
                )
            case Refusal():
                self._send(lane, Frame(failure="refused"))
                lane.close()
            case _:
                lane.is_waiting = True
                if lane.patient_until <= timeline.now:
                    lane.patient_until = timeline.now + PATIENCE_S
                    timeline.at(lane.patient_until, lane.source.worker, self._lacks, lane, wanted)

    def _lacks(self, lane: SimLane, wanted: tuple[int, ...]) -> None:
        """It has waited long enough for what it was asked: its reader may ask elsewhere."""
        if lane.is_waiting and not lane.is_stopped and lane.queue and lane.queue[0] == wanted:
            lane.is_waiting = False
            self._world.took("source lacks chunks")
            self._send(lane, lane.lack())
            self._serve(lane)

    def _send_s(self, lane: SimLane, chunks: int) -> float:
        assert lane.source is not None
        slow = (
            self._timeline.partitions.slow_until(lane.reader.worker.name, lane.source.worker.name)
            > self._timeline.now
        )
        return (
            self._chunk_s(lane)
            * chunks
            * (0.5 + self._timeline.random.random())
            * (SLOW if slow else 1)
        )

    def _sent(self, lane: SimLane, number: int) -> None:
        """The send call returns, once the reader has taken the bytes."""
        timeline = self._timeline
        if lane.access is None or lane.access.number != number or lane.source is None:
            return
        if lane.ended:
            lane.close()
            return
        until = max(self._blocked(lane, asks=False), lane.reader.worker.stopped_until)
        if until > timeline.now and lane.reader.worker.alive:
            timeline.at(until, lane.source.worker, self._sent, lane, number)
            return
        self._send(lane, lane.finish())
        self._serve(lane)

    def _send(self, lane: SimLane, frame: Frame) -> None:
        lane.down_due = max(lane.down_due, self._timeline.now + self.latency())
        self._timeline.at(lane.down_due, lane.reader.worker, self._arrive, lane, frame)

    def lane_shut(self, lane: SimLane) -> None:
        """The owner shuts the connection: its send returns soon, and its reader hears of it."""
        if lane.source is None or lane.is_stopped:
            return
        lane.is_stopped = True
        self._world.took("reader shut out")
        self._timeline.after(self._timeline.wake(), lane.source.worker, lane.close)
        self._timeline.after(self.latency(), lane.reader.worker, self._lost, lane)

    def lane_closed(self, lane: SimLane) -> None:
        """The owner's thread finds out that the reader is gone."""
        if lane.source is None:
            return
        blocked = self._blocked(lane, asks=True)
        when = max(blocked, self._timeline.now + self.latency())
        self._timeline.at(when, lane.source.worker, lane.close)

    # -- processes die

    def reader_died(self, lane: SimLane) -> None:
        lane.end()

    def source_died(self, lane: SimLane) -> None:
        lane.access = None
        lane.is_stopped = True
        self._timeline.after(self.latency(), lane.reader.worker, self._lost, lane)
