"""Versions of a real model in the testbed: what is compared, and what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benches.testbed.report import crossings
from benches.testbed.run import Result
from benches.testbed.shares import Real
from tensorhub.testing.flow import scenario as scenarios

NBYTES = 4096


def test_a_share_knows_which_version_of_the_file_it_has(tmp_path: Path) -> None:
    file = tmp_path / "versions"
    words = np.random.default_rng(1).integers(0, 2**16, (3, NBYTES // 2), dtype=np.uint16)
    words[2] = words[1]
    words[2, -1] ^= 1  # they differ by one bit
    file.write_bytes(words.tobytes())
    trainer, rollout = Real(NBYTES, file), Real(NBYTES, file)
    assert rollout.versions() == [-1]
    for version in (1, 2, 3):
        trainer.write(version)
        for name, tensor in trainer.tensors.items():
            rollout.tensors[name][:] = tensor
        assert rollout.versions() == [version]
    rollout.tensors["a"].view(np.uint16)[5] ^= 1
    assert rollout.versions() == [-1]
    assert trainer.nbytes == NBYTES


def test_what_came_over_the_wan_and_until_when() -> None:
    def update(who: str, version: int, ended_s: float, sources: dict[str, int]) -> dict[str, Any]:
        told = {"version": version, "phases": {}, "sources": sources}
        return {"who": who, "kind": "update", "began_s": 0.0, "ended_s": ended_s, **told}

    published = [
        {"who": "trainer", "kind": "publish", "version": number, "ended_s": 10.0 * number}
        | {"began_s": 10.0 * number, "phases": {}}
        for number in (1, 2, 3)
    ]
    updates = [
        update("rollout-0", 2, 23.0, {"trainer": 4_000_000}),
        update("rollout-1", 2, 25.0, {"trainer": 500_000, "rollout-0+3": 3_500_000}),
        update("rollout-0", 3, 31.0, {"trainer": 100_000}),
    ]
    result = Result("tensorhub", [*published, *updates], 1.0, 2.0, 40.0, 0.1, 0.1)
    found = crossings(scenarios.load("cross-datacenter"), result)
    assert found == [(2, 4.5, 5.0), (3, 0.1, 1.0)]
