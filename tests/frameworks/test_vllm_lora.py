"""LoRA adapters as models of their own, in an engine whose base is updated, too. The oracle is
vLLM's own way through files.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import (
    InvalidType,
    InvalidValue,
    ManifestMismatch,
    StateError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.integrations import vllm_lora_requests
from tensorhub.integrations.adapters import CONFIG as CONFIG_FILE, adapter_tensors
from tensorhub.integrations.vllm_lora import adapter_request
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm import actor, train
from tests.frameworks.test_vllm_worker import EXTENSION, parameters, worker_of

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]

RANK = 4
CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 8,
    "target_modules": {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"},
    "bias": "none",
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    directory = tmp_path_factory.mktemp("llama")
    model = vllm_cpu.prepare(directory)
    vllm_cpu.write_checkpoint(directory, actor().state_dict())
    from vllm import LLM

    yield LLM(
        model=model,
        worker_extension_cls=EXTENSION,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        max_cpu_loras=8,
        **{**vllm_cpu.ENGINE, "load_format": "auto"},
    )
    patch.undo()


@pytest.fixture
def hub(llm: Any) -> Iterator[sync.Hub]:
    with sync.serve() as coordinator, sync.connect(coordinator.address) as connected:
        llm.collective_rpc("tensorhub_join", args=(coordinator.address,))
        yield connected
        for number in llm.llm_engine.list_loras():
            llm.llm_engine.remove_lora(number)
        llm.collective_rpc("tensorhub_leave")
        worker_of(llm).__dict__.pop("_tensorhub_updater")


def adapter() -> dict[str, torch.Tensor]:
    """An adapter for all layers of the model, by PEFT's names."""
    tensors = {}
    for name, whole in actor().state_dict().items():
        if name.split(".")[-2] in CONFIG["target_modules"]:  # type: ignore[operator]
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, whole.shape[1]).bfloat16()
            tensors[f"{module}.lora_B.weight"] = torch.randn(whole.shape[0], RANK).bfloat16()
    return tensors


def manager(llm: Any) -> Any:
    return worker_of(llm).model_runner.lora_manager


def loaded(llm: Any, number: int) -> Any:
    return manager(llm)._adapter_manager.get_adapter(number)


def versions(llm: Any) -> Any:
    return llm.collective_rpc("tensorhub_state")[0]["adapters"]


