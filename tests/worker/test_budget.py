"""The budget of a worker's host memory: never more than there is, whatever is asked for in whatever
order.
"""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from tensorhub.errors import StateError
from tensorhub.types import Purpose
from tensorhub.worker.budget import OUTRANKS, Budget

P = Purpose


def test_what_can_never_fit_says_how_much_is_needed() -> None:
    budget = Budget(100)
    for ask in (budget.plan, budget.reserve):
        with pytest.raises(
            StateError, match=r"prefetch needs 101 bytes .* is 100: give 101 or more"
        ) as caught:
            ask("a", P.PREFETCH, 101)
        assert not caught.value.retryable
    assert budget.reserved_bytes == 0


def test_retention_takes_the_oldest_prefetched_copies_and_no_more_than_it_needs() -> None:
    budget = Budget(100)
    budget.reserve("kept", P.RETENTION, 30)
    for name in ("a", "b", "c"):
        budget.reserve(name, P.PREFETCH, 20)
    assert budget.plan("new", P.RETENTION, 10) == ()
    assert budget.plan("new", P.RETENTION, 30) == ("a",)
    assert budget.plan("new", P.RETENTION, 50) == ("a", "b")
    with pytest.raises(StateError, match="give 110") as caught:
        budget.plan("new", P.RETENTION, 80)
    assert caught.value.retryable
    with pytest.raises(StateError, match="are in use"):
        budget.reserve("new", P.RETENTION, 30)  # nobody has gone yet


def test_nothing_outranks_what_keeps_a_version() -> None:
    assert not any(P.RETENTION in lower for lower in OUTRANKS.values())
    assert all(
        purpose not in lower for purpose, lower in OUTRANKS.items() if purpose is not P.ARCHIVE
    )
    assert OUTRANKS[P.PREFETCH] == OUTRANKS[P.SEED] == OUTRANKS[P.ARCHIVE] == {P.ARCHIVE}
    budget = Budget(100)
    budget.reserve("kept", P.RETENTION, 90)
    for purpose in (P.PREFETCH, P.SEED, P.USE):
        with pytest.raises(StateError, match="does not outrank"):
            budget.plan("new", purpose, 20)


def test_archived_versions_go_first_and_of_these_the_one_that_was_used_longest_ago() -> None:
    budget = Budget(100)
    used = {"a": 3.0, "b": 1.0, "c": 2.0}
    budget.last_used = lambda ident: used.get(ident, 0.0)
    budget.reserve("kept", P.PREFETCH, 40)
    for name in used:
        budget.reserve(name, P.ARCHIVE, 20)
    assert budget.plan("new", P.ARCHIVE, 20) == ("b",)
    for purpose in (P.USE, P.RETENTION, P.PREFETCH, P.SEED):
        assert budget.plan("new", purpose, 60) == ("b", "c", "a")
    assert budget.plan("new", P.RETENTION, 100) == ("b", "c", "a", "kept")
    with pytest.raises(StateError, match="an archived version needs 61 bytes"):
        budget.plan("new", P.ARCHIVE, 61)


def test_what_deltas_have_given_back_is_free_again() -> None:
    budget = Budget(100)
    recalled = list[str]()
    budget.on_recall = recalled.append
    assert budget.lend("r", 100)
    assert not budget.lend("other", 1)
    budget.take_back("r")
    assert budget.lend("other", 100)
    budget.reserve("a", P.PREFETCH, 100)
    assert recalled == ["other"]  # and not what has been given back


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcde"), st.sampled_from(sorted(P)), st.integers(0, 120), st.booleans()
        )
    )
)
def test_never_more_than_there_is(steps: list[tuple[str, Purpose, int, bool]]) -> None:
    """Whoever does what the plan says gets what was asked for."""
    budget = Budget(100)
    for ident, purpose, nbytes, frees in steps:
        if frees:
            budget.free(ident)
        try:
            going = budget.plan(ident, purpose, nbytes)
        except StateError:
            with pytest.raises(StateError):
                budget.reserve(ident, purpose, nbytes)
        else:
            for other in going:
                reservation = budget.reservation(other)
                assert other != ident
                assert reservation is not None
                assert reservation.purpose in OUTRANKS[purpose]
                budget.free(other)
            budget.reserve(ident, purpose, nbytes)
        budget.check_invariants()
        assert budget.reserved_bytes <= 100
