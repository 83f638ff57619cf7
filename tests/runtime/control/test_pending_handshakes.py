"""Who goes when too many have not proved themselves; and what is logged of it."""

from __future__ import annotations

import resource
from collections.abc import Iterable

import pytest
from hypothesis import given, strategies as st

from tensorhub.logs import Tally
from tensorhub.runtime.control.pending_handshakes import (
    PATIENCE_S,
    QUEUE_PER_PLACE,
    READING_STRANGERS_MAX,
    STRANGERS_MAX,
    PendingHandshakes,
    descriptors_for,
    origin_of,
    readers_share,
    shares,
)

WAIT_S = 10.0


def test_a_flood_throws_itself_out() -> None:
    strangers = PendingHandshakes[str](4, 4, WAIT_S)
    assert strangers.came("honest", "10.0.0.2", 0.0) is None
    gone = [strangers.came(f"flood{number}", "10.0.0.1", 0.0) for number in range(100)]
    assert gone == [None] * 3 + [f"flood{number}" for number in range(97)]  # the oldest of the crowd, each time
    assert len(strangers) == 4
    strangers.dismiss("honest")
    strangers.dismiss("honest")
    assert strangers.came("another", "10.0.0.3", 0.0) is None
    assert repr(strangers) == "<PendingHandshakes: 4 of at most 4, from 2 origins>"


def test_among_equals_who_came_first_goes_perhaps_the_new_one() -> None:
    strangers = PendingHandshakes[int](2, 2, WAIT_S)
    assert [strangers.came(number, f"10.0.0.{number}", 0.0) for number in range(4)] == [None, None, 0, 1]
    assert PendingHandshakes[int](0, 1, WAIT_S).came(7, "x", 0.0) == 7
    assert strangers.oldest_of_most() == 2
    assert strangers.oldest_of_most() == 3
    assert strangers.oldest_of_most() is None


def speak(strangers: PendingHandshakes[str], names: Iterable[str], now: float = 0.0) -> None:
    """They come and speak; the origin is a name's first letter."""
    for name in names:
        assert strangers.came(name, name[0], now) is None
        strangers.spoke(name)


def met(strangers: PendingHandshakes[str], now: float = 0.0) -> list[tuple[str, str | None]]:
    """All whose turn it is now, each with who goes for it."""
    found = []
    while (turn := strangers.meet(now)) is not None:
        found.append(turn)
    return found


def test_who_says_nothing_is_not_met_and_expires() -> None:
    strangers = PendingHandshakes[str](9, 9, WAIT_S)
    assert strangers.came("a1", "a", 1.0) is None
    assert met(strangers) == []
    assert strangers.next_deadline(may_meet=True) == 1.0 + WAIT_S
    speak(strangers, ["a2"], 2.0)
    assert met(strangers) == [("a2", None)]
    assert strangers.expired(10.9) == []
    assert strangers.expired(11.0) == ["a1"]
    strangers.spoke("a1")  # it is gone
    assert met(strangers) == []
    assert strangers.expired(99.0) == []  # who is met has a deadline of its own
    assert strangers.next_deadline(may_meet=True) is None
    strangers.dismiss("a2")
    assert len(strangers) == 0


def test_turns_go_round_by_origin() -> None:
    strangers = PendingHandshakes[str](20, 20, WAIT_S)
    speak(strangers, ["a1", "a2", "a3", "b1", "c1", "c2"])
    strangers.dismiss("a2")
    assert met(strangers) == [("a1", None), ("b1", None), ("c1", None), ("a3", None), ("c2", None)]


def test_where_places_are_short_another_origin_gets_one_at_once() -> None:
    strangers = PendingHandshakes[str](20, 4, WAIT_S)
    speak(strangers, ["a1", "a2", "a3", "a4", "a5"])
    assert [name for name, _ in met(strangers)] == ["a1", "a2", "a3", "a4"]
    speak(strangers, ["b1", "b2", "b3"])
    assert met(strangers) == [("b1", "a1"), ("b2", "a2")]  # the oldest of the crowd; then there is none
    assert len(strangers) == 6


def test_who_would_have_as_many_then_waits_as_among_its_own() -> None:
    """Else two origins, of one place more and less, would throw out one another's handshakes without end."""
    strangers = PendingHandshakes[str](99, 3, WAIT_S)
    speak(strangers, ["a1", "a2", "b1", "b2"], 5.0)
    assert {name for name, _ in met(strangers, 5.0)} == {"a1", "a2", "b1"}
    assert met(strangers, 5.0 + PATIENCE_S - 0.01) == []
    assert met(strangers, 5.0 + PATIENCE_S) == [("b2", "a1")]


def test_among_its_own_an_origins_oldest_goes_after_a_while() -> None:
    strangers = PendingHandshakes[str](99, 2, WAIT_S)
    speak(strangers, ["a1", "a2", "a3"], 5.0)
    assert [name for name, _ in met(strangers, 5.0)] == ["a1", "a2"]
    due = strangers.next_deadline(may_meet=True)
    assert due == 5.0 + PATIENCE_S
    assert strangers.next_deadline(may_meet=False) == 5.0 + WAIT_S
    assert met(strangers, due - 0.01) == []
    assert met(strangers, due) == [("a3", "a1")]


