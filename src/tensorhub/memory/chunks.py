"""A manifest's chunks as pieces of this process' memory, and their digests.

A chunk of a manifest is one contiguous range of a region. A chunk of another grid over the same
regions, which a reader of another layout has, is made of strips: then the memory `is_strided`, and
has no view of a whole chunk.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from itertools import chain
from typing import TypeAlias

import xxhash

from tensorhub import deltas
from tensorhub.cuda.copies import copy
from tensorhub.cuda.device import Device, DeviceBytes, Spread
from tensorhub.cuda.kernels import SPREAD_BYTES_MAX
from tensorhub.errors import StateError
from tensorhub.layouts.reading import ReshardedManifest, Selection
from tensorhub.logs import get_logger
from tensorhub.memory import strided_device
from tensorhub.memory.addresses import Bytes, address_of, copy_bytes, guarded_pieces
from tensorhub.memory.strided import BUFFER_BYTES, Strided, blocks
from tensorhub.model.digests import WIDTHS, hasher
from tensorhub.model.manifest import Chunk, Manifest
from tensorhub.model.strips import Strip

Strips: TypeAlias = "Sequence[tuple[Strip, ...]]"  # of each chunk

# of a selection, or 16 of the shard's own: it is gathered in memory of the device
SELECTED_CHUNK_BYTES_MAX = 64 * 2**20
REPEATS_MAX = 16  # a selection has at most so many times a shard's bytes: all of it is digested
# a selection may say so many parts, and one more for so many bytes of a shard
PARTS_MIN, PART_BYTES = 2**14, 64
GUARDED_BYTES = 256 * 2**10  # that the kernel copies at a time: they stay in a core's cache
GUARDED_BYTES_MIN = 4096  # less is read directly: torch's allocator keeps its page mapped
SPAN_BYTES = 64 * 2**20  # of memory that a device registers at a time


log = get_logger("tensorhub.worker")


@contextmanager
def _roomy(device: Device) -> Iterator[None]:
    """Ends the block where the device has no room for it: then the host does the work."""
    try:
        yield
    except StateError as error:
        if not error.retryable:
            raise
        _say_on_host(device.name)


@cache
def _say_on_host(device: str) -> None:
    """Once a process."""
    reason = "no room there for two chunks: the CPU compares, or applies, these"
    log.warning("deltas_on_host", device=device, reason=reason)


class ChunkMemory:
    """Where each chunk of one content is: views into the regions, made on demand. Nothing is
    copied.

    The CPU has no views of a GPU's chunks. What it sends or receives of them goes through
    `transport.staging`. Chunks of strips have no view either: see `outgoing` and `incoming`.
    """

    def __init__(
        self,
        manifest: Manifest,
        regions: Sequence[Bytes],
        unwanted: frozenset[int] = frozenset(),
        left_out: Sequence[int] = (),
    ) -> None:
        """`regions`: one contiguous view per region of the manifest, of its size; writable if
        chunks are to be filled. `unwanted`: regions that are not read here, and may be empty.
        `left_out`: further chunks that are not read.
        """
        for index, (region, spec) in enumerate(zip(regions, manifest.regions, strict=True)):
            if region.nbytes != spec.nbytes and index not in unwanted:
                raise ValueError(f"region {index} has {region.nbytes} bytes, not {spec.nbytes}")
        self.manifest = manifest  # of the regions
        self._regions: tuple[Bytes, ...] = tuple([_flat(region) for region in regions])
        self._addresses = tuple([address_of(region) for region in self._regions])
        self.device = next(
            (region.device for region in self._regions if isinstance(region, DeviceBytes)), None
        )
        if isinstance(manifest, ReshardedManifest):
            self._lie((), manifest.reading.places, manifest.sizes)
        else:
            self._lie(manifest.chunks)
        self.unwanted: tuple[int, ...] = tuple(left_out)
        if unwanted:
            self.unwanted += tuple(self._chunks_in(unwanted))
        # fast enough to digest each piece as it passes
        self.is_digested: bool = manifest.digest == "xxh3-64"
        self.width: int = WIDTHS[manifest.digest]  # bytes of one digest; 0: chunks have none
        if self.device is not None and self.width and not self.is_digested:
            raise StateError(
                f"digests of the kind {manifest.digest!r} are made by the CPU, and these tensors "
                f"are on {self.device.name}: "
                "publish with Options(digest='xxh3-64'), or fetch into host memory (device='cpu') "
                "and copy from there"
            )

    def _lie(
        self,
        chunks: Sequence[Chunk],
        strips: Strips | None = None,
        sizes: Sequence[int] | None = None,
    ) -> None:
        """Its chunks are these; or they are of `strips`, with these sizes."""
        self._chunks = chunks
        self._strips = strips
        self._strided: Strided | None = None
        if strips is not None and self.device is None:
            self._strided = Strided(
                [region for region in self._regions if isinstance(region, memoryview)],
                self._addresses,
            )
        self.sizes: Sequence[int] = (
            tuple([chunk.nbytes for chunk in chunks]) if sizes is None else sizes
        )
        self._spans: tuple[tuple[int, int], ...] | None = None

    def _chunks_in(self, regions: frozenset[int]) -> Iterator[int]:
        if self._strips is None:
            return (number for number, chunk in enumerate(self._chunks) if chunk.region in regions)
        within = (
            any(region in regions for strip in strips for region, _ in strip.cells())
            for strips in self._strips
        )
        return (number for number, is_within in enumerate(within) if is_within)

    def _other(
        self, chunks: Sequence[Chunk], strips: Strips | None, sizes: Sequence[int] | None
    ) -> ChunkMemory:
        """A memory of these regions with other chunks."""
        made = object.__new__(ChunkMemory)
        made._regions, made._addresses, made.device = self._regions, self._addresses, self.device
        made.manifest = self.manifest
        made.unwanted, made.is_digested, made.width = (), self.is_digested, self.width
        made._lie(chunks, strips, sizes)
        return made

    def selected(self, selection: Selection) -> ChunkMemory:
        """This memory with the chunks of `selection`, which must fit this memory (see `fault`)."""
        return self._other((), selection.chunks, selection.sizes)

    def part(self, chunks: Sequence[int]) -> ChunkMemory:
        """This memory with these chunks only, numbered 0, 1, ..."""
        sizes = [self.sizes[chunk] for chunk in chunks]
        if self._strips is None:
            return self._other([self._chunks[chunk] for chunk in chunks], None, sizes)
        return self._other((), [self._strips[chunk] for chunk in chunks], sizes)

    @property
    def parts_max(self) -> int:
        """The most parts of a selection of this memory (`Selection.parts_said`): no real layout has
        more parts per byte.
        """
        return PARTS_MIN + sum([region.nbytes for region in self._regions]) // PART_BYTES

    def fault(self, selection: Selection) -> str:
        """Why there is no such selection of this memory; "": there is."""
        sizes = [region.nbytes for region in self._regions]
        if fault := selection.fault(sizes):
            return fault
        if selection.nbytes > REPEATS_MAX * sum(sizes):
            return f"it has the shard's bytes more than {REPEATS_MAX} times"
        if max(selection.sizes, default=0) > (
            most := max(SELECTED_CHUNK_BYTES_MAX, 16 * self.manifest.chunk_bytes)
        ):
            return f"a chunk of it has more than {most} bytes: use a smaller chunk_bytes"
        return ""

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each region is in this process."""
        return self._addresses

    def region_of(self, chunk: int) -> int:
        """The region of a chunk of memory that is not strided."""
        return self._chunks[chunk].region

    def regions_of(self, chunks: Iterable[int]) -> set[int]:
        """The regions that these chunks have bytes of."""
        if self._strips is None:
            return {self._chunks[chunk].region for chunk in chunks}
        return {
            region
            for chunk in chunks
            for strip in self._strips[chunk]
            for region, _ in strip.cells()
        }

    def under(self, strips: Iterable[Strip]) -> list[tuple[int, int]]:
        """The chunks of this memory, which is not strided, that have bytes of these strips, as
        (first, count) runs; or a few more, between those of one cell.
        """
        found = [
            (self._chunk_at(region, offset), self._chunk_at(region, offset + strip.extent - 1) + 1)
            for strip in strips
            for region, offset in strip.cells()
        ]
        merged = list[tuple[int, int]]()
        for first, end in sorted(found):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], end)
            else:
                merged.append((first, end))
        return [(first, end - first) for first, end in merged]

    def _chunk_at(self, region: int, offset: int) -> int:
        place = region, offset
        return bisect_right(self._chunks, place, key=lambda each: (each.region, each.offset)) - 1

    @property
    def is_strided(self) -> bool:
        """Whether its chunks are of strips, and have neither `buffer` nor `address`."""
        return self._strips is not None

    def strips(self, chunk: int) -> tuple[Strip, ...]:
        """Of a chunk of strided memory."""
        return _strips_of(self)[chunk]

    def outgoing(self, chunk: int, call_bytes: int = BUFFER_BYTES) -> Iterator[list[memoryview]]:
        """The bytes of a chunk of strided memory: see `Strided.outgoing`."""
        return _strided_of(self).outgoing(self.strips(chunk), call_bytes)

    def incoming(self, chunk: int, call_bytes: int = BUFFER_BYTES) -> Generator[list[memoryview]]:
        """Room for the bytes of a chunk of strided memory: see `Strided.incoming`."""
        return _strided_of(self).incoming(self.strips(chunk), call_bytes)

    def gather(self, chunks: Sequence[int], to: int) -> None:
        """Copy chunks of strided memory on a device to that address of it, without gaps. Waits."""
        _device_of(self).relay(to, gathered=self._rows(chunks))

    def scatter(self, chunks: Sequence[int], source: int) -> None:
        """Copy the bytes at that address of the device to where these chunks of strided memory are.
        Waits.
        """
        _device_of(self).relay(source, scattered=self._rows(chunks))

    def take_in(
        self, chunks: Sequence[int], at: int, gathered: Sequence[Spread] = ()
    ) -> dict[int, int]:
        """See `transport.base.Destination`."""
        digested = strided_device.together(chunks, self.sizes, at) if self.is_digested else []
        made = _device_of(self).relay(at, gathered, digested, self._rows(chunks))
        return dict(zip(chunks, made, strict=True)) if digested else {}

    def _rows(self, chunks: Sequence[int]) -> list[Spread]:
        strips = chain.from_iterable(map(self.strips, chunks))
        return strided_device.rows_of_blocks(blocks(strips, self._addresses, SPREAD_BYTES_MAX))

    def buffer(self, chunk: int) -> memoryview:
        """The bytes of one chunk, which must not be on a device."""
        place = self._chunks[chunk]
        region = self._regions[place.region]
        if isinstance(region, DeviceBytes):
            raise StateError(
                f"chunk {chunk} is on {region.device.name}, where the CPU has no view of it"
            )
        return region[place.offset : place.offset + place.nbytes]

    def copied(self, chunk: int, into: bytearray) -> memoryview:
        """The bytes of a chunk, copied from wherever they are. OSError (EFAULT): some of them are
        not mapped any more.
        """
        room = memoryview(into)[: self.sizes[chunk]]
        if self.device is not None:
            copy_bytes(self._on_device(chunk), room)
            return room
        at, view = 0, self.buffer(chunk)
        for piece in guarded_pieces(view, GUARDED_BYTES) if view.nbytes else ():
            room[at : at + piece.nbytes] = piece
            at += piece.nbytes
        return room

    def apply(self, chunk: int, made: Sequence[bytes | bytearray]) -> deltas.Counts:
        """Apply deltas to a chunk, which has their base, one after the other. ProtocolError: one of
        them is no delta for it.
        """
        counts, rest = deltas.Counts(), list(made)
        if self.device is None:
            return deltas.apply(rest, self.buffer(chunk))
        while rest and (done := self._apply_on(self.device, chunk, rest[0])) is not None:
            counts, rest = counts.and_of(done), rest[1:]
        if rest:
            target = self.copied(chunk, bytearray(self.sizes[chunk]))
            counts = counts.and_of(deltas.apply(rest, target))
            copy_bytes(target, self._on_device(chunk))
        return counts

    def _apply_on(
        self, device: Device, chunk: int, made: bytes | bytearray
    ) -> deltas.Counts | None:
        """None: the device cannot, and has written nothing."""
        found = deltas.listed(made, self.sizes[chunk])
        if found is None or self.address(chunk) % found[1]:
            return None
        (places, differences), width, counts = found
        done = None
        with _roomy(device):
            device.add(self.address(chunk), width, places, differences)
            done = counts
        return done

    def advance(self, chunk: int, older: memoryview, width: int) -> bytes | None:
        """Make the chunk's bytes of these older ones, in place. Returns the delta that does so, if
        it pays (`deltas.encode`). OSError: as of `copied`.
        """
        if self.device is not None and older.nbytes % 8 == 0:  # else some bytes are no words
            with _roomy(self.device):
                found = self.device.changes(older, self.address(chunk), width)
                if found is not None:
                    return deltas.advance(older, deltas.Listed(*found), width)
        # a copy: what a caller has freed must not be touched by this process
        new = self.copied(chunk, bytearray(self.sizes[chunk]))
        made = deltas.encode(older, new, width)
        copy_bytes(new, older)
        return made

    def _on_device(self, chunk: int) -> DeviceBytes:
        place = self._chunks[chunk]
        region = self._regions[place.region]
        assert isinstance(region, DeviceBytes)
        return region[place.offset : place.offset + place.nbytes]

    def address(self, chunk: int) -> int:
        """Where the bytes of one chunk are in this process."""
        place = self._chunks[chunk]
        return self._addresses[place.region] + place.offset

    @property
    def places(self) -> list[tuple[int, int]]:
        """Each region's (address, bytes) in this process; of those that have any."""
        sizes = [region.nbytes for region in self._regions]
        return [
            (address, nbytes)
            for address, nbytes in zip(self._addresses, sizes, strict=True)
            if nbytes
        ]

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """Its (address, bytes) as neighbouring chunks together, at most SPAN_BYTES where a chunk
        has no more; ascending.
        """
        if self._spans is None:
            found: list[tuple[int, int]] = []
            last = -1
            for number, chunk in enumerate(self._chunks):
                if not chunk.nbytes or not self._regions[chunk.region].nbytes:
                    continue
                if (
                    chunk.region == last
                    and sum(found[-1]) == self.address(number)
                    and found[-1][1] + chunk.nbytes <= SPAN_BYTES
                ):
                    found[-1] = found[-1][0], found[-1][1] + chunk.nbytes
                else:
                    found.append((self.address(number), chunk.nbytes))
                last = chunk.region
            self._spans = tuple(sorted(found))
        return self._spans

    @property
    def is_read_only(self) -> bool:
        """Whether any of it cannot be written: it is of a file, which another process may
        truncate.
        """
        return any(isinstance(region, memoryview) and region.readonly for region in self._regions)

    def digest(self, chunk: int) -> int:
        """Make the chunk's digest from its bytes; the GIL is released meanwhile. 0 if the manifest
        wants none.
        """
        return self.digests([chunk])[0]

    def digests(self, chunks: Sequence[int]) -> list[int]:
        """Those of several chunks: by one launch, on a GPU."""
        if not self.width:
            return [0] * len(chunks)
        if self.device is not None and self.is_strided:
            return self._digests_on_device(self.device, chunks)
        if self.device is not None:
            return self.device.digests(
                [(self.address(chunk), self.sizes[chunk]) for chunk in chunks]
            )
        if self.is_strided:
            return [self._digest_of_strips(chunk) for chunk in chunks]
        if not self.is_digested:
            return [
                int.from_bytes(hashlib.sha256(self.buffer(chunk)).digest(), "big")
                for chunk in chunks
            ]
        return [xxhash.xxh3_64_intdigest(self.buffer(chunk)) for chunk in chunks]

    def guarded_digest(self, chunk: int) -> int:
        """As `digest`, of host memory that its owner may free meanwhile. OSError (EFAULT): it is
        not mapped any more.
        """
        if not self.width:
            return 0
        made = hasher(self.manifest.digest)
        views = (
            chain.from_iterable(self.outgoing(chunk)) if self.is_strided else [self.buffer(chunk)]
        )
        for view in views:
            for piece in (
                guarded_pieces(view, GUARDED_BYTES) if view.nbytes >= GUARDED_BYTES_MIN else [view]
            ):
                made.update(piece)
        return int.from_bytes(made.digest(), "big")

    def _digests_on_device(self, device: Device, chunks: Sequence[int]) -> list[int]:
        """The chunks are gathered first: a device digests contiguous bytes."""
        room = device.allocate(
            strided_device.batch_bytes_max([self.sizes[chunk] for chunk in chunks])
        )
        found: list[int] = []
        for batch in strided_device.batches(chunks, self.sizes):
            digested = strided_device.together(batch, self.sizes, room.address)
            found += device.relay(room.address, self._rows(batch), digested)
        return found

    def _digest_of_strips(self, chunk: int) -> int:
        made = hasher(self.manifest.digest)
        for views in self.outgoing(chunk):
            for view in views:
                made.update(view)
        return int.from_bytes(made.digest(), "big")


