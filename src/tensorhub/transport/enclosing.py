"""Enclosing reads: a selection's chunks are verified by the source's own chunks that enclose them.

Nobody whose word counts has digested that selection, but each chunk of the source's own grid has its publisher's digest. So
those chunks are read whole into staging memory and verified, and the bytes that are wanted are taken out of them:

      own chunks of the source    │ . . x x . . │ . . x x . . │ . . x x . . │      x: a chunk of the selection
                                    read whole, verified, and let go one after the other

The source says its manifest and its list of digests. They must have the id and the root that the coordinator has named. So a
source that lies is found out before a byte of it is written anywhere else.

A lane has SLOTS own chunks in staging memory, and room for the chunks of the selection that it is putting together. The rest
of what is read is excess, and counted. Not responsible for when a read must enclose: the coordinator decides that.
"""

from __future__ import annotations

import hashlib
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from typing import NamedTuple

import xxhash

from tensorhub.digests import WIDTHS, root_of, unpack
from tensorhub.layouts.reading import Selection
from tensorhub.manifest import Manifest, id_of
from tensorhub.memory.addresses import address_of, copy_bytes
from tensorhub.memory.strided import Block, blocks, bounds, gather
from tensorhub.strips import Strip
from tensorhub.transport.base import Arrival, Channel, Destination, Lacking, NotShared, ReadFailure, Scattering
from tensorhub.transport.read_client import ReadClient

SLOTS = 2  # own chunks of a source in staging memory: one comes while the other one is taken apart
GROUP_BYTES = 16 * 2**20  # of the selection's chunks that are put together at a time, unless one is larger


class Vouched(NamedTuple):
    """What a source's own grid must be."""

    manifest_id: str
    root: bytes  # of its chunks' digests


class Enclosure:
    """Staging memory for a source's own chunks, of which a selection is part. It is the `Destination` of what is read."""

    device = None
    is_strided = False

    def __init__(self, selection: Selection, vouched: Vouched) -> None:
        self.selection = selection
        self.digests: Sequence[int] = ()  # of each own chunk, as its publisher has made them
        self.is_digested = False
        self._vouched = vouched
        self._manifest: Manifest | None = None  # once it is known
        self._starts: tuple[int, ...] = ()  # of each own chunk, where all regions lie one behind the other; and their end
        self._bases: tuple[int, ...] = ()  # of each region there
        self._memory = memoryview(b"")
        self._slots: dict[int, int] = {}  # by own chunk: which slot is its

    def learn(self, client: ReadClient) -> None:
        """Ask the source for its own grid. ReadFailure: it has not what was published. Errors as of `ReadClient`."""
        blob = client.listed(digests=False)
        if id_of(blob) != self._vouched.manifest_id:
            raise ReadFailure("corrupt", "the source has another manifest than its publisher's")
        manifest = Manifest.decode(blob)
        values, width = client.listed(digests=True), WIDTHS[manifest.digest]
        if root_of(values) != self._vouched.root or len(values) != width * manifest.chunk_count:
            raise ReadFailure("corrupt", "the source has other digests than its publisher's")
        if fault := self.selection.fault([region.nbytes for region in manifest.regions]):
            raise ReadFailure("refused", f"that selection is not of this memory: {fault}")
        self._manifest, self.digests, self.is_digested = manifest, unpack(values, width), manifest.digest == "xxh3-64"
        self._starts = tuple(accumulate(manifest.sizes, initial=0))
        self._bases = tuple(accumulate([region.nbytes for region in manifest.regions], initial=0))
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

    def incoming(self, chunk: int) -> Generator[list[memoryview]]:
        raise NotImplementedError("its chunks are contiguous")

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

    def pieces(self, chunk: int) -> Iterator[tuple[int, int, Block]]:
        """What own chunks have of a chunk of the selection: (own chunk, bytes of the selection's chunk before it, where it
        lies in that own chunk).
        """
        at = 0
        for block in blocks(self.selection.chunks[chunk], self._bases):
            for own, before, part in _within_one(block, at, self._starts):
                cells = [cell - self._starts[own] for cell in part.cells]
                yield own, before, part._replace(cells=cells)
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
        for chunk, at in rooms.items():
            for own, before, block in enclosure.pieces(chunk):
                wanted.setdefault(own, []).append((address_of(self._room) + at + before, block))
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
                destination.scatter(chunk, room.address)
            return
        with closing(destination.incoming(chunk)) as calls:
            for each in (each for views in calls for each in views):
                copy_bytes(view[at : at + each.nbytes], each)
                at += each.nbytes

    def close(self) -> None:
        self._inner.close()


def _within_one(block: Block, at: int, starts: Sequence[int]) -> Iterator[tuple[int, int, Block]]:
    """The bytes of a block, in parts each of which lies within one of the ranges that begin at these addresses: (range,
    bytes before it, part). `at`: bytes before the block.
    """
    cells, loops, run, nbytes = block
    each, (below, above), n = nbytes // len(cells), bounds(block), 0
    while n < len(cells):
        cell, before = cells[n], at + n * each
        own = bisect_right(starts, cell + below) - 1
        first, end = starts[own], starts[own + 1]
        if cell + above <= end:
            m = n + 1
            while m < len(cells) and first <= cells[m] + below and cells[m] + above <= end:
                m += 1
            yield own, before, Block(cells[n:m], loops, run, (m - n) * each)
            n = m
            continue
        if loops:
            (times, apart), *inner = loops
            yield from _within_one(Block([cell + i * apart for i in range(times)], tuple(inner), run, each), before, starts)
        else:
            head = end - cell
            yield own, before, Block((cell,), (), head, head)
            yield from _within_one(Block((cell + head,), (), run - head, run - head), before + head, starts)
        n += 1
