"""Packing and unpacking on a GPU: one kernel launch for all tensors of a region. Its table stays on the device.

Responsible for the bytes of one region, as `cpu` is for bytes in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable

from tensorhub.compaction.cpu import checked
from tensorhub.cuda.device import Device, DeviceBytes


class PackedOnDevice:
    """One region's bytes, beside the tensors that they are copied from and to; see `cpu.Packed`."""

    __slots__ = ("_kernels", "_tensors", "buffer")

    def __init__(self, device: Device, nbytes: int, pieces: Iterable[tuple[int, DeviceBytes]]) -> None:
        """Raises ValueError for pieces that overlap, or are not within the region; StateError: no memory for it."""
        self._tensors = checked(nbytes, pieces)  # they keep what the table points to
        self.buffer = device.allocate(nbytes)
        rows = [(its.address, offset, its.nbytes) for offset, its in self._tensors]
        self._kernels = device.packing(self.buffer, rows)

    def __repr__(self) -> str:
        return f"<PackedOnDevice: {len(self._tensors)} tensors in {self.buffer.nbytes} bytes>"

    def pack(self) -> None:
        """Copy the tensors' bytes into the region."""
        self._kernels.pack()

    def unpack(self) -> None:
        """Copy the region's bytes into the tensors."""
        self._kernels.unpack()
