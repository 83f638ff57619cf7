"""Groups of several layouts: which part of one tensor each rank has, and what a chunk of another
grid holds.

The tensor has rows of CHUNK_BYTES. Memory is cells, one for each chunk of the grid in which it was
published or filled. What a chunk of a selection holds follows from the cells that its strips touch,
and is said in published cells, so that whoever reads it, in whichever way, has to end up with the
same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from math import inf as INF
from random import Random

from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.identity import layout_id_of
from tensorhub.layouts.joining import coordinates_of
from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.reading import Part, ReshardedManifest
from tensorhub.layouts.views import source
from tensorhub.model.manifest import Manifest, TensorDescription, build_manifest
from tensorhub.model.strips import Strip
from tensorhub.testing.sim.memory import CHUNK_BYTES, Cells

# between the pieces of a cell, and between a published cell's tag and which of its bytes they are
AND, OF = " + ", "@"
LAYOUTS_DRAWN = 0.25  # of all seeds
COUNTS = (2, 2, 3)  # how many of them a seed may have
COPIES_DRAWN = 0.3  # of these; each part of one of their layouts is on two ranks of a group
# of these; some group may read less than all of a version, or wants to, and is refused
LEFT_OUT_DRAWN = 0.4


@dataclass(frozen=True)
class Layout:
    """The tensor, of so many rows, is cut at rows, or at columns, and each part is on so many ranks
    as there are copies. The last part leaves some of it out; `partial`: that is meant so.
    """

    rows: int
    ranks: int
    by_columns: bool = False
    left_out: int = 0
    partial: bool = False
    copies: int = 1

    @property
    def parts(self) -> int:
        """Into how many it is cut."""
        return self.ranks // self.copies

    @property
    def publishes(self) -> bool:
        """Whether a group that has it may publish: it has everything."""
        return not self.left_out

    @property
    def is_refused(self) -> bool:
        """Whether no group may have it: it reads less than all."""
        return self.left_out > 0 and not self.partial

    def shape_of(self, rank: int) -> tuple[slice, slice]:
        """Its rows, and its columns; but for those that all have."""
        size, number = (
            (CHUNK_BYTES if self.by_columns else self.rows) - self.left_out,
            rank % self.parts,
        )
        part = slice(size * number // self.parts, size * (number + 1) // self.parts)
        return (slice(0, self.rows), part) if self.by_columns else (part, slice(0, CHUNK_BYTES))


@lru_cache(maxsize=256)
def described(layout: Layout, rank: int) -> tuple[Manifest, Declaration, Coordinates | None]:
    """What that rank registers, as `runtime.worker.registering` has it."""
    rows, columns = layout.shape_of(rank)
    shape = rows.stop - rows.start, columns.stop - columns.start
    tensors = [TensorDescription("w", "uint8", shape, 0, shape[0] * shape[1])]
    declared, is_part = (
        Declaration(rank, layout.ranks, partial=layout.partial),
        layout.ranks > 1 or layout.left_out > 0,
    )
    if is_part:
        sources = {"w": ((None, source("w", shape=(layout.rows, CHUNK_BYTES))[rows, columns]),)}
        declared = replace(declared, sources=sources)
    manifest = build_manifest(tensors, CHUNK_BYTES, "xxh3-64")
    manifest = replace(manifest, layout_id=layout_id_of(manifest, declared))
    return manifest, declared, coordinates_of(manifest, declared) if is_part else None


def draw_layouts(seed: int, chunks: int) -> list[Layout]:
    """Those of one seed's groups; most seeds have none but the published one. The seed's other
    chances stay as they are.
    """
    random = Random(f"layouts of {seed}")
    if random.random() >= LAYOUTS_DRAWN:
        return []
    rows = chunks + 3
    kinds = [Layout(rows, ranks) for ranks in (1, 2, 3, 4)] + [Layout(rows, 2, by_columns=True)]
    drawn = random.sample(kinds, random.choice(COUNTS))
    if random.random() < LEFT_OUT_DRAWN:
        left_out = min(random.choice((1, 2)), rows - drawn[-1].ranks)  # each rank reads something
        drawn[-1] = replace(drawn[-1], left_out=left_out, partial=random.random() < 0.5)
    random = Random(f"copies of {seed}")
    if random.random() < COPIES_DRAWN:
        number = random.randrange(len(drawn))
        twice = replace(drawn[number], ranks=2 * drawn[number].ranks, copies=2)
        drawn[number] = twice if twice.ranks <= 4 else drawn[number]
    return drawn


def bytes_read(parts: Iterable[Part]) -> int:
    """How many bytes these read together; what several read counts once."""
    runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in parts:
        for strip in (strip for strips in part.selection.chunks for strip in strips):
            for region, offset in strip.places():
                runs.setdefault((part.shard, region), []).append((offset, offset + strip.run))
    total = 0
    for found in runs.values():
        at = 0
        for first, end in sorted(found):
            total += max(0, end - max(at, first))
            at = max(at, end)
    return total


# --------------------------------------------------------------------------------------------------
# cells


Piece = tuple[str, int, int]  # bytes of a published cell, by its tag: the first, and the end
Box = tuple[int, int, int, int]  # rows and columns of the tensor: the first, and the end, of either
_kept: dict[str, list[tuple[int, int, int, int]]] = {}  # by grid: see `_runs_of`


def _runs_of(grid: Manifest) -> list[tuple[int, int, int, int]]:
    """Where the chunks of memory of that grid lie: (first byte, end, chunk, how many bytes of the
    chunk come before). Regions are one behind the other.
    """
    if grid.grid_id not in _kept:
        if len(_kept) > 256:
            _kept.clear()
        found, regions = [], _regions_of(grid)
        for chunk in range(grid.chunk_count):
            at = 0
            for strip in grid.places(chunk):
                for region, offset in strip.places():
                    first = regions[region] + offset
                    found.append((first, first + strip.run, chunk, at))
                    at += strip.run
        _kept[grid.grid_id] = sorted(found)
    return _kept[grid.grid_id]


def _regions_of(grid: Manifest) -> list[int]:
    """Where each begins."""
    return list(accumulate([region.nbytes for region in grid.regions], initial=0))


def _touched(grid: Manifest, strips: Iterable[Strip]) -> Iterator[tuple[int, int, int]]:
    """Which chunks of that grid these have bytes of, in order: (chunk, first byte of it, end)."""
    runs, regions = _runs_of(grid), _regions_of(grid)
    for strip in strips:
        for region, at in strip.places():
            offset = regions[region] + at
            end = offset + strip.run
            for first, stop, chunk, before in runs[max(0, bisect_right(runs, (offset, INF)) - 1) :]:
                if first >= end:
                    break
                least, most = max(first, offset), min(stop, end)
                if least < most:
                    yield chunk, before + least - first, before + most - first


def covered(grid: Manifest, strips: tuple[Strip, ...]) -> tuple[int, ...]:
    """The chunks of that grid that these touch, ascending."""
    return tuple(sorted({chunk for chunk, _, _ in _touched(grid, strips)}))


def cell_of(grid: Manifest, strips: tuple[Strip, ...], cells: Cells | Sequence[str]) -> str:
    """What these strips of memory hold whose chunks are those cells."""
    found: list[Piece] = []
    for chunk, first, end in _touched(grid, strips):
        found += _cut(cells[chunk], first, end)
    return joined(found)


def _cut(cell: str, first: int, end: int) -> Iterator[Piece]:
    """These bytes of a cell."""
    at = 0
    for tag, of in tags_in(cell):
        least, most = map(int, of.split("-")) if of else (0, end)
        here, stop = max(first, at), min(end, at + most - least)
        if here < stop:
            yield tag, least + here - at, least + stop - at
        at += most - least


def joined(pieces: Iterable[Piece]) -> str:
    """The cell that consists of these, said in one way only."""
    found: list[Piece] = []
    for tag, first, end in pieces:
        if found and found[-1][0] == tag and found[-1][2] == first:
            found[-1] = tag, found[-1][1], end
        else:
            found.append((tag, first, end))
    return AND.join(f"{tag}{OF}{first}-{end}" for tag, first, end in found)


def tags_in(cell: str) -> list[tuple[str, str]]:
    """The published cells of which that consists, and which of their bytes."""
    return [(tag, of) for tag, _, of in (piece.partition(OF) for piece in cell.split(AND))]


def part_of(manifest: Manifest, shard: int, selection: str) -> Part | None:
    """What is read by that selection of that class of shards; None: it is none of that memory."""
    parts = manifest.parts if isinstance(manifest, ReshardedManifest) else ()
    return next(
        (p for p in parts if (p.shard, p.selection.selection_id) == (shard, selection)), None
    )


def boxes_of(coordinates: Coordinates) -> tuple[Box, ...]:
    """Which parts of the tensor a rank has, in the order of its memory."""
    pieces = sorted(coordinates.pieces(), key=lambda piece: (piece.region, piece.offset))
    return tuple(
        [
            (r.start, r.start + r.size, c.start, c.start + c.size)
            for r, c in (piece.box for piece in pieces)
        ]
    )


def area(box: Box) -> int:
    top, bottom, left, right = box
    return (bottom - top) * (right - left)


def resharded_cells(
    grid: ReshardedManifest, published: Iterable[tuple[Box, Sequence[str]]]
) -> tuple[str, ...]:
    """What memory of that grid holds, if ranks that have these boxes have published these cells."""
    assert grid.lies is not None
    boxes, shards = (
        boxes_of(grid.lies),
        sorted(dict(published).items(), key=lambda shard: shard[0][2]),
    )
    return tuple(
        [joined(_pieces_at(grid.places(chunk), boxes, shards)) for chunk in range(grid.chunk_count)]
    )


def _pieces_at(
    strips: Iterable[Strip], boxes: Sequence[Box], shards: Sequence[tuple[Box, Sequence[str]]]
) -> Iterator[Piece]:
    begins = list(accumulate(map(area, boxes), initial=0))
    for strip in strips:
        for region, offset in strip.places():
            at = begins[region] + offset  # a region has one piece
            end = at + strip.run
            while at < end:
                number = bisect_right(begins, at) - 1
                (top, _, left, right), begin = boxes[number], begins[number]
                width = right - left
                stop = min(end, begin + ((at - begin) // width + 1) * width)
                row, first = top + (at - begin) // width, left + (at - begin) % width
                for its, cells in shards:
                    least, most = max(first, its[2]), min(first + stop - at, its[3])
                    if its[0] <= row < its[1] and least < most:
                        start = (row - its[0]) * (its[3] - its[2]) - its[2]
                        yield from _published(cells, start + least, start + most)
                at = stop


def _published(cells: Sequence[str], first: int, end: int) -> Iterator[Piece]:
    while first < end:
        chunk = first // CHUNK_BYTES
        stop = min(end, (chunk + 1) * CHUNK_BYTES)
        yield from _cut(cells[chunk], first - chunk * CHUNK_BYTES, stop - chunk * CHUNK_BYTES)
        first = stop


def is_laid_out_anew(before: Manifest, after: Manifest) -> bool:
    """Whether memory that was of the one grid has other cells in the other one."""
    crosses = is_of_other_layout(before) or is_of_other_layout(after)
    return before.grid_id != after.grid_id and crosses


def is_of_other_layout(manifest: Manifest | None) -> bool:
    """Whether memory of that manifest was filled in another layout than the published one."""
    return isinstance(manifest, ReshardedManifest)
