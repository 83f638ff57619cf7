"""`tensorhub.integrations.sglang` against SGLang itself: one rank in this process, with a real
Llama.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from tensorhub import Stamp, source as tensor, sync
from tensorhub.errors import (
    IntegrityError,
    ManifestMismatch,
    RegistrationError,
    StateError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.integrations.one_version_trainer import OneVersion
from tests.frameworks import sglang_cpu
from tests.frameworks.test_vllm import actor, train

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> sglang_cpu.Rank:
    return sglang_cpu.Rank(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def engine(rank: sglang_cpu.Rank) -> Iterator[Any]:
    made = sglang_cpu.engine(rank)
    yield made
    assert made.tokenizer_manager.died_of is None
    made.loop.close()


@pytest.fixture
def coordinator() -> Iterator[sync.Coordinator]:
    with sync.serve() as serving:
        yield serving


@pytest.fixture
def trainers(engine: Any, rank: sglang_cpu.Rank, coordinator: sync.Coordinator) -> Iterator[Any]:
    """Makes trainers of this engine."""
    from tensorhub.integrations.sglang import Trainer

    made = []

    def make(source: Any, engines: Any = engine, **settings: Any) -> Any:
        made.append(
            Trainer(source, engines, coordinator.address, **{"timeout_s": 60.0, **settings})
        )
        return made[-1]

    yield make
    for each in made:
        each.close()
    if "get_weights_by_name" in vars(rank.model):
        rank.receiver.close()
        del rank.model.get_weights_by_name


def check(rank: sglang_cpu.Rank, model: torch.nn.Module) -> None:
    """The engine has, byte for byte, what SGLang loads from a checkpoint of these weights."""
    ours, theirs = rank.checksums(), rank.loaded_by_sglang(model.state_dict())
    assert {name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)} == set()


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_three_updates(
    rank: sglang_cpu.Rank,
    engine: Any,
    trainers: Any,
    monkeypatch: pytest.MonkeyPatch,
    host_memory_bytes: int,
) -> None:
    staged, update = [], sync.Weights.update

    def noted(self: sync.Weights, *given: Any, **named: Any) -> Any:
        staged.append(named["staged"])
        return update(self, *given, **named)

    monkeypatch.setattr(sync.Weights, "update", noted)
    model = actor()
    trainer = trainers(model, host_memory_bytes=host_memory_bytes)
    for version in range(3):
        train(model)
        before, flushed = rank.checksums(), rank.flushed
        engine.tokenizer_manager.calls.clear()
        assert trainer.send_weights() == version
        said = engine.tokenizer_manager.config_value("weight_version")
        assert said == (rank.versions or [said])[-1]
        assert Stamp.parse(said).version == version
        assert engine.tokenizer_manager.calls == ["abort", "ContinueGenerationReqInput"]
        assert not engine.tokenizer_manager.is_pause
        assert rank.flushed == flushed + 1
        assert all(before[name] != digest for name, digest in rank.checksums().items())
        check(rank, model)
    assert staged == [bool(host_memory_bytes)] * 3
    plan = rank.receiver._plan
    assert len(plan.in_place) == 15
    assert not plan.loaded


def test_the_first_contact_logs_no_error(
    rank: sglang_cpu.Rank, engine: Any, trainers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine.tokenizer_manager.config_value = lambda name: "default"  # as SGLang starts
    model = actor(33)
    trainer = trainers(model)
    trainer.send_weights()
    trainer.send_weights()
    assert [each.getMessage() for each in caplog.records if each.levelname == "ERROR"] == []
    check(rank, model)


@pytest.fixture
def fleet(
    rank: sglang_cpu.Rank, engine: Any, coordinator: sync.Coordinator
) -> Iterator[OneVersion]:
    """With this engine, which has joined by a call."""
    from tensorhub.integrations.sglang import Session

    session = Session(engine, coordinator.address, timeout_s=60.0)
    with pytest.raises(StateError, match=r"with a prefix cache cannot join.*--disable-radix-cache"):
        session.join_fleet()
    rank.disable_radix_cache = True
    with sync.connect(coordinator.address) as hub:
        made = OneVersion(hub, "actor", [session.join_fleet()], timeout_s=60.0, attempts_max=1)
        yield made
        made.close()
    rank.receiver.member.engine.close()
    rank.receiver.close()
    rank.disable_radix_cache = False
    del rank.model.get_weights_by_name, rank.run_batch


def test_an_engine_of_a_fleet(
    rank: sglang_cpu.Rank, engine: Any, coordinator: sync.Coordinator, fleet: OneVersion
) -> None:
    """A batch has the committed version, and nothing else updates it."""
    from tensorhub.integrations.sglang import Session

    model = actor(30)
    session = Session(engine, coordinator.address, timeout_s=60.0, pause=None)
    with sync.connect(coordinator.address) as hub:
        weights = hub.register("actor", model)
        for version in range(2):
            with weights.mutate(version):
                train(model)
            info = hub.wait_for("actor", at_least=version)
            fleet.update(info)
            served = rank.run_batch()
            assert served == rank.loaded_by_sglang(model.state_dict())
            session.check(info)
        for call in (lambda: session.update(info), session.join_fleet):
            with pytest.raises(StateError, match="is one of a fleet"):
                call()
        rank.model.model.norm.weight.data.fill_(7.0)
        with pytest.raises(IntegrityError, match=r"norm\.weight"):
            session.check(info)
        assert rank.run_batch() == served  # it was taken anew
        with weights.mutate(2):
            train(model)
        rank.fail("the layers cannot be finished")
        with pytest.raises(StateError, match="cannot be finished"):
            fleet.update(hub.wait_for("actor", at_least=2))
        rank.fail(None)
        assert rank.run_batch() == served  # what was written is taken back


def test_an_engine_of_a_fleet_that_sleeps_takes_no_version(
    rank: sglang_cpu.Rank, coordinator: sync.Coordinator, fleet: OneVersion
) -> None:
    model = actor(31)
    with sync.connect(coordinator.address) as hub:
        weights = hub.register("actor", model)
        weights.publish(0)
        fleet.update(hub.wait_for("actor", at_least=0))
        rank.handle(io_struct().ReleaseMemoryOccupationReqInput(tags=["weights"]))
        assert rank.receiver.member.engine.version is None
        with weights.mutate(1):
            train(model)
        with pytest.raises(StateError, match="the engine sleeps"):
            fleet.update(hub.wait_for("actor", at_least=1))
        rank.handle(io_struct().ResumeMemoryOccupationReqInput(tags=["weights"]))
        with weights.mutate(2):
            train(model)
        fleet.update(hub.wait_for("actor", at_least=2))
        assert rank.run_batch() == rank.loaded_by_sglang(model.state_dict())


def io_struct() -> Any:
    from sglang.srt.managers import io_struct as found

    return found


def test_the_loader_without_the_trainer(
    rank: sglang_cpu.Rank, engine: Any, coordinator: sync.Coordinator
) -> None:
    """Tensors that are no order are refused, and the engine goes on."""
    from tensorhub.integrations.sglang_server import Offline, _load
    from tensorhub.integrations.sglang_session import REPORT, Report

    before, there = rank.checksums(), Offline(engine)
    if there.has_sessions:
        there.call("begin_weight_update", selector="target")
    _load(there, [("model.norm.weight", torch.zeros(64))])
    report = Report.decode(there.parameter(REPORT))
    assert report is not None
    assert report.failed is not None
    assert "was given tensors of its own, ['model.norm.weight']" in report.failed.text
    assert there.parameter("no.such.weight") is None
    if there.has_sessions:
        there.call("end_weight_update")
    assert rank.checksums() == before
    del rank.model.get_weights_by_name


def test_what_the_loader_casts_is_loaded_by_it(rank: sglang_cpu.Rank, trainers: Any) -> None:
    model = actor(2)
    model.model.norm.float()
    model.model.layers[1].self_attn.k_proj.float()
    trainer = trainers(model)
    for _ in range(2):
        train(model)
        trainer.send_weights()
        check(rank, model)
    assert rank.ways()[1] == ["model.layers.1.self_attn.qkv_proj", "model.norm"]


def test_a_trainer_of_two_ranks(rank: sglang_cpu.Rank, trainers: Any) -> None:
    """Each has half of the rows of each tensor, and says so."""
    model = actor(11)
    wholes = model.state_dict()

    def part(number: int) -> Any:
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

    both = [part(number) for number in range(2)]
    with ThreadPoolExecutor(2) as threads:
        for version in range(2):
            train(model)
            assert [
                done.result() for done in [threads.submit(each.send_weights) for each in both]
            ] == [version, version]
            check(rank, model)


def test_missing_and_unexpected_names_are_all_listed(
    rank: sglang_cpu.Rank, engine: Any, trainers: Any
) -> None:
    before, model = rank.checksums(), actor(3)
    given = {name: each for name, each in model.state_dict().items() if "gate_proj" not in name}
    trainer = trainers(given)
    with pytest.raises(
        ManifestMismatch, match=r"2 parameter\(s\) of the engine are not in what is published"
    ) as missing:
        trainer.send_weights()
    assert [each.split("'")[1] for each in missing.value.differences] == [
        f"model.layers.{number}.mlp.gate_up_proj.weight" for number in range(2)
    ]
    assert missing.value.memory == "intact"
    assert "the engine's weights are intact" in f"{missing.value}"
    assert not engine.tokenizer_manager.is_pause
    trainer.close()
    trainer = trainers({name: each for name, each in given.items() if "lm_head" not in name})
    with pytest.raises(ManifestMismatch) as without:
        trainer.send_weights()
    assert "'lm_head.weight'" in f"{without.value}"
    assert "begin with 'model.'" not in f"{without.value}"  # so do the engine's
    trainer.close()
    trainer = trainers({f"policy.{name}": each for name, each in model.state_dict().items()})
    with pytest.raises(ManifestMismatch, match=r"all published names begin with 'policy\.'"):
        trainer.send_weights()
    trainer.close()
    extra = {"model.layers.0.new.weight": torch.zeros(2), "value_head.weight": torch.zeros(2)}
    trainer = trainers({**model.state_dict(), **extra})
    with pytest.raises(ManifestMismatch, match="has no place for 2 published") as unexpected:
        trainer.send_weights()
    assert [each.split("'")[1] for each in unexpected.value.differences] == list(extra)
    assert rank.checksums() == before
    trainer.close()
    trainer = trainers({**model.state_dict(), **extra}, unused=["value_*", "*.new.weight"])
    trainer.send_weights()
    check(rank, model)
    trainer.close()
    # though the last update was agreed on
    with pytest.raises(ManifestMismatch, match="has no place for 2 published"):
        trainers({**model.state_dict(), **extra}).send_weights()


@pytest.mark.parametrize("other", [32, 192])
def test_shapes_and_dtypes_that_the_loader_would_change_are_all_refused(
    rank: sglang_cpu.Rank, engine: Any, trainers: Any, other: int
) -> None:
    """An engine with random weights knows no checkpoint. Its loader would pad, cut or cast these."""
    model = actor(32)
    trainer = trainers(model)
    trainer.send_weights()
    trainer.close()
    given = {name: each.detach().clone() for name, each in model.state_dict().items()}
    shapes = {
        "model.layers.0.mlp.gate_proj.weight": ((other, 64), (128, 64)),
        "model.layers.1.mlp.up_proj.weight": ((other, 64), (128, 64)),
        "model.layers.1.mlp.down_proj.weight": ((64, other), (64, 128)),
    }
    for name, (has, _) in shapes.items():
        given[name] = torch.ones(has, dtype=torch.bfloat16)
    dtypes = {
        "lm_head.weight": torch.int8,
        "model.layers.0.self_attn.k_proj.weight": torch.float8_e4m3fn,
        "model.norm.weight": torch.bool,
    }
    for name, dtype in dtypes.items():
        given[name] = given[name].to(dtype)
    before = rank.checksums()
    trainer = trainers(given)
    with pytest.raises(ManifestMismatch) as refused:
        trainer.send_weights()
    assert refused.value.memory == "intact"
    lines = {each.split("'")[1]: each for each in refused.value.differences}
    assert lines.keys() == {*shapes, *dtypes}
    for name, (has, wants) in shapes.items():
        assert f"{has}" in lines[name]
        assert f"{wants}" in lines[name]
    for name, dtype in dtypes.items():
        said = f"{dtype}".removeprefix("torch.")
        assert f"it is {said}, and the engine's parameter bfloat16" in lines[name]
    assert rank.checksums() == before
    assert not engine.tokenizer_manager.is_pause
    trainer.close()
    trainers(model).send_weights()
    check(rank, model)


def test_an_update_that_fails_in_the_middle_says_torn_and_the_next_one_repairs(
    rank: sglang_cpu.Rank, engine: Any, trainers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = actor(4)
    trainer = trainers(model)
    trainer.send_weights()
    versions = len(rank.versions)

    train(model)
    rank.fail("the post-load step has failed")
    with pytest.raises(
        StateError, match=r"post-load step has failed \[the engine's weights are torn"
    ) as caught:
        trainer.send_weights()
    rank.fail(None)
    assert caught.value.memory == "torn"
    assert "stays paused" in caught.value.__notes__[0]
    assert engine.tokenizer_manager.is_pause
    assert len(rank.versions) == versions
    # it stays so, whatever fails next
    with pytest.raises(ManifestMismatch, match="weights are torn"):
        trainers({"other": torch.zeros(2)}, model="other").send_weights()
    new = trainers(model, model="new")
    with monkeypatch.context() as patch:
        pauses_are_lost(patch)
        with pytest.raises(TimeoutError):
            new.send_weights()
    assert engine.tokenizer_manager.is_pause
    trainer.send_weights()
    assert not engine.tokenizer_manager.is_pause
    check(rank, model)


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_an_update_that_fails_before_it_writes_leaves_the_old_weights(
    rank: sglang_cpu.Rank, engine: Any, trainers: Any, host_memory_bytes: int
) -> None:
    model = actor(5)
    trainer = trainers(model, host_memory_bytes=host_memory_bytes)
    trainer.send_weights()
    before = rank.checksums()
    train(model)
    info = replace(trainer._weights.publish(1), version=7, content_id="7")
    with pytest.raises(VersionUnavailable, match="the engine's weights are intact"):
        trainer._fleet.update(info)
    assert rank.checksums() == before
    assert not engine.tokenizer_manager.is_pause


def process(change: Any) -> Any:
    """A post-processing of linear layers that changes `down_proj` alone."""

    def processed(self: Any, layer: Any) -> None:
        if layer.weight.shape == (64, 128):
            change(layer)

    return processed


def transpose(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.data.t().contiguous(), requires_grad=False)


def swap_halves(layer: Any) -> None:
    layer.weight.data.copy_(layer.weight.data.roll(32, 0))


@pytest.fixture
def changed(rank: sglang_cpu.Rank, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Has SGLang post-process `down_proj` by a change; in the end everything is as it was."""
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    layers = [layer.mlp.down_proj for layer in rank.model.model.layers]
    kept = [(layer.weight, layer.weight.data.clone()) for layer in layers]

    def change(process_: Any, *, is_loaded: bool = True, restore: Any = None) -> None:
        monkeypatch.setattr(
            UnquantizedLinearMethod, "process_weights_after_loading", process(process_)
        )
        if restore is not None:
            monkeypatch.setattr(
                UnquantizedLinearMethod, "restore_weights_before_loading", process(restore)
            )
        for layer in layers if is_loaded else ():  # as when the model was loaded
            process_(layer)

    yield change
    for layer, (weight, data) in zip(layers, kept, strict=True):
        layer.weight = weight
        layer.weight.data.copy_(data)


