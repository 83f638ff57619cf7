"""The owner's side of shm: it hands over the descriptors of the memory in which a registration is, if that can be shared."""

from __future__ import annotations

from tensorhub.accesses import Refusal
from tensorhub.messages import SEGMENTS_MAX, FindSegments, FromReader, ReadRefused, SegmentsAre
from tensorhub.transport.one_sided_owner import OneSidedSession
from tensorhub.transport.owner import OpenMemory, OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.shm.segments import Segment, segments_of
from tensorhub.types import RegistrationId


class ShmOwner(OwnerSide):
    """See `OwnerSide`."""

    name = "shm"
    asks = (FindSegments,)
    is_one_sided = True
    shares_memory = True

    def session(self, reader: ServedReader) -> OwnerSession:
        """See `OwnerSide`."""
        return _ShmSession(reader)


class _ShmSession(OneSidedSession):
    def answer(self, asked: FromReader) -> None:
        """Hand over what the registration and its generation word are in."""
        if not isinstance(asked, FindSegments):
            return super().answer(asked)
        found = self._memory.find(RegistrationId(asked.registration), asked.generation)
        if isinstance(found, Refusal):
            self._connection.send(ReadRefused(asked.request, found.reason))
            return
        segments = _segments_of(found) if self._connection.passes_descriptors else ()
        reason, is_usual = self._lane.withheld if segments else ("", False)
        segments = () if reason else segments
        places = tuple([(each.address, each.nbytes) for each in segments])
        self._connection.send(SegmentsAre(asked.request, places, reason, is_usual))
        if segments:
            self._connection.send_descriptors([segment.descriptor for segment in segments])


def _segments_of(found: OpenMemory) -> tuple[Segment, ...]:
    """In which all of it is; none if it is not in such memory, or in too many."""
    segments = segments_of([*found.memory.places, found.word]) or ()
    return segments if len(segments) <= SEGMENTS_MAX else ()
