"""Copying chunks from one memory of this worker to another: no network, but the same rights and the same digests.

Each batch is an access at the source's owner (R3), so that a fence waits for it. Responsible for what is copied from which
source, and for what counts as missing. Not responsible for which copies there are (`worker.local_copies`), nor for bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tensorhub.accesses import CHUNKS_PER_ACCESS_MAX, Access, Refusal, Wait
from tensorhub.messages import Origin
from tensorhub.worker.calls import LocalCopy

M = TypeVar("M")


class Arrived(Protocol):
    """See `Owner.mark_available`."""

    def __call__(self, named: Sequence[tuple[int, int | None]], origin: Origin | None, *, enclosed: bool) -> object: ...


@dataclass(frozen=True, slots=True)
class Copier(Generic[M]):
    """How one copy is made. `access`: some of the wanted chunks of a source, to be read for the length of the block. `move`:
    brings an access' chunks, and returns those that have their digests then. `arrived` hears which chunks are in the
    destination, where the source had read them, if it had, and whether with what encloses them: so whoever holds wrong bytes
    is found behind copies, too, and copies are as well vouched for as what they were made from.
    """

    access: Callable[[LocalCopy, Sequence[int]], AbstractContextManager[tuple[Access, M] | Wait | Refusal]]
    read_how: Callable[[Access], Sequence[tuple[Origin | None, bool]]]
    move: Callable[[Access, M], Mapping[int, int | None]]
    arrived: Arrived

    def copy(self, sources: Sequence[LocalCopy], count: int, there: frozenset[int]) -> frozenset[int]:
        """Copy what is not `there` of `count` chunks; returns all that is then. What arrives damaged counts as missing."""
        missing = [chunk for chunk in range(count) if chunk not in there]
        for source in sources:
            left: list[int] = []
            for first in range(0, len(missing), CHUNKS_PER_ACCESS_MAX):
                window = missing[first : first + CHUNKS_PER_ACCESS_MAX]
                copied = {chunk for batch in self._copy_from(source, window) for chunk in batch}
                left += [chunk for chunk in window if chunk not in copied]
            missing = left
        return frozenset(range(count)) - frozenset(missing)

    def _copy_from(self, source: LocalCopy, wanted: Sequence[int]) -> Iterator[Mapping[int, int | None]]:
        """Batch by batch, until the source has nothing more of what is wanted."""
        while wanted:
            with self.access(source, wanted) as answer:
                if not isinstance(answer, tuple):
                    return  # none of them is verified there, or the memory has changed its generation
                access, memory = answer
                good, read_how = self.move(access, memory), self.read_how(access)
            copied: dict[tuple[Origin | None, bool], list[tuple[int, int | None]]] = {}
            for chunk, how in zip(access.chunks, read_how, strict=True):
                if chunk in good:
                    copied.setdefault(how, []).append((chunk, good[chunk]))
            for (origin, enclosed), named in copied.items():
                self.arrived(named, origin, enclosed=enclosed)
            yield good
            wanted = access.rest
