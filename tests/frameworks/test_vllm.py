"""`tensorhub.integrations.vllm` against vLLM itself: its offline `LLM` in this process, with a real Llama."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import StateError
from tests.frameworks import vllm_cpu

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = vllm_cpu.prepare(tmp_path_factory.mktemp("llama"))
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    yield LLM(model=model, weight_transfer_config=WeightTransferConfig(backend="tensorhub"), **vllm_cpu.ENGINE)
    patch.undo()


@pytest.fixture
def coordinator() -> Iterator[sync.Coordinator]:
    with sync.serve() as serving:
        yield serving


def actor(seed: int = 0) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model: torch.nn.Module = LlamaForCausalLM(LlamaConfig(**vllm_cpu.LLAMA)).to(torch.bfloat16)
    return model


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


def checksums_by_vllm(llm: Any, model: torch.nn.Module) -> dict[str, str]:
    """vLLM's own, after it has loaded these weights in its own way."""
    weights = [(name, tensor.detach().clone()) for name, tensor in model.state_dict().items()]
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
    return checksums(llm)


def trainer_of(llm: Any, coordinator: sync.Coordinator, source: Any, **settings: Any) -> Any:
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from tensorhub.integrations.vllm import OfflineClient, TrainerInit

    init = TrainerInit(address=coordinator.address, rank=0, **{"timeout_s": 30.0, **settings})
    return WeightTransferTrainerFactory.trainer_init(init, client=OfflineClient(llm), source=source)


@pytest.mark.parametrize("host_memory_bytes", [0, 2**30])
def test_three_updates(llm: Any, coordinator: sync.Coordinator, host_memory_bytes: int) -> None:
    model = actor()
    trainer = trainer_of(llm, coordinator, model, host_memory_bytes=host_memory_bytes)
    for version in range(3):
        train(model)
        trainer.send_weights()
        assert llm.get_weight_version() == f"{version}"
        ours = checksums(llm)
        theirs = checksums_by_vllm(llm, model)
        assert {name for name in ours if ours[name] != theirs[name]} == set()
    trainer.shutdown()


def test_an_unsupported_release_is_refused(llm: Any) -> None:
    from tensorhub.integrations.vllm import register

    register()  # once more
    with pytest.raises(StateError, match=r"vLLM 0\.31\.2 is not supported.*0\.32 and 0\.33"):
        register("0.31.2")
