"""Real models as names, dtypes and shapes, dense and mixtures of experts, from 23M to 1T
parameters, without any weights.

`models()` names them; `shapes` are the tensors of one, named and shaped as in its checkpoint on the
Hugging Face Hub, whole or cut for one rank; `manifest` is what that rank would publish; `scaled`
keeps the tensors' number and the small ones, and cuts the large ones down to what a test machine
can hold.

How a rank's part is cut: heads, MLPs and vocabularies by tensor parallelism, as frameworks do it:
what makes heads or inner features by rows, what takes them by columns, norms and routers whole.
Where there are more ranks than heads, several have the same one. Experts are dealt out whole
(expert parallelism), or cut like MLPs where there are more ranks than experts. What does not divide
is cut unevenly where a framework would pad it or refuse. Fused tensors (QKV, all experts of a layer
in one) are not made: frameworks fuse when they load, each in its own way.

Responsible for shapes only: no torch, and nothing is allocated. The figures are in
`configurations`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import NamedTuple

from benches.configurations import CONFIGURATIONS, Decoder, Encoder, LatentDecoder
from tensorhub.model.dtypes import ITEMSIZE
from tensorhub.model.manifest import Digest, Manifest, RegionSpec, TensorSpec
from tensorhub.types import Options


class _Cut(NamedTuple):
    """Along `dimension`, a tensor is so many equal units, which no rank gets a part of."""

    dimension: int
    units: int


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    cut: _Cut | None = None  # None: every rank has all of it
    expert: int | None = None  # which routed expert it belongs to


# --------------------------------------------------------------------------------------------------
# public


def models() -> tuple[str, ...]:
    """The names of all models, by family, each family from its smallest on."""
    return tuple(CONFIGURATIONS)


def shapes(
    name: str, *, ranks: int = 1, rank: int = 0
) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Each tensor's dtype (torch's name, "bfloat16") and shape, in layer order: of the checkpoint,
    or of one rank's part.

    Raises ValueError: there is no such model, or no such rank.
    """
    parts = _parts(name, ranks, rank)
    return {
        tensor.name: (tensor.dtype, tuple([stop - start for start, stop in slices]))
        for tensor, slices in parts
    }


def scaled(
    name: str, nbytes: int, *, ranks: int = 1, rank: int = 0
) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """As `shapes`, for `nbytes` or a little less (a row of each large tensor at most): the same
    tensors, of which the large ones have fewer rows. So tensors by MiB are more than in the model:
    what each tensor costs weighs more.

    Raises ValueError: as `shapes`; or the rows that have to stay, one of each tensor, take more
    than `nbytes`.
    """
    found = shapes(name, ranks=ranks, rank=rank)
    rows = [(shape[0], _row_bytes(dtype, shape)) for dtype, shape in found.values()]
    least, most = 0, nbytes
    while least < most:  # the most bytes that a tensor may have, so that all fit
        middle = (least + most + 1) // 2
        fits = sum(_rows_of(count, each, middle) * each for count, each in rows) <= nbytes
        least, most = (middle, most) if fits else (least, middle - 1)
    kept = [_rows_of(count, each, least) for count, each in rows]
    if sum(count * each for count, (_, each) in zip(kept, rows, strict=True)) > nbytes:
        raise ValueError(
            f"{name} cannot be scaled to {nbytes} bytes: one row of each tensor is more; take more "
            f"bytes or ranks"
        )
    items = zip(found.items(), kept, strict=True)
    return {tensor: (dtype, (count, *shape[1:])) for (tensor, (dtype, shape)), count in items}


def manifest(
    name: str,
    *,
    ranks: int = 1,
    rank: int = 0,
    chunk_bytes: int = Options().chunk_bytes,
    integrity: bool = True,
) -> Manifest:
    """What rank `rank` of `ranks` would publish: each tensor a region, with its place in the whole
    model.

    Raises ValueError: there is no such model, or no such rank.
    """
    parts = list(_parts(name, ranks, rank))
    specs = [
        TensorSpec(t.name, t.dtype, t.shape, slices, index, 0)
        for index, (t, slices) in enumerate(parts)
    ]
    regions = tuple(RegionSpec(spec.nbytes) for spec in specs)
    digest: Digest = "xxh3-64" if integrity else "none"
    return Manifest(tuple(specs), regions, chunk_bytes, digest, f"world/{ranks}")


def parameters(name: str) -> int:
    """How many parameters the family publishes for this model, scales of quantized weights not
    counted.
    """
    return _configuration(name).parameters


# --------------------------------------------------------------------------------------------------
# scaling


def _row_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return prod(shape[1:]) * ITEMSIZE[dtype]


