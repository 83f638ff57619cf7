"""A reader's channels: each to a granted source, over the best transport that the two workers have in common.

Responsible for which transports this worker has, as each of its incarnations. Not responsible for what is read (`lanes`).
"""

from __future__ import annotations

from collections.abc import Sequence

from tensorhub.messages import Grant
from tensorhub.runtime.lanes import ChannelOpener
from tensorhub.runtime.tcp_channel import TcpTransport
from tensorhub.transport.base import Channel, Cutter, Destination, ReadFailure, ReadRight, Transport
from tensorhub.transport.registry import Local, Registry
from tensorhub.types import ContentId, Incarnation, LeaseId, Location, Options, RegistrationId

TRANSPORTS = Registry()
TRANSPORTS.add("tcp", TcpTransport, place=90)


class Channels:
    """Those of one worker. `wanted`: names of transports, best first; None: all that work here."""

    def __init__(self, secrets: Sequence[bytes], options: Options, location: Location, wanted: Sequence[str] | None) -> None:
        self._secrets = secrets
        self._options = options
        self._location = location
        self._wanted = wanted
        self._transports: tuple[Transport, ...] = ()

    def __repr__(self) -> str:
        return f"<Channels over {self._names()}>"

    def _names(self) -> str:
        return ", ".join(transport.name for transport in self._transports)

    def become(self, incarnation: Incarnation) -> None:
        """Read as that one from now on. Raises TransportUnavailable for a transport that cannot be had."""
        self._transports = TRANSPORTS.make(Local(incarnation, self._secrets, self._options), self._wanted)

    def opener(self, content_id: ContentId) -> ChannelOpener:
        """What opens the best transport to a granted source; for one content."""

        def open_one(grant: Grant, destination: Destination, cutter: Cutter) -> tuple[str, Channel]:
            right = ReadRight(
                LeaseId(grant.lease),
                Incarnation(grant.incarnation),
                RegistrationId(grant.registration),
                grant.generation,
                content_id,
            )
            for transport in self._transports:
                for endpoint in grant.endpoints:
                    if endpoint.transport == transport.name and transport.reaches(self._location, grant.location):
                        return transport.name, transport.open(endpoint, right, destination, cutter)
            offered = ", ".join(endpoint.transport for endpoint in grant.endpoints) or "none"
            text = f"no transport in common: {grant.source} offers {offered}, here are {self._names()}"
            raise ReadFailure("unreachable", text)

        return open_one
