"""Events that peers can bring about as often as they like."""

from __future__ import annotations

from tensorhub.logs import Tally


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
