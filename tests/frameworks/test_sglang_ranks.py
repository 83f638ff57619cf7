"""`tensorhub.integrations.sglang` against SGLang itself: two tensor-parallel ranks in two processes, with fused and padded
parameters, behind SGLang's HTTP routes; a trainer and a rank that are killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import ManifestMismatch, RegistrationError, StateError, TensorHubError
from tests.frameworks import sglang_cpu
from tests.frameworks.test_vllm import actor, train

pytestmark = [pytest.mark.framework, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]
ENDS = ("weight", "weight_scale")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sglang_cpu.Ranks]:
    made = sglang_cpu.Ranks(tmp_path_factory.mktemp("ranks"), 2)
    yield made
    made.close()


@pytest.fixture
def coordinator() -> Iterator[sync.Coordinator]:
    with sync.serve() as serving:
        yield serving


@pytest.fixture(scope="module")
def engine(ranks: sglang_cpu.Ranks) -> Iterator[Any]:
    made = sglang_cpu.engine(ranks)
    yield made
    made.loop.close()


@pytest.fixture(scope="module")
def server(engine: Any) -> Iterator[str]:
    """SGLang's HTTP routes in this process, before ranks in others."""
    with sglang_cpu.served(engine) as url:
        yield url


def check(ranks: sglang_cpu.Ranks, model: torch.nn.Module) -> None:
    """Each rank has these weights: SGLang's checksums are the same after it has loaded them by its default loader."""
    ours = ranks.call("checksums")
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    theirs = ranks.call("loaded_by_sglang", weights)
    assert ours == theirs
    for name, digest in ours[0].items():  # norms are whole on each rank, the others are halves
        assert (digest == ours[1][name]) == ("norm" in name), name


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_three_updates(
    ranks: sglang_cpu.Ranks, engine: Any, server: str, coordinator: sync.Coordinator, host_memory_bytes: int
) -> None:
    from tensorhub.integrations.sglang import Trainer

    model = actor(host_memory_bytes)
    with Trainer(model, server, coordinator.address, host_memory_bytes=host_memory_bytes, timeout_s=60.0) as trainer:
        for version in range(3):
            train(model)
            assert trainer.send_weights() == version
            assert engine.tokenizer_manager.config_value("weight_version") == f"{version}"
            check(ranks, model)
        for in_place, loaded in ranks.call("ways"):
            assert len(in_place) == 15
            assert "model.layers.0.self_attn.qkv_proj.weight" in in_place
            assert "model.layers.0.mlp.gate_up_proj.weight" in in_place
            assert not loaded


def test_what_the_loader_casts_is_loaded_on_each_rank(
    ranks: sglang_cpu.Ranks, server: str, coordinator: sync.Coordinator
) -> None:
    from tensorhub.integrations.sglang import Trainer

    model = actor(2)
    model.model.layers[1].self_attn.k_proj.float()
    with Trainer(model, server, coordinator.address, timeout_s=60.0) as trainer:
        trainer.send_weights()
        check(ranks, model)
    assert len(ranks.call("ways")[1][1]) == 3


def test_one_outcome_for_all_ranks(ranks: sglang_cpu.Ranks, engine: Any, server: str, coordinator: sync.Coordinator) -> None:
    from tensorhub.integrations.sglang import Trainer

    model = actor(3)
    with Trainer(model, server, coordinator.address, timeout_s=60.0) as trainer:
        trainer.send_weights()
        train(model)
        ranks.call_on(1, "fail", "only rank 1 has failed")
        with pytest.raises(StateError, match=r"only rank 1 has failed \[the engine's weights are torn"):
            trainer.send_weights()
        assert engine.tokenizer_manager.is_pause
        assert engine.tokenizer_manager.config_value("weight_version") == "0"
        ranks.call_on(1, "fail", None)
        trainer.send_weights()
        assert not engine.tokenizer_manager.is_pause
        check(ranks, model)
        before = ranks.call("checksums")
    given = {**model.state_dict(), "new": torch.zeros(2)}
    with Trainer(given, server, coordinator.address, timeout_s=60.0) as trainer:
        with pytest.raises(ManifestMismatch, match="no place for 1 published tensor"):
            trainer.send_weights()
        assert ranks.call("checksums") == before
        assert not engine.tokenizer_manager.is_pause


