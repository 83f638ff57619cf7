"""The example of an orchestrator under simulation: its tests pass, and its bug is found and
reproduced.
"""

from __future__ import annotations

import re

import pytest

from examples import simulated_orchestrator as example
from examples.simulated_orchestrator import (  # noqa: F401 - collected here
    test_a_rollout_serves_after_the_trainer_died,
    test_each_sample_is_of_one_whole_version,
    test_the_same_seed_is_the_same_run,
)
from tensorhub.testing import simulate


@pytest.mark.heavy
def test_the_bug_is_found_and_reproduced_by_the_line_that_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(AssertionError, match="generated with") as found:
        example.find_the_bug()
    line = found.value.__notes__[-1]
    match = re.fullmatch(r"reproduce: TENSORHUB_SEED=(\d+) python -m pytest '(.*)'", line)
    assert match is not None
    assert match[2].endswith("::test_the_bug_is_found_and_reproduced_by_the_line_that_is_printed")
    monkeypatch.setenv("TENSORHUB_SEED", match[1])
    with pytest.raises(AssertionError, match="generated with") as again:
        example.find_the_bug()
    assert str(again.value) == str(found.value)


def test_trio_runs_it_too() -> None:
    hashes = [
        simulate(example.scenario, seeds=[1], spared=["trainer"], backend="trio") for _ in range(2)
    ]
    assert hashes[0] == hashes[1]
