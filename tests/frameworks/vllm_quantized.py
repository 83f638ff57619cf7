"""Checkpoints of a small Llama as each method of quantization writes them, and what vLLM lacks on a
CPU to load them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from tests.frameworks import vllm_cpu

FP8 = torch.float8_e4m3fn
LLAMA: dict[str, Any] = {
    **vllm_cpu.LLAMA,
    "hidden_size": 256,  # of blocks of 128, for two workers
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 32,
}
EXPERTS = 4
MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
IN_MIXTRAL = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
Tensors = dict[str, torch.Tensor]
Made = Callable[[int, int], Tensors]  # of a linear layer's rows and columns, by suffix


@dataclass(frozen=True)
class Method:
    """`quantizes`: what the engine's own loader makes of bf16. `forced`: vLLM chooses no kernel for
    it on a CPU. `experts`: of a Mixtral, in place of a Llama.
    """

    made: Made
    config: dict[str, Any] = field(default_factory=dict)
    quantizes: str | None = None
    forced: bool = False
    experts: int = 0

    @property
    def differs(self) -> dict[str, Any]:
        quantized = {"quantization_config": self.config} if self.config else {}
        return {**LLAMA, **(MIXTRAL if self.experts else {}), **quantized}


def fp8(rows: int, columns: int) -> torch.Tensor:
    return (torch.randn(rows, columns) * 50).to(FP8)


def packed(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32)


def scale(*shape: int) -> torch.Tensor:
    return torch.rand(shape) * 0.01 + 0.001


def fp4(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(0, 255, (rows, columns // 2), dtype=torch.uint8)


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, form: str) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**common, **weights},
        "input_activations": inputs and {**common, **inputs},
    }
    return {
        "quant_method": "compressed-tensors",
        "ignore": ["lm_head"],
        "format": form,
        "config_groups": {"group": group},
    }


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "exclude_modules": ["lm_head"],
        **more,
    }


def _bf16(rows: int, columns: int) -> Tensors:
    return {"weight": torch.randn(rows, columns).bfloat16()}


METHODS = {
    # quantized by the engine's loader
    "online fp8, tensor": Method(_bf16, quantizes="fp8_per_tensor"),
    "online fp8, channel": Method(_bf16, quantizes="fp8_per_channel"),
    "online fp8, block": Method(_bf16, quantizes="fp8_per_block", forced=True),
    "online mxfp8": Method(_bf16, quantizes="mxfp8", forced=True),
    # published so
    "fp8, tensor": Method(
        lambda r, c: {"weight": fp8(r, c), "weight_scale": scale()},
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
    ),
    "fp8, static": Method(
        lambda r, c: {"weight": fp8(r, c), "weight_scale": scale(), "input_scale": scale()},
        {"quant_method": "fp8", "activation_scheme": "static"},
    ),
    "fp8, block": Method(
        lambda r, c: {"weight": fp8(r, c), "weight_scale_inv": scale(r // 128, c // 128)},
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        forced=True,
    ),
    "awq": Method(
        lambda r, c: {
            "qweight": packed(c, r // 8),
            "qzeros": packed(c // 32, r // 8),
            "scales": scale(c // 32, r).bfloat16(),
        },
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": 32,
            "zero_point": True,
            "version": "gemm",
        },
    ),
    "compressed fp8, tensor": Method(
        lambda r, c: {"weight": fp8(r, c), "weight_scale": scale(1).bfloat16()},
        compressed(
            {"strategy": "tensor"}, {"strategy": "tensor", "dynamic": True}, "float-quantized"
        ),
    ),
    "compressed fp8, channel": Method(
        lambda r, c: {"weight": fp8(r, c), "weight_scale": scale(r, 1)},
        compressed(
            {"strategy": "channel"}, {"strategy": "token", "dynamic": True}, "float-quantized"
        ),
    ),
    "compressed fp8, block": Method(
        lambda r, c: {"weight": fp8(r, c), "weight_scale": scale(r // 128, c // 128)},
        compressed(
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
            "float-quantized",
        ),
        forced=True,
    ),
    "compressed int4": Method(
        lambda r, c: {
            "weight_packed": packed(r, c // 8),
            "weight_scale": scale(r, c // 32).bfloat16(),
            "weight_shape": torch.tensor([r, c]),
        },
        compressed(
            {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32},
            None,
            "pack-quantized",
        ),
    ),
    "compressed nvfp4": Method(
        lambda r, c: {
            "weight_packed": fp4(r, c),
            "weight_scale": torch.rand(r, c // 16).to(FP8),
            "weight_global_scale": scale(1),
            "input_global_scale": scale(1),
        },
        compressed(
            {"num_bits": 4, "strategy": "tensor_group", "group_size": 16},
            {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
            "nvfp4-pack-quantized",
        ),
        forced=True,
    ),
    "modelopt fp8": Method(
        lambda r, c: {"weight": fp8(r, c), "weight_scale": scale(), "input_scale": scale()},
        _modelopt("FP8"),
    ),
    "modelopt nvfp4": Method(
        lambda r, c: {
            "weight": fp4(r, c),
            "weight_scale": torch.rand(r, c // 16).to(FP8),
            "weight_scale_2": scale(),
            "input_scale": scale(),
        },
        _modelopt("NVFP4", group_size=16, kv_cache_quant_algo=None),
        forced=True,
    ),
}


METHODS |= {
    f"experts, {name}": replace(METHODS[name], experts=EXPERTS, forced=True)
    for name in (
        "fp8, tensor",
        "fp8, static",
        "fp8, block",
        "compressed fp8, tensor",
        "compressed fp8, channel",
        "compressed nvfp4",
    )
}


def checkpoint(method: Method, seed: int) -> Tensors:
    """By the names of a checkpoint, with random numbers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    torch.manual_seed(seed)
    tensors = {}
    for name, like in model.state_dict().items():
        if "_proj." not in name:
            tensors[name] = torch.randn(like.shape).bfloat16()
            continue
        for module in _modules(method, name.removesuffix(".weight")):
            tensors.update({f"{module}.{n}": each for n, each in method.made(*like.shape).items()})
    if method.experts:
        for layer in range(LLAMA["num_hidden_layers"]):
            gate = torch.randn(method.experts, LLAMA["hidden_size"]).bfloat16()
            tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = gate
    return tensors


