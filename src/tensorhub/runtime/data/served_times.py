"""What serving each reader costs its source, as observers are told it: once for each lease, when
its reader is done.

A reader says that it is done (`DoneReading`), keeps its connection, and may use it for its next
read; or its connection ends. It may have several connections. Whatever a reader says, this costs
little: a lease that got no bytes is not told of.

Not responsible for telling (`on_served`).
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tensorhub.observed import ServedTiming
from tensorhub.protocol.tcp_info import TcpCounts
from tensorhub.runtime.data.thread_time import ThreadTime
from tensorhub.transport.owner import Lane

OFTEN = 4  # once in so many answers


@dataclass(slots=True)
class _Lease:
    asked: float  # when it was asked for
    began: float  # when it was granted
    readers_s: float  # of all leases, up to then
    lanes: int = 0  # that serve it now
    timing: ServedTiming = field(default_factory=lambda: ServedTiming("", 0, 0.0))


class ServedTimes:
    """Those of one worker. For any thread."""

    def __init__(self) -> None:
        self.on_served: Callable[[ServedTiming], None] = lambda timing: None
        self._lock = threading.Lock()  # guards all below
        self._leases: dict[tuple[str | None, str], _Lease] = {}  # by reader, and its name for it
        # seconds of all leases together, up to `_counted`
        self._readers_s, self._counted = 0.0, time.perf_counter()

    def __repr__(self) -> str:
        return f"<ServedTimes: {len(self._leases)} leases are served>"

    def _count(self) -> float:
        """Add the seconds up to now, which is returned."""
        now = time.perf_counter()
        self._readers_s += len(self._leases) * (now - self._counted)
        self._counted = now
        return now

    def begin(self, reader: str | None, lease: str, since: float | None = None) -> None:
        """A lane serves that reader's lease, and was asked for that at this time (None: now)."""
        with self._lock:
            now = self._count()
            new = _Lease(now if since is None else since, now, self._readers_s)
            self._leases.setdefault((reader, lease), new).lanes += 1

    def end(self, reader: str | None, part: ServedTiming) -> None:
        """A lane serves the lease of that part no more."""
        key = reader, part.lease
        with self._lock:
            now, found = self._count(), self._leases[key]
            found.timing = _sum(found.timing, part)
            found.lanes -= 1
            if found.lanes:
                return
            del self._leases[key]
            seconds, served_s = now - found.asked, max(now - found.began, 1e-9)
            readers = max(0.0, (self._readers_s - found.readers_s) / served_s - 1)
        if found.timing.nbytes:
            self.on_served(replace(found.timing, seconds=seconds, readers=readers))


def _sum(some: ServedTiming, other: ServedTiming) -> ServedTiming:
    """Of two lanes of one lease."""
    return ServedTiming(
        other.lease,
        some.nbytes + other.nbytes,
        0.0,
        some.blocked_s + other.blocked_s,
        some.window_s + other.window_s,
        some.cpu_s + other.cpu_s,
        some.delay_s + other.delay_s,
        some.gil_s + other.gil_s,
        some.disk_s + other.disk_s,
        some.empty_s + other.empty_s,
        some.resent + other.resent,
        some.segments + other.segments,
    )


class LaneTimes:
    """Of one lane, in its thread. To be closed."""

    def __init__(self, lane: Lane, all_times: ServedTimes) -> None:
        self._lane = lane
        self._all = all_times
        self._lease = ""  # that is asked for
        self._since = 0.0  # from when on
        self._is_counted = False  # some of it was served
        self._answered = 0.0  # when the last request was; 0.0: one is being answered
        # from here on: of that lease
        self._thread = ThreadTime()
        self._tcp: TcpCounts | None = None
        self._bytes = self._calls = self._faults = 0
        self._given_before, self._empty_before_s = 0, 0.0
        self._answers = self._roomy = 0  # behind so many of these the socket had room

    def asked(self, lease: str) -> None:
        """A request under that lease is answered next."""
        if lease != self._lease:
            self.done()
            self._begin(lease)
        else:
            self._idle()

    def granted(self, lease: str) -> None:
        """The reader may have what it asks for under that lease: only then it counts."""
        if not self._is_counted and lease == self._lease:
            self._is_counted = True
            self._all.begin(self._lane.reader, lease, self._since)

    def answered(self) -> None:
        """It is."""
        self._answered = time.perf_counter()
        if self._lease:
            self._answers += 1
            self._roomy += self._lane.connection.has_room
        self._thread.probe(self._answered)

    def _idle(self) -> None:
        """Up to now, since the last answer."""
        if self._answered:
            self._thread.idle_s += time.perf_counter() - self._answered
        self._answered = 0.0

    def done(self) -> None:
        """The reader asks for nothing more under its lease, as far as this lane knows."""
        if not self._lease:
            return
        lease, self._lease = self._lease, ""
        if self._is_counted:
            self._all.end(self._lane.reader, self._part(lease))

    close = done

    def _begin(self, lease: str) -> None:
        self._lease, connection, self._answered = lease, self._lane.connection, 0.0
        self._since, self._is_counted = time.perf_counter(), False
        self._tcp, self._faults = connection.tcp_counts(), _major_faults()
        self._bytes, self._calls = connection.sent_bytes, connection.calls
        self._given_before, self._empty_before_s = self._lane.given_bytes, self._lane.empty_s
        self._answers = self._roomy = 0
        self._thread = ThreadTime()

    def _part(self, lease: str) -> ServedTiming:
        thread, connection = self._thread, self._lane.connection
        self._idle()
        thread.empty_s = self._lane.empty_s - self._empty_before_s
        thread.calls = connection.calls - self._calls
        spent, tcp, disk_s = thread.spent(), TcpCounts(), 0.0
        after = connection.tcp_counts()
        if after is not None and self._tcp is not None:
            tcp = after.since(self._tcp)
        if _major_faults() > self._faults:
            # memory of a file was waited for, too: that limits, if the socket often had room. (Not
            # always: a disk brings megabytes at a time.)
            disk_s = spent.blocked_s * min(1.0, OFTEN * self._roomy / max(1, self._answers))
        given_bytes = self._lane.given_bytes - self._given_before
        return ServedTiming(
            lease,
            given_bytes or connection.sent_bytes - self._bytes,
            spent.seconds,
            spent.blocked_s - disk_s,
            tcp.window_s,
            spent.cpu_s,
            spent.delay_s,
            spent.gil_s,
            disk_s,
            spent.empty_s,
            tcp.resent,
            max(tcp.resent, tcp.segments),
        )


def _major_faults() -> int:
    """Of this thread: pages that it has waited for, which come from files."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
