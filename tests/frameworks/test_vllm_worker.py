"""`tensorhub.integrations.vllm_worker` in each release of vLLM that is supported: an offline `LLM` in
this process, with a real Llama that is loaded from a real checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import (
    IntegrityError,
    ManifestMismatch,
    StateError,
    VersionConflict,
)
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm import actor, train
from tests.frameworks.test_vllm_server import Server, is_paused, post, process_of, serving

pytestmark = [pytest.mark.framework, pytest.mark.timeout(900)]

EXTENSION = "tensorhub.integrations.vllm_worker.WorkerExtension"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """An engine whose post-processing turns `down_proj`, as that of other machines does."""
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    directory = tmp_path_factory.mktemp("llama")
    model = vllm_cpu.prepare(directory)
    vllm_cpu.write_checkpoint(directory, actor().state_dict())
    from vllm import LLM
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    process = UnquantizedLinearMethod.process_weights_after_loading

    def processed(self: Any, layer: Any) -> None:
        process(self, layer)
        if layer.prefix.endswith("down_proj"):
            layer.weight = torch.nn.Parameter(
                layer.weight.data.t().contiguous(), requires_grad=False
            )

    patch.setattr(UnquantizedLinearMethod, "process_weights_after_loading", processed)
    settings = {**vllm_cpu.ENGINE, "load_format": "auto"}
    yield LLM(model=model, worker_extension_cls=EXTENSION, **settings)
    patch.undo()


@pytest.fixture
def coordinator() -> Iterator[sync.Coordinator]:
    with sync.serve() as serving:
        yield serving


@pytest.fixture
def hub(llm: Any, coordinator: sync.Coordinator) -> Iterator[sync.Hub]:
    with sync.connect(coordinator.address) as connected:
        llm.collective_rpc("tensorhub_join", args=(coordinator.address,))
        yield connected
        llm.collective_rpc("tensorhub_leave")
        worker_of(llm).__dict__.pop("_tensorhub_updater")


def worker_of(llm: Any) -> Any:
    (found,) = llm.collective_rpc(lambda worker: getattr(worker, "worker", worker))
    return found


def updater_of(llm: Any) -> Any:
    return worker_of(llm).__dict__["_tensorhub_updater"]


def parameters(llm: Any) -> dict[str, torch.Tensor]:
    model = worker_of(llm).get_model()
    return {name: each.detach().clone() for name, each in model.named_parameters()}


def expected(model: Any, turned: bool = True) -> dict[str, torch.Tensor]:
    """A Llama's parameters as the engine has them, made of the trainer's by hand. `turned`: the
    engine turns `down_proj`.
    """
    tensors = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for fused, parts in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))):
        for name in [name for name in tensors if f".{parts[0]}_proj" in name]:
            rows = [tensors.pop(name.replace(f"{parts[0]}_p", f"{part}_p")) for part in parts]
            tensors[name.replace(f"{parts[0]}_p", f"{fused}_p")] = torch.cat(rows)
    for name in [name for name in tensors if turned and "down_proj" in name]:
        tensors[name] = tensors[name].t()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        padding = tensors[name].new_zeros(28, tensors[name].shape[1])
        tensors[name] = torch.cat([tensors[name], padding])
    return tensors


def assert_has(llm: Any, model: torch.nn.Module, turned: bool = True) -> None:
    assert_same(parameters(llm), expected(model, turned))


def assert_same(has: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert has.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(has[name], wanted[name])] == []


def test_a_loop_of_updates(llm: Any, hub: sync.Hub) -> None:
    model = actor(1)
    weights = hub.register("actor", model)
    assert llm.collective_rpc("tensorhub_state")[0]["version"] is None
    for version in range(3):
        with weights.mutate(version):
            train(model)
        (state,) = llm.collective_rpc("tensorhub_update", args=(version,))
        assert (state["version"], state["is_torn"]) == (version, False)
        assert_has(llm, model)
        llm.collective_rpc("tensorhub_check")
    assert (state["in_place"], state["processed"], state["computed"]) == (13, 2, 0)
    with pytest.raises(VersionConflict, match="older than the one that the engine serves, 2"):
        llm.collective_rpc("tensorhub_update", args=(1,))
    assert_has(llm, model)


def test_the_newest_version_staged_in_host_memory(
    llm: Any, hub: sync.Hub, coordinator: sync.Coordinator
) -> None:
    model = actor(2)
    with sync.connect(coordinator.address) as own:
        own.register("actor", model).publish(5)
        settings = {"address": coordinator.address, "host_memory_bytes": 2**30}
        llm.collective_rpc("tensorhub_join", kwargs=settings)
        before = parameters(llm)
        llm.collective_rpc("tensorhub_prepare", args=(5,))
        assert all(torch.equal(each, before[name]) for name, each in parameters(llm).items())
    # the trainer is gone, and the worker has all of it
    (state,) = llm.collective_rpc("tensorhub_update")
    assert (state["version"], state["is_staged"]) == (5, True)
    assert_has(llm, model)


def test_missing_unexpected_and_misspelt_names_are_all_listed(
    llm: Any, hub: sync.Hub, coordinator: sync.Coordinator
) -> None:
    before, tensors = parameters(llm), dict(actor(3).state_dict())
    tensors["model.layers.0.mlp.up_porj.weight"] = tensors.pop("model.layers.0.mlp.up_proj.weight")
    tensors = {name: each for name, each in tensors.items() if "layers.1.self_attn" not in name}
    tensors["value_head.weight"] = torch.zeros(2)
    hub.register("actor", tensors).publish(0)
    with pytest.raises(ManifestMismatch, match="weights are intact") as caught:
        llm.collective_rpc("tensorhub_update")
    assert {each.split("'")[1] for each in caught.value.differences} == {
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.1.self_attn.qkv_proj.weight",
        "model.layers.1.self_attn.o_proj.weight",
        "model.layers.0.mlp.up_porj.weight",
        "value_head.weight",
    }
    assert all(torch.equal(each, before[name]) for name, each in parameters(llm).items())
    settings = {"address": coordinator.address, "ignored": ["value_*", "*porj*"]}
    llm.collective_rpc("tensorhub_join", kwargs=settings)
    with pytest.raises(ManifestMismatch) as caught:
        llm.collective_rpc("tensorhub_update")
    assert len(caught.value.differences) == 3


@pytest.mark.parametrize("is_dummy", [False, True])
def test_what_a_fused_parameter_lacks_is_named_as_it_is_published(
    llm: Any, hub: sync.Hub, monkeypatch: pytest.MonkeyPatch, is_dummy: bool
) -> None:
    if is_dummy:
        monkeypatch.setattr(updater_of(llm)._planner, "_first", None)
    tensors, attention = dict(actor(3).state_dict()), "model.layers.1.self_attn"
    del tensors[f"{attention}.q_proj.weight"]
    hub.register("actor", tensors).publish(0)
    with pytest.raises(ManifestMismatch) as caught:
        llm.collective_rpc("tensorhub_update")
    q, k, v, qkv = (f"'{attention}.{each}_proj.weight'" for each in ("q", "k", "v", "qkv"))
    assert caught.value.differences == (
        f"{qkv}: 4096 elements come from no published tensor; missing: {q}; there are: {k}, {v}",
    )


def test_wrong_shapes_are_listed_with_the_right_ones(llm: Any, hub: sync.Hub) -> None:
    """Also of what vLLM's loader would cut."""
    tensors = dict(actor(3).state_dict())
    attention, mlp = (
        "model.layers.{}.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    )
    shapes = {attention.format(0): (64, 65), attention.format(1): (64, 65), mlp: (64, 129)}
    rights = dict.fromkeys(shapes, (64, 64)) | {mlp: (64, 128)}
    hub.register("actor", {**tensors, **{n: torch.zeros(s) for n, s in shapes.items()}}).publish(0)
    with pytest.raises(ManifestMismatch) as caught:
        llm.collective_rpc("tensorhub_update")
    texts = [each for each in caught.value.differences if "shape" in each]
    assert len(texts) == len(shapes)
    for name, shape in shapes.items():
        (text,) = [each for each in texts if f"'{name}'" in each]
        text_of_shapes = f"its shape is {shape}, and that of the engine's checkpoint {rights[name]}"
        assert text.endswith(text_of_shapes)


def test_names_that_the_loader_leaves_alone_are_unexpected(
    llm: Any, hub: sync.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many of vLLM's loaders do, of experts for example: `if name not in params: continue`."""
    model = worker_of(llm).get_model()
    load, known = type(model).load_weights, set(actor().state_dict())
    monkeypatch.setattr(
        type(model),
        "load_weights",
        lambda self, weights: load(self, (each for each in weights if each[0] in known)),
    )
    hub.register("actor", {**actor(3).state_dict(), "extra.weight": torch.zeros(2)}).publish(0)
    with pytest.raises(ManifestMismatch, match=r"'extra\.weight': no worker of the engine reads"):
        llm.collective_rpc("tensorhub_update")


def test_after_a_leave_versions_are_counted_anew(
    llm: Any, hub: sync.Hub, coordinator: sync.Coordinator
) -> None:
    """Not where settings change alone: the engine still refuses an older version."""
    weights = hub.register("actor", model := actor(4))
    weights.publish(5)
    llm.collective_rpc("tensorhub_update")
    settings = {"address": coordinator.address, "timeout_s": 60.0}
    llm.collective_rpc("tensorhub_join", kwargs=settings)
    assert llm.collective_rpc("tensorhub_state")[0]["version"] == 5
    llm.collective_rpc("tensorhub_leave")
    assert llm.collective_rpc("tensorhub_state")[0]["version"] is None
    with sync.serve() as other, sync.connect(other.address) as its:
        its.register("actor", model).publish(0)
        its.register("actor", actor(5)).publish(1)
        llm.collective_rpc("tensorhub_join", args=(other.address,))
        llm.collective_rpc("tensorhub_update", args=(0,))
        assert_has(llm, model)
        llm.collective_rpc("tensorhub_leave")


def test_a_join_ends_by_its_timeout_and_takes_no_text_for_a_list(
    llm: Any, hub: sync.Hub, caplog: pytest.LogCaptureFixture
) -> None:
    from tensorhub.errors import CoordinatorUnavailable, InvalidType

    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{refusing.getsockname()[1]}"
        settings = {"address": address, "timeout_s": 0.5}
        with pytest.raises(CoordinatorUnavailable, match="is one running there"):
            llm.collective_rpc("tensorhub_join", kwargs=settings)
    assert "for_s=0.5" in caplog.text
    with pytest.raises(InvalidType, match=r"ignored='\*x\*': give a list"):
        llm.collective_rpc("tensorhub_join", kwargs={**settings, "ignored": "*x*"})


def test_an_engine_with_a_prefix_cache_joins_no_fleet_with_one_version(
    llm: Any, hub: sync.Hub, coordinator: sync.Coordinator
) -> None:
    """After a flip it would answer from prefixes of the old version."""
    with pytest.raises(StateError, match="--no-enable-prefix-caching"):
        llm.collective_rpc("tensorhub_one_version", args=(coordinator.address,))


def test_memory_that_was_lost_is_filled_again_with_its_padding(llm: Any, hub: sync.Hub) -> None:
    """As vLLM's `sleep(level=2)` and `wake_up` lose it."""
    model = actor(4)
    weights = hub.register("actor", model)
    weights.publish(0)
    llm.collective_rpc("tensorhub_update")
    for version in (0, 1, 2):  # the same version again, and the next ones
        if version < 2:
            for parameter in worker_of(llm).get_model().parameters():
                parameter.data.fill_(7)
        else:  # a number of the padding alone
            worker_of(llm).get_model().lm_head.weight.data[120, 3] = 7
        if version:
            with weights.mutate(version):
                train(model)
        llm.collective_rpc("tensorhub_update", args=(version,))
        assert_has(llm, model)
        llm.collective_rpc("tensorhub_check")


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_is_updated_once_it_is_awake(
    llm: Any, hub: sync.Hub, coordinator: sync.Coordinator, level: int, host_memory_bytes: int
) -> None:
    """vLLM's CPU worker keeps its memory, so the test takes the contents away."""
    settings = {"address": coordinator.address, "host_memory_bytes": host_memory_bytes}
    llm.collective_rpc("tensorhub_join", kwargs=settings)
    model = actor(11)
    weights = hub.register("actor", model)
    for version in range(3):
        if version != 1:  # the second time it wakes to the version that it had
            with weights.mutate(version):
                train(model)
        llm.collective_rpc("tensorhub_update")
        assert_has(llm, model)
        llm.collective_rpc("tensorhub_check")
        llm.sleep(level=level)
        serve = [each for each in hub.describe("actor").replicas if each.group.startswith("vllm-")]
        assert bool(serve) == bool(host_memory_bytes), "only host memory is still there"
        if level == 2:
            for parameter in worker_of(llm).get_model().parameters():
                parameter.data.fill_(7)
        for tags in (["kv_cache"], ["weights"]):
            for call in ("tensorhub_update", "tensorhub_check"):
                with pytest.raises(StateError, match=r"sleeps.*call wake_up") as caught:
                    llm.collective_rpc(call)
                assert ("weights are torn" in f"{caught.value}") == (level == 2)
            llm.wake_up(tags)
        assert llm.collective_rpc("tensorhub_state")[0]["is_torn"] == (level == 2)


def test_a_sleeping_engine_wakes_from_its_host_memory(
    llm: Any, hub: sync.Hub, coordinator: sync.Coordinator
) -> None:
    model = actor(12)
    settings = {"address": coordinator.address, "host_memory_bytes": 2**30}
    llm.collective_rpc("tensorhub_join", kwargs=settings)
    with sync.connect(coordinator.address) as trainer:
        trainer.register("actor", model).publish(0)
        llm.collective_rpc("tensorhub_update")
    llm.sleep(level=2)
    for parameter in worker_of(llm).get_model().parameters():
        parameter.data.fill_(7)
    llm.wake_up()
    llm.collective_rpc("tensorhub_update")  # the trainer is gone
    assert_has(llm, model)


@pytest.mark.parametrize("place", ["padding", "in place", "processed"])
def test_the_check_finds_what_an_independent_load_makes_otherwise(
    llm: Any, hub: sync.Hub, place: str
) -> None:
    model = actor(5)
    hub.register("actor", model).publish(0)
    with pytest.raises(StateError, match="no update has succeeded"):
        llm.collective_rpc("tensorhub_check")
    llm.collective_rpc("tensorhub_update")
    modules = dict(worker_of(llm).get_model().named_modules())
    name, index = {
        "padding": ("lm_head", (120, 3)),
        "in place": ("model.layers.1.self_attn.qkv_proj", (17, 5)),
        "processed": ("model.layers.0.mlp.down_proj", (17, 5)),
    }[place]
    modules[name].weight.data[index] += 1
    with pytest.raises(IntegrityError, match=r"1 tensor\(s\) .*") as caught:
        llm.collective_rpc("tensorhub_check")
    assert f"'{name}.weight'" in f"{caught.value}"
    llm.collective_rpc("tensorhub_update")
    assert_has(llm, model)


def test_an_engine_that_says_ok_and_has_not_loaded_is_caught(
    llm: Any, hub: sync.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorhub.integrations import vllm_layers

    weights = hub.register("actor", model := actor(6))
    weights.publish(0)
    llm.collective_rpc("tensorhub_update")
    with weights.mutate(1):
        train(model)
    with monkeypatch.context() as patch:
        patch.setattr(vllm_layers, "process", lambda layer, filled: None)
        llm.collective_rpc("tensorhub_update")
    with pytest.raises(IntegrityError, match=r"2 tensor\(s\).*down_proj.*down_proj"):
        llm.collective_rpc("tensorhub_check")


def test_a_release_that_was_not_tested_is_probed(
    llm: Any, hub: sync.Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe passes with this release's own loader, and fails if the plan is another one's."""
    from tensorhub.integrations import vllm_reload, vllm_updater

    monkeypatch.setattr(vllm_updater, "TESTED", ("0.1",))
    hub.register("actor", model := actor(7)).publish(0)
    planned = vllm_reload._planned

    def swapped(plan: Any, name: str, *given: Any) -> torch.Tensor:
        made = planned(plan, name, *given)
        return made.roll(1, 0) if "qkv" in name else made

    with monkeypatch.context() as patch:
        patch.setattr(vllm_reload, "_planned", swapped)
        with pytest.raises(StateError, match=r"probe .* failed .*2 parameter\(s\).*qkv_proj"):
            llm.collective_rpc("tensorhub_update")
    llm.collective_rpc("tensorhub_update")
    assert_has(llm, model)


def test_a_client_of_weight_transfer_drives_it(
    llm: Any, hub: sync.Hub, coordinator: sync.Coordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is paused nothing is asked or looked at that was before."""
    from tensorhub.integrations import vllm_plan, vllm_updater
    from tensorhub.integrations.vllm_session import ExtensionClient, Session, Settings

    model, asked = actor(8), list[str]()
    weights = hub.register("actor", model)
    engine = Session(ExtensionClient(llm), Settings(coordinator.address, "actor"))

    def noted(name: str, call: Any) -> Any:
        def called(*given: Any) -> Any:
            asked.append(name)
            return call(*given)

        return called

    for module, name in (
        (vllm_updater, "published_tensors"),
        (vllm_updater, "is_lost"),
        (vllm_plan, "sampled"),
    ):
        monkeypatch.setattr(module, name, noted(name, getattr(module, name)))
    for version in range(2):
        with weights.mutate(version):
            train(model)
        asked.clear()
        engine.update(hub.wait_for("actor", at_least=version))
        assert_has(llm, model)
        engine.check()
    # while the engine generates; when it is paused; for the next update
    assert asked == ["published_tensors", "sampled", "is_lost", "sampled"]


def test_two_trainers_of_one_model(llm: Any, hub: sync.Hub, coordinator: sync.Coordinator) -> None:
    """The engine has the whole of one trainer's version, or of the other's."""
    from tensorhub.integrations.vllm_session import ExtensionClient, Session, Settings

    models = actor(13), actor(14)
    weights = hub.register("actor", models[0])
    sessions = [
        Session(ExtensionClient(llm), Settings(coordinator.address, "actor")) for _ in models
    ]
    with sync.connect(coordinator.address) as other:
        others = other.register("actor", models[1])
        weights.publish(0)
        with pytest.raises(VersionConflict):
            others.publish(0)
        first = hub.wait_for("actor", at_least=0)
        sessions[0].update(first)
        assert_has(llm, models[0])
        others.publish(1)
        sessions[1].update(other.wait_for("actor", at_least=1))
        assert_has(llm, models[1])
        with pytest.raises(VersionConflict, match="older than the one that the engine serves, 1"):
            sessions[0].update(first)
        with pytest.raises(VersionConflict), weights.mutate(1):
            train(models[0])
        assert_has(llm, models[1])
        with weights.mutate(2):
            train(models[0])
        sessions[0].update(hub.wait_for("actor", at_least=2))
        assert_has(llm, models[0])
        sessions[0].check()


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_new_trainer_whose_first_pause_fails(
    llm: Any, hub: sync.Hub, coordinator: sync.Coordinator, is_torn: bool
) -> None:
    """It resumes no engine that the trainer before has left torn."""
    from tensorhub.integrations.vllm_session import ExtensionClient, Session, Settings

    class Client(ExtensionClient):
        calls: ClassVar[list[str]] = []

        def pause_generation(self, **_: Any) -> None:
            raise ConnectionError("the answer is lost")

        def resume_generation(self) -> None:
            self.calls.append("resume")

        def update_weight_version(self, new_version: str) -> None:
            self.calls.append(new_version)

    Client.calls = []
    hub.register("actor", actor(5)).publish(0)
    llm.collective_rpc("tensorhub_update")
    updater_of(llm).is_torn = is_torn
    with pytest.raises(ConnectionError):
        Session(Client(llm), Settings(coordinator.address, "actor")).update(
            hub.wait_for("actor", at_least=0)
        )
    assert Client.calls == (["torn"] if is_torn else ["resume"])


def test_the_plain_loop(llm: Any, hub: sync.Hub, tmp_path: Path) -> None:
    from examples.plain_vllm_loop import main

    (tmp_path / "config.json").write_text(json.dumps(vllm_cpu.LLAMA))
    assert_has(llm, main(llm, f"{tmp_path}"))


KILLED = """
    import sys, time
    from tensorhub import sync
    from tensorhub.integrations.vllm_session import ExtensionClient, Session, Settings
    from tests.frameworks.test_vllm import actor

    url, address, after, version = sys.argv[1:]
    hub = sync.connect(address)
    hub.register("actor", actor(12)).publish(int(version))
    client = ExtensionClient(url)
    Session(client, Settings(address, "actor")).get_ready(int(version))
    client.pause_generation(mode="keep", clear_cache=True)
    if after == "update":
        client.update_weights({"version": int(version)})
    print("now", flush=True)
    time.sleep(600)
"""


def a_trainer_is_killed(server: Server, address: str, after: str, version: int) -> None:
    """Within an update, with generation paused."""
    command = [sys.executable, "-c", textwrap.dedent(KILLED), server.url, address, after]
    with subprocess.Popen([*command, f"{version}"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = next((line for line in process.stdout if "now" in line), None)
        process.kill()
    assert said is not None, "the trainer has ended"


def test_a_server_by_http(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Two tensor-parallel workers. Each is compared with an independent load. Other trainers are
    killed within an update, and at last a worker.
    """
    from tensorhub.integrations.vllm_session import ExtensionClient, Session, Settings

    path, directory = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("server")
    (path / "config.json").write_text(json.dumps(vllm_cpu.LLAMA))
    vllm_cpu.write_checkpoint(path, actor().state_dict())
    with (
        serving(directory, f"{path}", ["--worker-extension-cls", EXTENSION], 2) as server,
        sync.serve() as coordinator,
        sync.connect(coordinator.address) as hub,
    ):
        model = actor(9)
        weights = hub.register("actor", model)
        client = ExtensionClient(server.url)
        engine = Session(client, Settings(coordinator.address, "actor", pause="keep"))
        for version in range(2):
            with weights.mutate(version):
                train(model)
            engine.update(hub.wait_for("actor", at_least=version))
            engine.check()
        assert [(each["rank"], each["version"]) for each in client.state()] == [(0, 1), (1, 1)]
        # the engine's own answer is that of a real failure, on one worker for all
        half = {name: each for name, each in model.state_dict().items() if "layers.1" not in name}
        with sync.connect(coordinator.address) as other:
            other.register("half", half).publish(0)
            broken = Session(client, Settings(coordinator.address, "half", pause="keep"))
            with pytest.raises(StateError, match=r"6 parameter\(s\).*layers\.1.*are intact"):
                broken.update(other.wait_for("half", at_least=0))
        state = post(server, "collective_rpc", method="tensorhub_state")["results"][0]
        assert (state["model"], state["version"], state["is_torn"]) == ("half", None, False)
        for version, after in ((2, "prepare"), (4, "update")):
            a_trainer_is_killed(server, coordinator.address, after, version)
            assert is_paused(server)
            has = version if after == "update" else None
            assert [each["version"] for each in client.state()] == [has] * 2
            with weights.mutate(version + 1):
                train(model)
            engine.update(hub.wait_for("actor", at_least=version + 1))
            engine.check()
            assert not is_paused(server)
        with weights.mutate(6):
            train(model)
        (directory / "1").write_text(f"{process_of(server, 'VLLM::Worker_TP1')}")
        with pytest.raises(StateError, match=r"answered 500|engine is dead"):
            engine.update(hub.wait_for("actor", at_least=6))
        with weights.mutate(7):  # the trainer has its memory back
            train(model)


def test_an_async_engine(tmp_path_factory: pytest.TempPathFactory) -> None:
    """An update in the middle of its life: paused, updated, resumed."""
    path = tmp_path_factory.mktemp("model")
    vllm_cpu.prepare(path)
    vllm_cpu.write_checkpoint(path, actor().state_dict())
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def update(address: str, version: int) -> list[Any]:
        settings = {**vllm_cpu.ENGINE, "load_format": "auto", "distributed_executor_backend": None}
        arguments = AsyncEngineArgs(model=f"{path}", worker_extension_cls=EXTENSION, **settings)
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            await engine.collective_rpc("tensorhub_join", kwargs={"address": address})
            await engine.pause_generation(mode="keep", clear_cache=True)
            states = await engine.collective_rpc("tensorhub_update", args=(version,))
            await engine.resume_generation()
            await engine.collective_rpc("tensorhub_check")
            return list(states)
        finally:
            engine.shutdown()

    with sync.serve() as coordinator, sync.connect(coordinator.address) as hub:
        hub.register("actor", actor(10)).publish(3)
        (state,) = asyncio.run(update(coordinator.address, 3))
    assert (state["version"], state["is_torn"]) == (3, False)
