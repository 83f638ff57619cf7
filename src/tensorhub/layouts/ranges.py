"""Ranges: where the bytes of any range of a reader's memory lie at its sources.

A plan has rows, in the order of what they are made from; this has them by the reader's memory, so
that any range can be looked up: a chunk of a published shard in the files of a checkpoint, or a
piece of a file in the published shards.

Responsible for looking up. Not responsible for the plan (`plan`), nor for bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.plan import Loops, plan


class Range(NamedTuple):
    """So many bytes from byte `at` on of the reader's region are those from `offset` on of that
    region of that source.
    """

    at: int
    nbytes: int
    source: int
    region: int
    offset: int


class _Block(NamedTuple):
    """One block of a row; `end`: beyond its last byte at the reader."""

    at: int
    end: int
    source: int
    region: int
    offset: int
    loops: Loops
    run: int


class Ranges:
    """What a reader takes from these sources, for any range of its memory."""

    def __init__(self, reader: Coordinates, sources: Sequence[Coordinates]) -> None:
        """ManifestMismatch: no source has something of it."""
        self.nbytes = 0  # of all ranges
        self._blocks: dict[int, list[_Block]] = {}
        made = plan(reader, sources)
        for source, nbytes in made.needs.items():
            self.nbytes += nbytes
            for mine, at, its, offset, length, steps, loops, run in made.rows(source):
                its_step, source_step, my_step, reader_step = steps
                extent = _extent(loops, run)
                for n in range(length):
                    start = at + n * reader_step
                    block = _Block(
                        start,
                        start + extent,
                        source,
                        its + n * its_step,
                        offset + n * source_step,
                        loops,
                        run,
                    )
                    self._blocks.setdefault(mine + n * my_step, []).append(block)

    def find(self, region: int, offset: int, nbytes: int) -> list[Range]:
        """The ranges of so many bytes of that region from `offset` on, in order; without gaps,
        unless parts of it are in no source.
        """
        end = offset + nbytes
        return sorted(
            each
            for block in self._blocks.get(region, ())
            if block.at < end and offset < block.end
            for each in _runs(block, block.at, block.offset, block.loops, offset, end)
        )


def _extent(loops: Loops, run: int) -> int:
    return sum([(times - 1) * reader for times, _, reader in loops]) + run


def _runs(
    block: _Block, at: int, offset: int, loops: Loops, start: int, end: int
) -> Iterator[Range]:
    """The runs of a block that have bytes from `start` to `end` at the reader, cut to these."""
    if not loops:
        first, last = max(at, start), min(at + block.run, end)
        if first < last:
            yield Range(first, last - first, block.source, block.region, offset + first - at)
        return
    (times, source, reader), *inner = loops
    rest = tuple(inner)
    first_round = max(0, (start - at - _extent(rest, block.run)) // reader + 1)
    last_round = min(times, -(-(end - at) // reader))
    for n in range(first_round, last_round):
        yield from _runs(block, at + n * reader, offset + n * source, rest, start, end)
