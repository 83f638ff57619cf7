"""Matrices whose every word says which content it belongs to, which matrix and where, and what
ranks have of them.

Nothing of the library but `source` is used here: it is what checks the library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

import tensorhub

Words = npt.NDArray[np.uint64]
Index = tuple[slice, ...]

# 61 MB; of the sizes only one divides
SHAPES = {"up": (1001, 2560), "gate": (1001, 2560), "down": (2560, 1001)}
MATRICES = tuple(SHAPES)


def whole(name: str, content: int) -> Words:
    rows, columns = SHAPES[name]
    first = (content << 40) + (MATRICES.index(name) << 36)
    return (np.arange(rows * columns, dtype=np.uint64) + np.uint64(first)).reshape(rows, columns)


def share(size: int, rank: int, ranks: int) -> slice:
    """As `torch.chunk` cuts."""
    each = -(-size // ranks)
    return slice(min(size, rank * each), min(size, (rank + 1) * each))


@dataclass(frozen=True)
class Part:
    """What one rank has: tensors, each of one or more pieces, which lie in it one after the
    other.
    """

    pieces: dict[str, Sequence[tuple[str, Index]]]

    def made(self, content: int) -> dict[str, Words]:
        return {
            name: np.concatenate([whole(each, content)[index] for each, index in pieces])
            for name, pieces in self.pieces.items()
        }

    def sources(self) -> dict[str, object]:
        return {
            name: [tensorhub.source(each, shape=SHAPES[each])[index] for each, index in pieces]
            for name, pieces in self.pieces.items()
        }


def by_rows(rank: int, ranks: int) -> Part:
    """A trainer's, cut as FSDP2 cuts."""
    return Part({name: [(name, (share(rows, rank, ranks),))] for name, (rows, _) in SHAPES.items()})


def by_columns(rank: int, ranks: int) -> Part:
    """A tensor-parallel engine's, with gate and up as one."""
    rows, columns = share(1001, rank, ranks), share(1001, rank, ranks)
    return Part(
        {
            "gate_up": [("gate", (rows,)), ("up", (rows,))],
            "down": [("down", (slice(None), columns))],
        }
    )


PARTS = {"rows": by_rows, "columns": by_columns}
