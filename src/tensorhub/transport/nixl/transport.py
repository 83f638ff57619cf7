"""The nixl transport: a reader reads a source's registered memory by NIXL, after the source has
told it of its agent.

An agent's metadata comes over the two workers' own connection, after both have authenticated. As by
every one-sided transport, the generation word, read after the bytes, decides whether a read counts
(`one_sided`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorhub.errors import TransportUnavailable
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport.base import (
    DEVICE,
    HOST,
    Channel,
    Destination,
    NotShared,
    ReadFailure,
    Unusable,
)
from tensorhub.transport.connected import ConnectedTransport, ReadClient
from tensorhub.transport.nixl.agents import DIALECT, AgentIs, Exposures, OnGpu, fault_with
from tensorhub.transport.nixl.reading import Agents, Remote
from tensorhub.transport.one_sided import (
    RUN_BYTES_MIN,
    OneSidedOwner,
    OneSidedSession,
    lanes_here,
    open_channel,
)
from tensorhub.transport.owner import NotOpen, OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.registry import Local
from tensorhub.types import Location, RegistrationId


class NixlOwner(OneSidedOwner):
    """It tells readers of the agent by which a registration can be read."""

    dialect = DIALECT

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
        super().__init__(reader, DIALECT)
        self._exposures = exposures
        self._knows_agent = False  # the reader has been told of an agent, and so of addresses

    @property
    def refusal(self) -> str:
        """A reader that knows an agent knows addresses."""
        return "" if self._knows_agent else super().refusal

    def find(
        self, registration: RegistrationId, memory: ChunkMemory, word: tuple[int, int]
    ) -> tuple[object, Sequence[int]]:
        """The registration's agent, which is made if there is none. May take long."""
        if (fault := self._fault(memory)) is not None:
            raise NotShared(fault)
        places = tuple(memory.places)
        gpu = OnGpu(memory.device.index, places) if memory.device is not None else None
        try:
            exposed = self._exposures.of(
                registration, [*(places if gpu is None else ()), word], memory, gpu
            )
        except TransportUnavailable as error:
            raise NotShared(str(error)) from error
        # the agent was being made: what it reads may be freed next
        if not self._memory.holds(registration, memory):
            self._exposures.end(registration)
            raise NotOpen("this memory is not open under that generation")
        self._knows_agent = True
        return AgentIs(exposed.name, exposed.metadata, word[0], exposed.device), ()

    def _fault(self, memory: ChunkMemory) -> str | None:
        """Why this reader may not read this memory by an agent; None: it may."""
        if self._lane.is_read_only:  # a reader that has an agent's metadata can write, too
            return "a token that is read-only gives no access to memory"
        if (fault := fault_with(is_near=self._lane.is_local and memory.device is None)) is not None:
            return fault
        return "what is served from a file is not read by NIXL" if memory.is_read_only else None


class NixlTransport(ConnectedTransport):
    """NIXL's UCX backend; between processes whose UCX have a way in common."""

    dialect = DIALECT
    fills = HOST | DEVICE
    strides = True

    def __init__(self, local: Local) -> None:
        super().__init__(local)
        self._agents = Agents()
        self.lanes = lanes_here()

    def reaches(self, here: Location, there: Location) -> bool:
        """Anywhere: locations tell nothing against it."""
        return True

    def serve(self) -> OwnerSide:
        return NixlOwner()

    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """Know the source's agent, and read the generation word by it."""
        device, connection, right = destination.device, client.connection, client.right
        if (fault := fault_with(is_near=client.peer.is_local and device is None)) is not None:
            raise (Unusable if device is None else NotShared)(fault)
        found = client.find(AgentIs)
        wait = (lambda: connection.has_ended), self._options.stall_timeout_s
        try:
            remote = Remote(self._agents, found.name, found.metadata, *wait, found.device, device)
        except (OSError, ValueError, TransportUnavailable) as error:
            raise Unusable(f"its NIXL agent cannot be used: {error}") from error
        try:
            _prove(remote, found.word, right.generation, connection)
            return open_channel(client, remote, destination, RUN_BYTES_MIN)
        except BaseException:
            remote.close()
            raise

    def close(self) -> None:
        self._agents.close()
        super().close()


def _prove(remote: Remote, word: int, generation: int, connection: BlockingConnection) -> None:
    """See whether UCX reaches the source at all, before anything is asked for."""
    try:
        is_there = remote.is_unchanged(word, generation)
    except OSError as error:
        if connection.has_ended:
            raise ReadFailure("lost", "the connection to the source has ended") from error
        why = "look at UCX_TLS and UCX_NET_DEVICES at both, and at what is between them"
        raise Unusable(f"UCX does not reach it ({error.strerror}): {why}") from error
    if not is_there:
        raise ReadFailure("refused", "the memory has changed its generation")
