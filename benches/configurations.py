"""The sizes of public model families, as their configuration files on the Hugging Face Hub give
them.

Responsible for the figures only: `catalogue` makes tensors of them. `parameters` is what the family
publishes for its checkpoint (tied embeddings counted once), so that a wrong figure shows. Sources:
`config.json` of the named repositories, sentence-transformers/all-MiniLM-L6-v2 (BERT),
Qwen/Qwen2.5-*, Qwen/Qwen3-*, Qwen/Qwen3-Coder-480B-A35B-Instruct, meta-llama/Llama-3.1-* and
Llama-3.2-*, mistralai/Mistral-* and Mixtral-*, google/gemma-2-*, deepseek-ai/DeepSeek-V3 (arXiv
2412.19437, without its module for multi-token prediction), moonshotai/Kimi-K2-Instruct (arXiv
2507.20534).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Encoder:
    """BERT's: post-norm, with biases everywhere."""

    parameters: int
    vocabulary: int
    hidden: int
    layers: int
    intermediate: int
    positions: int = 512
    segments: int = 2


@dataclass(frozen=True, slots=True)
class Decoder:
    """Llama's: grouped-query attention, gated MLP, RMSNorm; and what families after it changed."""

    parameters: int
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head: int  # elements of one head
    intermediate: int  # of a dense layer
    tied: bool = False  # the output layer is the embedding, and is not in the checkpoint
    qkv_bias: bool = False
    qk_norm: bool = False
    four_norms: bool = False  # Gemma's, also behind attention and MLP
    experts: int = 0
    expert_intermediate: int = 0
    expert_block: str = "mlp"
    expert_projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class LatentDecoder:
    """DeepSeek-V3's: multi-head latent attention, shared and routed experts, float8 weights with a
    scale per block.
    """

    parameters: int  # without scales
    vocabulary: int
    hidden: int
    layers: int
    dense_layers: int  # the first ones, which have no experts
    heads: int
    intermediate: int
    experts: int
    expert_intermediate: int
    query_rank: int = 1536
    key_value_rank: int = 512
    head_nope: int = 128
    head_rope: int = 64
    head_value: int = 128
    shared_experts: int = 1
    block: int = 128  # rows and columns of a weight that one scale is for


Configuration = Encoder | Decoder | LatentDecoder

_QWEN = 151_936  # its larger Qwen2.5 models are padded to 152,064
_LLAMA3 = 128_256
_GEMMA2 = 256_000


def _qwen2(
    parameters: int,
    hidden: int,
    layers: int,
    heads: int,
    kv: int,
    intermediate: int,
    *,
    tied: bool = False,
) -> Decoder:
    vocabulary, head = _QWEN if tied else 152_064, hidden // heads
    return Decoder(
        parameters,
        vocabulary,
        hidden,
        layers,
        heads,
        kv,
        head,
        intermediate,
        tied=tied,
        qkv_bias=True,
    )


def _qwen3(
    parameters: int, hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool = False
) -> Decoder:
    return Decoder(
        parameters, _QWEN, hidden, layers, heads, 8, 128, intermediate, tied=tied, qk_norm=True
    )


def _qwen3_moe(
    parameters: int, hidden: int, layers: int, heads: int, kv: int, experts: int, inner: int
) -> Decoder:
    sizes = (parameters, _QWEN, hidden, layers, heads, kv, 128, 0)
    return Decoder(*sizes, qk_norm=True, experts=experts, expert_intermediate=inner)


def _llama3(
    parameters: int, hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool = False
) -> Decoder:
    return Decoder(
        parameters, _LLAMA3, hidden, layers, heads, 8, hidden // heads, intermediate, tied=tied
    )


def _mistral(
    parameters: int, vocabulary: int, hidden: int, layers: int, heads: int, intermediate: int
) -> Decoder:
    return Decoder(parameters, vocabulary, hidden, layers, heads, 8, 128, intermediate)


def _mixtral(
    parameters: int, vocabulary: int, hidden: int, layers: int, heads: int, inner: int
) -> Decoder:
    sizes = (parameters, vocabulary, hidden, layers, heads, 8, 128, 0)
    names = ("w1", "w3", "w2")
    return Decoder(
        *sizes,
        experts=8,
        expert_intermediate=inner,
        expert_block="block_sparse_moe",
        expert_projections=names,
    )


