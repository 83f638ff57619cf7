"""The header of a safetensors file: names, dtypes and shapes, without torch and without reading a weight.

Format: https://huggingface.co/docs/safetensors/index (8 bytes little-endian length, JSON, data).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HEADER_BYTES_MAX = 100_000_000  # the format's own limit

TORCH_NAMES = {  # the file's name of a dtype: torch's
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a file: `dtype` under torch's name, its size in the file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def read_header(path: Path) -> dict[str, TensorSpec]:
    """The tensors of the file by name.

    OSError if it cannot be read; ValueError, naming file and reason, if it is not a whole safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_BYTES_MAX):
            raise ValueError(f"{path} is not a safetensors file: it does not begin with a header")
        text = file.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        specs = {name: _spec(entry) for name, entry in entries.items()}
        end = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file: its header cannot be read ({error!r})") from error
    if not specs or end != size - 8 - length:
        raise ValueError(f"{path} is not a whole safetensors file: header and length disagree, or it is empty")
    return specs


def _spec(entry: dict[str, object]) -> TensorSpec:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError("dtype, shape or data_offsets is of the wrong type")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, *offsets)):
        raise ValueError("a shape or an offset is not a number from 0")
    start, end = offsets
    return TensorSpec(TORCH_NAMES[dtype], tuple(shape), end - start)


def allocate(specs: dict[str, TensorSpec]) -> dict[str, torch.Tensor]:
    """Zeroed CPU tensors of these names, shapes and dtypes, in pages that have been touched.

    ValueError if a shape and the size in the file disagree.
    """
    import torch

    tensors = {}
    for name, spec in specs.items():
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if math.prod(spec.shape) * dtype.itemsize != spec.nbytes:
            raise ValueError(f"the header is wrong: {name} has shape {spec.shape} but {spec.nbytes} bytes")
        tensors[name] = torch.empty(spec.shape, dtype=dtype).zero_()
    return tensors
