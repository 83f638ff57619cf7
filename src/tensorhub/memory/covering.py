"""Which of a memory's own chunks have bytes of given strips.

Where chunks are strips themselves, they may lie between one another. So the answer may have more chunks than those with
such bytes, and never fewer. Responsible for an answer in the time of a search for each cell, also for hostile strips.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from tensorhub.model.strips import Strip


class Extent(NamedTuple):
    """A chunk has bytes of a region, the first and the last of which are these."""

    region: int
    first: int
    end: int
    chunk: int


class Covered:
    """Of each chunk, the chunks of a memory that have bytes of it, and perhaps some that lie between; ascending. They are
    kept as ranges of its extents: there are no more of those than cells, however many chunks lie within.
    """

    def __init__(self, extents: Sequence[Extent], ranges: Sequence[int], first: Sequence[int]) -> None:
        """Of chunk n: from `ranges[first[n]]` on, where each range begins and ends."""
        self._extents, self._ranges, self._first = extents, ranges, first

    def __len__(self) -> int:
        return len(self._first) - 1

    def __call__(self, chunk: int) -> tuple[int, ...]:
        places = iter(self._ranges[self._first[chunk] : self._first[chunk + 1]])
        found = {extent.chunk for least, end in zip(places, places, strict=True) for extent in self._extents[least:end]}
        return tuple(sorted(found))


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

    def covered(self, chunks: Iterable[Iterable[Strip]], count_max: int) -> Covered | None:
        """Of each of these chunks, which have bytes of it. None: more than `count_max` in all. It costs one search for each
        cell, however many that are.
        """
        ranges, first = array("I"), array("I", [0])
        for strips in chunks:
            after = 0
            for least, end in sorted(self._runs(strips)):
                if max(least, after) >= end:
                    continue
                if after and least <= after:
                    ranges[-1] = end
                else:
                    ranges.extend((least, end))
                count_max -= end - max(least, after)
                after = end
            if count_max < 0:
                return None
            first.append(len(ranges))
        return Covered(self._extents, ranges, first)

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
