"""Lists of chunks' digests as bytes: how they are told, compared, and named by one root (R8).

A list holds one digest per chunk, in the order of their numbers, each big-endian and as wide as the
manifest's algorithm makes it. Its root names all of it, so two lists are compared by 32 bytes. Not
responsible for making digests (`memory.chunks`), nor for the choice of the digests that decide
(`coordinator.testimonies`).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol

import msgpack
import xxhash

from tensorhub.model.manifest import Digest

WIDTHS: Final[Mapping[str, int]] = {"none": 0, "xxh3-64": 8, "sha-256": 32}
"""Bytes of one digest, by the manifest's name of the algorithm. 0: chunks have none."""
ROOT_BYTES: Final = 32


class Hasher(Protocol):
    """What hashlib and xxhash have in common."""

    def update(self, data: memoryview, /) -> None: ...

    def digest(self) -> bytes: ...


def hasher(algorithm: str) -> Hasher:
    """What makes the digest of bytes that come in pieces; its `digest` is big-endian, as in a
    list.
    """
    return hashlib.sha256() if algorithm == "sha-256" else xxhash.xxh3_64()


def pack(digests: Sequence[int], width: int) -> bytes:
    """These digests as a list."""
    if width == 8:
        return struct.pack(f">{len(digests)}Q", *digests)
    return b"".join([digest.to_bytes(width, "big") for digest in digests])


def unpack(values: bytes | bytearray, width: int) -> list[int]:
    """The digests of a list. `width` divides the length of `values`."""
    if width == 8:
        return list(struct.unpack(f">{len(values) // 8}Q", values))
    return [int.from_bytes(values[at : at + width], "big") for at in range(0, len(values), width)]


def root_of(values: bytes | bytearray) -> bytes:
    """What names a list."""
    return hashlib.blake2b(values, digest_size=ROOT_BYTES).digest()


def runs_of(chunks: Iterable[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, count) runs."""
    runs: list[tuple[int, int]] = []
    for chunk in chunks:
        if runs and chunk == runs[-1][0] + runs[-1][1]:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((chunk, 1))
    return runs


def width_in(manifest: bytes) -> int:
    """Bytes of one digest under an encoded manifest; only its beginning is read. 0: `manifest` is
    none.
    """
    return WIDTHS[head_of(manifest)[0]]


def head_of(manifest: bytes) -> tuple[Digest, int]:
    """The algorithm of an encoded manifest and its `chunk_bytes`; only its beginning is read.
    "none" and 0: `manifest` is none.
    """
    head = msgpack.Unpacker(max_buffer_size=256, strict_map_key=True)
    try:
        head.feed(manifest[:64])
        head.read_array_header()
        head.unpack()  # the format
        digest, chunk_bytes = head.unpack(), head.unpack()
        return (
            (digest, chunk_bytes) if digest in WIDTHS and type(chunk_bytes) is int else ("none", 0)
        )
    except (ValueError, TypeError, msgpack.UnpackException):
        return "none", 0
