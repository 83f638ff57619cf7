"""The baseline of one-sided transports copies every byte, and notices other ones."""

import random

import pytest

from benches.bare_reads import Kind, Lie, Reader, digests_of
from tensorhub.transport.shm.segments import Segment

SIZES = [1, 9 * 2**20 + 3, 4096, *[1024] * 1100, 2**20]


@pytest.fixture
def given() -> list[memoryview]:
    """In two segments; so it can be read by both kinds."""
    chance, segments = random.Random(1), [Segment(sum(SIZES)), Segment(sum(SIZES))]
    views = [segments[n % 2].bytes_at(sum(SIZES[:n]), size) for n, size in enumerate(SIZES)]
    for view in views:
        view[:] = chance.randbytes(len(view))
    return views


@pytest.mark.parametrize("kind", ["cma", "shm"])
@pytest.mark.parametrize("threads", [1, 2])
def test_it_copies_all_and_compares_digests(given: list[memoryview], kind: Kind, threads: int) -> None:
    taken = [memoryview(bytearray(size)) for size in SIZES]
    reader, digests = Reader(kind, Lie.of(given), taken), digests_of(given)
    for known in None, digests:
        for view in taken:
            view[:] = bytes(len(view))
        reader.read(threads, known)
        assert taken == given
    given[-1][-1] ^= 1
    with pytest.raises(ValueError, match="other bytes"):
        reader.read(threads, digests)


def test_memory_that_is_not_shared_cannot_be_mapped() -> None:
    there, here = [memoryview(bytearray(8))], [memoryview(bytearray(8))]
    with pytest.raises(ValueError, match="not shared"):
        Reader("shm", Lie.of(there), here)
