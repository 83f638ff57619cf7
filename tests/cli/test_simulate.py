"""`tensorhub simulate` with a stand-in for the simulator: what is printed, how it ends, and that
nothing is left of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.processes import WAIT_S, alive, children, eventually, run_here
from tests.testing.standin import BREAKS, DIES, RAISES, SLEEPS, THIN, WAVERS

ROOT = Path(__file__).parents[2]
PROGRAM = """
import tensorhub.cli.simulate
tensorhub.cli.simulate.SEARCH = "tests.testing.standin"
from tensorhub.cli import main
main()
"""
PATH = os.pathsep.join(
    str(place) for place in (ROOT, *filter(None, [os.environ.get("PYTHONPATH")]))
)
ENVIRONMENT = os.environ | {"PYTHONPATH": PATH, "COLUMNS": "200"}


def simulate(
    *arguments: object, search: str = "tests.testing.standin"
) -> subprocess.CompletedProcess[str]:
    """The command in this process; those that run the seeds are its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tensorhub.cli.simulate.SEARCH", search)
        for name in ("PYTHONPATH", "COLUMNS"):
            patch.setenv(name, ENVIRONMENT[name])
        return run_here("simulate", *map(str, arguments))


def simulate_json(*arguments: object) -> tuple[int, dict[str, Any]]:
    done = simulate("--json", *arguments)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def simulate_apart(*arguments: object) -> tuple[int, dict[str, Any]]:
    """The command as a process, whose own have hash seeds; with all that any of them says on
    stderr.
    """
    command = [sys.executable, "-c", PROGRAM, "simulate", "--json", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, env=ENVIRONMENT)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


