"""LoRA adapters as models of their own, loaded by vLLM itself into an engine whose base is updated,
too.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import InvalidType, ManifestMismatch
from tests.frameworks import vllm_cpu
from tests.frameworks.test_vllm import actor, checksums

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]

RANK = 4
CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": 8,
    "target_modules": {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"},
    "bias": "none",
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    model = vllm_cpu.prepare(tmp_path_factory.mktemp("llama"))
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    transfer = WeightTransferConfig(backend="tensorhub")
    yield LLM(
        model=model,
        weight_transfer_config=transfer,
        enable_lora=True,
        max_lora_rank=8,
        max_loras=2,
        **vllm_cpu.ENGINE,
    )
    patch.undo()


@pytest.fixture
def hub() -> Iterator[sync.Hub]:
    with sync.serve() as coordinator, sync.connect(coordinator.address) as connected:
        yield connected


def adapter() -> dict[str, torch.Tensor]:
    """An adapter for all layers of the model, by PEFT's names."""
    tensors = {}
    for name, whole in actor().state_dict().items():
        if name.split(".")[-2] in CONFIG["target_modules"]:  # type: ignore[operator]
            module = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{module}.lora_A.weight"] = torch.randn(RANK, whole.shape[1]).bfloat16()
            tensors[f"{module}.lora_B.weight"] = torch.randn(whole.shape[0], RANK).bfloat16()
    return tensors


def loaded(llm: Any, number: int) -> Any:
    (manager,) = llm.collective_rpc(
        lambda worker: worker.model_runner.lora_manager._adapter_manager
    )
    return manager.get_adapter(number)


def same(one: Any, other: Any) -> bool:
    """Whether two of vLLM's adapters have equal weights; merged layers have several."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_versions_of_an_adapter_are_loaded_beside_the_base(
    llm: Any, hub: sync.Hub, tmp_path: Path
) -> None:
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    from tensorhub.integrations.vllm_lora import (
        CONFIG as CONFIG_FILE,
        WEIGHTS,
        adapter_tensors,
        fetch_adapter,
    )

    tensors = adapter()
    weights = hub.register("actor/poet", adapter_tensors(tensors, CONFIG))
    before = checksums(llm)
    for version in range(4):
        with weights.mutate(version):
            for tensor in tensors.values():
                tensor.normal_()
        request = fetch_adapter(hub, "actor/poet", tmp_path / "fetched")
        assert llm.llm_engine.add_lora(request)
        assert request.lora_int_id in llm.llm_engine.list_loras()
        # The oracle: vLLM loads what the trainer has, written by hand.
        own = tmp_path / f"own-{version}"
        own.mkdir()
        save_file(tensors, own / WEIGHTS)
        (own / CONFIG_FILE).write_bytes((Path(request.lora_path) / CONFIG_FILE).read_bytes())
        theirs = LoRARequest("own", 7, f"{own}", load_inplace=True)
        assert llm.llm_engine.add_lora(theirs)
        one, other = loaded(llm, request.lora_int_id), loaded(llm, 7)
        assert set(one.loras) == set(other.loras)
        assert len(one.loras) == 6  # of each layer: the merged qkv_proj, o_proj, down_proj
        for name, found in one.loras.items():
            mine, its = vars(found), vars(other.loras[name])
            assert {key for key in mine if not same(mine[key], its[key])} == set()
    assert len(list(Path(request.lora_path).parent.iterdir())) == 2
    assert checksums(llm) == before


def test_bad_input(llm: Any, hub: sync.Hub, tmp_path: Path) -> None:
    from tensorhub.integrations.vllm_lora import adapter_tensors, fetch_adapter

    hub.register("actor", {"weight": torch.zeros(4)}).publish(0)
    with pytest.raises(ManifestMismatch, match=r"'actor' has no tensor 'adapter_config\.json'"):
        fetch_adapter(hub, "actor", tmp_path)
    with pytest.raises(InvalidType, match=r"adapter_config\.json"):
        adapter_tensors({}, {"r": object()})
    assert list(tmp_path.iterdir()) == []
    # What vLLM refuses, it refuses with words of its own, and has what it had.
    hub.register("wide", adapter_tensors(adapter(), {**CONFIG, "r": 64})).publish(0)
    loras = llm.llm_engine.list_loras()
    with pytest.raises(ValueError, match="max_lora_rank"):
        llm.llm_engine.add_lora(fetch_adapter(hub, "wide", tmp_path))
    assert llm.llm_engine.list_loras() == loras
