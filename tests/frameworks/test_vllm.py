"""`tensorhub.integrations.vllm` against vLLM itself: its offline `LLM` in this process, with a real
Llama.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tensorhub import Stamp, source as tensor, sync
from tensorhub.errors import (
    IntegrityError,
    InvalidValue,
    ManifestMismatch,
    OperationTimeout,
    RegistrationError,
    StateError,
    VersionConflict,
    VersionUnavailable,
)
from tests.frameworks import vllm_cpu

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine whose post-processing is that of other machines: it turns `down_proj`, and swaps
    the halves of `o_proj` where they lie.
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
            layer.weight = torch.nn.Parameter(
                layer.weight.data.t().contiguous(), requires_grad=False
            )
        elif layer.prefix.endswith("o_proj"):
            layer.weight.data.copy_(layer.weight.data.roll(len(layer.weight) // 2, 0))

    patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", processed)
    yield LLM(
        model=model,
        weight_transfer_config=WeightTransferConfig(backend="tensorhub"),
        **vllm_cpu.ENGINE,
    )
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
        init = TrainerInit(
            address=coordinator.address, **{"rank": 0, "timeout_s": 30.0, **settings}
        )
        made.append(
            WeightTransferTrainerFactory.trainer_init(
                init, client=client or OfflineClient(llm), source=source
            )
        )
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


class Watched:
    """A client that writes down which calls are made, and calls `before` with the name of each."""

    def __init__(self, client: Any, before: Any = None) -> None:
        self.client, self.calls, self.before = client, list[str](), before

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.calls.append(name)
            if self.before is not None:
                self.before(name)
            return getattr(self.client, name)(*given, **named)

        return call


def engine_of(llm: Any) -> Any:
    (found,) = llm.collective_rpc(lambda worker: worker.weight_transfer_engine)
    return found


def checksums(llm: Any) -> dict[str, str]:
    (found,) = llm.collective_rpc("compute_weight_checksums")
    return dict(found)


def check(llm: Any, model: torch.nn.Module) -> None:
    """The engine has these weights: vLLM's own checksums are the same after it has loaded them in
    its own way.
    """
    ours = checksums(llm)
    weights = [(name, tensor.detach().clone()) for name, tensor in model.state_dict().items()]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    theirs = checksums(llm)
    assert {name for name in ours if ours[name] != theirs[name]} == set()


def test_weights_that_may_have_been_published_may_be_written_and_take_their_number(
    llm: Any, trainers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the coordinator stood still."""
    model, publish = actor(), sync.Weights.publish
    trainer = trainers(model)
    trainer.send_weights()

    def loses_the_answer(weights: sync.Weights, *given: Any) -> None:
        publish(weights, *given)
        raise OperationTimeout("it has not answered", memory="in_doubt")

    with monkeypatch.context() as broken:
        broken.setattr(sync.Weights, "publish", loses_the_answer)
        with pytest.raises(OperationTimeout, match="has not answered"):
            trainer.send_weights()
    train(model)
    trainer.send_weights()
    assert Stamp.parse(llm.get_weight_version()).version == 2
    check(llm, model)


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_three_updates(llm: Any, trainers: Any, host_memory_bytes: int) -> None:
    model = actor()
    trainer = trainers(model, host_memory_bytes=host_memory_bytes)
    for version in range(3):
        train(model)
        trainer.send_weights()
        assert Stamp.parse(llm.get_weight_version()).version == version
        check(llm, model)
    plan = engine_of(llm).updater.plan
    assert sorted(
        name.split(".")[-2] for layer in plan.processed for name in layer.names.values()
    ) == [
        "down_proj",
        "down_proj",
        "o_proj",
        "o_proj",
    ]
    assert len(plan.in_place) == 11
    assert not plan.loaded
    assert bool(engine_of(llm).updater.staged) == bool(host_memory_bytes)
    replicas = trainer._hub.describe("actor").replicas
    assert len({replica.group for replica in replicas}) == 1, (
        "memory that is read into by layer is nobody's source"
    )


def test_a_source_of_vllms_is_copied(llm: Any, trainers: Any) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    model = actor(1)
    trainer = trainers(ModuleSource(model))
    for _ in range(2):
        train(model)
        trainer.send_weights()
        check(llm, model)


