"""Boxes are met and taken out of one another exactly, as sets of indices say."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, strategies as st

from tensorhub.errors import ManifestMismatch
from tensorhub.layouts.boxes import (
    Box,
    Meetings,
    Span,
    left_over,
    meet,
    overlapping,
    shown,
    span,
    volume,
    whole,
    without,
)

spans = st.builds(span, st.integers(0, 12), st.integers(1, 8), st.integers(1, 5))
boxes = st.lists(spans, min_size=2, max_size=2).map(tuple)


def indices(box: Box) -> set[tuple[int, ...]]:
    return set(
        product(*(range(each.start, each.start + each.size * each.step, each.step) for each in box))
    )


@given(boxes, boxes)
def test_what_two_boxes_share_is_a_box(one: Box, other: Box) -> None:
    common = meet(one, other)
    assert (set() if common is None else indices(common)) == indices(one) & indices(other)
    assert common is None or all(each == span(*each) for each in common)


@given(boxes, st.lists(boxes, max_size=5))
def test_what_is_left_has_each_element_once(box: Box, taken: list[Box]) -> None:
    left = left_over(box, taken)
    assert set().union(*map(indices, left)) == indices(box) - set().union(*map(indices, taken))
    assert sum(map(volume, left)) == len(set().union(*map(indices, left)))
    assert all(each == span(*each) for fragment in left for each in fragment)


@given(st.lists(boxes, max_size=6))
def test_overlapping_boxes_are_found(some: list[Box]) -> None:
    shared = {
        pair
        for pair in combinations(range(len(some)), 2)
        if indices(some[pair[0]]) & indices(some[pair[1]])
    }
    found = overlapping(some)
    assert found in shared if shared else found is None


@given(spans, st.data())
def test_positions_of_positions(outer: Span, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, outer.size - 1))
    step = data.draw(st.integers(1, 4))
    inner = span(start, data.draw(st.integers(1, (outer.size - 1 - start) // step + 1)), step)
    every = range(outer.start, outer.last + 1, outer.step)
    assert indices((outer.take(inner),)) == {(every[n],) for (n,) in indices((inner,))}


def test_a_tensor_without_dimensions_is_one_element() -> None:
    assert volume(whole(())) == 1
    assert meet((), ()) == ()
    assert list(without((), ())) == []
    assert left_over((), [()]) == []
    assert left_over((), []) == [()]
    assert overlapping([(), ()]) == (0, 1)
    assert shown(()) == "[...]"


def test_nothing_is_left_of_nothing() -> None:
    assert left_over(whole((0, 4)), []) == []


def test_a_box_is_shown_as_it_would_be_written() -> None:
    assert shown((Span(2, 3), Span(1, 3, 4))) == "[2:5, 1:10:4]"


def test_fragments_without_end_are_refused() -> None:
    """However far apart a hostile box's indices are, nothing is made of the gaps one by one."""
    box = (Span(0, 2**40),)
    assert len(left_over(box, [(span(0, 2, 2**39),)])) == 2
    with pytest.raises(ManifestMismatch, match="fragments"):
        left_over(box, [(span(0, 2**20, 2**20),)])
    crossed = whole((2**30, 2**30))
    combs = [(span(0, 2**9, 2**20), Span(0, 2**30)), (Span(0, 2**30), span(0, 2**9, 2**20))]
    with pytest.raises(ManifestMismatch, match="fragments"):
        left_over(crossed, combs)


def test_no_cut_makes_a_reader_compare_each_part_with_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither many parts are left at once, nor is one part much: all pairs together are."""
    monkeypatch.setattr("tensorhub.layouts.boxes.MEETINGS_MAX", 1000)
    every_second_row = [(Span(2 * row, 1),) for row in range(40)]
    assert len(left_over((Span(0, 80),), every_second_row)) == 40
    with pytest.raises(ManifestMismatch, match="more than 1000 pairs"):
        left_over((Span(0, 160),), [(Span(2 * row, 1),) for row in range(80)])
    with pytest.raises(ManifestMismatch, match="more than 1000 pairs"):
        overlapping([(Span(row, 80 - row), Span(row, 1)) for row in range(80)])
    meetings = Meetings()  # of several tensors together
    left_over((Span(0, 80),), every_second_row, meetings)
    with pytest.raises(ManifestMismatch, match="more than 1000 pairs"):
        left_over((Span(0, 80),), every_second_row, meetings)
