"""A channel that reads a selection, driven in the numbers of the reader's own grid."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from tensorhub.transport.base import Arrival, Channel, Lacking


class NumberedChannel:
    """See `transport.base.Channel`. `numbers`: those of the selection's chunks in the reader's grid, ascending."""

    def __init__(self, channel: Channel, numbers: Sequence[int]) -> None:
        self._channel = channel
        self._numbers = numbers

    def __repr__(self) -> str:
        return f"<NumberedChannel of {len(self._numbers)} chunks: {self._channel!r}>"

    def submit(self, chunks: Sequence[int]) -> None:
        self._channel.submit([bisect_left(self._numbers, chunk) for chunk in chunks])

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        answer, numbers = self._channel.receive(bytes_max), self._numbers
        if isinstance(answer, Lacking):
            return Lacking([numbers[chunk] for chunk in answer.chunks], ())
        chunks = [(numbers[chunk], digest) for chunk, digest in answer.chunks]
        return answer._replace(chunks=chunks, made={numbers[chunk]: digest for chunk, digest in answer.made.items()})

    def close(self) -> None:
        self._channel.close()
