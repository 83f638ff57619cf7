"""Random layouts through the memory that transports read and write: what arrives is what gathering and slicing would give,
digests at either end agree, and nothing else is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from unittest.mock import patch

from hypothesis import given, settings, strategies as st

from tensorhub.layouts import Reading, Selection, reading_of
from tensorhub.layouts.resharded import resharded
from tensorhub.memory import strided
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.model.manifest import Manifest, RegionSpec
from tests.layouts.worlds import World, experts, world

BYTES = st.sampled_from([1, 16, 64, 4096])
LONG = st.sampled_from([1, 6, 2**14])  # from how many bytes on runs do not go through a buffer


def manifest_of(regions: Sequence[bytearray]) -> Manifest:
    return Manifest((), tuple([RegionSpec(len(region)) for region in regions]), 4096, "xxh3-64", "some")


def memory_of(regions: Sequence[bytearray], reading: Reading | None = None) -> ChunkMemory:
    manifest = manifest_of(regions)
    if reading is not None:
        manifest = resharded(manifest, "xxh3-64", 4096, reading, "grid")
    return ChunkMemory(manifest, [memoryview(region) for region in regions])


def moved(source: ChunkMemory, chunk: int, reader: ChunkMemory, into: int, call_bytes: int) -> None:
    """As a transport does it, with calls of other sizes at either end."""
    content = b"".join([bytes(view) for views in source.outgoing(chunk, call_bytes) for view in views])
    assert len(content) == source.sizes[chunk] == reader.sizes[into]
    at = 0
    for views in reader.incoming(into):
        for view in views:
            view[:] = content[at : at + view.nbytes]
            at += view.nbytes
    assert at == len(content)


def check(made: World, chunk_bytes: int, call_bytes: int) -> None:
    found = reading_of(made.publication, made.reader, chunk_bytes=chunk_bytes)
    reader = memory_of(made.memory.regions, found)
    for part in found.parts:
        source = memory_of(made.memories[part.shard].regions)
        selection = Selection.decode(part.selection.encode())
        assert not source.fault(selection)
        selected = source.selected(selection)
        for chunk, number in enumerate(part.chunks):
            moved(selected, chunk, reader, number, call_bytes)
        mine = reader.part(part.chunks)
        assert mine.digests(range(len(part.chunks))) == selected.digests(range(len(part.chunks)))
    assert [bytes(region) for region in made.memory.regions] == made.expected


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), BYTES, BYTES, LONG)
def test_what_arrives_is_what_gathering_and_slicing_would_give(
    random: Random, chunk_bytes: int, call_bytes: int, long: int
) -> None:
    with patch.object(strided, "LONG_RUN_BYTES", long):
        check(world(random), chunk_bytes, call_bytes)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False), BYTES, BYTES, LONG)
def test_so_it_is_with_many_like_tensors(random: Random, chunk_bytes: int, call_bytes: int, long: int) -> None:
    with patch.object(strided, "LONG_RUN_BYTES", long):
        check(experts(random), chunk_bytes, call_bytes)
