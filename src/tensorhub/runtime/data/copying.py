"""Copying the bytes of chunks from one memory of this worker to another, each with its digest at
the destination.

Not responsible for choosing the sources and chunks: `worker.local_copying` does that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from tensorhub.memory.chunks import ChunkMemory, move_chunks
from tensorhub.model.accesses import Access, Refusal, Wait
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.transport.owner import CannotServe
from tensorhub.types import ContentId, RegistrationId
from tensorhub.worker.calls import LocalCopy
from tensorhub.worker.local_copying import Arrived, Copier

ACCESS_BYTES = 32 * 2**20  # copied before a fence gets its turn


def copy_chunks(
    owner: SharedOwner,
    sources: Sequence[LocalCopy],
    content_id: ContentId,
    destination: ChunkMemory,
    there: frozenset[int],
    arrived: Arrived,
    check: Callable[[], object],
) -> frozenset[int]:
    """Copy the chunks of this content that are not `there`; returns all chunks that are there
    afterwards. Blocks: for a thread.

    Missing digests are made from the source, and each chunk is digested again at the destination; a
    damaged chunk counts as missing. `check` is called before each chunk and ends it by raising.
    """

    def access(
        source: LocalCopy, wanted: Sequence[int]
    ) -> AbstractContextManager[tuple[Access, ChunkMemory] | Wait | Refusal]:
        right = RegistrationId(source.registration), source.generation, content_id
        return owner.access(None, *right, wanted, ACCESS_BYTES, patience_s=0)

    def move(access: Access, memory: ChunkMemory) -> dict[int, int | None]:
        return _copy_some(owner, access, memory, destination, check)

    return Copier(access, owner.origins, move, arrived).copy(sources, len(destination.sizes), there)


def _copy_some(
    owner: SharedOwner,
    access: Access,
    memory: ChunkMemory,
    destination: ChunkMemory,
    check: Callable[[], object],
) -> dict[int, int | None]:
    """Chunk by chunk, so that each is digested where it is still in the cache; on a GPU by one
    launch for all of them.
    """
    good: dict[int, int | None] = {}
    try:
        chunks = owner.digests_of(access, memory)
    except CannotServe:  # its owner has written it
        return good
    for group in [chunks] if memory.device or destination.device else [[each] for each in chunks]:
        check()
        named = [chunk for chunk, _ in group]
        move_chunks(memory, destination, named)
        for (chunk, digest), made in zip(group, destination.digests(named), strict=True):
            if not destination.width or made == digest:
                good[chunk] = digest
    return good
