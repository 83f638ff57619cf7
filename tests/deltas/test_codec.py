"""A frame makes exactly the new bytes, writes nothing else, and is never longer than what it
saves.
"""

from __future__ import annotations

import mmap
import sys
from math import log2
from random import Random

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tensorhub import deltas
from tensorhub.deltas import codec
from tensorhub.errors import StateError
from tensorhub.model.manifest import CHUNK_BYTES_MAX, TensorDescription, build_manifest
from tests.deltas.pairs import WIDTHS, changed, forged, frame_of, made_by, pairs


@pytest.mark.parametrize("small", [False, True])
@given(pair=pairs())
def test_a_frame_makes_the_new_bytes_of_its_base(
    small: bool, pair: tuple[bytes, bytes, int]
) -> None:
    """`small`: also across the borders of blocks, and where the sample says little."""
    base, new, width = pair
    with pytest.MonkeyPatch.context() as patch:
        if small:
            patch.setattr(codec, "BLOCK", 24)
            patch.setattr(codec, "LISTED", 3)
            patch.setattr(codec, "SAMPLE", 1)
        assert made_by(frame_of(base, new, width), base) == new


@given(pair=pairs())
def test_a_frame_is_there_only_if_it_saves_an_eighth(pair: tuple[bytes, bytes, int]) -> None:
    base, new, width = pair
    frame = deltas.encode(memoryview(base), memoryview(new), width)
    whole = frame_of(base, new, width)
    assert frame == (whole if 8 * len(whole) <= 7 * len(new) else None)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.0001, 0.0063, 0.016, 0.19])
def test_a_frame_is_near_the_least_that_independent_changes_take(width: int, share: float) -> None:
    """By one, up or down: their places by the entropy of each word's being changed, and a bit for
    the direction.
    """
    random, words = np.random.default_rng(1), 2**18
    types: dict[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32}
    base = random.integers(0, 1 << 8 * width, words, types[width])
    ups = random.choice([0, 1, -1], words, p=[1 - share, share / 2, share / 2])
    frame = frame_of(base.tobytes(), (base + ups.astype(types[width])).tobytes(), width)
    least = -(share * log2(share) + (1 - share) * log2(1 - share)) + share
    assert len(frame) < 1.2 * least * words / 8 + 120


@pytest.mark.parametrize("width", WIDTHS)
def test_a_chunk_without_a_change_is_next_to_nothing(width: int) -> None:
    base = Random(1).randbytes(2**20 + 3)
    assert len(frame_of(base, base, width)) <= 100
    assert made_by(frame_of(base, base, width), base) == base


@pytest.mark.parametrize("width", WIDTHS)
def test_random_bytes_have_no_frame(width: int) -> None:
    base, new = Random(1).randbytes(2**16), Random(2).randbytes(2**16)
    assert deltas.encode(memoryview(base), memoryview(new), width) is None


@pytest.mark.parametrize("width", WIDTHS)
def test_an_empty_chunk(width: int) -> None:
    assert deltas.encode(memoryview(b""), memoryview(b""), width) is None
    assert made_by(forged(width, 0, 0, 0, [b""] * (width + 1)), b"") == b""


@pytest.mark.parametrize("gap", [1, 254, 255, 256, 257, 510, 511, 70_000])
def test_every_gap_fits(gap: int) -> None:
    base = bytes(200_000)
    new = bytearray(base)
    new[::gap] = b"\x01" * len(new[::gap])
    assert made_by(frame_of(base, bytes(new), 1), base) == new


@given(pair=pairs())
def test_words_that_do_not_differ_are_left_alone(pair: tuple[bytes, bytes, int]) -> None:
    """What is written there after the frame was made is still there after it is applied."""
    base, new, width = pair
    words = len(base) // 8 * 8 // width
    same = [
        at for at in range(0, words * width, width) if base[at : at + width] == new[at : at + width]
    ]
    if 2 * (words - len(same)) > words:
        return
    other = bytearray(base)
    for at in same:
        other[at] ^= 0xFF
    made = made_by(frame_of(base, new, width), bytes(other))
    assert all(made[at : at + width] == other[at : at + width] for at in same)


