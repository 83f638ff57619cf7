"""Layers whose weights vLLM does not keep as they were published: fused experts, and a quantized
model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import ManifestMismatch, RegistrationError
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm import actor, checksums, engine_of

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]

EXPERTS = 4
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
BITS, GROUP = 4, 32
GPTQ = {
    "quant_method": "gptq",
    "bits": BITS,
    "group_size": GROUP,
    "desc_act": False,
    "sym": True,
    "lm_head": False,
}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Starts an engine of a model that differs so from the small Llama, with dummy weights, or from
    a checkpoint of these tensors.
    """
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

    def start_engine(
        differs: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None
    ) -> Any:
        gc.collect()  # an engine that is freed later would end the groups of this one
        path = vllm_cpu.prepare(tmp_path, {**vllm_cpu.LLAMA, **differs})
        settings = dict(vllm_cpu.ENGINE)
        if tensors is not None:
            vllm_cpu.write_checkpoint(tmp_path, tensors)
            settings["load_format"] = "auto"
        from vllm import LLM
        from vllm.config import WeightTransferConfig

        return LLM(
            model=path,
            weight_transfer_config=WeightTransferConfig(backend="tensorhub"),
            **settings,
        )

    return start_engine


@pytest.fixture
def trainer_of() -> Iterator[Any]:
    with sync.serve() as coordinator:
        made = []

        def make(llm: Any, source: Any, **settings: Any) -> Any:
            from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

            from tensorhub.integrations.vllm import OfflineClient, TrainerInit

            init = TrainerInit(address=coordinator.address, rank=0, timeout_s=30.0, **settings)
            made.append(
                (
                    llm,
                    WeightTransferTrainerFactory.trainer_init(
                        init, client=OfflineClient(llm), source=source
                    ),
                )
            )
            return made[-1][1]

        yield make
        for llm, trainer in made:
            trainer.shutdown()
            llm.shutdown_weight_transfer_engine()


def check(llm: Any, tensors: dict[str, torch.Tensor]) -> None:
    """The engine has what vLLM loads of these itself."""
    ours = checksums(llm)
    weights = [(name, tensor.clone()) for name, tensor in tensors.items()]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    theirs = checksums(llm)
    assert {name for name in ours if ours[name] != theirs[name]} == set()


def mixtral() -> dict[str, torch.Tensor]:
    """By the names of a checkpoint, whose experts are tensors of their own."""
    tensors = {name: tensor for name, tensor in actor().state_dict().items() if ".mlp." not in name}
    hidden, inner = vllm_cpu.LLAMA["hidden_size"], vllm_cpu.LLAMA["intermediate_size"]
    for layer in range(vllm_cpu.LLAMA["num_hidden_layers"]):
        moe = f"model.layers.{layer}.block_sparse_moe"
        tensors[f"{moe}.gate.weight"] = torch.randn(EXPERTS, hidden).bfloat16()
        for expert in range(EXPERTS):
            for name, shape in (
                ("w1", (inner, hidden)),
                ("w3", (inner, hidden)),
                ("w2", (hidden, inner)),
            ):
                tensors[f"{moe}.experts.{expert}.{name}.weight"] = torch.randn(shape).bfloat16()
    return tensors


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_fused_experts_are_recorded_and_written_in_place(
    start: Any, trainer_of: Any, monkeypatch: pytest.MonkeyPatch, host_memory_bytes: int
) -> None:
    # as kernels that take them as they are loaded
    monkeypatch.setattr(vllm_cpu, "lay_out", lambda weight: weight)
    llm, tensors = start(MIXTRAL), mixtral()
    trainer = trainer_of(llm, tensors, host_memory_bytes=host_memory_bytes)
    for _ in range(2):
        for tensor in tensors.values():
            tensor.normal_()
        trainer.send_weights()
        trainer.check_weights()
        experts = dict(engine_of(llm).model.named_modules())[
            "model.layers.1.block_sparse_moe.experts.routed_experts"
        ]
        for number in range(EXPERTS):
            w1, w2, w3 = [
                tensors[f"model.layers.1.block_sparse_moe.experts.{number}.w{n}.weight"]
                for n in (1, 2, 3)
            ]
            assert torch.equal(experts.w13_weight.data[number], torch.cat([w1, w3]))
            assert torch.equal(experts.w2_weight.data[number], w2)
        check(llm, tensors)
    assert not engine_of(llm).updater.plan.processed
    assert not engine_of(llm).updater.plan.computed


def test_experts_that_are_laid_out_at_the_first_load_only_are_refused(
    start: Any, trainer_of: Any
) -> None:
    """vLLM's CPU backend lays experts out when it makes their kernel. After that neither its own
    reload nor post-processing does it again, with the same pointers, shapes and strides.
    """
    llm = start(MIXTRAL)
    before = checksums(llm)
    trainer = trainer_of(llm, mixtral())
    with pytest.raises(
        RegistrationError,
        match=r"lays 2 layer\(s\) out .* never again.*layers\.1\..*Start the engine",
    ):
        trainer.send_weights()
    assert checksums(llm) == before
    assert llm.get_weight_version() == "default"


