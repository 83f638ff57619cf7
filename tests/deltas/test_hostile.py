"""Whatever comes as a frame: a ProtocolError and an untouched target, or writes within the target;
and little memory.
"""

from __future__ import annotations

import struct
import tracemalloc
from random import Random

import pytest
import zstandard
from hypothesis import given, strategies as st

from tensorhub.deltas import apply
from tensorhub.errors import ProtocolError
from tests.deltas.pairs import WIDTHS, changed, checked, forged, frame_of

BASE = Random(1).randbytes(2003)
ZSTD_MAGIC = struct.pack("<I", zstandard.MAGIC_NUMBER)


def small(width: int) -> bytes:
    frame = frame_of(BASE, changed(BASE, width, 0.05, 300, Random(2)), width)
    assert frame[CHANGED_AT : CHANGED_AT + 4] != bytes(4)
    return frame


CHANGED_AT = 14


def refused(frame: bytes, says: str = "bad delta: ", base: bytes = BASE) -> None:
    target = bytearray(base)
    with pytest.raises(ProtocolError, match=says):
        apply([frame], memoryview(target))
    assert target == base


def zstd(plain: bytes, *, sized: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=1, write_content_size=sized).compress(plain)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_frame_that_is_cut_off_anywhere(width: int) -> None:
    frame = small(width)
    for end in range(len(frame)):
        refused(frame[:end])
        if end > 10:
            refused(checked(frame[:end]))
    refused(checked(frame + b"."))


@pytest.mark.parametrize("width", WIDTHS)
def test_any_flipped_bit_is_noticed_before_a_write(width: int) -> None:
    frame = small(width)
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        refused(bytes(flipped))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_flipped_bit_with_its_checksum_writes_nothing_outside(width: int) -> None:
    frame = small(width)
    applied = 0
    for bit in range(80, 8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        room = bytearray(b"<" * 600 + BASE + b">" * 600)
        try:
            apply([checked(bytes(flipped))], memoryview(room)[600:-600])
            applied += 1
        except ProtocolError:
            assert room[600:-600] == BASE
        assert room[:600] == b"<" * 600
        assert room[-600:] == b">" * 600
    assert applied  # most say other differences


@given(data=st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    refused(data)
    refused(b"\x01\x02" + data)
    refused(checked(b"\x01\x02" + bytes(8) + data))


WORDS = 1000  # of 2 bytes
ODD = BASE[-3:]


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (forged(2, 2005, 0, 0, [b""] * 3, ODD), "for 2005 bytes, and the chunk has 2003"),
        (b"\x02" + forged(2, 2003, 0, 0, [b""] * 3, ODD)[1:], "form 2 is unknown"),
        (forged(3, 2003, 0, 0, [b""] * 4, ODD), "words of 3 bytes are unknown"),
        (forged(2, 2003, 0, 0, [b""] * 3), "its parts do not add up"),
        (forged(2, 2003, 0, 0, [b""] * 3, b"ab"), "its parts do not add up"),
        (forged(2, 2003, 501, 501, [b"\1" * 501, b"", b""], ODD), "lists too many words"),
        (forged(2, 2003, 2**32 - 1, 0, [b""] * 3, ODD), "lists too many words"),
        (forged(2, 2003, WORDS, 1, [b"\1", b"", b""], ODD), "too many gaps"),
        (forged(2, 2003, 1, 5, [b"\0\0\0\0\1", b"", b""], ODD), "too many gaps"),
        (forged(2, 2003, 1, 2**32 - 1, [b""] * 3, ODD), "too many gaps"),
        (forged(2, 2003, 1, 2, [b"\1\1", b"\1", b""], ODD), "of another number of words"),
        (forged(2, 2003, 1, 1, [b"", b"\1", b""], ODD), "of another number of words"),
        (forged(2, 2003, 1, 4, [b"\0\0\0\xec", b"\1", b""], ODD), "beyond the chunk"),
        (forged(2, 2003, 4, 4, [b"\xff\xff\xff\xff", b"\1" * 4, b""], ODD), "beyond the chunk"),
        (forged(2, 2003, 3, 3, [b"\1\1\1", b"\1\1", b""], ODD), "a stream is damaged"),
        (forged(2, 2003, 3, 3, [b"\1\1\1", b"\1" * 4, b""], ODD), "a stream is damaged"),
        (forged(2, 2003, 50, 50, [b"\1" * 50, zstd(bytes(49)), b""], ODD), "is of 49 bytes"),
        (forged(2, 2003, 50, 50, [b"\1" * 50, zstd(bytes(51)), b""], ODD), "is of 51 bytes"),
        (forged(2, 2003, 50, 50, [b"\1" * 50, zstd(bytes(50)) * 2, b""], ODD), "damaged"),
        (forged(2, 2003, 50, 50, [b"\1" * 50, zstd(bytes(50), sized=False), b""], ODD), "is of"),
    ],
)
def test_a_frame_that_breaks_a_bound(frame: bytes, says: str) -> None:
    refused(frame, says)


