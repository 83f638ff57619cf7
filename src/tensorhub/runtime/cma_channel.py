"""The cma transport: one process reads another one's memory by `process_vm_readv`, after it has found the right process."""

from __future__ import annotations

from tensorhub.errors import ProtocolError, TransportUnavailable
from tensorhub.messages import FindMemory, MemoryIs
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.runtime.asking import Asking, Failures, connect
from tensorhub.runtime.one_sided import OneSidedChannel, lanes_here
from tensorhub.transport import cma
from tensorhub.transport.base import Channel, Cutter, Destination, NotShared, ReadRight, Unusable
from tensorhub.transport.registry import Local
from tensorhub.types import Endpoint, Location


class CmaTransport:
    """process_vm_readv; between processes of one user on one host."""

    name = "cma"

    def __init__(self, local: Local) -> None:
        if (fault := cma.fault_here()) is not None:
            raise TransportUnavailable(fault)
        self._local = local
        self.lanes = lanes_here()

    def reaches(self, here: Location, there: Location) -> bool:
        """Between equal hosts."""
        return here.host == there.host

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect, prove who is who, and find the process. Unusable if it is out of reach; see `Transport.open`."""
        connection, is_local = connect(self._local, endpoint.address, right, cutter)
        try:
            if not is_local:
                raise Unusable("it is connected from another host: workers on different hosts need different Location.host")
            with Failures(connection):
                header = _find(connection, right)
            try:
                is_there = cma.Look(header).is_there()
            except OSError as error:
                raise Unusable(cma.why_not(error)) from error
            if not is_there:
                raise Unusable("its process is another one here: workers in different pid namespaces need different hosts")
        except BaseException:
            cutter.detach()
            connection.close()
            raise
        return OneSidedChannel(connection, cma.Process(header), right, destination, cutter)


def _find(connection: BlockingConnection, right: ReadRight) -> cma.Header:
    connection.send(FindMemory(0, right.registration))
    message = Asking(connection, right).hear()
    if not isinstance(message, MemoryIs):
        raise ProtocolError(f"it is asked for its memory, and answers {type(message).__name__}")
    if message.on_device:
        raise NotShared("its tensors are on a GPU, which is not read this way")
    if not message.pid or len(message.nonce) != cma.NONCE_BYTES:
        raise Unusable("it lets nobody read its memory from here: to it, this is another host")
    return cma.Header(message.pid, message.address, message.nonce)
