"""`tensorhub events`: what it lists, and that it follows a coordinator which goes away."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tensorhub import sync
from tensorhub.cli.events import line
from tensorhub.observed import ClusterEvent
from tests.cli.processes import WAIT_S, line_with, run_here, started
from tests.rig import OPTIONS, tensors


def test_a_line_has_everything_and_no_name_is_a_command_to_the_terminal() -> None:
    at = 1_790_000_000.25
    event = ClusterEvent(7, at, "updated", "ac\x1b[2Jtor", 3, "w\u202e1", "1.5 s\nof [red]it")
    text = line(event)
    assert text.isprintable()
    assert text.endswith(r".2 updated ac\x1b[2Jtor 3 w\u202e1: 1.5 s\nof [red]it")
    assert line(ClusterEvent(1, at, "serving")).endswith(".2 serving")


def test_what_has_happened_is_listed_and_filtered(address: str) -> None:
    with sync.connect(address, token="", name="trainer", options=OPTIONS) as hub:
        hub.register("m", tensors(1)).publish(1)
        hub.register("n", tensors(2)).publish(5)
        done = run_here("events", "--address", address)
        assert (done.returncode, done.stderr) == (0, "")
        lines = done.stdout.splitlines()
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d serving", lines[0])
        assert any(" joined trainer" in each for each in lines)
        assert any(" published m 1" in each for each in lines)
        of_n = run_here("events", "--model", "n", "--json", "--address", address)
        (event,) = map(json.loads, of_n.stdout.splitlines())
        unknown = run_here("events", "--model", "mm", "--address", address)
        assert (unknown.returncode, unknown.stdout) == (1, "")
        assert "no model 'mm' is known here; known models: m, n" in unknown.stderr
        assert (event["kind"], event["model"], event["version"]) == ("published", "n", 5)
        assert event.keys() == {
            *("epoch", "number", "at", "kind", "model", "version", "worker", "text")
        }


@pytest.mark.parametrize("given", [("--model", ""), ("--model", "a\x1bb")])
def test_names_that_are_none(given: tuple[str, str]) -> None:
    done = run_here("events", *given, "--address", "tcp://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: usage: --model")


def test_without_a_coordinator_it_fails_at_once() -> None:
    done = run_here("events", "--follow", "--address", "tcp://127.0.0.1:1")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: CoordinatorUnavailable: ")


def test_it_follows_a_coordinator_across_its_restart(tmp_path: Path) -> None:
    """None of the new one's events is taken for one that was seen."""
    serve = ("serve", "--quiet", "--state-dir", str(tmp_path))
    with started(*serve) as coordinator:
        address = line_with("tcp://", coordinator.stdout).strip()
        with started("events", "--follow", "--json", "--address", address) as following:
            first = json.loads(line_with("serving", following.stdout))
            assert first["number"] == 1
            coordinator.kill()
            coordinator.wait(WAIT_S)
            assert line_with("the coordinator is away, and is waited for", following.stderr)
            with started(*serve, "--port", address.rpartition(":")[2]) as again:
                assert line_with(address, again.stdout)
                second = json.loads(line_with("serving", following.stdout))
                assert second["epoch"] > first["epoch"]
                assert line_with("the coordinator is back", following.stderr)
                assert line_with("count from 1 again", following.stderr)
                with sync.connect(address, options=OPTIONS) as hub:
                    hub.register("m", tensors(1)).publish(1)
                    event = json.loads(line_with('"published"', following.stdout))
                assert event["number"] > second["number"]
