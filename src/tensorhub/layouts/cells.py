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
from itertools import repeat
from math import prod
from typing import NamedTuple


class Loop(NamedTuple):
    """So many times, so many bytes apart at either end."""

    times: int
    source: int
    reader: int


Loops = tuple[Loop, ...]


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
        return prod([loop.times for loop in self.loops])

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
        """The same bytes in the same order, in cells of at most so many: of whole runs where those fit, else of parts
        of one.
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


class Step(NamedTuple):
    """How far apart the cells of a family begin. Steps may be negative."""

    source_region: int
    source_offset: int
    reader_region: int
    reader_offset: int


class Family(NamedTuple):
    """`length` cells of source number `source`: `first`, and then each a `step` further."""

    source: int
    length: int
    first: Cell
    step: Step

    @property
    def nbytes(self) -> int:
        return self.length * self.first.nbytes

    @property
    def runs(self) -> int:
        return self.length * self.first.runs

    def columns(self) -> tuple[Iterable[int], Iterable[int], Iterable[int], Iterable[int]]:
        """Of each cell: the source's region and offset, the reader's region and offset. Ranges, unless they stand still."""
        first, step, length = self.first, self.step, self.length
        return (
            _along(first.source_region, step.source_region, length),
            _along(first.source_offset, step.source_offset, length),
            _along(first.reader_region, step.reader_region, length),
            _along(first.reader_offset, step.reader_offset, length),
        )

    def cells(self) -> Iterator[Cell]:
        return map(Cell, *self.columns(), repeat(self.first.loops), repeat(self.first.run))


def _along(first: int, step: int, length: int) -> Iterable[int]:
    return range(first, first + step * length, step) if step else repeat(first, length)


def folded(loops: Iterable[Loop], run: int) -> tuple[Loops, int]:
    """The same bytes with as few loops as can be, and the longest runs: loops in the order of the reader's memory, and those
    that go on where the next inner one ends made one with it.
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


def joined(family: Family) -> Family:
    """As one cell, where all lie in one region at either end, each behind the one before: neighbours coalesce."""
    step, first = family.step, family.first
    if family.length == 1 or step.source_region or step.reader_region:
        return family
    if step.source_offset < 1 or step.reader_offset < 1:
        return family
    loops, run = folded([*first.loops, Loop(family.length, step.source_offset, step.reader_offset)], first.run)
    return Family(family.source, 1, first._replace(loops=loops, run=run), Step(0, 0, 0, 0))
