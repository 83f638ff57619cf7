"""Host memory for an archived version: room in the address space, which takes memory only where
chunks are loaded.

Responsible for that memory. It is not given back while a chunk is being written. Not responsible
for how much is loaded (`worker.budget`), nor for what (`worker.loading`).
"""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Final, Protocol

from tensorhub.errors import StateError
from tensorhub.memory.regions import FilledMemory, MappedRegions
from tensorhub.model.accesses import Refusal
from tensorhub.model.manifest import Manifest

NORESERVE: Final = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Linux'; Python names it since 3.13
GIVEN_BACK_BYTES: Final = 16 * 2**20  # by one call, which keeps the GIL


class Loader(Protocol):
    """Loads chunks of one registration, as readers ask for them."""

    def want(self, chunks: Sequence[tuple[int, int]]) -> Refusal | None:
        """A reader asks for these (first, count) runs of chunks of the memory's own grid. Returns
        why they cannot be had now; None: they are there, or will be soon. Any thread; never blocks.
        """


class OnDemandMemory(FilledMemory):
    """That of one shard. `digests`: the publisher's, of all chunks."""

    def __init__(self, digests: Sequence[int], loader: Loader) -> None:
        self.loader = loader
        self._digests = digests
        self._bytes: mmap.mmap | None = None
        self._mapped: MappedRegions | None = None
        self._writers = 0  # threads that load chunks now
        self._changed = threading.Condition()

    def __repr__(self) -> str:
        return f"<OnDemandMemory of {0 if self._bytes is None else len(self._bytes)} bytes>"

    def recall(self, content_id: str, manifest: Manifest) -> Sequence[int]:
        return self._digests

    def map(self, manifest: Manifest) -> MappedRegions:
        """Where the regions of the only manifest that it is mapped for will be. StateError: they
        have no room in the address space.
        """
        if self._mapped is not None:
            return self._mapped
        sizes = [region.nbytes for region in manifest.regions]
        nbytes, ends = sum(sizes), list(accumulate(sizes))
        if nbytes:
            self._bytes = reserve(nbytes, "keep fewer versions in this archive, or free some")
        whole = memoryview(self._bytes if self._bytes is not None else bytearray())
        regions = (whole[end - size : end] for size, end in zip(sizes, ends, strict=True))
        self._mapped = MappedRegions(tuple(regions), ())
        return self._mapped

    @contextlib.contextmanager
    def writing(self) -> Iterator[bool]:
        """The block writes chunks, unless the memory was freed already: False."""
        with self._changed:
            is_there = self._mapped is not None
            self._writers += 1
        try:
            yield is_there
        finally:
            with self._changed:
                self._writers -= 1
                self._changed.notify_all()

    def empty(self) -> None:
        """Give back what is loaded; no chunk may be read or written meanwhile. Blocks."""
        if self._bytes is not None:
            give_back(self._bytes)

    def free(self) -> None:
        """Give all of it back; only its place may stay as long as a view of it. Blocks, until no
        chunk is written any more.
        """
        with self._changed:
            mapping, self._bytes, self._mapped = self._bytes, None, None
            self._changed.wait_for(lambda: not self._writers)
        if mapping is not None:
            give_back(mapping)
            with contextlib.suppress(BufferError):  # some view is left
                mapping.close()


def reserve(nbytes: int, advice: str) -> mmap.mmap:
    """Room in the address space, which takes memory where it is written. StateError, with the
    advice: there is none.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    try:
        return mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, MemoryError, ValueError, OverflowError) as error:
        raise StateError(
            f"{nbytes} bytes of address space for a version cannot be had ({error}): {advice}"
        ) from error


def give_back(mapping: mmap.mmap, start: int = 0, stop: int | None = None) -> None:
    """Give back the memory of these bytes, as far as whole pages are within them."""
    end = len(mapping) if stop in (None, len(mapping)) else stop & -mmap.PAGESIZE
    for at in range(-(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end, GIVEN_BACK_BYTES):
        mapping.madvise(mmap.MADV_DONTNEED, at, min(GIVEN_BACK_BYTES, end - at))
