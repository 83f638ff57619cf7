"""What is drawn: the same for every system, and as the scenario says."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, pairwise
from math import log
from statistics import fmean, stdev

import pytest

from tensorhub.testing.flow.scenario import Scenario, load
from tensorhub.testing.flow.timetable import Presence, generations, presences, rollouts


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
    assert all(
        life.begin_s <= life.notice_s <= life.end_s for life in told if life.notice_s is not None
    )


def test_kills_are_of_reliable_rollouts_which_come_back() -> None:
    scenario = replace(load("churn"), versions=200)
    found, reliable = (
        presences(scenario),
        {name for name, hosts in rollouts(scenario) if not hosts.spot},
    )
    killed = [
        life for name in reliable for life in found.get(name, []) if life.end_s < scenario.ends_s
    ]
    assert len(killed) == pytest.approx(scenario.ends_s / 15, rel=0.25)
    for name in reliable & found.keys():
        for life, later in pairwise(found[name]):
            assert later.begin_s - life.end_s == pytest.approx(3.0)


def test_a_spot_host_is_told_as_long_before_its_end_as_is_said_or_when_it_comes() -> None:
    scenario = replace(load("elastic"), versions=500)
    assert scenario.spot is not None
    for notice_copies in (0.0, scenario.spot.notice_copies, 11.0):
        lives = _lives(
            replace(
                scenario, spot=replace(scenario.spot, notice_share=1.0, notice_copies=notice_copies)
            )
        )
        notice_s = notice_copies * scenario.copy_s
        assert all(life.notice_s == max(life.begin_s, life.end_s - notice_s) for life in lives)
    assert any(life.notice_s == life.begin_s for life in lives), (
        "some are shorter than the last notice"
    )


def test_spot_hosts_are_there_for_about_as_long_as_is_said_and_do_not_come_all_at_once() -> None:
    scenario = replace(load("elastic"), versions=500)
    assert scenario.spot is not None
    least, most = (
        (1 + sign * scenario.spot.spread) * scenario.spot.on_copies * scenario.copy_s
        for sign in (-1, 1)
    )
    long = [life.end_s - life.begin_s for life in _lives(scenario)]
    assert least <= min(long) < 1.1 * least
    assert 0.9 * most < max(long) <= most
    first = [each[0].begin_s for each in presences(scenario).values()]
    assert len(set(first)) == len(first)
    assert min(first) > 0


def test_who_is_killed_is_there_before_and_stays_after_the_last_time() -> None:
    scenario = replace(load("churn"), versions=200)
    found, reliable = (
        presences(scenario),
        {name for name, hosts in rollouts(scenario) if not hosts.spot},
    )
    for name in reliable & found.keys():
        lives = found[name]
        assert lives[0].begin_s == 0
        assert lives[-1].end_s == float("inf")
        assert all(life.begin_s < life.end_s and life.notice_s is None for life in lives)


@pytest.mark.parametrize("name", ["elastic", "churn"])
def test_another_seed_draws_all_of_it_anew(name: str) -> None:
    scenario = replace(load(name), versions=200)
    found, other = (presences(replace(scenario, seed=seed)) for seed in (1, 2))
    assert presences(replace(scenario, seed=1)) == found
    assert all(found[each] != other[each] for each in found.keys() & other.keys())


def _lives(scenario: Scenario) -> list[Presence]:
    return [life for each in presences(scenario).values() for life in each]
