"""Where strips of one memory meet: which bytes of some strips are bytes of a chunk, and where in that chunk they are.

Responsible for arithmetic on where bytes lie. Nothing is read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from tensorhub.memory.strided import Block, blocks, bounds, runs
from tensorhub.model.strips import Strip

REGIONS = range(0, 2**84, 2**48)
"""Where each region begins, if all lie in one space, far apart: what `memory.strided.blocks` takes for addresses."""


class Runs(NamedTuple):
    """The runs of a chunk, ascending, none of which meet: where each begins and ends, and how many bytes of the chunk come
    before it.
    """

    starts: list[int]
    ends: list[int]
    before: list[int]


def runs_in(strips: Iterable[Strip]) -> Runs:
    """Those of a chunk that is made of these strips. Bytes that it has twice are found once."""
    found, at = list[tuple[int, int, int]](), 0
    for block in blocks(strips, REGIONS):
        for start in runs(block):
            found.append((start, start + block.run, at))
            at += block.run
    where = Runs([], [], [])
    for start, end, its in sorted(found):
        least = max(start, where.ends[-1]) if where.ends else start
        if least >= end:
            continue
        before = its + least - start
        if where.ends and least == where.ends[-1] and before == where.before[-1] + least - where.starts[-1]:
            where.ends[-1] = end
        else:
            where.starts.append(least)
            where.ends.append(end)
            where.before.append(before)
    return where


def within(block: Block, at: int, where: Runs) -> Iterator[tuple[int, Block]]:
    """The bytes of a block that are in these runs: (bytes before it, where it lies in the chunk). `at`: bytes before the
    block.
    """
    (cells, loops, run, nbytes), (starts, ends, before) = block, where
    each, (below, above), n = nbytes // len(cells), bounds(block), 0
    while n < len(cells):
        cell, here = cells[n], at + n * each
        number = bisect_right(starts, cell + below) - 1
        if number >= 0 and cell + above <= ends[number]:
            m = n + 1
            while m < len(cells) and starts[number] <= cells[m] + below and cells[m] + above <= ends[number]:
                m += 1
            shift = before[number] - starts[number]
            yield here, Block([cell + shift for cell in cells[n:m]], loops, run, (m - n) * each)
            n = m
            continue
        follows = number + 1 < len(starts) and starts[number + 1] < cell + above
        meets = follows or (number >= 0 and cell + below < ends[number])
        if meets and loops:
            (times, apart), *inner = loops
            yield from within(Block([cell + i * apart for i in range(times)], tuple(inner), run, each), here, where)
        elif meets:
            yield from _of_one(cell, run, here, where, max(number, 0))
        n += 1


def _of_one(cell: int, run: int, at: int, where: Runs, number: int) -> Iterator[tuple[int, Block]]:
    """The parts of one run that lie in `where`. `number`: runs before this number have no part of it."""
    while number < len(where.starts) and where.starts[number] < cell + run:
        start, end = max(where.starts[number], cell), min(where.ends[number], cell + run)
        if start < end:
            place = where.before[number] + start - where.starts[number]
            yield at + start - cell, Block((place,), (), end - start, end - start)
        number += 1
