"""The chunk grid of a layout: how a rank's pieces are cut into the chunks that holders of one layout send each other.

A chunk lies within one piece, so padding and row pitch belong to no chunk. A piece is cut where the global row number is a
multiple of some power of two: the largest number of rows, of these, that `chunk_bytes` can hold. A longer row is cut in the
same way along the next dimension. So the grids of different layouts often meet, and a chunk is often one cell. Tied tensors
are cut once.

Pieces of one form are cut alike. So a grid is a list of cuts for each form, and for each piece the number of its first
chunk.

Responsible for the numbers and the places of chunks. Not responsible for their digests.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

from tensorhub.errors import RegistrationError
from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.boxes import Box, span, volume
from tensorhub.layouts.cells import Loop, folded
from tensorhub.layouts.pieces import within
from tensorhub.manifest import CHUNKS_MAX

CUTS_MAX = 2**20  # of all forms


class Chunk(NamedTuple):
    """`nbytes` bytes of one region: runs of `run` bytes, within loops (times, bytes apart) in the order of the memory."""

    region: int
    offset: int
    loops: tuple[tuple[int, int], ...]
    run: int

    @property
    def nbytes(self) -> int:
        return prod([times for times, _ in self.loops]) * self.run


@dataclass(frozen=True)
class Grid:
    coordinates: Coordinates
    chunk_bytes: int

    @cached_property
    def cuts(self) -> tuple[tuple[Box, ...], ...]:
        """The chunks of each form, by its number, as boxes of the tensor. RegistrationError: they are too many."""
        geometry = self.coordinates.geometry
        nbytes = sum(volume(box) * kind.itemsize for kind, box, _ in geometry)
        if 4 * nbytes > CUTS_MAX * self.chunk_bytes:  # chunks are a quarter full at least, but for the last of a row
            raise RegistrationError(
                f"tensors of {nbytes} bytes are cut into too many chunks; a larger chunk_bytes makes fewer"
            )
        return tuple([tuple(_cut(box, 0, kind.itemsize, self.chunk_bytes)) for kind, box, _ in geometry])

    @cached_property
    def firsts(self) -> tuple[int, ...]:
        """The number of each piece's first chunk; at the end, how many chunks there are."""
        counts = list(map(len, self.cuts))
        arrangement = self.coordinates.arrangement
        tied = arrangement.tied
        each = (0 if piece in tied else counts[form] for piece, form in enumerate(arrangement.form_of))
        found = tuple(accumulate(each, initial=0))
        if found[-1] > CHUNKS_MAX:
            raise RegistrationError(f"{found[-1]} chunks are more than {CHUNKS_MAX}; a larger chunk_bytes makes fewer")
        return found

    @property
    def chunk_count(self) -> int:
        return self.firsts[-1]

    def chunk(self, number: int) -> Chunk:
        """Where chunk `number` lies."""
        piece = bisect_right(self.firsts, number) - 1
        arrangement = self.coordinates.arrangement
        form = arrangement.form_of[piece]
        kind, box, strides = self.coordinates.geometry[form]
        offset, steps = within(self.cuts[form][number - self.firsts[piece]], box, strides)
        loops, run = folded([Loop(times, stride, stride) for times, stride in steps], kind.itemsize)
        at = arrangement.offsets[piece] + offset
        return Chunk(arrangement.regions[piece], at, tuple([(times, stride) for times, stride, _ in loops]), run)

    def tensor_of(self, number: int) -> str:
        """The name of a tensor that has bytes in chunk `number`."""
        arrangement = self.coordinates.arrangement
        return arrangement.catalogue.names[arrangement.tensors[bisect_right(self.firsts, number) - 1]]


def _cut(box: Box, dimension: int, itemsize: int, nbytes_max: int) -> Iterator[Box]:
    """In the order of the rows."""
    if volume(box) * itemsize <= nbytes_max or dimension == len(box):
        yield box
        return
    start, size, step = box[dimension]
    row_bytes = volume(box[dimension + 1 :]) * itemsize
    rows = 1 << max(0, (nbytes_max // row_bytes).bit_length() - 1)
    at = 0
    while at < size:
        boundary = ((start + at * step) // (rows * step) + 1) * rows * step  # the next one behind row number `at`
        end = min(size, -(-(boundary - start) // step))
        part = *box[:dimension], span(start + at * step, end - at, step), *box[dimension + 1 :]
        yield from _cut(part, dimension + 1, itemsize, nbytes_max)
        at = end
