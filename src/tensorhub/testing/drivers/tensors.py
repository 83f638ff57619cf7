"""Real tensors as the cells of a simulated memory: what arrives in a cell arrives in the tensors'
bytes.

A cell's value names its bytes (their digest) and carries them. Not responsible for permission to
read or write.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import xxhash

from tensorhub.memory.addresses import copy_bytes
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.regions import Memory
from tensorhub.model.manifest import Manifest


class Cell(str):
    """The name of some bytes, with the bytes."""

    __slots__ = ("data",)
    data: bytes

    @classmethod
    def of(cls, data: bytes) -> Self:
        """Those bytes."""
        cell = cls(xxhash.xxh3_128_hexdigest(data))
        cell.data = data
        return cell


class TensorCells:
    """One memory, cut into the chunks of a manifest."""

    def __init__(self, memory: Memory, manifest: Manifest) -> None:
        """Raises ManifestMismatch if its regions are not there."""
        self.manifest = manifest
        mapped = memory.map(manifest)
        self._chunks = ChunkMemory(manifest, mapped.regions, mapped.unwanted)
        self.unwanted = frozenset(self._chunks.unwanted)
        self._copies = mapped.copies
        self.unpack = mapped.unpack
        # what was written here, or looked at, last
        self._known = [self._read(chunk) for chunk in range(len(self))]

    def __repr__(self) -> str:
        return repr(list(self))

    def __len__(self) -> int:
        return len(self._chunks.sizes)

    def __iter__(self) -> Iterator[str]:
        return (self[chunk] for chunk in range(len(self)))

    def __getitem__(self, chunk: int) -> str:
        known = self._known[chunk]
        return known if self._chunks.buffer(chunk) == known.data else self._read(chunk)

    def __setitem__(self, chunk: int, cell: str) -> None:
        if chunk in self.unwanted:
            return
        place = self._chunks.buffer(chunk)
        place[:] = cell.data if isinstance(cell, Cell) else noise(cell, place.nbytes)
        for source, target in self._copies:  # tensors that share memory at the source
            copy_bytes(source, target)
        self._known[chunk] = self._read(chunk)

    def _read(self, chunk: int) -> Cell:
        return Cell.of(b"" if chunk in self.unwanted else bytes(self._chunks.buffer(chunk)))

    def look(self) -> None:
        """Whatever is there now was rightly written by its owner."""
        self._known = [self._read(chunk) for chunk in range(len(self))]

    def was_written(self, chunk: int) -> bool:
        """Whether its owner has written this chunk since."""
        return chunk not in self.unwanted and self._chunks.buffer(chunk) != self._known[chunk].data


def noise(tag: str, nbytes: int) -> bytes:
    """Bytes that were never published: those of a damaged or foreign cell."""
    pattern = tag.encode() + b"\xa5"
    return (pattern * (nbytes // len(pattern) + 1))[:nbytes]
