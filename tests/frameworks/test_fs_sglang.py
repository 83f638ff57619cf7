"""SGLang's `update_weights_from_disk`, without an adapter, and mounted versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.frameworks import sglang_cpu
from tests.frameworks.mounted import lacks, mounted
from tests.frameworks.publisher import publisher
from tests.frameworks.test_vllm import actor

pytestmark = [
    pytest.mark.framework,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(lacks()), reason=lacks() or "mounts"),
]


def test_each_version_is_loaded_from_its_directory(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    rank = sglang_cpu.Rank(tmp_path / "llama")
    ((_, runner),) = rank.manager.tp_worker.weight_update_runners()
    versions = {version: actor(version).state_dict() for version in (1, 2)}
    with publisher(tmp_path) as trainer:
        for version, weights in versions.items():
            trainer.publish(weights, version)
        with mounted(trainer.address, "m", tmp_path / "m") as directory:
            for version, weights in versions.items():
                path = str(directory / str(version))
                with torch.inference_mode():
                    done, said = runner.weight_updater.update_weights_from_disk(path, "auto")
                assert done, said
                assert rank.checksums() == rank.loaded_by_sglang(weights)
