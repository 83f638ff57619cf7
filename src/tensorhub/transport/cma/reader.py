"""The cma transport: one process reads another one's memory by `process_vm_readv`, after it has found the right process."""

from __future__ import annotations

from tensorhub.errors import ProtocolError, TransportUnavailable
from tensorhub.messages import FindMemory, MemoryIs
from tensorhub.transport.base import Channel, Cutter, Destination, NotShared, ReadRight, Transport, Unusable
from tensorhub.transport.cma import process as cma
from tensorhub.transport.cma.owner import CmaOwner
from tensorhub.transport.generation_words import NONCE_BYTES, Header
from tensorhub.transport.one_sided import OneSidedChannel, lanes_here
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.peers import Peers
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.registry import Local
from tensorhub.types import Endpoint, Location


class CmaTransport(Transport):
    """process_vm_readv; between processes of one user on one host."""

    name = "cma"

    def __init__(self, local: Local) -> None:
        if (fault := cma.fault_here()) is not None:
            raise TransportUnavailable(fault)
        if local.is_named:
            cma.let_others_read()
        self._peers = Peers(local, self.name)
        self.lanes = lanes_here()

    def reaches(self, here: Location, there: Location) -> bool:
        """Between equal hosts."""
        return here.host == there.host

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect, prove who is who, and find the process. Unusable if it is out of reach; see `Transport.open`."""
        peer = self._peers.open(endpoint.address, right, cutter)
        client = ReadClient(self._peers, peer, right, cutter)
        try:
            with client.failures():
                if peer.header is None or peer.registration != right.registration:
                    peer.header, peer.registration = _find(peer.is_local, client, right), right.registration
        except BaseException:
            client.close()
            raise
        return OneSidedChannel(client, cma.Process(peer.header), right, destination, cutter)

    def serve(self) -> OwnerSide:
        """See `Transport.serve`."""
        return CmaOwner()

    def sweep(self) -> None:
        """See `Keeping`."""
        self._peers.sweep()

    def close(self) -> None:
        """See `Keeping`."""
        self._peers.close()


def _find(is_local: bool, client: ReadClient, right: ReadRight) -> Header:
    """What the owner says of its process, once that has proved to be that one here."""
    if not is_local:
        raise Unusable("it is connected from another host: workers on different hosts need different Location.host")
    header = _ask(client, right)
    try:
        is_there = cma.Look(header).is_there()
    except OSError as error:
        raise Unusable(cma.why_not(error)) from error
    if not is_there:
        raise Unusable("its process is another one here: workers in different pid namespaces need different hosts")
    return header


def _ask(client: ReadClient, right: ReadRight) -> Header:
    message = client.ask(FindMemory(0, right.registration))
    if not isinstance(message, MemoryIs):
        raise ProtocolError(f"it is asked for its memory, and answers {type(message).__name__}")
    if message.on_device:
        raise NotShared("its tensors are on a GPU, which is not read this way")
    if not message.pid or len(message.nonce) != NONCE_BYTES:
        raise Unusable("it lets nobody read its memory from here: to it, this is another host")
    return Header(message.pid, message.address, message.nonce)
