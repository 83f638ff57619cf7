"""The owner's side of nixl: it tells of the agent by which a registration is read, if there may be one."""

from __future__ import annotations

from tensorhub.accesses import Refusal
from tensorhub.errors import TransportUnavailable
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import AgentIs, FindAgent, FromReader, ReadRefused
from tensorhub.transport.base import NotShared
from tensorhub.transport.nixl.agents import Exposed, Exposures, OnGpu, fault_with
from tensorhub.transport.one_sided_owner import OneSidedSession
from tensorhub.transport.owner import OwnedMemory, OwnerSession, OwnerSide, ServedReader
from tensorhub.types import RegistrationId


class NixlOwner(OwnerSide):
    """See `OwnerSide`."""

    name = "nixl"
    asks = (FindAgent,)
    is_one_sided = True

    def __init__(self) -> None:
        self.exposures = Exposures()  # thread-safe itself: making one takes long

    def session(self, reader: ServedReader) -> OwnerSession:
        """See `OwnerSide`."""
        return _NixlSession(reader, self.exposures)

    def forget(self, registration: RegistrationId) -> None:
        """See `OwnerSide`."""
        self.exposures.end(registration)

    def close(self) -> None:
        """See `OwnerSide`."""
        self.exposures.close()


class _NixlSession(OneSidedSession):
    def __init__(self, reader: ServedReader, exposures: Exposures) -> None:
        super().__init__(reader)
        self._exposures = exposures
        self._knows_agent = False  # the reader has been told of an agent, and so of addresses

    @property
    def refusal(self) -> str:
        """Whoever knows an agent knows addresses."""
        return "" if self._knows_agent else super().refusal

    def answer(self, asked: FromReader) -> None:
        """Tell of the agent."""
        if not isinstance(asked, FindAgent):
            return super().answer(asked)
        registration = RegistrationId(asked.registration)
        is_near = self._lane.is_local and not self._memory.is_on_device(registration)
        if self._lane.is_read_only:  # whoever has an agent's metadata can write, too
            found: tuple[Exposed, int] | str | Refusal = "a token that is read-only gives no access to memory"
        elif (fault := fault_with(is_near=is_near)) is not None:
            found = fault
        else:
            found = agent_of(self._exposures, self._memory, registration, asked.generation)
        match found:
            case Refusal():
                self._connection.send(ReadRefused(asked.request, found.reason))
            case str():
                self._connection.send(AgentIs(asked.request, "", b"", 0, found))
            case _:
                self._knows_agent = True
                exposed, word = found
                self._connection.send(AgentIs(asked.request, exposed.name, exposed.metadata, word, "", exposed.device))


def agent_of(
    exposures: Exposures, owned: OwnedMemory, registration: RegistrationId, generation: int
) -> tuple[Exposed, int] | str | Refusal:
    """The agent by which NIXL reads all of it, and where its word is; or why there is none. May take long."""
    found = owned.find(registration, generation)
    if isinstance(found, Refusal):
        return found
    memory: ChunkMemory = found.memory
    if memory.is_read_only:
        return "what is served from a file is not read by NIXL"
    places = tuple(memory.places)
    gpu = OnGpu(memory.device.index, places) if memory.device is not None else None
    try:
        exposed = exposures.of(registration, [*(places if gpu is None else ()), found.word], memory, gpu)
    except (NotShared, TransportUnavailable) as error:
        return str(error)
    if not owned.holds(registration, memory):  # it was let go while the agent was made: what it reads may be freed next
        exposures.end(registration)
        return Refusal("this memory is not open under that generation")
    return exposed, found.word[0]