def test_several_engines(ranks: sglang_cpu.Ranks, server: str, coordinator: sync.Coordinator, tmp_path: Path) -> None:
    """An engine of two ranks and one of one rank; what fails at one of them is no matter of the other."""
    from tensorhub.integrations.sglang import Trainer

    other = sglang_cpu.Ranks(tmp_path, 1)
    engine = sglang_cpu.engine(other)
    try:
        model = actor(4)
        with Trainer(model, [server, engine], coordinator.address, timeout_s=60.0) as trainer:
            trainer.send_weights()
            check(ranks, model)
            assert other.call("checksums") == other.call("loaded_by_sglang", dict(model.state_dict()))
            train(model)
            other.call_on(0, "fail", "only the second engine has failed")
            with pytest.raises(StateError, match="only the second engine has failed"):
                trainer.send_weights()
            assert engine.tokenizer_manager.is_pause
            check(ranks, model)
    finally:
        other.close()
        engine.loop.close()


KILLED = """
    import sys, time
    from dataclasses import replace
    from tensorhub.integrations.sglang import LOADER, Trainer
    from tests.frameworks.sglang_cpu import shim
    from tests.frameworks.test_vllm import actor

    shim()
    url, address, after = sys.argv[1:]
    trainer = Trainer(actor(12), url, address)
    info = trainer._weights.publish(0)
    (engine, order), = trainer._engines
    engine.call("pause_generation", mode="abort")
    print(engine.call("begin_weight_update", selector="target"), flush=True)
    if after == "update":
        trainer._load(engine, order, info)
    elif after != "begin":  # it does not ask how that went: there is no version -1
        asked = replace(order, version=0) if after == "order" else order
        tensors = engine.serialized(asked.tensors())
        engine.call("update_weights_from_tensor", serialized_named_tensors=tensors, load_format=LOADER, selector="target")
    print("now", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("after", ["begin", "order", "order that fails", "update"])
def test_a_trainer_that_is_killed_between_begin_and_end(
    ranks: sglang_cpu.Ranks, engine: Any, server: str, coordinator: sync.Coordinator, after: str, tmp_path: Path
) -> None:
    from tensorhub.integrations.sglang import Trainer

    script = tmp_path / "killed.py"
    script.write_text(textwrap.dedent(KILLED))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])}
    command = [sys.executable, str(script), server, coordinator.address, after]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        while "now" not in (line := process.stdout.readline()):
            assert line, "the trainer has ended"
        process.kill()
    assert engine.tokenizer_manager.is_pause, "nothing is generated with what it has left"
    model = actor(13)
    with Trainer(model, server, coordinator.address, timeout_s=60.0) as trainer:
        trainer.send_weights()
        check(ranks, model)
    assert not engine.tokenizer_manager.is_pause


DYING = """
    import sys, time
    from tensorhub import Options, sync
    from tensorhub.runtime.data.serving import SharedOwner
    from tests.frameworks.sglang_cpu import shim
    from tests.frameworks.test_vllm import actor

    shim()
    access, served = SharedOwner.access, []

    def some(self, lane, *given):
        if lane is not None:
            served.append(lane)
        if len(served) > 12:
            time.sleep(600)
        return access(self, lane, *given[:4], 1, *given[5:])  # one chunk at a time

    SharedOwner.access = some
    hub = sync.connect(sys.argv[1], transports=["tcp"], options=Options(chunk_bytes=4096))
    info = hub.register("actor", actor(15)).publish(1)
    print(info.content_id, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("registers_anew", [False, True])
def test_a_source_that_is_killed_when_a_part_is_staged(
    ranks: sglang_cpu.Ranks, engine: Any, server: str, coordinator: sync.Coordinator, tmp_path: Path, registers_anew: bool
) -> None:
    """The old weights stay whole, and are generated with, also those that an earlier trainer's engine has registered. The
    next update has nothing to do with the one that failed.
    """
    from tensorhub.integrations.sglang import Trainer

    script = tmp_path / "dying.py"
    script.write_text(textwrap.dedent(DYING))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])}
    model, staged = actor(16), tmp_path / "staged"
    with Trainer(model, server, coordinator.address, host_memory_bytes=2**30, timeout_s=30.0) as trainer:
        info = trainer._weights.publish(0)
        trainer._update_all(info)
        trainer._weights.unpublish()
        before = ranks.call("checksums")
        ranks.call("tell_of_chunks", staged)
        command = [sys.executable, str(script), coordinator.address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            content_id = process.stdout.readline().strip()
            assert content_id, "the source has ended"

            def kill() -> None:
                until = time.monotonic() + 20.0
                while time.monotonic() < until and not staged.exists():
                    time.sleep(0.01)
                process.kill()

            killer = threading.Thread(target=kill)
            killer.start()
            if registers_anew:
                trainer._engines = [(each, replace(order, replica="another")) for each, order in trainer._engines]
            # The engine waits for another source until its time is up.
            with pytest.raises(TensorHubError, match="the engine's weights are intact") as caught:
                trainer._update_all(replace(info, version=1, content_id=content_id))
            killer.join()
        ranks.call("tell_of_chunks", None)
        assert staged.exists()
        assert caught.value.memory == "intact"
        assert ranks.call("checksums") == before
        assert not engine.tokenizer_manager.is_pause
        assert engine.tokenizer_manager.config_value("weight_version") == "0"
        train(model)
        trainer.send_weights(2)
        check(ranks, model)
        assert engine.tokenizer_manager.config_value("weight_version") == "2"


def test_a_quantized_model_is_refused_by_the_names_of_its_tensors(coordinator: sync.Coordinator, tmp_path: Path) -> None:
    """SGLang loads one in 8 bits here, and transposes what it has loaded: nobody may write there."""
    from tensorhub.integrations.sglang import Trainer

    quantized = sglang_cpu.Ranks(tmp_path, 1, quantization_config={"quant_method": "w8a8_int8"})
    engine = sglang_cpu.engine(quantized)
    try:
        with Trainer(actor(18), engine, coordinator.address, timeout_s=60.0) as trainer:
            before = quantized.call("checksums")
            with pytest.raises(RegistrationError, match=r"16 parameter\(s\) are not kept .*serve with a backend") as refused:
                trainer.send_weights()
            layers = ["self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"]
            for name in [f"model.layers.{number}.{layer}.{end}" for number in range(2) for layer in layers for end in ENDS]:
                assert f"'{name}': W8A8Int8LinearMethod may pack what is loaded" in f"{refused.value}"
            # The end of SGLang's session would have transposed them once more, whatever was loaded.
            assert refused.value.memory == "intact"
            assert quantized.call("checksums") == before
            assert not engine.tokenizer_manager.is_pause
            assert trainer._weights.version is None
    finally:
        quantized.close()
        engine.loop.close()


SHIMMED = """
import runpy, sys
from tests.frameworks.sglang_cpu import shim
shim()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_the_example(ranks: sglang_cpu.Ranks, server: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])}
    example = str(REPOSITORY / "examples" / "sglang_server.py")
    command = [sys.executable, "-c", SHIMMED, example, server, ranks.settings.model_path]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, timeout=300, check=True)
    said = [line for line in done.stdout.splitlines() if line.startswith("the server")]
    assert said == [f"the server has version {version}" for version in range(3)]
    in_place, _ = ranks.call("ways")[1]
    assert len(in_place) == 15


def test_a_rank_that_is_killed_in_an_update(ranks: sglang_cpu.Ranks, server: str, coordinator: sync.Coordinator) -> None:
    """SGLang ends an engine of which a rank has died. The trainer hears of it, and has its memory back."""
    import requests

    from tensorhub.integrations.sglang import Trainer

    model = actor(14)
    with Trainer(model, server, coordinator.address, timeout_s=60.0) as trainer:
        trainer.send_weights()
        ranks.call_on(1, "die_in_the_next_update")
        with pytest.raises((requests.RequestException, TensorHubError)) as caught:
            trainer.send_weights()
        assert any("stays paused" in note for note in caught.value.__notes__)
        assert trainer._weights.version is None
