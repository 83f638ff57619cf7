"""What a caller can write for `sources=`: the same as numpy would take, and a sentence that helps
for all else.
"""

from __future__ import annotations

from itertools import product
from math import prod
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tensorhub.errors import RegistrationError
from tensorhub.layouts import View, at, source
from tensorhub.layouts.boxes import Span
from tensorhub.layouts.views import Taken, entries_of, without_shape
from tests.layouts.worlds import some_view


def taken(selection: Taken, elements: Any) -> Any:
    """What the selection says, by indices one by one."""
    spans = [selection.box[dimension] for dimension in selection.order]
    found = np.empty(selection.shape, elements.dtype)
    for index in product(*(range(its.size) for its in spans)):
        whole = [its.start for its in selection.box]
        for dimension, n in zip(selection.order, index, strict=True):
            whole[dimension] += n * selection.box[dimension].step
        found[index] = elements[tuple(whole)]
    return found


@given(st.randoms(use_true_random=False))
def test_a_view_takes_what_numpy_takes(random: Random) -> None:
    shape = [random.randint(1, 5) for _ in range(random.randint(0, 3))]
    elements = np.arange(prod(shape)).reshape(shape)
    view, array = some_view(random, "w", elements)
    selection = view.select(elements.shape)
    assert selection.shape == array.shape
    assert np.array_equal(taken(selection, elements), array)


def test_views_are_values() -> None:
    w = source("w")
    assert w[0:2][1] == w[0:2][1]
    assert w[0:2] != w[0:3]
    assert len({w, w[...], w[0], source("w")}) == 3
    with pytest.raises(AttributeError):
        w.name = "v"  # type: ignore[misc]


def test_a_view_is_shown_as_it_was_written() -> None:
    assert (
        repr(source("w")[0:4, ::2][..., 1].T.permute(1, -2))
        == "source('w')[0:4, ::2][..., 1].T.permute(1, -2)"
    )
    assert repr(at[2:, 0]) == "at[2:, 0]"


def test_numpy_integers_are_integers() -> None:
    assert source("w")[np.int64(2), : np.int32(3)].select((4, 5)).box == (Span(2, 1), Span(0, 3))


def test_empty_parts_can_be_taken() -> None:
    """Where so many ranks share so few rows that one has none."""
    assert source("w")[4:4].select((4, 5)).shape == (0, 5)


def test_with_a_shape_faults_are_found_where_they_are_written() -> None:
    w = source("w", shape=(4, 5))
    with pytest.raises(
        RegistrationError, match="slice 0:6 is not within the size there, 5; write at most 0:5"
    ):
        w[:, 0:6]
    with pytest.raises(RegistrationError, match="2 dimensions"):
        w[0, 0, 0]


@pytest.mark.parametrize(
    ("view", "fault"),
    [
        (source("w")[4], r"source\('w'\)\[4\]: index 4 is out of range; the size there is 4"),
        (source("w")[-5], "index -5 is out of range"),
        (source("w")[0:5], "slice 0:5 is not within the size there, 4; write at most 0:4"),
        (source("w")[3:1], "slice 3:1 is not within"),
        (source("w")[-9:2], "not within"),
        (
            source("w")[1:3][2],
            r"source\('w'\)\[1:3\]\[2\]: index 2 is out of range; the size there is 2",
        ),
        (source("w")[0, 0, 0, 0], "4 indices, where there are 3 dimensions .*leave out 1"),
        (source("w").permute(0, 1), r"name each of its 3 dimensions \(0 to 2\) once"),
        (source("w").permute(0, 1, 1), "once"),
        (source("w").permute(0, 1, 3), "once"),
        (source("w").T, "it has 3 dimensions, not 2; write `.permute"),
    ],
)
def test_what_a_tensor_does_not_have_is_named(view: View, fault: str) -> None:
    with pytest.raises(RegistrationError, match=fault):
        view.select((4, 5, 6))


def test_dimensions_that_are_no_integers_are_refused_where_they_are_written() -> None:
    for wrong in (None, 1.5, True, "0"):
        with pytest.raises(RegistrationError, match=r"permute: give the numbers of dimensions"):
            source("w").permute(0, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("index", "fault"),
    [
        (True, "no index"),
        (None, "no index"),
        (1.5, "no index"),
        ([0, 1], "no index"),
        ((0, "a"), "no index"),
        (slice(0, 4, 0), "its step is 0"),
        (slice(None, None, -1), r"\[::-1\]: its step is -1"),
        ((slice(1, 3, -2), ..., 0), r"\[1:3:-2, \.\.\., 0\]: its step is -2"),
        (slice(None, None, 1.5), "its step is 1.5"),
        (slice("a", None), "a slice is of integers"),
        (slice(0, True), "a slice is of integers"),
        ((..., ...), "`...` can stand there once"),
    ],
)
def test_what_is_no_index_is_refused_where_it_is_written(index: Any, fault: str) -> None:
    for view in (source("w"), at):
        with pytest.raises(RegistrationError, match=fault):
            view[index]


@pytest.mark.parametrize(
    ("name", "shape", "fault"),
    [
        ("", None, "a name is a string"),
        (3, None, "a name is a string"),
        ("w", (-1,), "a shape is"),
        ("w", (1.5,), "a shape is"),
        ("w", 4, "a shape is"),
        ("w", (1,) * 65, "up to 64 sizes"),
        ("w", (2**63,), "a shape is"),
    ],
)
def test_what_is_no_source_is_refused(name: Any, shape: Any, fault: str) -> None:
    with pytest.raises(RegistrationError, match=fault):
        source(name, shape)


W = source("w", shape=(8, 4))


def test_an_entry_is_a_view_or_a_list_of_views_or_a_list_of_pairs() -> None:
    given: dict[str, object] = {
        "a": [W[0:1], W[1:2]],
        "b": W,
        "c": None,
        "d": [(at[0], W[0])],
        "e": [],
    }
    found, faults = entries_of("abcde", given)
    assert found == {
        "a": ((None, W[0:1]), (None, W[1:2])),
        "b": ((None, W),),
        "d": ((at[0], W[0]),),
        "e": (),
    }
    assert (found, faults) == entries_of("abcde", given.get) == (found, [])


@pytest.mark.parametrize("entry", [3, "w", (at[0], W), [W, (at[0], W)], [(W, at[0])]])
def test_everything_that_is_wrong_with_entries_is_named(entry: object) -> None:
    found, faults = entries_of("ab", {"a": entry, "b": [(at[0:1], W[0:1])], "z": W})
    assert found == {"b": ((at[0:1], W[0:1]),)}
    assert "sources of 'a': give a view (`" in faults[0]
    assert faults[1] == "sources names 'z', and no tensor of that name is registered"


def test_whose_shape_nobody_has_said() -> None:
    v = source("v")
    found, _ = entries_of(
        "abcd",
        {"a": W, "b": [W[0:1], v[0:1]], "c": [(at[0:1], v), (at[1:2], source("u"))], "d": []},
    )
    assert without_shape(found) == {"b": "v", "c": "v"}
