"""What a worker keeps of deltas: whatever it finds makes the newest bytes, and it stays within its
room.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings, strategies as st

from tensorhub.memory.chunks import ChunkMemory
from tensorhub.model.accesses import Access
from tensorhub.runtime.data.deltas import VERSIONS_MAX, Deltas
from tensorhub.types import ContentId, RegistrationId
from tests.runtime.data_rig import manifest_of

pytest.importorskip("zstandard", reason="the extra delta is not installed")

CHUNK_BYTES = 4096
HERE = RegistrationId("r")
MANIFEST = manifest_of((4 * CHUNK_BYTES,), chunk_bytes=CHUNK_BYTES)
CHUNKS = MANIFEST.chunk_count
ALL = tuple(range(CHUNKS))


class Source:
    """A registration whose content changes; `contents`: each as it was, by generation."""

    def __init__(self, *, has_shadow: bool = True) -> None:
        self.bytes = bytearray(random.Random(0).randbytes(4 * CHUNK_BYTES))
        self.memory = ChunkMemory(MANIFEST, [memoryview(self.bytes)])
        self.deltas = Deltas()
        self.contents: list[bytes] = []
        self.is_publisher = has_shadow
        self.publish(())
        self.deltas.begin(HERE, self.memory, has_shadow=has_shadow)

    def publish(self, changes: Sequence[int]) -> None:
        for at in changes:
            self.bytes[at] = (self.bytes[at] + 1) % 256
        self.contents.append(bytes(self.bytes))
        number = len(self.contents)
        if HERE in self.deltas._histories:
            self.deltas._histories[HERE].unasked = 0  # a reader has asked for the last version's
        first = "" if self.is_publisher else str(number)
        self.deltas.opened(HERE, number, ContentId(first), self.memory)
        self.deltas.named(HERE, number, ContentId(str(number)))

    def access(self, chunks: Sequence[int] = ALL) -> Access:
        named = tuple(chunks)
        return Access(1, HERE, len(self.contents), named, (None,) * len(named), ())

    def look(self, chunks: Sequence[int] = ALL) -> None:
        self.deltas.make(self.access(chunks), self.memory)

    def find(self, base: int, chunks: Sequence[int] = ALL) -> dict[int, tuple[bytes, ...]]:
        return dict(self.deltas.find(self.access(chunks), self.memory, ContentId(str(base))))

    def check(self, base: int, found: dict[int, tuple[bytes, ...]]) -> None:
        """Each chain makes the newest bytes of the base."""
        held = bytearray(self.contents[base - 1])
        memory = ChunkMemory(MANIFEST, [memoryview(held)])
        for chunk, chain in found.items():
            assert sum(map(len, chain)) < memory.sizes[chunk]
            memory.apply(chunk, chain)
            assert memory.buffer(chunk) == self.memory.buffer(chunk)


Steps = st.lists(
    st.tuples(
        st.lists(st.integers(0, 4 * CHUNK_BYTES - 1), max_size=40),  # bytes that change
        st.sets(st.integers(0, CHUNKS - 1)),  # chunks that are looked at in time
    ),
    min_size=1,
    max_size=12,
)


@pytest.mark.heavy
@settings(deadline=None, max_examples=150)
@given(steps=Steps, asked=st.integers(1, 13))
def test_what_is_found_makes_the_newest_bytes(
    steps: list[tuple[list[int], set[int]]], asked: int
) -> None:
    source = Source()
    source.look()
    for changes, looked_at in steps:
        source.publish(changes)
        source.look(sorted(looked_at))
    base = min(asked, len(source.contents))
    source.check(base, source.find(base))


def test_a_reader_behind_by_some_versions_finds_a_chain() -> None:
    source = Source()
    source.look()
    for version in range(4):
        source.publish([version * 8])
        source.look()
    found = source.find(2)
    assert {len(chain) for chain in found.values()} == {3}
    source.check(2, found)


def test_a_chunk_that_nobody_looked_at_in_time_has_none_from_the_version_between() -> None:
    source = Source()
    source.look()
    source.publish([0])
    source.publish([1])
    assert source.find(2) == {}
    assert set(source.find(1)) == set(ALL)


def test_a_replica_passes_on_what_it_applied() -> None:
    source, replica = Source(), Source(has_shadow=False)
    source.look()
    source.publish([5])
    replica.publish([5])
    brought = source.find(1)
    replica.deltas.keep(HERE, 1, ContentId("1"), brought)  # of an older generation: too late
    assert replica.find(1) == {}
    replica.deltas.keep(HERE, 2, ContentId("1"), brought)
    assert replica.find(1) == brought


def test_another_generation_of_the_same_content_keeps_its_deltas() -> None:
    source = Source()
    source.look()
    source.publish([5])
    source.look()
    source.deltas.reopened(HERE, 99)
    access = Access(1, HERE, 99, ALL, (None,) * CHUNKS, ())
    source.check(1, dict(source.deltas.find(access, source.memory, ContentId("1"))))
    assert source.deltas.missing(HERE, 99) == []


def test_all_deltas_stay_within_a_part_of_the_version() -> None:
    source, rng = Source(), random.Random(1)
    source.look()
    for _ in range(3 * VERSIONS_MAX):
        source.publish([rng.randrange(4 * CHUNK_BYTES) for _ in range(200)])
        source.look()
        history = source.deltas._histories[HERE]
        kept = [
            delta
            for version in history.versions
            for _, chain in version.made.values()
            for delta in chain
        ]
        assert sum(map(len, kept)) == history.taken <= history.room == CHUNK_BYTES
        assert len(history.versions) <= VERSIONS_MAX


def test_of_a_version_whose_deltas_are_too_large_those_of_its_first_chunks_are_kept() -> None:
    source = Source()
    source.look()
    source.publish(random.Random(1).choices(range(4 * CHUNK_BYTES), k=16 * CHUNK_BYTES))
    source.look()
    found = source.find(1)
    assert set(found) == {0, 1}
    source.check(1, found)


def test_what_has_ended_finds_nothing_and_can_begin_again() -> None:
    source = Source()
    source.look()
    source.publish([5])
    source.deltas.end(HERE)
    assert source.find(1) == {}
    source.deltas.begin(HERE, source.memory, has_shadow=True)
    source.look()
    source.publish([6])
    source.check(2, source.find(2))
    assert set(source.find(2)) == set(ALL)
    source.deltas.forget(HERE)
    assert source.find(2) == {}
