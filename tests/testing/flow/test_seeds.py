"""What seeds of other sites cost the readers of the trainer's site, under the real coordinator."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.coordinator import waiting
from tensorhub.testing.flow.report import Stalls
from tensorhub.testing.flow.run import run_one
from tensorhub.testing.flow.scenario import load

VERSIONS = 12


def updates(seed: int, wan_mbit_per_s: float) -> tuple[Stalls, float]:
    """Of `churn` with seeds: of all rollouts; a copy's time."""
    scenario = load("churn")
    links = replace(scenario.links, wan_mbit_per_s=wan_mbit_per_s)
    scenario = replace(scenario, seed=seed, versions=VERSIONS, links=links)
    return run_one(scenario, "tensorhub+seeds").row.updates, scenario.copy_s


@pytest.mark.parametrize("wan_mbit_per_s", [200.0, 500.0])
@pytest.mark.parametrize("seed", [21, 22, 23])
def test_a_seed_makes_way_for_readers_of_the_trainer_s_site(
    monkeypatch: pytest.MonkeyPatch, seed: int, wan_mbit_per_s: float
) -> None:
    """They shared the trainer's link with it, as long as the WAN took: 2.5 copies, or one."""
    now, copy_s = updates(seed, wan_mbit_per_s)
    with monkeypatch.context() as patched:
        patched.setattr(waiting, "yields", lambda *_: False)
        before, _ = updates(seed, wan_mbit_per_s)
    assert now.p95_s is not None
    assert before.p95_s is not None
    assert before.mean_s is not None
    assert now.p95_s <= 1.3 * copy_s < 1.5 * copy_s < before.p95_s
    assert now.mean_s is not None
    assert now.mean_s < 0.97 * before.mean_s
