"""Whole scenarios under the real coordinator and under the baselines, against times that can be
worked out.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tensorhub.testing.flow.report import Report, Stalls, cut_bound, depths, parents, quantile
from tensorhub.testing.flow.run import SYSTEMS, Run, check, possible, run_one
from tensorhub.testing.flow.scenario import Scenario, ScenarioError, at_scale, in_groups, load
from tensorhub.testing.flow.transfers import Edge
from tensorhub.testing.flow.workload import Attempt


def updates(run: Run) -> list[float]:
    return [
        each.seconds for each in run.workload.attempts if not each.joins and each.outcome == "done"
    ]


def short(name: str, versions: int = 4) -> Scenario:
    return replace(load(name), versions=versions)


def told(scenario: Scenario, system: str) -> str:
    """Everything that a run says, but for how long it took here."""
    found = run_one(scenario, system)
    attempts = [
        (a.rollout, a.joins, a.began_s, a.ended_s, a.version, a.outcome)
        for a in found.workload.attempts
    ]
    row = replace(found.row, wall_s=0.0)
    return json.dumps([Report(scenario, [row]).as_json(), attempts, found.world.transfers.carried])


@pytest.mark.parametrize("name", ["standalone", "churn"])
def test_the_same_seed_comes_to_the_same_end(name: str) -> None:
    scenario = short(name)
    for system in possible(scenario):
        first = told(scenario, system)
        assert told(scenario, system) == first
        assert told(replace(scenario, seed=scenario.seed + 1), system) != first


@pytest.mark.parametrize("name", ["standalone", "elastic", "cross-datacenter", "churn", "update"])
def test_every_system_runs_every_scenario_that_it_can(name: str) -> None:
    scenario = short(name, 3)
    runs = [run_one(scenario, system) for system in possible(scenario)]
    report = Report(scenario, [each.row for each in runs])
    for each in runs:
        there = [rollout for rollout in each.workload.rollouts if rollout.is_there]
        assert all(rollout.held for rollout in there if rollout.life == 1), each.row.system
        assert len(each.workload.puts) == scenario.versions
        assert max((rollout.held for rollout in there), default=0) >= scenario.versions - 1
    assert json.loads(json.dumps(report.as_json()))["scenario"] == name


def test_a_rollout_that_updates_alone_is_stalled_for_a_copy() -> None:
    """Less than one part in a hundred is the conversation: half round trips, the coordinator's
    turn, connecting.
    """
    found = run_one(load("standalone"), "tensorhub")
    copy_s = found.world.scenario.copy_s
    assert all(copy_s <= each < 1.01 * copy_s for each in updates(found))
    # however many there were
    assert max(each.seconds for each in found.workload.attempts if not each.joins) < 1.01 * copy_s
    assert len(updates(found)) > 20 * 7
    found.workload.system.coordinated.coordinator.check_invariants()  # type: ignore[attr-defined]


def test_the_phases_of_an_update_add_up_to_its_stall() -> None:
    """Alone, nearly all of it is the reading; all eight at once wait for nothing but that
    either.
    """
    found = run_one(short("standalone"), "tensorhub")
    phases, stalls = found.row.phases, updates(found)
    assert phases["read_s"] == pytest.approx(found.world.scenario.copy_s, rel=0.005)
    assert sum(phases.values()) == pytest.approx(sum(stalls) / len(stalls), rel=1e-6)
    assert len(found.workload.system.phases) == len(stalls)  # type: ignore[attr-defined]


def test_a_chain_of_all_costs_a_lag_for_each_hop() -> None:
    """All eight call at once: one reads from the trainer, each other one from the one before."""
    scenario = short("update", 2)
    found = run_one(scenario, "tensorhub")
    rate = scenario.links.nic_bytes_per_s
    lag_s = scenario.chunk_bytes / rate
    assert found.row.depth_most == 8
    assert max(updates(found)) == pytest.approx(scenario.copy_s + 7 * lag_s, rel=0.01)


def test_one_copy_crosses_the_wan_for_each_version_and_a_seed_takes_it_out_of_the_stall() -> None:
    scenario = short("cross-datacenter", 3)
    without, seeded, pulled = (
        run_one(scenario, name) for name in ("tensorhub", "tensorhub+seeds", "pull")
    )
    wan_s = scenario.rank_bytes / (scenario.links.wan_mbit_per_s * 125_000)
    assert without.row.wan_copies == pytest.approx(1.0)
    assert seeded.row.wan_copies == pytest.approx(1.0)
    assert pulled.row.wan_copies == pytest.approx(8.0)
    assert max(updates(without)) < 1.01 * wan_s
    assert max(updates(seeded)) < 1.1 * scenario.copy_s


def test_a_prefetched_update_is_a_local_copy() -> None:
    scenario = short("standalone")
    found = run_one(scenario, "tensorhub+prefetch")
    local_s = scenario.rank_bytes / (scenario.links.host_copy_mbit_per_s * 125_000)
    assert max(updates(found)) == pytest.approx(local_s, abs=0.002)


def test_a_paused_broadcast_takes_a_copy_and_a_tree_of_whole_copies_one_for_each_level() -> None:
    scenario = short("update", 3)
    piped, poor = run_one(scenario, "broadcast"), run_one(scenario, "broadcast-poor")
    assert updates(piped) == pytest.approx([scenario.copy_s * 1.06] * 16, rel=0.02)
    # 9 members: 4 levels
    assert updates(poor) == pytest.approx([scenario.copy_s * 4] * 16, rel=0.01)
    paused = run_one(short("standalone"), "broadcast-pausing")
    assert updates(paused) == pytest.approx(
        [scenario.copy_s * 1.06] * len(updates(paused)), rel=0.02
    )


def test_readers_of_one_uplink_share_it() -> None:
    scenario = replace(short("update", 2), every_copies=20.0)
    assert updates(run_one(scenario, "pull")) == pytest.approx([scenario.copy_s * 8] * 8, rel=0.01)


def test_a_waiting_broadcast_holds_everybody_up_until_the_last_is_free() -> None:
    found = run_one(short("standalone", 3), "broadcast")
    ends = {each.ended_s for each in found.workload.attempts if each.version == 2}
    last = max(each.began_s for each in found.workload.attempts if each.version == 2)
    assert len(ends) == 1
    assert ends.pop() - last == pytest.approx(1.06, rel=0.02)


def test_a_fixed_group_is_not_offered_where_members_come_and_go() -> None:
    assert not any(
        name.startswith("broadcast")
        for name in (*possible(load("elastic")), *possible(load("churn")))
    )
    assert set(possible(load("standalone"))) == {*SYSTEMS} - {
        "tensorhub+seeds",
        "tensorhub+resharded",
    }
    assert set(possible(in_groups(load("standalone"), 2))) == {*SYSTEMS} - {"tensorhub+seeds"}
    with pytest.raises(
        ScenarioError, match="elastic cannot be run under 'broadcast': give some of tensorhub"
    ):
        check(load("elastic"), ["broadcast"])
    with pytest.raises(ScenarioError, match="there is no system 'nccl'"):
        check(load("elastic"), ["nccl"])


def test_groups_of_ranks_update_together() -> None:
    scenario = replace(at_scale(load("standalone"), 32, "70B"), versions=3)
    found = run_one(scenario, "tensorhub")
    assert (scenario.ranks, len(found.workload.rollouts)) == (4, 8)
    assert max(updates(found)) < 1.05 * scenario.copy_s
    # of the other group on the same host
    assert min(updates(found)) == pytest.approx(scenario.copy_s / 12, rel=0.05)


@pytest.mark.parametrize("name", ["standalone", "elastic"])
def test_groups_of_two_hosts_update_as_fast_as_single_ones(name: str) -> None:
    scenario = replace(in_groups(load(name), 2), versions=6)
    found = run_one(scenario, "tensorhub")
    assert found.row.updates.done > 10
    assert found.row.to_floor is not None
    assert found.row.to_floor < 1.03


@pytest.mark.parametrize(("name", "ranks"), [("standalone", 2), ("elastic", 2), ("standalone", 4)])
def test_groups_of_another_layout_read_of_all_ranks_or_of_one_of_their_own(
    name: str, ranks: int
) -> None:
    scenario = replace(in_groups(load(name), ranks), versions=6)
    found = run_one(scenario, "tensorhub+resharded")
    assert found.row.to_floor is not None
    assert found.row.to_floor < 1.05
    given = dict[tuple[str, str], float]()
    for edge in found.world.transfers.edges:
        given[edge.source, edge.reader] = (
            given.get((edge.source, edge.reader), 0.0) + edge.nbytes / scenario.rank_bytes
        )
    across = {pair: copies for pair, copies in given.items() if pair[0].startswith("trainer")}
    readers = {reader for _, reader in across}
    assert {pair[0] for pair in across} == {f"trainer-0/{rank}" for rank in range(ranks)}
    for reader in readers:
        mine = [copies for (_, each), copies in across.items() if each == reader]
        assert mine == pytest.approx([sum(mine) / ranks] * ranks, rel=0.05)
    mates = {(source[-1], reader[-1]) for source, reader in given if source.startswith("rollout")}
    assert mates == {(str(rank), str(rank)) for rank in range(ranks)}


def test_the_version_enters_a_site_once_where_layouts_differ() -> None:
    scenario = replace(in_groups(load("cross-datacenter"), 2), versions=3)
    assert run_one(scenario, "tensorhub+resharded").row.wan_copies == pytest.approx(1.0)


def test_a_seed_has_the_shards_of_all_ranks() -> None:
    scenario = replace(at_scale(load("cross-datacenter"), 8, "70B"), versions=2)
    found = run_one(scenario, "tensorhub+seeds")
    assert len(updates(found)) == 2
    assert found.row.wan_copies == pytest.approx(1.0)


def test_the_cut_bound_is_of_the_link_that_needs_longest() -> None:
    scenario = load("cross-datacenter")
    assert cut_bound(scenario) == (20.0, "the WAN")
    assert cut_bound(load("standalone"))[0] == pytest.approx(1.0)
    large = at_scale(load("update"), 1024, "1T")
    narrow = replace(large, links=replace(large.links, rack_mbit_per_s=1_000_000.0))
    assert cut_bound(narrow) == (64 * 31.25e9 / 125e9, "a rack's uplink")


def _attempt(seconds: float, outcome: str = "done") -> Attempt:
    made = Attempt("r", False, 0.0, seconds, 1)
    made.outcome = outcome  # type: ignore[assignment]
    return made


def test_a_call_that_was_cut_short_counts_as_one_that_took_longer() -> None:
    attempts = [_attempt(1.0), _attempt(2.0, "preempted"), _attempt(3.0), _attempt(4.0)]
    assert quantile(attempts, 0.25) == 1.0
    # half of the three quarters that are left after the first, and of two
    assert quantile(attempts, 0.5) == 3.0
    assert quantile([_attempt(1.0), _attempt(2.0, "unfinished")], 0.95) is None
    assert quantile([], 0.5) is None
    stalls = Stalls.of(attempts)
    assert (stalls.done, stalls.preempted, stalls.unfinished, stalls.total_s) == (3, 1, 0, 10.0)
    assert stalls.mean_s == pytest.approx(8 / 3)


def test_a_tree_is_of_whom_each_had_most_from() -> None:
    edges = [
        Edge("t", "a", 10.0, 1.0),
        Edge("a", "b", 9.0, 1.0),
        Edge("t", "b", 1.0, 1.0),
        Edge("b", "c", 5.0, 1.0),
    ]
    tree = parents(edges)
    assert tree == {"a": "t", "b": "a", "c": "b"}
    assert depths(tree) == {"a": 1, "b": 2, "c": 3}
    assert set(depths({"a": "b", "b": "a"})) == {"a", "b"}  # who has each other's bytes: an end


@pytest.mark.slow
def test_one_update_of_a_thousand_gpus_is_simulated() -> None:
    """docs/simulation.md says how long it takes: this says what comes of it, at the paper's
    scale.
    """
    scenario = at_scale(load("update"), 1024, "1T")
    found = run_one(scenario, "tensorhub")
    assert len(updates(found)) == 16
    assert max(updates(found)) < 1.25 * cut_bound(scenario)[0]
    assert found.row.phases["read_s"] < 1.01 * scenario.copy_s
