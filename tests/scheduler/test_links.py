"""What is believed of links: what transfers tell soon counts more than what is supposed, and no one
reader decides.
"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from tensorhub.messages import Flow
from tensorhub.scheduler.links import (
    RATE_MAX,
    RATE_MIN,
    SUPPOSED_BYTES_PER_S,
    VOTE_S,
    VOTES_MAX,
    Distance,
    FlowMeter,
    Links,
)

RACK = Distance.RACK
SLOW, FAST = 25e6, 20e9  # bytes per second


def links_of(
    *bytes_per_s: float, apart: Distance = RACK, sharers: int | None = 1, now: float = 0.0
) -> Links:
    """What so many readers have told, each of one second."""
    links = Links()
    for number, rate in enumerate(bytes_per_s):
        links.heard(f"reader {number}", apart, int(rate), 1.0, sharers, now)
    return links


def test_one_reader_alone_makes_links_slower_not_faster() -> None:
    assert links_of(SLOW).rates(0.0)[RACK] == links_of(SLOW, sharers=0).rates(0.0)[RACK] == SLOW
    assert links_of(FAST).rates(0.0)[RACK] == SUPPOSED_BYTES_PER_S[RACK]


def test_what_is_farther_and_not_known_is_slower_in_proportion() -> None:
    rates = links_of(SLOW, SLOW).rates(0.0)
    assert rates[Distance.HOST] == SUPPOSED_BYTES_PER_S[Distance.HOST]
    scale = SLOW / SUPPOSED_BYTES_PER_S[RACK]
    assert rates[Distance.SITE] == SUPPOSED_BYTES_PER_S[Distance.SITE] * scale
    assert rates[Distance.FAR] == SUPPOSED_BYTES_PER_S[Distance.FAR] * scale


def test_a_shared_link_is_not_taken_for_a_slow_one() -> None:
    """Four readers of one source get a quarter each: the link may carry four times that, and not
    more.
    """
    links = links_of(1e9, 1e9)
    links.heard("reader 0", RACK, int(0.25e9), 1.0, 4, 1.0)
    links.heard("reader 1", RACK, int(0.25e9), 1.0, 4, 1.0)
    assert links.rates(1.0)[RACK] == 1e9
    links.heard("reader 0", RACK, int(SLOW), 1.0, 4, 2.0)
    links.heard("reader 1", RACK, int(SLOW), 1.0, 4, 2.0)
    assert links.rates(2.0)[RACK] == 4 * SLOW


def test_who_may_have_waited_makes_nothing_slower() -> None:
    links = links_of(1e9, 1e9)
    links.heard("reader 0", RACK, 1000, 1.0, None, 1.0)
    links.heard("another", RACK, 1000, 1.0, None, 1.0)
    assert links.rates(1.0)[RACK] == 1e9
    for reader in ("reader 0", "reader 1", "another"):
        links.heard(reader, RACK, int(8e9), 1.0, None, 2.0)
    assert links.rates(2.0)[RACK] == 8e9


def test_a_word_that_may_be_too_low_is_held_against_the_same_readers_last_one_while_that_counts() -> (
    None
):
    links = links_of(SLOW, FAST, FAST)
    assert links.rates(0.0)[RACK] == SUPPOSED_BYTES_PER_S[RACK]
    links.heard("reader 0", RACK, int(2 * SLOW), 1.0, None, 1.0)
    assert links.rates(VOTE_S)[RACK] == 2 * SLOW  # of the others nothing counts any more
    links = links_of(SLOW)
    links.heard("reader 0", RACK, int(2 * SLOW), 1.0, None, VOTE_S)
    assert links.rates(VOTE_S) == SUPPOSED_BYTES_PER_S


def test_what_was_told_is_forgotten() -> None:
    links = links_of(SLOW, SLOW)
    assert links.rates(VOTE_S - 1)[RACK] == SLOW
    assert links.rates(VOTE_S) == SUPPOSED_BYTES_PER_S


def test_each_vote_ends_at_its_own_time() -> None:
    links = links_of(8e9, 8e9)
    links.heard("reader 1", RACK, int(8e9), 1.0, 1, VOTE_S / 2)
    assert links.rates(VOTE_S / 2)[RACK] == 8e9
    assert links.rates(VOTE_S) == SUPPOSED_BYTES_PER_S


def test_what_a_link_has_become_is_believed_after_a_few_readers() -> None:
    links = links_of(*[1e9] * 100)
    assert f"RACK {VOTES_MAX} votes" in repr(links)
    for number in range(VOTES_MAX // 2 + 1):
        links.heard(f"later {number}", RACK, int(SLOW), 1.0, 1, 1.0)
    assert links.rates(1.0)[RACK] == SLOW


def test_what_comes_is_measured_from_the_first_bytes_on() -> None:
    """How long these took to come nobody knows. Helpers may tell what they got out of order."""
    meter = FlowMeter()
    meter.arrived(1000, 5.0)
    assert meter.flow("lease") is None
    meter.arrived(300, 6.0)
    meter.arrived(200, 5.5)
    assert meter.flow("lease") == Flow("lease", 500, 1.0)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2**64), st.floats(0, 1e9), st.one_of(st.none(), st.integers(0, 2**20))
        )
    ),
    st.integers(2, 2 * VOTES_MAX),
)
def test_one_liar_changes_nothing_that_others_agree_on(
    lies: list[tuple[int, float, int | None]], honest: int
) -> None:
    """However often and whatever one reader says; and its word is bounded where it is the only
    one.
    """
    links = links_of(*[8e8] * honest)
    for nbytes, seconds, sharers in lies:
        links.heard("liar", RACK, nbytes, seconds, sharers, 1.0)
    assert links.rates(1.0)[RACK] == 8e8


reports = st.lists(
    st.tuples(
        st.sampled_from("abcdefgh"),
        st.sampled_from(Distance),
        st.integers(0, 2**64),
        st.floats(0, 1e9),
        st.one_of(st.none(), st.integers(0, 2**20)),
        st.floats(0, 1000),
    ),
    max_size=40,
)


@given(reports)
def test_rates_are_bounded_and_fall_with_distance(
    told: list[tuple[str, Distance, int, float, int | None, float]],
) -> None:
    links, again, now = Links(), Links(), 0.0
    for voter, apart, nbytes, seconds, sharers, later_s in told:
        now += later_s
        links.heard(voter, apart, nbytes, seconds, sharers, now)
        again.heard(voter, apart, nbytes, seconds, sharers, now)
        rates = links.rates(now)
        assert all(RATE_MIN <= rate <= RATE_MAX for rate in rates)
        assert all(near >= far for near, far in pairwise(rates))
    assert links.rates(now) == again.rates(now)
    assert links.rates(now + VOTE_S) == SUPPOSED_BYTES_PER_S


@given(st.floats(1e6, 1e9), st.lists(st.integers(1, 8), min_size=3, max_size=10))
def test_honest_reports_of_equal_links_lead_to_what_they_carry(
    carried: float, sharers: list[int]
) -> None:
    """However they were shared: never taken for slower than a share of them, nor for faster than
    they are.
    """
    links = Links()
    for number, count in enumerate(sharers):
        links.heard(
            f"reader {number}", RACK, int(1000 * carried / count), 1000.0, count, float(number)
        )
    found = links.rates(float(len(sharers)))[RACK]
    assert carried / max(sharers) * 0.99 <= found <= max(carried, SUPPOSED_BYTES_PER_S[RACK]) * 1.01
