"""torch's dtypes, without torch: bytes per element, which of them are quantized, and which tensors
of them there can be.

Not responsible for names and slices of tensors (`manifest`), nor for torch's own objects
(`memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, prod

from tensorhub.errors import ManifestMismatch

INT_MAX = 2**63 - 1

# Bytes per element, by torch's names, counted as torch counts those with several values per byte
# ("bits4x2").
ITEMSIZE: Mapping[str, int] = {
    name: size
    for size, names in {
        1: "bool int8 uint8 qint8 quint8 quint4x2 quint2x4 bits1x8 bits2x4 bits4x2 bits8 "
        "float4_e2m1fn_x2 "
        "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu "
        "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7",
        2: "float16 bfloat16 int16 uint16 bits16",
        4: "float32 int32 uint32 qint32 complex32",
        8: "float64 int64 uint64 complex64",
        16: "complex128",
    }.items()
    for name in names.split()
}
# a scale and a zero point are a part of such a tensor
QUANTIZED = frozenset({"qint8", "quint8", "qint32"})
ZERO_POINT_MIN, ZERO_POINT_MAX = -(2**31), 2**31 - 1

Quantization = tuple[float, int]  # scale, zero point: of all elements of a tensor


def itemsize(dtype: str) -> int:
    """Bytes per element of a torch dtype ("bfloat16", without "torch."); ManifestMismatch if
    unknown.
    """
    try:
        return ITEMSIZE[dtype]
    except KeyError:
        raise ManifestMismatch(f"dtype {dtype!r} is unknown to this version of TensorHub") from None


def shape_fault(shape: Sequence[int], dtype: str) -> str | None:
    """Why torch has no tensor of these sizes, from 0 to 2**63 - 1, and this known dtype; None if it
    has.
    """
    # also without an element: its strides overflow
    if prod([size or 1 for size in shape]) * ITEMSIZE[dtype] > INT_MAX:
        return f"its shape {tuple(shape)} takes 2**63 bytes or more, where a size of 0 counts as 1"
    return None


def quantization_fault(dtype: str, quantization: Quantization | None) -> str | None:
    """Why a tensor of this dtype cannot have this scale and zero point; None if it can."""
    if (quantization is not None) != (dtype in QUANTIZED):
        return (
            f"a scale and a zero point belong to {', '.join(sorted(QUANTIZED))}, and to no "
            f"other dtype (this is {dtype})"
        )
    if quantization is None:
        return None
    scale, zero_point = quantization
    if not (type(scale) is float and 0 < scale < inf):
        return f"its scale {scale!r} is not a positive, finite number"
    if not (type(zero_point) is int and ZERO_POINT_MIN <= zero_point <= ZERO_POINT_MAX):
        return f"its zero point {zero_point!r} is not within {ZERO_POINT_MIN} to {ZERO_POINT_MAX}"
    return None
