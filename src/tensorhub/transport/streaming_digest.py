"""Bytes that are moved and digested in pieces so small that they are still in the nearest cache between the two."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import xxhash

from tensorhub.protocol.blocking import BUFFERS_MAX

DIGEST_BYTES_PER_S = 4 * 2**30  # less than any CPU of the last ten years manages
SLACK_S = 0.002
HOT_BYTES = 2**20  # moved by one call and digested by one: what a core's own cache holds on a server
FIRST_SEND_BYTES = HOT_BYTES  # of what is sent at a time while digests are made; a larger chunk goes by itself
SMALL_BYTES = 4 * 2**20  # whoever wants more at a time does not get along with many small calls


class GilWatch:
    """Whether another thread keeps the GIL from those that digest, by how long digests take.

    Beside a thread that spins in Python, each return from a blocking call costs a switch interval (5 ms):
    then few large calls are better than many that leave the bytes in the cache. Asking the interpreter would
    cost another such wait. A thread that lost its core for a moment looks the same, but not twice running.
    """

    __slots__ = ("_slow",)

    def __init__(self) -> None:
        self._slow = 0  # digests in a row that took too long

    def digested(self, nbytes: int, seconds: float) -> None:
        """So many bytes took so long."""
        self._slow = self._slow + 1 if seconds > nbytes / DIGEST_BYTES_PER_S + SLACK_S else 0

    @property
    def is_contended(self) -> bool:
        return self._slow > 1


class StreamingDigests:
    """Those of some chunks, made piece by piece."""

    def __init__(self, chunks: Iterable[tuple[int, memoryview]]) -> None:
        """Each chunk with its bytes, in the order in which they are moved."""
        self.made: dict[int, int] = {}
        self.seconds = 0.0
        self._left: deque[tuple[int, memoryview]] = deque()
        for chunk, view in chunks:
            if view.nbytes:
                self._left.append((chunk, view))
            else:
                self.made[chunk] = xxhash.xxh3_64_intdigest(view)
        self._hash = xxhash.xxh3_64()  # of the first chunk that is left, up to `_at`
        self._at = 0

    def go_on(self, sizes: Iterable[int]) -> None:
        """So many bytes more are there, none of them across the end of a chunk."""
        started = time.perf_counter()
        for size in sizes:
            chunk, view = self._left[0]
            if size == view.nbytes:
                self.made[chunk] = xxhash.xxh3_64_intdigest(view)
                self._left.popleft()
                continue
            self._hash.update(view[self._at : self._at + size])
            self._at += size
            if self._at == view.nbytes:
                self.made[chunk] = self._hash.intdigest()
                self._hash.reset()
                self._left.popleft()
                self._at = 0
        self.seconds += time.perf_counter() - started


def cut(views: Sequence[memoryview], call_bytes: int = HOT_BYTES) -> Iterator[list[memoryview]]:
    """What one call each moves: at most `call_bytes`, of BUFFERS_MAX views, in their order; none is empty."""
    call: list[memoryview] = []
    room = call_bytes
    for view in views:
        at, nbytes = 0, view.nbytes
        while at < nbytes:
            taken = min(nbytes - at, room)
            call.append(view if taken == nbytes else view[at : at + taken])
            at, room = at + taken, room - taken
            if not room or len(call) == BUFFERS_MAX:
                yield call
                call, room = [], call_bytes
    if call:
        yield call
