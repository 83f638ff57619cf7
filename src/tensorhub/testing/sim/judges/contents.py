"""What each version's bytes are: what its publisher's memory held when it voted, and what became of
that.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorhub.coordinator import Publication
from tensorhub.layouts.reading import ReshardedManifest
from tensorhub.testing.sim.assertion import demand
from tensorhub.testing.sim.judges.ports import JudgedHandle
from tensorhub.testing.sim.layouts import (
    Box,
    Piece,
    area,
    boxes_of,
    is_of_other_layout,
    joined,
    resharded_cells,
    tags_in,
)
from tensorhub.testing.sim.memory import CHUNK_BYTES, Cells
from tensorhub.types import OpKey, VersionInfo
from tensorhub.worker.registration_session import Shard


class Contents:
    """The contents that were published in one cluster, as their publishers had them."""

    def __init__(self) -> None:
        # some who publish are no handles of this cluster: nobody can know what they promised
        self.has_outsiders = False
        # cells of each publish, by rank
        self.promised: dict[OpKey, dict[int, tuple[str, ...]]] = {}
        self.truth: dict[str, dict[int, tuple[str, ...]]] = {}  # cells of each content, by shard
        self.publications: dict[str, OpKey] = {}  # by content id: which publish has minted it
        self.retired: set[str] = set()  # content ids that were rolled back
        # by model and number: content ids that are durable, or may be
        self.numbers: dict[str, dict[int, str]] = {}
        # by model and number: all content ids, rolled back or not
        self.minted_as: dict[tuple[str, int], set[str]] = {}
        # cells for which somebody has vouched who is not their publisher
        self.lies: set[str] = set()
        # cells that users have written into what is held, lies included
        self.written: set[str] = set()
        self._publishers: dict[OpKey, dict[int, Shard]] = {}  # who has promised that, by rank
        # cells by which users have overwritten others, which come first
        self._same: dict[str, str] = {}
        # by content, and grid: what is held in other layouts
        self._resharded: dict[tuple[str, str], tuple[str, ...]] = {}
        # registrations, and the content that their own user has overwritten
        self._spoilt: set[tuple[str, str]] = set()

    def state_lost(self) -> None:
        """The coordinator knows of none of them any more."""
        self.numbers.clear()

    def promise(self, key: OpKey, shard: Shard, cells: Cells) -> None:
        """A rank votes to publish what its memory holds now."""
        self.promised.setdefault(key, {})[shard.rank] = tuple(cells)
        self._publishers.setdefault(key, {})[shard.rank] = shard

    def minted(self, entry: Publication) -> None:
        """The coordinator wants this recorded: every rank has voted."""
        cells = self.promised.get(entry.key, {})
        if not cells and self.has_outsiders:
            cells = dict.fromkeys(range(entry.world_size), ())
        whole = len(cells) == entry.world_size
        demand(
            whole,
            "group atomicity: {} is published, but only ranks {} have called",
            entry.key,
            sorted(cells),
        )
        # on an older copy of the state the same keys come again
        self.truth[entry.content_id] = dict(cells)
        self.publications[entry.content_id] = entry.key
        self.numbers.setdefault(entry.model, {})[entry.number] = entry.content_id
        self.minted_as.setdefault((entry.model, entry.number), set()).add(entry.content_id)

    def restored(self, entry: Publication) -> None:
        """An archive had it, and the coordinator knows of it again."""
        self.retired.discard(entry.content_id)
        self.numbers.setdefault(entry.model, {})[entry.number] = entry.content_id

    def spoil(self, handle: JudgedHandle, content_id: str, chunk: int, cell: str) -> None:
        """A user writes published memory. No reader may get those bytes, unless the publisher's
        chunk had no digest yet: then the chunk counts as it is when its digest is made.
        """
        self.written.add(cell)
        held, other = handle.worker.owner._memories.get(handle.id), is_of_other_layout(handle.grid)
        if (
            held is not None
            and held.own.digests[chunk] is None
            and handle.lied != content_id
            and not other
        ):
            cells = list(self.truth[content_id][handle.shard.number])
            self._same[cell] = self._same.get(cells[chunk], cells[chunk])
            cells[chunk] = cell
            self.truth[content_id][handle.shard.number] = tuple(cells)
            self._resharded.clear()
        else:
            self._spoilt.add((handle.id, content_id))
            held_by_publisher = (
                handle.member.content is not None and handle.member.content.published
            )
            if not other and held_by_publisher:
                first = self.truth[content_id][handle.shard.number][chunk]
                self._same[cell] = self._same.get(first, first)
                self._resharded.clear()

    def misled(self, handle: JudgedHandle, content_id: str) -> None:
        """Its own process has lied to it: the coordinator will not count it."""
        handle.lied = content_id
        self._spoilt.add((handle.id, content_id))

    def believes(self, handle: JudgedHandle, content_id: str) -> None:
        """It is told to commit that, with its sources' digests: it may hold what has been written
        there.
        """
        cells = handle.cells if handle.staging is None else handle.staging
        if not self.written.isdisjoint(tag for cell in cells for tag, _ in tags_in(cell)):
            self._spoilt.add((handle.id, content_id))

    def is_spoilt(self, handle: JudgedHandle, content_id: str) -> bool:
        """Whether its own user has overwritten that there; also where only the digest of a
        selection could tell.
        """
        return (handle.id, content_id) in self._spoilt or handle.changed == content_id != ""

    def is_all(self, content_id: str, handles: Iterable[JudgedHandle]) -> bool:
        """Whether these, which hold different parts of it in another layout, have every byte of
        it.
        """
        grids = [h.grid for h in handles if isinstance(h.grid, ReshardedManifest)]
        held = {box for grid in grids if grid.lies is not None for box in boxes_of(grid.lies)}
        return sum(map(area, held)) >= self.nbytes(content_id)

    def nbytes(self, content_id: str) -> int:
        """Of the tensor; identical shards count once."""
        ranks = self._publishers[self.publications[content_id]]
        return sum(map(area, {_box_of(rank) for rank in ranks.values()}))

    def held_by(self, handle: JudgedHandle, content_id: str) -> tuple[str, ...]:
        """What the memory of that handle holds, where it holds that."""
        truth, grid = self.truth[content_id], handle.grid
        if not isinstance(grid, ReshardedManifest):
            return truth[handle.shard.number]
        name = content_id, grid.grid_id
        if name not in self._resharded:
            ranks = self._publishers[self.publications[content_id]]
            cells = resharded_cells(
                grid, [(_box_of(ranks[rank]), its) for rank, its in truth.items()]
            )
            self._resharded[name] = tuple([self.published_as(handle, cell) for cell in cells])
        return self._resharded[name]

    def published_as(self, handle: JudgedHandle, cell: str) -> str:
        """That cell, whenever it was read. If a chunk was overwritten, each grid in which it is
        read has a first digest of its own: of the cell before, or of the cell since.
        """
        if not is_of_other_layout(handle.grid):
            return cell
        found = list[Piece]()
        for tag, of in tags_in(cell):
            first, end = map(int, of.split("-")) if of else (0, 0)
            found.append((self._same.get(tag, tag), first, end))
        return joined(found)

    def check_cells(self, handle: JudgedHandle, version: VersionInfo) -> None:
        if self.is_spoilt(handle, version.content_id):
            return
        truth = self.held_by(handle, version.content_id)
        cells = tuple(handle.cells)
        if is_of_other_layout(handle.grid):
            cells = tuple([self.published_as(handle, cell) for cell in cells])
        if cells == truth:
            return
        wrong = [n for n, cell in enumerate(cells) if cell != truth[n] and n not in handle.unwanted]
        for chunk in [chunk for chunk in wrong if handle.was_written(chunk)]:
            self.spoil(handle, version.content_id, chunk, cells[chunk])
            wrong.remove(chunk)
        demand(
            len(cells) == len(truth) and not wrong,
            "content: {} holds {}, published was {}",
            handle,
            [*cells],
            truth,
        )


def _box_of(shard: Shard) -> Box:
    """The part of the tensor that a publisher's shard has."""
    if shard.coordinates is not None:
        return next(iter(boxes_of(shard.coordinates)), (0, 0, 0, 0))
    assert shard.manifest is not None
    return 0, shard.manifest.nbytes // CHUNK_BYTES, 0, CHUNK_BYTES  # all of it