@contextlib.contextmanager
def simulating(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, "simulate", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def test_the_verdict_comes_first_and_tables_only_if_they_are_wanted() -> None:
    two = ("--seeds", 2, "--start", 60, "--events", 10, "--jobs", 1)
    short, long = simulate(*two), simulate(*two, "--verbose")
    for done in (short, long):
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("passed: 2 seeds passed, 0 failed; 20 events, ")
        assert done.stdout.isascii()
    assert "crash" not in short.stdout
    assert "crash" in long.stdout
    failed = simulate("--seed", BREAKS, "--events", 10)
    assert failed.stdout.startswith("FAILED: 0 seeds passed, 1 failed; ")
    assert (
        failed.stderr == f"seed {BREAKS} failed: tensorhub simulate --seed {BREAKS} --events 10\n"
    )


def test_a_seed_that_fails_says_what_was_broken_and_how_to_run_it_again() -> None:
    named = ("--faults", "crash,delay", "--shrink-s", 0, "--quiet")
    done = simulate("--seed", BREAKS, "--events", 10, *named)
    assert done.returncode == 1
    assert (
        f"seed {BREAKS} failed:\nAssertionError: content: [bold] holds other bytes than were "
        f"published\n" in done.stdout
    )
    assert (
        done.stdout.count(
            f"reproduce: tensorhub simulate --seed {BREAKS} --faults crash,delay --events 10\n"
        )
        == 1
    )
    assert "0 seeds passed, 1 failed" in done.stdout


def test_a_seed_that_fails_explains_itself() -> None:
    shrunk = ("--events", 10, "--shrink-s", 5, "--quiet")
    done = simulate("--seed", BREAKS, *shrunk)
    assert f"\nseed {BREAKS} failed:\ncontent: [bold] is shorter\n" in done.stdout
    assert done.stdout.count("reproduce: ") == 1
    done = simulate("--seed", RAISES, *shrunk)  # what fails in one run only is told as it was
    assert 'raise KeyError("lost")' in done.stdout
    assert done.stdout.count("reproduce: ") == 1


def test_a_part_of_a_seed_is_run() -> None:
    part = ("--only", "3,g1.2", "--until", 40)
    done = simulate("--seed", BREAKS, *part)
    assert done.returncode == 1
    assert (
        f"reproduce: tensorhub simulate --seed {BREAKS} --events 1000 --only 3,g1.2 --until 40\n"
        in done.stdout
    )
    assert simulate("--seed", THIN, *part).returncode == 0  # it need not be full
    for wrong in (("--seed", 3, "--only", "3"), ("--seed", 3, "--until", 3), part):
        done = simulate(*wrong)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--only, --until and --seed go together" in done.stderr


def test_it_stops_at_the_failures_that_were_asked_for() -> None:
    code, found = simulate_json("--seeds", 25, "--start", 5, "--jobs", 1, "--failures-max", 2)
    assert code == 1
    assert [failure["seed"] for failure in found["failures"]] == [BREAKS, RAISES]
    assert found["seeds"] == 11  # 5 to 17, but for these two


@pytest.mark.heavy
def test_a_process_that_ends_costs_its_seed_only() -> None:
    code, found = simulate_apart("--seeds", 25, "--start", 5, "--jobs", 2, "--failures-max", 10)
    assert code == 1
    failures = {failure["seed"]: failure["failure"] for failure in found["failures"]}
    assert failures.keys() == {BREAKS, RAISES, DIES}
    assert failures[DIES] == "its process ended with exit code 3"
    assert 'raise KeyError("lost")' in failures[RAISES]
    assert found["seeds"] == 22


def test_a_seed_that_does_not_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorhub.cli.simulate.SEED_S_MAX", 6.0)
    code, found = simulate_json("--seeds", 2, "--start", SLEEPS, "--jobs", 1, "--failures-max", 2)
    assert (code, found["seeds"]) == (1, 1)
    assert found["failures"][0]["failure"] == "it did not end within 6 s"


def test_a_process_that_does_not_start_is_an_error_and_no_failed_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("START_S", "never")
    done = simulate("--seed", 60, "--events", 10, search="tests.testing.slow_start")
    assert (done.returncode, done.stdout) == (1, "")
    assert (
        done.stderr
        == "error: NotStarted: a process for seeds did not start: its process ended with exit code "
        "1\n"
    )


def test_a_seed_of_which_too_little_came_fails_where_it_stands_for_something() -> None:
    code, found = simulate_json("--seed", THIN)
    assert (code, found["seeds"], found["full"]) == (1, 0, 0)
    assert found["failures"][0]["failure"] == "it proves too little: 2 versions, not 3"
    assert found["failures"][0]["reproduce"] == f"tensorhub simulate --seed {THIN} --events 1000"
    for fewer in (("--events", 999), ("--faults", "crash,delay,drop")):
        code, found = simulate_json("--seed", THIN, *fewer)
        assert (code, found["seeds"]) == (0, 1)


@pytest.mark.heavy
def test_a_seed_that_comes_to_another_end_the_second_time_fails() -> None:
    code, found = simulate_apart("--seeds", 2, "--start", WAVERS, "--jobs", 1)
    assert (code, found["run_twice"]) == (1, 1)
    assert (
        "the same seed came to another end in another process: end "
        in found["failures"][0]["failure"]
    )


def test_only_the_faults_that_were_named_are_asked_for() -> None:
    code, found = simulate_json("--seeds", 2, "--start", 60, "--jobs", 1, "--faults", "delay")
    assert (code, found["faults"]) == (0, {"delay": {"times": 2, "seeds": 2}})
    wrong = simulate("--faults", "delay,rust")
    assert wrong.returncode == 2
    assert (
        wrong.stderr
        == "error: usage: there is no fault 'rust': give --faults some of crash, delay, drop\n"
    )


@pytest.mark.parametrize(
    ("seeds", "start", "code"), [(1000, 1_000, 0), (999, 100_000, 0), (1000, 100_000, 1)]
)
def test_from_a_thousand_seeds_on_all_must_be_reached(seeds: int, start: int, code: int) -> None:
    done = simulate("--seeds", seeds, "--start", start, "--jobs", 1, "--quiet")
    assert done.returncode == code, done.stdout
    assert ("never reached: transition replica: filling -> ready\n" in done.stdout) is (code == 1)
    assert ("never reached: recovery path moved\n" in done.stdout) is (code == 1)
    assert ("never reached: demand content: {} holds {}, " in done.stdout) is (code == 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_its_processes(number: signal.Signals) -> None:
    with simulating("--seeds", 2, "--start", SLEEPS, "--jobs", 2) as process:
        assert eventually(lambda: len(children(process.pid)) >= 2)
        pids = children(process.pid)
        process.send_signal(number)
        assert process.wait(WAIT_S) == 128 + number
        assert alive(pids) == []
        assert process.stderr is not None
        assert process.stderr.read() == ""
