"""Samples some bytes of many torch tensors, cheaply, to see later whether any tensor has changed.

All samples have equal pieces, spread evenly over each tensor: about a MiB in all. A tensor that is no larger than its
share is taken whole. torch gathers and compares the pieces where the tensors are, in the order of the caller's stream. So
the caller does not wait for a GPU before there is something to compare.

torch is never imported here. A caller with a tensor has imported its library already.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

SAMPLE_BYTES = 2**20  # of all tensors together, about
SHARE_BYTES_MIN = 64  # of each tensor, however many there are
PIECES = 1024  # of all tensors together, about
PIECES_OF_TENSOR_MAX = 16


class Sample:
    """`tensors`: strided, all on one device; their memory must exist whenever `take` is called."""

    def __init__(self, tensors: Sequence[Any]) -> None:
        self._pieces = list(_pieces(tensors))

    def __repr__(self) -> str:
        return f"<Sample of {sum(piece.numel() for piece in self._pieces)} bytes in {len(self._pieces)} pieces>"

    def take(self) -> Any:
        """What these bytes are now, as a tensor on their device; None: torch cannot gather them there."""
        try:
            return sys.modules["torch"].cat(self._pieces) if self._pieces else None
        except RuntimeError:  # no memory, most likely: then nothing is known
            return None

    def is_still(self, taken: Any) -> bool:
        """Whether these bytes are what they were when that was taken; waits for the device."""
        now = self.take()
        return taken is not None and now is not None and bool(sys.modules["torch"].equal(taken, now))


def _pieces(tensors: Sequence[Any]) -> Iterator[Any]:
    """Each as a view of bytes, with no share in its tensor's count of writes."""
    share = max(SAMPLE_BYTES // max(len(tensors), 1), SHARE_BYTES_MIN)
    count = min(max(PIECES // max(len(tensors), 1), 1), PIECES_OF_TENSOR_MAX)
    torch = sys.modules["torch"]
    for tensor in tensors:
        storage, first = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
        for start, nbytes in _places(tensor.numel() * tensor.element_size(), share, count):
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, first + start, (nbytes,))


def _places(nbytes: int, share: int, count: int) -> Iterable[tuple[int, int]]:
    """(start, size) of the sampled pieces of so many bytes: from the first byte to the last."""
    if nbytes <= share:
        return [(0, nbytes)] if nbytes else []
    size, gaps = share // count, max(count - 1, 1)
    return [((nbytes - size) * index // gaps, size) for index in range(count)]
