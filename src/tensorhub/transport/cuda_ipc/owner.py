"""The owner's side of cuda_ipc: the handles of a registration's GPU memory, and the memory of its generation word."""

from __future__ import annotations

from tensorhub.errors import StateError
from tensorhub.transport.base import NotShared, Unusable
from tensorhub.transport.cuda_ipc import allocations
from tensorhub.transport.cuda_ipc.messages import ALLOCATIONS_MAX, DIALECT, AllocationsAre
from tensorhub.transport.dialect import Find, FindRegions
from tensorhub.transport.one_sided_owner import OneSidedSession
from tensorhub.transport.owner import OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.shm.segments import segments_of


class _CudaIpcSession(OneSidedSession):
    def answer(self, request: int, asked: Find | FindRegions) -> None:
        """Say how the registration's memory is opened."""
        if isinstance(asked, FindRegions):
            self._connection.send(DIALECT.reply(request, self.regions(asked)))
            return
        memory, word = self._reader.find(asked.registration, asked.generation)
        if memory.device is None or not self._connection.passes_descriptors:
            raise NotShared("its tensors are not on a GPU")
        self._check_given()
        if not (words := segments_of([word])):
            raise Unusable("its generation words are not in shared memory")
        try:
            exported = tuple(allocations.export(memory.device, memory.places))
        except StateError as error:
            raise Unusable(str(error)) from error
        if len(exported) > ALLOCATIONS_MAX:
            raise Unusable(f"its tensors are in {len(exported)} allocations, more than {ALLOCATIONS_MAX}")
        said = AllocationsAre(allocations.this_process(), exported, (words[0].address, words[0].nbytes))
        self._connection.send(DIALECT.reply(request, said))
        self._connection.send_descriptors([words[0].descriptor])


class CudaIpcOwner(OwnerSide):
    """See `OwnerSide`."""

    dialect = DIALECT
    is_one_sided = True
    strides = True
    shares_memory = True

    def session(self, reader: ServedReader) -> OwnerSession:
        return _CudaIpcSession(reader)
