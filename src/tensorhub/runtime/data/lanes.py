"""The reader's side of the data plane: one shard, read from every source that it is granted, chunk
by chunk.

Theory of operation ------------------- Each source has a lane: a blocking thread that takes batches
from the `Pull` under one lock, keeps two of them asked for, receives straight into the destination,
checks digests while the bytes are in the cache, and offers each verified chunk to other readers
(`SharedOwner`) at once. Nothing of that passes through the event loop. The loop hears only events:
a source failed, everything is verified.

If the transport gains by it (`Transport.lanes`) and there is enough to read, more threads *help*
the lane: they drive the same channel and share its requests, so that a source still has one
channel, one place in the books, and one end. The first thread that fails ends the others. The last
one to leave closes the channel, and gives back what has not come. A helping thread that does not
get a core for itself retires: it would only take a trainer's or another reader's core. (Where
threads wait for a network, as over a WAN, they need none.)

Only lanes write into the destination, and no lane outlives the runner's `async with` block.

Responsible for threads, time and digests. Not responsible for the counts and reports of one lane
(`source_lane`), for choosing sources (the coordinator), nor for permission to use the bytes (the
group's decision).
"""

from __future__ import annotations

import errno
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import anyio
import anyio.to_thread
from anyio.abc import TaskGroup

from tensorhub.errors import StateError, TensorHubError, shortage
from tensorhub.layouts.reading import Part
from tensorhub.memory.base import Base
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.pages import read_only
from tensorhub.messages import FLOWS_MAX, Flow, Grant, Origin
from tensorhub.observed import LinkTiming
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.data.source_lane import (
    CoreShare,
    NumberedChannel,
    Opened,
    SourceFailed,
    SourceLane,
)
from tensorhub.runtime.data.thread_time import ThreadTime
from tensorhub.runtime.wakeup import Wakeup
from tensorhub.scheduler.pull import Pull
from tensorhub.scheduler.requests import Requests
from tensorhub.transport.base import Arrival, Channel, Cutter, Destination, Lacking, ReadFailure
from tensorhub.types import LeaseId, RegistrationId, SourceReport

# left to read for each thread that helps: one takes a fraction of a millisecond to begin
HELP_BYTES = 16 * 2**20
LANES_MAX = 64


ChannelOpener = Callable[[Grant, Destination, Cutter, int], Opened]
"""Opens the best channel to a grant's source, in a lane's thread, for as many bytes as are left.
ReadFailure if none.
"""


@dataclass(frozen=True, slots=True)
class AllVerified:
    """Every chunk is in the destination, and has its digest. The last event."""


PullEvent = SourceFailed | AllVerified


@dataclass(frozen=True, slots=True)
class PullReport:
    """What a pull has done up to now; see `FetchReport`. `phases`: wait, transfer, verify; they add
    up to the time that its lanes have existed, summed over lanes.
    """

    bytes_read: int
    reread_bytes: int
    retries: int
    chunks_verified: int
    bytes_verified: int
    bytes_wanted: int  # that were not there at the start
    phases: dict[str, float]
    sources: tuple[SourceReport, ...]
    # those of its sources that have lasted long enough to tell something
    flows: tuple[Flow, ...] = ()

    @classmethod
    def of(
        cls,
        pull: Pull,
        phases: dict[str, float],
        sources: tuple[SourceReport, ...],
        flows: tuple[Flow, ...] = (),
    ) -> Self:
        """With the counts of these books."""
        counts = (
            pull.bytes_read,
            pull.reread_bytes,
            pull.retries,
            pull.chunks_verified,
            pull.bytes_verified,
        )
        return cls(*counts, pull.bytes_wanted, phases, sources, flows)