@pytest.mark.parametrize("change", [transpose, swap_halves])
def test_layers_that_post_processing_changes_are_processed_by_sglang_in_other_memory(
    rank: sglang_cpu.Rank, trainers: Any, changed: Any, change: Any
) -> None:
    """Halves that are swapped where they lie leave pointer, shape and strides equal. The engine's
    tensors stay where they are: captured graphs refer to them.
    """
    changed(change)
    places = {name: each.data_ptr() for name, each in rank.model.named_parameters()}
    model = actor(8)
    trainer = trainers(model)
    for _ in range(2):
        train(model)
        trainer.send_weights()
        check(rank, model)
    assert rank.ways()[1] == [f"model.layers.{number}.mlp.down_proj" for number in range(2)]
    assert {name: each.data_ptr() for name, each in rank.model.named_parameters()} == places
    trainer.check_weights()


def test_layers_that_a_session_restores_are_as_they_were_after_it(
    rank: sglang_cpu.Rank, trainers: Any, changed: Any
) -> None:
    if not sglang_cpu.has_sessions():
        pytest.skip("this release of SGLang has no sessions")
    changed(swap_halves, restore=swap_halves)
    before, model = rank.checksums(), actor(8)
    with pytest.raises(ManifestMismatch):
        trainers({"other": torch.zeros(2)}, model="other").send_weights()
    assert rank.checksums() == before
    trainer = trainers(model)
    for _ in range(2):
        train(model)
        trainer.send_weights()
        check(rank, model)


