"""Strided copies move the bytes that the strips name, in their order, and no others."""

from __future__ import annotations

import hashlib
import mmap
import os
import random
from pathlib import Path

import pytest
import xxhash

from tensorhub.errors import StateError
from tensorhub.layouts.reading import Reading, Selection, resharded
from tensorhub.memory import chunks
from tensorhub.memory.addresses import address_of, copy_bytes
from tensorhub.memory.chunks import ChunkMemory, move_chunks
from tensorhub.memory.strided import (
    BLOCK_BYTES,
    BUFFER_BYTES,
    CALL_RUNS_MAX,
    LONG_RUN_BYTES,
    Stream,
    Strided,
    blocks,
    gather,
    runs,
)
from tensorhub.model.manifest import Digest, TensorDescription, build_manifest
from tensorhub.model.strips import Strip, straight
from tensorhub.testing.strided_target import bytes_of
from tests.cuda.double import Double

MiB = 2**20


class Regions:
    """Some regions of random bytes."""

    def __init__(self, *sizes: int, seed: int = 0) -> None:
        chance = random.Random(seed)
        self.held = [bytearray(chance.randbytes(size)) for size in sizes]
        self.views = [memoryview(each) for each in self.held]
        self.strided = Strided(self.views, [address_of(view) for view in self.views])

    def bytes_of(self, strips: list[Strip]) -> bytes:
        """Run by run."""
        found = [(strip.run, place) for strip in strips for place in strip.places()]
        return b"".join([bytes(self.held[region][at : at + run]) for run, (region, at) in found])


