"""TensorHub's interface of an accelerator: queues of copies, page-locked host memory, kernels. And
a name for bytes that the CPU cannot address.

Ordering. Each `Queue` is a stream of its own, that waits for no other stream, the caller's
included. So the host waits for all earlier work on memory before it is touched: a publish and the
first byte of a fill wait for the caller's own work (`Device.stream_sync`), the end of an access or
of a fill for our own copies. Work that the caller queues after the call has returned therefore
finds its bytes in place, on any stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

HANDLE_BYTES = 64  # of an IPC handle

Spread: TypeAlias = "tuple[int, ...]"
"""Of `kernels.spread_rows`: (offset where they are together, address of the first run, bytes of a
run, loops).
"""


class Mark(Protocol):
    """A point in a queue."""

    @property
    def is_reached(self) -> bool:
        """Whether all that was queued before it is done. StateError: the device has failed."""

    def wait(self) -> None:
        """Block until it is, without the GIL. The wait is for our own copies, and bounded by their
        size: a device that does not get through them fails, which is a StateError.
        """


class Queue(Protocol):
    """Work for the device, done in its order. For one thread at a time."""

    def copy(self, to: int, source: int, nbytes: int) -> None:
        """Copy between addresses of this process, on the device or page-locked on the host, each
        end within one allocation (`copies.copy` sees to that). Both must stay as they are until a
        later mark is reached.
        """

    def room(self, address: int) -> int:
        """Bytes from there to the end of its allocation; sys.maxsize where the device knows of
        none, as on the host.
        """

    def copy_many(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy (to, source, bytes) by one kernel: all of them in this device's own memory, or
        opened on it.
        """

    def mark(self) -> Mark: ...


class Kernels(Protocol):
    """A table of pieces, resident on the device, for a region packed from them; see
    `kernels.cu`.
    """

    def pack(self) -> None:
        """Copy the pieces into the region, and wait for that."""

    def unpack(self) -> None:
        """Copy the region's bytes to the pieces, and wait for that."""


class Allocation(NamedTuple):
    """One of the device's own allocations, in which any number of tensors lie, as another process
    may open it.
    """

    address: int
    nbytes: int
    handle: bytes


class Device(Protocol):
    """One accelerator, as this process sees it. For all threads."""

    name: str  # as torch says it: "cuda:0"
    index: int  # its number there

    def queue(self, *, spins: bool = False) -> Queue:
        """A new one. `spins`: waits of its marks take a core, and end some 50 us earlier."""

    def pinned(self, nbytes: int) -> memoryview:
        """New host memory that copies go to and from at full speed. StateError: there is none."""

    def pin(self, view: memoryview) -> Callable[[], None]:
        """Page-lock memory that there is; what comes back undoes that. StateError: it cannot be."""

    def allocate(self, nbytes: int) -> DeviceBytes:
        """New memory, of zeros. StateError: there is none."""

    def digests(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """XXH3-64 of these (address, bytes) on the device, all by one launch; waits for it."""

    def relay(
        self,
        room: int,
        gathered: Sequence[Spread] = (),
        digested: Sequence[tuple[int, int]] = (),
        scattered: Sequence[Spread] = (),
    ) -> list[int]:
        """Copy the runs of some rows to where they are together, each row at its offset from
        `room`; then digest these (address, bytes), as `digests` does; then copy the runs of other
        rows from where they are together to where they are apart. One launch each, and one wait.
        All of it is in this device's own memory, or was opened on it.
        """

    def changes(
        self, older: memoryview, newer: int, width: int
    ) -> tuple[memoryview, memoryview] | None:
        """Which words of 1, 2 or 4 bytes at the address `newer` differ from those in host memory,
        which are of whole 8 bytes, and by how much: see `deltas.Listed`. None: more than half of
        them. Twice these bytes are needed on the device meanwhile; StateError, retryable: there is
        no such room. Waits.
        """

    def add(self, address: int, width: int, places: memoryview, differences: memoryview) -> None:
        """Add the differences to these words, the first of which is at that address, a multiple of
        `width`. StateError, retryable: there is no room for them. Waits.
        """

    def packing(self, region: DeviceBytes, pieces: Sequence[tuple[int, int, int]]) -> Kernels:
        """Of these (address, offset in the region, bytes)."""

    def export(self, address: int) -> Allocation:
        """The allocation in which that address is. StateError: it cannot be opened elsewhere; what
        to do about it.
        """

    def open(self, handle: bytes, nbytes: int) -> int:
        """Where another process' allocation is here, from now on. StateError: it cannot be opened,
        or has fewer bytes.
        """

    def close(self, address: int) -> None:
        """Give up the memory that was opened at `address`."""

    def dma_buf(self, address: int, nbytes: int) -> tuple[int, int]:
        """A descriptor of these bytes, to be closed, for other devices to reach them by; and the
        address at which what it stands for begins. StateError: there is none.
        """

    def settle(self) -> None:
        """What other devices have written into its memory so far is seen by whatever is queued from
        now on. StateError.
        """

    def owns(self, address: int) -> bool:
        """Whether that address of this process is in this device's own memory."""

    def stream_sync(self) -> Mark:
        """What the calling thread has queued so far, on its present stream. StateError: that stream
        is being captured.
        """


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes at an address of a device, as a memoryview is of those that the CPU can address.
    `storage` keeps them.
    """

    device: Device
    address: int
    nbytes: int
    storage: object

    def __getitem__(self, part: slice) -> DeviceBytes:
        start, end, step = part.indices(self.nbytes)
        if step != 1:
            raise ValueError("bytes on a device are sliced without a step")
        return DeviceBytes(self.device, self.address + start, max(0, end - start), self.storage)
