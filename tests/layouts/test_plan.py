"""Plans: rows of like tensors, the choice among sources that hold equal bytes, and the error where
no source holds a byte. (`test_reading` carries random plans out.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tensorhub.errors import ManifestMismatch
from tensorhub.layouts import Coordinates, Kind, arrange, at, plan, source
from tensorhub.layouts.boxes import whole
from tensorhub.layouts.catalogue import Catalogue
from tensorhub.layouts.pieces import Piece, packed
from tensorhub.layouts.plan import STILL
from tests.layouts.worlds import LocalTensor, pieces_of


def locals_of(shapes: Mapping[str, tuple[int, ...]]) -> list[LocalTensor]:
    return [
        LocalTensor(name, "bfloat16", its, packed(its, 2), region)
        for region, (name, its) in enumerate(shapes.items())
    ]


def test_a_reader_with_names_in_the_order_of_text_reads_in_the_order_of_numbers() -> None:
    shapes = {f"experts.{n}": (4, 6) for n in range(500)}
    numbers = arrange(pieces_of(locals_of(shapes)))
    text = arrange(pieces_of(locals_of(dict(sorted(shapes.items())))), numbers.catalogue)
    for reader, held in ((text, numbers), (numbers, text)):
        found = plan(reader, [held])
        assert len(found.rows(0)) == 52  # 10 to 19, 20 to 29, ..., and a few more for 0 to 9
        assert (sum(row[4] for row in found.rows(0)), found.needs) == (500, {0: 500 * 48})


def test_experts_with_names_of_their_own_make_families_and_neighbours_coalesce() -> None:
    """A trainer with a tensor for each expert, in regions of their own; an engine that stacks them.
    And the other way.
    """
    names = [f"experts.{n}.w2" for n in range(16)]
    shapes = dict.fromkeys(names, (8, 4))
    apart = arrange(pieces_of(locals_of(shapes)))
    sources = {"w2": [(at[n], source(name)) for n, name in enumerate(names)]}
    stacked = arrange(
        pieces_of(locals_of({"w2": (16, 8, 4)}), sources=sources, shape_of=dict(shapes).get),
        apart.catalogue,
    )
    for reader, held, length, step, run in (
        (stacked, apart, 16, (1, 0, 0, 64), 64),
        (apart, stacked, 16, (0, 64, 1, 0), 64),
        (stacked, stacked, 1, STILL, 16 * 64),
    ):
        assert plan(reader, [held]).rows(0) == [(0, 0, 0, 0, length, step, (), run)]


def test_what_lies_in_several_regions_at_the_source_is_no_run_of_one_of_them() -> None:
    """Experts in regions of their own, each behind more of other tensors; an engine that stacks
    them.
    """
    shapes = {f"experts.{n}": (4,) for n in range(3)}
    held = [LocalTensor(name, "bfloat16", (4,), (2,), n, 16 * n) for n, name in enumerate(shapes)]
    apart = arrange(pieces_of(held))
    sources = {"stacked": [(at[n], source(name)) for n, name in enumerate(shapes)]}
    stacked = arrange(
        pieces_of(locals_of({"stacked": (3, 4)}), sources=sources, shape_of=dict(shapes).get),
        apart.catalogue,
    )
    assert plan(stacked, [apart]).rows(0) == [(0, 0, 0, 0, 3, (1, 16, 0, 8), (), 8)]


# --------------------------------------------------------------------------------------------------
# whom to read


def ranks_with(
    *parts: tuple[slice, ...] | None, shape: tuple[int, ...] = (12, 2)
) -> list[Coordinates]:
    """Each has this part of one tensor."""
    made = []
    for part in parts:
        view = source("w", shape=shape)[part if part is not None else ...]
        local = LocalTensor(
            "mine", "uint8", view.select(shape).shape, packed(view.select(shape).shape, 1), 0
        )
        made.append(arrange(pieces_of([local], sources={"mine": view})))
    return made


def test_each_byte_is_read_once_and_from_those_who_are_read_anyway() -> None:
    sources = ranks_with((slice(0, 6),), (slice(6, 12),), None)
    (reader,) = ranks_with(None)
    assert plan(reader, sources, turn=2).needs == {2: 24}
    assert plan(reader, sources).needs == {0: 12, 1: 12}


def test_the_ranks_of_a_reading_group_do_not_all_choose_the_same_source() -> None:
    reader, *sources = ranks_with(None, None, None, None)
    assert [set(plan(reader, sources, turn=turn).needs) for turn in range(3)] == [{0}, {1}, {2}]


def test_like_tensors_that_several_have_are_shared_out() -> None:
    norms = {f"norm.{n}": (8,) for n in range(10)}
    reader = arrange(pieces_of(locals_of({"one": (4,), "two": (4,), **norms})))
    sources = [arrange(pieces_of(locals_of({own: (4,), **norms}))) for own in ("one", "two")]
    assert plan(reader, sources).needs == {0: 88, 1: 88}


def test_what_no_source_has_is_named_all_of_it() -> None:
    sources = ranks_with((slice(0, 5),), (slice(7, 12, 2),))
    (reader,) = ranks_with(None)
    with pytest.raises(ManifestMismatch) as caught:
        plan(reader, sources)
    assert caught.value.differences == (
        "no source holds 'w' [5:7, 0:2] (4 bytes)",
        "no source holds 'w' [8:11:2, 0:2] (4 bytes)",
    )


def test_a_tensor_of_another_kind_is_not_read() -> None:
    """The difference itself is named where a reader's pieces are arranged."""
    local = LocalTensor("w", "float16", (12, 2), (4, 2), 0)
    with pytest.raises(ManifestMismatch, match="no source holds 'w'"):
        plan(arrange(pieces_of([local])), ranks_with(None))