def test_the_last_word_can_be_reached() -> None:
    """One word further is beyond the chunk (see above)."""
    target = bytearray(BASE)
    apply([forged(2, 2003, 1, 4, [b"\0\0\0\xeb", b"\2", b""], ODD)], memoryview(target))
    assert target[:1998] == BASE[:1998]
    assert target[1998:] == bytes([(BASE[1998] + 1) % 256]) + BASE[1999:]


def bomb(nbytes: int, kind: str) -> bytes:
    """A stream of few bytes that says or makes many."""
    match kind:
        case "says 2**62":
            return ZSTD_MAGIC + b"\xe0" + struct.pack("<Q", 2**62) + bytes(8)
        case "makes more than it says":  # a frame of many equal bytes
            block = struct.pack("<I", 2**17 << 3 | 1 << 1)[:3] + b"\1"
            return ZSTD_MAGIC + b"\xa0" + struct.pack("<I", nbytes) + block * 1000
        case "a window of 2**30":
            return ZSTD_MAGIC + b"\x80" + bytes([20 << 3]) + struct.pack("<I", nbytes) + bytes(8)
        case _:
            return zstd(bytes(10**8))


@pytest.mark.parametrize(
    "kind", ["says 2**62", "makes more than it says", "a window of 2**30", "is 10**8 zeros"]
)
def test_a_bomb_costs_nothing(kind: str) -> None:
    frame = forged(2, 2003, 400, 400, [b"\1" * 400, bomb(400, kind), b""], ODD)
    tracemalloc.start()
    try:
        refused(frame)
        assert tracemalloc.get_traced_memory()[1] < 2**16
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_most_that_few_bytes_can_unpack_to(width: int) -> None:
    """About the chunk itself: a frame that changes half of the words, all alike."""
    words = 2**20
    tokens = bytes([2]) * (words // 2)
    planes = [bytes([1]) * (words // 2)] * width
    frame = forged(width, words * width, words // 2, words // 2, list(map(zstd, [tokens, *planes])))
    assert len(frame) < 1000
    target = memoryview(bytearray(words * width))
    tracemalloc.start()
    try:
        apply([frame], target)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < words * (1 + width) / 2 + 2**22


def test_each_frame_of_a_chain_keeps_the_bounds() -> None:
    """Also where their words and gaps together are as many as they say."""
    good = forged(2, 2003, 2, 2, [b"\1\1", b"\2\2", b""], ODD)
    for bad, says in (
        (forged(2, 2003, 1, 4, [b"\0\0\0\xec", b"\1", b""], ODD), "beyond the chunk"),
        (forged(2, 2003, 1, 2, [b"\1\1", b"\1", b""], ODD), "of another number of words"),
        (forged(2, 2003, 2, 2, [b"\0\1", b"\1\1", b""], ODD), "of another number of words"),
    ):
        for chain in ([bad, good], [good, bad], [good, bad, good]):
            target = bytearray(BASE)
            with pytest.raises(ProtocolError, match=says):
                apply(chain, memoryview(target))
            assert target == BASE  # they are applied together
