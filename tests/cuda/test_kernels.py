"""The kernels' own source, run on the CPU, against xxhash and plain copies."""

from __future__ import annotations

import ctypes
import random

import pytest
import xxhash
from hypothesis import given, strategies as st

from tensorhub.cuda.kernels import LOOPS_MAX, SPREAD_BYTES_MAX, parts_of, spread_rows, straight_rows
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
    sizes = [
        *range(1300),
        *(
            1024 * blocks + more
            for blocks in (1, 2, 63, 64, 65, 129)
            for more in (-1, 0, 1, 63, 64, 65)
        ),
    ]
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
    assert kernels.digests([(memory.address, size)], threads, order) == [
        xxhash.xxh3_64_intdigest(DATA[:size])
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, 3000), st.integers(0, ALIGNMENT - 1), st.integers(0, 20)),
        max_size=8,
    ),
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
    rows = [
        (other.address, offset, nbytes)
        for other, (_, offset, nbytes) in zip(others, rows, strict=True)
    ]
    kernels.run("unpack_pieces", rows, region.address, threads, order)
    assert [other.holds() for other in others] == [tensor.holds() for tensor in tensors]
    assert all(other.is_whole_around for other in others)


@st.composite
def spreads(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, int]], int]:
    """Cells' starts, loops and a run. No two runs share a byte; any loop may be the widest, in
    either direction.
    """
    unit = draw(st.sampled_from([1, 2, 4, 8, 16]))
    run = unit * draw(st.integers(1, 40))
    extent, found = run, []
    for _ in range(draw(st.integers(0, LOOPS_MAX + 2))):
        times = draw(st.integers(1, 4))
        apart = extent + unit * draw(st.integers(0, 3))
        extent = apart * times
        found.append((times, apart * draw(st.sampled_from([1, -1]))))
    step = extent + unit * draw(st.integers(0, 2))
    back = sum([(times - 1) * -apart for times, apart in found if apart < 0])
    cells = [number * step + back for number in range(draw(st.integers(1, 3)))]
    return cells, draw(st.permutations(found)), run


@pytest.mark.heavy
@given(
    st.lists(spreads(), min_size=1, max_size=3),
    st.integers(0, ALIGNMENT - 1),
    st.integers(0, ALIGNMENT - 1),
    st.sampled_from([32, 256]),
    st.sampled_from([0, 1]),
    st.sampled_from([1, 3, 16]),
)
def test_runs_are_gathered_and_scattered(
    kernels: KernelsOnCpu,
    drawn: list[tuple[list[int], list[tuple[int, int]], int]],
    shift: int,
    other_shift: int,
    threads: int,
    order: int,
    parts: int,
) -> None:
    memories, rows, places = list[Memory](), list[tuple[int, ...]](), list[tuple[int, int, int]]()
    for number, (cells, loops, run) in enumerate(drawn):
        starts = cells
        for times, apart in loops:
            starts = [at + n * apart for at in starts for n in range(times)]
        memory = Memory(max(starts) + run, shift, DATA[: max(starts) + run])
        before = sum([nbytes for _, _, nbytes in places])
        rows += spread_rows(before, [memory.address + cell for cell in cells], loops, run)
        places += [(number, at, run) for at in starts]
        memories.append(memory)
    expected = b"".join([memories[number].holds()[at : at + run] for number, at, run in places])
    together = Memory(len(expected), other_shift)
    kernels.run("gather_runs", rows, together.address, threads, order, parts)
    assert together.holds() == expected
    assert together.is_whole_around
    changed, wanted, behind = expected[::-1], [bytearray(memory.holds()) for memory in memories], 0
    for number, at, run in places:
        wanted[number][at : at + run] = changed[behind : behind + run]
        behind += run
    ctypes.memmove(together.address, changed, len(changed))
    kernels.run("scatter_runs", rows, together.address, threads, order, parts)
    assert [memory.holds() for memory in memories] == wanted
    assert all(memory.is_whole_around for memory in memories)


def test_large_rows_are_shared_by_more_thread_blocks() -> None:
    assert parts_of([(0, 0, 100, 1, 0, 1, 0, 1, 0)] * 9) == 1
    assert parts_of([(0, 0, 4096, 4, 0, 8, 0, 32, 0)]) == 64
    rows = list(straight_rows(5, 100, 2 * SPREAD_BYTES_MAX + 7))
    assert [row[:3] for row in rows] == [
        (5, 100, SPREAD_BYTES_MAX),
        (5 + SPREAD_BYTES_MAX, 100 + SPREAD_BYTES_MAX, SPREAD_BYTES_MAX),
        (5 + 2 * SPREAD_BYTES_MAX, 100 + 2 * SPREAD_BYTES_MAX, 7),
    ]
