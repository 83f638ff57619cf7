"""Whether deltas pay is measured by source."""

from __future__ import annotations

from math import inf

import pytest

from tensorhub.transport.pace import LEAST_BYTES, SOURCES_MAX, Paces, rate_here
from tensorhub.types import Incarnation

HERE, THERE = Incarnation("here"), Incarnation("there")


def test_deltas_are_asked_for_where_whole_chunks_come_slowly() -> None:
    paces = Paces()
    assert paces.prefers_deltas(HERE, 0.0)
    assert not paces.prefers_deltas(HERE, inf)
    paces.came(HERE, LEAST_BYTES, LEAST_BYTES / 1e12)
    assert not paces.prefers_deltas(HERE, 0.0)
    paces.came(THERE, LEAST_BYTES, LEAST_BYTES / 1e6)
    assert paces.prefers_deltas(THERE, inf)


def test_the_codec_here_can_be_measured() -> None:
    pytest.importorskip("zstandard", reason="the extra delta is not installed")
    assert 0 < rate_here() < inf


def test_a_source_whose_deltas_take_long_costs_no_other_source_anything() -> None:
    paces = Paces()
    for source in HERE, THERE:
        paces.came(source, LEAST_BYTES, LEAST_BYTES / 1e8)
    for _ in range(100):
        paces.applied(HERE, LEAST_BYTES, LEAST_BYTES / 1e6)
    assert not paces.prefers_deltas(HERE, 0.0)
    assert paces.prefers_deltas(THERE, 0.0)


def test_a_small_measurement_counts_for_nothing_and_the_oldest_source_is_forgotten() -> None:
    paces = Paces()
    paces.came(HERE, LEAST_BYTES - 1, 1e-9)
    assert paces.prefers_deltas(HERE, 0.0)
    for number in range(SOURCES_MAX + 1):
        paces.came(Incarnation(str(number)), LEAST_BYTES, 1e-9)
    assert paces.prefers_deltas(Incarnation("0"), 0.0)
    assert not paces.prefers_deltas(Incarnation("1"), 0.0)
