"""Packing and unpacking: one call for all tensors of a region on the CPU, and one kernel launch on
a GPU.

On the CPU the copies are assignments of slices that were cut once: 0.2 to 0.5 microseconds for a
tensor of 4 KiB. That is faster than `torch._foreach_copy_`, and than `ctypes.memmove` in a loop
(1.1 to 10 times, most for the smallest; see benches/README.md), and needs no torch. Another thread
gets the GIL between any two tensors. On a GPU the table of the tensors stays on the device.

Responsible for the bytes of one region. Not responsible for when they are copied, nor for readers
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from tensorhub.cuda.device import Device, DeviceBytes

Bytes = TypeVar("Bytes", memoryview, DeviceBytes)


def checked(nbytes: int, pieces: Iterable[tuple[int, Bytes]]) -> list[tuple[int, Bytes]]:
    """Those that are not empty, in order. ValueError for pieces that overlap, or are not within so
    many bytes.
    """
    found, end = (
        sorted(((at, piece) for at, piece in pieces if piece.nbytes), key=lambda each: each[0]),
        0,
    )
    for offset, piece in found:
        if offset < end or offset + piece.nbytes > nbytes:
            raise ValueError(
                f"a tensor of {piece.nbytes} bytes at {offset} overlaps another, or the end of "
                f"{nbytes} bytes"
            )
        end = offset + piece.nbytes
    return found


class Packed:
    """One region's bytes, beside the tensors that they are copied from and to.

    `pieces`: (offset in the region, bytes of a tensor), contiguous; writable where `unpack` is
    called. The region (`buffer`) is made here, of `nbytes` zeros; gaps between tensors stay zero
    unless a caller writes them.
    """

    def __init__(self, nbytes: int, pieces: Iterable[tuple[int, memoryview]]) -> None:
        """Raises ValueError for pieces that overlap, or are not within the region."""
        self.buffer = memoryview(bytearray(nbytes))
        found = checked(nbytes, pieces)
        self._parts = [slice(offset, offset + piece.nbytes) for offset, piece in found]
        self._tensors = [piece.cast("B") for _, piece in found]

    def pack(self) -> None:
        """Copy the tensors' bytes into the region."""
        buffer = self.buffer
        for part, its in zip(self._parts, self._tensors, strict=True):
            buffer[part] = its

    def unpack(self) -> None:
        """Copy the region's bytes into the tensors."""
        buffer = self.buffer
        for part, its in zip(self._parts, self._tensors, strict=True):
            its[:] = buffer[part]


class PackedOnDevice:
    """One region's bytes, beside the tensors that they are copied from and to; see `Packed`."""

    def __init__(
        self, device: Device, nbytes: int, pieces: Iterable[tuple[int, DeviceBytes]]
    ) -> None:
        """Raises ValueError for pieces that overlap, or are not within the region; StateError: no
        memory for it.
        """
        self._tensors = checked(nbytes, pieces)  # they keep what the table points to
        self.buffer = device.allocate(nbytes)
        rows = [(its.address, offset, its.nbytes) for offset, its in self._tensors]
        self._kernels = device.packing(self.buffer, rows)

    def pack(self) -> None:
        """Copy the tensors' bytes into the region."""
        self._kernels.pack()

    def unpack(self) -> None:
        """Copy the region's bytes into the tensors."""
        self._kernels.unpack()
