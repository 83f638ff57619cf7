"""What vLLM's wheel for CUDA lacks on a machine without a GPU, and a small Llama's configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "tensorhub",
    "HF_HUB_OFFLINE": "1",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 100,  # vLLM pads it to 128
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "dtype": "bfloat16",
    "max_model_len": 64,
}
_kept: list[torch.library.Library] = []


def shim() -> None:
    """Define the one native op without which the CPU worker does not start. Nothing can be generated."""
    if not _kept:
        library = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
        library.define("init_cpu_memory_env(int[] nodes) -> ()")  # type: ignore[no-untyped-call]
        library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
        _kept.append(library)


def prepare(directory: Path) -> str:
    """Set this process up for vLLM, and write a model's configuration. Returns the model's path."""
    os.environ.update(ENVIRONMENT)
    shim()
    (directory / "config.json").write_text(json.dumps(LLAMA))
    return str(directory)
