"""What OpenRLHF lacks on a machine without a GPU, and what a small run of it is about."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed.device_mesh

FLASH_ATTN = {
    "flash_attn": (),
    "flash_attn.bert_padding": ("index_first_axis", "pad_input", "rearrange", "unpad_input"),
    "flash_attn.utils": (),
    "flash_attn.utils.distributed": ("all_gather",),
}
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"word{number}" for number in range(96))]
REWARD = """
import itertools

count = itertools.count()


def reward_func(queries, prompts, labels):
    return {"rewards": float(next(count)), "scores": 0.5}
"""


class Device(str):
    """The CPU; in a longer name the number of a GPU."""

    def __format__(self, specification: str) -> str:
        return "0"


def shim() -> None:
    """Stand in for a GPU, and for flash-attn, which is built for GPUs only: OpenRLHF imports its
    names, and calls none of them here. Ray calls this in each of its processes.
    """
    for name, members in FLASH_ATTN.items():
        module: Any = sys.modules.setdefault(name, ModuleType(name))
        module.__spec__, module.__path__ = ModuleSpec(name, None), []
        for member in members:
            setattr(module, member, None)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: Device("cpu")
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    meshes: Any = torch.distributed.device_mesh
    make = meshes.init_device_mesh
    meshes.init_device_mesh = lambda device, *given, **named: make("cpu", *given, **named)


def write_tokenizer(directory: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(directory)


def arguments(directory: Path, model: Path, settings: Mapping[str, object]) -> list[str]:
    """Those of a run with one engine and two training steps. Writes what they name."""
    prompts = [{"input": f"word{number} word{number + 1}"} for number in range(4)]
    (directory / "prompts.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in prompts))
    (directory / "reward.py").write_text(REWARD)
    given: dict[str, object] = {
        "actor.model_name_or_path": model,
        "actor.adam.lr": 0.1,
        "actor.lr_warmup_ratio": 0.0,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "ckpt.output_dir": directory / "trained",
        "ckpt.path": directory / "checkpoints",
        "data.max_len": 32,
        "data.prompt_dataset": directory / "prompts.jsonl",
        "ds.attn_implementation": "eager",
        "reward.remote_url": directory / "reward.py",
        "rollout.batch_size": 2,
        "rollout.max_new_tokens": 8,
        "rollout.n_samples_per_prompt": 2,
        "train.batch_size": 4,
        "vllm.num_engines": 1,
        **settings,
    }
    named = [text for name, value in given.items() for text in (f"--{name}", f"{value}")]
    return [*named, "--vllm.enforce_eager", "--vllm.enable_prefix_caching"]


def digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(
            tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, tensor in tensors.items()
    }


def weights_of(worker: Any) -> dict[str, str]:
    """What the engine has; called in its worker."""
    return digests(dict(worker.get_model().named_parameters()))
