"""The grids in which an owner's memory is read: the chunks' sizes and digests.

Not responsible for accesses (`owner`), nor for what is available (`books`).
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field

Covers = Callable[[int], Sequence[int]]
"""Of a selection: the chunks of the memory's own grid of which a chunk has bytes."""


@dataclass(slots=True)
class Grid:
    """The digests of one grid of a memory."""

    sizes: Sequence[int]  # bytes of each chunk
    digests: MutableSequence[int | None]  # of each chunk; None until it is made or has arrived
    made: list[int] | None = None  # chunks whose digests were made here, and not told yet; None: nobody wants to know
    undigested: int = 0  # always digests.count(None), where `made` is kept

    def tell(self) -> None:
        """Its digests are asked for from now on."""
        self.made = [chunk for chunk, digest in enumerate(self.digests) if digest is not None]
        self.undigested = len(self.digests) - len(self.made)

    def keep(self, chunk: int, digest: int) -> int:
        """This digest was made of that chunk. Returns the one that counts: the first."""
        known = self.digests[chunk]
        if known is None:
            self.digests[chunk] = known = digest
            if self.made is not None:
                self.made.append(chunk)
                self.undigested -= 1
        return known

    def take_made(self, *, if_all: bool) -> tuple[list[tuple[int, int]], bool]:
        """See `Owner.take_made`."""
        if self.made is None or (if_all and self.undigested):
            return [], False
        taken, self.made = sorted(self.made), []
        found = [(chunk, digest) for chunk in taken if (digest := self.digests[chunk]) is not None]
        return found, not self.undigested

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