@pytest.mark.parametrize("width", WIDTHS)
def test_bytes_at_odd_addresses(width: int) -> None:
    base = Random(1).randbytes(3001)
    new = changed(base, width, 0.1, 1, Random(2))
    frame = deltas.encode(memoryview(b"." + base)[1:], memoryview(b"." + new)[1:], width)
    assert frame is not None
    target = bytearray(b"." + base + b".")
    deltas.apply([memoryview(b"." + frame)[1:]], memoryview(target)[1:-1])
    assert target == b"." + new + b"."


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9])
def test_how_many_words_it_changes_is_told(width: int, share: float) -> None:
    base = Random(1).randbytes(4000)
    new = changed(base, width, share, 3, Random(2))
    places = range(0, len(base), width)
    differ = sum([base[at : at + width] != new[at : at + width] for at in places])
    frame = frame_of(base, new, width)
    assert deltas.apply([frame], memoryview(bytearray(base))) == (len(places), differ)


def test_two_frames_in_a_row_are_one_step_each() -> None:
    first = Random(1).randbytes(5000)
    second = changed(first, 2, 0.05, 2, Random(2))
    third = changed(second, 2, 0.05, 2, Random(3))
    chain = [frame_of(first, second, 2), frame_of(second, third, 2)]
    assert made_by(chain[1], made_by(chain[0], first)) == third


@pytest.mark.parametrize(("base", "new", "width"), [(b"ab", b"abc", 1), (b"abc", b"abc", 3)])
def test_what_cannot_be_encoded(base: bytes, new: bytes, width: int) -> None:
    with pytest.raises(ValueError, match=f"words of {width} bytes"):
        deltas.encode(memoryview(base), memoryview(new), width)


def test_a_chunk_beyond_the_bound() -> None:
    with (
        mmap.mmap(-1, CHUNK_BYTES_MAX + 8) as large,
        memoryview(large) as view,
        pytest.raises(ValueError, match=str(CHUNK_BYTES_MAX + 8)),
    ):
        deltas.encode(view, view, 2)


def test_each_region_has_the_width_of_most_of_its_bytes() -> None:
    dtypes = {
        "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int8": 1, "float32": 4, "int64": 4,
        "complex64": 4, "bool": 1,
    }  # fmt: skip
    tensors = [
        TensorDescription(dtype, dtype, (2, 8), 1000 * number, 16 * size)
        for number, (dtype, size) in enumerate(
            zip(dtypes, (2, 2, 1, 1, 4, 8, 8, 1), strict=True), start=1
        )
    ]
    manifest = build_manifest(
        [*tensors, TensorDescription("empty", "bool", (0,), 0, 0)], 4096, "none"
    )
    assert deltas.word_widths(manifest) == (*dtypes.values(), 1)


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert deltas.fault_here() is None
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.delitem(sys.modules, "tensorhub.deltas.codec")
    monkeypatch.delattr(deltas, "codec")
    says = r"zstandard.*pip install 'tensorhub-ros\[delta\]'"
    with pytest.raises(StateError, match=says) as caught:
        deltas.apply([b""], memoryview(bytearray()))
    assert deltas.fault_here() == str(caught.value)


@given(data=st.binary(max_size=64))
def test_zigzag_is_undone(data: bytes) -> None:
    words = np.frombuffer(data, np.uint16, len(data) // 2)
    zigzag = codec._zigzag(words)
    planes = [zigzag.astype(np.uint8), (zigzag >> 8).astype(np.uint8)]
    assert (codec._differences(planes, 0, words.size, words.dtype) == words).all()


@given(data=st.data(), widths=st.lists(st.sampled_from(WIDTHS), max_size=8))
def test_a_chain_at_once_is_as_one_by_one(data: st.DataObject, widths: list[int]) -> None:
    random = Random(data.draw(st.integers(0, 2**32)))
    versions, frames = [random.randbytes(data.draw(st.integers(1, 3000)))], list[bytes]()
    for width in widths:
        share = data.draw(st.sampled_from([0, 0.001, 0.01, 0.1, 0.45, 1]))
        most = data.draw(st.sampled_from([1, 300 % (1 << 8 * width)]))
        versions.append(changed(versions[-1], width, share, most, random))
        frames.append(frame_of(versions[-2], versions[-1], width))
    target = bytearray(versions[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "LISTED", data.draw(st.sampled_from([3, 100, 2**13])))
        deltas.apply(frames, memoryview(target))
    assert target == versions[-1]
