"""Bytes of two versions that differ in a part of their words, and the frames between them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest import mock

import xxhash
from hypothesis import strategies as st

from tensorhub import deltas
from tensorhub.deltas import codec

WIDTHS = (1, 2, 4)
CHECKED = 10  # bytes before those that a frame's checksum is of


def changed(base: bytes, width: int, share: float, most: int, random: Random) -> bytes:
    """`base` with this share of its words changed, by `most` at most."""
    new, modulus = bytearray(base), 1 << 8 * width
    for at in range(0, len(base) - width + 1, width):
        if random.random() < share:
            word = int.from_bytes(base[at : at + width], "little") + random.randint(-most, most)
            new[at : at + width] = (word % modulus).to_bytes(width, "little")
    for at in range(len(base) - len(base) % width, len(base)):
        new[at] = random.randrange(256)
    return bytes(new)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """The bytes of two versions, and the width of their words."""
    width, random = draw(st.sampled_from(WIDTHS)), Random(draw(st.integers(0, 2**32)))
    base = random.randbytes(draw(st.integers(1, 3000)))
    share = draw(st.sampled_from([0, 0.001, 0.01, 0.1, 0.45, 0.55, 1]))
    most = draw(st.sampled_from([1, 3, 200, 1 << 8 * width - 1]))
    return base, changed(base, width, share, most, random), width


@contextmanager
def always_paying() -> Iterator[None]:
    """In this block each chunk has a frame, however long it is."""
    with mock.patch.object(codec, "PAYS", 1e9):
        yield


def frame_of(base: bytes, new: bytes, width: int) -> bytes:
    """A frame, whether or not it pays."""
    with always_paying():
        frame = codec.encode(memoryview(base), memoryview(new), width)
    assert frame is not None
    return frame


def made_by(frame: bytes, base: bytes) -> bytes:
    target = bytearray(base)
    deltas.apply([frame], memoryview(target))
    return bytes(target)


def checked(frame: bytes) -> bytes:
    """With the checksum that its bytes have now."""
    return frame[:2] + xxhash.xxh3_64_digest(frame[CHECKED:]) + frame[CHECKED:]


def forged(
    width: int, nbytes: int, changed: int, tokens: int, streams: list[bytes], tail: bytes = b""
) -> bytes:
    """A frame of these parts, whatever they say."""
    counts = struct.pack("<III", nbytes, changed, tokens)
    sizes = struct.pack(f"<{len(streams)}I", *map(len, streams))
    return checked(bytes([1, width, *bytes(8)]) + counts + sizes + b"".join(streams) + tail)
