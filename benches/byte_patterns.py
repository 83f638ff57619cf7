"""Tensors whose every word says which content it belongs to, whose part it is, and where it is: one
look proves all bytes.

Nothing of the library is used here: it is what checks the library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

Tensors = Mapping[str, npt.NDArray[np.uint64]]

CONTENT_BITS = 24
PLACE_BITS = 36  # of a word's number within its tensor; between them: the rank and the tensor


def make(nbytes: int) -> dict[str, npt.NDArray[np.uint64]]:
    """Two tensors of `nbytes` together, all zero."""
    return {part: np.zeros(nbytes // 16, np.uint64) for part in ("a", "b")}


def write(memory: Tensors, content: int, rank: int = 0) -> None:
    for tensor, first in zip(memory.values(), _firsts(content, rank), strict=True):
        tensor[:] = np.arange(len(tensor), dtype=np.uint64) + np.uint64(first)


def read(path: Path) -> dict[str, npt.NDArray[np.uint64]]:
    """The tensors of a safetensors file, read by its format alone: a length, a JSON header, the
    bytes.
    """
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    spans = {
        name: entry["data_offsets"]
        for name, entry in sorted(header.items())
        if name != "__metadata__"
    }
    return {
        name: np.frombuffer(data[start + first : start + end], np.uint64)
        for name, (first, end) in spans.items()
    }


def contents(memory: Tensors, rank: int = 0) -> set[int]:
    """Which contents' words are there; one that no content has shows as a number that nobody wrote,
    or as several.
    """
    found: set[int] = set()
    for tensor, first in zip(memory.values(), _firsts(0, rank), strict=True):
        words = tensor - np.uint64(first) - np.arange(len(tensor), dtype=np.uint64)
        if words.size and words.min() == words.max() and not int(words[0]) % 2**40:
            found.add(int(words[0]) >> 40)
        else:
            found.update(
                int(word) >> 40 if not int(word) % 2**40 else -1 for word in np.unique(words)[:16]
            )
    return found


def _firsts(content: int, rank: int) -> tuple[int, int]:
    return tuple((content << 40) + (2 * rank + part << PLACE_BITS) for part in range(2))  # type: ignore[return-value]
