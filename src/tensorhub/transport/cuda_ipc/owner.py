"""The owner's side of cuda_ipc: it says how the GPU's memory in which a registration is may be opened, and hands over the
memory of its generation word.
"""

from __future__ import annotations

from tensorhub.accesses import Refusal
from tensorhub.cuda.device import Allocation
from tensorhub.errors import StateError
from tensorhub.messages import ALLOCATIONS_MAX, AllocationsAre, FindAllocations, FromReader, ReadRefused
from tensorhub.transport.cuda_ipc import allocations
from tensorhub.transport.one_sided_owner import OneSidedSession
from tensorhub.transport.owner import OpenMemory, OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.shm.segments import Segment, segments_of
from tensorhub.types import RegistrationId


class CudaIpcOwner(OwnerSide):
    """See `OwnerSide`."""

    name = "cuda_ipc"
    asks = (FindAllocations,)
    is_one_sided = True
    shares_memory = True

    def session(self, reader: ServedReader) -> OwnerSession:
        """See `OwnerSide`."""
        return _CudaIpcSession(reader)


class _CudaIpcSession(OneSidedSession):
    def answer(self, asked: FromReader) -> None:
        """Say how the registration's memory is opened."""
        if not isinstance(asked, FindAllocations):
            return super().answer(asked)
        found = self._memory.find(RegistrationId(asked.registration), asked.generation)
        if isinstance(found, Refusal):
            self._connection.send(ReadRefused(asked.request, found.reason))
            return
        is_there = self._connection.passes_descriptors and found.memory.device is not None
        reason, is_usual = self._lane.withheld if is_there else ("", False)
        exported: tuple[list[Allocation], Segment] | None = None
        if is_there and not reason:
            try:
                exported = _exported(found)
            except StateError as error:
                reason = str(error)[:1000]
        process = allocations.this_process()
        if exported is None:
            self._connection.send(AllocationsAre(asked.request, process, (), (0, 0), reason, is_usual))
            return
        opened, words = exported
        place = (words.address, words.nbytes)
        self._connection.send(AllocationsAre(asked.request, process, tuple(opened), place, "", is_usual))
        self._connection.send_descriptors([words.descriptor])


def _exported(found: OpenMemory) -> tuple[list[Allocation], Segment]:
    """The GPU's allocations, and where the word is. StateError, with the reason: it cannot be opened by others."""
    device = found.memory.device
    assert device is not None
    if not (segments := segments_of([found.word])):
        raise StateError("its generation words are not in shared memory")
    exported = allocations.export(device, found.memory.places)
    if len(exported) > ALLOCATIONS_MAX:
        raise StateError(f"its tensors are in {len(exported)} allocations, more than {ALLOCATIONS_MAX}")
    return exported, segments[0]
