"""Packing and unpacking in host memory, and on a device: which bytes go where. The kernels
themselves: tests/cuda.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tensorhub.compaction.layout import lay_out
from tensorhub.compaction.packing import Packed, PackedOnDevice
from tensorhub.cuda.kernels import cut_rows
from tests.cuda.double import Double


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.binary(max_size=100), max_size=12))
def test_what_is_packed_is_unpacked_and_padding_is_zero(contents: dict[str, bytes]) -> None:
    offsets, nbytes = lay_out({name: len(data) for name, data in contents.items()})
    source = Packed(nbytes, [(offsets[name], memoryview(data)) for name, data in contents.items()])
    source.pack()
    expected = bytearray(nbytes)
    for name, data in contents.items():
        expected[offsets[name] : offsets[name] + len(data)] = data
    assert source.buffer == expected
    target = {name: bytearray(len(data)) for name, data in contents.items()}
    reader = Packed(nbytes, [(offsets[name], memoryview(each)) for name, each in target.items()])
    reader.buffer[:] = source.buffer
    reader.unpack()
    assert target == contents


def test_tensors_of_any_dtype_are_copied_in_place() -> None:
    small, large = np.arange(3, dtype=np.int16), np.ones((2, 2), np.float64)
    packed = Packed(48, [(0, small.data), (16, large.data)])
    packed.pack()
    assert bytes(packed.buffer[:6]) == small.tobytes()
    packed.buffer[16:48] = bytes(32)
    packed.unpack()
    assert not large.any()


@pytest.mark.parametrize("pieces", [[(0, 4), (2, 4)], [(5, 4)], [(-1, 1)]])
def test_pieces_that_overlap_are_refused(pieces: list[tuple[int, int]]) -> None:
    device = Double()
    with pytest.raises(ValueError, match="overlaps another"):
        Packed(8, [(offset, memoryview(bytearray(nbytes))) for offset, nbytes in pieces])
    with pytest.raises(ValueError, match="overlaps another"):
        PackedOnDevice(
            device, 8, [(offset, device.bytes_of(bytearray(nbytes))) for offset, nbytes in pieces]
        )


def test_pieces_are_packed_and_unpacked_where_the_layout_says() -> None:
    device, first, second = Double(), bytearray(b"abc"), bytearray(b"defgh")
    pieces = [
        (16, device.bytes_of(second)),
        (0, device.bytes_of(first)),
        (8, device.bytes_of(bytearray())),
    ]
    packed = PackedOnDevice(device, 21, pieces)
    packed.pack()
    assert bytes(packed.buffer.storage) == b"abc" + bytes(13) + b"defgh"  # type: ignore[call-overload]
    first[:], second[:] = b"xxx", b"xxxxx"
    packed.unpack()
    assert [bytes(first), bytes(second)] == [b"abc", b"defgh"]


def test_large_pieces_are_rows_of_bounded_size() -> None:
    assert list(cut_rows([(1000, 16, 10), (2000, 0, 0), (3000, 32, 48)], row_bytes=16)) == [
        (1000, 16, 10),
        (3000, 32, 16),
        (3016, 48, 16),
        (3032, 64, 16),
    ]
