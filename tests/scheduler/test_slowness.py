"""Which workers are found slow, by what transfers between two of them show: the slow one of the
two, and nobody else.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from tensorhub.scheduler.links import RATE_MAX, SUPPOSED_BYTES_PER_S, VOTE_S, Distance
from tensorhub.scheduler.slowness import PEERS_MAX, SLOWNESS_MAX, Slowness

RACK, SITE = Distance.RACK, Distance.SITE
FAST, SLOW = 800e6, 100e6  # bytes per second


class Told:
    """What readers have told, of one second each."""

    def __init__(self) -> None:
        self.slowness = Slowness()
        self.now = 0.0

    def reads(
        self,
        reader: str,
        source: str,
        bytes_per_s: float,
        *,
        sharers: int | None = 1,
        apart: Distance = RACK,
    ) -> None:
        self.now += 1.0
        self.slowness.heard(reader, source, apart, int(bytes_per_s), 1.0, sharers, self.now)

    def waits(self, reader: str, source: str, bytes_per_s: float) -> None:
        self.reads(reader, source, bytes_per_s, sharers=None)

    def of(self, worker: str) -> int:
        return self.slowness.of(worker, SUPPOSED_BYTES_PER_S, self.now)

    def slow(self) -> dict[str, int]:
        return {worker: found for worker in self.slowness._met if (found := self.of(worker))}


def test_a_reader_is_slow_where_its_source_has_given_others_more() -> None:
    told = Told()
    told.reads("fast", "trainer", FAST)
    told.reads("slow", "trainer", SLOW)
    assert told.slow() == {"slow": 3}


def test_readers_that_share_a_source_are_not_slow() -> None:
    told = Told()
    told.reads("alone", "trainer", FAST)
    for number in range(8):
        told.reads(f"reader {number}", "trainer", FAST / 8, sharers=8)
    assert told.slow() == {}


def test_what_a_source_gives_over_a_shorter_distance_accuses_no_worker_that_is_farther() -> None:
    told = Told()
    told.reads("near", "trainer", FAST, apart=RACK)
    told.reads("far", "trainer", SLOW, apart=SITE)
    assert told.slow() == {}


def test_a_source_is_slow_once_two_readers_say_so_who_read_faster_elsewhere() -> None:
    told = Told()
    told.reads("a", "trainer", FAST)
    told.reads("b", "trainer", FAST)
    told.reads("a", "slow", SLOW)
    assert told.of("slow") == 0
    told.reads("b", "slow", SLOW)
    assert told.of("slow") == 3
    told.reads("a", "trainer", FAST)
    told.reads("b", "trainer", FAST)
    assert told.slow() == {"slow": 3}


def test_a_machine_that_has_become_slow_is_found_so_at_its_next_word() -> None:
    told = Told()
    for reader in "abc":
        told.reads(reader, "trainer", FAST)
    told.reads("a", "b", SLOW)
    assert told.slow() == {"a": 3}


def test_a_machine_that_is_fast_again_is_found_so_at_its_next_word_even_if_it_waits() -> None:
    told = Told()
    for reader in "abc":
        told.reads(reader, "trainer", FAST)
    told.waits("a", "c", FAST)
    told.reads("a", "b", SLOW)
    assert told.slow() == {"a": 3}
    told.waits("a", "c", FAST * 0.9)
    assert told.slow() == {}
    told.reads("d", "a", SLOW)  # it is no excuse for others, either
    assert told.slow() == {"d": 3}


def test_it_is_forgotten() -> None:
    told = Told()
    told.reads("fast", "trainer", FAST)
    told.reads("slow", "trainer", SLOW)
    told.now += VOTE_S
    assert told.slow() == {}
    told.reads("fast", "trainer", FAST)
    told.reads("slow", "trainer", SLOW)
    assert told.slow() == {"slow": 3}
    told.slowness.forget("slow")
    assert "slow" not in told.slowness._met.keys() | told.slowness._slow.keys()


def test_a_reader_that_waits_does_not_say_again_that_it_was_slow() -> None:
    told = Told()
    told.reads("fast", "trainer", FAST)
    told.reads("slow", "trainer", FAST / 4)
    told.waits("slow", "fast", FAST)
    assert told.slow() == {}
    told.waits("slow", "trainer", FAST / 4)
    assert told.slow() == {}


def test_a_slow_reader_that_shares_a_source_or_waits_is_slow_still() -> None:
    told = Told()
    told.reads("fast", "trainer", FAST)
    told.reads("slow", "trainer", FAST / 4)
    told.reads("slow", "trainer", FAST / 4, sharers=4)
    assert told.slow() == {"slow": 2}
    told.waits("slow", "trainer", FAST / 4)
    assert told.slow() == {"slow": 2}
    told.waits("slow", "trainer", FAST)
    assert told.slow() == {}


@pytest.mark.parametrize("apart", [Distance.HOST, Distance.FAR])
def test_within_a_host_and_across_sites_nothing_is_told_of_workers(apart: Distance) -> None:
    told = Told()
    told.reads("fast", "trainer", FAST, apart=apart)
    told.reads("slow", "trainer", SUPPOSED_BYTES_PER_S[apart] / 8, apart=apart)
    assert told.slow() == {}


words = st.lists(
    st.tuples(
        st.sampled_from("abcdt"),
        st.integers(0, 2**64),
        st.floats(0, 1e9),
        st.none() | st.integers(0, 2**20),
    ),
    max_size=30,
)


@given(words)
def test_one_liar_makes_no_honest_worker_slow_that_others_have_seen(
    lies: list[tuple[str, int, float, int | None]],
) -> None:
    """Whatever it says, of whomever; the others have read from each other at what links carry."""
    told = Told()
    rates = (40e9, FAST, FAST, 1e8)
    for reader, source in pairwise("tabcdta"):
        told.reads(reader, source, FAST)
    for source, nbytes, seconds, sharers in lies:
        told.slowness.heard("liar", source, RACK, nbytes, seconds, sharers, told.now)
    for reader, source in pairwise("tabcdta"):
        assert not told.slowness.of(reader, rates, told.now)
        assert not told.slowness.of(source, rates, told.now)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 2**40)), max_size=80)
)
def test_books_are_bounded_and_what_is_told_depends_on_nothing_else(
    words: list[tuple[int, int, int]],
) -> None:
    one, other = Told(), Told()
    for told in (one, other):
        for reader, source, rate in words:
            if reader != source:
                told.reads(str(reader), str(source), rate)
    assert one.slow() == other.slow()
    assert all(len(met) <= PEERS_MAX for met in one.slowness._met.values())
    assert all(0 < found <= SLOWNESS_MAX for found in one.slow().values())
    assert all(
        each.shown <= each.most <= RATE_MAX
        for met in one.slowness._met.values()
        for each in met.values()
    )


@given(
    st.permutations("abcdefgh"),
    st.sampled_from([0.5, 0.25, 0.125]),
    st.integers(0, 7),
    st.booleans(),
)
def test_honest_words_of_one_slow_machine_find_it_and_nobody_else(
    order: list[str], share: float, place: int, first_is_slow: bool
) -> None:
    """Two versions, each in a chain, whose order differs: who is behind the slow one waits for
    it.
    """
    told = Told()
    slow = order[0] if first_is_slow else order[place]
    for chain in (order, [*order[1:], order[0]]):
        carried = FAST
        for source, reader in pairwise(["trainer", *chain]):
            if reader == slow:
                told.reads(reader, source, carried := FAST * share)
            elif source == "trainer":
                told.reads(reader, source, carried)
            else:
                told.waits(reader, source, carried)
    assert set(told.slow()) == {slow}