def test_a_source_of_vllms_that_yields_others_than_it_said_publishes_nothing(
    llm: Any, trainers: Any
) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource

    source = ModuleSource(actor(1))
    trainer = trainers(source)
    trainer.send_weights()
    served, whole = (
        checksums(llm),
        dict(source.iter_full() if hasattr(source, "iter_full") else source),
    )
    first, *_, last = whole
    given = {
        **{name: each for name, each in whole.items() if name not in (first, last)},
        "new": torch.zeros(2),
    }
    trainer.source = type("Source", (), {"iter_full": lambda self: iter(given.items())})()
    with pytest.raises(
        RegistrationError, match=r"not yielded 2 of its tensors: .*; and 1 others: 'new'"
    ) as error:
        trainer.send_weights()
    assert repr(first) in f"{error.value}"
    assert repr(last) in f"{error.value}"
    del given["new"]
    with pytest.raises(RegistrationError, match="not yielded 2 of its tensors"):
        trainer.send_weights()
    assert checksums(llm) == served
    trainer.source = source
    trainer.send_weights()
    assert Stamp.parse(llm.get_weight_version()).version == 1


def test_a_trainer_of_two_ranks(llm: Any, trainers: Any) -> None:
    """Each has half of the rows of each tensor, and says so."""
    model = actor(8)
    wholes = model.state_dict()

    def rank(number: int) -> Any:
        cut = {
            name: slice(number * len(each) // 2, (number + 1) * len(each) // 2)
            for name, each in wholes.items()
        }
        sources = {
            name: tensor(name, shape=tuple(each.shape))[cut[name]] for name, each in wholes.items()
        }
        return trainers(
            {name: each[cut[name]] for name, each in wholes.items()},
            rank=number,
            world_size=2,
            sources=sources,
        )

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
    assert engine_of(llm).updater.plan.loaded == [*names, "model.norm.weight"]


def test_missing_and_unexpected_names_are_all_listed(llm: Any, trainers: Any) -> None:
    before, model = checksums(llm), actor(3)
    given = {name: tensor for name, tensor in model.state_dict().items() if "gate_proj" not in name}
    trainer = trainers(given)
    with pytest.raises(
        ManifestMismatch, match=r"2 parameter\(s\) of the engine are not in what is published"
    ) as missing:
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


def test_shapes_and_dtypes_that_the_loader_would_change_are_all_refused(
    llm: Any, trainers: Any
) -> None:
    """An engine with random weights knows no checkpoint. Its loader would cut or cast these."""
    before, given = checksums(llm), {**actor(3).state_dict()}
    shapes = {
        "model.layers.0.mlp.gate_proj.weight": ((192, 64), (128, 64)),
        "model.layers.1.self_attn.k_proj.weight": ((64, 64), (32, 64)),
        "model.layers.1.mlp.down_proj.weight": ((64, 192), (64, 128)),
    }
    for name, (has, _) in shapes.items():
        given[name] = torch.ones(has, dtype=torch.bfloat16)
    given["lm_head.weight"] = given["lm_head.weight"].to(torch.int8)
    with pytest.raises(ManifestMismatch) as refused:
        trainers(given).send_weights()
    lines = {each.split("'")[1]: each for each in refused.value.differences}
    assert lines.keys() == {*shapes, "lm_head.weight"}
    for name, (has, reads) in shapes.items():
        assert f"its shape is {has}, and the engine reads {reads} of it" in lines[name]
    assert "it is int8, and the engine's parameter bfloat16" in lines["lm_head.weight"]
    assert checksums(llm) == before


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_what_is_called_when_and_that_only_the_update_writes(
    llm: Any, trainers: Any, host_memory_bytes: int
) -> None:
    from tensorhub.integrations.vllm import OfflineClient

    weights: dict[str, dict[str, str]] = {}
    fetched: dict[str, int | None] = {}

    def before(name: str) -> None:
        weights[name], engine = checksums(llm), engine_of(llm)
        fetched[name] = engine.updater.weights and engine.updater.weights.version

    client = Watched(OfflineClient(llm), before)
    model = actor(20)
    trainer = trainers(
        model, client, host_memory_bytes=host_memory_bytes, pause="keep", clear_cache=False
    )
    trainer.send_weights()
    train(model)
    client.calls.clear()
    trainer.send_weights()
    pause, write = "pause_generation", "update_weights"
    assert client.calls == [
        "init_weight_transfer_engine", pause, "start_weight_update", write, "finish_weight_update", "resume_generation"
    ]  # fmt: skip
    assert (
        weights["init_weight_transfer_engine"]
        == weights[pause]
        == weights["start_weight_update"]
        == weights[write]
    )
    assert (
        weights[write]
        != weights["finish_weight_update"]
        == weights["resume_generation"]
        == checksums(llm)
    )
    # with host memory it is there before anything is paused
    assert fetched[pause] == (1 if host_memory_bytes else 0)


BROKEN = {  # which call fails: the calls after it, and which weights it leaves
    "init_weight_transfer_engine": ([], "old"),
    "pause_generation": (["resume_generation"], "old"),
    "start_weight_update": (["resume_generation"], "old"),
    # as far as anybody knows
    "update_weights": (["finish_weight_update", "update_weight_version"], "torn"),
    "finish_weight_update": (["update_weight_version"], "torn"),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_call_whose_answer_is_lost(llm: Any, trainers: Any, broken: str) -> None:
    from tensorhub.integrations.vllm import OfflineClient

    model = actor(22)
    client = Watched(OfflineClient(llm))
    trainer = trainers(model, client)
    trainer.send_weights()

    def before(name: str) -> None:
        if name == broken and client.calls.count(name) == 1:
            raise ConnectionError("the answer is lost")

    client.before = before
    client.calls.clear()
    train(model)
    with pytest.raises(ConnectionError, match="the answer is lost") as caught:
        trainer.send_weights()
    after, weights = BROKEN[broken]
    assert client.calls[client.calls.index(broken) + 1 :] == after
    said = llm.get_weight_version()
    assert said == "torn" if weights == "torn" else Stamp.parse(said).version == 0
    assert any("stays paused" in note for note in getattr(caught.value, "__notes__", ())) == (
        weights == "torn"
    )
    trainer.send_weights()
    assert client.calls[-1] == "resume_generation"
    assert Stamp.parse(llm.get_weight_version()).version == 2
    check(llm, model)


@pytest.mark.parametrize("resume_torn", [False, True])
def test_an_update_that_fails_in_the_middle_says_torn_and_the_next_one_repairs(
    llm: Any, trainers: Any, monkeypatch: pytest.MonkeyPatch, resume_torn: bool
) -> None:
    from tensorhub.integrations import vllm_layers
    from tensorhub.integrations.vllm import OfflineClient

    model = actor(4)
    client = Watched(OfflineClient(llm))
    trainer = trainers(model, client, resume_torn=resume_torn)
    trainer.send_weights()
    before, calls = checksums(llm), []
    process = vllm_layers.process

    def fail(layer: Any, filled: Any) -> None:
        calls.append(layer)
        if len(calls) == 2:
            raise RuntimeError("post-processing has failed")
        process(layer, filled)

    train(model)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_layers, "process", fail)
        with pytest.raises(
            StateError, match=r"post-processing has failed \[the engine's weights are torn"
        ) as caught:
            trainer.send_weights()
    assert caught.value.memory == "torn"
    assert checksums(llm) != before
    # Whatever is generated with such weights bears their name.
    assert llm.get_weight_version() == "torn"
    assert (client.calls[-1] == "resume_generation") == resume_torn
    assert any("stays paused" in note for note in caught.value.__notes__) != resume_torn
    assert "resume_generation" not in calls_of_a_pause_that_is_lost(llm, trainers, model)
    trainer.send_weights()
    assert Stamp.parse(llm.get_weight_version()).version == 2
    assert client.calls[-1] == "resume_generation"
    check(llm, model)
    assert "resume_generation" in calls_of_a_pause_that_is_lost(llm, trainers, model)


def calls_of_a_pause_that_is_lost(llm: Any, trainers: Any, model: Any) -> list[str]:
    """By a new trainer, which knows nothing of the engine."""
    from tensorhub.integrations.vllm import OfflineClient

    def lost(name: str) -> None:
        if name == "pause_generation":
            raise ConnectionError("the answer is lost")

    client = Watched(OfflineClient(llm), lost)
    trainer = trainers(model, client, model="new")
    with pytest.raises(ConnectionError, match="the answer is lost"):
        trainer.send_weights()
    trainer.shutdown()
    return client.calls


def test_a_fill_that_breaks_off_in_place_says_torn_and_the_next_one_repairs(
    llm: Any, trainers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is there: what was to be served is overwritten."""
    model = actor(26)
    trainer = trainers(model)
    trainer.send_weights()
    weights = engine_of(llm).updater.weights
    update = weights.update

    def break_off(version: int, timeout: float) -> None:
        update(version, timeout=timeout)
        weights.unpublish()
        error = VersionUnavailable("the last source is gone")
        error.memory = "torn"
        raise error

    train(model)
    with monkeypatch.context() as patch:
        patch.setattr(weights, "update", break_off)
        with pytest.raises(
            VersionUnavailable, match=r"last source is gone \[the engine's weights are torn"
        ) as caught:
            trainer.send_weights()
    assert caught.value.memory == "torn"
    assert llm.get_weight_version() == "torn"
    trainer.send_weights()
    assert Stamp.parse(llm.get_weight_version()).version == 2
    check(llm, model)


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_what_attention_derives_is_derived_once_the_weights_are_there(
    llm: Any, trainers: Any, monkeypatch: pytest.MonkeyPatch, host_memory_bytes: int
) -> None:
    from vllm.model_executor.layers.attention import Attention

    model = actor(27)
    trainer = trainers(model, host_memory_bytes=host_memory_bytes)
    trainer.send_weights()
    derived = []
    derive = Attention.process_weights_after_loading

    def noted(layer: Any, dtype: torch.dtype) -> None:
        derived.append((layer.layer_name, checksums(llm)))
        derive(layer, dtype)

    train(model)
    monkeypatch.setattr(Attention, "process_weights_after_loading", noted)
    trainer.send_weights()
    monkeypatch.undo()
    assert [name for name, _ in derived] == [
        f"model.layers.{number}.self_attn.attn" for number in range(2)
    ]
    assert all(sums == checksums(llm) for _, sums in derived)


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_the_engines_weights_are_checked(llm: Any, trainers: Any, host_memory_bytes: int) -> None:
    """What is overwritten in the engine is named, just as vLLM's own digests tell it; the next
    update repairs it.
    """
    model = actor(24)
    model.model.norm.float()  # so that the loader has to cast it
    trainer = trainers(model, host_memory_bytes=host_memory_bytes)
    with pytest.raises(StateError, match="no update has succeeded"):
        trainer.check_weights()
    trainer.send_weights()
    trainer.check_weights()
    before, modules = checksums(llm), dict(engine_of(llm).model.named_modules())
    spoilt = [
        "layers.1.self_attn.qkv_proj",
        "layers.0.mlp.down_proj",
        "layers.1.self_attn.o_proj",
        "norm",
    ]
    for name in spoilt:
        modules[f"model.{name}"].weight.data.view(-1)[3] += 1
    with pytest.raises(IntegrityError, match=r"tensor\(s\) of the engine") as caught:
        trainer.check_weights()
    after = checksums(llm)
    changed = {name.rpartition(":")[2] for name in after if after[name] != before[name]}
    assert changed == {f"model.{name}.weight" for name in spoilt}
    named = set(f"{caught.value}".split("'")[1::2])
    assert named == changed
    trainer.send_weights()
    trainer.check_weights()
    assert checksums(llm) == before


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_a_model_whose_tensors_were_replaced_is_refused(
    llm: Any, trainers: Any, host_memory_bytes: int
) -> None:
    model = actor(26)
    trainer = trainers(model, host_memory_bytes=host_memory_bytes)
    trainer.send_weights()
    norm = engine_of(llm).model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.data.clone(), requires_grad=False)
    before = checksums(llm)
    train(model)
    with pytest.raises(
        RegistrationError, match=r"'model.norm.weight'.*shutdown_weight_transfer_engine"
    ):
        trainer.send_weights()
    assert checksums(llm) == before
    assert Stamp.parse(llm.get_weight_version()).version == 0
    trainer.shutdown()
    llm.shutdown_weight_transfer_engine()
    trainers(model, host_memory_bytes=host_memory_bytes).send_weights()
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


def test_an_older_version_than_the_one_that_is_served(llm: Any, trainers: Any) -> None:
    model = actor(7)
    trainer = trainers(model)
    for _ in range(2):
        train(model)
        trainer.send_weights()
    before = checksums(llm)
    trainer.client.start_weight_update()
    with pytest.raises(
        VersionConflict, match="version 0 is older than the one that the engine serves, 1"
    ):
        trainer.client.update_weights({"version": 0})
    assert checksums(llm) == before
    trainer._hub.rollback("actor", to=0)
    train(model)
    trainer.send_weights(1)  # another version 1
    check(llm, model)


def test_a_sleeping_engine_is_updated_once_it_is_awake(llm: Any, trainers: Any) -> None:
    model = actor(27)
    trainer = trainers(model)
    trainer.send_weights()
    llm.sleep(level=2)
    for parameter in engine_of(llm).model.parameters():
        parameter.data.fill_(7)  # vLLM's CPU worker keeps its memory
    train(model)
    try:
        with pytest.raises(StateError, match=r"sleeps.*call wake_up"):
            trainer.send_weights()
    finally:
        llm.wake_up()
    trainer.send_weights()
    check(llm, model)
    trainer.check_weights()


def test_a_client_that_cannot_pause(trainers: Any) -> None:
    with pytest.raises(InvalidValue, match="cannot pause its engine"):
        trainers(actor(), client=object())
