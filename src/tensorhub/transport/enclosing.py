"""Enclosing reads: a selection's chunks are verified by the source's own chunks that enclose them.

Nobody whose word counts has digested that selection, but each chunk of the source's own grid has its publisher's digest. So
those chunks are read whole into staging memory and verified, and the bytes that are wanted are taken out of them:

      own chunks of the source    │ . . x x . . │ . . x x . . │ . . x x . . │      x: a chunk of the selection
                                    read whole, verified, and let go one after the other

The source says its manifest and its list of digests. They must have the id and the root that the coordinator has named. So a
source that lies is found out before a byte of it is written anywhere else. What a source of another layout has for chunks
follows from what it has read, and from where its pieces are. So the reader plans that anew (`layouts.origin_grids`), and the
source says its digests alone.

A lane has SLOTS own chunks in staging memory, and room for the chunks of the selection that it is putting together. The rest
of what is read is excess, and counted. Not responsible for when a read must enclose: the coordinator decides that.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import NamedTuple

import xxhash

from tensorhub.digests import WIDTHS, unpack
from tensorhub.layouts.reading import Selection
from tensorhub.layouts.resharded import ReshardedManifest, root_of_grid
from tensorhub.manifest import Manifest, id_of
from tensorhub.memory.addresses import address_of, copy_bytes
from tensorhub.memory.chunks import COVERS_MAX
from tensorhub.memory.covering import Covering
from tensorhub.memory.meeting import REGIONS, runs_in, within
from tensorhub.memory.strided import BUFFER_BYTES, Block, blocks, gather
from tensorhub.strips import Strip
from tensorhub.transport.base import Arrival, Channel, Destination, Lacking, NotShared, ReadFailure, Scattering
from tensorhub.transport.read_client import ReadClient

SLOTS = 2  # own chunks of a source in staging memory: one comes while the other one is taken apart
GROUP_BYTES = 16 * 2**20  # of the selection's chunks that are put together at a time, unless one is larger


class Vouched(NamedTuple):
    """What a source's own grid must be."""

    grid: str  # its name: the id of a manifest, unless `found`
    root: bytes  # of its chunks' digests
    found: ReshardedManifest | None = None  # it follows from what is known of the source, which is not asked for it


