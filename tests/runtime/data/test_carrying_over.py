"""What a fill that was broken off has left of a content, in the chunks of another grid over the same memory."""

from __future__ import annotations

from itertools import count

import pytest

from tensorhub.layouts.joining import publication_of, reading_for
from tensorhub.layouts.published import Published
from tensorhub.layouts.reading import ReshardedManifest
from tensorhub.layouts.views import source
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.types import ContentId, RegistrationId
from tests.worker.test_layouts import CHUNK_BYTES, columns, shard_of

R, C = RegistrationId("r"), ContentId("content")
ROWS = 2048
NBYTES = (ROWS + 8) * 8  # of the reader's region: the last rows are nobody's


def grid(*ends: int) -> ReshardedManifest:
    """That of a reader of columns, from ranks that end at these rows."""
    w, starts = source("w", shape=(ROWS, 16)), (0, *ends[:-1])
    cuts = list(zip(starts, ends, strict=True))
    shards = [shard_of(rank, {"w": w[a:b]}, w=b - a) for rank, (a, b) in enumerate(cuts)]
    parts = {name: part for each in shards if each.manifest for name, part in each.parts(each.manifest).items()}
    published = Published("xxh3-64", CHUNK_BYTES, tuple([each.part_ids for each in shards]))
    reader = columns()
    assert reader.manifest is not None
    assert reader.declared is not None
    return reading_for(published, publication_of(published, parts), reader.manifest, reader.declared)


ONE, OTHER = grid(1024, ROWS), grid(700, 1400, ROWS)
TRUE = bytes(n * 7 % 251 for n in range(NBYTES))


def bytes_of(manifest: ReshardedManifest, chunk: int) -> set[int]:
    return {at + n for strip in manifest.places(chunk) for _, at in strip.places() for n in range(strip.run)}


def broken_off(chunks: tuple[int, ...], region: bytearray) -> SharedOwner:
    """A fill in the one grid that has so many chunks; the memory is open for the other one."""
    owner, memory, numbers = SharedOwner(), ChunkMemory(ONE, [memoryview(region)]), count(1)
    owner.open(R, next(numbers), C, memory, complete=False)
    for chunk in chunks:
        for at in bytes_of(ONE, chunk):
            region[at] = TRUE[at]
        owner.mark_available(R, 1, [(chunk, memory.digest(chunk))])
    owner.fence(R)
    return owner


@pytest.mark.parametrize("chunks", [(), (0,), (0, 1), (1, 2), (0, 1, 2, 3)], ids=str)
def test_a_chunk_is_there_once_each_byte_of_it_is(chunks: tuple[int, ...]) -> None:
    region = bytearray(NBYTES)
    owner, memory = broken_off(chunks, region), ChunkMemory(OTHER, [memoryview(region)])
    owner.open(R, 2, C, memory, complete=False)
    there = {at for chunk in chunks for at in bytes_of(ONE, chunk)}
    expected = [chunk for chunk in range(OTHER.chunk_count) if bytes_of(OTHER, chunk) <= there]
    assert owner.carry_over(R, 2, lambda: None) == expected
    assert [chunk for first, n in owner.has(R, 2, 100) for chunk in range(first, first + n)] == expected
    digests = owner.digests(R, 2)
    assert digests is not None
    assert [digests[chunk] for chunk in expected] == [memory.digest(chunk) for chunk in expected]
    assert len(expected) < OTHER.chunk_count or len(chunks) == ONE.chunk_count
    assert owner.carry_over(R, 2, lambda: None) == []


def test_what_was_written_since_is_not() -> None:
    region = bytearray(NBYTES)
    owner = broken_off((0, 1, 2, 3), region)
    region[0] ^= 1
    owner.open(R, 2, C, ChunkMemory(OTHER, [memoryview(region)]), complete=False)
    spoilt = bytes_of(ONE, 0)
    assert owner.carry_over(R, 2, lambda: None) == [n for n in range(OTHER.chunk_count) if not bytes_of(OTHER, n) & spoilt]


def test_other_memory_or_another_content_has_nothing_of_it() -> None:
    region = bytearray(NBYTES)
    owner = broken_off((0, 1, 2, 3), region)
    owner.open(R, 2, C, ChunkMemory(OTHER, [memoryview(bytearray(region))]), complete=False)
    assert owner.carry_over(R, 2, lambda: None) == []
    owner = broken_off((0, 1, 2, 3), region)
    owner.open(R, 2, ContentId("another"), ChunkMemory(OTHER, [memoryview(region)]), complete=False)
    assert owner.carry_over(R, 2, lambda: None) == []


def test_who_has_other_bytes_of_the_same_memory_has_nothing_of_it() -> None:
    """Plain chunks, with the padding."""
    region, plain = bytearray(NBYTES), columns().manifest
    assert plain is not None
    owner = broken_off((0, 1, 2, 3), region)
    owner.open(R, 2, C, ChunkMemory(plain, [memoryview(region)]), complete=False)
    assert owner.carry_over(R, 2, lambda: None) == []
