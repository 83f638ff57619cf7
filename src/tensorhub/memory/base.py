"""What a memory still has of an older content: the base of deltas."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tensorhub.deltas import Counts
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.types import ContentId


class Base:
    """The base of the chunks of one memory: it is there, or in another memory of this worker.

    A chunk is *intact* until the first byte of it is written. The chunk belongs to the lane that
    has it in flight, so no lock guards this.
    """

    __slots__ = ("bring", "content_id", "digests", "intact", "is_certain", "memory")

    def __init__(
        self,
        memory: ChunkMemory,
        content_id: ContentId,
        digests: Sequence[int | None],
        intact: bytearray,
        bring: Callable[[int], None] | None = None,
    ) -> None:
        """`digests`: of its chunks; `intact`: 1 for each chunk that is there, and was verified.
        `bring`: copies a chunk of it into the memory, as far as it is still there; None: the memory
        has it.
        """
        self.memory = memory
        self.content_id = content_id
        self.digests = digests
        self.intact = intact
        self.bring = bring
        # False: the memory was not watched all the time; its chunks are digested before they count
        self.is_certain = True

    def has(self, chunk: int) -> bool:
        return self.intact[chunk] == 1

    def spoil(self, chunk: int) -> None:
        """Something else is about to be written there."""
        self.intact[chunk] = 0

    def apply(self, chunk: int, made: Sequence[bytes | bytearray]) -> Counts:
        """Apply these deltas to the chunk, one after the other. ProtocolError: one of them is no
        delta for it.
        """
        if self.bring is not None:
            self.bring(chunk)
        return self.memory.apply(chunk, made)

    def verify(self, check: Callable[[], object]) -> None:
        """Keep the chunks that still have their digest, where that is not certain. Blocks; `check`
        is called before each chunk and ends it by raising.
        """
        if self.is_certain or self.bring is not None:
            return
        for chunk, digest in enumerate(self.digests):
            check()
            if self.has(chunk) and (digest is None or self.memory.digest(chunk) != digest):
                self.spoil(chunk)
