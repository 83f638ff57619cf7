"""Copying chunks from one memory of this worker to another: no network, but the same rights and the same digests.

Each batch is an access at the source's owner (R3), so that a fence waits for it. Responsible for copying, and for checking
each chunk's digest at the destination. Not responsible for which copies there are (`worker.local_copies`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tensorhub.accesses import CHUNKS_PER_ACCESS_MAX, Access
from tensorhub.memory.chunks import ChunkMemory, move_chunks
from tensorhub.messages import Origin
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.types import ContentId, RegistrationId
from tensorhub.worker.calls import LocalCopy

ACCESS_BYTES = 32 * 2**20  # copied before a fence gets its turn

Arrived = Callable[[Sequence[tuple[int, int | None]], Origin | None], object]
"""Hears which chunks are in the destination, with their digests, and where the source had read them, if it had: so whoever
holds wrong bytes is found behind copies, too.
"""


class _Step(NamedTuple):
    copied: dict[Origin | None, list[tuple[int, int | None]]]
    missed: list[int]  # of what was wanted from this source


def copy_chunks(
    owner: SharedOwner,
    sources: Sequence[LocalCopy],
    content_id: ContentId,
    destination: ChunkMemory,
    there: frozenset[int],
    arrived: Arrived,
    check: Callable[[], object],
) -> frozenset[int]:
    """Copy what is not `there` of this content; returns all that is then. Blocks: for a thread.

    Digests that nobody has made yet are made from the source, and each chunk is digested again where it has arrived; one
    that is damaged counts as missing. `check` is called before each chunk and ends it by raising.
    """
    missing = [chunk for chunk in range(len(destination.sizes)) if chunk not in there]
    for source in sources:
        left: list[int] = []
        for first in range(0, len(missing), CHUNKS_PER_ACCESS_MAX):
            window = missing[first : first + CHUNKS_PER_ACCESS_MAX]
            missed = window
            for step in _copy_from(owner, source, content_id, destination, window, check):
                for origin, copied in step.copied.items():
                    arrived(copied, origin)
                missed = step.missed
            left += missed
        missing = left
    return frozenset(range(len(destination.sizes))) - frozenset(missing)


def _copy_from(
    owner: SharedOwner,
    source: LocalCopy,
    content_id: ContentId,
    destination: ChunkMemory,
    wanted: Sequence[int],
    check: Callable[[], object],
) -> Iterator[_Step]:
    """Batch by batch, until the source has nothing more of what is wanted."""
    registration, damaged = RegistrationId(source.registration), list[int]()
    while wanted:
        with owner.access(None, registration, source.generation, content_id, wanted, ACCESS_BYTES, patience_s=0) as answer:
            if not isinstance(answer, tuple):
                return  # none of them is verified there, or the memory has changed its generation
            access, memory = answer
            good, origins = _copy_some(owner, access, memory, destination, check), owner.origins(access)
        copied: dict[Origin | None, list[tuple[int, int | None]]] = {}
        for chunk, origin in zip(access.chunks, origins, strict=True):
            if chunk in good:
                copied.setdefault(origin, []).append((chunk, good[chunk]))
        damaged += [chunk for chunk in access.chunks if chunk not in good]
        wanted = access.rest
        yield _Step(copied, [*wanted, *damaged])


def _copy_some(
    owner: SharedOwner, access: Access, memory: ChunkMemory, destination: ChunkMemory, check: Callable[[], object]
) -> dict[int, int | None]:
    """Chunk by chunk, so that each is digested where it is still in the cache; on a GPU by one launch for all of them."""
    good: dict[int, int | None] = {}
    chunks = owner.digests_of(access, memory)
    for group in [chunks] if memory.device or destination.device else [[each] for each in chunks]:
        check()
        named = [chunk for chunk, _ in group]
        move_chunks(memory, destination, named)
        for (chunk, digest), made in zip(group, destination.digests(named), strict=True):
            if not destination.width or made == digest:
                good[chunk] = digest
    return good
