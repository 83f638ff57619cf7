"""The grid of a layout: each byte that a piece covers in one chunk, none else; cells lie within chunks of the reader's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
from hypothesis import given, strategies as st

from tensorhub.errors import RegistrationError
from tensorhub.layouts import Chunk, Grid, Kind, LocalTensor, Piece, arrange, at, pieces_of, plan, source
from tensorhub.layouts.boxes import Span, whole
from tensorhub.layouts.pieces import packed
from tests.layouts.worlds import moved, wanted, world


def bytes_of(chunk: Chunk) -> Iterator[int]:
    for index in product(*(range(times) for times, _ in chunk.loops)):
        at = chunk.offset + sum(n * stride for n, (_, stride) in zip(index, chunk.loops, strict=True))
        yield from range(at, at + chunk.run)


@given(st.randoms(use_true_random=False), st.integers(4, 60))
def test_each_byte_of_a_piece_is_in_one_chunk_and_no_other_byte_in_any(random: Random, chunk_bytes: int) -> None:
    made = world(random)
    grid = Grid(made.reader, chunk_bytes)
    counts = [bytearray(len(region)) for region in made.memory.regions]
    for number in range(grid.chunk_count):
        chunk = grid.chunk(number)
        assert 0 < chunk.nbytes <= chunk_bytes
        for byte in bytes_of(chunk):
            counts[chunk.region][byte] += 1
    assert counts == wanted(made)


@given(st.randoms(use_true_random=False), st.integers(4, 60))
def test_cells_fill_the_chunks_that_they_lie_in(random: Random, chunk_bytes: int) -> None:
    made = world(random)
    grid = Grid(made.reader, chunk_bytes)
    classes = made.publication.classes
    found = plan(made.reader, [each.coordinates for each in classes], grid=grid, turn=1)
    filled: Counter[int] = Counter()
    for family in found.families:
        for number, cell in zip(family.chunks(), family.cells(), strict=False):
            chunk = grid.chunk(number)
            assert cell.reader_region == chunk.region
            assert {byte for _, at in cell.offsets() for byte in range(at, at + cell.run)} <= set(bytes_of(chunk))
            filled[number] += cell.nbytes
    assert filled == Counter({number: grid.chunk(number).nbytes for number in range(grid.chunk_count)})
    assert moved(found, [made.memories[each.ranks[0]] for each in classes], made.memory) == wanted(made)
    assert [bytes(region) for region in made.memory.regions] == made.expected


def test_neighbours_in_different_chunks_do_not_coalesce() -> None:
    """Stacked experts at both ends: without a grid they are one cell."""
    shapes = {f"{n}": (8, 4) for n in range(16)}
    stack = LocalTensor("w2", "uint8", (16, 8, 4), packed((16, 8, 4), 1), 0)
    sources = {"w2": [(at[n], source(name)) for n, name in enumerate(shapes)]}
    stacked = arrange(pieces_of([stack], sources=sources, shape_of=shapes.get))
    assert plan(stacked, [stacked]).cell_count == 1
    grid = Grid(stacked, 32)
    (family,) = plan(stacked, [stacked], grid=grid).families
    assert (family.length, list(family.chunks())) == (16, list(range(16)))


def grid_of(shape: tuple[int, ...], box: tuple[Span, ...] | None = None, *, chunk_bytes: int) -> Grid:
    box = whole(shape) if box is None else box
    piece = Piece("w", Kind("uint8", shape), box, 0, 0, packed([each.size for each in box], 1))
    return Grid(arrange([piece]), chunk_bytes)


def rows(grid: Grid) -> list[tuple[int, int]]:
    return [(box[0].start, box[0].size) for box in grid.cuts[0]]


def test_pieces_are_cut_at_powers_of_two_of_global_rows() -> None:
    assert rows(grid_of((40, 10), chunk_bytes=100)) == [(0, 8), (8, 8), (16, 8), (24, 8), (32, 8)]
    assert rows(grid_of((40, 10), (Span(5, 14), Span(0, 10)), chunk_bytes=100)) == [(5, 3), (8, 8), (16, 3)]
    assert rows(grid_of((40, 10), (Span(1, 20, 2), Span(0, 10)), chunk_bytes=100)) == [(1, 8), (17, 8), (33, 4)]
    assert rows(grid_of((40, 10), chunk_bytes=400)) == [(0, 40)]


def test_rows_that_are_longer_are_cut_anew_in_each() -> None:
    cuts = grid_of((2, 40), chunk_bytes=20).cuts[0]
    assert [(box[0].start, box[1].start, box[1].size) for box in cuts] == [
        (0, 0, 16),
        (0, 16, 16),
        (0, 32, 8),
        (1, 0, 16),
        (1, 16, 16),
        (1, 32, 8),
    ]


def test_tied_tensors_are_cut_once() -> None:
    tied = [LocalTensor(name, "uint8", (12, 2), (2, 1), 0) for name in ("embed", "head")]
    grid = Grid(arrange(pieces_of(tied)), 10)
    assert (grid.chunk_count, grid.chunk(2)) == (3, Chunk(0, 16, (), 8))
    assert grid.tensor_of(2) == "embed"


def test_a_row_pitch_is_in_no_chunk() -> None:
    grid = Grid(arrange(pieces_of([LocalTensor("w", "uint8", (4, 3), (8, 1), 5, 100)])), 6)
    assert [grid.chunk(n) for n in range(2)] == [Chunk(5, 100, ((2, 8),), 3), Chunk(5, 116, ((2, 8),), 3)]


def test_chunks_without_end_are_refused_before_they_are_made() -> None:
    with pytest.raises(RegistrationError, match="a larger chunk_bytes makes fewer"):
        _ = grid_of((2**40,), chunk_bytes=4096).cuts
    pieces = [Piece("w", Kind("uint8", (2**40,)), (Span(0, 2**28),), region, 0, (1,)) for region in range(257)]
    with pytest.raises(RegistrationError, match="16842752 chunks are more than"):
        _ = Grid(arrange(pieces), 4096).firsts
