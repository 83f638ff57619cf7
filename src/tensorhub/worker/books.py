"""The books of one memory: which chunks of it may be read, with which digests, and where they were
read.

A memory may be read in several *grids* at a time: its own, and one for each selection, which are
chunks of other sizes over its bytes. The chunks of a selection may be read once all chunks of the
memory are available; or, of memory that is loaded on demand, those that lie under them. The
generation, the accesses and the fence belong to the memory, and hold for all its grids.

Not responsible for which generation a reader needs, nor for accesses and fences (`owner`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tensorhub.machine import Story
from tensorhub.messages import Origin
from tensorhub.model.accesses import CHUNKS_PER_ACCESS_MAX, Access
from tensorhub.types import ContentId
from tensorhub.worker.grids import Grid


@dataclass(slots=True)
class Books:
    """The books of one registration's memory. Kept while it is closed, so that its last generation
    is not opened again.
    """

    generation: int
    content_id: ContentId
    own: Grid
    available: bytearray  # 1 for each chunk of its own grid that may be read
    missing: int  # always available.count(0)
    selections: dict[str, Grid] = field(default_factory=dict)  # by name
    # where each chunk was read, if known; None: no chunk was read
    origins: list[Origin | None] | None = None
    grid_id: str = ""  # the name of its own grid
    serves: bool = True
    is_open: bool = True
    # always the number of running accesses to this registration, under whichever generation
    accesses: int = 0
    story: Story = field(default_factory=Story)

    def grid(self, selection: str) -> Grid | None:
        """The grid of this selection ("": the memory's own grid); None: the selection is not
        known.
        """
        return self.selections.get(selection) if selection else self.own

    # ------------------------------------------------------------------------------------------
    # available chunks

    def mark_available(
        self, arrived: Iterable[tuple[int, int | None]], origin: Origin | None
    ) -> None:
        """See `Owner.mark_available`."""
        if origin is not None and self.origins is None:
            self.origins = [None] * len(self.own.sizes)
        for chunk, digest in arrived:
            if not self.available[chunk]:
                self.available[chunk] = 1
                self.missing -= 1
                self.own.digests[chunk] = digest
                if self.origins is not None and origin is not None:
                    self.origins[chunk] = origin

    def revoke(self, wrong: set[int]) -> None:
        """These chunks are not as published."""
        for chunk in wrong:
            self.missing += self.available[chunk]
            self.available[chunk], self.own.digests[chunk] = 0, None
        self.story.tell("revoked", self.generation, "chunks", len(wrong))
        for grid in self.selections.values():
            grid.forget()

    def unload(self) -> None:
        """Nothing is there for now, and what will be there again has the same digests."""
        self.available = bytearray(len(self.available))
        self.missing = len(self.available)
        self.story.tell("unloaded", self.generation, "accesses", self.accesses)

    def touched(self, access: Access) -> Iterable[int]:
        """The chunks of the memory's own grid that an access may touch; for an access to a
        selection all of them.
        """
        return range(len(self.available)) if access.selection else access.chunks

    def kept(self) -> list[tuple[int, int]]:
        """See `Owner.kept`."""
        if not self.missing:
            return []
        known = enumerate(zip(self.available, self.own.digests, strict=True))
        return [
            (chunk, digest) for chunk, (there, digest) in known if digest is not None and not there
        ]

    # ---------------------------------------------------------------------------------------- what
    # may be read

    def may_read(self, grid: Grid, chunk: int) -> bool:
        if grid is self.own or grid.under is None:
            return self.available[chunk] == 1 if grid is self.own else not self.missing
        runs = grid.under(chunk)
        return all(self.available.find(0, first, first + count) < 0 for first, count in runs)

    def readable(
        self, grid: Grid, wanted: Sequence[int], bytes_max: int
    ) -> tuple[list[int], list[int]]:
        """Split `wanted` into the chunks that an access takes now, and the rest."""
        chunks: list[int] = []
        rest: list[int] = []
        taken_bytes = 0
        for position, chunk in enumerate(wanted):
            nbytes = grid.sizes[chunk]
            if len(chunks) == CHUNKS_PER_ACCESS_MAX or (
                chunks and taken_bytes + nbytes > bytes_max
            ):
                rest.extend(wanted[position:])
                break
            if self.may_read(grid, chunk):
                chunks.append(chunk)
                taken_bytes += nbytes
            else:
                rest.append(chunk)
        return chunks, rest

    def runs(self, selection: str, runs_max: int) -> tuple[tuple[int, int], ...]:
        """The first (first, count) runs of chunks that may be read, of that selection or ("") of
        its own grid.
        """
        runs: list[tuple[int, int]] = []
        if not selection:
            first = self.available.find(1)
            while first >= 0 and len(runs) < runs_max:
                end = self.available.find(0, first)
                end = len(self.available) if end < 0 else end
                runs.append((first, end - first))
                first = self.available.find(1, end)
            return tuple(runs)
        grid = self.selections.get(selection)
        return () if grid is None or self.missing else ((0, len(grid.sizes)),)

    @property
    def is_sound(self) -> bool:
        """Whether these books agree with themselves."""
        return (
            self.missing == self.available.count(0)
            and len(self.available) == len(self.own.sizes)
            and all(grid.is_sound for grid in (self.own, *self.selections.values()))
        )
