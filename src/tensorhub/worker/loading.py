"""Which chunks of an archived version are loaded next: one machine per registration.

    absent -> loading     `take` hands it to a read
    loading -> loaded     the read has brought it
    loading -> absent     the read has failed, or was for nothing
    loaded -> absent      another version needs the room

Theory of operation. Readers name the chunks that they ask for, also those that are there. Chunks
that are asked for and absent are loaded first, in the order of asking. Then some of those that
follow the newest one that was asked for are loaded, because its reader asks for them next.

A read that has failed is not tried again for a while, during which readers that ask for its chunks
are told why.

Responsible for that order, and for when another version may take the room. Not responsible for
room (`budget`), for reading, nor for what readers may read (`owner`). Time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Final

from tensorhub.model.accesses import Refusal

BATCH_BYTES: Final = 64 * 2**20  # of one read
AHEAD_BYTES: Final = 128 * 2**20  # behind the newest chunk that was asked for
RETRY_S: Final = 5.0  # after a read that has failed
TURN_S: Final = 5.0  # that a version keeps its room while others want it, and it is asked for
IDLE_S: Final = 0.2  # without a question: its reader asks for nothing more, or is slow
_ABSENT: Final = 0
_LOADING: Final = 1
_LOADED: Final = 2


class Loading:
    """Those of one version's shard. `sizes`: bytes per chunk."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.used_at = -inf  # when it was last asked for
        self._sizes = sizes
        self._states = bytearray(len(sizes))
        self._wanted: dict[int, None] = {}  # those that were asked for and are absent, in order
        self._next = len(sizes)  # behind the newest chunk that was asked for
        self._faults: dict[int, tuple[Refusal, float]] = {}  # and until when
        self._ahead_from = -inf  # when chunks may be read ahead again
        self._loaded_at = inf  # since when it has any

    def __repr__(self) -> str:
        counts = [self._states.count(each) for each in (_LOADED, _LOADING)]
        return f"<Loading: {counts[0]} of {len(self._sizes)} loaded, {counts[1]} on their way>"

    def want(self, runs: Iterable[tuple[int, int]], now: float) -> Refusal | None:
        """A reader asks for these (first, count) runs of chunks. Returns why one of them cannot be
        had now; None: all are there, or will be.
        """
        self.used_at, refusal = now, None
        for first, count in runs:
            self._next = first + count
            chunk = self._states.find(_ABSENT, first, self._next)
            while chunk >= 0:
                reason, until = self._faults.get(chunk, (None, -inf))
                if now < until:
                    refusal = reason
                else:
                    self._wanted[chunk] = None
                chunk = self._states.find(_ABSENT, chunk + 1, self._next)
        return refusal

    def has_more(self, now: float) -> bool:
        """Whether `take` has something."""
        is_absent = self._states.find(_ABSENT, self._next) >= 0  # mostly all are there: soon said
        return bool(self._wanted) or (is_absent and next(self._ahead(now), None) is not None)

    def take(self, now: float) -> list[int]:
        """The chunks to read next, ascending. Empty: there are none now."""
        batch, left = list[int](), BATCH_BYTES
        for chunk in self._wanted or self._ahead(now):
            left -= self._sizes[chunk]
            if batch and left < 0:
                break
            batch.append(chunk)
        for chunk in batch:
            self._wanted.pop(chunk, None)
            self._states[chunk] = _LOADING
        return sorted(batch)

    def _ahead(self, now: float) -> Iterator[int]:
        left = AHEAD_BYTES if now >= self._ahead_from else 0
        for chunk in range(self._next, len(self._sizes)):
            left -= self._sizes[chunk]
            if left < 0:
                return
            if self._states[chunk] == _ABSENT and chunk not in self._faults:
                yield chunk

    def arrived(self, chunks: Iterable[int], now: float) -> None:
        """These are there, and may be read."""
        for chunk in chunks:
            self._states[chunk] = _LOADED
            self._faults.pop(chunk, None)
        self._loaded_at = min(self._loaded_at, now)

    def returned(self, chunks: Iterable[int]) -> None:
        """The read of these was for nothing: the memory was closed meanwhile."""
        for chunk in chunks:
            self._states[chunk] = _ABSENT

    def failed(self, chunks: Iterable[int], reason: Refusal, now: float) -> None:
        """These could not be read."""
        self._ahead_from = now + RETRY_S
        for chunk in chunks:
            self._states[chunk] = _ABSENT
            self._faults[chunk] = reason, now + RETRY_S

    def emptied(self) -> None:
        """Nothing is there any more."""
        self._states = bytearray(len(self._sizes))
        self._loaded_at = inf

    def turn_left_s(self, asked_at: float, now: float, *, is_read: bool) -> float:
        """How long it keeps its room yet, which another version wants since `asked_at`: as long as
        it is asked for, or read now, but for one turn at most; and until it has something, if it
        loads.
        """
        self.used_at = now if is_read else self.used_at
        if self._loaded_at == inf and (_LOADING in self._states or self._wanted):
            return IDLE_S
        until = min(self.used_at + IDLE_S, max(asked_at, self._loaded_at) + TURN_S)
        return max(0.0, until - now)
