"""A slice of the search that is another one for each commit: over time, CI looks at many seeds. The
summary of the run says which demands they never judged.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tensorhub.testing.simulated import run_seed
from tests.conftest import JUDGED

ROOT = Path(__file__).parents[2]
SEEDS = 40  # about 14 s of one core
PARTS = 4  # a test each, so that the last one to run does not keep the other cores waiting
FIRST = 1_000_000  # without git


def first_seed() -> int:
    """By the commit that is checked out."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
    except FileNotFoundError:
        return FIRST
    return int(done.stdout[:8], 16) if done.returncode == 0 else FIRST


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.heavy) for part in range(1, PARTS))]
)
def test_this_commits_slice_of_seeds_holds(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    first = first_seed() + part * SEEDS // PARTS
    seeds = [run_seed(seed) for seed in range(first, first + SEEDS // PARTS)]
    record_property(JUDGED, sorted({what for seed in seeds for what in seed.demands}))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_seeds_behind_this_commits_slice_hold() -> None:
    first = first_seed() + SEEDS
    for seed in range(first, first + 10 * SEEDS):
        run_seed(seed)
