"""Bytes on a GPU on their way to or from a socket: through two page-locked buffers, one of which the GPU copies while the
wire has the other.

So a few MiB of host memory are in use for each connection, however much is sent. Responsible for buffers and for waiting
until a copy is done before its bytes are used, or its buffer again. Not responsible for what is sent, nor for digests: the
GPU makes those.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from tensorhub.cuda.device import Device, Mark
from tensorhub.transport.memory import address_of

PIECE_BYTES = 4 * 2**20  # of one buffer: some 0.1 ms over PCIe 5, which is much longer than starting a copy takes

Place = tuple[int, int]
"""(address, bytes) on the device."""


class Staging:
    """Of one connection, for its thread."""

    def __init__(self, device: Device, piece_bytes: int = PIECE_BYTES) -> None:
        self.device = device
        self._queue = device.queue()
        self._buffers = (device.pinned(piece_bytes), device.pinned(piece_bytes))
        self._piece_bytes = piece_bytes

    def __repr__(self) -> str:
        return f"<Staging for {self.device.name}: 2 x {self._piece_bytes} bytes>"

    def outgoing(self, places: Sequence[Place]) -> Generator[memoryview]:
        """The bytes there, in order, in pieces, each of which is whole until the next is asked for. Close it, and none of
        them is read any more.
        """
        pieces = cut_up(places, self._piece_bytes)
        half, ahead = 0, self._fetch(next(pieces, None), 0)
        try:
            while ahead is not None:
                view, mark = ahead
                half ^= 1
                ahead = self._fetch(next(pieces, None), half)  # whoever had that buffer has asked for more
                mark.wait()
                yield view
        finally:
            if ahead is not None:
                ahead[1].wait()

    def _fetch(self, piece: Sequence[Place] | None, half: int) -> tuple[memoryview, Mark] | None:
        """Begin to copy a piece into that buffer."""
        if piece is None:
            return None
        for here, (address, nbytes) in self._parts(piece, half):
            self._queue.copy(here, address, nbytes)
        return self._buffers[half][: _bytes_of(piece)], self._queue.mark()

    def incoming(self, places: Sequence[Place]) -> Generator[memoryview]:
        """Room for the bytes that come next, piece by piece, to be filled before the next is asked for. When it ends, all of
        them are at their places. Close it, and nothing is written there any more.
        """
        marks: list[Mark | None] = [None, None]
        half = 0
        try:
            for piece in cut_up(places, self._piece_bytes):
                if (mark := marks[half]) is not None:
                    mark.wait()
                yield self._buffers[half][: _bytes_of(piece)]
                for here, (address, nbytes) in self._parts(piece, half):
                    self._queue.copy(address, here, nbytes)
                marks[half] = self._queue.mark()
                half ^= 1
        finally:
            for mark in marks:
                if mark is not None:
                    mark.wait()

    def _parts(self, piece: Sequence[Place], half: int) -> Iterator[tuple[int, Place]]:
        """Each part of a piece, with its address in that buffer."""
        here = address_of(self._buffers[half])
        for place in piece:
            yield here, place
            here += place[1]


def _bytes_of(piece: Sequence[Place]) -> int:
    return sum([nbytes for _, nbytes in piece])


def cut_up(places: Sequence[Place], piece_bytes: int) -> Iterator[list[Place]]:
    """The same bytes in the same order, `piece_bytes` at a time; what is adjacent is one place, and none is empty."""
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
