"""Host memory that the library allocates for one shard of one version: a prefetched, retained or
staged copy.

Responsible for taking that memory from the system and for giving it back. Each copy is anonymous
memory of its own, so what is freed goes back to the system at once. Not responsible for how much
there may be: `reserve` (`worker.budget`) is called before anything is taken, and raises if there is
no room.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from itertools import accumulate

from tensorhub.errors import StateError
from tensorhub.memory.regions import FilledMemory, MappedRegions
from tensorhub.model.manifest import Manifest

Pin = Callable[[memoryview], Callable[[], None]]
"""Page-locks this memory; what comes back undoes that."""


class HostMemory(FilledMemory):
    """See `Memory`. It has no tensors: its regions are those of whichever manifest it is mapped
    for.
    """

    def __init__(
        self, reserve: Callable[[int], None] | None = None, pin: Pin | None = None
    ) -> None:
        """`pin`: for memory that a GPU copies from and to."""
        self.nbytes = 0  # allocated now
        self._reserve = reserve
        self._pin = pin
        self._unpin: Callable[[], None] | None = None
        self._bytes: mmap.mmap | None = None

    def __repr__(self) -> str:
        return f"<HostMemory of {self.nbytes} bytes>"

    def map(self, manifest: Manifest) -> MappedRegions:
        """Allocate all regions of this manifest, in place of those before. StateError: no room, or
        no memory.
        """
        self.free()
        sizes = [region.nbytes for region in manifest.regions]
        nbytes, ends = sum(sizes), list(accumulate(sizes))
        if self._reserve is not None:
            self._reserve(nbytes)
        if nbytes:
            try:
                self._bytes = mmap.mmap(-1, nbytes)
            except (OSError, MemoryError, ValueError, OverflowError) as error:
                raise StateError(
                    f"{nbytes} bytes of host memory cannot be allocated ({error}): free some"
                ) from error
        self.nbytes = nbytes
        whole = memoryview(self._bytes if self._bytes is not None else bytearray())
        if nbytes and self._pin is not None:
            self._unpin = self._pin(whole)
        return MappedRegions(
            tuple(whole[end - size : end] for size, end in zip(sizes, ends, strict=True)), ()
        )

    def free(self) -> None:
        """Give it back to the system, at once or (while a view exists) with the last view.

        Blocks: for a fraction of a second per GB that was written to; other threads run meanwhile.
        """
        mapping, self._bytes, self.nbytes = self._bytes, None, 0
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        if mapping is not None:
            with contextlib.suppress(BufferError):
                # it lets go of the GIL, which the end of the last reference would not
                mapping.close()
