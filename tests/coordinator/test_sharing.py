"""Fair shares: who may have more, and at whose expense."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, strategies as st

from tensorhub.coordinator.sharing import Share
from tensorhub.errors import StateError
from tensorhub.types import Options


@given(st.lists(st.tuples(st.integers(0, 11), st.booleans()), min_size=20, max_size=80))
def test_within_a_share_nobody_can_keep_others_out(steps: list[tuple[int, bool]]) -> None:
    """Who asks again and again has his part in the end, as far as whole ones can be shared out."""
    share, has = Share[int](6), Counter[int]()
    for guest, wants in steps:
        origin = "abc"[guest % 3]
        if not wants:
            share.drop(origin, guest)
            has[guest] = 0
            continue
        if share.is_used_up:
            victim = share.at_whose_expense(origin, guest)
            if victim is None:
                mine = sum(number for other, number in has.items() if other % 3 == guest % 3)
                assert mine * 3 >= 6 - 3 or has[guest] > 0
                continue
            assert victim != guest
            share.drop("abc"[victim % 3], victim)
            has[victim] = 0
        share.add(origin, guest)
        has[guest] += 1
        assert share.total == has.total() <= 6
        assert all(share.of("abc"[other % 3], other) == number for other, number in has.items())


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5, float("nan"), 1, "half", None])
def test_a_share_is_a_part(share: object) -> None:
    with pytest.raises(
        (TypeError, StateError, ValueError), match=r"Options\.guest_share = .*: give a number between 0\.0 and 1\.0"
    ):
        Options(guest_share=share)  # type: ignore[arg-type]
