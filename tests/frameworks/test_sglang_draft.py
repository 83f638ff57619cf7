"""The draft model of an SGLang engine's is updated with its base, in one version: with a checkpoint
of its own (EAGLE), and with the base's (MTP).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tensorhub import sync
from tensorhub.errors import IntegrityError, ManifestMismatch
from tests.frameworks import sglang_cpu
from tests.frameworks.test_vllm import actor
from tests.frameworks.test_vllm_draft import eagle
from tests.frameworks.test_vllm_mtp import MIMO, checkpoint

pytestmark = [pytest.mark.framework, pytest.mark.timeout(400)]

SHARED = ("embed_tokens.weight", "lm_head.weight")  # the draft's are the base's
EAGLE = {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}


def weights(kind: str) -> dict[str, torch.Tensor]:
    sglang_cpu.shim()
    if kind == "mtp":
        return checkpoint()
    return {**actor(1).state_dict(), **eagle(), "draft.fc.bias": torch.randn(64).bfloat16()}


@pytest.fixture(scope="module", params=["eagle", "mtp"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def rank(kind: str, tmp_path_factory: pytest.TempPathFactory) -> sglang_cpu.Rank:
    directory = tmp_path_factory.mktemp(kind)
    save(directory, kind, weights(kind))
    server = {"load_format": "auto"}
    if kind == "eagle":
        return sglang_cpu.Rank(directory, draft=EAGLE, server=server)
    server["speculative_draft_model_path"] = str(directory)
    return sglang_cpu.Rank(directory, **MIMO, server=server)


def save(directory: Path, kind: str, tensors: dict[str, torch.Tensor]) -> None:
    base = {name: each for name, each in tensors.items() if not name.startswith("draft.")}
    save_file(base, directory / "model.safetensors")
    if kind == "eagle":
        (directory / "draft").mkdir(exist_ok=True)
        draft = {name.removeprefix("draft."): tensors[name] for name in tensors.keys() - base}
        save_file(draft, directory / "draft" / "model.safetensors")


@pytest.fixture
def engine(rank: sglang_cpu.Rank) -> Iterator[Any]:
    made = sglang_cpu.engine(rank)
    yield made
    assert made.tokenizer_manager.died_of is None
    made.loop.close()
    rank.receiver.close()
    del rank.model.get_weights_by_name


@pytest.fixture
def address() -> Iterator[str]:
    with sync.serve() as coordinator:
        yield coordinator.address


def both(rank: sglang_cpu.Rank) -> dict[str, str]:
    assert rank.draft is not None
    of_draft = sglang_cpu.checksums(rank.draft).items()
    return {**rank.checksums(), **{f"draft.{name}": each for name, each in of_draft}}


def as_loaded(rank: sglang_cpu.Rank, kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """What SGLang makes of a checkpoint of these."""
    save(rank.directory, kind, tensors)
    base, draft = rank._loaded("auto"), rank._loaded("auto", is_draft=True)
    draft.set_embed_and_head(*base.get_embed_and_head())
    of_draft = sglang_cpu.checksums(draft).items()
    return {**sglang_cpu.checksums(base), **{f"draft.{name}": each for name, each in of_draft}}


def test_both_are_updated_in_one_version(
    rank: sglang_cpu.Rank, engine: Any, kind: str, address: str
) -> None:
    from tensorhub.integrations.sglang import Trainer

    tensors = weights(kind)
    with Trainer(tensors, engine, address, timeout_s=60.0) as trainer:
        for _ in range(2):
            before = both(rank)
            for tensor in tensors.values():
                tensor.normal_()
            trainer.send_weights()
            now = both(rank)
            assert [name for name, digest in before.items() if now[name] == digest] == []
            assert now == as_loaded(rank, kind, tensors)
            trainer.check_weights()
        of_draft = [each for each in rank.ways()[0] if each.startswith("draft.")]
        assert not any(each.endswith(SHARED) for each in of_draft)
        draft = dict(rank.draft.named_parameters())
        name = next(name for name in draft if name.endswith("down_proj.weight"))
        assert f"draft.{name}" in of_draft
        draft[name].data[3, 3] += 1
        with pytest.raises(IntegrityError, match=rf"1 tensor\(s\).*'draft\.{name}'"):
            trainer.check_weights()


def test_what_either_lacks_is_listed_and_neither_is_written(
    rank: sglang_cpu.Rank, engine: Any, kind: str, address: str
) -> None:
    from tensorhub.integrations.sglang import Trainer

    before, tensors = both(rank), weights(kind)
    layer = "draft.layers.0" if kind == "eagle" else "model.mtp_layers.0"
    gone = ["model.layers.1.self_attn.o_proj.weight", f"{layer}.mlp.down_proj.weight"]
    for name in gone:
        del tensors[name]
    tensors["draft.cf.weight"] = torch.zeros(2)
    with (
        Trainer(tensors, engine, address, timeout_s=60.0) as trainer,
        pytest.raises(ManifestMismatch) as refused,
    ):
        trainer.send_weights()
    text = "\n".join(refused.value.differences)
    assert len(refused.value.differences) == 3, text
    for name in (*gone, "draft.cf.weight"):
        assert repr(name) in text
    assert both(rank) == before


def test_a_draft_is_left_alone_only_where_that_is_said(
    rank: sglang_cpu.Rank, engine: Any, kind: str, address: str
) -> None:
    from tensorhub.integrations.sglang import Trainer

    before, tensors = both(rank), weights(kind)
    of_draft = [name for name in tensors if name.startswith("draft.") or "mtp" in name]
    base = {name: each for name, each in tensors.items() if name not in of_draft}
    with (
        Trainer(base, engine, address, timeout_s=60.0) as trainer,
        pytest.raises(ManifestMismatch) as refused,
    ):
        trainer.send_weights()
    assert all("'draft." in each for each in refused.value.differences)
    assert both(rank) == before
    with Trainer(base, engine, address, unused=["draft.*"], timeout_s=60.0) as trainer:
        trainer.send_weights()
        trainer.check_weights()
    same = {name for name, digest in both(rank).items() if before[name] == digest}
    assert same == {
        name for name in before if name.startswith("draft.") and not name.endswith(SHARED)
    }
