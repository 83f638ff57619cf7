"""Which of a memory's own chunks have bytes of strips that somebody names.

Where chunks are strips themselves, they may lie between one another. So what is found may be more than has such bytes, and
never less. Responsible for finding that in the time of a search for each cell, whoever has made the strips.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

from tensorhub.strips import Strip


class Extent(NamedTuple):
    """A chunk has bytes of a region, the first and the last of which are these."""

    region: int
    first: int
    end: int
    chunk: int


class Covering:
    """Where the chunks of one memory lie."""

    def __init__(self, extents: Iterable[Extent]) -> None:
        self._extents = sorted(extents)
        self._starts = [(region, first) for region, first, _, _ in self._extents]
        # Of each extent: how far it, and those before it in its region, reach.
        self._reach = list(accumulate(((region, end) for region, _, end, _ in self._extents), max))

    @classmethod
    def of(cls, chunks: Sequence[Iterable[Strip]]) -> Covering:
        """Of chunks that are made of these strips."""
        found: dict[tuple[int, int], tuple[int, int]] = {}
        for number, strips in enumerate(chunks):
            for region, first, end in _extents(strips):
                before = found.get((number, region), (first, end))
                found[number, region] = min(first, before[0]), max(end, before[1])
        return cls(Extent(region, first, end, number) for (number, region), (first, end) in found.items())

    def __repr__(self) -> str:
        return f"<Covering: {len(self._extents)} extents>"

    def chunks(self, strips: Iterable[Strip]) -> tuple[int, ...]:
        """Those that have bytes of these strips, and perhaps some that lie between; ascending."""
        found = set[int]()
        after = 0
        for least, most in sorted(self._runs(strips)):
            found.update(map(itemgetter(3), self._extents[max(least, after) : most]))
            after = max(after, most)
        return tuple(sorted(found))

    def count_max(self, strips: Iterable[Strip]) -> int:
        """How many `chunks` may find at most. It costs one search for each cell, however many that are."""
        return sum([max(0, most - least) for least, most in self._runs(strips)])

    def _runs(self, strips: Iterable[Strip]) -> set[tuple[int, int]]:
        """Of the extents, from which one to which."""
        return {
            (bisect_right(self._reach, (region, first)), bisect_left(self._starts, (region, end)))
            for region, first, end in _extents(strips)
        }


def _extents(strips: Iterable[Strip]) -> Iterator[tuple[int, int, int]]:
    """(region, first byte, end) of each cell; of many cells in one region those of all together."""
    for strip in strips:
        region, offset, region_step, offset_step, length, _, _ = strip
        if region_step:
            yield from ((of, at, at + strip.extent) for of, at in strip.cells())
        else:
            last = offset + (length - 1) * offset_step
            yield region, min(offset, last), max(offset, last) + strip.extent
