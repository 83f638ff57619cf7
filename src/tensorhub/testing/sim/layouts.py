"""Groups of several layouts: which part of one tensor each rank has, and what a chunk of another grid holds.

The tensor has rows of CHUNK_BYTES. Memory is cells, one for each chunk of the grid in which it was published or filled. What
a chunk of a selection holds follows from the published cells that its strips touch, so that whoever reads it, in whichever
way, has to end up with the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random

from tensorhub.layouts.arrangement import Coordinates
from tensorhub.layouts.identity import layout_id_of
from tensorhub.layouts.joining import Declaration, coordinates_of
from tensorhub.layouts.reading import Part
from tensorhub.layouts.resharded import ReshardedManifest
from tensorhub.layouts.views import source
from tensorhub.manifest import Manifest, TensorDescription, build_manifest
from tensorhub.strips import Strip
from tensorhub.testing.sim.memory import CHUNK_BYTES, Cells

AND, OF = " + ", "@"  # between the pieces of a cell, and between a published cell's tag and which of its bytes they are
LAYOUTS_DRAWN = 0.25  # of all seeds
LEFT_OUT_DRAWN = 0.4  # of these; some group may read less than all of a version, or wants to, and is refused


@dataclass(frozen=True)
class Layout:
    """The tensor, of so many rows, is cut into so many ranks: at rows, or at columns. The last rank leaves some of them out;
    `partial`: that is meant so.
    """

    rows: int
    ranks: int
    by_columns: bool = False
    left_out: int = 0
    partial: bool = False

    @property
    def is_refused(self) -> bool:
        """Whether no group may have it: it reads less than all."""
        return self.left_out > 0 and not self.partial

    def shape_of(self, rank: int) -> tuple[slice, slice]:
        """Its rows, and its columns."""
        size = (CHUNK_BYTES if self.by_columns else self.rows) - self.left_out
        part = slice(size * rank // self.ranks, size * (rank + 1) // self.ranks)
        return (slice(0, self.rows), part) if self.by_columns else (part, slice(0, CHUNK_BYTES))


@lru_cache(maxsize=256)
def described(layout: Layout, rank: int) -> tuple[Manifest, Declaration, Coordinates | None]:
    """What that rank registers, as `runtime.worker.registering` has it."""
    rows, columns = layout.shape_of(rank)
    shape = rows.stop - rows.start, columns.stop - columns.start
    tensor = TensorDescription("w", "uint8", shape, 0, shape[0] * shape[1])
    declared, is_part = Declaration(rank, layout.ranks, partial=layout.partial), layout.ranks > 1 or layout.left_out > 0
    if is_part:
        declared = replace(declared, sources={"w": source("w", shape=(layout.rows, CHUNK_BYTES))[rows, columns]})
    manifest = build_manifest([tensor], CHUNK_BYTES, "xxh3-64")
    manifest = replace(manifest, layout_id=layout_id_of(manifest, declared))
    return manifest, declared, coordinates_of(manifest, declared) if is_part else None


def draw_layouts(seed: int, chunks: int) -> list[Layout]:
    """Those of one seed's groups; most seeds have none but the published one. The seed's other chances stay as they are."""
    random = Random(f"layouts of {seed}")
    if random.random() >= LAYOUTS_DRAWN:
        return []
    rows = chunks + 3
    kinds = [Layout(rows, ranks) for ranks in (1, 2, 3, 4)] + [Layout(rows, 2, by_columns=True)]
    drawn = random.sample(kinds, random.choice((2, 2, 3)))
    if random.random() < LEFT_OUT_DRAWN:
        drawn[-1] = replace(drawn[-1], left_out=random.choice((1, 2)), partial=random.random() < 0.5)
    return drawn


def bytes_read(parts: Iterable[Part]) -> int:
    """How many bytes these read together; what several read counts once."""
    runs: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for part in parts:
        for strips in part.selection.chunks:
            for chunk, first, end in _pieces(strips):
                runs.setdefault((part.shard, chunk), []).append((first, end))
    total = 0
    for found in runs.values():
        at = 0
        for first, end in sorted(found):
            total += max(0, end - max(at, first))
            at = max(at, end)
    return total


# ------------------------------------------------------------------------------------------------------------- cells


def _touched(strips: Iterable[Strip]) -> Iterator[tuple[int, int, int]]:
    """Which published chunks these have bytes of, in order: (chunk, first byte of it, end)."""
    for strip in strips:
        for _, offset in strip.places():
            at, end = offset, offset + strip.run
            while at < end:
                chunk = at // CHUNK_BYTES
                stop = min(end, (chunk + 1) * CHUNK_BYTES)
                yield chunk, at - chunk * CHUNK_BYTES, stop - chunk * CHUNK_BYTES
                at = stop


@lru_cache(maxsize=4096)
def _pieces(strips: tuple[Strip, ...]) -> tuple[tuple[int, int, int], ...]:
    return tuple(_touched(strips))


def covered(strips: tuple[Strip, ...]) -> tuple[int, ...]:
    """The published chunks that these touch, ascending."""
    return tuple(sorted({chunk for chunk, _, _ in _pieces(strips)}))


def cell_of(strips: tuple[Strip, ...], cells: Cells | Sequence[str]) -> str:
    """What these strips of published memory hold."""
    found = []
    for chunk, first, end in _pieces(strips):
        is_whole = (first, end) == (0, CHUNK_BYTES)
        found.append(cells[chunk] if is_whole else f"{cells[chunk]}{OF}{first}-{end}")
    return AND.join(found)


def tags_in(cell: str) -> list[tuple[str, str]]:
    """The published cells of which that consists, and which of their bytes."""
    return [(tag, of) for tag, _, of in (piece.partition(OF) for piece in cell.split(AND))]


def part_of(manifest: Manifest, shard: int, selection: str) -> Part | None:
    """What is read by that selection of that class of shards; None: it is none of that memory."""
    parts = manifest.parts if isinstance(manifest, ReshardedManifest) else ()
    return next((p for p in parts if (p.shard, p.selection.selection_id) == (shard, selection)), None)


def resharded_cells(manifest: ReshardedManifest, published: dict[int, tuple[str, ...]]) -> tuple[str, ...]:
    """What memory of that manifest holds, of what these shards hold."""
    cells = [""] * manifest.chunk_count
    for part in manifest.parts:
        for number, strips in zip(part.chunks, part.selection.chunks, strict=True):
            cells[number] = cell_of(strips, published[part.shard])
    return tuple(cells)


def is_of_other_layout(manifest: Manifest | None) -> bool:
    """Whether memory of that manifest was filled in another layout than the published one."""
    return isinstance(manifest, ReshardedManifest)
