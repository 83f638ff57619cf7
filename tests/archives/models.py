"""Models to archive: random worlds of ranks (see `tests.layouts.worlds`), and one plain model whose
weights change from version to version. Their codec: zlib of the XOR.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tensorhub.archives.catalogue import Key
from tensorhub.archives.writing import Content
from tensorhub.layouts import Published, parts_of
from tensorhub.model.digests import hasher
from tensorhub.model.manifest import (
    CHUNK_BYTES_MIN,
    Digest,
    Manifest,
    RegionSpec,
    TensorDescription,
    TensorSpec,
    build_manifest,
)
from tests.layouts.worlds import Memory, World

Ranks = list[list[bytearray]]  # of each rank, its regions


def encode(old: bytes | memoryview, new: bytes | memoryview) -> bytes | None:
    if old == new:
        return None
    frame = zlib.compress(bytes(a ^ b for a, b in zip(old, new, strict=True)), 1)
    return frame if len(frame) < len(new) else bytes(new)


def apply(frames: Sequence[Any], target: memoryview) -> None:
    for frame in frames:
        try:
            text = zlib.decompress(bytes(frame))
        except zlib.error as error:
            raise ValueError(str(error)) from None
        if len(text) != len(target):
            raise ValueError("a frame of another chunk")
        target[:] = bytes(a ^ b for a, b in zip(text, target, strict=True))


@dataclass
class Model:
    """What a group has published. `memory`: of each rank."""

    published: Published
    parts: dict[str, bytes]
    manifests: list[Manifest]
    memory: Ranks
    copies: dict[int, Ranks] = field(default_factory=dict)  # by the version's number

    def view(self, rank: int, region: int, offset: int, nbytes: int) -> Iterator[memoryview]:
        yield memoryview(self.memory[rank][region])[offset : offset + nbytes]

    def chunks(self, rank: int, memory: Ranks | None = None) -> list[bytes]:
        regions = (self.memory if memory is None else memory)[rank]
        return [
            bytes(regions[each.region][each.offset : each.offset + each.nbytes])
            for each in self.manifests[rank].chunks
        ]

    def digests(self, rank: int) -> bytes:
        found = []
        for chunk in self.chunks(rank):
            digest = hasher(self.published.digest)
            digest.update(memoryview(chunk))
            found.append(digest.digest() if self.published.digest != "none" else b"")
        return b"".join(found)

    def content(self, number: int, lineage: int = 0, after: Key | None = None) -> Content:
        self.copies[number] = [[bytearray(each) for each in rank] for rank in self.memory]
        ranks = range(len(self.memory))
        nbytes = sum(each.region_bytes for each in self.manifests)
        return Content(
            Key(lineage, number),
            f"content {lineage}-{number}",
            nbytes,
            "layout",
            self.published,
            self.parts,
            self.manifests,
            [self.digests(rank) for rank in ranks],
            after,
        )

    def frames(self, base: int) -> list[Iterator[bytes | None]]:
        def of(rank: int) -> Iterator[bytes | None]:
            old = self.chunks(rank, self.copies[base])
            return (encode(a, b) for a, b in zip(old, self.chunks(rank), strict=True))

        return [of(rank) for rank in range(len(self.memory))]

    def step(self, random: Random, changes: int = 20) -> None:
        """Change some bytes, as an optimizer's step does."""
        regions = [region for rank in self.memory for region in rank if region]
        for _ in range(changes):
            region = random.choice(regions)
            region[random.randrange(len(region))] = random.randrange(256)


def plain(random: Random, digest: Digest = "xxh3-64", sizes: Sequence[int] = (5, 0, 3, 1)) -> Model:
    """One rank; each tensor has so many chunks, less a few bytes."""
    memory, described, at = list[bytearray](), list[TensorDescription](), 0
    for number, size in enumerate(sizes):
        shape = (max(0, size * CHUNK_BYTES_MIN // 2 - number),)
        memory.append(bytearray(random.randbytes(2 * shape[0])))
        described.append(TensorDescription(f"layer.{number}", "bfloat16", shape, at, 2 * shape[0]))
        at += 2 * shape[0]
    manifest = build_manifest(described, CHUNK_BYTES_MIN, digest)
    published = Published(digest, CHUNK_BYTES_MIN, ((manifest.manifest_id,),))
    return Model(published, {manifest.manifest_id: manifest.encode()}, [manifest], [memory])


def local(random: Random, ranks: int) -> Model:
    """Tensors of each rank that nobody has said the place of in the model."""
    models = [plain(random) for _ in range(ranks)]
    manifest = models[0].manifests[0]
    published = Published("xxh3-64", CHUNK_BYTES_MIN, ((manifest.manifest_id,),) * ranks)
    return Model(
        published, models[0].parts, [manifest] * ranks, [each.memory[0] for each in models]
    )


def of_world(world: World, chunk_bytes: int = CHUNK_BYTES_MIN) -> Model:
    """What the ranks of a random world hold."""
    shards, parts = [], dict[str, bytes]()
    for coordinates in world.publication.ranks:
        its = parts_of(coordinates)
        parts |= its
        shards.append(tuple(its))
    published = Published("xxh3-64", CHUNK_BYTES_MIN, tuple(shards))
    manifests = [_manifest(memory, chunk_bytes) for memory in world.memories]
    return Model(published, parts, manifests, [memory.regions for memory in world.memories])


def _manifest(memory: Memory, chunk_bytes: int) -> Manifest:
    specs = [
        TensorSpec(
            each.name,
            each.dtype,
            each.shape,
            tuple([(0, size) for size in each.shape]),
            each.region,
            each.offset,
            each.quantization,
        )
        for each in memory.tensors
    ]
    regions = tuple([RegionSpec(len(region)) for region in memory.regions])
    return Manifest(tuple(specs), regions, chunk_bytes, "xxh3-64", "")
