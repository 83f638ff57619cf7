"""`tensorhub.integrations.sglang` against SGLang's models with a checkpoint: bf16 weights that SGLang
quantizes or pads when it loads them, and weights that were quantized before.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tensorhub import sync
from tensorhub.errors import ManifestMismatch
from tests.frameworks import sglang_cpu
from tests.frameworks.test_vllm import actor

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]

BLOCK = 32
FP8, INT8 = torch.float8_e4m3fn, torch.int8
# SGLang's Llama leaves scales of blocks alone, in a checkpoint as in a publication
_qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_dynamic = {"activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
# how the server is started, and what is published of a linear layer beside a weight of this dtype
KINDS: dict[str, tuple[dict[str, Any], torch.dtype, str]] = {
    "fp8 by the engine": ({"server": {"quantization": "fp8"}}, torch.bfloat16, ""),
    "w8a8_fp8 by the engine": ({"server": {"quantization": "w8a8_fp8"}}, torch.bfloat16, ""),
    "fp8 in blocks": (
        {**_qwen, "quantization_config": {"quant_method": "fp8", **_dynamic}},
        FP8,
        "weight_scale_inv",
    ),
    "int8 in blocks": (
        {
            **_qwen,
            "quantization_config": {
                "quant_method": "blockwise_int8",
                "is_checkpoint_int8_serialized": True,
                **_dynamic,
            },
        },
        INT8,
        "weight_scale_inv",
    ),
    "w8a8_int8": ({"quantization_config": {"quant_method": "w8a8_int8"}}, INT8, "weight_scale"),
    "w8a8_fp8": (
        {"quantization_config": {"quant_method": "w8a8_fp8", "is_dynamic": True}},
        FP8,
        "weight_scale",
    ),
    "padded": ({}, torch.bfloat16, ""),
    "padded, of random weights": ({"server": {"load_format": "dummy"}}, torch.bfloat16, ""),
}
PADDED = 96  # the checkpoint has so much of `intermediate_size`, 128


def weights(kind: str, seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint of this kind."""
    sglang_cpu.shim()
    config, dtype, scale = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, whole in actor(seed).state_dict().items():
        tensor = whole[:PADDED, :PADDED] if "padded" in kind and ".mlp." in name else whole
        is_linear = "layers" in name and tensor.ndim == 2
        if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj") and "architectures" in config:
            bias = torch.rand(len(tensor), generator=generator)
            made[name.removesuffix("weight") + "bias"] = bias.to(torch.bfloat16)
        made[name] = tensor.detach().clone()
        if is_linear and scale:
            rows, columns = tensor.shape
            made[name] = (tensor.detach().float() * 100).clamp(-100, 100).to(dtype)
            shape = (rows // BLOCK, columns // BLOCK) if scale.endswith("inv") else (rows, 1)
            made[name.removesuffix("weight") + scale] = torch.rand(shape, generator=generator)
    return made


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rank(kind: str, tmp_path_factory: pytest.TempPathFactory) -> sglang_cpu.Rank:
    """An engine that SGLang has loaded from a checkpoint."""
    directory: Path = tmp_path_factory.mktemp("quantized")
    save_file(weights(kind, 1), directory / "model.safetensors")
    config = {**KINDS[kind][0]}
    config["server"] = {"load_format": "auto", **config.get("server", {})}
    return sglang_cpu.Rank(directory, **config)


@pytest.fixture
def engine(rank: sglang_cpu.Rank) -> Iterator[Any]:
    made = sglang_cpu.engine(rank)
    yield made
    assert made.tokenizer_manager.died_of is None
    made.loop.close()
    if "get_weights_by_name" in vars(rank.model):
        rank.receiver.close()
        del rank.model.get_weights_by_name


@pytest.fixture
def address() -> Iterator[str]:
    with sync.serve() as serving:
        yield serving.address


def test_updates(rank: sglang_cpu.Rank, engine: Any, kind: str, address: str) -> None:
    """The engine has, byte for byte and in its own memory, what SGLang loads from a checkpoint."""
    from tensorhub.integrations.sglang import Trainer

    places = {name: each.data_ptr() for name, each in rank.model.named_parameters()}
    model = weights(kind, 2)
    with Trainer(model, engine, address, timeout_s=30.0) as trainer:
        for seed in (3, 4):
            for name, tensor in weights(kind, seed).items():
                model[name].copy_(tensor)
            trainer.send_weights()
            assert rank.checksums() == rank.loaded_by_sglang(model)
        trainer.check_weights()
    in_place, loaded = rank.ways()
    assert "model.norm.weight" in in_place
    assert "model.layers.0.mlp.down_proj" in loaded or kind.endswith("blocks")
    assert {name: each.data_ptr() for name, each in rank.model.named_parameters()} == places


def test_missing_and_misspelt_names_are_all_listed(
    rank: sglang_cpu.Rank, engine: Any, kind: str, address: str
) -> None:
    from tensorhub.integrations.sglang import Trainer

    if "random" in kind:
        pytest.skip("what a parameter is made of is known from the first load")
    before, model = rank.checksums(), weights(kind, 2)
    misspelt = "model.layers.1.mlp.down_prj.weight"
    model[misspelt] = model.pop("model.layers.1.mlp.down_proj.weight")
    gone = [name for name in model if "layers.0.self_attn" in name]
    if scale := KINDS[kind][2]:
        gone.append(f"model.layers.1.mlp.up_proj.{scale}")
    for name in gone:
        del model[name]
    trainer = Trainer(model, engine, address, timeout_s=30.0)
    with trainer, pytest.raises(ManifestMismatch) as refused:
        trainer.send_weights()
    assert refused.value.memory == "intact"
    text = "\n".join(refused.value.differences)
    for name in [*gone, "model.layers.1.mlp.down_proj.weight", misspelt]:
        assert repr(name) in text
    assert rank.checksums() == before
    assert not engine.tokenizer_manager.is_pause


def test_another_shape_or_dtype_than_the_checkpoints_is_refused_by_name(
    rank: sglang_cpu.Rank, engine: Any, kind: str, address: str
) -> None:
    """SGLang's loaders would cut, pad or cast it, and say nothing."""
    from tensorhub.integrations.sglang import Trainer

    before, right = rank.checksums(), weights(kind, 2)
    size = right["model.layers.0.mlp.gate_proj.weight"].shape[0]
    for other in (32, 160):
        model = dict(right)
        model["lm_head.weight"] = model["lm_head.weight"].to(INT8)
        for layer in range(2):
            for name, shape in (("gate", (other, 64)), ("down", (64, other))):
                its = f"model.layers.{layer}.mlp.{name}_proj.weight"
                model[its] = torch.zeros(shape, dtype=model[its].dtype)
        trainer = Trainer(model, engine, address, timeout_s=30.0)
        with trainer, pytest.raises(ManifestMismatch) as refused:
            trainer.send_weights()
        assert refused.value.memory == "intact"
        text = "\n".join(refused.value.differences)
        assert "'lm_head.weight': it is int8, and the engine's parameter bfloat16" in text
        for layer in range(2):
            for name, has, wants in (
                ("gate", (other, 64), (size, 64)),
                ("down", (64, other), (64, size)),
            ):
                its = f"'model.layers.{layer}.mlp.{name}_proj.weight': "
                (line,) = (each for each in refused.value.differences if each.startswith(its))
                assert f"its shape is {has}, and that of the engine's checkpoint {wants}" in line
    assert rank.checksums() == before


def test_a_dtype_that_the_loader_would_cast_into_numbers_without_a_scale(
    rank: sglang_cpu.Rank, engine: Any, kind: str, address: str
) -> None:
    """SGLang's loaders would cast bf16 to fp8, and say nothing."""
    from tensorhub.integrations.sglang import Trainer

    if not KINDS[kind][2]:
        pytest.skip("the checkpoint has bf16 weights here")
    before, model = rank.checksums(), weights(kind, 2)
    name = "model.layers.1.mlp.down_proj.weight"
    model[name] = model[name].to(torch.bfloat16)
    trainer = Trainer(model, engine, address, timeout_s=30.0)
    with trainer, pytest.raises(ManifestMismatch, match=f"'{name}': it is bfloat16"):
        trainer.send_weights()
    assert rank.checksums() == before
