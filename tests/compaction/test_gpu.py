"""Packing on a device: which bytes go where. The kernels themselves: tests/cuda."""

from __future__ import annotations

import pytest

from tensorhub.compaction.gpu import PackedOnDevice
from tensorhub.cuda.kernels import cut_rows
from tests.cuda.double import Double


def test_pieces_are_packed_and_unpacked_where_the_layout_says() -> None:
    device, first, second = Double(), bytearray(b"abc"), bytearray(b"defgh")
    pieces = [(16, device.bytes_of(second)), (0, device.bytes_of(first)), (8, device.bytes_of(bytearray()))]
    packed = PackedOnDevice(device, 21, pieces)
    packed.pack()
    assert bytes(packed.buffer.storage) == b"abc" + bytes(13) + b"defgh"  # type: ignore[call-overload]
    first[:], second[:] = b"xxx", b"xxxxx"
    packed.unpack()
    assert [bytes(first), bytes(second)] == [b"abc", b"defgh"]
    assert repr(packed) == "<PackedOnDevice: 2 tensors in 21 bytes>"


def test_pieces_that_overlap_are_refused() -> None:
    device = Double()
    with pytest.raises(ValueError, match="overlaps another"):
        PackedOnDevice(device, 8, [(0, device.bytes_of(bytearray(4))), (3, device.bytes_of(bytearray(4)))])


def test_large_pieces_are_rows_of_bounded_size() -> None:
    assert list(cut_rows([(1000, 16, 10), (2000, 0, 0), (3000, 32, 48)], row_bytes=16)) == [
        (1000, 16, 10),
        (3000, 32, 16),
        (3016, 48, 16),
        (3032, 64, 16),
    ]
