"""One slow machine among eight, under the real coordinator: what it costs the others, and
itself.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.testing.flow.run import Run, run_one
from tensorhub.testing.flow.scenario import Scenario, load

# times as many bytes: moves take as long as ever, and the bar is of what they cost beside a copy
LONG = 8


def scenario_of(name: str, versions: int) -> Scenario:
    scenario = replace(load(name), versions=versions)
    return replace(scenario, rank_bytes=LONG * scenario.rank_bytes)


def run_with_slow(scenario: Scenario, worker: str, slow: float) -> Run:
    """This worker's NIC carries so many times less than the others'."""
    hosts = [replace(each, count=1) for each in scenario.hosts for _ in range(each.count)]
    role, _, number = worker.partition("-")
    at = [place for place, each in enumerate(hosts) if each.role == role][int(number)]
    hosts[at] = replace(hosts[at], slow=slow)
    return run_one(replace(scenario, hosts=tuple(hosts)), "tensorhub")


def copies(run: Run, *, without: str, since: int = 2) -> list[float]:
    """What each call of the others took from that version on, in copies."""
    calls = [
        each
        for each in run.workload.attempts
        if each.rollout != without and (each.version or 0) >= since
    ]
    return [each.seconds / run.world.scenario.copy_s for each in calls]


@pytest.mark.parametrize("slow", ["rollout-3", "rollout-7"])
@pytest.mark.parametrize("times", [2.0, 4.0])
def test_from_the_second_version_on_it_costs_the_others_nearly_nothing(
    slow: str, times: float
) -> None:
    """All call at once, and it is in the midst, or the last."""
    scenario = scenario_of("update", 3)
    without = copies(run_one(scenario, "tensorhub"), without=slow)
    found = run_with_slow(scenario, slow, times)
    others = copies(found, without=slow)
    assert len(others) == 7 * 2
    assert sum(others) / len(others) <= 1.05 * sum(without) / len(without)
    assert max(copies(found, without=slow, since=1)) < 1.4  # and while it is learnt
    its = [
        each.seconds / scenario.copy_s for each in found.workload.attempts if each.rollout == slow
    ]
    assert times <= min(its)
    assert max(its) <= 1.05 * times


def test_a_slow_trainer_is_not_taken_for_slow_readers() -> None:
    """All are filled at its rate, in one chain, and nothing is moved to and fro."""
    found = run_with_slow(scenario_of("update", 2), "trainer-0", 4.0)
    assert max(copies(found, without="", since=1)) <= 1.05 * 4
    edges = [edge for edge in found.world.transfers.edges if edge.nbytes > 0]
    assert len(edges) <= 2 * 8 + 4


def test_rollouts_that_update_when_they_are_free_are_not_held_up_by_it() -> None:
    found = run_with_slow(scenario_of("standalone", 8), "rollout-0", 4.0)
    others = copies(found, without="rollout-0")
    assert sum(others) / len(others) <= 1.05