def gptq() -> dict[str, torch.Tensor]:
    tensors = {}
    for name, tensor in actor().state_dict().items():
        if "_proj." not in name:
            tensors[name] = torch.randn_like(tensor)
            continue
        (rows, columns), module, packed = tensor.shape, name.removesuffix(".weight"), 32 // BITS
        tensors[f"{module}.qweight"] = torch.randint(
            -(2**31), 2**31 - 1, (columns // packed, rows), dtype=torch.int32
        )
        tensors[f"{module}.scales"] = torch.rand(columns // GROUP, rows).bfloat16()
        tensors[f"{module}.qzeros"] = torch.full(
            (columns // GROUP, rows // packed), 0x77777777, dtype=torch.int32
        )
        tensors[f"{module}.g_idx"] = torch.arange(columns, dtype=torch.int32) // GROUP
    return tensors


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_a_quantized_model_is_registered_as_before_its_post_processing(
    start: Any, trainer_of: Any, host_memory_bytes: int
) -> None:
    llm, tensors = start({"quantization_config": GPTQ}), gptq()
    trainer = trainer_of(llm, tensors, host_memory_bytes=host_memory_bytes)
    for _ in range(2):
        for name, tensor in gptq().items():
            tensors[name].copy_(tensor)
        trainer.send_weights()
        trainer.check_weights()
        check(llm, tensors)
    plan = engine_of(llm).updater.plan
    assert len(plan.processed) == 8
    assert {attribute for layer in plan.processed for attribute in layer.names} == {
        "qweight",
        "scales",
        "qzeros",
    }
    next(layer.module for layer in plan.processed).qweight.data[0, 0] += 1
    with pytest.raises(Exception, match=r"1 tensor.*qkv_proj\.qweight"):
        trainer.check_weights()


def spoilt(tensors: dict[str, torch.Tensor], without: str) -> dict[str, torch.Tensor]:
    """Without a layer, with a misspelt name, and with one too many."""
    given = {name: each for name, each in tensors.items() if without not in name}
    name = next(each for each in given if "layers.0" in each and "norm" not in each)
    given[name.replace("layers.0", "layers.O")] = given.pop(name)
    return {**given, "model.layers.1.mlp.extra.weight": torch.zeros(2)}


@pytest.mark.parametrize("kind", ["dummy", "checkpoint"])
def test_a_quantized_publication_without_a_layer_is_refused(
    start: Any, trainer_of: Any, kind: str
) -> None:
    tensors = gptq()
    llm = start({"quantization_config": GPTQ}, tensors if kind == "checkpoint" else None)
    before = checksums(llm)
    trainer = trainer_of(llm, spoilt(tensors, "layers.1."))
    with pytest.raises(ManifestMismatch) as caught:
        trainer.send_weights()
    listed = {each.split("'")[1] for each in caught.value.differences}
    assert {name for name in listed if "layers.O" in name or "extra" in name} == {
        "model.layers.O.self_attn.q_proj.qweight",
        "model.layers.1.mlp.extra.weight",
    }
    modules = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    for module in modules:
        for attribute in ("qweight", "scales", *(["qzeros"] if kind == "checkpoint" else [])):
            assert f"model.layers.1.{module}.{attribute}" in listed
    assert "model.layers.0.self_attn.qkv_proj.qweight" in listed
    assert checksums(llm) == before
    trainer.shutdown()
    trainer = trainer_of(llm, tensors)
    trainer.send_weights()
    trainer.check_weights()
    check(llm, tensors)


def test_experts_that_are_missing_or_misspelt_are_refused(
    start: Any, trainer_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own loader leaves such names alone, and says nothing."""
    monkeypatch.setattr(vllm_cpu, "lay_out", lambda weight: weight)
    tensors = mixtral()
    llm = start(MIXTRAL, tensors)
    before = checksums(llm)
    moe = "model.layers.1.block_sparse_moe"
    given = dict(tensors)
    given[f"{moe}.experts.3.w4.weight"] = given.pop(f"{moe}.experts.3.w2.weight")
    del given[f"{moe}.experts.0.w1.weight"]
    with pytest.raises(ManifestMismatch) as caught:
        trainer_of(llm, given).send_weights()
    inner, hidden = vllm_cpu.LLAMA["intermediate_size"], vllm_cpu.LLAMA["hidden_size"]
    text = f"{caught.value}"
    assert f"'{moe}.experts.routed_experts.w13_weight': {inner * hidden} elements" in text
    assert f"'{moe}.experts.routed_experts.w2_weight': {inner * hidden} elements" in text
    assert f"'{moe}.experts.3.w4.weight'" in text
    assert len(caught.value.differences) == 3
    assert checksums(llm) == before
