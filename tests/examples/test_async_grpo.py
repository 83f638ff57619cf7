"""The examples of asynchronous GRPO, as a user starts them: a killed rollout joins again, no sample
is too old, no process is left, and (slow) the policy learns.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorhub.testing.auditor import audit
from tensorhub.testing.history import read
from tests.recorder import recorded

ROOT = Path(__file__).parents[2]
DEADLINE_S = 500.0  # beside twenty busy processes


class Running:
    """The example, in a session of its own, by which its processes are found."""

    def __init__(self, example: str, plot: Path, steps: int, *more: str) -> None:
        self.history = plot.parent / "history"
        command = [sys.executable, "-W", "error", "-m", f"examples.{example}"]
        self.process = subprocess.Popen(
            [*command, "--steps", f"{steps}", "--plot", f"{plot}", *more],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1", **recorded(self.history)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.until = time.monotonic() + DEADLINE_S

    def output(self) -> str:
        told, _ = self.process.communicate(timeout=self.until - time.monotonic())
        return told

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:  # the test's deadline ends it
            if text in line:
                return
        raise AssertionError(f"ended without {text!r}")

    def wait_for_all(self) -> None:
        """Until no process of it is left, that of another parent included."""
        while self._lives():
            assert time.monotonic() < self.until, "a process has outlived the example"
            time.sleep(0.05)

    def _lives(self) -> bool:
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def end(self) -> None:
        if self._lives():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Iterator[list[Running]]:
    made: list[Running] = []
    yield made
    for each in made:
        each.end()


def ages(told: str) -> dict[int, int]:
    """How many groups of samples were how many versions old."""
    return {int(age): int(count) for count, age in re.findall(r"(\d+) groups (\d+) versions", told)}


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("example", "bound"),
    [("async_grpo", 2), pytest.param("async_grpo_sync", 0, marks=pytest.mark.slow)],
)
def test_a_killed_rollout_joins_again_and_no_sample_is_too_old(
    example: str, bound: int, tmp_path: Path, started: list[Running]
) -> None:
    plot = tmp_path / "plot.svg"
    running = Running(example, plot, 3, "--bound", f"{bound}")
    started.append(running)
    told = running.output()
    assert running.process.returncode == 0, told
    killed = re.search(r"; (rollout-\d) killed", told)
    assert killed, told
    assert f"; {killed[1]} back" in told
    assert 0 <= min(ages(told)) <= max(ages(told)) <= bound, told
    assert re.search(r"^stalls: \d+ updates, median [\d.]+ ms, longest", told, re.MULTILINE), told
    texts = [element.text for element in ET.parse(plot).iter() if element.tag.endswith("text")]
    assert {"mean reward", f"{killed[1]} killed", f"{killed[1]} back"} <= {*texts}
    running.wait_for_all()
    judged = audit(read(running.history))
    assert judged["update: ok"] > 0 < judged["tensors compared"]


@pytest.mark.heavy
@pytest.mark.parametrize(
    ("example", "by"),
    [
        pytest.param("async_grpo", signal.SIGKILL, marks=pytest.mark.slow),
        ("async_grpo_sync", signal.SIGINT),
    ],
)
def test_rollouts_end_with_their_trainer(
    example: str, by: signal.Signals, tmp_path: Path, started: list[Running]
) -> None:
    running = Running(example, tmp_path / "plot.svg", 1_000_000)
    started.append(running)
    running.wait_for("step  10")
    if by is signal.SIGINT:  # as a terminal does: to all of them
        os.killpg(running.process.pid, by)
    else:
        running.process.send_signal(by)
    told = running.output()
    assert "Process SpawnProcess" not in told, "a rollout has failed"
    running.wait_for_all()


@pytest.mark.slow
@pytest.mark.parametrize("example", ["async_grpo", "async_grpo_sync"])
def test_the_reward_rises(example: str, tmp_path: Path, started: list[Running]) -> None:
    """From 0.1, which guessing gets. On a machine without other load it is above 0.9 after 200
    steps.
    """
    running = Running(example, tmp_path / "plot.svg", 200, "--seed", "1")
    started.append(running)
    told = running.output()
    rewards = re.search(
        r"^reward: ([\d.]+) in the first .*, ([\d.]+) in the last", told, re.MULTILINE
    )
    assert rewards, told
    assert float(rewards[1]) < 0.4
    assert float(rewards[2]) > 0.7
    assert max(ages(told)) <= 2
