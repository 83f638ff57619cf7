"""The nixl transport: a reader reads a source's registered memory by NIXL, after the source has told it of its agent.

An agent's metadata comes over the two workers' own connection, after both have authenticated. As by
every one-sided transport, the generation word, read after the bytes, decides whether a read counts
(`one_sided`).
"""

from __future__ import annotations

from tensorhub.errors import TransportUnavailable
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport.base import DEVICE, HOST, Channel, Destination, NotShared, ReadFailure, Unusable
from tensorhub.transport.connected import ConnectedTransport
from tensorhub.transport.nixl.agents import fault_with
from tensorhub.transport.nixl.messages import DIALECT, AgentIs
from tensorhub.transport.nixl.owner import NixlOwner
from tensorhub.transport.nixl.reading import Agents, Remote
from tensorhub.transport.one_sided import OneSidedChannel, lanes_here
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.registry import Local
from tensorhub.transport.strided_source import RUN_BYTES_MIN, StridedSource
from tensorhub.transport.tcp.reader import SharedTcpChannel
from tensorhub.types import Location


class NixlTransport(ConnectedTransport):
    """NIXL's UCX backend; between processes whose UCX have a way in common."""

    dialect = DIALECT
    fills = HOST | DEVICE
    strides = True

    def __init__(self, local: Local) -> None:
        super().__init__(local)
        self._agents = Agents()
        self.lanes = lanes_here()

    def __repr__(self) -> str:
        return f"<NixlTransport: {self._agents!r}>"

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
            places = StridedSource(client, destination) if destination.is_strided else None
        except BaseException:
            remote.close()
            raise
        if places is not None and places.run_bytes < RUN_BYTES_MIN:
            remote.close()
            return SharedTcpChannel(client, destination)
        return NixlChannel(client, remote, destination, places)

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


class NixlChannel(OneSidedChannel):
    """See `transport.base.Channel`."""

    def __init__(
        self, client: ReadClient, remote: Remote, destination: Destination, places: StridedSource | None = None
    ) -> None:
        super().__init__(client, remote, destination, None if places is None else (remote, places))
        self._remote = remote

    def close(self) -> None:
        super().close()
        self._remote.close()
