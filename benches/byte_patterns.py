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
ATTEMPTS = 1024  # contents of one version: its number times this, and the attempt


def make(nbytes: int) -> dict[str, npt.NDArray[np.uint64]]:
    """Two tensors of `nbytes` together, all zero."""
    return {part: np.zeros(nbytes // 16, np.uint64) for part in ("a", "b")}


def write(memory: Tensors, content: int, rank: int = 0, stripes: int = 1) -> None:
    """Of so many words in a row (`stripes`) the first says the content. Each of the others changes
    at one version in so many, so that the next version changes at most two of these words.
    """
    for tensor, first in zip(memory.values(), _firsts(rank), strict=True):
        places = np.arange(len(tensor), dtype=np.uint64) + np.uint64(first)
        tensor[:] = places + np.resize(_said(content, stripes), len(tensor))


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


def contents(memory: Tensors, rank: int = 0, stripes: int = 1) -> set[int]:
    """Which contents' words are there; one that no content has shows as a number that nobody wrote,
    or as several.
    """
    found: set[int] = set()
    for tensor, first in zip(memory.values(), _firsts(rank), strict=True):
        words = tensor - np.uint64(first) - np.arange(len(tensor), dtype=np.uint64)
        told = words[::stripes]
        is_one = told.size and told.min() == told.max()
        told = told[:1] if is_one else np.unique(told)[:16]
        found.update(int(word) >> 40 if not int(word) % 2**40 else -1 for word in told)
        if is_one and stripes > 1:
            said = np.resize(_said(int(told[0]) >> 40, stripes), len(words))
            found.update([-1] if (words != said).any() else [])
    return found


def _said(content: int, stripes: int) -> npt.NDArray[np.uint64]:
    """What `stripes` words in a row say, without their places."""
    said = [content, *((content // ATTEMPTS + n) // stripes for n in range(1, stripes))]
    return np.array(said, np.uint64) << np.uint64(40)


def _firsts(rank: int) -> tuple[int, int]:
    return (2 * rank << PLACE_BITS, 2 * rank + 1 << PLACE_BITS)
