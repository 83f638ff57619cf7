"""The owner's side of one-sided transports: it says where chunks lie, and where the generation word is."""

from __future__ import annotations

from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import ChunksLie
from tensorhub.model.accesses import Access
from tensorhub.transport.base import NotShared, Unusable
from tensorhub.transport.dialect import REGIONS_MAX, FindRegions, RegionsAre
from tensorhub.transport.owner import ServedReader

LOCATE_BYTES = 2**40  # of the chunks in one answer: no byte of them is sent
NOT_FROM_THERE = "this worker's memory is not to be read from here: it is on another host"


class OneSidedSession:
    """See `OwnerSession`; a transport's own adds `answer`."""

    bytes_max: int = LOCATE_BYTES

    def __init__(self, reader: ServedReader) -> None:
        self._reader = reader
        self._lane = reader.lane
        self._connection = reader.connection
        self._memory = reader.memory

    @property
    def refusal(self) -> str:
        """Only readers on this host are told addresses."""
        return "" if self._memory.header is not None and self._lane.is_local else NOT_FROM_THERE

    def serve(self, request: int, access: Access, memory: ChunkMemory) -> None:
        """Say where an access' chunks are."""
        chunks = self._reader.digests_of(access, memory)
        # Where chunks of strips are follows from where the regions are (`FindRegions`).
        places = tuple([(chunk, digest, 0 if memory.is_strided else memory.address(chunk)) for chunk, digest in chunks])
        self._connection.send(ChunksLie(request, places, self._memory.word_of(access)))

    def regions(self, asked: FindRegions) -> RegionsAre:
        """Where regions are, for readers that may know. Raises as `answer`."""
        if self.refusal:
            raise Unusable(self.refusal)
        memory = self._reader.find(asked.registration, asked.generation).memory
        return RegionsAre(memory.addresses[asked.first : asked.first + REGIONS_MAX])

    def _check_given(self) -> None:
        """Unusable (NotShared): this reader is given no memory to map or to open."""
        reason, is_usual = self._lane.withheld
        if reason:
            raise (NotShared if is_usual else Unusable)(reason)

    def close(self) -> None:
        """Nothing was set up."""
