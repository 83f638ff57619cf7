"""What vLLM's wheel for CUDA lacks on a machine without a GPU, and a small Llama's
configuration.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "tensorhub,cpu_shim,cpu_platform,cpu_warm_up",
    "HF_HUB_OFFLINE": "1",
}
LLAMA: dict[str, Any] = {
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
    # in this process: the old releases for a CPU take another one for "uni"
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
}
_kept: list[torch.library.Library] = []


def lay_out(weight: torch.Tensor) -> torch.Tensor:
    """Experts as a kernel wants them: in another order, with the same shape."""
    return weight.transpose(1, 2).reshape(weight.shape)


def shim() -> None:
    """Define the native ops without which the CPU worker does not start: one that prepares memory,
    one that an activation keeps, and one that lays experts out for its kernels. Nothing can be generated.

    The CPU seems to have no AMX: with it, vLLM packs weights by further native ops.
    """
    if _kept:
        return
    torch.cpu._is_amx_tile_supported = lambda: False
    library = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    _kept.append(library)

    def prepack(weight: torch.Tensor, output: torch.Tensor, isa: str) -> None:
        output.copy_(lay_out(weight))

    for name, schema, does in (
        ("init_cpu_memory_env", "(int[] nodes) -> ()", lambda nodes: None),
        ("silu_and_mul", "(Tensor(a!) result, Tensor input) -> ()", lambda result, input: None),
        ("prepack_moe_weight", "(Tensor weight, Tensor(a!) output, str isa) -> ()", prepack),
    ):
        library.define(f"{name}{schema}")  # type: ignore[no-untyped-call]
        library.impl(name, does, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]


def faults() -> None:
    """Have a worker fail at the end of an update as long as a file in `TENSORHUB_TEST_FAULTS` has
    the number of its rank.
    """
    from tensorhub.integrations import vllm_layers
    from tests.frameworks.generating import fail_if_asked

    finish = vllm_layers.finish

    def finish_or_fail(model: torch.nn.Module, model_config: Any) -> None:
        fail_if_asked(torch.distributed.get_rank())
        finish(model, model_config)

    vllm_layers.finish = finish_or_fail


def warm_up() -> None:
    """Leave out what newer releases leave out by themselves: a first pass, which needs native ops."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner.warming_up_model = lambda self: None


def generation() -> None:
    """Have a Llama generate by its embedding and its head alone: attention needs native ops."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.llama import LlamaModel
    from vllm.v1.sample.sampler import Sampler
    from vllm.v1.worker.block_table import BlockTable

    Sampler.greedy_sample = staticmethod(lambda logits: logits.argmax(-1).view(-1))
    LlamaModel.forward = lambda self, input_ids, *given, **named: self.embed_tokens(input_ids)
    BlockTable.compute_slot_mapping = lambda self, *given: None
    ops.cpu_attn_get_scheduler_metadata = lambda **named: torch.empty(0)


def platform() -> str:
    """The platform of a process: releases before 0.29 take it from the name of their own build."""
    return "vllm.platforms.cpu.CpuPlatform"


def install_plugins(directory: Path) -> None:
    """Make the above plug-ins of vLLM's, for processes that have `directory` on their path."""
    distribution = directory / "cpu_shim-1.0.dist-info"
    distribution.mkdir()
    (distribution / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-shim\nVersion: 1.0\n")
    here = "tests.frameworks.vllm_cpu"
    lines = [
        "[vllm.general_plugins]",
        f"cpu_shim = {here}:shim",
        f"cpu_faults = {here}:faults",
        f"cpu_warm_up = {here}:warm_up",
        f"cpu_generation = {here}:generation",
        "cpu_quantized = tests.frameworks.vllm_quantized:plug_in",
        "[vllm.platform_plugins]",
        f"cpu_platform = {here}:platform",
        "",
    ]
    (distribution / "entry_points.txt").write_text("\n".join(lines))


def prepare(directory: Path, config: dict[str, Any] = LLAMA) -> str:
    """Set this process up for vLLM, and write a model's configuration. Returns the model's path."""
    os.environ.update(ENVIRONMENT)
    install_plugins(directory)
    sys.path.insert(0, str(directory))
    shim()
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


def write_checkpoint(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """What a model is loaded from, beside its configuration."""
    from safetensors.torch import save_file

    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    save_file(copies, directory / "model.safetensors", metadata={"format": "pt"})
