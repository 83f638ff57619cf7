"""What the conformance suite reads in pieces: a selection of every form, and memory of many rows to
read it into.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import cache
from typing import Final

from tensorhub.cuda.device import Device, Spread
from tensorhub.layouts.reading import Reading, Selection, resharded
from tensorhub.memory.addresses import Bytes, copy_bytes
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.model.manifest import TensorDescription, build_manifest
from tensorhub.model.strips import Strip, straight

SIZES: Final = (1, 4096, 70_000, 3, 4096, 2**20, 5, 4096)  # bytes of each chunk of a source
CANARY: Final = 0xA5  # what a destination holds before anything arrives


def new_bytes(device: Device | None, nbytes: int) -> Bytes:
    """Memory of that device, or of the host, full of CANARY."""
    canaries = memoryview(bytearray([CANARY]) * nbytes)
    if device is None:
        return canaries
    made = device.allocate(nbytes)
    copy_bytes(canaries, made)
    return made


def bytes_of(memory: Bytes) -> bytes:
    """A copy of them, wherever they are."""
    found = memoryview(bytearray(memory.nbytes))
    if memory.nbytes:
        copy_bytes(memory, found)
    return bytes(found)


@cache
def strided_content(chunk: int) -> bytes:
    """Of a source that is read in pieces: no two of them are alike."""
    return random.Random(chunk).randbytes(SIZES[chunk])


SELECTION: Final = Selection(
    (
        (Strip(5, 100, 0, 0, 1, ((2000, 400),), 176),),
        (Strip(5, 0, 0, 0, 1, ((200, 5000),), 2048),),
        (Strip(5, 7, 0, 0, 1, ((100, 10_000),), 4096),),
        (Strip(5, 1, 0, 0, 1, ((10, 100_000),), 65_536),),
        (
            straight(2, 9, 60_000),
            Strip(5, 40, 0, 0, 1, ((50, 9000),), 300),
            straight(6, 0, 5),
            straight(1, 1, 4000),
        ),
        (Strip(5, 3, 0, 0, 1, ((4, 200_000), (9, 3000), (11, 130)), 48),),
        (Strip(4, 2, 3, 90, 2, (), 4000),),  # of two regions
        (Strip(5, 600_000, 0, -5000, 90, ((3, 700),), 650),),  # backward
        (straight(0, 0, 1),),
        (straight(5, 0, 2**20),),
    )
)
# of runs of 2 KiB and more
LONG: Final = Selection((*SELECTION.chunks[1:4], SELECTION.chunks[6], *SELECTION.chunks[8:]))
# a source's chunks, of each of these
OF: Final = ((5,), (5,), (5,), (5,), (1, 2, 5, 6), (5,), (4, 7), (5,), (0,), (5,))
# of the reader's rows: bytes, bytes apart
PITCHES: Final = ((1000, 1024), (176, 300), (20_000, 20_001), (2**20, 2**20))


@cache
def selected(selection: Selection, chunk: int) -> bytes:
    places = [(strip.run, *place) for strip in selection.chunks[chunk] for place in strip.places()]
    return b"".join([strided_content(region)[at : at + run] for run, region, at in places])


class StridedTarget:
    """Memory full of CANARY for the chunks of a selection, in rows that have a pitch. `pass_point`:
    see `_Tear`.
    """

    def __init__(
        self,
        device: Device | None = None,
        pass_point: Callable[[], object] = lambda: None,
        selection: Selection = SELECTION,
    ) -> None:
        places: list[tuple[Strip, ...]] = []
        end = 1
        for chunk, size in enumerate(selection.sizes):
            row, apart = PITCHES[chunk % len(PITCHES)]
            rows, rest = divmod(size, row)
            strips = [Strip(0, end, 0, 0, 1, ((rows, apart),), row)] if rows else []
            places.append(
                (*strips, straight(0, end + rows * apart, rest)) if rest else tuple(strips)
            )
            end += (rows + 1) * apart
        own = build_manifest(
            [TensorDescription("t", "uint8", (end,), 1 << 40, end)], 2**20, "xxh3-64"
        )
        manifest = resharded(
            own, "xxh3-64", 2**20, Reading(tuple(places), selection.sizes, ()), "conformance"
        )
        self._bytes = new_bytes(device, end)
        self.memory = ChunkMemory(manifest, [self._bytes])
        self.is_digested, self.is_strided = True, True
        self.sizes: Sequence[int] = selection.sizes
        self.device = device
        self.spans: Sequence[tuple[int, int]] = ()
        self._pass_point = pass_point

    def strips(self, chunk: int) -> tuple[Strip, ...]:
        return self.memory.strips(chunk)

    def incoming(self, chunk: int) -> Generator[list[memoryview]]:
        with contextlib.closing(self.memory.incoming(chunk)) as calls:
            for views in calls:
                self._pass_point()
                yield views

    def take_in(
        self, chunks: Sequence[int], at: int, gathered: Sequence[Spread] = ()
    ) -> Mapping[int, int]:
        self._pass_point()
        return self.memory.take_in(chunks, at, gathered)

    def buffer(self, chunk: int) -> memoryview:
        raise AssertionError("a chunk of a strided destination has no buffer")

    def address(self, chunk: int) -> int:
        raise AssertionError("a chunk of a strided destination has no address")

    def holds(self, chunk: int) -> bytes:
        places = [
            (strip.run, at) for strip in self.memory.strips(chunk) for _, at in strip.places()
        ]
        held = bytes_of(self._bytes)
        return b"".join([held[at : at + run] for run, at in places])

    def is_untouched_beside(self, named: Iterable[int]) -> bool:
        """Whether all bytes outside these chunks are unchanged."""
        left = bytearray(bytes_of(self._bytes))
        for chunk in named:
            for strip in self.memory.strips(chunk):
                for _, at in strip.places():
                    left[at : at + strip.run] = bytes([CANARY]) * strip.run
        return set(left) == {CANARY}