STRIPS = {
    "one run": [straight(0, 7, 5)],
    "short runs": [Strip(0, 3, 0, 0, 1, ((5000, 300),), 176)],
    "one run more than a call takes": [Strip(0, 3, 0, 0, 1, ((CALL_RUNS_MAX + 1, 300),), 20)],
    "2 KiB": [Strip(0, 0, 0, 0, 1, ((700, 4096),), 2048)],
    "long runs": [Strip(0, 0, 0, 0, 1, ((30, 70_000),), 65_536)],
    "one long run": [straight(1, 11, 3 * MiB - 11)],
    "loops": [Strip(0, 5, 0, 0, 1, ((7, 100_000), (1, 9), (11, 5000), (13, 64)), 17)],
    "backward": [Strip(0, 900_000, 0, -1000, 800, ((3, 32),), 9)],
    "regions": [Strip(0, 5, 2, 100, 3, ((10, 50),), 20), Strip(4, 0, -1, 1, 5, (), 64)],
    "the same again": [Strip(2, 9, 0, 0, 4, ((3, 0),), 30)],
    "a mix": [
        straight(2, 0, 100),
        Strip(0, 0, 0, 0, 1, ((20, 80_000),), LONG_RUN_BYTES),
        Strip(0, 40_000, 0, 0, 1, ((4000, 500),), 400),
        straight(1, 0, 2 * MiB + 1),
        straight(3, 5, 6),
    ],
    "by turns": [
        each for n in range(9) for each in (straight(1, n * MiB // 4, 100_000), straight(2, n, 3))
    ],
}
KINDS = tuple(STRIPS)
SIZES = (3 * MiB, 3 * MiB, 5000, 5000, 5000)
TENSORS = [
    TensorDescription(f"t{n}", "uint8", (size,), (n + 1) << 40, size)
    for n, size in enumerate(SIZES)
]


@pytest.mark.parametrize("call_bytes", [BUFFER_BYTES, 64 * 2**10, 16 * MiB])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_go_out_in_the_order_of_the_strips_and_come_in_where_they_belong(
    kind: str, call_bytes: int
) -> None:
    regions, target, strips = Regions(*SIZES), Regions(*SIZES, seed=1), STRIPS[kind]
    calls = [b"".join(views) for views in regions.strided.outgoing(strips, call_bytes)]
    assert b"".join(calls) == regions.bytes_of(strips)
    assert max(map(len, calls)) <= max(call_bytes, BLOCK_BYTES)
    expected = Regions(*SIZES, seed=1).held
    for strip in strips:
        for region, at in strip.places():
            expected[region][at : at + strip.run] = regions.held[region][at : at + strip.run]
    incoming = target.strided.incoming(strips, call_bytes)
    for out, views in zip(regions.strided.outgoing(strips, call_bytes), incoming, strict=True):
        for view, mine in zip(views, out, strict=True):
            view[:] = mine
    assert target.held == expected


def test_nothing_is_written_once_it_is_given_up() -> None:
    target, strips = Regions(*SIZES), STRIPS["short runs"]
    before = [bytes(each) for each in target.held]
    incoming = target.strided.incoming(strips)
    for view in next(incoming):
        view[:] = bytes(view.nbytes)
    incoming.close()
    assert [bytes(each) for each in target.held] == before


def mapped(path: Path, regions: Regions) -> Strided:
    """These regions in a file that is mapped."""
    path.write_bytes(b"".join(regions.held))
    views, at = list[memoryview](), 0
    with path.open("rb") as file:
        whole = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
    for each in regions.held:
        views.append(whole[at : at + len(each)])
        at += len(each)
    return Strided(views, [address_of(view) for view in views])


@pytest.mark.parametrize("kind", KINDS)
def test_a_files_bytes_go_out_through_the_kernel(tmp_path: Path, kind: str) -> None:
    regions, strips = Regions(*SIZES), STRIPS[kind]
    held = mapped(tmp_path / "file", regions)
    assert b"".join([b"".join(views) for views in held.outgoing(strips)]) == regions.bytes_of(
        strips
    )


@pytest.mark.parametrize("kind", ["short runs", "long runs", "one long run"])
def test_a_file_that_was_made_shorter_ends_no_process(tmp_path: Path, kind: str) -> None:
    held = mapped(tmp_path / "file", Regions(*SIZES))
    os.truncate(tmp_path / "file", MiB // 2)
    with pytest.raises(StateError, match="was made shorter"):
        for _ in held.outgoing(STRIPS[kind]):
            pass


def test_blocks_are_small() -> None:
    strips = [
        straight(0, 0, 2 * MiB),
        Strip(0, 0, 0, 0, 1, ((3, MiB), (1000, 1000)), 900),
        Strip(0, 0, 0, 8, 50_000, (), 8),
    ]
    made = list(blocks(strips, [0]))
    assert sum(block.nbytes for block in made) == sum(strip.nbytes for strip in strips)
    assert max(block.nbytes for block in made) <= BLOCK_BYTES
    assert len(made) < 40


def resharded_memory(
    strips: list[tuple[Strip, ...]], digest: Digest = "xxh3-64"
) -> tuple[ChunkMemory, Regions]:
    regions = Regions(*SIZES)
    manifest = build_manifest(TENSORS, MiB, "none")
    sizes = tuple([sum([strip.nbytes for strip in chunk]) for chunk in strips])
    made = resharded(manifest, digest, MiB, Reading(tuple(strips), sizes, ()), "grid")
    return ChunkMemory(made, regions.views), regions


CHUNKS = [tuple(STRIPS[kind]) for kind in KINDS]


def test_digests_are_of_the_bytes_in_their_order() -> None:
    memory, regions = resharded_memory(CHUNKS)
    expected = [xxhash.xxh3_64_intdigest(regions.bytes_of(list(strips))) for strips in CHUNKS]
    assert memory.digests(range(len(CHUNKS))) == expected
    assert [memory.digest(chunk) for chunk in range(len(CHUNKS))] == expected
    longer, _ = resharded_memory(CHUNKS, "sha-256")
    assert longer.digest(1) == int.from_bytes(
        hashlib.sha256(regions.bytes_of(list(CHUNKS[1]))).digest(), "big"
    )
    none, _ = resharded_memory(CHUNKS, "none")
    assert none.digests([0, 1]) == [0, 0]


def test_a_selection_is_another_grid_over_the_same_bytes() -> None:
    regions = Regions(*SIZES)
    memory = ChunkMemory(build_manifest(TENSORS, MiB, "xxh3-64"), regions.views)
    selection = Selection(tuple(CHUNKS))
    assert not memory.fault(selection)
    selected = memory.selected(selection)
    assert tuple(selected.sizes) == selection.sizes
    assert b"".join(
        [bytes(view) for views in selected.outgoing(3) for view in views]
    ) == regions.bytes_of(list(CHUNKS[3]))
    assert memory.fault(Selection(((straight(4, 5000, 1),),)))
    with pytest.raises(StateError, match="contiguous"):
        memory.outgoing(0)


def test_a_selection_of_huge_chunks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner gathers each in memory of its device, for each connection."""
    monkeypatch.setattr(chunks, "SELECTED_CHUNK_BYTES_MAX", 1000)
    described = [TensorDescription("t", "uint8", (100_000,), 1 << 40, 100_000)]
    memory = ChunkMemory(build_manifest(described, 4096, "none"), [memoryview(bytearray(100_000))])
    assert not memory.fault(Selection(((straight(0, 0, 16 * 4096),),)))
    assert "more than 65536 bytes" in memory.fault(Selection(((straight(0, 0, 16 * 4096 + 1),),)))


def test_chunks_of_regions_that_are_not_read() -> None:
    memory, regions = resharded_memory(
        [(straight(0, 0, 9),), (Strip(1, 0, 1, 0, 2, (), 4),), (straight(4, 0, 9),)]
    )
    views = [*regions.views[:2], memoryview(bytearray()), *regions.views[3:]]
    assert memory.unwanted == ()
    reading = Reading(tuple([memory.strips(n) for n in range(3)]), tuple(memory.sizes), ())
    partial = resharded(build_manifest(TENSORS, MiB, "none"), "xxh3-64", MiB, reading, "grid")
    assert ChunkMemory(partial, views, frozenset({2})).unwanted == (1,)


def test_chunks_move_between_two_memories_of_one_grid() -> None:
    (memory, _), (other, held) = resharded_memory(CHUNKS), resharded_memory(CHUNKS)
    for each in held.held:
        each[:] = bytes(len(each))
    move_chunks(memory, other, range(len(CHUNKS)))
    assert other.digests(range(len(CHUNKS))) == memory.digests(range(len(CHUNKS)))


def test_a_stream_gives_as_many_bytes_as_are_wanted() -> None:
    chance = random.Random(3)
    for kind in KINDS:
        regions, strips = Regions(*SIZES), STRIPS[kind]
        addresses = [address_of(view) for view in regions.views]
        for sizes in ((1,), (7, 1000, 176), (BLOCK_BYTES,), (chance.randrange(1, 5000), 100_000)):
            stream, expected = Stream(blocks(strips, addresses)), regions.bytes_of(strips)
            left, got, turn = min(len(expected), 300_000), bytearray(), 0
            while left:
                nbytes = min(left, sizes[turn % len(sizes)] if turn < 200 else left)
                taken, room = stream.take(nbytes), bytearray(nbytes)
                assert sum(block.nbytes for block in taken) == nbytes
                at = address_of(memoryview(room))
                for block in taken:
                    assert [len(runs(block)) * block.run] == [block.nbytes]
                    gather(block, at)
                    at += block.nbytes
                got += room
                left, turn = left - nbytes, turn + 1
            assert bytes(got) == expected[: len(got)]
    with pytest.raises(ValueError, match="more are wanted"):
        Stream(blocks([straight(0, 0, 5)], [0])).take(6)


def on_device(device: Double) -> tuple[ChunkMemory, ChunkMemory]:
    """The same chunks in host memory and on a device."""
    memory, regions = resharded_memory(
        [chunk for chunk in CHUNKS if chunk != tuple(STRIPS["the same again"])]
    )
    held = [device.bytes_of(bytearray(each)) for each in regions.held]
    strips = [memory.strips(chunk) for chunk in range(len(memory.sizes))]
    reading = Reading(tuple(strips), tuple(memory.sizes), ())
    made = resharded(build_manifest(TENSORS, MiB, "none"), "xxh3-64", MiB, reading, "grid")
    return memory, ChunkMemory(made, held)


def test_a_device_gathers_and_scatters_within_itself() -> None:
    device = Double()
    memory, there = on_device(device)
    chunks = range(len(memory.sizes))
    assert there.digests(chunks) == memory.digests(chunks)
    with pytest.raises(StateError, match="on a device"):
        there.incoming(0)
    room = device.allocate(there.sizes[1])
    there.gather([1], room.address)
    changed = bytes_of(room)[::-1]
    copy_bytes(memoryview(bytearray(changed)), room)
    there.scatter([1], room.address)
    assert there.digest(1) == xxhash.xxh3_64_intdigest(changed)


def test_chunks_move_between_a_device_and_the_host() -> None:
    memory, there = on_device(Double())
    other, held = resharded_memory([memory.strips(chunk) for chunk in range(len(memory.sizes))])
    for each in held.held:
        each[:] = bytes(len(each))
    chunks = range(len(memory.sizes))
    move_chunks(there, other, chunks)
    assert other.digests(chunks) == memory.digests(chunks)