class Enclosure:
    """Staging memory for a source's own chunks, of which a selection is part. It is the `Destination` of what is read."""

    device = None

    def __init__(self, selection: Selection, vouched: Vouched) -> None:
        self.selection = selection
        self.digests: Sequence[int] = ()  # of each own chunk, as its publisher has made them
        self.is_digested = False
        self._vouched = vouched
        self._manifest: Manifest | None = None  # once it is known
        self._covers: Callable[[int], tuple[int, ...]] = lambda chunk: ()  # which own chunks lie where that one does
        self._memory = memoryview(b"")
        self._slots: dict[int, int] = {}  # by own chunk: which slot is its

    def learn(self, client: ReadClient) -> None:
        """Ask the source for its own grid. ReadFailure: it has not what was published. Errors as of `ReadClient`."""
        manifest: Manifest | None = self._vouched.found
        if manifest is None:
            blob = client.listed(digests=False)
            if id_of(blob) != self._vouched.grid:
                raise ReadFailure("corrupt", "the source has another manifest than its publisher's")
            manifest = Manifest.decode(blob)
        values, width = client.listed(digests=True), WIDTHS[manifest.digest]
        if len(values) != width * manifest.chunk_count or root_of_grid(manifest, values) != self._vouched.root:
            raise ReadFailure("corrupt", "the source has other digests than its publisher's")
        own = Covering.of([manifest.places(chunk) for chunk in range(manifest.chunk_count)])
        covers = own.covered(self.selection.chunks, COVERS_MAX)
        if covers is None:
            raise ReadFailure("refused", f"that selection touches more than {COVERS_MAX} of the source's own chunks")
        self._manifest, self.digests, self.is_digested = manifest, unpack(values, width), manifest.digest == "xxh3-64"
        self._covers = covers
        self._memory = memoryview(bytearray(SLOTS * max(manifest.sizes, default=0)))

    @property
    def _grid(self) -> Manifest:
        if self._manifest is None:
            raise NotShared("this transport does not say what a source's own chunks are: tcp does")
        return self._manifest

    @property
    def sizes(self) -> Sequence[int]:
        return self._grid.sizes

    def strips(self, chunk: int) -> tuple[Strip, ...]:
        return self._grid.places(chunk)

    @property
    def is_strided(self) -> bool:
        """As the source is, whose strips are known. Here each chunk is contiguous."""
        return isinstance(self._manifest, ReshardedManifest)

    def incoming(self, chunk: int) -> Generator[list[memoryview]]:
        view = self.buffer(chunk)
        for at in range(0, view.nbytes, BUFFER_BYTES):
            yield [view[at : at + BUFFER_BYTES]]

    def buffer(self, chunk: int) -> memoryview:
        first = self._slots[chunk] * (self._memory.nbytes // SLOTS)
        return self._memory[first : first + self.sizes[chunk]]

    def address(self, chunk: int) -> int:
        return address_of(self._memory) + self._slots[chunk] * (self._memory.nbytes // SLOTS)

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        return [(address_of(self._memory), self._memory.nbytes)] if self._memory.nbytes else []

    def take_slot(self, chunk: int) -> bool:
        """Give an own chunk a slot. False: none is free."""
        free = set(range(SLOTS)).difference(self._slots.values())
        if not free:
            return False
        self._slots[chunk] = free.pop()
        return True

    def free_slot(self, chunk: int) -> None:
        del self._slots[chunk]

    def pieces(self, chunks: Iterable[int]) -> Iterator[tuple[int, int, int, Block]]:
        """What own chunks have of these chunks of the selection: (own chunk, chunk, bytes of that before it, where it lies
        in the own chunk).
        """
        of: dict[int, list[int]] = {}
        for chunk in chunks:
            for own in self._covers(chunk):
                of.setdefault(own, []).append(chunk)
        for own, its in of.items():
            where = runs_in(self._grid.places(own))
            for chunk in its:
                at = 0
                for block in blocks(self.selection.chunks[chunk], REGIONS):
                    yield from ((own, chunk, before, part) for before, part in within(block, at, where))
                    at += block.nbytes

    def digest(self, view: memoryview) -> int:
        """Of these bytes, by the publisher's algorithm."""
        if self.is_digested:
            return xxhash.xxh3_64_intdigest(view)
        return int.from_bytes(hashlib.sha256(view).digest(), "big")


class EnclosingChannel:
    """See `transport.base.Channel`. Its chunks are the selection's. `inner`: reads the source's own into the `enclosure`.
    The chunk that a ReadFailure names is the source's own.
    """

    def __init__(self, inner: Channel, enclosure: Enclosure, destination: Destination) -> None:
        self._inner = inner
        self._enclosure = enclosure
        self._destination = destination
        self._asked: deque[int] = deque()
        self._room = memoryview(b"")  # for a group

    def __repr__(self) -> str:
        return f"<EnclosingChannel, {len(self._asked)} chunks asked for: {self._inner!r}>"

    def submit(self, chunks: Sequence[int]) -> None:
        self._asked.extend(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        """A group of chunks at a time, whatever `bytes_max`."""
        started, sizes = time.perf_counter(), self._destination.sizes
        if not self._asked:
            return Arrival((), 0.0, 0.0)
        rooms: dict[int, int] = {}  # where in the room each chunk of the group begins
        nbytes = 0
        while self._asked and (not rooms or nbytes + sizes[self._asked[0]] <= GROUP_BYTES):
            chunk = self._asked.popleft()
            rooms[chunk] = nbytes
            nbytes += sizes[chunk]
        if self._room.nbytes < nbytes:
            self._room = memoryview(bytearray(nbytes))
        taken = self._put_together(rooms, bytes_max)
        made: dict[int, int] = {}
        for chunk, at in rooms.items():
            view = self._room[at : at + sizes[chunk]]
            made[chunk] = self._enclosure.digest(view)
            self._write(chunk, view)
        seconds = time.perf_counter() - started
        return Arrival(list(made.items()), 0.0, seconds, made, excess_bytes=max(0, taken - nbytes))

    def _put_together(self, rooms: dict[int, int], bytes_max: int) -> int:
        """Fill the room. Returns how many bytes were read for that."""
        enclosure, taken = self._enclosure, 0
        wanted: dict[int, list[tuple[int, Block]]] = {}  # by own chunk: what goes where
        lacking = sum([self._destination.sizes[chunk] for chunk in rooms])
        for own, chunk, before, block in enclosure.pieces(rooms):
            wanted.setdefault(own, []).append((address_of(self._room) + rooms[chunk] + before, block))
            lacking -= block.nbytes
        if lacking > 0:  # less than nothing, where tensors share memory
            raise ReadFailure("refused", "that selection is not of this memory: its chunks do not enclose it")
        left = deque(sorted(wanted))
        while wanted:
            while left and enclosure.take_slot(left[0]):
                self._inner.submit([left.popleft()])
            try:
                answer = self._inner.receive(bytes_max)
            except ReadFailure as failure:
                failure.bytes_discarded += taken
                raise
            if isinstance(answer, Lacking):
                raise ReadFailure("refused", "it lacks a chunk of its own", bytes_discarded=taken)
            for own, _ in answer.chunks:
                view = enclosure.buffer(own)
                taken += view.nbytes
                made = answer.made.get(own)
                if (enclosure.digest(view) if made is None else made) != enclosure.digests[own]:
                    raise ReadFailure("corrupt", f"its own chunk {own} does not have its digest", own, taken)
                start = enclosure.address(own)
                for to, block in wanted.pop(own):
                    gather(block._replace(cells=[start + cell for cell in block.cells]), to)
                enclosure.free_slot(own)
        return taken

    def _write(self, chunk: int, view: memoryview) -> None:
        """Put a chunk of the selection where it belongs."""
        destination, at = self._destination, 0
        if destination.device is not None:
            room = destination.device.allocate(view.nbytes)
            copy_bytes(view, room)
            if isinstance(destination, Scattering):
                destination.scatter([chunk], room.address)
            return
        with closing(destination.incoming(chunk)) as calls:
            for each in (each for views in calls for each in views):
                copy_bytes(view[at : at + each.nbytes], each)
                at += each.nbytes

    def close(self) -> None:
        self._inner.close()