class PullRunner:
    """Reads one shard of one content into `memory`. Use as `async with`; everything but its lanes
    belongs to the loop's thread.

    The registration must be open (filling) at `owner` under `generation` if other workers are to
    read the arriving chunks. Leaving the block, also by cancellation, ends all lanes and returns
    when the last one has ended.
    """

    def __init__(
        self,
        memory: ChunkMemory,
        owner: SharedOwner,
        registration: RegistrationId,
        generation: int,
        open_channel: ChannelOpener,
        *,
        verified: Iterable[int] = (),
        published: Mapping[int, int] | None = None,
        selections: Mapping[str, Part] | None = None,
        counts: Sequence[tuple[int, int]] = (),
        patience_s: float = math.inf,
        base: Base | None = None,
    ) -> None:
        """`verified`: chunks that `memory` holds, and that were verified, already. `published`:
        what these chunks must have as digest, whatever their source says. `selections`: what grants
        bring that name one. `counts`: of how many cells and runs each chunk is, if it comes by a
        selection. `patience_s`: see `Requests`. `base`: which deltas are applied to.
        """
        self._published = published or {}
        self._selections = selections or {}
        self._counts = counts
        self._memory = memory
        self._owner = owner
        self._registration = registration
        self._generation = generation
        self._open_channel = open_channel
        self._patience_s = patience_s
        self._base = base
        # guards the pull, the events and `_is_over`; notified when they change
        self._changed = threading.Condition()
        self._pull = Pull(memory.sizes, verified)
        self._events: deque[PullEvent] = deque()  # one per lane at most, and the last one
        self._is_over = self._pull.done  # no lane asks for anything more
        if self._is_over:
            self._events.append(AllVerified())
        self._lanes: dict[LeaseId, SourceLane] = {}
        self._help: deque[SourceLane] = deque()  # those that another thread shall help
        self._tasks: TaskGroup
        self._wakeup: Wakeup
        self._limiter: anyio.CapacityLimiter
        self._helpers: anyio.CapacityLimiter

    def __repr__(self) -> str:
        return f"<PullRunner of {self._registration}: {self._pull!r}>"

    # ------------------------------------------------------------------------------------ the
    # loop's own side

    async def __aenter__(self) -> Self:
        self._wakeup = Wakeup()
        self._limiter = anyio.CapacityLimiter(LANES_MAX)
        # of their own: no source waits for those that help another one
        self._helpers = anyio.CapacityLimiter(LANES_MAX)
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
            busy = [lane for lane in self._lanes.values() if not lane.ends_by_itself]
        for lane in busy:
            lane.cutter.cut()
        return await self._tasks.__aexit__(kind, error, trace)

    def add_source(self, grant: Grant) -> None:
        """Read from this source as well, from now on; unless all is there, the block is being left,
        or it was one before.
        """
        origin = Origin(grant.registration, grant.generation)
        lease = LeaseId(grant.lease)
        part = self._selections.get(grant.selection)
        requests = Requests(self._pull, lease, self._patience_s)
        lane = SourceLane(grant, lease, origin, requests)
        lane.brings = None if part is None else part.chunks
        with self._changed:
            if self._is_over or lane.lease in self._lanes:
                return
            self._pull.add_source(lane.lease, grant.complete, lane.brings)
            self._lanes[lane.lease] = lane
        self._tasks.start_soon(self._run_lane, lane)

    def drop_source(self, lease: LeaseId) -> None:
        """Stop reading there. No event follows; a lease that is unknown or over already is fine."""
        lane = self._lanes.get(lease)
        if lane is None:
            return
        lane.cutter.cut()  # first: a lane that is woken below must see it
        with self._changed:
            self._pull.drop_source(lease)
            self._changed.notify_all()

    async def next_event(self) -> PullEvent:
        """What happens next. After AllVerified nothing does: do not wait for more."""
        while True:
            with self._changed:
                while self._help:
                    self._tasks.start_soon(self._help_lane, self._help.popleft())
                if self._events:
                    return self._events.popleft()
            await self._wakeup.wait()

    def report(self) -> PullReport:
        """Counts and seconds up to now."""
        with self._changed:
            now, pull, lanes = time.perf_counter(), self._pull, list(self._lanes.values())
            transfer_s, verify_s = (
                sum(lane.sizer.transfer_s for lane in lanes),
                sum(lane.sizer.verify_s for lane in lanes),
            )
            lanes_s = sum(lane.threads_s_up_to(now) for lane in lanes)
            phases = {
                "wait": max(0.0, lanes_s - transfer_s - verify_s),
                "transfer": transfer_s,
                "verify": verify_s,
            }
            sources = tuple(lane.report(self._pull.source_bytes(lane.lease), now) for lane in lanes)
            flows = tuple(flow for lane in lanes if (flow := lane.flow) is not None)[-FLOWS_MAX:]
            return PullReport.of(pull, phases, sources, flows)

    def timings(self) -> list[LinkTiming]:
        """Where the seconds of each lane went, once all have ended."""
        with self._changed:
            now, on_device = time.perf_counter(), self._memory.device is not None
            return [
                lane.timing(self._pull.source_bytes(lane.lease), now, on_device=on_device)
                for lane in self._lanes.values()
            ]

    async def _run_lane(self, lane: SourceLane) -> None:
        try:
            await anyio.to_thread.run_sync(self._lane_thread, lane, limiter=self._limiter)
        finally:
            if not lane.threads:  # else the last one of those that help it does so
                self._lane_ended(lane)  # for a thread that was never started

    async def _help_lane(self, lane: SourceLane) -> None:
        await anyio.to_thread.run_sync(self._helping_thread, lane, limiter=self._helpers)

    # ---------------------------------------------------------------------------------------- a
    # lane's threads

    def _lane_thread(self, lane: SourceLane) -> None:
        thread = ThreadTime()
        with self._changed:
            lane.started = time.perf_counter()
            lane.enter()
        failure: ReadFailure | None = None
        try:
            destination = self._memory if lane.brings is None else self._memory.part(lane.brings)
            with self._changed:
                left = min(
                    self._pull.bytes_wanted - self._pull.bytes_verified, sum(destination.sizes)
                )
            opened = self._open_channel(lane.grant, destination, lane.cutter, left)
            lane.transport, channel, lanes, lane.batch_bytes, lane.ended, lane.waits, lane.use = (
                opened
            )
            if lane.brings is not None:
                channel = NumberedChannel(channel, lane.brings)
            with self._changed:
                lane.channel = channel
                self._help.extend(
                    [lane] * (lanes - 1 if lane.waits else min(lanes - 1, left // HELP_BYTES))
                )
                if self._help:
                    self._wakeup.set()
            self._read(lane, channel, thread)
        except (ReadFailure, OSError) as error:
            failure = self._of_source(error)
        finally:
            self._leave(lane, failure, thread)

    def _helping_thread(self, lane: SourceLane) -> None:
        thread = ThreadTime()
        with self._changed:
            channel = lane.channel
            if channel is None or lane.cutter.is_cut or self._is_over:
                return
            lane.enter()
        failure: ReadFailure | None = None
        is_retired = False
        try:
            is_retired = self._read(lane, channel, thread, None if lane.waits else CoreShare())
        except (ReadFailure, OSError) as error:
            failure = self._of_source(error)
        finally:
            if not is_retired:
                self._leave(lane, failure, thread)

    def _of_source(self, error: ReadFailure | OSError) -> ReadFailure:
        """The failure, if its source may be to blame. StateError: it is this process' own, which
        ends the pull.
        """
        if isinstance(error, TensorHubError):  # some are OSErrors, too
            raise error
        cause: BaseException | None = error
        while cause is not None:
            number = getattr(cause, "errno", None)
            if (
                number == errno.EFAULT
                and self._memory.device is None
                and read_only(self._memory.places)
            ):
                raise StateError(
                    "this process cannot write its own memory, into which it reads"
                ) from error
            if isinstance(cause, OSError) and (lacks := shortage(cause)) is not None:
                raise lacks from error
            cause = cause.__cause__
        if isinstance(error, OSError):
            raise StateError(f"this process cannot read: {error}") from error
        return error.alone()

    def _retire(self, lane: SourceLane, thread: ThreadTime) -> bool:
        """Let this thread stop helping. False, and the thread stays, if it is the lane's last
        one.
        """
        with self._changed:
            if lane.threads == 1:
                return False
            lane.leave(thread.spent())
            return True

    def _leave(self, lane: SourceLane, failure: ReadFailure | None, thread: ThreadTime) -> None:
        """This thread drives the lane no more. If it has failed, no other one shall; the last one
        closes the channel.
        """
        spent = thread.spent()
        with self._changed:
            if failure is not None:
                self._pull.discarded(lane.lease, failure.bytes_discarded)
                if lane.failure is None and not lane.cutter.is_cut:
                    lane.failure = failure
            lane.leave(spent)
            is_last, channel = not lane.threads, lane.channel
            if is_last:
                lane.channel = None
            else:
                if failure is not None:
                    lane.cutter.cut()
                self._changed.notify_all()
        if is_last:
            if channel is not None:
                channel.close()
            self._lane_ended(lane)
        else:
            self._wakeup.set()

    def _lane_ended(self, lane: SourceLane) -> None:
        """Give back what the lane did not bring, now that it writes no more. A second call does
        nothing.
        """
        with self._changed:
            is_first = lane.outcome == "reading"
            if is_first and (lane.failure is not None or self._pull.done or lane.is_through):
                lane.ended(lane.failure)  # before a next grant of this source can come
            if is_first:
                lane.seconds = time.perf_counter() - lane.started if lane.started else 0.0
                lane.outcome = lane.end(is_over=self._pull.done)
                if lane.failure is not None:
                    self._events.append(lane.failed(lane.failure))
            self._pull.lane_ended(lane.lease)
            self._changed.notify_all()
        self._finish_if_done()
        self._wakeup.set()

    def _read(
        self,
        lane: SourceLane,
        channel: Channel,
        thread: ThreadTime,
        share: CoreShare | None = None,
    ) -> bool:
        """Drive the channel until there is nothing more to do. `share`: of this thread, which helps
        as long as it gets a core; True: it has retired.
        """
        while share is None or not share.is_small or not self._retire(lane, thread):
            if (taken := self._take(lane, thread)) is None:
                return False
            batches, answers = taken
            for batch in batches:
                channel.submit(batch)
            thread.probe(began := time.perf_counter())
            # A GPU's digests are made by one launch: small calls do not pay.
            answer = channel.receive(
                lane.sizer.call_bytes if self._memory.device is None else lane.batch_bytes
            )
            thread.calls += answer.calls
            if isinstance(answer, Lacking):
                thread.empty_s += time.perf_counter() - began
                self._look_elsewhere(lane, answer)
            elif answer.chunks:
                if answers and not lane.grant.complete:  # the first one came after a round trip
                    thread.empty_s += answer.wait_s
                self._settle(lane, answer)
            elif not self._is_answered_by_others(lane, answers, thread):
                return False
        return True

    def _take(
        self, lane: SourceLane, thread: ThreadTime
    ) -> tuple[list[tuple[int, ...]], int] | None:
        """Batches to ask for now (a second one before the first has arrived), and how many answers
        were dealt with before. Waits while the lane has nothing to do. None: the lane is over.
        """
        batches: list[tuple[int, ...]] = []
        with self._changed:
            while not self._is_over and not lane.cutter.is_cut:
                batches += lane.requests.ask(lane.batch_bytes)
                if lane.requests.asked:
                    break
                if lane.brings is not None and self._pull.is_through(lane.lease):
                    lane.is_through = True  # its thread may be wanted for another source
                    break
                waited_s = self._wait()
                if lane.grant.complete:
                    thread.idle_s += waited_s
                else:
                    thread.empty_s += waited_s
            if batches and self._pull.is_patchy:
                self._changed.notify_all()
            return (batches, lane.answers) if lane.requests.asked else None

    def _wait(self) -> float:
        """Until something has changed; how long that was."""
        began = time.perf_counter()
        self._changed.wait()
        return time.perf_counter() - began

    def _is_answered_by_others(self, lane: SourceLane, answers: int, thread: ThreadTime) -> bool:
        """All that is asked for is in the hands of other threads of this lane: wait for one of
        them. False: it is over.
        """
        with self._changed:
            while lane.answers == answers and not self._is_over and not lane.cutter.is_cut:
                thread.idle_s += self._wait()
            return not self._is_over and not lane.cutter.is_cut

    def _look_elsewhere(self, lane: SourceLane, answer: Lacking) -> None:
        now = time.perf_counter()
        with self._changed:
            lane.answers += 1
            given_up = lane.requests.lacked(answer.chunks, answer.has, now)
            self._changed.notify_all()
        if given_up:
            raise ReadFailure("starved", given_up)

    def _settle(self, lane: SourceLane, arrival: Arrival) -> None:
        """Check the chunks that arrived, enter them into the books and offer them to readers.
        ReadFailure for a bad chunk.
        """
        started = time.perf_counter()
        made, is_digested = self._digests(arrival), bool(self._memory.width)
        good, bad = Requests.sort_out(
            arrival.chunks, made, self._published, is_digested=is_digested
        )
        seconds = time.perf_counter() - started + arrival.digest_s
        nbytes = sum([self._memory.sizes[chunk] for chunk, _ in arrival.chunks])
        came = {chunk: sum(map(len, each)) for chunk, each in arrival.deltas.items()}
        with self._changed:
            lane.note_deltas(
                arrival, sum(self._memory.sizes[chunk] for chunk in came), sum(came.values())
            )
            lane.sizer.arrived(
                nbytes, arrival.transfer_s, seconds, started, is_digested=self._memory.is_digested
            )
            lane.answers += 1
            if lane.brings is not None and self._counts:
                lane.cells += sum([self._counts[chunk][0] for chunk, _ in good])
                lane.runs += sum([self._counts[chunk][1] for chunk, _ in good])
            lane.requests.arrived(good, bad, came)
            if arrival.discarded_bytes:
                self._pull.discarded(lane.lease, arrival.discarded_bytes)
            if bad or lane.threads > 1 or lane.brings is not None:
                self._changed.notify_all()
        self._owner.mark_available(self._registration, self._generation, good, lane.origin)
        if arrival.deltas:
            self._keep_deltas(arrival, good)
        self._finish_if_done()
        # a wrong delta may be of another base: the chunk is read whole before the source is blamed
        corrupt = [chunk for chunk in bad if chunk not in arrival.deltas]
        if corrupt:
            raise ReadFailure("corrupt", f"chunk {corrupt[0]} does not have its digest", corrupt[0])

    def _keep_deltas(self, arrival: Arrival, good: Sequence[tuple[int, int | None]]) -> None:
        """Let other readers have the deltas that were right."""
        base = self._base
        assert base is not None
        right = {chunk: arrival.deltas[chunk] for chunk, _ in good if chunk in arrival.deltas}
        self._owner.deltas.keep(self._registration, self._generation, base.content_id, right)

    def _digests(self, arrival: Arrival) -> Mapping[int, int]:
        """Of what has arrived, as it is in the destination; none, where there are none to compare
        them with.
        """
        if not self._memory.width:
            return {}
        missing = [chunk for chunk, _ in arrival.chunks if chunk not in arrival.made]
        return {**arrival.made, **dict(zip(missing, self._memory.digests(missing), strict=True))}

    def _finish_if_done(self) -> None:
        """(The loop is woken when this thread leaves, which it does next: one waking instead of
        two.)
        """
        with self._changed:
            if not self._pull.done or self._is_over:
                return
            self._is_over = True
            self._events.append(AllVerified())
            self._changed.notify_all()