def _flat(region: Bytes) -> Bytes:
    return region if isinstance(region, DeviceBytes) or not region.nbytes else region.cast("B")


def _strips_of(memory: ChunkMemory) -> Strips:
    if memory._strips is None:
        raise StateError("its chunks are contiguous")
    return memory._strips


def _device_of(memory: ChunkMemory) -> Device:
    if memory.device is None:
        raise StateError("it is in host memory")
    return memory.device


def _strided_of(memory: ChunkMemory) -> Strided:
    if memory._strided is None:
        raise StateError(
            "its chunks are contiguous, or on a device, where the CPU has no view of them"
        )
    return memory._strided


def move_chunks(source: ChunkMemory, destination: ChunkMemory, chunks: Sequence[int]) -> None:
    """Copy these chunks between two memories of this process; blocks, without the GIL."""
    device = source.device or destination.device
    if device is None and source.is_strided:
        for chunk in chunks:
            _move_strips(source, destination, chunk)
        return
    if device is None:
        for chunk in chunks:
            copy_bytes(source.buffer(chunk), destination.buffer(chunk))
        return
    if source.is_strided:
        _move_strips_on_devices(source, destination, chunks)
        return
    queue = device.queue()
    for chunk in chunks:
        if source.sizes[chunk]:
            queue.copy(destination.address(chunk), source.address(chunk), source.sizes[chunk])
    queue.mark().wait()


