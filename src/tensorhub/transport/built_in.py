"""The transports that TensorHub brings along, in order of preference."""

from __future__ import annotations

from tensorhub.transport.cma.reader import CmaTransport
from tensorhub.transport.cuda_ipc.reader import CudaIpcTransport
from tensorhub.transport.nixl.reader import NixlTransport
from tensorhub.transport.rdma.reader import RdmaTransport
from tensorhub.transport.registry import Registry
from tensorhub.transport.shm.reader import ShmTransport
from tensorhub.transport.tcp.reader import TcpTransport

TRANSPORTS = Registry()
TRANSPORTS.add("cuda_ipc", CudaIpcTransport, place=5)
TRANSPORTS.add("shm", ShmTransport, place=10)
TRANSPORTS.add("cma", CmaTransport, place=20)
TRANSPORTS.add("rdma", RdmaTransport, place=40)
# UCX lets every process that reaches its ports write memory, so nixl is used only where it is asked
# for.
TRANSPORTS.add("nixl", NixlTransport, place=50, only_by_name=True)
TRANSPORTS.add("tcp", TcpTransport, place=90)
