"""Strips: bytes of one memory that follow a rule. A chunk consists of strips.

    Strip(region=3, offset=64, region_step=0, offset_step=0, length=1, loops=((512, 8192),), run=4096)

        for i in range(512): 4096 bytes of region 3, from byte 64 + i * 8192 on

    with length=8 and region_step=2, also in the regions 5, 7, ... 17

A strip is `length` cells, each a step further than the cell before. A cell is loops around runs.
The bytes of a strip are in that order: cell by cell, the outermost loop first. A contiguous range
of bytes is a strip of one run.

Responsible for that value, for finding whether it lies within regions of given sizes, and for its
shortest form. Not responsible for the meaning of the bytes, nor for moving them.
"""  # noqa: E501 - lines as they are typed

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from operator import lt
from typing import NamedTuple, TypeAlias

# loops: (times, bytes apart), the outermost first
Around: TypeAlias = "tuple[tuple[int, int], ...]"


class Strip(NamedTuple):
    region: int
    offset: int
    region_step: int
    offset_step: int
    length: int
    loops: Around
    run: int

    @property
    def cell_bytes(self) -> int:
        """Bytes of each cell."""
        return prod([times for times, _ in self.loops]) * self.run

    @property
    def nbytes(self) -> int:
        return self.length * self.cell_bytes

    @property
    def runs(self) -> int:
        return self.length * prod([times for times, _ in self.loops])

    @property
    def extent(self) -> int:
        """From the first byte of a cell to the last one that any of its runs can have, that
        included.
        """
        return sum([(times - 1) * apart for times, apart in self.loops]) + self.run

    @property
    def is_contiguous(self) -> bool:
        return self.length == 1 and not self.loops

    def cells(self) -> Iterator[tuple[int, int]]:
        """Of each cell in order: its region, and where it begins there."""
        region, offset, region_step, offset_step, length, _, _ = self
        return ((region + n * region_step, offset + n * offset_step) for n in range(length))

    def places(self) -> Iterator[tuple[int, int]]:
        """Of each run in order: its region, and where it begins there. As many as there are
        runs.
        """
        within = [0]
        for times, apart in self.loops:
            within = [at + n * apart for at in within for n in range(times)]
        return ((region, offset + at) for region, offset in self.cells() for at in within)


def straight(region: int, offset: int, nbytes: int) -> Strip:
    """A contiguous range of bytes."""
    return Strip(region, offset, 0, 0, 1, (), nbytes)


def shortest(strip: Strip) -> Strip:
    """The strip's bytes in the strip's order, with the longest runs, the fewest loops and the
    fewest cells.
    """
    region, offset, region_step, offset_step, length, loops, run = strip
    if length > 1 and not region_step and offset_step >= 0:
        loops, length = ((length, offset_step), *loops), 1
    if loops:
        loops, run = _folded(loops, run)
    if length == 1:
        region_step = offset_step = 0
    return Strip(region, offset, region_step, offset_step, length, loops, run)


def _folded(loops: Around, run: int) -> tuple[Around, int]:
    """Loops that go on where the next inner one ends, made one with it; and with the run, if there
    is none within.
    """
    found: list[tuple[int, int]] = []  # the innermost first
    for times, apart in reversed(loops):
        if times == 1:
            continue
        if not found and apart == run:
            run *= times
        elif found and apart == found[-1][0] * found[-1][1]:
            found[-1] = times * found[-1][0], found[-1][1]
        else:
            found.append((times, apart))
    return tuple(reversed(found)), run


def beyond(strip: Strip, sizes: Sequence[int]) -> bool:
    """Whether any byte of it lies outside regions of these sizes. Whatever the numbers say, this
    takes no longer than going through its cells where each is in another region, and no time where
    all are in one.
    """
    region, offset, region_step, offset_step, length, _, _ = strip
    last_region, last_offset = (
        region + (length - 1) * region_step,
        offset + (length - 1) * offset_step,
    )
    if min(region, last_region, offset, last_offset) < 0 or max(region, last_region) >= len(sizes):
        return True
    end = offset + strip.extent
    if not region_step:
        return max(end, last_offset + strip.extent) > sizes[region]
    theirs: Iterable[int] = map(
        sizes.__getitem__, range(region, last_region + (1 if region_step > 0 else -1), region_step)
    )
    if not offset_step:
        return min(theirs) < end
    return any(map(lt, theirs, range(end, end + length * offset_step, offset_step)))