def _move_strips_on_devices(
    source: ChunkMemory, destination: ChunkMemory, chunks: Sequence[int]
) -> None:
    """Each chunk is contiguous on a device in between. Both memories have one content, and so equal
    chunks.
    """
    sizes = [source.sizes[chunk] for chunk in chunks]
    room = _device_of(source if source.device is not None else destination).allocate(
        max(sizes, default=0)
    )
    for chunk, nbytes in zip(chunks, sizes, strict=True):
        if source.device is not None:
            source.gather([chunk], room.address)
        else:
            _copy_each(room, source.outgoing(chunk), into_room=True)
        if destination.device is None:
            with closing(destination.incoming(chunk)) as calls:
                _copy_each(room, calls, into_room=False)
        elif destination.device is room.device:
            destination.scatter([chunk], room.address)
        else:
            other = destination.device.allocate(nbytes)
            copy_bytes(room[:nbytes], other)
            destination.scatter([chunk], other.address)


def _copy_each(room: DeviceBytes, calls: Iterable[list[memoryview]], *, into_room: bool) -> None:
    """Copy the host's views, in order, to or from a room on a device. Waits before it asks for the
    next ones.
    """
    queue, at = room.device.queue(), room.address
    for views in calls:
        for view in views:
            here = address_of(view)
            copy(queue, *((at, here) if into_room else (here, at)), view.nbytes)
            at += view.nbytes
        queue.mark().wait()


def _move_strips(source: ChunkMemory, destination: ChunkMemory, chunk: int) -> None:
    """Both memories have one content, so their strips are equal, and one list of calls serves
    both.
    """
    with closing(destination.incoming(chunk)) as incoming:
        for theirs, mine in zip(source.outgoing(chunk), incoming, strict=True):
            for view, other in zip(theirs, mine, strict=True):
                copy_bytes(view, other)