def same(one: Any, other: Any) -> bool:
    """Whether two of vLLM's adapters have equal weights; merged layers have several."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def assert_as_from_files(
    llm: Any, number: int, tensors: Mapping[str, torch.Tensor], directory: Path
) -> None:
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    directory.mkdir()
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    config = adapter_tensors({}, CONFIG)[CONFIG_FILE]
    (directory / CONFIG_FILE).write_bytes(config.numpy().tobytes())
    assert llm.llm_engine.add_lora(LoRARequest("own", 7, f"{directory}", load_inplace=True))
    one, other = loaded(llm, number), loaded(llm, 7)
    assert set(one.loras) == set(other.loras)
    assert len(one.loras) == 6  # of each layer: the merged qkv_proj, o_proj, down_proj
    for name, found in one.loras.items():
        mine, its = vars(found), vars(other.loras[name])
        assert {key for key in mine if not same(mine[key], its[key])} == set()


def test_versions_of_several_adapters_are_loaded_and_old_ones_unloaded(
    llm: Any, hub: sync.Hub, tmp_path: Path
) -> None:
    poet, critic = adapter(), {name: each.float() for name, each in adapter().items()}
    weights = hub.register("actor/poet", adapter_tensors(poet, CONFIG))
    hub.register("actor/critic", adapter_tensors(critic, CONFIG)).publish(5)
    before = parameters(llm)
    other = adapter_request("actor/critic", 5)
    assert llm.llm_engine.add_lora(other)
    for version in range(4):
        with weights.mutate(version):
            for tensor in poet.values():
                tensor.normal_()
        request = adapter_request("actor/poet", version)
        assert llm.llm_engine.add_lora(request)
        assert_as_from_files(llm, request.lora_int_id, poet, tmp_path / f"{version}")
    assert versions(llm) == {"actor/critic": [5], "actor/poet": [2, 3]}
    assert_as_from_files(llm, other.lora_int_id, critic, tmp_path / "critic")
    kept = {adapter_request("actor/poet", each).lora_int_id for each in (2, 3)}
    assert set(llm.llm_engine.list_loras()) == {*kept, other.lora_int_id, 7}
    assert llm.llm_engine.remove_lora(other.lora_int_id)
    assert versions(llm) == {"actor/poet": [2, 3]}
    now = parameters(llm)
    assert all(torch.equal(each, now[name]) for name, each in before.items())


def test_an_update_of_the_base_keeps_adapters_and_a_dropped_one_is_loaded_from_memory(
    llm: Any, hub: sync.Hub, tmp_path: Path
) -> None:
    poet, base = adapter(), actor(3)
    weights = hub.register("actor/poet", adapter_tensors(poet, CONFIG))
    weights.publish(0)
    request = adapter_request("actor/poet", 0)
    assert llm.llm_engine.add_lora(request)
    of_base = hub.register("actor", base)
    for version in range(2):
        with of_base.mutate(version):
            train(base)
        (state,) = llm.collective_rpc("tensorhub_update")
        assert (state["version"], state["adapters"]) == (version, {"actor/poet": [0]})
        llm.collective_rpc("tensorhub_check")
        projected = "model.layers.1.self_attn.o_proj"
        assert torch.equal(
            parameters(llm)[f"{projected}.base_layer.weight"],
            base.state_dict()[f"{projected}.weight"],
        )
        head = base.state_dict()["lm_head.weight"]
        assert torch.equal(parameters(llm)["lm_head.weight"][: len(head)], head)
    weights.close()
    manager(llm).remove_all_adapters()  # as vLLM's own interface for weight transfer does
    assert versions(llm) == {"actor/poet": []}
    assert llm.llm_engine.add_lora(request)
    assert versions(llm) == {"actor/poet": [0]}
    assert_as_from_files(llm, request.lora_int_id, poet, tmp_path / "poet")


def test_an_adapter_is_loaded_again_once_the_memory_of_its_slot_was_lost(
    llm: Any, hub: sync.Hub
) -> None:
    """As vLLM's `sleep(level=2)` loses it. A request would be answered with what is there then."""
    hub.register("actor/poet", adapter_tensors(adapter(), CONFIG)).publish(0)
    request = adapter_request("actor/poet", 0)
    assert llm.llm_engine.add_lora(request)
    before = [each.clone() for each in slot(llm, request)]
    assert any(each.any() for each in before)
    llm.sleep(level=2)
    for each in slots(llm):
        each.fill_(torch.nan)
    llm.wake_up()
    assert llm.llm_engine.add_lora(request)
    assert same(slot(llm, request), before)


def slots(llm: Any) -> list[torch.Tensor]:
    """The memory that vLLM computes with, of all adapters in use."""
    halves = [
        half
        for module in manager(llm)._adapter_manager.modules.values()
        for half in (module.lora_a_stacked, module.lora_b_stacked)
    ]
    return [each for half in halves for each in ((half,) if torch.is_tensor(half) else half)]


def slot(llm: Any, request: Any) -> list[torch.Tensor]:
    number = manager(llm)._adapter_manager.lora_index_to_id.index(request.lora_int_id)
    return [each[number] for each in slots(llm)]


