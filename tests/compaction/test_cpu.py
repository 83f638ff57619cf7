"""Packing and unpacking in host memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tensorhub.compaction.cpu import Packed
from tensorhub.compaction.layout import lay_out


@given(st.dictionaries(st.text(min_size=1, max_size=3), st.binary(max_size=100), max_size=12))
def test_what_is_packed_is_unpacked_and_padding_is_zero(contents: dict[str, bytes]) -> None:
    layout = lay_out({name: len(data) for name, data in contents.items()})
    source = Packed(layout.nbytes, [(layout.offsets[name], memoryview(data)) for name, data in contents.items()])
    source.pack()
    expected = bytearray(layout.nbytes)
    for name, data in contents.items():
        expected[layout.offsets[name] : layout.offsets[name] + len(data)] = data
    assert source.buffer == expected
    target = {name: bytearray(len(data)) for name, data in contents.items()}
    reader = Packed(layout.nbytes, [(layout.offsets[name], memoryview(each)) for name, each in target.items()])
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
    assert repr(packed) == "<Packed: 2 tensors in 48 bytes>"


@pytest.mark.parametrize("pieces", [[(0, 4), (2, 4)], [(5, 4)], [(-1, 1)]])
def test_pieces_that_overlap_are_refused(pieces: list[tuple[int, int]]) -> None:
    with pytest.raises(ValueError, match="overlaps another"):
        Packed(8, [(offset, memoryview(bytearray(nbytes))) for offset, nbytes in pieces])
