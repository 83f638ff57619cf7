"""PURE. Lossless deltas: what changes one chunk's bytes in one version into its bytes in the next.

A frame lists the words that differ (`frames`): the gaps between them, and the zigzag of each
integer difference, compressed with zstd level 1. Between two steps of an optimizer 1 to 5 % of the
bf16 words differ, most of them by one ulp, so a frame takes 1 to 2 % of the chunk.

Responsible for one chunk. Not responsible for which chunk of which version a frame is of, nor for
the truth of a result: a frame that is applied to other bytes than its base makes wrong ones, and
applied twice, too. So the caller digests the base before `apply`, and the result after it.

Words have one width in a chunk, that of most bytes of its region (`word_widths`). A chunk is of one
region, a region is one tensor or tied ones, and tensors of several dtypes meet in the region of
packed tiny tensors only. A wrong width makes a longer frame, never a wrong one.

Needs numpy and zstandard (the extra `delta`), which are imported by the first call. Both let go of
the GIL in what takes time, so two threads are nearly as fast as two processes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from tensorhub.errors import StateError, install
from tensorhub.model.dtypes import ITEMSIZE
from tensorhub.model.manifest import Manifest

__all__ = ["Counts", "Listed", "advance", "apply", "encode", "fault_here", "listed", "word_widths"]


class Counts(NamedTuple):
    """The words of which a frame, or several, are; how many of these the frames change."""

    words: int = 0
    changed: int = 0

    def and_of(self, other: Counts) -> Counts:
        return Counts(self.words + other.words, self.changed + other.changed)


class Listed(NamedTuple):
    """Words of a chunk that differ from their base, at most half of all: what a device finds, or
    applies, where the chunk is. `places`: their numbers, ascending, of 4 bytes each; `differences`:
    new - old, each of a word's bytes.
    """

    places: memoryview
    differences: memoryview


def fault_here() -> str | None:
    """Why no delta can be made or applied here, and what to do; None if they can."""
    try:
        _codec()
    except StateError as error:
        return str(error)
    return None


def encode(base: memoryview, new: memoryview, width: int) -> bytes | None:
    """The frame that makes `new` of `base`, by words of 1, 2 or 4 bytes; None: it would save too
    little, so the chunk itself is what to send.

    Neither may change meanwhile. StateError: the extra is not installed.
    """
    frame: bytes | None = _codec().encode(base, new, width)
    return frame


def apply(frames: Sequence[bytes | bytearray | memoryview], target: memoryview) -> Counts:
    """Make the new bytes of `target`, which holds the base, in place; returns how many words that
    changes. Of several frames, each is applied to what the one before makes. Only words that differ
    are written, or all where more than half do. No frame may change meanwhile.


    ProtocolError: one of them is no frame, or none for so many bytes. It has written nothing; those
    before it may have. StateError: the extra is not installed.
    """
    counts: Counts = _codec().apply(frames, target)
    return counts


def advance(base: memoryview, changes: Listed, width: int) -> bytes | None:
    """Make the new bytes of `base`, which is of whole 8 bytes, in place. Returns what `encode`
    would. StateError: the extra is not installed.
    """
    frame: bytes | None = _codec().advance(base, changes, width)
    return frame


def listed(frame: bytes | bytearray | memoryview, nbytes: int) -> tuple[Listed, int, Counts] | None:
    """What that frame would add to a chunk of so many bytes, the bytes of a word, and what `apply`
    would return. None: it is more than some words. Raises as `apply` does.
    """
    found: tuple[Listed, int, Counts] | None = _codec().listed(frame, nbytes)
    return found


def word_widths(manifest: Manifest) -> tuple[int, ...]:
    """The bytes of a word in each region's chunks: 1 of fp8 and int8, 2 of bf16, else 4."""
    widths = []
    for tensors in manifest.by_region:
        nbytes = Counter[int]()
        for tensor in tensors:
            nbytes[min(ITEMSIZE[tensor.dtype], 4)] += tensor.nbytes
        widths.append(nbytes.most_common(1)[0][0])
    return tuple(widths)


def _codec() -> ModuleType:
    try:
        from tensorhub.deltas import codec
    except ImportError as error:
        raise StateError(f"deltas need numpy and zstandard ({error}): {install('delta')}") from None
    return codec
