"""One source's lane: the state that its threads share, how many bytes each call receives, and the
reports of it.

Other readers get a call's bytes only when the call has returned. So a call receives what comes in a
few milliseconds: over a slow link one chunk, over a fast one so much that calls cost little.

Not responsible for its threads, nor for the lock that guards this state (`lanes`).
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from tensorhub.deltas import Counts
from tensorhub.messages import Flow, Grant, Origin
from tensorhub.observed import LinkTiming
from tensorhub.runtime.data.lane_times import link_timing
from tensorhub.runtime.data.thread_time import Spent
from tensorhub.scheduler.links import FlowMeter
from tensorhub.scheduler.requests import Requests
from tensorhub.transport.base import (
    BATCH_BYTES,
    Arrival,
    Channel,
    Cutter,
    Lacking,
    ReadFailure,
    Reason,
)
from tensorhub.transport.streaming_digest import SMALL_BYTES, GilWatch
from tensorhub.types import DeltaUse, LeaseId, SourceReport

FIRST_BYTES = 2**16  # received by the first call
# by any call at the most, in small pieces, while the source goes on sending
CACHED_BYTES = SMALL_BYTES
LARGE_BYTES = 64 * 2**20  # as FIRST_BYTES, where small pieces do not pay
OFFER_S = 0.005  # what comes in so much time is received by one call
CONTENDED_S = 0.05  # as OFFER_S, where each call costs a switch interval

# of a source's memory, by its purpose
KINDS: Final[Mapping[str, str]] = {
    "use": "live",
    "prefetch": "host copy",
    "retention": "host copy",
    "seed": "seed",
    "archive": "archive",
}


class ReceiveSizer:
    """How many bytes each call of one lane receives; the lane's lock guards it."""

    def __init__(self) -> None:
        self.call_bytes = FIRST_BYTES  # what the next call receives
        self.transfer_s = 0.0  # of all calls, from their first bytes on
        self.verify_s = 0.0
        self.meter = FlowMeter()
        self._gil = GilWatch()

    def arrived(
        self, nbytes: int, transfer_s: float, verify_s: float, now: float, *, is_digested: bool
    ) -> None:
        """A call has brought so many bytes, which were there at `now`."""
        self.transfer_s += transfer_s
        self.verify_s += verify_s
        self._gil.digested(nbytes, verify_s)
        most = LARGE_BYTES if self._gil.is_contended or not is_digested else CACHED_BYTES
        in_time = (
            nbytes * (CONTENDED_S if self._gil.is_contended else OFFER_S) / max(transfer_s, 1e-6)
        )
        self.call_bytes = min(most, 4 * max(nbytes, FIRST_BYTES), int(in_time))
        self.meter.arrived(nbytes, now)


class NumberedChannel:
    """See `transport.base.Channel`. `numbers`: those of the selection's chunks in the reader's
    grid, ascending.
    """

    def __init__(self, channel: Channel, numbers: Sequence[int]) -> None:
        self._channel = channel
        self._numbers = numbers

    def submit(self, chunks: Sequence[int]) -> None:
        self._channel.submit([bisect_left(self._numbers, chunk) for chunk in chunks])

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        answer, numbers = self._channel.receive(bytes_max), self._numbers
        if isinstance(answer, Lacking):
            return Lacking([numbers[chunk] for chunk in answer.chunks], ())
        chunks = [(numbers[chunk], digest) for chunk, digest in answer.chunks]
        return answer._replace(
            chunks=chunks, made={numbers[chunk]: digest for chunk, digest in answer.made.items()}
        )

    def close(self) -> None:
        self._channel.close()


# of a thread that helps: with less, cores are short, and it takes them from other threads
CORE_SHARE_MIN = 0.7
CORE_SHARE_AFTER_S = 0.02  # several of the kernel's turns


class Opened(NamedTuple):
    """A channel, the name of its transport, and for how many threads it is. `ended` hears, in a
    lane's thread, how reading by it has ended: with a failure, or (None) with all that was wanted.
    It does not hear of a source that was dropped.
    """

    transport: str
    channel: Channel
    lanes: int = 1
    batch_bytes: int = BATCH_BYTES
    ended: Callable[[ReadFailure | None], object] = lambda failure: None
    waits: bool = False  # its threads wait for a network, not for cores
    use: DeltaUse = DeltaUse.UNDECIDED  # why no delta is asked for, or that it is not decided


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """This lease's read ended without all its bytes; verified chunks stay. `chunk`: the chunk with
    a bad digest; `at_source`: as its source numbers it.
    """

    lease: LeaseId
    reason: Reason
    detail: str
    chunk: int | None
    at_source: int | None = None


