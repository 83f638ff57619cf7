"""The grids in which an owner's memory is read: the chunks' sizes and digests.

Not responsible for accesses, nor for what is available (`worker.owner`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Covers = Callable[[int], Sequence[int]]
"""Of a selection: the chunks of the memory's own grid of which a chunk has bytes."""


@dataclass(slots=True)
class Grid:
    """The digests of one grid of a memory."""

    sizes: Sequence[int]  # bytes of each chunk
    digests: list[int | None]  # of each chunk; None until it is made or has arrived
    made: list[int] | None = None  # chunks whose digests were made here, and not told yet; None: nobody wants to know
    undigested: int = 0  # always digests.count(None), where `made` is kept

    def tell(self) -> None:
        """Its digests are asked for from now on."""
        self.made = [chunk for chunk, digest in enumerate(self.digests) if digest is not None]
        self.undigested = len(self.digests) - len(self.made)

    @property
    def is_sound(self) -> bool:
        undigested = self.digests.count(None) if self.made is not None else 0
        return len(self.digests) == len(self.sizes) and self.undigested == undigested


@dataclass(slots=True)
class SelectedGrid(Grid):
    """That of a selection. `covers`: see `Covers`."""

    covers: Covers = field(default=lambda chunk: ())
    ready: bytearray = field(default_factory=bytearray)  # 1 for each chunk that was seen to be available

    def revoke(self, wrong: set[int]) -> None:
        """These chunks of the memory's own grid are not available any more."""
        for chunk in range(len(self.sizes)):
            if not wrong.isdisjoint(self.covers(chunk)):
                self.ready[chunk] = 0
                if self.made is not None and self.digests[chunk] is not None:
                    self.undigested += 1
                self.digests[chunk] = None

    def agrees(self, available: bytearray) -> bool:
        """Whether what was seen to be available is."""
        seen = (chunk for chunk, is_ready in enumerate(self.ready) if is_ready)
        return all(available[own] for chunk in seen for own in self.covers(chunk))