def test_a_crowd_that_proves_itself_has_patience_however_many_wait() -> None:
    strangers = PendingHandshakes[str](99, 2, WAIT_S)
    speak(strangers, [f"a{number}" for number in range(60)])
    assert met(strangers) == [("a0", None), ("a1", None)]
    for number in range(40):
        strangers.proved(f"a{number}")
        assert met(strangers) == [(f"a{number + 2}", None)]
    assert met(strangers, PATIENCE_S - 0.01) == []
    assert met(strangers, PATIENCE_S)[0] == ("a42", "a40")


def test_a_flood_of_which_nobody_proves_himself_has_none_once_that_has_shown() -> None:
    strangers = PendingHandshakes[str](99, 2, WAIT_S)
    speak(strangers, [f"a{number}" for number in range(4 + QUEUE_PER_PLACE * 2 + 3)])
    assert met(strangers) == [("a0", None), ("a1", None)]
    assert met(strangers, PATIENCE_S) == [("a2", "a0"), ("a3", "a1"), ("a4", "a2"), ("a5", "a3"), ("a6", "a4")]
    assert met(strangers, PATIENCE_S) == []  # no more wait than have a turn soon
    strangers.proved("a5")
    speak(strangers, [f"b{number}" for number in range(9)], PATIENCE_S)
    assert [name for name, _ in met(strangers, PATIENCE_S)].count("a7") == 1


def test_who_is_met_stays_while_there_is_somebody_else_who_can_go() -> None:
    strangers = PendingHandshakes[str](4, 2, WAIT_S)
    speak(strangers, ["a0", "a1", "a2", "a3"])
    assert met(strangers) == [("a0", None), ("a1", None)]
    assert [strangers.came(name, "a", 0.0) for name in ("a4", "a5")] == ["a2", "a3"]


@given(st.lists(st.tuples(st.sampled_from("csmdxo"), st.integers(0, 9), st.integers(0, 3)), min_size=30, max_size=60))
def test_whatever_happens_the_books_agree(steps: list[tuple[str, int, int]]) -> None:
    strangers, now, there = PendingHandshakes[int](5, 2, WAIT_S), 0.0, set[int]()
    for number, (what, seconds, which) in enumerate(steps):
        now += seconds
        known = sorted(there)[which : which + 1]
        if what == "c":
            there.add(number)
            there.discard(strangers.came(number, "abcd"[which], now))
        elif what == "s" and known:
            strangers.spoke(known[0])
        elif what == "m" and (turn := strangers.meet(now)) is not None:
            assert turn[0] in there
            there.discard(turn[1])
        elif what == "d" and known:
            strangers.dismiss(known[0])
            there -= {known[0]}
        elif what == "x":
            there -= set(strangers.expired(now))
        elif what == "o":
            there.discard(strangers.oldest_of_most())
        assert set(strangers._origins) == there
        assert {s for group in strangers._by_origin.values() for s in group} == there
        spoken = [s for group in strangers._spoken.values() for s in group]
        being_met = [s for group in strangers._met.values() for s in group]
        assert strangers._counts["spoken"] == len(spoken)
        assert strangers._counts["met"] == len(being_met) <= strangers.met_max
        assert set(spoken) <= set(strangers._came)
        assert set(being_met) | set(strangers._came) == there
        assert all([*strangers._by_origin.values(), *strangers._spoken.values(), *strangers._met.values()])


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8::1", "2001:db8::/64"),
        ("2001:db8::ffff:1", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        (b"\0abstract", ""),
    ],
)
def test_what_counts_as_one_origin(host: object, origin: str) -> None:
    assert origin_of(host) == origin


@pytest.mark.parametrize(
    ("soft", "expected"),
    [
        (resource.RLIM_INFINITY, (STRANGERS_MAX, 9999)),
        (20_000, (STRANGERS_MAX, 9999)),
        (4096, (1024, 2944)),
        (1024, (256, 640)),
        (64, (16, 32)),
        (3, (1, 2)),
    ],
)
def test_descriptors_are_shared_out(monkeypatch: pytest.MonkeyPatch, soft: int, expected: tuple[int, int]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert shares(9999) == expected


@pytest.mark.parametrize("sessions", [1000, 12159, 12161, 16384])
def test_so_many_descriptors_are_enough_and_one_less_is_not(monkeypatch: pytest.MonkeyPatch, sessions: int) -> None:
    soft = descriptors_for(sessions)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert shares(sessions)[1] == sessions
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft - 1, soft - 1))
    assert shares(sessions)[1] == sessions - 1


@pytest.mark.parametrize(
    ("soft", "expected"),
    [(resource.RLIM_INFINITY, READING_STRANGERS_MAX), (20_000, READING_STRANGERS_MAX), (1024, 128), (3, 1)],
)
def test_strangers_of_an_owner_leave_its_user_most_descriptors(
    monkeypatch: pytest.MonkeyPatch, soft: int, expected: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert readers_share() == expected


def test_what_is_counted_is_said_once_a_second_with_how_often() -> None:
    said: list[dict[str, object]] = []
    now = [0.0]

    def say(event: str, **fields: object) -> None:
        said.append({"event": event, **fields})

    tally = Tally(say, "flooded", lambda: now[0])
    for number in range(1000):
        now[0] = number / 500
        tally.count(who=number)
    assert said == [
        {"event": "flooded", "times": 1, "who": 0},
        {"event": "flooded", "times": 500, "who": 500},
    ]
