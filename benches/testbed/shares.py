"""What a rank has of a model: tensors whose every word says which version it belongs to, and where
in the whole model it is.

So one look proves all bytes, whatever the layout. Nothing of the library is used here: it is what
checks the library. `Real` has what a model that is trained has, instead: deltas need that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

TENSORS: Final = ("a", "b")
# words of a row of a model that several ranks share: runs of 2 KiB for one of two that cut by
# columns
COLUMNS: Final = 512
_VERSION_BITS: Final = 40  # below a word's version: its tensor, and its place in the whole tensor
_TENSOR_BITS: Final = 36

Words = npt.NDArray[np.uint64]


class Share:
    """`tensors`: two, of `nbytes` together, as rank `rank` of `ranks` has them, cut by "rows" or by
    "columns".
    """

    def __init__(self, nbytes: int, rank: int = 0, ranks: int = 1, cut: str = "rows") -> None:
        words = nbytes // 8 // len(TENSORS)
        if ranks == 1:
            self.whole: tuple[int, ...] = (words,)
            self.part: tuple[slice, ...] = (slice(0, words),)
        else:
            rows = words * ranks // COLUMNS // ranks * ranks
            self.whole = (rows, COLUMNS)
            along = COLUMNS if cut == "columns" else rows
            mine = slice(along * rank // ranks, along * (rank + 1) // ranks)
            self.part = (slice(0, rows), mine) if cut == "columns" else (mine, slice(0, COLUMNS))
        every = np.arange(int(np.prod(self.whole)), dtype=np.uint64).reshape(self.whole)
        self._places: Words = np.ascontiguousarray(every[self.part])
        self.tensors: dict[str, Words] = {name: np.zeros_like(self._places) for name in TENSORS}
        self.write(0)  # so that every page has been touched

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def write(self, version: int) -> None:
        for number, tensor in enumerate(self.tensors.values()):
            np.add(
                self._places,
                np.uint64((version << _VERSION_BITS) + (number << _TENSOR_BITS)),
                out=tensor,
            )

    def versions(self) -> list[int]:
        """Whose words are there; -1 for words that are of no version, or in another's place."""
        found: set[int] = set()
        for number, tensor in enumerate(self.tensors.values()):
            rest = tensor - self._places - np.uint64(number << _TENSOR_BITS)
            least, most = (
                int(rest.min(initial=0 if not rest.size else rest.flat[0])),
                int(rest.max(initial=0)),
            )
            seen = [least] if least == most else [int(word) for word in np.unique(rest)[:16]]
            found.update(
                word >> _VERSION_BITS if not word % 2**_VERSION_BITS else -1 for word in seen
            )
        return sorted(found)


class Real(Share):
    """One rank's: two tensors of 2-byte words, with the versions of a file one after the other."""

    def __init__(self, nbytes: int, file: Path) -> None:
        self._stored = np.memmap(file, np.float16, "r").reshape(-1, len(TENSORS), nbytes // 4)
        self.whole = (self._stored.shape[2],)
        self.part = (slice(0, self._stored.shape[2]),)
        self.tensors: dict[str, Any] = {name: np.zeros(self.whole, np.float16) for name in TENSORS}

    def write(self, version: int) -> None:
        for tensor, stored in zip(self.tensors.values(), self._stored[version - 1], strict=True):
            tensor[:] = stored

    def versions(self) -> list[int]:
        here = [tensor.view(np.uint16) for tensor in self.tensors.values()]
        for number, stored in enumerate(self._stored.view(np.uint16), 1):
            if all(map(np.array_equal, here, stored)):
                return [number]
        return [-1]
