"""The common base of transports whose two sides talk over the workers' own connection."""

from __future__ import annotations

from abc import abstractmethod

from tensorhub.transport.base import Channel, Cutter, Destination, NotShared, ReadRight, Transport
from tensorhub.transport.dialect import Dialect
from tensorhub.transport.peers import Peers
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.registry import Local
from tensorhub.types import Endpoint


class ConnectedTransport(Transport):
    """A transport that connects to the owner, and then sets up its channel. Inherit from it. It keeps connections."""

    dialect: Dialect

    def __init__(self, local: Local) -> None:
        self.name = self.dialect.transport
        self._options = local.options
        self._peers = Peers(local, self.dialect)

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect, authenticate both sides, and set up a channel; see `Transport.open`. If that
        fails, the connection ends, unless the source has said that this registration is not read
        this way (NotShared).
        """
        if (destination.is_strided or right.selection is not None) and not self.strides:
            raise NotShared("chunks of several pieces of memory are not read this way: tcp reads them")
        client = ReadClient(self._peers, self._peers.open(endpoint.address, right, cutter), right, cutter)
        try:
            if right.selection is not None:
                client.select(right.selection)
            with client.failures():
                return self.channel(client, destination)
        except BaseException:
            client.close()
            raise

    @abstractmethod
    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """The channel over this connection. Errors as of `open`."""

    def sweep(self) -> None:
        """See `Keeping`."""
        self._peers.sweep()

    def close(self) -> None:
        """See `Keeping`."""
        self._peers.close()