@dataclass(slots=True)
class SourceLane:
    """One source's lane. What its threads share is guarded as the pull is."""

    grant: Grant
    lease: LeaseId
    origin: Origin
    requests: Requests
    # its selection's chunks, in this reader's numbers; None: it reads no selection
    brings: Sequence[int] | None = None
    cells: int = 0  # that it has brought, of a selection
    runs: int = 0
    bytes_saved: int = 0  # by deltas
    codec_s: float = 0.0
    counts: Counts = field(default_factory=Counts)
    use: DeltaUse = DeltaUse.UNDECIDED
    cutter: Cutter = field(default_factory=Cutter)
    transport: str = ""
    channel: Channel | None = None  # from when it is open until the last thread leaves
    ended: Callable[[ReadFailure | None], object] = lambda failure: None  # see `Opened`
    waits: bool = False  # see `Opened`
    outcome: str = "reading"  # then "used", "dropped", or why it failed
    failure: ReadFailure | None = None  # the first of its threads', unless it was cut before
    threads: int = 0  # that drive it now
    # that all its threads took, those included that run: as if they had begun at 0
    threads_s: float = 0.0
    started: float = 0.0
    seconds: float = 0.0  # from `started` on, once it has ended
    batch_bytes: int = BATCH_BYTES  # of one request
    sizer: ReceiveSizer = field(default_factory=ReceiveSizer)
    answers: int = 0  # that its threads have dealt with
    spent: Spent = field(default_factory=Spent)  # by threads that have left
    is_through: bool = False  # all that its source can bring is verified

    @property
    def ends_by_itself(self) -> bool:
        """Whether the lane waits for no answer once the pull is over: then its connection is worth
        keeping.
        """
        return not self.requests.asked and (
            self.channel is not None or (self.started > 0 and not self.threads)
        )

    def seconds_up_to(self, now: float) -> float:
        return self.seconds or (now - self.started if self.started else 0.0)

    def threads_s_up_to(self, now: float) -> float:
        return self.threads_s + self.threads * now

    def enter(self) -> None:
        """Another thread drives it from now on."""
        self.threads += 1
        self.threads_s -= time.perf_counter()

    def leave(self, spent: Spent) -> None:
        """A thread drives it no more, which has spent that on it."""
        self.threads -= 1
        self.threads_s += time.perf_counter()
        self.spent = self.spent.plus(spent)

    def note_deltas(self, arrival: Arrival, whole_bytes: int, came_bytes: int) -> None:
        """Chunks of `whole_bytes` came as deltas of `came_bytes`."""
        self.bytes_saved += whole_bytes - came_bytes
        self.codec_s += arrival.codec_s
        self.counts = self.counts.and_of(arrival.counts)
        if arrival.use is not DeltaUse.UNDECIDED and self.use is not DeltaUse.USED:
            self.use = arrival.use

    # ------------------------------------------------------------------------------------------
    # what is told of it

    def report(self, bytes_read: int, now: float) -> SourceReport:
        shard = None if self.brings is None else self.grant.shard
        counts = shard, self.cells, self.runs
        return SourceReport(
            self.grant.source,
            self.transport,
            bytes_read,
            self.seconds_up_to(now),
            self.outcome,
            *counts,
            self.bytes_saved,
            self.codec_s,
            KINDS[self.grant.purpose],
            self.use,
            *self.counts,
            "" if self.failure is None else self.failure.detail,
        )

    def timing(self, bytes_read: int, now: float, *, on_device: bool) -> LinkTiming:
        """Where its seconds went, once its threads have left."""
        digest_s, codec_s = self.sizer.verify_s, self.codec_s
        what = self.transport, KINDS[self.grant.purpose], bytes_read, self.seconds_up_to(now)
        return link_timing(self.grant, *what, self.spent, digest_s, codec_s, on_device=on_device)

    @property
    def flow(self) -> Flow | None:
        """For the coordinator; None: there is nothing to tell yet, or no more."""
        flow = self.sizer.meter.flow(self.lease) if self.failure is None else None
        return None if flow is None else replace(flow, deltas=self.use)

    def end(self, *, is_over: bool) -> str:
        """Its outcome. `is_over`: the pull has all that it wanted."""
        if is_over or self.is_through:
            return "used"
        return "dropped" if self.failure is None else self.failure.reason

    def failed(self, failure: ReadFailure) -> SourceFailed:
        """The report of that failure."""
        chunk = at_source = failure.chunk
        if chunk is not None and self.brings is not None:
            at_source = bisect_left(self.brings, chunk)
        return SourceFailed(self.lease, failure.reason, failure.detail, chunk, at_source)


class CoreShare:
    """How much of a core the thread that made this has got since."""

    def __init__(self) -> None:
        self._began, self._cpu_s = time.perf_counter(), time.thread_time()

    @property
    def is_small(self) -> bool:
        """Whether this thread gets little of a core, because other threads take it or because the
        thread waits: it helps little.
        """
        seconds = time.perf_counter() - self._began
        return (
            seconds > CORE_SHARE_AFTER_S
            and time.thread_time() - self._cpu_s < CORE_SHARE_MIN * seconds
        )
