"""SkyRL's real entry point, configuration and FSDP policy worker, with a real vLLM engine in this
process. Nothing is sharded here, and Ray's tasks run in this process.
"""

from __future__ import annotations

import asyncio
import sys
import typing
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
import typing_extensions

from tensorhub import sync
from tensorhub.errors import InvalidValue, RegistrationError
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm import actor, train
from tests.frameworks.test_vllm_worker import assert_has

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]

pytest.importorskip(
    "skyrl", reason="skyrl is not installed here: `make frameworks FRAMEWORKS=skyrl`"
)


# built for GPUs only; SkyRL imports these names, which nothing here calls
padding: Any = ModuleType("flash_attn.bert_padding")
padding.pad_input = padding.unpad_input = None
flash_attn: Any = ModuleType("flash_attn")
flash_attn.__spec__ = ModuleSpec("flash_attn", None)
sys.modules.update({"flash_attn": flash_attn, "flash_attn.bert_padding": padding})
# pydantic takes no other one before Python 3.12
typing.TypedDict = typing_extensions.TypedDict  # type: ignore[misc, assignment, unused-ignore]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from tensorhub.integrations.engine_feed import EXTENSION

    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    directory = tmp_path_factory.mktemp("llama")
    model = vllm_cpu.prepare(directory)
    vllm_cpu.write_checkpoint(directory, actor().state_dict())
    from vllm import LLM

    settings = {**vllm_cpu.ENGINE, "load_format": "auto"}
    yield LLM(model=model, worker_extension_cls=EXTENSION, **settings)
    patch.undo()


def chunks(model: torch.nn.Module) -> Iterator[Any]:
    from skyrl.backends.skyrl_train.weight_sync import WeightChunk

    for name, tensor in model.state_dict().items():
        yield WeightChunk([name], [f"{tensor.dtype}"], [list(tensor.shape)], [tensor])


def test_chunks_reach_an_engine(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorhub.integrations.skyrl import WeightSender

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    model = actor(1)
    with sync.serve() as coordinator:
        sender = WeightSender([llm], address=coordinator.address)
        for version in (1, 2):
            train(model)
            asyncio.run(sender.send_chunks(chunks(model)))
            assert llm.collective_rpc("tensorhub_state")[0]["version"] == version
            assert_has(llm, model, turned=False)
        half = list(chunks(model))[1:]
        with pytest.raises(RegistrationError, match="is missing"):
            asyncio.run(sender.send_chunks(half))
        assert_has(llm, model, turned=False)
        llm.collective_rpc("tensorhub_leave")
        sender.teardown()


def test_another_rank_only_takes_part_in_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorhub.integrations.skyrl import WeightSender

    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    left = chunks(actor(1))
    asyncio.run(WeightSender(["http://127.0.0.1:1"]).send_chunks(left))
    assert list(left) == []


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A policy worker of a class that `install` made, with a model that is not sharded."""
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker

    from tensorhub.integrations import engine_feed, skyrl

    cfg = SimpleNamespace(
        generator=SimpleNamespace(inference_engine=SimpleNamespace(engine_init_kwargs={})),
        trainer=SimpleNamespace(strategy="fsdp"),
    )
    monkeypatch.setattr(fsdp_worker, "PolicyWorker", fsdp_worker.PolicyWorker)
    skyrl.install(cfg)
    settings = cfg.generator.inference_engine.engine_init_kwargs
    assert settings == {"worker_extension_cls": engine_feed.EXTENSION}
    made = fsdp_worker.PolicyWorker.__ray_metadata__.modified_class
    assert issubclass(made, fsdp_worker.FSDPPolicyWorkerBase)
    worker: Any = made.__new__(made)
    worker.cfg = SimpleNamespace(placement=SimpleNamespace(colocate_all=False))
    worker._transfer_strategy_cls, worker._is_lora = None, False
    worker._is_multimodal_lm_only, worker.model = False, SimpleNamespace(model=actor(1))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
    return worker


INFERENCE = SimpleNamespace(enable_prefix_caching=False, model_dtype="float32")


def test_a_policy_worker_updates_an_engine(
    worker: Any, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, model = SimpleNamespace(server_urls=[llm]), worker.model.model
    with sync.serve() as coordinator:
        monkeypatch.setenv("TENSORHUB_ADDRESS", coordinator.address)
        asyncio.run(worker.init_weight_sync_state(client, INFERENCE))
        for version in (1, 2):
            train(model)
            asyncio.run(worker.broadcast_to_inference_engines(client, INFERENCE))
            assert llm.collective_rpc("tensorhub_state")[0]["version"] == version
            assert_has(llm, model, turned=False)
        llm.collective_rpc("tensorhub_leave")
        worker._weight_transfer_sender.teardown()


def test_only_rank_0_of_the_policy_needs_an_address(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SimpleNamespace(server_urls=["http://127.0.0.1:1"])
    with pytest.raises(InvalidValue, match="set TENSORHUB_ADDRESS"):
        asyncio.run(worker.init_weight_sync_state(client, INFERENCE))
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    asyncio.run(worker.init_weight_sync_state(client, INFERENCE))
    asyncio.run(worker.broadcast_to_inference_engines(client, INFERENCE))


@pytest.mark.parametrize("is_own", [False, True])
def test_an_entry_point_runs_an_experiment_that_sends_by_tensorhub(
    monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """SkyRL's own one, and that of the example."""
    from skyrl.backends.skyrl_train.workers.fsdp import fsdp_worker
    from skyrl.train.entrypoints import main_base
    from skyrl.train.utils import utils

    from examples import skyrl_experiment
    from tensorhub.integrations import skyrl
    from tensorhub.integrations.engine_feed import EXTENSION

    ran: list[Any] = []

    class Experiment:
        def __init__(self, cfg: Any) -> None:
            self.cfg = cfg

        def run(self) -> None:
            ran.append((self.cfg, fsdp_worker.PolicyWorker.remote))

    here = SimpleNamespace(
        get=lambda each: each, remote=lambda **_: lambda each: SimpleNamespace(remote=each)
    )
    for place in (skyrl, skyrl_experiment):
        monkeypatch.setattr(place, "ray", here)
    for place in (utils, skyrl_experiment):
        monkeypatch.setattr(place, "initialize_ray", lambda cfg: None)
    monkeypatch.setattr(main_base, "BasePPOExp", Experiment)
    monkeypatch.setattr(skyrl_experiment, "Experiment", Experiment)
    monkeypatch.setattr(fsdp_worker, "PolicyWorker", fsdp_worker.PolicyWorker)
    override = f"{skyrl.ENTRYPOINT}{skyrl.__name__}"
    given = ["trainer.logger=console", "trainer.placement.colocate_all=false"]
    if is_own:
        skyrl_experiment.main(*given)
    else:
        monkeypatch.setattr(sys, "argv", ["main_base", override, *given])
        monkeypatch.delenv("TENSORHUB_ADDRESS", raising=False)
        with pytest.raises(InvalidValue, match="set TENSORHUB_ADDRESS"):
            main_base.main()
        assert ran == []
        monkeypatch.setenv("TENSORHUB_ADDRESS", "tcp://127.0.0.1:1")
        main_base.main()
    ((cfg, worker),) = ran
    inference = cfg.generator.inference_engine
    assert inference.engine_init_kwargs["worker_extension_cls"] == EXTENSION
    assert not cfg.trainer.placement.colocate_all
    assert issubclass(worker, skyrl.SyncedPolicy)
    assert issubclass(worker, fsdp_worker.FSDPPolicyWorkerBase)
