"""Several connections to one source, driven as one channel: for paths on which one connection
cannot use the line.

A TCP connection that loses a packet sends less for many round trips. Over a WAN these are long, and
several connections lose less together. One line after the other is opened, each by a thread of the
lane that finds none free, while the first one is read already. A line is asked for the bytes that
it brings in half a second, and for more when some of them have come. So a fast line brings more
than a slow one, and all end at about the same time.

A further line is only a help. If it cannot be had, or ends, the other lines bring its chunks, and
it is not opened again. The channel fails when its last line does.

Not responsible for how many lines there are (`Transport.connections`), nor for the work of a line.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tensorhub.errors import StateError
from tensorhub.logs import get_logger
from tensorhub.model.accesses import CHUNKS_PER_ACCESS_MAX
from tensorhub.transport.base import Arrival, Channel, Cutter, Lacking, ReadFailure, Unusable

FIRST_BYTES = 2 * 2**20  # that a line is asked for before anything has come by it
# of its bytes: for more than a round trip, but without a long wait for a line that has become slow
AHEAD_S = 0.5

log = get_logger("tensorhub.worker")


@dataclass(slots=True, eq=False)
class _Line:
    channel: Channel
    cutter: Cutter
    asked: set[int] = field(default_factory=set)  # what has not arrived
    nbytes: int = 0  # that have
    seconds: float = 0.0  # for which its threads waited for that
    is_driven: bool = False  # a thread is inside


class ParallelChannel:
    """See `transport.base.Channel`. Up to `connections` threads may drive it."""

    def __init__(
        self,
        open_line: Callable[[Cutter], Channel],
        connections: int,
        sizes: Sequence[int],
        cutter: Cutter,
    ) -> None:
        """`sizes`: of all chunks. Opens the first line: errors as of `Transport.open`."""
        self._open_line = open_line
        self._sizes = sizes
        self._cutter = cutter
        self._lock = threading.Lock()  # guards all below
        self._lines_max = connections
        self._lines: list[_Line] = []
        self._opening: set[Cutter] = set()
        self._queue: deque[int] = deque()  # submitted, and asked of no line; ascending
        self._discarded_bytes = 0  # that lines which have ended brought in vain; not told yet
        cutter.attach(self._cut)
        with self._lock:
            first = self._next_cutter()
        try:
            self._add_line(first)
        except BaseException:
            cutter.detach()  # else the two would hold each other, and the destination
            raise

    def submit(self, chunks: Sequence[int]) -> None:
        with self._lock:
            self._queue = deque(sorted([*self._queue, *chunks]))

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        """By a line that no other thread drives; it is opened, if need be. No chunks: there is
        nothing for this thread.
        """
        while (taken := self._take_line()) is not None:
            line, request = taken
            try:
                if request:
                    line.channel.submit(request)
                began = time.perf_counter()
                answer = line.channel.receive(bytes_max)
                line.seconds += time.perf_counter() - began
            except ReadFailure as failure:
                if not self._lost(line, failure):
                    raise
                continue  # its thread takes another one, which may have nobody else
            return self._answered(line, answer)
        return Arrival((), 0.0, 0.0)

    def close(self) -> None:
        self._cutter.detach()
        for line in self._lines:
            line.channel.close()

    # ----------------------------------------------------------------------------------------------
    # lines

    def _take_line(self) -> tuple[_Line, list[int]] | None:
        """A line for this thread, and what to ask it for now; None: nothing is left for one."""
        while True:
            with self._lock:
                for line in self._lines:
                    if not line.is_driven and (line.asked or self._queue):
                        line.is_driven = True
                        return line, self._request(line)
                if not self._queue or len(self._lines) + len(self._opening) >= self._lines_max:
                    return None
                cutter = self._next_cutter()
            try:
                self._add_line(cutter)
            except (ReadFailure, Unusable, StateError) as error:  # StateError: of descriptors
                log.debug("connection_not_added", reason=str(error))
                return None

    def _next_cutter(self) -> Cutter:
        """That of a line that is opened from now on."""
        cutter = Cutter()
        self._opening.add(cutter)
        if self._cutter.is_cut:
            cutter.cut()
        return cutter

    def _add_line(self, cutter: Cutter) -> None:
        try:
            line = _Line(self._open_line(cutter), cutter)
        except BaseException:
            with self._lock:
                self._opening.discard(cutter)
                if not cutter.is_cut:  # it was not there to be had, and is not tried again
                    self._lines_max -= 1
            raise
        with self._lock:
            self._opening.discard(cutter)
            self._lines.append(line)

    def _request(self, line: _Line) -> list[int]:
        """What to ask this line for now, until that is what comes by it soon, or its share of all
        that is left.
        """
        request: list[int] = []
        asked = sum([self._sizes[chunk] for chunk in line.asked])
        share = (asked + sum([self._sizes[chunk] for chunk in self._queue])) // self._lines_max
        soon = max(FIRST_BYTES, int(AHEAD_S * line.nbytes / max(line.seconds, 1e-6)))
        while self._queue and len(request) < CHUNKS_PER_ACCESS_MAX:
            nbytes = self._sizes[self._queue[0]]
            if asked and (asked >= soon or asked + nbytes > share):
                break
            asked += nbytes
            request.append(self._queue.popleft())
        line.asked.update(request)
        return request

    def _answered(self, line: _Line, answer: Arrival | Lacking) -> Arrival | Lacking:
        """Its thread is done with it for now. Returns the answer, with what has come in vain since
        that was told last.
        """
        with self._lock:
            line.is_driven = False
            if not self._queue:
                # that line comes too late, and nobody shall wait for it
                for cutter in self._opening:
                    cutter.cut()
            if isinstance(answer, Lacking):
                line.asked.difference_update(answer.chunks)
                return answer
            for chunk, _ in answer.chunks:
                line.asked.discard(chunk)
                line.nbytes += self._sizes[chunk]
            discarded, self._discarded_bytes = self._discarded_bytes, 0
        return answer._replace(discarded_bytes=discarded)

    def _lost(self, line: _Line, failure: ReadFailure) -> bool:
        """Let the other lines bring its chunks. False: there are none, and the failure is the
        channel's.
        """
        line.channel.close()  # first: nothing may write any more where others shall
        with self._lock:
            self._lines.remove(line)
            self._lines_max -= 1
            self._discarded_bytes += failure.bytes_discarded
            self._queue = deque(sorted({*self._queue, *line.asked}))
            if not (left := len(self._lines)):
                failure.bytes_discarded, self._discarded_bytes = self._discarded_bytes, 0
        if left and not self._cutter.is_cut:
            log.info("connection_lost", reason=str(failure), left=left)
        return left > 0

    def _cut(self) -> None:
        with self._lock:
            cutters = [*self._opening, *(line.cutter for line in self._lines)]
        for cutter in cutters:
            cutter.cut()
