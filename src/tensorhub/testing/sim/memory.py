"""Memory as a list of cells, one per chunk. A cell holds a tag that names its writer, and when.

A read takes a cell's value when it *ends*, as the slowest of readers would, so that memory which is
written before its fence stands is caught. Nothing of the bytes that a manifest speaks of is
allocated.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Protocol

import xxhash

from tensorhub.model.accesses import Access
from tensorhub.model.manifest import Digest, Manifest, TensorDescription, build_manifest
from tensorhub.types import Medium, Purpose
from tensorhub.worker.owner import Owner


class Cells(Protocol):
    """What memory holds, chunk by chunk."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[str]: ...
    def __getitem__(self, chunk: int, /) -> str: ...
    def __setitem__(self, chunk: int, cell: str, /) -> None: ...


DEVICE = (Medium.DEVICE, Purpose.USE)  # what a caller's own memory is
CHUNKS = 2
CHUNK_BYTES = 2**28  # so that links, not hops, decide who reads from whom


@lru_cache(maxsize=64)
def make_manifest(chunks: int, digest: Digest = "none") -> Manifest:
    """The manifest of one tensor of that many chunks."""
    tensor = TensorDescription("w", "uint8", (chunks, CHUNK_BYTES), 0, chunks * CHUNK_BYTES)
    return build_manifest([tensor], CHUNK_BYTES, digest)


MANIFEST = make_manifest(CHUNKS)


def written(by: str, chunks: int) -> list[str]:
    """Cells that were all written by one writer."""
    return [f"{by}.{chunk}" for chunk in range(chunks)]


def digest_of(cell: str) -> int:
    """The digest of what a cell holds."""
    return _digest_of(cell if type(cell) is str else str(cell))


@lru_cache(maxsize=4096)
def _digest_of(cell: str) -> int:
    return xxhash.xxh3_64_intdigest(cell.encode())


def sent_digest(owner: Owner, access: Access, chunk: int, known: int | None, cell: str) -> int:
    """The digest that is sent with an accessed chunk of that cell; made now if it is not known
    yet.
    """
    if known is not None:
        return known
    made = digest_of(cell)
    kept = owner.set_digest(access.registration, access.generation, chunk, made, access.selection)
    return made if kept is None else kept
