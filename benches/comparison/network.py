"""A network namespace for one run, in which all of TCP is under reno; the host's own settings are
never touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .backends import Backend
from .bare import CONGESTION_CONTROL

RENO = CONGESTION_CONTROL.decode()
_SETTING = Path("/proc/sys/net/ipv4/tcp_congestion_control")  # of the namespace of whoever opens it
_OWN = "/proc/thread-self/ns/net"
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Network:
    """`fault`: why this run has no namespace of its own; None if it has one. `default`: what a
    socket gets unasked.
    """

    fault: str | None
    default: str

    def congestion_control(self, backend: Backend) -> str | None:
        """What the backend's sockets are under; None if its bytes go through none."""
        if not backend.sockets:
            return None
        return RENO if backend.reno else self.default

    def __str__(self) -> str:
        if self.fault is None:
            return (
                f"in a network namespace of its own, in which all sockets are under {self.default}"
            )
        return (
            f"in the host's network, where sockets are under {self.default} unless a backend "
            f"chooses {RENO} "
            f"(no namespace of its own: {self.fault})"
        )


@contextlib.contextmanager
def own_network() -> Iterator[Network]:
    """This thread, and every process that it starts, in a new namespace with a loopback; back in
    the old one at the end.

    The namespace goes with the last process in it, however that ends. Without the rights of root
    nothing changes.
    """
    with open(_OWN) as before:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            yield Network(
                f"{os.strerror(ctypes.get_errno())}: it takes root (CAP_SYS_ADMIN)", _default()
            )
            return
        try:
            fault = None
            try:
                if os.path.samestat(os.fstat(before.fileno()), os.stat(_OWN)):
                    raise OSError("the namespace is still the host's")
                _loopback_up()
                _SETTING.write_text(RENO)
            except OSError as error:
                fault = str(error)
            if fault is not None:
                _return_to(before.fileno())
            yield Network(fault, _default())
        finally:
            _return_to(before.fileno())


def _return_to(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(
            ctypes.get_errno(), "this process cannot go back to the network that it came from"
        )


def _loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0)
        (flags,) = struct.unpack_from("16xh", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


def _default() -> str:
    try:
        return _SETTING.read_text().strip()
    except OSError:
        return "an unknown congestion control"