def _modules(method: Method, module: str) -> list[str]:
    """The modules of a checkpoint in place of one of a Llama's."""
    parent, _, name = module.rpartition(".mlp.")
    if not method.experts or not parent:
        return [module]
    experts = f"{parent}.block_sparse_moe.experts"
    return [f"{experts}.{number}.{IN_MIXTRAL[name]}" for number in range(method.experts)]


@contextmanager
def loadable() -> Iterator[None]:
    """What a CPU needs beyond `vllm_cpu.shim` to load these: vLLM's native op that casts to fp8,
    written in torch; and kernels that vLLM has, but does not choose on a CPU.
    """
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
    from vllm.platforms.interface import PlatformEnum

    def cast(result: torch.Tensor, of: torch.Tensor, scale: torch.Tensor, _: Any = None) -> None:
        most = torch.finfo(result.dtype).max
        result.copy_((of.float() * (1 / scale)).clamp(-most, most))

    library = torch.library.Library("_C", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define(  # type: ignore[no-untyped-call]
        "static_scaled_fp8_quant(Tensor(a!) result, Tensor of, Tensor scale, int[]? group=None)"
        " -> ()"
    )
    library.impl("static_scaled_fp8_quant", cast, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    block = linear.TritonFp8BlockScaledMMKernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block, "is_supported", classmethod(lambda cls, capability=None: (True, None)))
        patch.setattr(
            TritonExperts, "is_supported_config", staticmethod(lambda *given: (True, None))
        )
        for kernels, kernel in (
            (linear._POSSIBLE_FP8_BLOCK_KERNELS, block),
            (linear._POSSIBLE_MXFP8_KERNELS, linear.EmulationMxfp8LinearKernel),
            (linear._POSSIBLE_NVFP4_KERNELS, EmulationNvFp4LinearKernel),
        ):
            patch.setitem(kernels, PlatformEnum.CPU, [kernel])
        yield
    library._destroy()  # type: ignore[no-untyped-call]


_kept: list[Any] = []


def plug_in() -> None:
    """A plug-in of vLLM's, for its workers; vLLM also loads it in a process with `prepared`."""
    if not hasattr(torch.ops._C, "static_scaled_fp8_quant"):
        _kept.append(loadable())
        _kept[0].__enter__()


@contextmanager
def prepared() -> Iterator[None]:
    """For engines in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in vllm_cpu.ENVIRONMENT.items():
            patch.setenv(name, value)
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        with loadable():
            yield
