"""Bytes that follow strips, moved between strided memory and one contiguous buffer.

    long runs      are moved from or to where they are: a view of each goes into the call that sends or receives
    short runs     go through a buffer that stays in the core's own cache: one call copies thousands of them

Python's own code for strided buffers copies short runs, so nothing need be installed, and the price
hardly depends on how short they are. It keeps the GIL, so it copies BLOCK_BYTES at a time, which
takes some 30 microseconds.

A file's mapping is not touched here: if the file was truncated, that would end the process with
SIGBUS. All of its runs go through a buffer that the kernel fills, for which a missing page is an
error.

Responsible for host memory. Not responsible for errors about it, nor for digests.
"""  # noqa: E501 - a table

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import weakref
from array import array
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Final, NamedTuple

from tensorhub.errors import StateError
from tensorhub.memory.addresses import PyBuffer, address_of
from tensorhub.model.strips import Around, Strip

# and longer: what a view of it costs is small beside what moving it does
LONG_RUN_BYTES: Final = 16 * 2**10
BUFFER_BYTES: Final = 2**20  # a server's core has that in its own cache
BLOCK_BYTES: Final = 2**18  # that are copied in one call, with the GIL
BUFFERS_KEPT_MAX: Final = 16
CALL_RUNS_MAX: Final = 1024  # Linux' IOV_MAX


class Block(NamedTuple):
    """Cells that begin at these addresses, each of them loops around runs."""

    cells: Sequence[int]
    loops: Around
    run: int
    nbytes: int


def blocks(
    strips: Iterable[Strip], addresses: Sequence[int], nbytes_max: int = BLOCK_BYTES
) -> Iterator[Block]:
    """The bytes of these strips, in order, in blocks of at most so many. `addresses`: of the
    regions.
    """
    for region, offset, region_step, offset_step, length, around, run in strips:
        loops = tuple([loop for loop in around if loop[0] > 1])
        start = addresses[region] + offset
        if length > 1 and region_step:
            numbers = range(length)
            cells = [
                addresses[region + n * region_step] + offset + n * offset_step for n in numbers
            ]
        else:
            cells = [start]
            if length > 1:
                loops = ((length, offset_step), *loops)
        nbytes = prod([times for times, _ in loops]) * run
        if nbytes > nbytes_max:
            for cell in cells:
                yield from _cut(cell, loops, run, nbytes, nbytes_max)
        else:
            count = nbytes_max // nbytes
            for at in range(0, len(cells), count):
                some = cells[at : at + count]
                yield Block(some, loops, run, len(some) * nbytes)


