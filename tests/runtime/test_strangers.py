"""Who goes when too many have not proved themselves; and what is logged of it."""

from __future__ import annotations

import resource

import pytest

from tensorhub.runtime.logs import Tally
from tensorhub.runtime.strangers import STRANGERS_MAX, Strangers, origin_of, shares


def test_a_flood_throws_itself_out() -> None:
    strangers = Strangers[str](4)
    assert strangers.admit("honest", "10.0.0.2") is None
    gone = [strangers.admit(f"flood{number}", "10.0.0.1") for number in range(100)]
    assert gone == [None] * 3 + [f"flood{number}" for number in range(97)]  # the oldest of the crowd, each time
    assert len(strangers) == 4
    strangers.dismiss("honest")
    strangers.dismiss("honest")
    assert strangers.admit("another", "10.0.0.3") is None
    assert repr(strangers) == "<Strangers: 4 of at most 4, from 2 origins>"


def test_among_equals_who_came_first_goes_perhaps_the_new_one() -> None:
    strangers = Strangers[int](2)
    assert [strangers.admit(number, f"10.0.0.{number}") for number in range(4)] == [None, None, 0, 1]
    assert Strangers[int](0).admit(7, "x") == 7
    assert strangers.oldest_of_most() == 2
    assert strangers.oldest_of_most() == 3
    assert strangers.oldest_of_most() is None


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
        (1024, (256, 640)),
        (64, (16, 32)),
        (3, (1, 2)),
    ],
)
def test_descriptors_are_shared_out(monkeypatch: pytest.MonkeyPatch, soft: int, expected: tuple[int, int]) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert shares(9999) == expected


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
