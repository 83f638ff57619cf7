"""Scenario files: what they say, and where they are wrong: the line, and what may stand there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorhub.testing.flow.scenario import (
    ScenarioError,
    at_scale,
    in_groups,
    load,
    names,
    parameters,
    read,
)

GOOD = """\
format = 1
title = "Two"
seed = 1
versions = 2

[model]
bytes = 1000000
chunk_bytes = 4096

[links]
nic_mbit_per_s = 80.0
round_trip_ms = 0.2

[[hosts]]
role = "trainer"
site = "a"
count = 1

[[hosts]]
role = "rollout"
site = "a"
count = 2

[trainer]
every_copies = 6.0

[rollout]
generate_mean_copies = 4.0
generate_sigma = 0.6
"""


def test_a_copy_is_the_time_of_one_workers_bytes_over_its_nic() -> None:
    scenario = read(GOOD, "two")
    assert scenario.copy_s == pytest.approx(0.1)
    assert (scenario.count("rollout"), scenario.sites, scenario.ranks) == (2, ("a",), 1)


@pytest.mark.parametrize("name", names())
def test_each_built_in_scenario_can_be_run_small_and_large(name: str) -> None:
    scenario = load(name)
    large = at_scale(scenario, 1024)
    assert large.count("rollout") * large.ranks == 1024
    assert len(large.hosts) == len(scenario.hosts)


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (
            "seed = 1",
            "sed = 1",
            "scenario, line 3: sed: a scenario has no such key: did you mean 'seed'?",
        ),
        (
            "every_copies",
            "every_copys",
            "scenario, line 25: trainer.every_copys: [trainer] has no such key: did you mean",
        ),
        (
            '"rollout"',
            '"rolout"',
            (
                "line 20: hosts.role: 'rolout': did you mean 'rollout'? "
                "Give 'trainer', 'rollout', 'seed'"
            ),
        ),
        ("count = 2", "count = 0", "line 22: hosts.count: 0: give a whole number, 1 to 65536"),
        (
            "count = 2",
            "count = 2\nslow = 0.5",
            "line 23: hosts.slow: 0.5: give a number, 1 to 1000",
        ),
        ("count = 2", "count = 2\nspot = true", "line 23: hosts.spot: there is no [spot]"),
        ("count = 2", 'count = "many"', "line 22: hosts.count: 'many': give a whole number"),
        (
            "nic_mbit_per_s = 80.0",
            "nic_mbit_per_s = -1",
            "line 11: links.nic_mbit_per_s: -1: give a number",
        ),
        (
            "nic_mbit_per_s = 80.0",
            "nic_mbit_per_s = nan",
            "line 11: links.nic_mbit_per_s: nan: give a number",
        ),
        ("round_trip_ms = 0.2", "", "line 10: links: it lacks 'round_trip_ms'"),
        (
            '"rollout"\nsite = "a"\ncount = 2',
            '"rollout"',
            "line 19: hosts: it lacks 'site', 'count'",
        ),
        (
            "[rollout]",
            "[rolout]",
            "line 27: rolout: a scenario has no such key: did you mean 'rollout'?",
        ),
        ("format = 1", "format = 2", "line 1: format: 2: give a whole number, 1 to 1"),
        ('"rollout"', '"trainer"', "line 20: hosts.role: there is one trainer, of count 1"),
        (
            '"rollout"\nsite = "a"',
            '"rollout"\nsite = "b"',
            "links: there are several sites, and it lacks 'wan_mbit_per_s'",
        ),
        ("seed = 1", "seed = ", "scenario, line 3: it is no TOML: Invalid value at column 8"),
        (
            "generate_sigma = 0.6",
            "generate_sigma = '''",
            "scenario, line 29: it is no TOML: Expected \"'''\" at the end",
        ),
    ],
)
def test_a_mistake_is_named_with_its_line_and_with_what_may_stand_there(
    before: str, after: str, said: str
) -> None:
    assert before in GOOD
    with pytest.raises(ScenarioError) as caught:
        read(GOOD.replace(before, after, 1), "two")
    assert said in str(caught.value)


def test_the_page_shows_a_file_all_of_which_is_needed() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulation.md").read_text(encoding="utf-8")
    shown = page.split("```toml\n")[1].split("```")[0].splitlines(keepends=True)
    assert read("".join(shown), "mine").count("rollout") == 8
    for number, line in enumerate(shown):
        if line.strip():
            with pytest.raises(ScenarioError):
                read("".join(shown[:number] + shown[number + 1 :]), "mine")


def test_a_name_that_is_none_is_answered_with_all(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"did you mean 'elastic'.*standalone"):
        load("elastik")
    file = tmp_path / "two.toml"
    file.write_text(GOOD)
    assert load(str(file)).name == "two"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ScenarioError, match="no text in UTF-8"):
        load(str(file))
    file.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ScenarioError, match="more than 1048576 bytes"):
        load(str(file))


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(
        ScenarioError, match=r"a group has 64 of them.*give a multiple of 64, 64 or more"
    ):
        at_scale(load("update"), 100, "1T")
    with pytest.raises(
        ScenarioError,
        match=r"each is a group, and the file has 3 \[\[hosts\]\] of rollouts; give 3 or more",
    ):
        at_scale(load("churn"), 2, "7B")
    with pytest.raises(ScenarioError, match=r"two has no \[scale\]"):
        at_scale(read(GOOD, "two"), 8)


@pytest.mark.parametrize("text", ["7X", "", "B", "-1B", "0B", "7b", "1e9B"])
def test_no_number_of_parameters(text: str) -> None:
    with pytest.raises(ScenarioError, match="write it as 500M, 7B, 70B or 1T"):
        parameters(text)


def test_groups_are_as_small_as_their_memory_allows() -> None:
    assert [at_scale(load("update"), 1024, of).ranks for of in ("7B", "70B", "1T")] == [1, 4, 64]
    assert at_scale(load("update"), 1024, "1T").rank_bytes == 31_250_000_000
    assert at_scale(load("update"), 1024, "7B", ranks=8).count("rollout") == 128


def test_groups_take_the_place_of_hosts_of_each_kind() -> None:
    found = in_groups(load("churn"), 2)
    assert [(each.role, each.count) for each in found.hosts] == [
        ("trainer", 1),
        ("rollout", 2),
        ("rollout", 2),
        ("rollout", 2),
        ("seed", 1),
    ]
    assert (found.ranks, found.rank_bytes, found.copy_s) == (
        2,
        load("churn").rank_bytes,
        load("churn").copy_s,
    )
    assert found.links.wan_mbit_per_s == 2 * load("churn").links.wan_mbit_per_s
    assert in_groups(load("elastic"), 1) == load("elastic")
