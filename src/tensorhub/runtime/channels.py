"""A reader's channels: each to a granted source, over the best transport that the two workers have in common.

Responsible for which transports this worker has, as each of its incarnations. Not responsible for what is read (`lanes`).
"""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from tensorhub.messages import Grant
from tensorhub.runtime.cma_channel import CmaTransport
from tensorhub.runtime.cuda_ipc_channel import CudaIpcTransport
from tensorhub.runtime.lanes import BATCH_BYTES, ChannelOpener, Opened
from tensorhub.runtime.logs import get_logger
from tensorhub.runtime.shm_channel import KEPT_S, ShmTransport
from tensorhub.runtime.tcp_channel import TcpTransport
from tensorhub.transport import cma
from tensorhub.transport.base import (
    Cutter,
    Destination,
    NotShared,
    ReadFailure,
    ReadRight,
    Transport,
    Unusable,
    can_fill,
)
from tensorhub.transport.cma import Words
from tensorhub.transport.registry import Local, Registry
from tensorhub.transport.shm import Segment
from tensorhub.types import ContentId, Endpoint, Incarnation, LeaseId, Location, Options, RegistrationId

TRANSPORTS = Registry()
TRANSPORTS.add("cuda_ipc", CudaIpcTransport, place=5)
TRANSPORTS.add("shm", ShmTransport, place=10)
TRANSPORTS.add("cma", CmaTransport, place=20)
TRANSPORTS.add("tcp", TcpTransport, place=90)
UNUSABLE_MAX = 4096  # peers that are remembered to be out of a transport's reach

log = get_logger("tensorhub.worker")


class Channels:
    """Those of one worker. `wanted`: names of transports, best first; None: all that work here."""

    def __init__(self, secrets: Sequence[bytes], options: Options, location: Location, wanted: Sequence[str] | None) -> None:
        self._secrets = secrets
        self._options = options
        self._location = location
        self._wanted = wanted
        self._transports: tuple[Transport, ...] = ()
        self._unusable: dict[tuple[str, str, str], str] = {}  # (transport, incarnation, registration or "")

    def __repr__(self) -> str:
        return f"<Channels over {self._names()}>"

    def _names(self) -> str:
        return ", ".join(transport.name for transport in self._transports)

    def become(self, incarnation: Incarnation) -> None:
        """Read as that one from now on. Raises TransportUnavailable for a transport that cannot be had."""
        self._transports = TRANSPORTS.make(
            Local(incarnation, self._secrets, self._options),
            self._wanted,
            lambda name, reason: log.info("transport_unavailable", transport=name, reason=reason),
        )
        if "cma" in (self._wanted or ()):
            cma.let_others_read()

    def words(self) -> Words | None:
        """Where those look who read this worker's memory without its help; None: nobody does."""
        if self.shares:
            return Words(lambda nbytes: Segment(nbytes).bytes_at(0, nbytes))
        return Words() if self._has("cma") else None

    @property
    def shares(self) -> bool:
        """Whether others may map this worker's shared memory: its tensors', or that of its generation words."""
        return self._has("shm") or self._has("cuda_ipc")

    def _has(self, name: str) -> bool:
        return any(transport.name == name for transport in self._transports)

    def offers(self, address: str, unix_address: str | None) -> tuple[Endpoint, ...]:
        """How others may read from this worker, whose listeners they reach at these addresses; best first."""
        addresses = {"cuda_ipc": unix_address, "shm": unix_address, "cma": address, "tcp": address}
        offered = [(each.name, addresses.get(each.name)) for each in self._transports]
        return tuple([Endpoint(name, there) for name, there in offered if there is not None])

    async def keep_swept(self) -> None:
        """Let go, again and again, of what is kept for reads that do not come; at the end, of a GPU's memory at once."""
        try:
            while self.shares:
                await anyio.sleep(KEPT_S)
                for transport in self._transports:
                    if isinstance(transport, ShmTransport | CudaIpcTransport):
                        transport.sweep()
        finally:
            for transport in self._transports:
                if isinstance(transport, CudaIpcTransport):
                    transport.close()

    def opener(self, content_id: ContentId) -> ChannelOpener:
        """What opens the best transport to a granted source; for one content."""

        def open_one(grant: Grant, destination: Destination, cutter: Cutter) -> Opened:
            right = ReadRight(
                LeaseId(grant.lease),
                Incarnation(grant.incarnation),
                RegistrationId(grant.registration),
                grant.generation,
                content_id,
            )
            for transport, endpoint in self._common(grant, destination):
                try:
                    channel = transport.open(endpoint, right, destination, cutter)
                except Unusable as error:
                    self._note_unusable(transport.name, grant, error)
                else:
                    return Opened(transport.name, channel, transport.lanes, getattr(transport, "batch_bytes", BATCH_BYTES))
            offered = ", ".join(endpoint.transport for endpoint in grant.endpoints) or "none"
            text = f"no transport in common: {grant.source} offers {offered}, here are {self._names()}"
            found = [why for (_, peer, _), why in list(self._unusable.items()) if peer == grant.incarnation]
            raise ReadFailure("unreachable", "; ".join([text, *found]))

        return open_one

    def _common(self, grant: Grant, destination: Destination) -> list[tuple[Transport, Endpoint]]:
        """The transports by which this source may be read, best first, each with its endpoint."""
        return [
            (transport, endpoint)
            for transport in self._transports
            for endpoint in grant.endpoints
            if endpoint.transport == transport.name
            and not self._unusable.keys() & _keys(transport.name, grant)
            and transport.reaches(self._location, grant.location)
            and can_fill(transport, destination)
        ]

    def _note_unusable(self, name: str, grant: Grant, reason: Unusable) -> None:
        """Once for each peer, or registration: it is not tried again there."""
        of_peer, of_registration = _keys(name, grant)
        is_usual = isinstance(reason, NotShared)
        say = log.debug if is_usual else log.warning
        say("transport_unusable", transport=name, source=grant.source, reason=str(reason))
        while len(self._unusable) >= UNUSABLE_MAX:
            self._unusable.pop(next(iter(self._unusable)), None)
        self._unusable[of_registration if is_usual else of_peer] = f"{name}: {reason}"


def _keys(name: str, grant: Grant) -> tuple[tuple[str, str, str], tuple[str, str, str]]:
    return (name, grant.incarnation, ""), (name, grant.incarnation, grant.registration)
