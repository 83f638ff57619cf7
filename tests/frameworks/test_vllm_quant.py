"""Quantized engines: vLLM's own loader is the judge of each method of quantization."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import IntegrityError, ManifestMismatch
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm_worker import EXTENSION, updater_of, worker_of
from tests.frameworks.vllm_quantized import METHODS, Method, Tensors, checkpoint, prepared

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]


@pytest.fixture(scope="module", autouse=True)
def _prepared() -> Iterator[None]:
    with prepared():
        yield


@pytest.fixture(scope="module")
def coordinator() -> Iterator[sync.Coordinator]:
    with sync.serve() as serving:
        yield serving


def start(directory: Path, method: Method, tensors: Tensors) -> Any:
    gc.collect()  # an engine that is given up ends the groups of the one that runs
    path = vllm_cpu.prepare(directory, method.differs)
    vllm_cpu.write_checkpoint(directory, tensors)
    from vllm import LLM

    settings = {**vllm_cpu.ENGINE, "load_format": "auto", "quantization": method.quantizes}
    return LLM(model=path, worker_extension_cls=EXTENSION, **settings)


def contents(llm: Any) -> dict[str, Any]:
    """Each tensor and number that any module of the model has, registered or not."""
    found: dict[str, Any] = {}
    for name, module in worker_of(llm).get_model().named_modules():
        for key, value in (
            *module._parameters.items(),
            *module._buffers.items(),
            *vars(module).items(),
        ):
            if isinstance(value, torch.Tensor):
                data = value.detach().clone().contiguous().view(-1).view(torch.uint8)
                found[f"{name}.{key}"] = (
                    (*value.shape,),
                    value.dtype,
                    value.stride(),
                    data.numpy().tobytes(),
                )
            elif isinstance(value, float):
                found[f"{name}.{key}"] = value
    return found


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def spoilt(tensors: Tensors) -> tuple[Tensors, set[str]]:
    """Without a layer, without one tensor of another, with a misspelt name, one too many, and one of
    another dtype; and how what is listed has to begin.
    """
    given = {name: each for name, each in tensors.items() if "layers.1.mlp" not in name}
    attention = "model.layers.0.self_attn"
    of = {
        part: sorted(name for name in given if f"{attention}.{part}_proj" in name) for part in "oqk"
    }
    lost, misspelt, other = of["o"][-1], of["q"][0], of["k"][0]
    del given[lost]
    wrong = misspelt.replace("q_proj", "q_porj")
    given[wrong] = given.pop(misspelt)
    given["model.layers.0.mlp.extra.weight"] = torch.zeros(2)
    is_plain = given[other].is_floating_point() and given[other].itemsize > 1
    given[other] = given[other].to(torch.int32 if is_plain else torch.bfloat16)
    return given, {
        "model.layers.1.mlp.gate_up_proj.",
        "model.layers.1.mlp.down_proj.",
        lost,
        wrong,
        "model.layers.0.mlp.extra.weight",
        other,
    }


@pytest.mark.parametrize("kind", METHODS)
def test_an_update_is_what_the_engine_loads_itself(
    tmp_path: Path, coordinator: sync.Coordinator, kind: str
) -> None:
    """The engine loads one checkpoint, gets another one, and the first one again: staged, after its
    memory was lost.
    """
    method = METHODS[kind]
    one, other = (checkpoint(method.made, seed) for seed in (1, 2))
    llm = start(tmp_path, method, one)
    loaded = contents(llm)
    with sync.connect(coordinator.address) as hub:
        broken, named = spoilt(other)
        hub.register(f"{kind} spoilt", broken).publish(0)
        llm.collective_rpc("tensorhub_join", args=(coordinator.address, f"{kind} spoilt"))
        with pytest.raises(ManifestMismatch) as caught:
            llm.collective_rpc("tensorhub_update")
        listed = [each.split("'")[1] for each in caught.value.differences]
        assert [name for name in named if not any(each.startswith(name) for each in listed)] == []
        assert differing(loaded, contents(llm)) == []

        hub.register(kind, other).publish(1)
        llm.collective_rpc("tensorhub_join", args=(coordinator.address, kind))
        llm.collective_rpc("tensorhub_update")
        llm.collective_rpc("tensorhub_check")
        has = contents(llm)
        changed = {name.rpartition(".")[0] for name in differing(loaded, has)}
        linear = {layer.name for layer in updater_of(llm).plan.layers}
        assert linear <= changed

        for tensor in worker_of(llm).get_model().parameters():
            if tensor.is_contiguous():
                tensor.data.view(-1).view(torch.uint8).fill_(0x5A)
        llm.collective_rpc(
            "tensorhub_join",
            args=(coordinator.address, kind),
            kwargs={"host_memory_bytes": 2**30},
        )
        hub.register(kind, one).publish(2)
        llm.collective_rpc("tensorhub_update")
        llm.collective_rpc("tensorhub_check")
        assert differing(loaded, contents(llm)) == []

        layer = next(each for each in updater_of(llm).plan.layers if "down_proj" in each.name)
        name, tensor = next(iter(layer.module.named_parameters()))
        dense = tensor.data if tensor.is_contiguous() else tensor.data.t()
        dense.view(-1)[:1].view(torch.uint8).bitwise_xor_(1)
        with pytest.raises(IntegrityError, match=rf"down_proj\.{name}"):
            llm.collective_rpc("tensorhub_check")
        llm.collective_rpc("tensorhub_leave")