def _rows_of(count: int, row_bytes: int, bytes_max: int) -> int:
    return max(1, min(count, bytes_max // row_bytes))


# --------------------------------------------------------------------------------------------------
# cutting


def _configuration(name: str) -> Encoder | Decoder | LatentDecoder:
    try:
        return CONFIGURATIONS[name]
    except KeyError:
        raise ValueError(
            f"there is no model {name!r}; there are {', '.join(CONFIGURATIONS)}"
        ) from None


def _parts(
    name: str, ranks: int, rank: int
) -> Iterator[tuple[_Tensor, tuple[tuple[int, int], ...]]]:
    """The tensors of which this rank has something, and which part of each."""
    configuration = _configuration(name)
    if not 0 <= rank < ranks:
        raise ValueError(f"there is no rank {rank} of {ranks}: ranks count from 0")
    experts = 0 if isinstance(configuration, Encoder) else configuration.experts
    for tensor in _tensors(configuration):
        if tensor.expert is None or ranks > experts:
            yield tensor, _slices(tensor, ranks, rank)
        elif experts * rank // ranks <= tensor.expert < experts * (rank + 1) // ranks:
            yield tensor, _slices(tensor, 1, 0)


def _slices(tensor: _Tensor, ranks: int, rank: int) -> tuple[tuple[int, int], ...]:
    slices = [(0, size) for size in tensor.shape]
    if tensor.cut is not None and ranks > 1:
        dimension, units = tensor.cut
        first = units * rank // ranks
        last = max(first + 1, units * (rank + 1) // ranks)
        size = tensor.shape[dimension]
        # whole blocks, where a scale is for a block
        slices[dimension] = (first * size // units, -(-last * size // units))
    return tuple(slices)


# -------------------------------------------------------------------------------------------------
# architectures


def _tensors(configuration: Encoder | Decoder | LatentDecoder) -> Iterator[_Tensor]:
    match configuration:
        case Encoder():
            return _encoder(configuration)
        case Decoder():
            return _decoder(configuration)
        case LatentDecoder():
            return _latent_decoder(configuration)


def _encoder(c: Encoder) -> Iterator[_Tensor]:
    """Not cut: no framework cuts models of this size."""

    def norm(name: str) -> Iterator[_Tensor]:
        yield _Tensor(f"{name}.LayerNorm.weight", "float32", (c.hidden,))
        yield _Tensor(f"{name}.LayerNorm.bias", "float32", (c.hidden,))

    def dense(name: str, rows: int, columns: int) -> Iterator[_Tensor]:
        yield _Tensor(f"{name}.weight", "float32", (rows, columns))
        yield _Tensor(f"{name}.bias", "float32", (rows,))

    yield _Tensor("embeddings.position_ids", "int64", (1, c.positions))
    for what, count in (
        ("word", c.vocabulary),
        ("position", c.positions),
        ("token_type", c.segments),
    ):
        yield _Tensor(f"embeddings.{what}_embeddings.weight", "float32", (count, c.hidden))
    yield from norm("embeddings")
    for layer in range(c.layers):
        at = f"encoder.layer.{layer}"
        for what in "query", "key", "value":
            yield from dense(f"{at}.attention.self.{what}", c.hidden, c.hidden)
        yield from dense(f"{at}.attention.output.dense", c.hidden, c.hidden)
        yield from norm(f"{at}.attention.output")
        yield from dense(f"{at}.intermediate.dense", c.intermediate, c.hidden)
        yield from dense(f"{at}.output.dense", c.hidden, c.intermediate)
        yield from norm(f"{at}.output")
    yield from dense("pooler.dense", c.hidden, c.hidden)


def _decoder(c: Decoder) -> Iterator[_Tensor]:
    yield _Tensor(
        "model.embed_tokens.weight", "bfloat16", (c.vocabulary, c.hidden), _Cut(0, c.vocabulary)
    )
    for layer in range(c.layers):
        at = f"model.layers.{layer}"
        yield from _attention(f"{at}.self_attn", c)
        yield from _experts(at, c) if c.experts else _mlp(f"{at}.mlp", c.hidden, c.intermediate)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if c.four_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for norm in norms:
            yield _Tensor(f"{at}.{norm}.weight", "bfloat16", (c.hidden,))
    yield _Tensor("model.norm.weight", "bfloat16", (c.hidden,))
    if not c.tied:
        yield _Tensor("lm_head.weight", "bfloat16", (c.vocabulary, c.hidden), _Cut(0, c.vocabulary))


def _attention(at: str, c: Decoder) -> Iterator[_Tensor]:
    for what, heads in ("q", c.heads), ("k", c.key_value_heads), ("v", c.key_value_heads):
        yield _Tensor(
            f"{at}.{what}_proj.weight", "bfloat16", (heads * c.head, c.hidden), _Cut(0, heads)
        )
        if c.qkv_bias:
            yield _Tensor(f"{at}.{what}_proj.bias", "bfloat16", (heads * c.head,), _Cut(0, heads))
    yield _Tensor(f"{at}.o_proj.weight", "bfloat16", (c.hidden, c.heads * c.head), _Cut(1, c.heads))
    if c.qk_norm:
        yield _Tensor(f"{at}.q_norm.weight", "bfloat16", (c.head,))
        yield _Tensor(f"{at}.k_norm.weight", "bfloat16", (c.head,))


def _mlp(at: str, hidden: int, inner: int) -> Iterator[_Tensor]:
    yield from _gated(at, ("gate_proj", "up_proj", "down_proj"), hidden, inner, None)


def _experts(at: str, c: Decoder) -> Iterator[_Tensor]:
    yield _Tensor(f"{at}.{c.expert_block}.gate.weight", "bfloat16", (c.experts, c.hidden))
    for expert in range(c.experts):
        its = f"{at}.{c.expert_block}.experts.{expert}"
        yield from _gated(its, c.expert_projections, c.hidden, c.expert_intermediate, expert)


def _gated(
    at: str, names: tuple[str, str, str], hidden: int, inner: int, expert: int | None
) -> Iterator[_Tensor]:
    gate, up, down = names
    for name in gate, up:
        yield _Tensor(f"{at}.{name}.weight", "bfloat16", (inner, hidden), _Cut(0, inner), expert)
    yield _Tensor(f"{at}.{down}.weight", "bfloat16", (hidden, inner), _Cut(1, inner), expert)


def _latent_decoder(c: LatentDecoder) -> Iterator[_Tensor]:
    yield _Tensor(
        "model.embed_tokens.weight", "bfloat16", (c.vocabulary, c.hidden), _Cut(0, c.vocabulary)
    )
    for layer in range(c.layers):
        at = f"model.layers.{layer}"
        yield from _latent_attention(f"{at}.self_attn", c)
        if layer < c.dense_layers:
            yield from _float8_mlp(f"{at}.mlp", c, c.intermediate)
        else:
            yield _Tensor(f"{at}.mlp.gate.weight", "bfloat16", (c.experts, c.hidden))
            yield _Tensor(f"{at}.mlp.gate.e_score_correction_bias", "float32", (c.experts,))
            for expert in range(c.experts):
                yield from _float8_mlp(
                    f"{at}.mlp.experts.{expert}", c, c.expert_intermediate, expert
                )
            yield from _float8_mlp(
                f"{at}.mlp.shared_experts", c, c.shared_experts * c.expert_intermediate
            )
        yield _Tensor(f"{at}.input_layernorm.weight", "bfloat16", (c.hidden,))
        yield _Tensor(f"{at}.post_attention_layernorm.weight", "bfloat16", (c.hidden,))
    yield _Tensor("model.norm.weight", "bfloat16", (c.hidden,))
    yield _Tensor("lm_head.weight", "bfloat16", (c.vocabulary, c.hidden), _Cut(0, c.vocabulary))


def _latent_attention(at: str, c: LatentDecoder) -> Iterator[_Tensor]:
    queries, keys_and_values = c.head_nope + c.head_rope, c.head_nope + c.head_value
    yield from _float8(f"{at}.q_a_proj", (c.query_rank, c.hidden), None, c.block)
    yield _Tensor(f"{at}.q_a_layernorm.weight", "bfloat16", (c.query_rank,))
    yield from _float8(
        f"{at}.q_b_proj", (c.heads * queries, c.query_rank), _Cut(0, c.heads), c.block
    )
    yield from _float8(
        f"{at}.kv_a_proj_with_mqa", (c.key_value_rank + c.head_rope, c.hidden), None, c.block
    )
    yield _Tensor(f"{at}.kv_a_layernorm.weight", "bfloat16", (c.key_value_rank,))
    yield from _float8(
        f"{at}.kv_b_proj", (c.heads * keys_and_values, c.key_value_rank), _Cut(0, c.heads), c.block
    )
    yield from _float8(
        f"{at}.o_proj", (c.hidden, c.heads * c.head_value), _Cut(1, c.heads), c.block
    )


def _float8_mlp(
    at: str, c: LatentDecoder, inner: int, expert: int | None = None
) -> Iterator[_Tensor]:
    for name in "gate_proj", "up_proj":
        yield from _float8(
            f"{at}.{name}", (inner, c.hidden), _Cut(0, inner // c.block), c.block, expert
        )
    yield from _float8(
        f"{at}.down_proj", (c.hidden, inner), _Cut(1, inner // c.block), c.block, expert
    )


def _float8(
    name: str, shape: tuple[int, int], cut: _Cut | None, block: int, expert: int | None = None
) -> Iterator[_Tensor]:
    scales = (-(-shape[0] // block), -(-shape[1] // block))
    yield _Tensor(f"{name}.weight", "float8_e4m3fn", shape, cut, expert)
    yield _Tensor(f"{name}.weight_scale_inv", "float32", scales, cut, expert)