def test_a_layout_that_is_not_the_engines_is_refused_with_advice(
    rank: sglang_cpu.Rank, trainers: Any, changed: Any
) -> None:
    before = rank.checksums()
    changed(transpose, is_loaded=False)
    trainer = trainers(actor())
    for _ in range(2):  # the second time as the first one
        with pytest.raises(
            RegistrationError, match=r"2 parameter\(s\).*in another way.*serve with a backend"
        ) as refused:
            trainer.send_weights()
        for number in range(2):
            assert f"'model.layers.{number}.mlp.down_proj.weight'" in f"{refused.value}"
        assert refused.value.memory == "intact"
        assert rank.checksums() == before, "the end of SGLang's session has processed them"


def test_check_weights_names_what_differs_and_the_next_update_repairs_it(
    rank: sglang_cpu.Rank, trainers: Any
) -> None:
    model = actor(15)
    trainer = trainers(model)
    with pytest.raises(StateError, match="no update has succeeded"):
        trainer.check_weights()
    trainer.send_weights()
    trainer.check_weights()
    rank.model.lm_head.weight.data[-1] += 1
    with pytest.raises(IntegrityError, match=r"1 tensor\(s\) .*'lm_head.weight'"):
        trainer.check_weights()
    trainer.send_weights()
    trainer.check_weights()
    check(rank, model)


