"""The kernels' own source, run on the CPU, against xxhash and plain copies."""

from __future__ import annotations

import ctypes
import random

import pytest
import xxhash
from hypothesis import given, strategies as st

from tests.cuda.on_cpu import COMPILER, WHY_NOT, KernelsOnCpu

pytestmark = pytest.mark.skipif(COMPILER is None, reason=WHY_NOT)
DATA = random.Random(7).randbytes(300_000)
ALIGNMENT = 16


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelsOnCpu:
    return KernelsOnCpu(tmp_path_factory.mktemp("kernels"))


class Memory:
    """`nbytes`, `shift` bytes behind a multiple of 16, with room around them."""

    def __init__(self, nbytes: int, shift: int = 0, content: bytes = b"") -> None:
        self._room = (ctypes.c_uint8 * (nbytes + 4 * ALIGNMENT))()
        first = ctypes.addressof(self._room)
        self.address = first + ALIGNMENT + -first % ALIGNMENT + shift
        self.nbytes = nbytes
        if content:
            ctypes.memmove(self.address, content, nbytes)

    def holds(self) -> bytes:
        return ctypes.string_at(self.address, self.nbytes)

    @property
    def is_whole_around(self) -> bool:
        """Whether nothing was written beside it."""
        start = self.address - ctypes.addressof(self._room)
        return not any(self._room[:start]) and not any(self._room[start + self.nbytes :])


def test_digests_of_every_short_length_and_of_the_first_blocks(kernels: KernelsOnCpu) -> None:
    sizes = [*range(1300), *(1024 * blocks + more for blocks in (1, 2, 63, 64, 65, 129) for more in (-1, 0, 1, 63, 64, 65))]
    memory = [Memory(size, size % ALIGNMENT, DATA[size : 2 * size]) for size in sizes]
    made = kernels.digests([(each.address, each.nbytes) for each in memory], threads=32)
    assert made == [xxhash.xxh3_64_intdigest(DATA[size : 2 * size]) for size in sizes]


@given(
    size=st.integers(0, 300_000),
    shift=st.integers(0, ALIGNMENT - 1),
    threads=st.sampled_from([32, 64, 96, 256]),
    order=st.sampled_from([0, 1]),
)
def test_a_digest_is_the_cpus_whatever_size_alignment_and_order(
    kernels: KernelsOnCpu, size: int, shift: int, threads: int, order: int
) -> None:
    memory = Memory(size, shift, DATA[:size])
    assert kernels.digests([(memory.address, size)], threads, order) == [xxhash.xxh3_64_intdigest(DATA[:size])]


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, ALIGNMENT - 1), st.integers(0, 20)), max_size=8),
    st.sampled_from([32, 256]),
    st.sampled_from([0, 1]),
)
def test_what_is_packed_is_unpacked(
    kernels: KernelsOnCpu, pieces: list[tuple[int, int, int]], threads: int, order: int
) -> None:
    """`pieces`: (bytes, alignment, gap before it in the region)."""
    rows, end, expected = [], 0, b""
    tensors = [Memory(nbytes, shift, DATA[nbytes : 2 * nbytes]) for nbytes, shift, _ in pieces]
    for tensor, (nbytes, _, gap) in zip(tensors, pieces, strict=True):
        rows.append((tensor.address, end + gap, nbytes))
        expected += bytes(gap) + tensor.holds()
        end += gap + nbytes
    region = Memory(end)
    kernels.run("pack_pieces", rows, region.address, threads, order)
    assert region.holds() == expected
    assert region.is_whole_around
    others = [Memory(nbytes, shift) for nbytes, shift, _ in pieces]
    rows = [(other.address, offset, nbytes) for other, (_, offset, nbytes) in zip(others, rows, strict=True)]
    kernels.run("unpack_pieces", rows, region.address, threads, order)
    assert [other.holds() for other in others] == [tensor.holds() for tensor in tensors]
    assert all(other.is_whole_around for other in others)
