"""A manifest's chunks as pieces of this process' memory, and their digests."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import xxhash

from tensorhub.cuda.device import DeviceBytes
from tensorhub.digests import WIDTHS
from tensorhub.errors import StateError
from tensorhub.manifest import Manifest
from tensorhub.memory.tensors import Bytes, address_of, copy_bytes

SPAN_BYTES = 64 * 2**20  # of memory that a device registers at a time


class ChunkMemory:
    """Where each chunk of one content is: views into the regions, made on demand. Nothing is copied.

    The CPU has no views of a GPU's chunks. What it sends or receives of them goes through `transport.staging`.
    """

    __slots__ = (
        "__weakref__",
        "_addresses",
        "_chunks",
        "_regions",
        "_spans",
        "device",
        "is_digested",
        "sizes",
        "unwanted",
        "width",
    )

    def __init__(self, manifest: Manifest, regions: Sequence[Bytes], unwanted: frozenset[int] = frozenset()) -> None:
        """`regions`: one contiguous view per region of the manifest, of its size; writable if chunks are to
        be filled. `unwanted`: regions that are not read here, and may be empty.
        """
        for index, (region, spec) in enumerate(zip(regions, manifest.regions, strict=True)):
            if region.nbytes != spec.nbytes and index not in unwanted:
                raise ValueError(f"region {index} has {region.nbytes} bytes, not {spec.nbytes}")
        self._chunks = manifest.chunks
        self._regions = tuple([_flat(region) for region in regions])
        self._addresses = tuple([address_of(region) for region in self._regions])
        self.device = next((region.device for region in self._regions if isinstance(region, DeviceBytes)), None)
        self.unwanted: tuple[int, ...] = tuple(c.index for c in manifest.chunks if c.region in unwanted) if unwanted else ()
        self.sizes: tuple[int, ...] = tuple(chunk.nbytes for chunk in manifest.chunks)
        self.is_digested: bool = manifest.digest == "xxh3-64"  # what is fast enough to be made of each piece as it passes
        self.width: int = WIDTHS[manifest.digest]  # bytes of one digest; 0: chunks have none
        if self.device is not None and self.width and not self.is_digested:
            raise StateError(
                f"digests of the kind {manifest.digest!r} are made by the CPU, and these tensors are on {self.device.name}: "
                "publish with Options(digest='xxh3-64'), or fetch into host memory (device='cpu') and copy from there"
            )
        self._spans: tuple[tuple[int, int], ...] | None = None

    def buffer(self, chunk: int) -> memoryview:
        """The bytes of one chunk, which must not be on a device."""
        place = self._chunks[chunk]
        region = self._regions[place.region]
        if isinstance(region, DeviceBytes):
            raise StateError(f"chunk {chunk} is on {region.device.name}, where the CPU has no view of it")
        return region[place.offset : place.offset + place.nbytes]

    def address(self, chunk: int) -> int:
        """Where the bytes of one chunk are in this process."""
        place = self._chunks[chunk]
        return self._addresses[place.region] + place.offset

    @property
    def places(self) -> list[tuple[int, int]]:
        """Each region's (address, bytes) in this process; of those that have any."""
        sizes = [region.nbytes for region in self._regions]
        return [(address, nbytes) for address, nbytes in zip(self._addresses, sizes, strict=True) if nbytes]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Its (address, bytes) as neighbouring chunks together, at most SPAN_BYTES where a chunk has no more; ascending."""
        if self._spans is None:
            found: list[tuple[int, int]] = []
            last = -1
            for chunk in self._chunks:
                if not chunk.nbytes or not self._regions[chunk.region].nbytes:
                    continue
                if chunk.region == last and found[-1][1] + chunk.nbytes <= SPAN_BYTES:
                    found[-1] = found[-1][0], found[-1][1] + chunk.nbytes
                else:
                    found.append((self.address(chunk.index), chunk.nbytes))
                last = chunk.region
            self._spans = tuple(sorted(found))
        return self._spans

    @property
    def is_read_only(self) -> bool:
        """Whether any of it cannot be written: it is of a file, which somebody may truncate."""
        return any(isinstance(region, memoryview) and region.readonly for region in self._regions)

    def digest(self, chunk: int) -> int:
        """Make the chunk's digest from its bytes; the GIL is released meanwhile. 0 if the manifest wants
        none.
        """
        return self.digests([chunk])[0]

    def digests(self, chunks: Sequence[int]) -> list[int]:
        """Those of several chunks: by one launch, on a GPU."""
        if not self.width:
            return [0] * len(chunks)
        if self.device is not None:
            return self.device.digests([(self.address(chunk), self.sizes[chunk]) for chunk in chunks])
        if not self.is_digested:
            return [int.from_bytes(hashlib.sha256(self.buffer(chunk)).digest(), "big") for chunk in chunks]
        return [xxhash.xxh3_64_intdigest(self.buffer(chunk)) for chunk in chunks]

    def __repr__(self) -> str:
        where = "" if self.device is None else f" on {self.device.name}"
        return f"<ChunkMemory of {len(self.sizes)} chunks, {sum(self.sizes)} bytes{where}>"


def _flat(region: Bytes) -> Bytes:
    return region if isinstance(region, DeviceBytes) or not region.nbytes else region.cast("B")


def move_chunks(source: ChunkMemory, destination: ChunkMemory, chunks: Sequence[int]) -> None:
    """Copy these chunks between two memories of this process; blocks, without the GIL."""
    device = source.device or destination.device
    if device is None:
        for chunk in chunks:
            copy_bytes(source.buffer(chunk), destination.buffer(chunk))
        return
    queue = device.queue()
    for chunk in chunks:
        if source.sizes[chunk]:
            queue.copy(destination.address(chunk), source.address(chunk), source.sizes[chunk])
    queue.mark().wait()
