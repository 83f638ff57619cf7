"""Sockets for the data plane: listening, connecting, tuning.

Responsible for sockets whose reads and writes block and are as fast as the kernel allows. Not
responsible for their messages.

Congestion control: a path within this host never loses a packet, but bbr, a common default, paces
it to about half of what it can carry. An unprivileged process may choose only from
`tcp_allowed_congestion_control`, which always has reno. On such a path reno is as good as cubic.
Real networks keep the host's choice.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import select
import socket
import sys
import time
from collections.abc import Sequence

from tensorhub.errors import StateError, shortage
from tensorhub.transport.base import Cutter, ReadFailure
from tensorhub.transport.forks import close_in_children
from tensorhub.types import format_address, parse_address

# or the kernel's somaxconn, if that is less: a flood must not fill it before its connections are
# closed
BACKLOG = 4096
LOCAL_CONGESTION_CONTROL = b"reno"
# see benches/one_to_one.py; elsewhere the kernel's own tuning follows the path
LOCAL_BUFFER_BYTES = 4 * 2**20
KEEPALIVE_IDLE_S = 15
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 3


def make(family: int, kind: int = socket.SOCK_STREAM, proto: int = 0) -> socket.socket:
    """A socket of this process alone (see `forks`). OSError; StateError: this process lacks
    something.
    """
    try:
        return close_in_children(socket.socket(family, kind, proto))
    except OSError as error:
        raise shortage(error) or error from None


def listen(host: str, port: int = 0) -> socket.socket:
    """A non-blocking listening socket on `host`; port 0 takes a free one. OSError: the address is
    not this machine's; StateError: this process lacks something.
    """
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE | socket.AI_NUMERICSERV
    )[0]
    listener = make(family, kind, proto)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return listen_at(listener, address)


def listen_at_one(host: str, ports: Sequence[int]) -> tuple[socket.socket, int]:
    """As `listen`, at the first of these ports that is free; and the how manieth it is."""
    for nth, port in enumerate(ports):
        try:
            return listen(host, port), nth
        except OSError as error:
            if error.errno != errno.EADDRINUSE or port == ports[-1]:
                raise
    raise StateError("no port is given to listen at")


def is_here(host: str) -> bool:
    """Whether this machine has that address."""
    try:
        listen(host, 0).close()
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def listen_at(listener: socket.socket, address: str | tuple[object, ...]) -> socket.socket:
    """The socket, bound, listening and non-blocking. OSError: that failed, and the socket is
    closed.
    """
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def address_of(listener: socket.socket) -> str:
    """The "tcp://host:port" that reaches a listener."""
    host, port = listener.getsockname()[:2]
    return format_address(host, port)


def connect(address: str, timeout_s: float, cutter: Cutter) -> socket.socket:
    """A tuned blocking connection to "tcp://host:port". Raises ReadFailure("unreachable"), soon if
    it is cut; StateError: this process lacks something, such as descriptors.

    The socket stays attached to the cutter; a caller detaches it before closing it.
    """
    deadline = time.monotonic() + timeout_s
    try:
        host, port = parse_address(address)
        targets = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICSERV
        )
    except (OSError, StateError) as error:
        raise ReadFailure("unreachable", f"{address}: {error}") from error
    reason = "it has no address"
    for family, kind, proto, _, target in targets:
        try:
            connection = _connect_one(make(family, kind, proto), target, deadline, cutter)
        except OSError as error:
            reason = str(error)
            continue
        tune(connection)
        return connection
    raise ReadFailure("unreachable", f"{address}: {reason}")


def _connect_one(
    connection: socket.socket, target: tuple[object, ...], deadline: float, cutter: Cutter
) -> socket.socket:
    try:
        connection.setblocking(False)
        code = connection.connect_ex(target)
        if code not in (0, errno.EINPROGRESS):
            raise OSError(code, errno.errorcode.get(code, "unknown"))
        # from here on a shutdown also ends the waiting below
        cutter.attach(lambda: shutdown(connection))
        _wait_connected(connection, deadline)
        if cutter.is_cut:
            raise OSError(errno.ECANCELED, "the read was given up")
        connection.setblocking(True)
    except BaseException:
        cutter.detach()
        connection.close()
        raise
    return connection


def _wait_connected(connection: socket.socket, deadline: float) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    while not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        if time.monotonic() >= deadline:
            raise OSError(errno.ETIMEDOUT, "no answer in time")
    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    if code:
        raise OSError(code, errno.errorcode.get(code, "unknown"))


def shutdown(connection: socket.socket) -> None:
    """End what any thread does on this connection. Its own thread closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def tune(connection: socket.socket) -> None:
    """Set up a connected data socket, at either end. Nothing here is needed for correctness."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    if is_local(connection):
        _tune_local(connection)


def _tune_local(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LOCAL_BUFFER_BYTES)
    if sys.platform == "linux":
        with contextlib.suppress(PermissionError, FileNotFoundError):
            connection.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_CONGESTION, LOCAL_CONGESTION_CONTROL
            )


def is_local(connection: socket.socket) -> bool:
    """Whether both ends are on this host: the peer is loopback, or has this end's own address."""
    if connection.family == socket.AF_UNIX:
        return True
    try:
        here, there = connection.getsockname()[0], connection.getpeername()[0]
    except OSError:  # it has gone already
        return False
    return bool(here == there or ipaddress.ip_address(there.partition("%")[0]).is_loopback)
