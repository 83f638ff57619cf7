"""The transports that TensorHub brings along, in order of preference."""

from __future__ import annotations

from tensorhub.transport.archive import ArchiveTransport
from tensorhub.transport.cma import CmaTransport
from tensorhub.transport.cuda_ipc import CudaIpcTransport
from tensorhub.transport.nixl.transport import NixlTransport
from tensorhub.transport.rdma.reader import RdmaTransport
from tensorhub.transport.registry import Registry
from tensorhub.transport.shm import ShmTransport
from tensorhub.transport.tcp import TcpTransport

TRANSPORTS = Registry(
    {
        "cuda_ipc": CudaIpcTransport,
        "shm": ShmTransport,
        "cma": CmaTransport,
        "rdma": RdmaTransport,
        "nixl": NixlTransport,
        "archive": ArchiveTransport,
        "tcp": TcpTransport,
    },
    # UCX lets every process that reaches its ports write memory, so nixl is used only where it is
    # asked for.
    only_by_name={"nixl"},
)
