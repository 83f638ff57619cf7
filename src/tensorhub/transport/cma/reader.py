"""The cma transport: a reader finds the source's process, and reads its memory by `process_vm_readv`."""

from __future__ import annotations

from tensorhub.errors import ProtocolError, TransportUnavailable
from tensorhub.transport.base import Channel, Destination, Unusable
from tensorhub.transport.cma import process as cma
from tensorhub.transport.cma.messages import DIALECT, MemoryIs
from tensorhub.transport.cma.owner import CmaOwner
from tensorhub.transport.connected import ConnectedTransport
from tensorhub.transport.generation_words import NONCE_BYTES, Header
from tensorhub.transport.one_sided import OneSidedChannel, lanes_here
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.registry import Local
from tensorhub.transport.strided_source import RUN_BYTES_MIN, StridedSource
from tensorhub.transport.tcp.reader import SharedTcpChannel
from tensorhub.types import Location


class CmaTransport(ConnectedTransport):
    """process_vm_readv; between processes of one user on one host."""

    dialect = DIALECT
    strides = True

    def __init__(self, local: Local) -> None:
        if (fault := cma.fault_here()) is not None:
            raise TransportUnavailable(fault)
        if local.is_named:
            cma.let_others_read()
        super().__init__(local)
        self.lanes = lanes_here()

    def reaches(self, here: Location, there: Location) -> bool:
        """Between equal hosts."""
        return here.host == there.host

    def serve(self) -> OwnerSide:
        return CmaOwner()

    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """Find the process. Unusable: it is out of reach."""
        peer, right = client.peer, client.right
        if peer.header is None or peer.registration != right.registration:
            peer.header, peer.registration = _find(client), right.registration
        process = cma.Process(peer.header)
        if not destination.is_strided:
            return OneSidedChannel(client, process, destination)
        places = StridedSource(client, destination)
        if places.run_bytes < RUN_BYTES_MIN:
            return SharedTcpChannel(client, destination)
        return OneSidedChannel(client, process, destination, (process, places))


def _find(client: ReadClient) -> Header:
    """The owner's process, once the reader has seen that its nonce is the owner's."""
    if not client.peer.is_local:
        raise Unusable("it is connected from another host: workers on different hosts need different Location.host")
    said = client.find(MemoryIs)
    if len(said.nonce) != NONCE_BYTES:
        raise ProtocolError(f"a nonce has {NONCE_BYTES} bytes")
    process = cma.Process(Header(said.pid, said.address, said.nonce))
    try:
        is_there = process.is_there()
    except OSError as error:
        raise Unusable(cma.why_not(error)) from error
    if not is_there:
        raise Unusable("its process is another one here: workers in different pid namespaces need different hosts")
    return process.header
