"""What the memories of an owner that are being filled have of older contents: the bases of deltas.

Not responsible for deltas (`deltas`), nor for locks: the owner (`serving`) guards this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from tensorhub.memory.base import Base
from tensorhub.memory.chunks import ChunkMemory, move_chunks
from tensorhub.model.accesses import Access, Refusal, Wait
from tensorhub.types import ContentId, RegistrationId
from tensorhub.worker.owner import Owner

Accessing = Callable[..., AbstractContextManager[tuple[Access, ChunkMemory] | Wait | Refusal]]
_Terms = tuple[None, RegistrationId, int, ContentId]  # of an access, but for the chunks


class Bases:
    """Those of one owner. `access`: as of `SharedOwner`."""

    def __init__(self, owner: Owner, access: Accessing) -> None:
        self._owner = owner
        self._access = access
        self._known: dict[RegistrationId, Base] = {}

    def __repr__(self) -> str:
        return f"<Bases of {len(self._known)} registrations>"

    def of(self, registration: RegistrationId) -> Base | None:
        return self._known.get(registration)

    def forget(self, registration: RegistrationId) -> None:
        self._known.pop(registration, None)

    def opened(
        self,
        registration: RegistrationId,
        content_id: ContentId,
        memory: ChunkMemory,
        complete: bool,
        keeps_base: bool,
        others: Mapping[RegistrationId, ChunkMemory],
    ) -> None:
        """That memory is about to be opened; see `SharedOwner.open`. `others`: memories of this
        worker whose bytes stay as long as they are open.
        """
        known, grid = self._known.pop(registration, None), memory.manifest.grid_id
        if complete or not memory.width or memory.is_strided:
            return
        if keeps_base:
            former = self._owner.former(registration, content_id, grid)
            known = None if former is None else Base(memory, *former)
        elif known is None or known.memory is not memory:
            known = self._elsewhere(memory, content_id, others)
        if known is not None:
            self._known[registration] = known

    def _elsewhere(
        self,
        memory: ChunkMemory,
        content_id: ContentId,
        others: Mapping[RegistrationId, ChunkMemory],
    ) -> Base | None:
        """What another memory of this worker has: for a copy that is filled beside it."""
        for registration, other in others.items():
            found = self._owner.held(registration, content_id, memory.manifest.grid_id)
            if found is not None and not other.is_read_only:  # a file's may be truncated
                generation, held, digests, intact = found
                terms = (None, registration, generation, held)

                def bring(chunk: int, terms: _Terms = terms) -> None:
                    with self._access(*terms, [chunk], 1, 0.0) as answer:
                        if isinstance(answer, tuple):
                            move_chunks(answer[1], memory, [chunk])

                return Base(memory, held, digests, intact, bring)
        return None
