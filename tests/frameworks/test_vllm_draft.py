"""A draft model of a real engine's, with a checkpoint of its own, is updated with its base."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import IntegrityError, ManifestMismatch
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm import actor
from tests.frameworks.test_vllm_worker import EXTENSION, updater_of, worker_of

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]


def eagle() -> dict[str, torch.Tensor]:
    """What an EAGLE draft for the tests' Llama is published as."""
    layer = "draft.layers.0"
    names = {
        f"{layer}.self_attn.q_proj": (64, 64),
        f"{layer}.self_attn.k_proj": (32, 64),
        f"{layer}.self_attn.v_proj": (32, 64),
        f"{layer}.self_attn.o_proj": (64, 64),
        f"{layer}.mlp.gate_proj": (128, 64),
        f"{layer}.mlp.up_proj": (128, 64),
        f"{layer}.mlp.down_proj": (64, 128),
        f"{layer}.post_attention_layernorm": (64,),
        "draft.fc": (64, 128),
    }
    return {f"{name}.weight": torch.randn(shape).bfloat16() for name, shape in names.items()}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    directory, of_draft = tmp_path_factory.mktemp("llama"), tmp_path_factory.mktemp("eagle")
    model = vllm_cpu.prepare(directory)
    vllm_cpu.write_checkpoint(directory, actor().state_dict())
    (of_draft / "config.json").write_text(json.dumps({**vllm_cpu.LLAMA, "num_hidden_layers": 1}))
    vllm_cpu.write_checkpoint(
        of_draft, {name.removeprefix("draft."): each for name, each in eagle().items()}
    )
    from vllm import LLM

    speculative = {"method": "eagle", "model": f"{of_draft}", "num_speculative_tokens": 1}
    yield LLM(
        model=model,
        worker_extension_cls=EXTENSION,
        speculative_config=speculative,
        **{**vllm_cpu.ENGINE, "load_format": "auto"},
    )
    patch.undo()


@pytest.fixture
def hub(llm: Any) -> Iterator[sync.Hub]:
    with sync.serve() as coordinator, sync.connect(coordinator.address) as connected:
        llm.collective_rpc("tensorhub_join", args=(coordinator.address,))
        yield connected
        llm.collective_rpc("tensorhub_leave")
        worker_of(llm).__dict__.pop("_tensorhub_updater")


def parameters(llm: Any) -> dict[str, torch.Tensor]:
    """Of both models."""
    model = updater_of(llm)._model
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def assert_has(llm: Any, base: torch.nn.Module, draft: dict[str, torch.Tensor]) -> None:
    has, state = parameters(llm), base.state_dict()
    for name, of in (
        ("model.layers.1.self_attn.qkv_proj", [f"{part}_proj" for part in "qkv"]),
        ("model.layers.0.mlp.gate_up_proj", ["gate_proj", "up_proj"]),
    ):
        stem = name.rpartition(".")[0]
        rows = [state[f"{stem}.{part}.weight"] for part in of]
        assert torch.equal(has[f"{name}.weight"], torch.cat(rows))
    layer = "draft.layers.0"
    wanted = {
        "self_attn.qkv_proj": torch.cat(
            [draft[f"{layer}.self_attn.{part}_proj.weight"] for part in "qkv"]
        ),
        "self_attn.o_proj": draft[f"{layer}.self_attn.o_proj.weight"],
        "mlp.gate_up_proj": torch.cat(
            [draft[f"{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up")]
        ),
        "mlp.down_proj": draft[f"{layer}.mlp.down_proj.weight"],
        "post_attention_layernorm": draft[f"{layer}.post_attention_layernorm.weight"],
    }
    made = {f"draft.model.layers.0.{name}.weight": each for name, each in wanted.items()}
    made["draft.model.fc.weight"] = draft["draft.fc.weight"]
    assert {name for name in has if name.startswith("draft.")} == set(made)
    assert [name for name, each in made.items() if not torch.equal(has[name], each)] == []


def test_both_are_updated_in_one_version(llm: Any, hub: sync.Hub) -> None:
    base, draft = actor(1), eagle()
    weights = hub.register("actor", {**base.state_dict(), **draft})
    for version in range(3):
        with weights.mutate(version), torch.no_grad():
            for tensor in (*base.state_dict().values(), *draft.values()):
                tensor.normal_()
        (state,) = llm.collective_rpc("tensorhub_update", args=(version,))
        assert (state["version"], state["is_torn"]) == (version, False)
        assert_has(llm, base, draft)
        llm.collective_rpc("tensorhub_check")
    dict(updater_of(llm)._model.named_parameters())["draft.model.fc.weight"].data[3, 3] += 1
    with pytest.raises(IntegrityError, match=r"1 tensor\(s\).*'draft\.model\.fc\.weight'"):
        llm.collective_rpc("tensorhub_check")


def test_what_either_lacks_is_listed_and_neither_is_written(llm: Any, hub: sync.Hub) -> None:
    before = parameters(llm)
    tensors = {**actor(2).state_dict(), **eagle()}
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    del tensors["draft.layers.0.mlp.down_proj.weight"]
    tensors["draft.cf.weight"] = tensors.pop("draft.fc.weight")
    hub.register("actor", tensors).publish(0)
    with pytest.raises(ManifestMismatch, match="weights are intact") as caught:
        llm.collective_rpc("tensorhub_update")
    assert {each.split("'")[1] for each in caught.value.differences} == {
        "model.layers.1.self_attn.o_proj.weight",
        "draft.model.layers.0.mlp.down_proj.weight",
        "draft.model.fc.weight",
        "draft.cf.weight",
    }
    assert all(torch.equal(each, before[name]) for name, each in parameters(llm).items())


def test_a_draft_is_left_alone_only_where_that_is_said(llm: Any, hub: sync.Hub) -> None:
    before = parameters(llm)
    hub.register("actor", actor(3)).publish(0)
    with pytest.raises(ManifestMismatch) as caught:
        llm.collective_rpc("tensorhub_update")
    assert {each.split("'")[1] for each in caught.value.differences} == {
        name for name in before if name.startswith("draft.")
    }
    address = updater_of(llm)._settings.address
    llm.collective_rpc("tensorhub_join", kwargs={"address": address, "ignored": ["draft.*"]})
    llm.collective_rpc("tensorhub_update")
    llm.collective_rpc("tensorhub_check")
    now = parameters(llm)
    same = {name for name, each in before.items() if torch.equal(each, now[name])}
    assert same == {name for name in before if name.startswith("draft.")}
