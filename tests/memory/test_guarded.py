"""A digest of memory that is not mapped any more raises; it does not end the process."""

from __future__ import annotations

import errno
import mmap
import os
import random
import resource

import pytest
import xxhash

from tensorhub.memory.addresses import address_of, bytes_at, guarded_pieces

PIECE = 64 * 2**10


@pytest.mark.parametrize("nbytes", [1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE + 3])
def test_the_pieces_are_the_bytes(nbytes: int) -> None:
    data, made = bytes(range(256)) * (nbytes // 256 + 1), xxhash.xxh3_64()
    for piece in guarded_pieces(memoryview(data)[:nbytes], PIECE):
        made.update(piece)
    assert made.intdigest() == xxhash.xxh3_64_intdigest(data[:nbytes])


def test_memory_that_is_not_mapped_any_more_raises() -> None:
    mapped = mmap.mmap(-1, 4 * PIECE)
    address = address_of(memoryview(mapped))
    # as a tensor that does not know that its memory has gone
    view = bytes_at(address, 4 * PIECE, None)
    mapped.close()
    with pytest.raises(OSError) as caught:  # noqa: PT011
        list(guarded_pieces(view, PIECE))
    assert caught.value.errno == errno.EFAULT


@pytest.mark.parametrize("left", [0, 1])
def test_without_descriptors_the_bytes_are_read_all_the_same(left: int) -> None:
    """The buffer takes two. What is lacking must not look like memory that was freed."""
    data = bytearray(random.Random(1).randbytes(3 * PIECE + 5))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + left, limits[1]))
    try:
        found = b"".join(bytes(piece) for piece in guarded_pieces(memoryview(data), PIECE))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert found == data
    again = os.dup(0)
    os.close(again)
    assert again == lowest  # nothing is left open