def test_versions_of_another_cluster_are_counted_anew(
    rank: sglang_cpu.Rank, engine: Any, trainers: Any
) -> None:
    from tensorhub.integrations.sglang import Trainer

    trainers(actor()).send_weights(5)
    with sync.serve() as other, sync.connect(other.address) as hub:
        trainer = Trainer(model := actor(19), engine, other.address, timeout_s=60.0)
        info = trainer._weights.publish(0)
        hub.register("actor", actor(20)).publish(1)
        trainer._fleet.update(info)
        check(rank, model)
        trainer.close()
        rank.receiver.close()


def test_a_release_that_was_not_tested_is_probed_at_its_first_update(
    rank: sglang_cpu.Rank, engine: Any, trainers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe passes with this release's own loader, and fails, before a byte is written, if the
    plan is another one's.
    """
    from tensorhub.integrations import sglang_engine
    from tensorhub.integrations.recording import Recording

    monkeypatch.setattr(sglang_engine, "TESTED", ("0.1",))
    trainer, before, make = trainers(model := actor(18)), rank.checksums(), Recording.make

    def swapped(recording: Recording, name: str, into: Any, published: Any) -> None:
        make(recording, name, into, published)
        if "qkv" in name:
            into.copy_(into.roll(1, 0))

    with monkeypatch.context() as patch:
        patch.setattr(Recording, "make", swapped)
        for _ in range(2):  # the second time as the first one
            with pytest.raises(
                StateError, match=r"probe .* failed .*2 param.*qkv_proj.*are intact"
            ):
                trainer.send_weights()
            assert rank.checksums() == before
            assert not engine.tokenizer_manager.is_pause
    trainer.send_weights()
    check(rank, model)


def test_an_engine_that_answers_and_does_not_load_is_found_out(
    rank: sglang_cpu.Rank, engine: Any, trainers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorhub.integrations import sglang

    model = actor(16)
    trainer = trainers(model)
    with monkeypatch.context() as patch:
        patch.setattr(sglang, "load", lambda model, tensors: None)
        with pytest.raises(StateError, match=r"its loader, .*, gives no report"):
            trainer.send_weights()
        assert not engine.tokenizer_manager.is_pause
    trainer.send_weights()
    check(rank, model)
    monkeypatch.setattr(sglang, "load", lambda model, tensors: None)
    with pytest.raises(StateError, match=r"its loader, .*, reports of another order"):
        trainer.send_weights()


def pauses_are_lost(patch: pytest.MonkeyPatch) -> None:
    from tensorhub.integrations.sglang_server import Offline

    call = Offline.call

    def lost(self: Any, name: str, **fields: Any) -> Any:
        answer = call(self, name, **fields)
        if name == "pause_generation":
            raise TimeoutError("the answer is lost")
        return answer

    patch.setattr(Offline, "call", lost)


def test_a_pause_whose_answer_is_lost_does_not_leave_the_engine_paused(
    engine: Any, trainers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainers(actor())
    pauses_are_lost(monkeypatch)
    with pytest.raises(TimeoutError, match="the answer is lost"):
        trainer.send_weights()
    assert not engine.tokenizer_manager.is_pause


def test_a_parameter_that_was_replaced_is_refused_by_name(
    rank: sglang_cpu.Rank, trainers: Any
) -> None:
    model = actor(9)
    trainer = trainers(model)
    trainer.send_weights()
    norm = rank.model.model.norm
    norm.weight = torch.nn.Parameter(norm.weight.data.clone(), requires_grad=False)
    train(model)
    before = rank.checksums()
    with pytest.raises(
        RegistrationError, match=r"1 parameter\(s\) .* were replaced .*'model.norm.weight'"
    ) as refused:
        trainer.send_weights()
    assert refused.value.memory == "intact"
    assert rank.checksums() == before
    trainer.send_weights()  # registered anew
    check(rank, model)


def test_an_older_version_than_the_one_that_is_served(rank: sglang_cpu.Rank, trainers: Any) -> None:
    model = actor(7)
    trainer = trainers(model)
    for _ in range(2):
        train(model)
        trainer.send_weights()
    before = rank.checksums()
    info = replace(trainer._weights.publish(2), version=0, content_id="0")
    with pytest.raises(
        VersionConflict, match="version 0 is older than the one that the engine serves, 1"
    ):
        trainer._fleet.update(info)
    assert rank.checksums() == before
    trainer._weights.unpublish()
    trainer._hub.rollback("actor", to=0)
    train(model)
    trainer.send_weights(1)  # another version 1
    check(rank, model)


def test_a_second_trainer_of_the_same_model_is_refused(
    rank: sglang_cpu.Rank, trainers: Any
) -> None:
    model = actor(17)
    trainer = trainers(model)
    trainer.send_weights()
    with pytest.raises(RegistrationError, match="'trainer' of 'actor' is registered by worker"):
        trainers(actor(18))
    train(model)
    trainer.send_weights()
    check(rank, model)


def test_an_engine_that_takes_no_adapters(engine: Any, trainers: Any) -> None:
    (session,) = trainers(actor()).engines
    with pytest.raises(StateError, match=r"SGLang has refused 'poet@1'.*--enable-lora"):
        session.load_adapter("poet", 1)


def test_a_server_that_is_not_up(coordinator: sync.Coordinator) -> None:
    from tensorhub.integrations.sglang import Trainer

    url = f"http://127.0.0.1:{sglang_cpu.free_port()}"
    with pytest.raises(
        StateError, match=f"the SGLang server {url} does not answer /server_info: is it up"
    ) as error:
        Trainer(actor(), url, coordinator.address)
    assert error.value.retryable
