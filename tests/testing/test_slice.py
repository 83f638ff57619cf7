"""A slice of the search that is another one for each commit: over time, CI looks at many seeds."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tensorhub.testing.search import run_seed

ROOT = Path(__file__).parents[2]
SEEDS = 60  # about 10 s of one core
FIRST = 1_000_000  # without git


def first_seed() -> int:
    """By the commit that is checked out."""
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        return FIRST
    return int(done.stdout[:8], 16) if done.returncode == 0 else FIRST


@pytest.mark.timeout(600)
def test_this_commits_slice_of_seeds_holds() -> None:
    first = first_seed()
    for seed in range(first, first + SEEDS):
        run_seed(seed)
