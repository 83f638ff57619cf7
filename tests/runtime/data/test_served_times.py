"""What a source tells of a reader that has several connections."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from tensorhub.observed import ServedTiming
from tensorhub.runtime.data.served_times import ServedTimes


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
