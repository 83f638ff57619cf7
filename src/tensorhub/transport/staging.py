"""Staging: bytes of a GPU go through page-locked buffers to or from a socket, or a device that does
not reach the GPU.

The GPU copies one buffer while another one is on the wire. So each connection uses a few MiB of
host memory, however much is sent. Responsible for the buffers, and for waiting until a copy is done
before its bytes, or its buffer, are used. Not responsible for the bytes' meaning, nor for digests,
which the GPU makes.
"""

from __future__ import annotations

import mmap
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager

from tensorhub.cuda.copies import copy
from tensorhub.cuda.device import Device, DeviceBytes, Mark
from tensorhub.memory.addresses import address_of
from tensorhub.memory.strided import Block, Stream, gather

# of one buffer: a copy takes some 0.1 ms over PCIe 5, much longer than it takes to start
PIECE_BYTES = 4 * 2**20

Place = tuple[int, int]
"""(address, bytes) on the device."""


class Staging:
    """The buffers of one connection, for its thread."""

    def __init__(self, device: Device, piece_bytes: int = 0, buffers: int = 2) -> None:
        """`piece_bytes`: of a buffer, if not PIECE_BYTES. StateError: there is no such memory."""
        self.device = device
        self.piece_bytes = piece_bytes or PIECE_BYTES
        self.buffers = tuple([device.pinned(self.piece_bytes) for _ in range(buffers)])
        self._queue = device.queue()
        self._next = 0  # the buffer for the next piece that goes out
        self._room: DeviceBytes | None = None

    def room(self, nbytes: int) -> int:
        """The address of so many bytes on the device, in which chunks of several pieces are in one
        piece for a moment. StateError: there is no such memory.
        """
        if self._room is None or self._room.nbytes < nbytes:
            self._room = self.device.allocate(nbytes)
        return self._room.address

    def outgoing(self, places: Sequence[Place]) -> Generator[memoryview]:
        """The bytes at these places, in order, in pieces. When the caller asks for the next piece,
        all buffers but two may still be in use. Once the generator is closed, none of the places is
        read.
        """
        pieces = cut_up(places, self.piece_bytes)
        ahead = self._fetch(next(pieces, None))
        try:
            while ahead is not None:
                view, mark = ahead
                ahead = self._fetch(next(pieces, None))
                mark.wait()
                yield view
        finally:
            if ahead is not None:
                ahead[1].wait()

    def _fetch(self, piece: Sequence[Place] | None) -> tuple[memoryview, Mark] | None:
        """Begin to copy a piece into the next buffer."""
        if piece is None:
            return None
        buffer, self._next = self._next, (self._next + 1) % len(self.buffers)
        for here, (address, nbytes) in self._parts(piece, buffer):
            copy(self._queue, here, address, nbytes)
        return self.buffers[buffer][: _bytes_of(piece)], self._queue.mark()

    def incoming(self, places: Sequence[Place]) -> Generator[memoryview]:
        """Room for the bytes to come, piece by piece. The caller fills a piece before it asks for
        the next one. At the end all bytes are at their places. Once the generator is closed,
        nothing is written there.
        """
        marks: list[Mark | None] = [None, None]
        half = 0
        try:
            for piece in cut_up(places, self.piece_bytes):
                if (mark := marks[half]) is not None:
                    mark.wait()
                yield self.buffers[half][: _bytes_of(piece)]
                for here, (address, nbytes) in self._parts(piece, half):
                    copy(self._queue, address, here, nbytes)
                marks[half] = self._queue.mark()
                half ^= 1
        finally:
            for mark in marks:
                if mark is not None:
                    mark.wait()

    def scatter(self, pieces: Sequence[tuple[int, int, int]]) -> None:
        """Copy these (to, from, bytes) out of the buffers to the device, and wait."""
        try:
            for piece in pieces:
                copy(self._queue, *piece)
        finally:
            self._queue.mark().wait()

    def _parts(self, piece: Sequence[Place], buffer: int) -> Iterator[tuple[int, Place]]:
        """Each part of a piece, with its address in that buffer."""
        here = address_of(self.buffers[buffer])
        for place in piece:
            yield here, place
            here += place[1]


class Packing:
    """Buffers of the host, through which many pieces of its own memory go to a device that reads
    memory in one piece.
    """

    device = None

    def __init__(self, buffers: int) -> None:
        self.piece_bytes = PIECE_BYTES
        self.buffers = tuple([memoryview(mmap.mmap(-1, self.piece_bytes)) for _ in range(buffers)])
        self._next = 0

    def outgoing(self, made: Iterable[Block], nbytes: int) -> Generator[memoryview]:
        """So many bytes of these blocks, in pieces. When the caller asks for the next piece, all
        buffers but one may be in use.
        """
        stream = Stream(made)
        while nbytes:
            view = self.buffers[self._next][: min(nbytes, self.piece_bytes)]
            self._next = (self._next + 1) % len(self.buffers)
            at = address_of(view)
            for block in stream.take(view.nbytes):
                gather(block, at)
                at += block.nbytes
            nbytes -= view.nbytes
            yield view


class Rooms:
    """Memory of a device, in which chunks of many pieces are in one piece for a moment. For several
    threads.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        """`nbytes`: of the bytes in use at a time. Each thread that needs such memory has so much
        of it.
        """
        self._device = device
        self._nbytes = nbytes
        self._free: list[DeviceBytes] = []

    @contextmanager
    def taken(self) -> Iterator[int]:
        """The address of memory that has no other use within the block. StateError: there is
        none.
        """
        try:
            room = self._free.pop()
        except IndexError:
            room = self._device.allocate(self._nbytes)
        try:
            yield room.address
        finally:
            self._free.append(room)


class Pinned:
    """A staging's buffers, as memory that can be registered (`verbs.Spanned`)."""

    device = None  # they are in host memory

    def __init__(self, staging: Staging | Packing) -> None:
        self.staging = staging
        self.spans = sorted([(address_of(buffer), buffer.nbytes) for buffer in staging.buffers])


def _bytes_of(piece: Sequence[Place]) -> int:
    return sum([nbytes for _, nbytes in piece])


def cut_up(places: Sequence[Place], piece_bytes: int) -> Iterator[list[Place]]:
    """The bytes in their order, `piece_bytes` at a time. Adjacent places become one, and none is
    empty.
    """
    piece: list[Place] = []
    room = piece_bytes
    for address, nbytes in places:
        while nbytes:
            taken = min(nbytes, room)
            if piece and sum(piece[-1]) == address:
                piece[-1] = (piece[-1][0], piece[-1][1] + taken)
            else:
                piece.append((address, taken))
            address, nbytes, room = address + taken, nbytes - taken, room - taken  # noqa: PLW2901
            if not room:
                yield piece
                piece, room = [], piece_bytes
    if piece:
        yield piece
