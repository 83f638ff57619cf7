"""Cells: bytes that one source has and one reader wants, and where they lie at either end; and families of like cells.

    a cell      loops (times, stride at the source, stride at the reader) around runs of `run` bytes:

                for i in range(512):                                            one loop: 512 rows of a column slice
                    reader[.. + i * 4096 : .. + run] = source[.. + i * 8192 : .. + run]

    a family    `length` cells that differ in where they begin only, an equal distance apart: of 512 experts, say

A run is contiguous at both ends. Loops are in the order of the reader's memory, the outermost first. That order is also
the order of the cell's bytes, on the wire and for its digest. It is the row-major order of the tensor unless the
reader's memory is transposed.

Responsible for what these values say. Not responsible for which there are (`plan`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat, starmap
from math import prod
from typing import NamedTuple, TypeAlias


class Loop(NamedTuple):
    """So many times, so many bytes apart at either end."""

    times: int
    source: int
    reader: int


Loops: TypeAlias = tuple[tuple[int, int, int], ...]


class Cell(NamedTuple):
    """Where its first byte is at either end, and from there on the loops around its runs."""

    source_region: int
    source_offset: int
    reader_region: int
    reader_offset: int
    loops: Loops
    run: int

    @property
    def runs(self) -> int:
        return prod([times for times, _, _ in self.loops])

    @property
    def nbytes(self) -> int:
        return self.runs * self.run

    def offsets(self) -> Iterator[tuple[int, int]]:
        """Of each run in order, where it begins in the source's region and in the reader's."""
        places = [(self.source_offset, self.reader_offset)]
        for times, source, reader in self.loops:
            places = [(s + n * source, r + n * reader) for s, r in places for n in range(times)]
        return iter(places)

    def cut(self, nbytes_max: int) -> Iterator[Cell]:
        """The cell's bytes in order, in cells of at most `nbytes_max`: of whole runs where those fit, else of parts of a
        run.
        """
        if self.nbytes <= nbytes_max:
            yield self
        elif not self.loops:
            for at in range(0, self.run, nbytes_max):
                moved = self._replace(source_offset=self.source_offset + at, reader_offset=self.reader_offset + at)
                yield moved._replace(run=min(nbytes_max, self.run - at))
        else:
            (count, source, reader), *inner = self.loops
            at_once = max(1, nbytes_max * count // self.nbytes)
            for at in range(0, count, at_once):
                loop = Loop(min(at_once, count - at), source, reader)
                offsets = {
                    "source_offset": self.source_offset + at * source,
                    "reader_offset": self.reader_offset + at * reader,
                }
                part = self._replace(loops=(loop, *inner) if loop.times > 1 else tuple(inner), **offsets)
                yield from part.cut(nbytes_max)


# How far apart the cells of a family begin: the source's region and offset, the reader's region and offset. May be negative.
Step: TypeAlias = tuple[int, int, int, int]
STILL: Step = (0, 0, 0, 0)

# A family as a plain tuple: there are many, and of plain tuples of numbers the garbage collector looks at each only once.
Row: TypeAlias = tuple[int, int, int, int, int, Step, Loops, int]


class Family(NamedTuple):
    """`length` cells: the first begins here at either end, and each next cell a `step` further."""

    reader_region: int
    reader_offset: int
    source_region: int
    source_offset: int
    length: int
    step: Step
    loops: Loops
    run: int

    @property
    def first(self) -> Cell:
        return Cell(self.source_region, self.source_offset, self.reader_region, self.reader_offset, self.loops, self.run)

    @property
    def runs(self) -> int:
        return self.length * self.first.runs

    def cells(self) -> Iterator[Cell]:
        begins = [_along(first, step, self.length) for first, step in zip(self.first[:4], self.step, strict=True)]
        return map(Cell, *begins, repeat(self.loops), repeat(self.run))


def _along(first: int, step: int, length: int) -> Iterable[int]:
    """A range, unless it stands still."""
    return range(first, first + step * length, step) if step else repeat(first, length)


def folded(loops: Iterable[Loop], run: int) -> tuple[Loops, int]:
    """Equivalent loops, as few as possible, with the longest runs: in the order of the reader's memory, each joined with
    the next inner loop where that ends at its next start.
    """
    found: list[Loop] = []  # the innermost first
    for loop in sorted((each for each in loops if each.times > 1), key=lambda each: each.reader):
        if not found and loop.source == loop.reader == run:
            run *= loop.times
        elif found and (loop.source, loop.reader) == (
            found[-1].times * found[-1].source,
            found[-1].times * found[-1].reader,
        ):
            found[-1] = found[-1]._replace(times=found[-1].times * loop.times)
        else:
            found.append(loop)
    return tuple(reversed(found)), run


def neat(row: Row) -> Row:
    """The row's cells, forward in the reader's memory. Neighbours coalesce: they become one cell, where all lie in one
    region at either end, without gaps.
    """
    region, offset, its, at, length, (its_step, source_step, my_step, reader_step), loops, run = row
    if length > 1 and its_step == my_step == 0 and source_step > 0 < reader_step:
        loops, run = folded([*starmap(Loop, loops), Loop(length, source_step, reader_step)], run)
        return region, offset, its, at, 1, STILL, loops, run
    if (my_step, reader_step) >= (0, 0):
        return row
    n = length - 1
    begins = region + n * my_step, offset + n * reader_step, its + n * its_step, at + n * source_step
    return *begins, length, (-its_step, -source_step, -my_step, -reader_step), loops, run
