"""OpenRLHF's own command: Ray's actors, DeepSpeed and a vLLM engine, all real, on a CPU. The engine
generates by its embedding and its head alone.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import InvalidValue, StateError
from tests.frameworks import openrlhf_cpu, vllm_cpu
from tests.frameworks.test_vllm import actor

pytestmark = [pytest.mark.framework, pytest.mark.timeout(1500)]

pytest.importorskip(
    "openrlhf", reason="openrlhf is not installed here: `make frameworks FRAMEWORKS=openrlhf`"
)
openrlhf_cpu.shim()

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its directory, which has vLLM's plug-ins, too."""
    directory = tmp_path_factory.mktemp("llama")
    vllm_cpu.prepare(directory)
    vllm_cpu.write_checkpoint(directory, actor().state_dict())
    openrlhf_cpu.write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def cluster(model: Path) -> Iterator[Path]:
    """Ray on this machine, with as many GPUs as it is told. Where the workers write notes."""
    import ray

    # OpenRLHF's wheel has a package `tests` as well, behind ours
    path = [f"{model}", f"{REPOSITORY}", os.environ.get("PYTHONPATH", "")]
    with sync.serve() as coordinator, pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "TENSORHUB_TEST_NOTES": f"{model / 'notes'}",
            "TENSORHUB_ADDRESS": coordinator.address,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, path)),
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_PLUGINS": vllm_cpu.ENVIRONMENT["VLLM_PLUGINS"] + ",cpu_generation",
        }.items():
            patch.setenv(name, value)
        hook = f"{openrlhf_cpu.__name__}.shim"
        ray.init(
            num_cpus=4,
            num_gpus=4,
            include_dashboard=False,
            runtime_env={"worker_process_setup_hook": hook},
        )
        yield model / "notes"
        ray.shutdown()


@pytest.mark.parametrize(("ranks", "zero_stage"), [(1, 2), (2, 3)])
def test_each_step_of_a_run_reaches_the_engine(
    cluster: Path,
    restored: None,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    zero_stage: int,
) -> None:
    from tensorhub.integrations import openrlhf
    from tests.frameworks.openrlhf_workers import LEFT_OUT, CheckedPolicy

    cluster.unlink(missing_ok=True)
    monkeypatch.setattr(openrlhf, "Policy", CheckedPolicy)
    settings = {"actor.num_gpus_per_node": ranks, "ds.zero_stage": zero_stage}
    given = openrlhf_cpu.arguments(tmp_path, model, settings)
    monkeypatch.setattr(sys, "argv", ["train_ppo_ray", *given])
    openrlhf.main()
    first, second = map(json.loads, cluster.read_text().splitlines())
    assert second["version"] == first["version"] + 1
    for each in (first, second):
        assert each["has"] == each["wanted"]
    assert first["has"] != second["has"]
    for text in (f"'{LEFT_OUT}': 64 elements", "the engine's weights are intact", "intact: True"):
        assert text in first["refused"]


def test_an_engine_that_has_died_is_named(cluster: Path) -> None:
    import ray

    from tensorhub.integrations.openrlhf import EngineClient

    class Dying:
        def tensorhub_call(self, method: str, arguments: object) -> None:
            os._exit(1)

    client = EngineClient(ray.remote(num_cpus=0)(Dying).remote(), 3)
    with pytest.raises(StateError, match=r"engine 3 has failed in tensorhub_state: .*died"):
        client.collective_rpc("tensorhub_state", {})


def test_an_engine_that_hangs_has_a_deadline(cluster: Path) -> None:
    import ray

    from tensorhub.integrations.openrlhf import EngineClient

    class Hanging:
        def reset_prefix_cache(self) -> None:
            threading.Event().wait(60)

    client = EngineClient(ray.remote(num_cpus=0)(Hanging).remote(), 3)
    client._timeout_s = 0.1
    with pytest.raises(StateError, match="engine 3 has failed in reset_prefix_cache"):
        client.reset_prefix_cache()


def policy(rank: int, model: torch.nn.Module) -> Any:
    """One that is in no actor, with a model that is in no DeepSpeed."""
    from tensorhub.integrations.openrlhf import Policy

    made: Any = Policy.__new__(Policy)
    made._rank, made._feed = rank, None
    made.actor = SimpleNamespace(model=SimpleNamespace(module=model))
    settings = SimpleNamespace(tensor_parallel_size=1, zero_stage=2)
    made.strategy = SimpleNamespace(args=SimpleNamespace(ds=settings))
    return made


def test_a_policy_without_an_address_fails_before_its_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
    with pytest.raises(InvalidValue, match="set TENSORHUB_ADDRESS"):
        policy(0, actor()).init_model_from_pretrained(None, "", vllm_engines=[object()])


def test_prefix_caches_are_cleared_after_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from tensorhub.integrations.openrlhf import EngineClient

    calls = list[Any]()
    engine = SimpleNamespace(
        reset_prefix_cache=SimpleNamespace(remote=lambda: calls.append("cleared"))
    )
    feed = SimpleNamespace(send=lambda weights: calls.append(dict(weights)))
    monkeypatch.setattr(ray, "get", lambda each, timeout: None)
    made = policy(0, model := actor())
    made._feed, made._clients = feed, [EngineClient(engine, 0)]
    made.broadcast_to_vllm()
    assert calls[0].keys() == dict(model.named_parameters()).keys()
    assert calls[1:] == ["cleared"]


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `install` replaces is put back."""
    from openrlhf.trainer.ray import ppo_actor, vllm_engine

    for place, name in ((vllm_engine, "RolloutRayActor"), (ppo_actor, "PolicyModelActor")):
        monkeypatch.setattr(place, name, getattr(place, name))


def test_the_command_without_an_address_ends_before_ray_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tensorhub.integrations import openrlhf

    monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
    monkeypatch.setattr(sys, "argv", ["openrlhf"])
    with pytest.raises(InvalidValue, match="set TENSORHUB_ADDRESS"):
        openrlhf.main()


def test_the_command_has_openrlhfs_arguments(
    restored: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from openrlhf.trainer.ray import vllm_engine

    from tensorhub.integrations import openrlhf

    monkeypatch.setattr(sys, "argv", ["openrlhf", "--help"])
    with pytest.raises(SystemExit):
        runpy.run_module(openrlhf.__name__, run_name="__main__")
    assert "--actor.model_name_or_path" in capsys.readouterr().out
    made = vllm_engine.RolloutRayActor.__ray_metadata__.modified_class
    assert issubclass(made, openrlhf.Engine)


def test_a_release_that_was_not_tested_is_probed(
    restored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorhub.integrations import openrlhf

    class Other:
        def init_model_from_pretrained(self, strategy: Any, pretrain: Any, engines: Any) -> None:
            pass

        def broadcast_to_vllm(self) -> None:
            pass

    monkeypatch.setattr(openrlhf, "SUPPORTED", ("0.1",))
    openrlhf.install()
    monkeypatch.setattr(openrlhf, "_THEIR_POLICY", Other)
    with pytest.raises(StateError, match=r"init_model_from_pretrained has other .*'engines'"):
        openrlhf.install()
