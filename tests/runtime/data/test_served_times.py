"""What a source tells of a reader that has several connections."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from tensorhub.observed import ServedTiming
from tensorhub.runtime.data.served_times import LaneTimes, ServedTimes


def test_the_lanes_of_a_lease_are_told_once_and_as_their_sum() -> None:
    """But for its wall time, and how many others were served beside it."""
    names = [each.name for each in fields(ServedTiming)][1:]
    first = ServedTiming("lease", *range(1, len(names) + 1))
    second = ServedTiming("lease", *(100 * each for each in range(1, len(names) + 1)))
    times, told = ServedTimes(), list[ServedTiming]()
    times.on_served = told.append
    times.begin("reader", "lease")
    times.begin("reader", "lease")
    times.end("reader", first)
    assert not told
    times.end("reader", second)
    (found,) = told
    expected = [getattr(first, name) + getattr(second, name) for name in names]
    summed = ServedTiming("lease", *expected)
    assert replace(summed, seconds=found.seconds, readers=found.readers) == found
    assert found.readers == pytest.approx(0.0)


def test_a_lane_is_not_blocked_while_its_reader_asks_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = SimpleNamespace(tcp_counts=lambda: None, sent_bytes=0, calls=0, has_room=True)
    lane: Any = SimpleNamespace(reader="r", connection=connection, given_bytes=7, empty_s=0.0)
    now = 1000.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    all_times, told = ServedTimes(), list[ServedTiming]()
    all_times.on_served = told.append
    times = LaneTimes(lane, all_times)
    for _ in range(3):
        times.asked("lent")
        times.granted("lent")
        lane.given_bytes += 7
        now += 1.0
        times.answered()
        now += 100.0
    times.close()
    (found,) = told
    assert found.seconds == 303.0
    assert found.blocked_s + found.cpu_s + found.delay_s == pytest.approx(3.0)


def test_a_request_that_is_refused_counts_as_no_reader() -> None:
    connection = SimpleNamespace(tcp_counts=lambda: None, sent_bytes=0, calls=0, has_room=True)
    lane: Any = SimpleNamespace(reader="r", connection=connection, given_bytes=0, empty_s=0.0)
    all_times, told = ServedTimes(), list[ServedTiming]()
    all_times.on_served = told.append
    times = LaneTimes(lane, all_times)
    for number in range(3):
        times.asked(f"invented-{number}")
        times.answered()
        assert "0 leases" in repr(all_times)
    times.asked("lent")
    times.granted("lent")
    lane.given_bytes = 7
    times.answered()
    assert "1 leases" in repr(all_times)
    times.close()
    assert [(each.lease, each.nbytes) for each in told] == [("lent", 7)]
