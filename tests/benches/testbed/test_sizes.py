"""Scenarios, as large as this machine can run them."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from benches.testbed.sizes import SIZES, WORKERS_PER_CORE, Size, check, fitted, with_rollouts, with_slow, with_wan
from tensorhub.testing.flow import timetable
from tensorhub.testing.flow.scenario import ScenarioError, load, names


@pytest.mark.parametrize("name", sorted(SIZES))
def test_a_workload_keeps_its_figures_in_copies(name: str) -> None:
    """A smaller version over slower links is the same workload: what is drawn is as long, in times of one copy."""
    before = load(name)
    after = check(fitted(before, replace(SIZES[name], every_copies=None)))
    assert after.every_copies == before.every_copies
    lengths = [next(timetable.generations(each, "rollout-1")) / each.copy_s for each in (before, after)]
    assert lengths[0] == pytest.approx(lengths[1])
    assert after.rank_bytes % 16 == 0
    if len(before.sites) > 1:
        ratios = [each.links.nic_mbit_per_s / each.links.wan_mbit_per_s for each in (before, after)]
        assert ratios[0] == pytest.approx(ratios[1])


def test_sizes_are_of_built_in_workloads() -> None:
    assert set(SIZES) <= set(names())


def test_more_workers_than_the_machine_can_run_are_refused() -> None:
    many = with_rollouts(load("standalone"), WORKERS_PER_CORE * len(os.sched_getaffinity(0)))
    with pytest.raises(ScenarioError, match=r"workers, and this machine can run \d+: give fewer hosts"):
        check(many)


def test_a_third_site_is_refused() -> None:
    scenario = load("cross-datacenter")
    with pytest.raises(ScenarioError, match="3 sites: the testbed has one WAN"):
        check(replace(scenario, hosts=(*scenario.hosts, replace(scenario.hosts[1], site="c"))))


def test_a_curve_changes_one_thing() -> None:
    scenario = load("cross-datacenter")
    more = with_rollouts(scenario, 3)
    assert more.count("rollout") == 3
    assert replace(more, hosts=scenario.hosts) == scenario
    wider = with_wan(scenario, 4.0)
    assert wider.links.wan_mbit_per_s == scenario.links.nic_mbit_per_s / 4
    with pytest.raises(ScenarioError, match="no WAN"):
        with_wan(load("standalone"), 4.0)


def test_the_first_rollout_is_slow_and_the_others_keep_their_names() -> None:
    scenario = load("standalone")
    slow = with_slow(scenario, 4.0)
    assert [hosts.slow for _, hosts in timetable.rollouts(slow)] == [4.0] + [1.0] * 7
    assert [name for name, _ in timetable.rollouts(slow)] == [name for name, _ in timetable.rollouts(scenario)]
    assert [hosts.slow for _, hosts in timetable.rollouts(with_slow(with_rollouts(scenario, 1), 4.0))] == [4.0]


def test_a_size_says_how_often() -> None:
    assert fitted(load("standalone"), Size(1.0, 100.0, 3, 9.0)).every_copies == 9.0