def _cut(cell: int, loops: Around, run: int, nbytes: int, nbytes_max: int) -> Iterator[Block]:
    """One cell, in blocks of whole runs where those fit."""
    if nbytes <= nbytes_max:
        yield Block((cell,), loops, run, nbytes)
    elif not loops:
        for at in range(0, run, nbytes_max):
            part = min(nbytes_max, run - at)
            yield Block((cell + at,), (), part, part)
    else:
        (times, apart), *rest = loops
        inner, each = tuple(rest), nbytes // times
        count = max(1, nbytes_max // each)
        for at in range(0, times, count):
            some = min(count, times - at)
            yield from _cut(
                cell + at * apart,
                ((some, apart), *inner) if some > 1 else inner,
                run,
                some * each,
                nbytes_max,
            )


def runs(block: Block) -> Sequence[int]:
    """Where each of its runs begins."""
    # a list would cost more than short runs do
    if len(block.cells) == len(block.loops) == 1 and block.loops[0][1]:
        ((times, apart),), (cell,) = block.loops, block.cells
        return range(cell, cell + times * apart, apart)
    found = list(block.cells)
    for times, apart in block.loops:
        found = [at + n * apart for at in found for n in range(times)]
    return found


def bounds(block: Block) -> tuple[int, int]:
    """How far its bytes reach from where a cell begins: backward (0 or less), and forward."""
    reaches = [(times - 1) * apart for times, apart in block.loops]
    return sum([each for each in reaches if each < 0]), sum(
        [each for each in reaches if each > 0]
    ) + block.run


class Stream:
    """The bytes of blocks, in order, as many at a time as are wanted."""

    def __init__(self, made: Iterable[Block]) -> None:
        self._coming = iter(made)
        self._left: list[Block] = []  # of a block that was cut; the next one at the end

    def take(self, nbytes: int) -> list[Block]:
        """The next so many bytes. ValueError: there are fewer."""
        taken: list[Block] = []
        while nbytes:
            block = self._left.pop() if self._left else next(self._coming, None)
            if block is None:
                raise ValueError(f"{nbytes} bytes more are wanted than there are")
            if block.nbytes > nbytes:
                head, tail = _split(block, nbytes)
                self._left.extend(reversed(tail))
                taken += head
                break
            taken.append(block)
            nbytes -= block.nbytes
        return taken


def _split(block: Block, nbytes: int) -> tuple[list[Block], list[Block]]:
    """The first so many bytes of a block, and the rest."""
    cells, loops, run, total = block
    if len(cells) == 1 and not loops:
        (cell,) = cells
        return [Block(cells, (), nbytes, nbytes)], [
            Block((cell + nbytes,), (), total - nbytes, total - nbytes)
        ]
    if len(cells) > 1:
        each, inner = total // len(cells), loops
    else:
        (times, apart), inner = loops[0], loops[1:]
        each = total // times

    def part(first: int, count: int) -> list[Block]:
        if not count:
            return []
        if len(cells) > 1:
            return [Block(cells[first : first + count], inner, run, count * each)]
        return [
            Block(
                (cells[0] + first * apart,),
                ((count, apart), *inner) if count > 1 else inner,
                run,
                count * each,
            )
        ]

    count, left = divmod(nbytes, each)
    after = total // each - count
    if not left:
        return part(0, count), part(count, after)
    first, second = _split(part(count, 1)[0], left)
    return part(0, count) + first, second + part(count + 1, after - 1)


# --------------------------------------------------------------------------------------------------
# copying


_to_contiguous = ctypes.pythonapi.PyBuffer_ToContiguous
_to_contiguous.argtypes = (
    ctypes.c_void_p,
    ctypes.POINTER(PyBuffer),
    ctypes.c_ssize_t,
    ctypes.c_char,
)
_from_contiguous = ctypes.pythonapi.PyBuffer_FromContiguous
_from_contiguous.argtypes = (
    ctypes.POINTER(PyBuffer),
    ctypes.c_void_p,
    ctypes.c_ssize_t,
    ctypes.c_char,
)


def gather(block: Block, to: int) -> None:
    """Copy a block's bytes to that address, without gaps."""
    cells, loops, run, nbytes = block
    if not loops:
        for cell in cells:
            ctypes.memmove(to, cell, run)
            to += run
        return
    each, dimensions = nbytes // len(cells), len(loops) + 1
    shape = (ctypes.c_ssize_t * dimensions)(*[times for times, _ in loops], run)
    strides = (ctypes.c_ssize_t * dimensions)(*[apart for _, apart in loops], 1)
    view = PyBuffer(
        0,
        None,
        each,
        1,
        0,
        dimensions,
        b"B",
        ctypes.addressof(shape),
        ctypes.addressof(strides),
        None,
        None,
    )
    for cell in cells:
        view.address = cell
        _to_contiguous(to, view, each, b"C")
        to += each


def scatter(block: Block, source: int) -> None:
    """Copy contiguous bytes from that address to a block's places."""
    cells, loops, run, nbytes = block
    if not loops:
        for cell in cells:
            ctypes.memmove(cell, source, run)
            source += run
        return
    each, dimensions = nbytes // len(cells), len(loops)
    shape = (ctypes.c_ssize_t * dimensions)(*[times for times, _ in loops])
    strides = (ctypes.c_ssize_t * dimensions)(*[apart for _, apart in loops])
    view = PyBuffer(
        0,
        None,
        each,
        run,
        0,
        dimensions,
        b"B",
        ctypes.addressof(shape),
        ctypes.addressof(strides),
        None,
        None,
    )
    for cell in cells:
        view.address = cell
        _from_contiguous(view, source, each, b"C")
        source += each


class _Buffer:
    """BUFFER_BYTES, one thread's at a time."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(BUFFER_BYTES))
        self.address = address_of(self.view)

    def gather(self, block: Block, offset: int) -> None:
        """Copy a block's bytes to that offset. StateError: they cannot be read."""
        gather(block, self.address + offset)


class _KernelsBuffer(_Buffer):
    """One that the kernel fills."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("tensorhub")
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, BUFFER_BYTES)
        self.view = memoryview(mmap.mmap(self._descriptor, BUFFER_BYTES))
        self.address = address_of(self.view)

    def gather(self, block: Block, offset: int) -> None:
        starts = runs(block)
        for first in range(0, len(starts), CALL_RUNS_MAX):
            some = starts[first : first + CALL_RUNS_MAX]
            places = array("Q", [number for start in some for number in (start, block.run)])
            at, count = ctypes.c_void_p(places.buffer_info()[0]), ctypes.c_int(len(some))
            if (
                _pwritev(self._descriptor, at, count, ctypes.c_int64(offset))
                != len(some) * block.run
            ):
                raise StateError("the file that it is in was made shorter: publish it again")
            offset += len(some) * block.run


_pwritev = ctypes.CDLL(None).pwritev
_pwritev.restype = ctypes.c_ssize_t

_free: deque[_Buffer] = deque(maxlen=BUFFERS_KEPT_MAX)  # unused buffers; for all threads


@contextmanager
def _buffer() -> Iterator[_Buffer]:
    try:
        taken = _free.pop()
    except IndexError:
        taken = _Buffer()
    try:
        yield taken
    finally:
        _free.append(taken)


class Strided:
    """Regions of host memory, as `outgoing` and `incoming` bytes of strips."""

    def __init__(self, regions: Sequence[memoryview], addresses: Sequence[int]) -> None:
        self._regions = regions
        self._addresses = addresses
        self._is_file = any(region.readonly for region in regions)
        self._long_run_bytes = sys.maxsize if self._is_file else LONG_RUN_BYTES

    def outgoing(
        self, strips: Sequence[Strip], call_bytes: int = BUFFER_BYTES
    ) -> Iterator[list[memoryview]]:
        """Their bytes, in order, in views for one call each, of some `call_bytes` at most. Each
        list is good until the next one is asked for. StateError: they cannot be read.
        """
        # A kernel's buffer has descriptors, and is not kept.
        with nullcontext(_KernelsBuffer()) if self._is_file else _buffer() as buffer:
            for views, moves in self._calls(strips, buffer.view, call_bytes):
                for offset, block in moves:
                    buffer.gather(block, offset)
                yield views

    def incoming(
        self, strips: Sequence[Strip], call_bytes: int = BUFFER_BYTES
    ) -> Generator[list[memoryview]]:
        """Room for their bytes, in order. The caller fills all views of a list before it asks for
        the next one; then they go where they belong. Once the generator is closed, nothing is
        written.
        """
        with _buffer() as buffer:
            for views, moves in self._calls(strips, buffer.view, call_bytes):
                yield views
                for offset, block in moves:
                    scatter(block, buffer.address + offset)

    def _calls(
        self, strips: Sequence[Strip], buffer: memoryview, call_bytes: int
    ) -> Iterator[tuple[list[memoryview], list[tuple[int, Block]]]]:
        """Views, and the blocks that are to be where in the buffer."""
        views: list[memoryview] = []
        moves: list[tuple[int, Block]] = []
        begun = used = 0  # the buffer's part that has no view yet
        room = call_bytes
        for strip in strips:
            if strip.run >= self._long_run_bytes:
                for view in self._runs(strip, call_bytes):
                    if used > begun:
                        views.append(buffer[begun:used])
                        begun = used
                    if views and room < view.nbytes:
                        yield views, moves
                        views, moves, begun, used, room = [], [], 0, 0, call_bytes
                    views.append(view)
                    room -= view.nbytes
                continue
            for block in blocks([strip], self._addresses):
                if (views or used) and (room < block.nbytes or used + block.nbytes > buffer.nbytes):
                    if used > begun:
                        views.append(buffer[begun:used])
                    yield views, moves
                    views, moves, begun, used, room = [], [], 0, 0, call_bytes
                moves.append((used, block))
                used += block.nbytes
                room -= block.nbytes
        if used > begun:
            views.append(buffer[begun:used])
        if views:
            yield views, moves

    def _runs(self, strip: Strip, nbytes_max: int) -> Iterator[memoryview]:
        run = strip.run
        for region, offset in strip.places():
            view = self._regions[region]
            for at in range(0, run, nbytes_max):
                yield view[offset + at : offset + min(run, at + nbytes_max)]
