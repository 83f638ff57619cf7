"""The backends to get bytes from one process to others that are compared. Imports nothing of
theirs.

A backend's module has a class `Source` and a class `Receiver` (see `backends.base`), and a function
`versions()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final


class Kind(StrEnum):
    CEILING = "ceiling"  # what a careful program without a library does, and no more
    TENSORHUB = "tensorhub"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class Backend:
    """`name`: on the command line. `sockets`: whether the bytes go through TCP. `reno`: whether it
    chooses that itself.
    """

    name: str
    title: str
    kind: Kind
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    sockets: bool = False
    reno: bool = False
    environment: str | None = None
    programs: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


def _ceiling(
    name: str, title: str, module: str, *, sockets: bool = False, **options: Any
) -> Backend:
    return Backend(name, title, Kind.CEILING, module, options, sockets=sockets, reno=sockets)


def _hub(transport: str, *, integrity: bool) -> Backend:
    name, title = f"tensorhub-{transport}", f"TensorHub {transport}"
    if not integrity:
        name, title = f"{name}-plain", f"{title}, integrity=False"
    options = {"transport": transport, "integrity": integrity}
    tcp = transport == "tcp"
    return Backend(name, title, Kind.TENSORHUB, "hub", options, sockets=tcp, reno=tcp)


def _peer(
    name: str, title: str, module: str, options: Mapping[str, Any] | None = None, **more: Any
) -> Backend:
    return Backend(name, title, Kind.PEER, module, options or {}, **more)


_GLOO = {"GLOO_SOCKET_IFNAME": "lo"}
# Preallocated: the store's pages are touched before the time runs, as everybody's are.
_RAY = {
    "RAY_preallocate_plasma_memory": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
# UCX cuts what goes through TCP into 8 KiB, unless it is told more: three times the time.
_TCP = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "lo",
    "UCX_TCP_TX_SEG_SIZE": "1m",
    "UCX_TCP_RX_SEG_SIZE": "1m",
}
# polling takes the core that the other side needs
_UCXX = _TCP | {"UCXPY_PROGRESS_MODE": "blocking"}

BACKENDS: Final = (
    _ceiling("memcpy-1", "memcpy out of a mapping, 1 thread", "memory", copy="mapped", threads=1),
    _ceiling("memcpy-2", "memcpy out of a mapping, 2 threads", "memory", copy="mapped", threads=2),
    _ceiling("readv-2", "process_vm_readv, 2 threads", "memory", copy="readv", threads=2),
    _ceiling("bare", "bare sockets", "sockets", sockets=True, digests=False),
    _ceiling("bare-xxh3", "bare sockets + XXH3", "sockets", sockets=True, digests=True),
    *(
        _hub(transport, integrity=integrity)
        for transport in ("shm", "cma", "tcp")
        for integrity in (True, False)
    ),
    _peer(
        "gloo-broadcast",
        "gloo broadcast",
        "gloo",
        {"broadcast": True},
        sockets=True,
        variables=_GLOO,
    ),
    _peer(
        "gloo-send", "gloo isend/irecv", "gloo", {"broadcast": False}, sockets=True, variables=_GLOO
    ),
    _peer("nixl", "NIXL, UCX all", "nixl", environment="nixl"),
    _peer("nixl-tcp", "NIXL, UCX tcp", "nixl", sockets=True, environment="nixl", variables=_TCP),
    _peer("mooncake-tcp", "Mooncake tcp", "mooncake", sockets=True, environment="mooncake"),
    _peer("ray", "Ray object store", "ray", environment="ray", variables=_RAY),
    _peer("safetensors", "safetensors in /dev/shm", "files"),
    _peer(
        "aiohttp",
        "aiohttp, raw reads",
        "web",
        {"server": "aiohttp"},
        sockets=True,
        reno=True,
        environment="aiohttp",
    ),
    _peer(
        "nginx",
        "nginx sendfile, raw reads",
        "web",
        {"server": "nginx"},
        sockets=True,
        programs=("nginx",),
    ),
    _peer("zmq", "pyzmq", "zmq", sockets=True, environment="zmq"),
    _peer("ucxx-tcp", "ucxx tcp", "ucxx", sockets=True, environment="ucxx", variables=_UCXX),
    _peer("redis", "Redis", "redis", sockets=True, environment="redis", programs=("redis-server",)),
)
