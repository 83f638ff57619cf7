"""`tensorhub.integrations.sglang` against SGLang itself: two tensor-parallel ranks in two
processes, with fused and padded parameters, behind SGLang's HTTP routes; a trainer and a rank that
are killed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub import Stamp, sync
from tensorhub.errors import ManifestMismatch, StateError, TensorHubError
from tests.frameworks import sglang_cpu
from tests.frameworks.test_vllm import actor, train

pytestmark = [pytest.mark.framework, pytest.mark.timeout(600)]

REPOSITORY = Path(__file__).resolve().parents[2]


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
    """Each rank has, byte for byte, what SGLang loads from a checkpoint of these weights."""
    ours = ranks.call("checksums")
    weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    theirs = ranks.call("loaded_by_sglang", weights)
    assert ours == theirs
    for name, digest in ours[0].items():  # norms are whole on each rank, the others are halves
        assert (digest == ours[1][name]) == ("norm" in name), name


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_three_updates(
    ranks: sglang_cpu.Ranks,
    engine: Any,
    server: str,
    coordinator: sync.Coordinator,
    host_memory_bytes: int,
) -> None:
    from tensorhub.integrations.sglang import Trainer

    model = actor(host_memory_bytes)
    with Trainer(
        model, server, coordinator.address, host_memory_bytes=host_memory_bytes, timeout_s=60.0
    ) as trainer:
        for version in range(3):
            train(model)
            assert trainer.send_weights() == version
            said = engine.tokenizer_manager.config_value("weight_version")
            assert Stamp.parse(said).version == version
            check(ranks, model)
        trainer.check_weights()
        for in_place, loaded in ranks.call("ways"):
            assert len(in_place) == 15
            assert "model.layers.0.self_attn.qkv_proj.weight" in in_place
            assert "model.layers.0.mlp.gate_up_proj.weight" in in_place
            assert not loaded


def test_one_outcome_for_all_ranks(
    ranks: sglang_cpu.Ranks, engine: Any, server: str, coordinator: sync.Coordinator
) -> None:
    from tensorhub.integrations.sglang import Trainer

    model = actor(3)
    with Trainer(model, server, coordinator.address, timeout_s=60.0) as trainer:
        trainer.send_weights()
        train(model)
        ranks.call_on(1, "fail", "only rank 1 has failed")
        with pytest.raises(
            StateError, match=r"only rank 1 has failed \[the engine's weights are torn"
        ):
            trainer.send_weights()
        assert engine.tokenizer_manager.is_pause
        assert Stamp.parse(engine.tokenizer_manager.config_value("weight_version")).version == 0
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


def test_one_dead_server_leaves_no_other_paused(
    ranks: sglang_cpu.Ranks, engine: Any, server: str, coordinator: sync.Coordinator
) -> None:
    """The dead server answers nothing, from its pause on."""
    from tensorhub.integrations.sglang import Server, Trainer

    model, dead = actor(6), Server(server, timeout_s=5.0)
    dead._url = f"http://127.0.0.1:{sglang_cpu.free_port()}"
    with Trainer(model, [dead, server], coordinator.address, timeout_s=60.0) as trainer:
        for version in range(3):
            train(model)
            assert trainer.send_weights() == version
            assert not engine.tokenizer_manager.is_pause
            check(ranks, model)
        with pytest.raises(StateError, match="is it up"):
            trainer.check_weights()
    trainer = Trainer(model, [dead], coordinator.address, timeout_s=60.0)
    with trainer, pytest.raises(StateError, match="is it up"):
        trainer.send_weights()


def test_several_engines(
    ranks: sglang_cpu.Ranks, server: str, coordinator: sync.Coordinator, tmp_path: Path
) -> None:
    """An engine of two ranks and one of one rank; what fails at one of them is no matter of the
    other.
    """
    from tensorhub.integrations.sglang import Trainer

    other = sglang_cpu.Ranks(tmp_path, 1)
    engine = sglang_cpu.engine(other)
    try:
        model = actor(4)
        with Trainer(model, [server, engine], coordinator.address, timeout_s=60.0) as trainer:
            trainer.send_weights()
            check(ranks, model)
            assert other.call("checksums") == other.call(
                "loaded_by_sglang", dict(model.state_dict())
            )
            train(model)
            other.call_on(0, "fail", "only the second engine has failed")
            trainer.send_weights()
            assert engine.tokenizer_manager.is_pause
            check(ranks, model)
    finally:
        other.close()
        engine.loop.close()


KILLED = """
    import sys, time
    from dataclasses import replace
    from tensorhub.integrations.sglang import Trainer
    from tensorhub.integrations.sglang_server import _load
    from tests.frameworks.sglang_cpu import shim
    from tests.frameworks.test_vllm import actor

    shim()
    url, address, after = sys.argv[1:]
    trainer = Trainer(actor(12), url, address)
    info = trainer._weights.publish(0)
    (session,) = trainer.engines
    engine, order = session.engine, session._order
    engine.call("pause_generation", mode="abort")
    session._begin()
    if after == "update":
        session._give(replace(order, version=info.version))
    elif after != "begin":  # it does not ask how that went: there is no version -1
        _load(engine, (replace(order, version=0) if after == "order" else order).tensors(), flush_cache=False)
    print("now", flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("after", ["begin", "order", "order that fails", "update"])
def test_a_trainer_that_is_killed_between_begin_and_end(
    ranks: sglang_cpu.Ranks,
    engine: Any,
    server: str,
    coordinator: sync.Coordinator,
    after: str,
    tmp_path: Path,
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


EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}


def mixture() -> dict[str, torch.Tensor]:
    """What is published of such a model."""
    generator = torch.Generator().manual_seed(5)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    dense = {name: each for name, each in actor(5).state_dict().items() if ".mlp." not in name}
    for layer in (f"model.layers.{number}" for number in range(2)):
        dense |= {f"{layer}.self_attn.{each}_norm.weight": made(16) for each in "qk"}
        dense[f"{layer}.mlp.gate.weight"] = made(4, 64)
        for expert in (f"{layer}.mlp.experts.{number}" for number in range(4)):
            dense |= {f"{expert}.{name}_proj.weight": made(32, 64) for name in ("gate", "up")}
            dense[f"{expert}.down_proj.weight"] = made(64, 32)
    return {name: each.detach().clone() for name, each in dense.items()}


@pytest.mark.parametrize("of_processors", ["0", "1"])
def test_shapes_and_dtypes_of_experts_and_parts_that_the_loaders_would_change_are_refused(
    coordinator: sync.Coordinator,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    of_processors: str,
) -> None:
    """SGLang's loaders are others on processors than on GPUs."""
    from tensorhub.integrations.sglang import Trainer

    if of_processors == "0" and metadata.version("sglang").startswith("0.5.10"):
        pytest.skip("this release of SGLang needs GPU kernels for experts' layers of GPUs")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", of_processors)
    ranks = sglang_cpu.Ranks(tmp_path, 2, **EXPERTS)
    engine = sglang_cpu.engine(ranks)
    settings: dict[str, Any] = {"timeout_s": 60.0}
    right, expert = mixture(), "model.layers.1.mlp.experts.2"
    try:
        with Trainer(right, engine, coordinator.address, **settings) as trainer:
            trainer.send_weights()
        before = ranks.call("checksums")
        assert before == ranks.call("loaded_by_sglang", right)
        shapes = [
            {
                f"{expert}.gate_proj.weight": (16, 64),
                f"{expert}.down_proj.weight": (64, 16),
                "model.layers.0.self_attn.o_proj.weight": (64, 32),
            },
            {
                f"{expert}.up_proj.weight": (48, 64),
                f"{expert}.down_proj.weight": (64, 64),
                "model.layers.0.self_attn.o_proj.weight": (64, 96),
                "model.layers.0.self_attn.v_proj.weight": (64, 64),
            },
        ]
        for wrong in shapes:
            given = right | {n: torch.ones(its, dtype=torch.bfloat16) for n, its in wrong.items()}
            given["model.layers.0.mlp.experts.0.up_proj.weight"] = torch.ones(32, 64).to(torch.int8)
            with (
                Trainer(given, engine, coordinator.address, **settings) as trainer,
                pytest.raises(ManifestMismatch) as refused,
            ):
                trainer.send_weights()
            lines = {each.split("'")[1]: each for each in refused.value.differences}
            for name, has in wrong.items():
                assert f"its shape is {has}" in lines[name]
            assert "it is int8" in lines["model.layers.0.mlp.experts.0.up_proj.weight"]
            assert refused.value.memory == "intact"
            assert ranks.call("checksums") == before
    finally:
        ranks.close()
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
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env=env, timeout=300, check=True
    )
    said = [line for line in done.stdout.splitlines() if line.startswith("the server")]
    assert said == [f"the server has version {version}" for version in range(3)]
    in_place, _ = ranks.call("ways")[1]
    assert len(in_place) == 15


def test_a_rank_that_is_killed_in_an_update(
    ranks: sglang_cpu.Ranks, server: str, coordinator: sync.Coordinator
) -> None:
    """SGLang ends an engine of which a rank has died. The trainer hears of it, and has its memory
    back.
    """
    from tensorhub.integrations.sglang import Trainer

    model = actor(14)
    with Trainer(model, server, coordinator.address, timeout_s=60.0) as trainer:
        trainer.send_weights()
        ranks.call_on(1, "die_in_the_next_update")
        with pytest.raises(TensorHubError) as caught:
            trainer.send_weights()
        assert any("stays paused" in note for note in caught.value.__notes__)
        assert trainer._weights.version is None
