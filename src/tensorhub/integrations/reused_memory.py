"""Host memory for tensors that come and go: memory that is no longer used is filled again.

Fresh memory has no pages yet, and to get them can take longer than to fill them. Here the memory of
some tensors comes back once the last of them is gone, with all views of them, and the next ones of
as many bytes are made in it.

Responsible for that memory. Not responsible for its contents, nor for memory of GPUs, which torch
itself keeps.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

KEPT_MAX: Final = 2  # unused pieces of memory: those that became unused last
SMALL_BYTES: Final = 2**20  # less is allocated anew: a few pages are not dear
ALIGNMENT: Final = 64  # as torch's own

Piece = npt.NDArray[np.uint8]


class ReusedMemory:
    """Any thread may use it; memory comes back on whichever one the last tensor goes."""

    def __init__(self) -> None:
        # its calls are atomic: a piece is taken out by one thread
        self._free: deque[Piece] = deque(maxlen=KEPT_MAX)

    def __repr__(self) -> str:
        return (
            f"<ReusedMemory that keeps {sum(piece.nbytes for piece in list(self._free)):,} bytes>"
        )

    def tensors(self, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
        """Tensors with any content, of these shapes and dtypes, each with a storage of its own."""
        sizes = [dtype.itemsize * math.prod(shape) for shape, dtype in kinds]
        offsets = [0, *itertools.accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]
        if offsets[-1] < SMALL_BYTES:
            return [torch.empty(tuple(shape), dtype=dtype) for shape, dtype in kinds]
        lent = self._lend(offsets.pop() + ALIGNMENT)
        lent = lent[-lent.ctypes.data % ALIGNMENT :]
        made = [
            torch.from_numpy(lent[offset:][:size])
            for offset, size in zip(offsets, sizes, strict=True)
        ]
        return [
            each.view(dtype).view(tuple(shape))
            for each, (shape, dtype) in zip(made, kinds, strict=True)
        ]

    def _lend(self, nbytes: int) -> Piece:
        piece = self._taken(nbytes)
        loan = _Loan(piece)
        weakref.finalize(loan, self._free.append, piece).atexit = False
        return np.asarray(loan)

    def _taken(self, nbytes: int) -> Piece:
        for _ in range(KEPT_MAX):
            try:
                piece = self._free.popleft()
            except IndexError:
                break
            if piece.nbytes == nbytes:
                return piece
            self._free.append(piece)
        return np.empty(nbytes, np.uint8)


class _Loan:
    """numpy and torch hold it as long as they refer to the piece."""

    def __init__(self, piece: Piece) -> None:
        self.__array_interface__ = piece.__array_interface__
