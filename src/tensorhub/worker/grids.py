"""The grids in which an owner's memory is read: the chunks' sizes and digests.

Not responsible for accesses (`owner`), nor for available chunks (`books`).
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Grid:
    """The digests of one grid of a memory."""

    sizes: Sequence[int]  # bytes of each chunk
    digests: MutableSequence[int | None]  # of each chunk; None until it is made or has arrived
    # chunks with digests that were made here, and not told yet; None: not collected
    made: list[int] | None = None
    undigested: int = 0  # always digests.count(None), where `made` is kept
    # of a selection of memory that is loaded on demand: the (first, count) runs of chunks of the
    # memory's own grid that a chunk has bytes of; None: all of them count
    under: Callable[[int], Sequence[tuple[int, int]]] | None = None

    def tell(self) -> None:
        """From now on the made digests of this grid are collected."""
        self.made = [chunk for chunk, digest in enumerate(self.digests) if digest is not None]
        self.undigested = len(self.digests) - len(self.made)

    def keep(self, chunk: int, digest: int) -> int:
        """This digest was made of that chunk. Returns the digest that counts: the first."""
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

    def forget(self) -> None:
        """The bytes have changed: no digest holds any more."""
        self.digests = [None] * len(self.sizes)
        if self.made is not None:
            self.tell()

    @property
    def is_sound(self) -> bool:
        undigested = self.digests.count(None) if self.made is not None else 0
        return len(self.digests) == len(self.sizes) and self.undigested == undigested