def test_tied_tensors_are_read_once() -> None:
    tied = [LocalTensor(name, "uint8", (12, 2), (2, 1), 0) for name in ("embed", "head")]
    one = arrange(pieces_of(tied))
    assert plan(one, [one]).needs == {0: 24}


# --------------------------------------------------------------------------------------------------
# cells


def test_memory_transposed_at_both_ends_is_one_run() -> None:
    shape = (6, 4)

    def transposed() -> Coordinates:
        local = LocalTensor("mine", "uint8", (4, 6), (6, 1), 0)
        return arrange(pieces_of([local], sources={"mine": source("w", shape=shape).T}))

    assert plan(transposed(), [transposed()]).rows(0) == [(0, 0, 0, 0, 1, STILL, (), 24)]


def test_a_reader_rank_of_an_equal_layout_reads_the_rank_local_tensors_of_its_rank() -> None:
    def rank_of(rank: int, ranks: int) -> Coordinates:
        return arrange(
            pieces_of([LocalTensor("w", "uint8", (5,), (1,), 0)], rank=rank, world_size=ranks)
        )

    sources: Sequence[Coordinates] = [rank_of(rank, 3) for rank in range(3)]
    assert sources[0].catalogue.kinds == (Kind("uint8", (3, 5), None, 3),)
    assert plan(rank_of(1, 3), sources).needs == {1: 5}
    with pytest.raises(ManifestMismatch):
        plan(rank_of(1, 2), sources)


# -------------------------------------------------------------------------------------------------
# hostile publications


def held_so_often(count: int, catalogue: Catalogue | None = None) -> Coordinates:
    """The same bytes of one tensor, in so many places."""
    kind = Kind("uint8", (8,))
    return arrange(
        [Piece("w", kind, whole(kind.shape), region, 0, (1,)) for region in range(count)], catalogue
    )


@pytest.mark.heavy
@pytest.mark.timeout(60)
def test_many_pieces_of_one_tensor_cost_what_as_many_tensors_do() -> None:
    """Not the square of it, which would be minutes."""
    held = held_so_often(2**18)
    assert plan(held_so_often(1, held.catalogue), [held]).needs == {0: 8}


def test_what_is_looked_at_for_each_piece_of_the_reader_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = held_so_often(100)
    reader = held_so_often(1000, held.catalogue)
    assert plan(reader, [held]).needs == {0: 8000}
    monkeypatch.setattr("tensorhub.layouts.boxes.MEETINGS_MAX", 10_000)
    with pytest.raises(ManifestMismatch, match="more than 10000 pairs"):
        plan(reader, [held])
