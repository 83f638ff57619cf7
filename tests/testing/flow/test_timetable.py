"""What is drawn: the same for every system, and as the scenario says."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise
from math import log
from statistics import fmean, stdev

import pytest

from tensorhub.testing.flow.scenario import load
from tensorhub.testing.flow.timetable import generations, presences, rollouts


def test_generations_have_the_mean_and_the_sigma_that_are_said() -> None:
    scenario = load("standalone")
    lengths = list(islice(generations(scenario, "rollout-0"), 20_000))
    assert fmean(lengths) == pytest.approx(4 * scenario.copy_s, rel=0.02)
    assert stdev(map(log, lengths)) == pytest.approx(0.6, rel=0.02)
    assert lengths[:5] == list(islice(generations(scenario, "rollout-0"), 5))
    assert lengths[:5] != list(islice(generations(scenario, "rollout-1"), 5))


def test_spot_hosts_come_and_go_and_half_of_them_are_told() -> None:
    scenario = replace(load("elastic"), versions=500)
    found = presences(scenario)
    assert set(found) == {name for name, hosts in rollouts(scenario) if hosts.spot}
    lives = [life for each in found.values() for life in each]
    assert fmean(life.end_s - life.begin_s for life in lives) == pytest.approx(12, rel=0.05)
    away = [later.begin_s - life.end_s for each in found.values() for life, later in pairwise(each)]
    assert fmean(away) == pytest.approx(3, rel=0.05)
    assert min(away) > 0
    told = [life for life in lives if life.notice_s is not None]
    assert len(told) / len(lives) == pytest.approx(0.5, abs=0.05)
    assert all(life.begin_s <= life.notice_s <= life.end_s for life in told if life.notice_s is not None)


def test_kills_are_of_reliable_rollouts_which_come_back() -> None:
    scenario = replace(load("churn"), versions=200)
    found, reliable = presences(scenario), {name for name, hosts in rollouts(scenario) if not hosts.spot}
    killed = [life for name in reliable for life in found.get(name, []) if life.end_s < scenario.ends_s]
    assert len(killed) == pytest.approx(scenario.ends_s / 15, rel=0.25)
    for name in reliable & found.keys():
        for life, later in pairwise(found[name]):
            assert later.begin_s - life.end_s == pytest.approx(3.0)
