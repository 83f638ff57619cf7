"""A stand-in for a GPU: its memory is this process', and a copy is done when the test, or another
thread's wait, lets it be.

What is read before its copy is done is not there yet, and what is overwritten before is copied
wrong: whoever does not wait for a mark gets other bytes.
"""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import xxhash

from tensorhub.cuda.device import HANDLE_BYTES, Allocation, DeviceBytes, Spread
from tensorhub.errors import StateError


class Double:
    """See `Device`. Copies happen as late as they may: when a mark behind them is waited for."""

    name = "double:0"

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.pinned_bytes = 0  # of all host memory that was taken
        self.copies = 0
        self.launches = 0
        self.is_busy = False  # with what its callers have queued
        self.settled = 0  # so often
        self.looks = 0  # whether it is
        self.opened: list[int] = []  # allocations, as another process opens them
        self.unexported = ""  # why none can be
        self.in_the_way: list[int] = []  # nothing more can be opened while one of these is
        self.is_beside = False  # all memory is another device's, which its kernels do not reach
        self._allocations: list[Any] = []
        self.pins: set[int] = set()
        self.lists = 0  # of words that were found, or applied
        self.lacks_room = False  # no room for words that change
        self.fail_at = -1  # the copy that fails
        self.unreachable = ""  # why other devices do not get at its memory

    def queue(self, *, spins: bool = False) -> LateQueue:
        return LateQueue(self)

    def pinned(self, nbytes: int) -> memoryview:
        self.pinned_bytes += nbytes
        return memoryview(bytearray(nbytes))

    def pin(self, view: memoryview) -> Callable[[], None]:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        self.pins.add(address)
        return lambda: self.pins.remove(address)

    def allocate(self, nbytes: int) -> DeviceBytes:
        return self.bytes_of(bytearray(nbytes))

    def bytes_of(self, content: bytearray) -> DeviceBytes:
        """These, as memory of the device."""
        held: Any = (ctypes.c_char * len(content)).from_buffer(content)
        self._allocations.append(held)
        return DeviceBytes(self, ctypes.addressof(held), len(content), held)

    def side_by_side(self, content: bytes, sizes: Sequence[int]) -> list[DeviceBytes]:
        """These bytes as allocations of so many bytes each, one right behind the other."""
        whole, found = bytearray(content), list[DeviceBytes]()
        for number, size in enumerate(sizes):
            held: Any = (ctypes.c_char * size).from_buffer(whole, sum(sizes[:number]))
            self._allocations.append(held)
            found.append(DeviceBytes(self, ctypes.addressof(held), size, held))
        return found

    def room(self, address: int) -> int:
        """See `Queue.room`."""
        ends = [
            ctypes.addressof(each) + ctypes.sizeof(each)
            for each in self._allocations
            if ctypes.addressof(each) <= address
        ]
        return min([end - address for end in ends if end > address], default=sys.maxsize)

    def digests(self, places: Sequence[tuple[int, int]]) -> list[int]:
        self.launches += 1
        return [
            xxhash.xxh3_64_intdigest(ctypes.string_at(address, nbytes))
            for address, nbytes in places
        ]

    def relay(
        self,
        room: int,
        gathered: Sequence[Spread] = (),
        digested: Sequence[tuple[int, int]] = (),
        scattered: Sequence[Spread] = (),
    ) -> list[int]:
        for together, apart, nbytes in self._runs(gathered):
            ctypes.memmove(room + together, apart, nbytes)
        made = self.digests(digested) if digested else []
        for together, apart, nbytes in self._runs(scattered):
            ctypes.memmove(apart, room + together, nbytes)
        return made

    def _runs(self, rows: Sequence[Spread]) -> Iterator[tuple[int, int, int]]:
        """(offset together, address apart, bytes) of each run."""
        for offset, address, run, *loops in rows:
            starts = [address]
            for times, apart in zip(loops[::2], loops[1::2], strict=True):
                starts = [start + n * apart for start in starts for n in range(times)]
            for number, start in enumerate(starts):
                yield offset + number * run, start, run

    def changes(
        self, older: memoryview, newer: int, width: int
    ) -> tuple[memoryview, memoryview] | None:
        self._take_room()
        before, after = bytes(older), ctypes.string_at(newer, older.nbytes)
        places, differences = array("i"), bytearray()
        for at in range(0, len(before), width):
            old, new = (int.from_bytes(of[at : at + width], "little") for of in (before, after))
            if old != new:
                places.append(at // width)
                differences += ((new - old) % (1 << 8 * width)).to_bytes(width, "little")
        is_listed = 2 * len(differences) <= len(before)
        return (memoryview(places), memoryview(differences)) if is_listed else None

    def add(self, address: int, width: int, places: memoryview, differences: memoryview) -> None:
        self._take_room()
        for place, start in zip(memoryview(places).cast("B").cast("i"), count(0, width)):
            at = address + place * width
            by = int.from_bytes(
                bytes(memoryview(differences).cast("B")[start : start + width]), "little"
            )
            word = int.from_bytes(ctypes.string_at(at, width), "little") + by
            ctypes.memmove(at, (word % (1 << 8 * width)).to_bytes(width, "little"), width)

    def _take_room(self) -> None:
        if self.lacks_room:
            raise StateError("out of memory", retryable=True)
        self.lists += 1

    def packing(self, region: DeviceBytes, pieces: Sequence[tuple[int, int, int]]) -> Packing:
        return Packing(region.address, pieces)

    def export(self, address: int) -> Allocation:
        if self.unexported:
            raise StateError(self.unexported)
        found = next(
            each
            for each in self._allocations
            if 0 <= address - ctypes.addressof(each) < ctypes.sizeof(each)
        )
        base = ctypes.addressof(found)
        return Allocation(base, ctypes.sizeof(found), base.to_bytes(HANDLE_BYTES, "little"))

    def open(self, handle: bytes, nbytes: int) -> int:
        address = int.from_bytes(handle, "little")
        found = next(
            (each for each in self._allocations if ctypes.addressof(each) == address), None
        )
        if found is None or any(each in self.opened for each in self.in_the_way):
            raise StateError("its memory cannot be opened")
        if nbytes > ctypes.sizeof(found):
            raise StateError(
                f"its memory is said to have {nbytes} bytes, and has {ctypes.sizeof(found)}"
            )
        self.opened.append(address)
        return address

    def close(self, address: int) -> None:
        self.opened.remove(address)

    def dma_buf(self, address: int, nbytes: int) -> tuple[int, int]:
        raise StateError(self.unreachable or "it is no GPU")

    def settle(self) -> None:
        self.settled += 1

    def owns(self, address: int) -> bool:
        return not self.is_beside

    def stream_sync(self) -> StreamSync:
        return StreamSync(self)


class StreamSync:
    """See `Mark`."""

    def __init__(self, device: Double) -> None:
        self._device = device

    @property
    def is_reached(self) -> bool:
        self._device.looks += 1
        return not self._device.is_busy

    def wait(self) -> None:
        raise NotImplementedError("what may take long is looked at, again and again")


class Packing:
    """See `Kernels`."""

    def __init__(self, region: int, pieces: Sequence[tuple[int, int, int]]) -> None:
        self._region = region
        self._pieces = pieces

    def pack(self) -> None:
        for address, offset, nbytes in self._pieces:
            ctypes.memmove(self._region + offset, address, nbytes)

    def unpack(self) -> None:
        for address, offset, nbytes in self._pieces:
            ctypes.memmove(address, self._region + offset, nbytes)


class LateQueue:
    """See `Queue`."""

    def __init__(self, device: Double) -> None:
        self._device = device
        self._copies: list[tuple[int, int, int]] = []
        self._done = 0

    def copy(self, to: int, source: int, nbytes: int) -> None:
        assert nbytes <= min(self.room(to), self.room(source)), (
            "cudaErrorInvalidValue: a copy that is in two allocations"
        )
        self._copies.append((to, source, nbytes))

    def room(self, address: int) -> int:
        return self._device.room(address)

    def copy_many(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        assert not self._device.is_beside, (
            "an illegal address: this process' GPU is of no use any more"
        )
        self._copies.extend(pieces)

    def mark(self) -> LateMark:
        return LateMark(self, len(self._copies))

    def reach(self, count: int) -> None:
        for piece in self._copies[self._done : count]:
            if self._device.copies == self._device.fail_at:
                raise AssertionError("the copy fails")
            self._device.copies += 1
            ctypes.memmove(*piece)
        self._done = max(self._done, count)


class LateMark:
    """See `Mark`."""

    def __init__(self, queue: LateQueue, count: int) -> None:
        self._queue = queue
        self._count = count

    @property
    def is_reached(self) -> bool:
        return self._queue._done >= self._count

    def wait(self) -> None:
        self._queue.reach(self._count)
