"""What a rank was told of the publisher's digests after its vote, and which of its chunks have others.

Of a version of its own layout it is one list, of all chunks. Of another layout there is a list for each selection that the
rank reads. Lists and strays have the selection's numbers, and the memory has its own.

Not responsible for what follows (`filling`), nor for comparing (`chunk_reports`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypeAlias

from tensorhub import messages
from tensorhub.layouts.resharded import ReshardedManifest
from tensorhub.manifest import Manifest
from tensorhub.types import OpKey

Wrong: TypeAlias = "tuple[int, int | None, messages.Origin | None]"
"""A chunk that is to be read again, the digest that it must have (None: nobody knows), and where it came from."""


class Comparison:
    """Of one list, which comes in pages. `chunks`: those that it is about, in its order; None: all."""

    def __init__(self, selection: str = "", shard: int = 0, manifest: Manifest | None = None) -> None:
        self.selection = selection
        self.shard = shard
        self.chunks = manifest.chunks_of(shard, selection) if isinstance(manifest, ReshardedManifest) else None
        self.chunk_count = (
            len(self.chunks) if self.chunks is not None else manifest.chunk_count if manifest is not None else 0
        )
        self.is_last = False  # the page that is being compared is the last one
        self.wrong: dict[int, int | None] = {}  # chunks that are not as was published, and their published digests
        self.strays: dict[messages.Origin | None, messages.Stray] = {}  # one of each memory from which such chunks came

    def takes(self, page: messages.Compare) -> bool:
        """Whether it is a page of this list, of something that is read."""
        self.is_last = page.last
        is_its = (page.selection, page.shard) == (self.selection, self.shard)
        return is_its and (not self.selection or self.chunks is not None)

    def found(self, wrong: Sequence[Wrong]) -> None:
        """Which chunks of that page are not as was published, which digests they must have, and where they were read."""
        for chunk, published, origin in wrong:
            self.wrong[chunk] = published
            if published is not None and len(self.strays) < messages.STRAYS_MAX:
                number = chunk if self.chunks is None else bisect_left(self.chunks, chunk)
                self.strays.setdefault(origin, messages.Stray(number, origin))

    def said(self, operation: OpKey, rank: int, following: int, *, rereads: bool) -> messages.Compared:
        """It was compared up to `following`; `rereads`: what is wrong is read again, and where that came from."""
        strays = tuple(self.strays.values()) if rereads else ()
        return messages.Compared(operation, rank, following, strays, rereads, self.selection, self.shard)
