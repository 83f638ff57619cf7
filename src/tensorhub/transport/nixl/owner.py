"""The owner's side of nixl: it tells readers of the agent by which a registration can be read."""

from __future__ import annotations

from tensorhub.errors import TransportUnavailable
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.transport.base import NotShared
from tensorhub.transport.dialect import Find, FindRegions
from tensorhub.transport.nixl.agents import Exposures, OnGpu, fault_with
from tensorhub.transport.nixl.messages import DIALECT, AgentIs
from tensorhub.transport.one_sided_owner import OneSidedSession
from tensorhub.transport.owner import NotOpen, OwnerSession, OwnerSide, ServedReader
from tensorhub.types import RegistrationId


class NixlOwner(OwnerSide):
    """See `OwnerSide`."""

    dialect = DIALECT
    is_one_sided = True
    strides = True

    def __init__(self) -> None:
        self.exposures = Exposures()  # thread-safe itself: making one takes long

    def session(self, reader: ServedReader) -> OwnerSession:
        return _NixlSession(reader, self.exposures)

    def forget(self, registration: RegistrationId) -> None:
        self.exposures.end(registration)

    def close(self) -> None:
        self.exposures.close()


class _NixlSession(OneSidedSession):
    def __init__(self, reader: ServedReader, exposures: Exposures) -> None:
        super().__init__(reader)
        self._exposures = exposures
        self._knows_agent = False  # the reader has been told of an agent, and so of addresses

    @property
    def refusal(self) -> str:
        """A reader that knows an agent knows addresses."""
        return "" if self._knows_agent else super().refusal

    def answer(self, request: int, asked: Find | FindRegions) -> None:
        """Tell of the registration's agent, which is made if there is none. May take long."""
        if isinstance(asked, FindRegions):
            self._connection.send(DIALECT.reply(request, self.regions(asked)))
            return
        memory, word = self._reader.find(asked.registration, asked.generation)
        if (fault := self._fault(memory)) is not None:
            raise NotShared(fault)
        registration, places = RegistrationId(asked.registration), tuple(memory.places)
        gpu = OnGpu(memory.device.index, places) if memory.device is not None else None
        try:
            exposed = self._exposures.of(registration, [*(places if gpu is None else ()), word], memory, gpu)
        except TransportUnavailable as error:
            raise NotShared(str(error)) from error
        if not self._memory.holds(registration, memory):  # the agent was being made: what it reads may be freed next
            self._exposures.end(registration)
            raise NotOpen("this memory is not open under that generation")
        self._knows_agent = True
        self._connection.send(DIALECT.reply(request, AgentIs(exposed.name, exposed.metadata, word[0], exposed.device)))

    def _fault(self, memory: ChunkMemory) -> str | None:
        """Why this reader may not read this memory by an agent; None: it may."""
        if self._lane.is_read_only:  # a reader that has an agent's metadata can write, too
            return "a token that is read-only gives no access to memory"
        if (fault := fault_with(is_near=self._lane.is_local and memory.device is None)) is not None:
            return fault
        return "what is served from a file is not read by NIXL" if memory.is_read_only else None
