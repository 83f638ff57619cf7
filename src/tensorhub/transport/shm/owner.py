"""The owner's side of shm: it hands over the descriptors of the shared memory in which a registration lies."""

from __future__ import annotations

from tensorhub.transport.base import NotShared
from tensorhub.transport.dialect import Find, FindRegions
from tensorhub.transport.one_sided_owner import OneSidedSession
from tensorhub.transport.owner import OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.shm.messages import DIALECT, SEGMENTS_MAX, SegmentsAre
from tensorhub.transport.shm.segments import segments_of


class _ShmSession(OneSidedSession):
    def answer(self, request: int, asked: Find | FindRegions) -> None:
        """Hand over what the registration and its generation word are in."""
        if isinstance(asked, FindRegions):
            self._connection.send(DIALECT.reply(request, self.regions(asked)))
            return
        found = self._reader.find(asked.registration, asked.generation)
        segments = segments_of([*found.memory.places, found.word])
        if not self._connection.passes_descriptors or not segments or len(segments) > SEGMENTS_MAX:
            raise NotShared("its tensors are not in shared memory: allocate them by tensorhub.shared_empty_like")
        self._check_given()
        said = SegmentsAre(tuple([(each.address, each.nbytes) for each in segments]))
        self._connection.send(DIALECT.reply(request, said))
        self._connection.send_descriptors([segment.descriptor for segment in segments])


class ShmOwner(OwnerSide):
    """See `OwnerSide`."""

    dialect = DIALECT
    is_one_sided = True
    strides = True
    shares_memory = True

    def session(self, reader: ServedReader) -> OwnerSession:
        return _ShmSession(reader)
