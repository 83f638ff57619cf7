"""`tensorhub simulate SCENARIO`: what is printed, and what is refused, with exit code 2 and what to
give instead.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.processes import run_here


def test_a_table_comes_with_its_conditions() -> None:
    done = run_here("simulate", "update", "--systems", "tensorhub,broadcast", "--quiet")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "update: One update of everybody at once: rollouts wait for the next version"
    assert "floor 1.000 s; cut bound 1.000 s (the trainer's NICs); seed 21" in lines[1]
    assert [line.split()[0] for line in lines[2:]] == ["system", "tensorhub", "broadcast"]
    assert done.stderr == ""


def test_sites_are_counted_where_there_are_several() -> None:
    """A site whose name has a typo is one more."""
    done = run_here("simulate", "cross-datacenter", "--systems", "pull", "--quiet")
    assert done.stdout.splitlines()[1].startswith("8 rollouts in 2 sites (a, b); ")


@pytest.mark.parametrize(
    ("scenario", "ranks", "said"),
    [
        ("standalone", "2", "4 rollouts of 2 ranks; "),
        ("standalone", "3", "2 rollouts of 3 ranks (2 hosts are left out); "),
        ("standalone", "7", "1 rollouts of 7 ranks (1 host is left out); "),
        ("churn", "5", "3 rollouts of 5 ranks (3 hosts are added) in 2 sites (a, b); "),
    ],
)
def test_hosts_that_do_not_divide_into_groups_are_counted(
    scenario: str, ranks: str, said: str
) -> None:
    done = run_here("simulate", scenario, "--ranks", ranks, "--systems", "pull", "--quiet")
    assert done.stdout.splitlines()[1].startswith(said)


def test_json_is_all_there_is_on_stdout() -> None:
    done = run_here(
        "simulate", "update", "--gpus", "16", "--parameters", "7B", "--seed", "5", "--json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["rollouts"], found["ranks"], found["seed"], found["rank_bytes"]) == (
        16,
        1,
        5,
        14_000_000_000,
    )
    assert found["systems"][0]["system"] == "tensorhub"
    assert found["systems"][0]["times_the_first"] == 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["standalon"],
            (
                "error: scenario: there is no scenario 'standalon': did you "
                "mean 'standalone'? Give churn, "
            ),
        ),
        (["update", "--gpus", "100", "--parameters", "1T"], "cannot be placed on 100 rollout GPUs"),
        (["update", "--gpus", "64", "--parameters", "7X"], "write it as 500M, 7B, 70B or 1T"),
        (["update", "--gpus", "0"], "give a whole number, 1 to 65536"),
        (["update", "--gpus", "1000000"], "give a whole number, 1 to 65536"),
        (["update", "--parameters", "7B"], "--parameters goes with --gpus"),
        (
            ["update", "--ranks", "65536"],
            "update in groups of 65536 has 131072 workers, more than ",
        ),
        (["update", "--systems", "nccl"], "there is no system 'nccl': give some of tensorhub, "),
        (
            ["update", "--systems", "broadcast-por"],
            "there is no system 'broadcast-por': did you mean 'broadcast-poor'? Give ",
        ),
        (["update", "--systems", ","], "--systems: give some of tensorhub, "),
        (["elastic", "--systems", "broadcast"], "elastic cannot be run under 'broadcast'"),
        (["update", "--seeds", "3"], "--seeds belongs to the search for broken guarantees"),
        (["--gpus", "8"], "--gpus belongs to a scenario"),
    ],
)
def test_what_cannot_be_used_is_said_with_what_to_give(arguments: list[str], said: str) -> None:
    done = run_here("simulate", *arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.split())
    assert done.stdout == ""


def test_a_typo_in_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    from importlib import resources

    text = resources.files("tensorhub.testing.flow").joinpath("scenarios/update.toml").read_text()
    file = tmp_path / "mine.toml"
    file.write_text(text.replace("chunk_bytes = 1_048_576", "chunk_byte = 1_048_576"))
    done = run_here("simulate", str(file))
    assert done.returncode == 2
    assert (
        f"error: scenario: {file}, line 9: model.chunk_byte: [model] has no such key" in done.stderr
    )
    file.write_text(text)
    assert run_here("simulate", str(file), "--systems", "pull", "-q").stdout.startswith(
        "mine: One update"
    )