def _gemma2(
    parameters: int, hidden: int, layers: int, heads: int, kv: int, head: int, intermediate: int
) -> Decoder:
    return Decoder(
        parameters,
        _GEMMA2,
        hidden,
        layers,
        heads,
        kv,
        head,
        intermediate,
        tied=True,
        four_norms=True,
    )


CONFIGURATIONS: Final[Mapping[str, Configuration]] = MappingProxyType(
    {
        "all-MiniLM-L6-v2": Encoder(22_713_216, 30_522, 384, 6, 1536),
        "Qwen2.5-0.5B": _qwen2(494_032_768, 896, 24, 14, 2, 4864, tied=True),
        "Qwen2.5-1.5B": _qwen2(1_543_714_304, 1536, 28, 12, 2, 8960, tied=True),
        "Qwen2.5-3B": _qwen2(3_085_938_688, 2048, 36, 16, 2, 11_008, tied=True),
        "Qwen2.5-7B": _qwen2(7_615_616_512, 3584, 28, 28, 4, 18_944),
        "Qwen2.5-14B": _qwen2(14_770_033_664, 5120, 48, 40, 8, 13_824),
        "Qwen2.5-32B": _qwen2(32_763_876_352, 5120, 64, 40, 8, 27_648),
        "Qwen2.5-72B": _qwen2(72_706_203_648, 8192, 80, 64, 8, 29_568),
        "Qwen3-0.6B": _qwen3(596_049_920, 1024, 28, 16, 3072, tied=True),
        "Qwen3-1.7B": _qwen3(1_720_574_976, 2048, 28, 16, 6144, tied=True),
        "Qwen3-4B": _qwen3(4_022_468_096, 2560, 36, 32, 9728, tied=True),
        "Qwen3-8B": _qwen3(8_190_735_360, 4096, 36, 32, 12_288),
        "Qwen3-14B": _qwen3(14_768_307_200, 5120, 40, 40, 17_408),
        "Qwen3-32B": _qwen3(32_762_123_264, 5120, 64, 64, 25_600),
        "Qwen3-30B-A3B": _qwen3_moe(30_532_122_624, 2048, 48, 32, 4, 128, 768),
        "Qwen3-235B-A22B": _qwen3_moe(235_093_634_560, 4096, 94, 64, 4, 128, 1536),
        "Qwen3-Coder-480B-A35B": _qwen3_moe(480_154_875_392, 6144, 62, 96, 8, 160, 2560),
        "Llama-3.2-1B": _llama3(1_235_814_400, 2048, 16, 32, 8192, tied=True),
        "Llama-3.2-3B": _llama3(3_212_749_824, 3072, 28, 24, 8192, tied=True),
        "Llama-3.1-8B": _llama3(8_030_261_248, 4096, 32, 32, 14_336),
        "Llama-3.1-70B": _llama3(70_553_706_496, 8192, 80, 64, 28_672),
        "Llama-3.1-405B": _llama3(405_853_388_800, 16_384, 126, 128, 53_248),
        "Mistral-7B-v0.3": _mistral(7_248_023_552, 32_768, 4096, 32, 32, 14_336),
        "Mistral-Nemo-12B": _mistral(12_247_782_400, 131_072, 5120, 40, 32, 14_336),
        "Mistral-Large-123B": _mistral(122_610_069_504, 32_768, 12_288, 88, 96, 28_672),
        "Mixtral-8x7B": _mixtral(46_702_792_704, 32_000, 4096, 32, 32, 14_336),
        "Mixtral-8x22B": _mixtral(140_620_634_112, 32_000, 6144, 56, 48, 16_384),
        "gemma-2-2b": _gemma2(2_614_341_888, 2304, 26, 8, 4, 256, 9216),
        "gemma-2-9b": _gemma2(9_241_705_984, 3584, 42, 16, 8, 256, 14_336),
        "gemma-2-27b": _gemma2(27_227_128_320, 4608, 46, 32, 16, 128, 36_864),
        "DeepSeek-V3": LatentDecoder(671_026_419_200, 129_280, 7168, 61, 3, 128, 18_432, 256, 2048),
        "Kimi-K2": LatentDecoder(1_026_408_232_448, 163_840, 7168, 61, 1, 64, 18_432, 384, 2048),
    }
)
