"""vLLM's own loader of safetensors files, and a mounted version."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.frameworks.mounted import lacks, mounted
from tests.frameworks.publisher import publisher

pytestmark = [
    pytest.mark.framework,
    pytest.mark.skipif(bool(lacks()), reason=lacks() or "mounts"),
]


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_the_default_loader_reads_what_was_published(tmp_path: Path, load_format: str) -> None:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

    tensors = {f"layers.{n}": torch.randn(500, 300, dtype=torch.bfloat16) for n in range(20)}
    with publisher(tmp_path) as trainer:
        trainer.publish(tensors)
        with mounted(trainer.address, "m", tmp_path / "m") as directory:
            loader = DefaultModelLoader(LoadConfig(load_format=load_format))
            source = DefaultModelLoader.Source(str(directory / "1"), revision=None)
            found = dict(loader._get_weights_iterator(source))
            assert found.keys() == tensors.keys()  # they are mapped, so the mount is needed
            assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
