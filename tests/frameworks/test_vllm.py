"""`tensorhub.integrations.vllm` against vLLM itself: its offline `LLM` in this process, with a real Llama."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tensorhub import source as tensor, sync
from tensorhub.errors import (
    InvalidValue,
    ManifestMismatch,
    RegistrationError,
    StateError,
    VersionConflict,
    VersionUnavailable,
)
from tests.frameworks import vllm_cpu

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine whose post-processing is that of other machines: it turns `down_proj`, and swaps the halves of `o_proj`
    where they lie.
    """
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = vllm_cpu.prepare(tmp_path_factory.mktemp("llama"))
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    process = UnquantizedLinearMethod.process_weights_after_loading

    def processed(self: Any, layer: Any) -> None:
        process(self, layer)
        if layer.prefix.endswith("down_proj"):
            layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)
        elif layer.prefix.endswith("o_proj"):
            layer.weight.data.copy_(layer.weight.data.roll(len(layer.weight) // 2, 0))

    patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", processed)
    yield LLM(model=model, weight_transfer_config=WeightTransferConfig(backend="tensorhub"), **vllm_cpu.ENGINE)
    patch.undo()


@pytest.fixture
def coordinator() -> Iterator[sync.Coordinator]:
    with sync.serve() as serving:
        yield serving


@pytest.fixture
def trainers(llm: Any, coordinator: sync.Coordinator) -> Iterator[Any]:
    """Makes trainers of this engine."""
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from tensorhub.integrations.vllm import OfflineClient, TrainerInit

    made = []

    def make(source: Any, client: Any = None, **settings: Any) -> Any:
        init = TrainerInit(address=coordinator.address, **{"rank": 0, "timeout_s": 30.0, **settings})
        made.append(WeightTransferTrainerFactory.trainer_init(init, client=client or OfflineClient(llm), source=source))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()
    llm.shutdown_weight_transfer_engine()


def actor(seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**vllm_cpu.LLAMA)).to(torch.bfloat16)


def train(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def engine_of(llm: Any) -> Any:
    (found,) = llm.collective_rpc(lambda worker: worker.weight_transfer_engine)
    return found


def checksums(llm: Any) -> dict[str, str]:
    (found,) = llm.collective_rpc("compute_weight_checksums")
    return dict(found)


def check(llm: Any, model: torch.nn.Module) -> None:
    """The engine has these weights: vLLM's own checksums are the same after it has loaded them in its own way."""
    ours = checksums(llm)
    weights = [(name, tensor.detach().clone()) for name, tensor in model.state_dict().items()]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    theirs = checksums(llm)
    assert {name for name in ours if ours[name] != theirs[name]} == set()


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_three_updates(llm: Any, trainers: Any, host_memory_bytes: int) -> None:
    model = actor()
    trainer = trainers(model, host_memory_bytes=host_memory_bytes)
    for version in range(3):
        train(model)
        trainer.send_weights()
        assert llm.get_weight_version() == f"{version}"
        check(llm, model)
    plan = engine_of(llm)._plan
    assert sorted(name.split(".")[-2] for layer in plan.processed for name in layer.names.values()) == [
        "down_proj",
        "down_proj",
        "o_proj",
        "o_proj",
    ]
    assert len(plan.in_place) == 11
    assert not plan.loaded
    assert bool(engine_of(llm)._staged) == bool(host_memory_bytes)


def test_a_source_of_vllms_is_copied(llm: Any, trainers: Any) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    model = actor(1)
    trainer = trainers(ModuleSource(model))
    for _ in range(2):
        train(model)
        trainer.send_weights()
        check(llm, model)


def test_a_trainer_of_two_ranks(llm: Any, trainers: Any) -> None:
    """Each has half of the rows of each tensor, and says so."""
    model = actor(8)
    wholes = model.state_dict()

    def rank(number: int) -> Any:
        cut = {name: slice(number * len(each) // 2, (number + 1) * len(each) // 2) for name, each in wholes.items()}
        sources = {name: tensor(name, shape=tuple(each.shape))[cut[name]] for name, each in wholes.items()}
        return trainers({name: each[cut[name]] for name, each in wholes.items()}, rank=number, world_size=2, sources=sources)

    both = [rank(number) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(2):
            train(model)
            for done in [threads.submit(each.send_weights) for each in both]:
                done.result()
            check(llm, model)


def test_what_the_loader_casts_is_loaded_by_it(llm: Any, trainers: Any) -> None:
    model = actor(2)
    model.model.norm.float()
    model.model.layers[1].self_attn.k_proj.float()
    trainer = trainers(model)
    for _ in range(2):
        train(model)
        trainer.send_weights()
        check(llm, model)
    names = [f"model.layers.1.self_attn.{each}_proj.weight" for each in "qkv"]
    assert engine_of(llm)._plan.loaded == [*names, "model.norm.weight"]


def test_missing_and_unexpected_names_are_all_listed(llm: Any, trainers: Any) -> None:
    before, model = checksums(llm), actor(3)
    given = {name: tensor for name, tensor in model.state_dict().items() if "gate_proj" not in name}
    trainer = trainers(given)
    with pytest.raises(ManifestMismatch, match=r"2 parameter\(s\) of the engine are not in what is published") as missing:
        trainer.send_weights()
    assert [each.split("'")[1] for each in missing.value.differences] == [
        f"model.layers.{number}.mlp.gate_up_proj.weight" for number in range(2)
    ]
    trainer.shutdown()
    extra = {"model.layers.0.new.weight": torch.zeros(2), "value_head.weight": torch.zeros(2)}
    trainer = trainers({**model.state_dict(), **extra})
    with pytest.raises(ManifestMismatch, match="refuses 2 published") as unexpected:
        trainer.send_weights()
    assert [each.split("'")[1] for each in unexpected.value.differences] == list(extra)
    assert checksums(llm) == before


def test_an_update_that_fails_in_the_middle_says_torn_and_the_next_one_repairs(
    llm: Any, trainers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorhub.integrations import vllm_layers

    model = actor(4)
    trainer = trainers(model)
    trainer.send_weights()
    version, calls = llm.get_weight_version(), []
    process = vllm_layers.process

    def fail(layer: Any, filled: Any) -> None:
        calls.append(layer)
        if len(calls) == 2:
            raise RuntimeError("post-processing has failed")
        process(layer, filled)

    train(model)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_layers, "process", fail)
        with pytest.raises(StateError, match=r"post-processing has failed \[the engine's weights are torn") as caught:
            trainer.send_weights()
    assert caught.value.memory == "torn"
    assert "stays paused" in caught.value.__notes__[0]
    assert llm.get_weight_version() == version
    trainer.send_weights()
    check(llm, model)


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_an_update_that_fails_before_it_writes_leaves_the_old_weights(
    llm: Any, trainers: Any, host_memory_bytes: int
) -> None:
    model = actor(5)
    trainer = trainers(model, host_memory_bytes=host_memory_bytes)
    trainer.send_weights()
    before = checksums(llm)
    trainer.client.start_weight_update()
    with pytest.raises(VersionUnavailable, match="the engine's weights are intact"):
        trainer.client.update_weights({"version": 7})
    assert checksums(llm) == before


def test_calls_in_the_wrong_order(llm: Any, trainers: Any) -> None:
    from tensorhub.integrations.vllm import OfflineClient

    with pytest.raises(StateError, match="comes after init_weight_transfer_engine"):
        OfflineClient(llm).start_weight_update()
    model = actor(6)
    trainer = trainers(model)
    with pytest.raises(RuntimeError, match="start_weight_update must be called before"):
        trainer.client.update_weights({"version": 0})
    trainer.client.start_weight_update()
    with pytest.raises(StateError, match="comes after update_weights"):
        trainer.client.finish_weight_update()
    # The trainer is gone before it has finished. The next one goes on.
    trainer.shutdown()
    train(model)
    trainers(model).send_weights()
    check(llm, model)


def test_an_older_version_than_the_one_that_is_served(llm: Any, trainers: Any) -> None:
    model = actor(7)
    trainer = trainers(model)
    for _ in range(2):
        train(model)
        trainer.send_weights()
    before = checksums(llm)
    trainer.client.start_weight_update()
    with pytest.raises(VersionConflict, match="version 0 is older than the one that the engine serves, 1"):
        trainer.client.update_weights({"version": 0})
    assert checksums(llm) == before
    trainer._hub.rollback("actor", to=0)
    train(model)
    trainer.send_weights(1)  # another version 1
    check(llm, model)


def test_two_trainers(trainers: Any) -> None:
    trainers(actor())
    with pytest.raises(RegistrationError, match="trainer"):
        trainers(actor())


def test_a_client_that_cannot_pause(trainers: Any) -> None:
    with pytest.raises(InvalidValue, match="cannot pause its engine"):
        trainers(actor(), client=object())


def test_an_unsupported_release_is_refused(llm: Any) -> None:
    from tensorhub.integrations.vllm import register

    register()  # once more
    with pytest.raises(StateError, match=r"vLLM 0\.31\.2 is installed.*0\.32\.x, 0\.33\.x"):
        register("0.31.2")
