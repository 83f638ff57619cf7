"""Copying chunks from one memory of this worker to another: no network, but equal rights and equal
digests.

Each batch is an access at the source's owner (R3), so that a fence waits for it. Responsible for
which chunk is copied from which source, and for what counts as missing. Not responsible for which
copies there are (`worker.local_copies`), nor for bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tensorhub.messages import Origin
from tensorhub.model.accesses import CHUNKS_PER_ACCESS_MAX, Access, Refusal, Wait
from tensorhub.worker.calls import LocalCopy

M = TypeVar("M")


class Arrived(Protocol):
    """See `Owner.mark_available`."""

    def __call__(
        self, named: Sequence[tuple[int, int | None]], origin: Origin | None
    ) -> object: ...


@dataclass(frozen=True, slots=True)
class Copier(Generic[M]):
    """How one copy is made. `access`: some of the wanted chunks of a source, to be read for the
    length of the block. `move`: brings an access' chunks, and returns those that have their digests
    then. `arrived` hears which chunks are in the destination, and where the source had read them,
    if it had: so a worker that holds wrong bytes is found behind copies.
    """

    access: Callable[
        [LocalCopy, Sequence[int]], AbstractContextManager[tuple[Access, M] | Wait | Refusal]
    ]
    origins: Callable[[Access], Sequence[Origin | None]]
    move: Callable[[Access, M], Mapping[int, int | None]]
    arrived: Arrived

    def copy(
        self, sources: Sequence[LocalCopy], count: int, there: frozenset[int]
    ) -> frozenset[int]:
        """Copy those of `count` chunks that are not `there`; returns all that are there then. A
        damaged chunk is missing.
        """
        missing = [chunk for chunk in range(count) if chunk not in there]
        for source in sources:
            left: list[int] = []
            for first in range(0, len(missing), CHUNKS_PER_ACCESS_MAX):
                window = missing[first : first + CHUNKS_PER_ACCESS_MAX]
                copied = {chunk for batch in self._copy_from(source, window) for chunk in batch}
                left += [chunk for chunk in window if chunk not in copied]
            missing = left
        return frozenset(range(count)) - frozenset(missing)

    def _copy_from(
        self, source: LocalCopy, wanted: Sequence[int]
    ) -> Iterator[Mapping[int, int | None]]:
        """Batch by batch, until the source has no wanted chunk left."""
        while wanted:
            with self.access(source, wanted) as answer:
                if not isinstance(answer, tuple):
                    # none of them is verified there, or the memory has changed its generation
                    return
                access, memory = answer
                good, origins = self.move(access, memory), self.origins(access)
            copied: dict[Origin | None, list[tuple[int, int | None]]] = {}
            for chunk, origin in zip(access.chunks, origins, strict=True):
                if chunk in good:
                    copied.setdefault(origin, []).append((chunk, good[chunk]))
            for origin, named in copied.items():
                self.arrived(named, origin)
            yield good
            wanted = access.rest
