"""The nixl transport: a reader reads a source's registered memory by NIXL, after the source has told it of its agent.

Agents' metadata comes over the two workers' own connection, after both have proved who they are. Whether a read counts is
decided as in every one-sided transport: by the generation word, read after the bytes (`one_sided`).
"""

from __future__ import annotations

from tensorhub.cuda.device import Device
from tensorhub.errors import ProtocolError, TransportUnavailable
from tensorhub.messages import AgentIs, FindAgent
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport.base import (
    DEVICE,
    HOST,
    Channel,
    Cutter,
    Destination,
    NotShared,
    ReadFailure,
    ReadRight,
    Transport,
    Unusable,
)
from tensorhub.transport.nixl.agents import fault_with
from tensorhub.transport.nixl.owner import NixlOwner
from tensorhub.transport.nixl.reading import Agents, Remote
from tensorhub.transport.one_sided import OneSidedChannel, lanes_here
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.peers import Peers
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.registry import Local
from tensorhub.types import Endpoint, Location


class NixlTransport(Transport):
    """NIXL's UCX backend; between processes whose UCX have a way in common."""

    name = "nixl"
    fills = HOST | DEVICE

    def __init__(self, local: Local) -> None:
        self._local = local
        self._peers = Peers(local, self.name)
        self._agents = Agents()
        self.lanes = lanes_here()

    def __repr__(self) -> str:
        return f"<NixlTransport: {self._agents!r}>"

    def reaches(self, here: Location, there: Location) -> bool:
        """Anywhere, as far as locations say."""
        return True

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect, prove who is who, and read the generation word. Unusable (NotShared); see `Transport.open`."""
        peer = self._peers.open(endpoint.address, right, cutter)
        client = ReadClient(self._peers, peer, right, cutter)
        try:
            if (fault := fault_with(is_near=peer.is_local and destination.device is None)) is not None:
                raise Unusable(fault) if destination.device is None else NotShared(fault)
            with client.failures():
                found = _find(client, right)
            remote = self._remote(peer.connection, found, destination.device)
        except BaseException:
            client.close()
            raise
        channel = NixlChannel(client, remote, right, destination, cutter)
        try:
            _prove(remote, found.word, right.generation, peer.connection)
        except BaseException:
            channel.close()
            raise
        return channel

    def _remote(self, connection: BlockingConnection, found: AgentIs, device: Device | None) -> Remote:
        wait = (lambda: connection.has_ended), self._local.options.stall_timeout_s
        try:
            return Remote(self._agents, found.name, found.metadata, *wait, found.device, device)
        except (OSError, ValueError, TransportUnavailable) as error:
            raise Unusable(f"its NIXL agent cannot be used: {error}") from error

    def serve(self) -> OwnerSide:
        """See `Transport.serve`."""
        return NixlOwner()

    def sweep(self) -> None:
        """See `Keeping`."""
        self._peers.sweep()

    def close(self) -> None:
        """See `Keeping`."""
        self._agents.close()
        self._peers.close()


def _find(client: ReadClient, right: ReadRight) -> AgentIs:
    message = client.ask(FindAgent(0, right.registration, right.generation))
    if not isinstance(message, AgentIs):
        raise ProtocolError(f"it is asked for its agent, and answers {type(message).__name__}")
    if not message.metadata:
        raise NotShared(message.why_not)
    return message


def _prove(remote: Remote, word: int, generation: int, connection: BlockingConnection) -> None:
    """See whether UCX gets there at all, before anything is asked for."""
    try:
        is_there = remote.is_unchanged(word, generation)
    except OSError as error:
        if connection.has_ended:
            raise ReadFailure("lost", "the connection to the source has ended") from error
        why = "look at UCX_TLS and UCX_NET_DEVICES at both, and at what is between them"
        raise Unusable(f"UCX does not reach it ({error.strerror}): {why}") from error
    if not is_there:
        raise ReadFailure("refused", "the memory has changed its generation")


class NixlChannel(OneSidedChannel):
    """See `transport.base.Channel`."""

    def __init__(
        self,
        client: ReadClient,
        remote: Remote,
        right: ReadRight,
        destination: Destination,
        cutter: Cutter,
    ) -> None:
        super().__init__(client, remote, right, destination, cutter)
        self._remote = remote

    def close(self) -> None:
        super().close()
        self._remote.close()