def test_a_number_that_was_published_anew_is_not_answered_with_the_old_adapter(
    llm: Any, hub: sync.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a trainer that has started again from a checkpoint."""
    monkeypatch.setattr(vllm_lora_requests, "LOOK_S", -1.0)
    poet = adapter()
    weights = hub.register("actor/poet", adapter_tensors(poet, CONFIG))
    weights.publish(0)
    with weights.mutate(1):
        poet[next(iter(poet))].add_(1)
    request = adapter_request("actor/poet", 1)
    assert llm.llm_engine.add_lora(request)
    hub.rollback("actor/poet", to=0)
    for tensor in poet.values():
        tensor.normal_()
    info = weights.publish(1)
    engines, _ = worker_of(llm).__dict__["_tensorhub_updater"].joined()
    while engines.newest("actor/poet") != info:
        time.sleep(0.01)
    with pytest.raises(VersionConflict, match="version 1 of 'actor/poet' was published anew"):
        llm.llm_engine.add_lora(request)
    llm.llm_engine.remove_lora(request.lora_int_id)
    assert llm.llm_engine.add_lora(request)
    assert_as_from_files(llm, request.lora_int_id, poet, tmp_path / "poet")


def module(index: int, name: str) -> str:
    return f"base_model.model.model.layers.{index}.{name}"


def test_all_names_shapes_and_dtypes_that_do_not_fit_are_listed(llm: Any, hub: sync.Hub) -> None:
    tensors = adapter()
    for half in ("lora_A.weight", "lora_B.weight"):
        misspelt = tensors.pop(module(0, f"self_attn.q_proj.{half}"))
        tensors[module(0, f"self_attn.q_porj.{half}")] = misspelt
    del tensors[module(1, "self_attn.k_proj.lora_B.weight")]
    tensors[module(0, "mlp.down_proj.lora_A.weight")] = torch.zeros(5, 128)
    tensors[module(0, "mlp.down_proj.lora_B.weight")] = torch.zeros(65, RANK)
    tensors[module(1, "self_attn.v_proj.lora_B.weight")] = torch.zeros(64, RANK)
    tensors[module(1, "self_attn.o_proj.lora_A.weight")] = torch.zeros(RANK, 64, dtype=torch.int32)
    tensors["value_head.weight"] = torch.zeros(2, 2)
    hub.register("wrong", adapter_tensors(tensors, CONFIG)).publish(0)
    before = llm.llm_engine.list_loras()
    with pytest.raises(ManifestMismatch, match=r"does not fit this engine in 9 place") as caught:
        llm.llm_engine.add_lora(adapter_request("wrong", 0))
    assert {
        each.split("'")[1].removeprefix("base_model.model.") for each in caught.value.differences
    } == {
        "model.layers.0.self_attn.q_porj.lora_A.weight",
        "model.layers.0.self_attn.q_porj.lora_B.weight",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.self_attn.k_proj",
        "model.layers.0.mlp.down_proj.lora_A.weight",
        "model.layers.0.mlp.down_proj.lora_B.weight",
        "model.layers.1.self_attn.v_proj.lora_B.weight",
        "model.layers.1.self_attn.o_proj.lora_A.weight",
        "value_head.weight",
    }
    assert llm.llm_engine.list_loras() == before


def test_bad_input(llm: Any, hub: sync.Hub) -> None:
    from vllm.lora.request import LoRARequest

    before = llm.llm_engine.list_loras()
    hub.register("actor", {"weight": torch.zeros(4)}).publish(0)
    with pytest.raises(ManifestMismatch, match=r"'actor' has no tensor 'adapter_config\.json'"):
        llm.llm_engine.add_lora(adapter_request("actor", 0))
    with pytest.raises(InvalidType, match=r"adapter_config\.json"):
        adapter_tensors({}, {"r": object()})
    for changed, reason in (
        ({"r": 64}, "max_lora_rank"),
        ({"r": 0}, "r|zero"),
        ({"use_dora": True}, "DoRA"),
        ({"r": "4"}, "str"),
    ):
        name = f"wrong-{json.dumps(changed)}"
        hub.register(name, adapter_tensors(adapter(), {**CONFIG, **changed})).publish(0)
        with pytest.raises(ManifestMismatch, match=reason):
            llm.llm_engine.add_lora(adapter_request(name, 0))
    deep = torch.full((10**6,), ord("["), dtype=torch.uint8)
    expert = {module(0, f"mlp.experts.0.w1.lora_{half}.weight"): torch.zeros(1) for half in "AB"}
    for name, given, reason in (
        ("deep", {CONFIG_FILE: deep}, "that says what it is"),
        ("experts", adapter_tensors(expert, CONFIG), "adapters of experts are not supported"),
    ):
        hub.register(name, given).publish(0)
        with pytest.raises(ManifestMismatch, match=reason):
            llm.llm_engine.add_lora(adapter_request(name, 0))
    for path in ("tensorhub:actor", "tensorhub:@3", "tensorhub:actor@newest"):
        with pytest.raises(InvalidValue, match="MODEL@VERSION"):
            llm.llm_engine.add_lora(LoRARequest("path", 8, path))
    with pytest.raises(VersionUnavailable):
        llm.llm_engine.add_lora(adapter_request("actor", 1))
    llm.collective_rpc("tensorhub_leave")
    with pytest.raises(StateError, match="has joined no cluster yet"):
        llm.llm_engine.add_lora(adapter_request("actor", 0))
    assert llm.llm_engine.list_loras() == before


def test_a_prompt_whose_adapter_is_not_published(llm: Any, hub: sync.Hub) -> None:
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=1, detokenize=False)
    adapters = [None, adapter_request("poet", 1)]
    with pytest.raises(VersionUnavailable):
        llm.generate([{"prompt_token_ids": [1]}] * 2, sampling, lora_request=adapters)
    assert not llm.llm_engine.has_unfinished_requests()
    assert not llm.llm_engine.engine_core.engine_core.scheduler.has_unfinished_requests()
