"""The form of a frame, without what is compressed in it.

    version, width      1 byte each: of this form; the bytes of a word
    checksum            8: XXH3-64 of all that follows
    nbytes              4: of the chunk
    changed             4: words that are listed; all of them: there are no gaps
    tokens              4: bytes of the gaps
    packed              4 for the gaps and for each of `width` planes: the bytes of each stream
    streams             the gaps, then the differences' planes from the lowest byte on
    tail                the new bytes after the last whole 8, which are no words

A token of 1 to 255 goes so many words ahead, to a word that changes; 0 goes 255 ahead, to none. The
first one starts before the first word. So every gap fits, and positions ascend whatever the tokens
are. A plane has one byte of each difference's zigzag. A stream is a zstd frame that says its size;
or what it holds, where that is no longer; or empty, where all of it is zero.

Bounds, which hold before anything is unpacked: a frame that lists more than half of the words lists
all of them, and there are no more tokens than what that and the words need. So all streams together
unpack to about the chunk's bytes at most.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final, Self

import xxhash

from tensorhub.errors import ProtocolError

VERSION: Final = 1
WIDTHS: Final = (1, 2, 4)
UNIT: Final = 8  # bytes: words are those of whole units
AHEAD_MAX: Final = 255  # words, by one token
_PREFIX = struct.Struct("<BB8s")
_COUNTS = struct.Struct("<III")


@dataclass(frozen=True, slots=True)
class Frame:
    """`streams`: as they are packed, the gaps first."""

    width: int
    nbytes: int
    changed: int
    tokens: int
    streams: tuple[bytes | memoryview, ...]
    tail: bytes | memoryview

    @property
    def words(self) -> int:
        return self.nbytes // UNIT * UNIT // self.width

    @property
    def lists_all(self) -> bool:
        return self.changed == self.words

    def encode(self) -> bytes:
        sizes = struct.pack(f"<{len(self.streams)}I", *map(len, self.streams))
        counts = _COUNTS.pack(self.nbytes, self.changed, self.tokens)
        body = b"".join([counts, sizes, *self.streams, self.tail])
        return _PREFIX.pack(VERSION, self.width, xxhash.xxh3_64_digest(body)) + body

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, nbytes: int) -> Self:
        """The frame for a chunk of so many bytes; views of `data`. ProtocolError: it is none."""
        view = memoryview(data)
        expect(len(view) >= _PREFIX.size, "it is cut off")
        version, width, checksum = _PREFIX.unpack_from(view)
        expect(version == VERSION, f"form {version} is unknown to this version of TensorHub")
        expect(width in WIDTHS, f"words of {width} bytes are unknown")
        body = view[_PREFIX.size :]
        at = _COUNTS.size + 4 * (1 + width)
        expect(len(body) >= at, "it is cut off")
        expect(xxhash.xxh3_64_digest(body) == checksum, "its bytes do not have its checksum")
        said, changed, tokens = _COUNTS.unpack_from(body)
        expect(said == nbytes, f"it is for {said} bytes, and the chunk has {nbytes}")
        sizes = struct.unpack_from(f"<{1 + width}I", body, _COUNTS.size)
        expect(at + sum(sizes) + nbytes % UNIT == len(body), "its parts do not add up")
        streams = []
        for size in sizes:
            streams.append(body[at : at + size])
            at += size
        found = cls(width, nbytes, changed, tokens, tuple(streams), body[at:])
        expect(found.lists_all or 2 * changed <= found.words, "it lists too many words")
        most = 0 if found.lists_all else changed + found.words // AHEAD_MAX
        expect(tokens <= most, "it has too many gaps")
        return found


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ProtocolError(f"bad delta: {otherwise}")
