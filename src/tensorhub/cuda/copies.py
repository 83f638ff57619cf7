"""Many pieces, as few copies of a device's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tensorhub.cuda.device import Queue

# of one call: more go by one kernel, since starting a copy takes some microseconds
PIECES_COPIED_APART = 8

Piece = tuple[int, int, int]
"""(to, source, bytes)."""


def copy_pieces(queue: Queue, pieces: Iterable[Piece], *, by_kernel: bool = True) -> None:
    """Queue copies of these. `by_kernel`: the device's kernels can read and write all of them."""
    found = list(joined(pieces))
    if by_kernel and len(found) > PIECES_COPIED_APART:
        queue.copy_many(found)
    else:
        for piece in found:
            copy(queue, *piece)


def copy(queue: Queue, to: int, source: int, nbytes: int) -> None:
    """Queue one copy, in parts where it crosses from one allocation to the next: those of several
    tensors may be adjacent, and CUDA refuses a copy that is in two of them ("invalid argument").
    """
    while nbytes:
        part = min(nbytes, queue.room(to), queue.room(source))
        queue.copy(to, source, part)
        to, source, nbytes = to + part, source + part, nbytes - part


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """`pieces`, with pieces that are adjacent at both ends joined; none is empty."""
    last: Piece | None = None
    for to, source, nbytes in pieces:
        if last is not None and (last[0] + last[2], last[1] + last[2]) == (to, source):
            last = last[0], last[1], last[2] + nbytes
        else:
            if last is not None and last[2]:
                yield last
            last = to, source, nbytes
    if last is not None and last[2]:
        yield last
