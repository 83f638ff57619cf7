"""GPU memory between processes: in which allocations a registration lies, and which allocations of
other processes are open here.

A handle names a whole allocation. torch hands out parts of allocations, so each is opened once and used for all tensors in
it. Memory that is mapped here outlives its process. So a reader looks at the generation word, in memory that both share.

Not responsible for the right to open them.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable, Sequence
from functools import lru_cache

from tensorhub.cuda.device import Allocation, Device
from tensorhub.errors import StateError
from tensorhub.transport.kept import Kept


@lru_cache(maxsize=1)
def this_process() -> bytes:
    """This process' id among processes of all times; a forked child gets one of its own."""
    return os.urandom(16)


os.register_at_fork(after_in_child=this_process.cache_clear)


def export(device: Device, places: Iterable[tuple[int, int]]) -> list[Allocation]:
    """The allocations in which these (address, bytes) are, each once, ascending. StateError: one of them has no handle."""
    found: list[Allocation] = []
    for address, nbytes in sorted(places):
        if not found or address + nbytes > found[-1].address + found[-1].nbytes:
            found.append(device.export(address))
    return found


class Opened:
    """Another process' allocation, open here as long as something refers to it."""

    def __init__(self, device: Device, allocation: Allocation) -> None:
        """StateError: it cannot be opened."""
        self.address = device.open(allocation.handle, allocation.nbytes)
        self.nbytes = allocation.nbytes
        weakref.finalize(self, device.close, self.address).atexit = False  # the end of the process closes it, too

    def __repr__(self) -> str:
        return f"<Opened, {self.nbytes} bytes at {self.address:#x}>"


class Imports:
    """Other processes' allocations that one worker has open. Unused ones are kept for a while, for the next version. For all
    threads.
    """

    def __init__(self) -> None:
        self._opened: Kept[tuple[str, bytes], Opened] = Kept()  # by device and handle

    def __repr__(self) -> str:
        return f"<Imports: {len(self._opened)} allocations>"

    def open(self, device: Device, allocations: Sequence[Allocation]) -> list[Opened]:
        """Each of them, in their order. StateError: one cannot be opened."""
        return [self._open(device, allocation) for allocation in allocations]

    def _open(self, device: Device, allocation: Allocation) -> Opened:
        def make() -> Opened:
            try:
                return Opened(device, allocation)
            except StateError:
                # CUDA opens nothing where the source had other memory before, which is still open here.
                self.sweep(0.0)
            return Opened(device, allocation)

        key = device.name, allocation.handle
        return self._opened.find_or_make(key, lambda known: known.nbytes == allocation.nbytes, make)

    def sweep(self, kept_s: float) -> None:
        """Close allocations that were not used for so long. (A channel's allocations stay open
        until it is closed.)
        """
        self._opened.sweep(kept_s)
