"""An owner's answers to a reader: the chunks that the transport may touch now, wait, or a refusal.

`worker.owner` makes these answers, and every transport's owner side acts on them.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace

from tensorhub.types import RegistrationId

# a ChunksFollow frame names no more, and one gather call takes no more buffers
CHUNKS_PER_ACCESS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Access:
    """The right to touch these chunks' memory until `end`. A digest that is not yet known is
    None.
    """

    number: int  # never used twice by one Owner
    registration: RegistrationId
    generation: int
    chunks: tuple[int, ...]
    digests: tuple[int | None, ...]
    rest: tuple[int, ...]  # the requested chunks beyond `chunks`, in request order
    selection: str = ""  # the selection that numbers the chunks; "": the memory's own grid

    def only(self, chunks: Container[int]) -> Access:
        """The same access, to those of its chunks that are in `chunks`."""
        kept = [pair for pair in zip(self.chunks, self.digests, strict=True) if pair[0] in chunks]
        return replace(
            self, chunks=tuple([chunk for chunk, _ in kept]), digests=tuple([d for _, d in kept])
        )


@dataclass(frozen=True, slots=True)
class Wait:
    """None of the wanted chunks is verified here yet; ask again after the next `mark_available`."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """This memory is not held under that right, and never will be again. `is_damaged`: it is, but
    what it is loaded from was damaged.
    """

    reason: str
    is_damaged: bool = False
