"""LoRA adapters as models of their own, in an SGLang engine whose base is updated, too. The oracle
is SGLang's own way through files.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tensorhub import sync
from tensorhub.errors import ManifestMismatch, VersionUnavailable
from tensorhub.integrations.adapters import CONFIG as CONFIG_FILE, adapter_tensors
from tests.frameworks import sglang_cpu
from tests.frameworks.test_vllm import actor, train
from tests.frameworks.test_vllm_lora import CONFIG, adapter

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]

SERVER = {
    "enable_lora": True,
    "lora_backend": "torch_native",
    "max_lora_rank": 8,
    "max_loras_per_batch": 3,
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
}


@pytest.fixture(scope="module")
def rank(tmp_path_factory: pytest.TempPathFactory) -> sglang_cpu.Rank:
    return sglang_cpu.Rank(tmp_path_factory.mktemp("llama"), server=SERVER)


@pytest.fixture
def engine(rank: sglang_cpu.Rank) -> Iterator[Any]:
    made = sglang_cpu.engine(rank)
    yield made
    assert made.tokenizer_manager.died_of is None
    made.loop.close()
    for each in list(rank.adapters.lora_refs.values()):
        rank.adapters.unload_lora_adapter(each)
    if "get_weights_by_name" in vars(rank.model):
        rank.receiver.close()
        del rank.model.get_weights_by_name


@pytest.fixture
def address() -> Iterator[str]:
    with sync.serve() as coordinator:
        yield coordinator.address


def names(rank: sglang_cpu.Rank) -> set[str]:
    return {each.lora_name for each in rank.adapters.lora_refs.values()}


def in_slot(rank: sglang_cpu.Rank, name: str) -> dict[str, torch.Tensor]:
    """What SGLang puts into a slot for a request that names this adapter."""
    manager = rank.adapters
    (uid,) = (key for key, each in manager.lora_refs.items() if each.lora_name == name)
    manager.fetch_new_loras({uid})
    pool = manager.memory_pool
    slot = pool.get_buffer_id(uid)
    return {
        f"{side}.{module}.{number}": each[slot].clone()
        for side, buffers in (("A", pool.A_buffer), ("B", pool.B_buffer))
        for module, layers in buffers.items()
        for number, each in enumerate(layers)
    }


def from_files(
    rank: sglang_cpu.Rank, tensors: Mapping[str, torch.Tensor], directory: Path
) -> dict[str, torch.Tensor]:
    from sglang.srt.lora.lora_registry import LoRARef

    directory.mkdir()
    save_file(dict(tensors), directory / "adapter_model.safetensors")
    config = adapter_tensors({}, CONFIG)[CONFIG_FILE]
    (directory / CONFIG_FILE).write_bytes(config.numpy().tobytes())
    ref = LoRARef(lora_name="own", lora_path=f"{directory}", pinned=False)
    assert rank.adapters.load_lora_adapter(ref).success
    found = in_slot(rank, "own")
    rank.adapters.unload_lora_adapter(ref)
    return found


def test_versions_of_several_adapters_are_loaded_and_old_ones_unloaded(
    rank: sglang_cpu.Rank, engine: Any, address: str, tmp_path: Path
) -> None:
    from tensorhub.integrations.sglang import Trainer

    model, poet, critic = actor(1), adapter(), adapter()
    with (
        sync.connect(address) as hub,
        Trainer(model, engine, address, timeout_s=60.0) as trainer,
    ):
        weights = hub.register("poet", adapter_tensors(poet, CONFIG))
        hub.register("critic", adapter_tensors(critic, CONFIG)).publish(5)
        (session,) = trainer.engines
        assert session.load_adapter("critic", 5) == "critic@5"  # before any update of the base
        for version in range(3):
            with weights.mutate(version), torch.no_grad():
                for tensor in poet.values():
                    tensor.normal_()
            train(model)
            trainer.send_weights()
            check_base(rank, model)
            name = session.load_adapter("poet", version)
            assert session.load_adapter("poet", version) == name  # again
            mine, its = in_slot(rank, name), from_files(rank, poet, tmp_path / f"{version}")
            assert {key for key in mine if not torch.equal(mine[key], its[key])} == set()
            assert any(each.any() for each in mine.values())
        assert names(rank) == {"critic@5", "poet@1", "poet@2"}
        trainer.check_weights()
        its = from_files(rank, critic, tmp_path / "critic")
        assert all(torch.equal(each, its[key]) for key, each in in_slot(rank, "critic@5").items())


def test_a_number_that_was_published_anew_is_loaded_anew(
    rank: sglang_cpu.Rank, engine: Any, address: str, tmp_path: Path
) -> None:
    """As by a trainer that has started again from a checkpoint."""
    from tensorhub.integrations.sglang import Session

    session, poet = Session(engine, address, timeout_s=60.0), adapter()
    with sync.connect(address) as hub:
        weights = hub.register("poet", adapter_tensors(poet, CONFIG))
        weights.publish(0)
        assert session.load_adapter("poet", 0) == "poet@0"
        with weights.mutate(1), torch.no_grad():
            poet[next(iter(poet))].add_(1)
        session.load_adapter("poet", 1)
        hub.rollback("poet", to=0)
        with torch.no_grad():
            for tensor in poet.values():
                tensor.normal_()
        info, engines = weights.publish(1), rank.receiver._hub
        while engines.newest("poet") != info:
            time.sleep(0.01)
        assert session.load_adapter("poet", 1) == "poet@1"
        mine, its = in_slot(rank, "poet@1"), from_files(rank, poet, tmp_path / "poet")
        assert {key for key in mine if not torch.equal(mine[key], its[key])} == set()


def check_base(rank: sglang_cpu.Rank, model: torch.nn.Module) -> None:
    """As `check`, of an engine whose layers are wrapped."""
    ours = {name.replace(".base_layer", ""): each for name, each in rank.checksums().items()}
    assert ours == rank.loaded_by_sglang(model.state_dict())


def test_adapters_that_do_not_fit_are_refused_with_all_reasons(
    rank: sglang_cpu.Rank, engine: Any, address: str
) -> None:
    from tensorhub.integrations.sglang import Session

    session = Session(engine, address, timeout_s=60.0)
    prefix = "base_model.model.model.layers"
    tensors = adapter()
    del tensors[f"{prefix}.1.self_attn.o_proj.lora_A.weight"]
    for part in "AB":
        del tensors[f"{prefix}.0.self_attn.v_proj.lora_{part}.weight"]
    tensors[f"{prefix}.0.mlp.up_prj.lora_A.weight"] = torch.zeros(4, 64)
    wrong = f"{prefix}.0.mlp.down_proj.lora_B.weight"
    tensors[wrong] = tensors[wrong][:-1]
    whole = f"{prefix}.1.mlp.down_proj.lora_A.weight"
    tensors[whole] = tensors[whole].to(torch.int8)
    tensors["score.weight"] = torch.zeros(2)
    tensors[f"{prefix}.1.mlp.experts.0.up_proj.lora_A.weight"] = torch.zeros(4, 64)
    with sync.connect(address) as hub:
        hub.register("wrong", adapter_tensors(tensors, CONFIG)).publish(0)
        with pytest.raises(ManifestMismatch, match=r"'wrong' does not fit this engine in 8 place"):
            session.load_adapter("wrong", 0)
        hub.register("none", tensors).publish(0)
        with pytest.raises(ManifestMismatch, match="has no tensor 'adapter_config"):
            session.load_adapter("none", 0)
        hub.register("large", adapter_tensors(adapter(), {**CONFIG, "r": 16})).publish(0)
        with pytest.raises(ManifestMismatch, match=r"has to be \(16, 64\)"):
            session.load_adapter("large", 0)
        hub.register("empty", adapter_tensors({}, {"r": 4})).publish(0)
        with pytest.raises(ManifestMismatch, match="does not say peft_type, lora_alpha"):
            session.load_adapter("empty", 0)
        with pytest.raises(VersionUnavailable):
            session.load_adapter("large", 7)
    assert names(rank) == set()


def test_a_path_before_the_engine_has_joined(rank: sglang_cpu.Rank, engine: Any) -> None:
    from tensorhub.integrations.sglang import Offline
    from tensorhub.integrations.sglang_lora import watch

    watch(lambda model: None)
    refused, _ = Offline(engine).adapters(
        "load_lora_adapter", lora_name="poet@1", lora_path="tensorhub:poet@1"
    )
    assert "joined no cluster" in refused
