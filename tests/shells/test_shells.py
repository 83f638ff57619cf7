"""A few seeds of the shells, and that the harness finds bugs that were put into them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# of tests/shells/bugs.py, which must not be imported here: it would replace the clocks
FOUND = ("cancelled_question", "handshake_without_deadline", "unclosed_stream")


def explored(*arguments: object) -> str:
    """What that run of `python -m tests.shells` says: in a process of its own, whose clocks, locks
    and sockets are replaced. A seed is a seed only with a fixed order of sets.
    """
    run = subprocess.run(
        [sys.executable, "-m", "tests.shells", *map(str, arguments)],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    return run.stdout + run.stderr


@pytest.mark.parametrize(("start", "seeds"), [(0, 2), pytest.param(2, 30, marks=pytest.mark.heavy)])
def test_the_shells_keep_their_promises_under_seeded_faults(start: int, seeds: int) -> None:
    said = explored("--start", start, "--seeds", seeds)
    assert f"{seeds} seeds, 0 failed" in said, said


@pytest.mark.slow
@pytest.mark.parametrize("bug", FOUND)
def test_a_bug_is_found(bug: str) -> None:
    said = explored("--seeds", 12, "--bug", bug)
    assert "12 seeds, 0 failed" not in said, said


@pytest.mark.slow
def test_a_seed_is_one_order_of_events() -> None:
    found = {
        line for _ in range(2) for line in explored("--seed", 1).splitlines() if "order" in line
    }
    assert len(found) == 1, found
