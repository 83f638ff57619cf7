"""Digests that are made while bytes are moved, in pieces so small that each is still in the core's
own cache.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import xxhash

from tensorhub.protocol.blocking import BUFFERS_MAX

DIGEST_BYTES_PER_S = 4 * 2**30  # any CPU of the last ten years is faster
SLACK_S = 0.002
# of one call that moves bytes, and one that digests them: a server's core has that in its own cache
HOT_BYTES = 2**20
# that are sent at a time while digests are made; a larger chunk is sent by itself
FIRST_SEND_BYTES = HOT_BYTES
# a caller that wants more at a time gets large calls, and no digests on the way
SMALL_BYTES = 4 * 2**20


class GilWatch:
    """Tells from the time that digests take whether another thread keeps the GIL.

    Beside a thread that spins in Python, each return from a blocking call costs a switch interval
    (5 ms). Then a few large calls are better than many small ones, although the bytes leave the
    cache. Asking the interpreter would cost another such wait. A thread that lost its core for a
    moment looks alike, but not twice in a row.
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


class PiecewiseDigest:
    """That of one chunk, made of its bytes piece by piece, wherever they are."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._hash = xxhash.xxh3_64()

    def go_on(self, views: Iterable[memoryview]) -> None:
        """These are the next bytes."""
        started = time.perf_counter()
        for view in views:
            self._hash.update(view)
        self.seconds += time.perf_counter() - started

    @property
    def made(self) -> int:
        """Of the bytes up to now."""
        return self._hash.intdigest()


class StreamingDigests:
    """Digests of chunks, made piece by piece."""

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
        """These many bytes more have been moved; none of the sizes crosses the end of a chunk."""
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
    """The bytes in their order, grouped by call: at most `call_bytes`, and BUFFERS_MAX views, none
    of them empty.
    """
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
