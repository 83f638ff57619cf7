"""Targets: a delta's frame, as the holder of another version sends it."""

from __future__ import annotations

import zstandard

from tensorhub.deltas import codec
from tensorhub.errors import ProtocolError
from tests.deltas.pairs import WIDTHS, checked, forged, frame_of, made_by
from tests.fuzz.protocol import bounded
from tests.fuzz.source import Source

SIZES = (0, 1, 7, 64, 1021, 2**16)  # bytes of a chunk
EDGE = b"edge" * 64  # on both sides of the target
PLAIN_BYTES_MAX = 2**17  # of a stream that is drawn


def deltas(data: bytes) -> None:
    """A frame is applied within its target, or refused before anything is written; and what is made
    of two versions makes the one of the other.
    """
    source = Source(data)
    if source.flag():
        base, new, width = _versions(source)
        assert made_by(frame_of(base, new, width), base) == new
        return
    nbytes = source.choice(SIZES)
    frame = _frame(source, nbytes)
    base = bytes(nbytes)
    room = bytearray(EDGE + base + EDGE)
    with memoryview(room) as whole, whole[len(EDGE) : len(EDGE) + nbytes] as target:
        try:
            with bounded(data, per_byte=16, most=2**18 + 16 * nbytes):
                codec.apply([frame], target)
        except ProtocolError as error:
            assert len(str(error)) < 500
            assert target == base
        assert whole[: len(EDGE)] == whole[len(EDGE) + nbytes :] == EDGE


def _versions(source: Source) -> tuple[bytes, bytes, int]:
    """With something in it; the second has a part of its bytes changed."""
    width, repeats = source.choice(WIDTHS), 1 + source.below(40)
    edits = [(source.below(2**16), source.byte()) for _ in range(source.byte())]
    base = (source.rest() or b"\0") * repeats
    new = bytearray(base)
    for at, value in edits:
        new[at % len(new)] = value
    return base, bytes(new), width


def _frame(source: Source, nbytes: int) -> bytes:
    """Any bytes, any with their checksum, or a frame whose parts nearly fit."""
    kind, width = source.below(8), source.choice(WIDTHS)
    if kind == 0:
        return source.rest()
    if kind == 1:
        return checked(bytes([1, width, *bytes(8)]) + source.rest())
    words = nbytes // 8 * 8 // width
    listed = words if source.flag() else min(source.below(2**16), words // 2)
    tokens = _tokens(source, 0 if listed == words else listed)
    plain = [tokens, *[_plane(source, listed) for _ in range(width)]]
    says = _nearly(source, nbytes), _nearly(source, listed), _nearly(source, len(tokens))
    streams = [_packed(source, stream) for stream in plain]
    tail = source.take(nbytes % 8).ljust(nbytes % 8, b".")
    return forged(width, *says, streams, tail)


def _nearly(source: Source, number: int) -> int:
    return source.number(0, 2**32 - 1) if source.byte() > 240 else number


def _tokens(source: Source, listed: int) -> bytes:
    drawn = [source.byte() or 1 for _ in range(min(listed, source.below(64)))]
    tokens = bytes(drawn) + bytes([1 + source.below(2)]) * (listed - len(drawn))
    jumps = source.below(4)
    return tokens if jumps < 2 else bytes(jumps - 1) + tokens


def _plane(source: Source, listed: int) -> bytes:
    return source.blob(min(64, listed)).ljust(
        _nearly(source, listed) % PLAIN_BYTES_MAX, source.take(1) or b"\0"
    )


def _packed(source: Source, plain: bytes) -> bytes:
    """A stream of it, perhaps damaged."""
    match source.below(6):
        case 0:
            return plain
        case 1:
            return b""
        case 2:
            return zstandard.ZstdCompressor(level=1, write_content_size=False).compress(plain)
        case 3:
            packed = bytearray(zstandard.ZstdCompressor(level=1).compress(plain))
            packed[source.below(2**16) % len(packed)] ^= 1 + source.below(255)
            return bytes(packed)
        case _:
            return zstandard.ZstdCompressor(level=1).compress(plain)
