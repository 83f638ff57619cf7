"""Making the deltas of a memory that readers want, in the background.

Not responsible for deltas (`deltas`), nor for permission to read the memory (`serving`).
"""

from __future__ import annotations

from collections.abc import Callable

from tensorhub.model.accesses import CHUNKS_PER_ACCESS_MAX
from tensorhub.runtime.data.deltas import Deltas
from tensorhub.runtime.data.serving import DIGESTED_BYTES, SharedOwner
from tensorhub.transport.owner import CannotServe
from tensorhub.types import ContentId, RegistrationId


def begin_deltas(
    owner: SharedOwner,
    registration: RegistrationId,
    lend: Callable[[str, int], bool],
    *,
    is_publisher: bool,
) -> int:
    """Keep deltas of that memory from now on. Returns 0; or the bytes that this needs, if `lend`
    does not have them. OSError: no memory.
    """
    memory, deltas = owner.memory_of(registration), owner.deltas
    if memory is None or deltas.is_begun(registration):
        return 0
    nbytes = Deltas.room_for(memory, has_shadow=is_publisher)
    if not lend(registration, nbytes):
        return nbytes
    try:
        deltas.begin(registration, memory, has_shadow=is_publisher)
    finally:
        if not deltas.is_begun(registration):  # no memory, or it was let go meanwhile
            deltas.on_dropped(registration)
    return 0


def make_deltas(
    owner: SharedOwner,
    registration: RegistrationId,
    generation: int,
    content_id: ContentId,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Make the deltas that are missing, and take the shadow over. Blocks; ends early where the
    memory is taken back, has changed, or `is_over`.
    """
    while (missing := owner.deltas.missing(registration, generation)) and not is_over():
        window = missing[:CHUNKS_PER_ACCESS_MAX]
        terms = (None, registration, generation, content_id, window, DIGESTED_BYTES, 0.0)
        with owner.access(*terms) as answer:
            if not isinstance(answer, tuple):
                return
            try:
                with owner.touching(answer[0], answer[0].chunks[0]):
                    owner.deltas.make(*answer)
            except CannotServe:
                return
