"""What `sources=` says of the tensors that are registered."""

from __future__ import annotations

from collections.abc import Callable

from tensorhub.layouts.entries import entries_of, without_shape
from tensorhub.layouts.views import at, source

W = source("w", shape=(8, 4))


def test_what_sources_say_is_looked_at_once() -> None:
    given: dict[str, object] = {"a": [W[0:1], W[1:2]], "b": W, "c": None}
    found, faults = entries_of("abc", given)
    assert (found, faults) == ({"a": (W[0:1], W[1:2]), "b": (W,)}, [])
    by_name: Callable[[str], object] = given.get
    assert entries_of("abc", by_name) == (found, [])


def test_everything_that_is_wrong_with_them_is_named() -> None:
    found, faults = entries_of("ab", {"a": [W, 3], "b": [(at[0:1], W[0:1])], "z": W})
    assert found == {"b": ((at[0:1], W[0:1]),)}
    assert [fault[:30] for fault in faults] == ["sources of 'a': give a view (`", "sources names 'z', and no tens"]


def test_whose_shape_nobody_has_said() -> None:
    v = source("v")
    found, _ = entries_of("abcd", {"a": W, "b": [W[0:1], v[0:1]], "c": [(at[0:1], v), (at[1:2], source("u"))], "d": []})
    assert without_shape(found) == {"b": "v", "c": "v"}
