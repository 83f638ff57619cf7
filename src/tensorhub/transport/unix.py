"""Unix sockets for the data plane: connections within a host, over which descriptors can be passed.

Their names are of Linux' abstract kind: no file is left behind, and only the same network namespace sees them.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time

from tensorhub.transport.base import Cutter, ReadFailure, Unusable
from tensorhub.transport.tcp import listen_at, shutdown

PREFIX = "unix:"


def listen() -> socket.socket:
    """A non-blocking listening socket with a name that nobody has. OSError: there are none here."""
    return listen_at(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), "\0tensorhub-" + secrets.token_hex(16))


def address_of(listener: socket.socket) -> str:
    """The "unix:name" that reaches a listener, from the same network namespace."""
    name: bytes = listener.getsockname()
    return PREFIX + name[1:].decode()


def connect(address: str, timeout_s: float, cutter: Cutter) -> socket.socket:
    """A blocking connection to "unix:name"; attached to the cutter, as by `tcp.connect`. Unusable: nobody listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        cutter.attach(lambda: shutdown(connection))
        until = time.monotonic() + timeout_s
        whole, part = divmod(max(1, int(timeout_s * 1_000_000)), 1_000_000)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", whole, part))  # of connect, too
        connection.connect("\0" + address.removeprefix(PREFIX))
        if cutter.is_cut or time.monotonic() > until:
            raise ReadFailure("unreachable", f"{address}: the read was given up")
    except BaseException as error:
        cutter.detach()
        connection.close()
        if isinstance(error, BlockingIOError):  # its backlog was full for all that time
            raise ReadFailure("unreachable", f"{address}: no answer in time") from error
        if isinstance(error, OSError | ValueError):
            raise Unusable(
                f"{address} cannot be connected to ({error}): workers in different network namespaces need different hosts"
            ) from error
        raise
    return connection
