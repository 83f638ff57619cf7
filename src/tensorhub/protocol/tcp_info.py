"""What the kernel counts of a TCP connection's sending."""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from typing import NamedTuple

# of Linux' struct tcp_info, up to `tcpi_rwnd_limited`; kernels append to it, and change nothing
_BYTES = 184
_RETRANSMITTED = struct.Struct("@I"), 100
_SEGMENTS = struct.Struct("@I"), 156
_WINDOW = struct.Struct("@Q"), 176
FULL = 0.625  # the kernel wakes a sender that waits once a third of the buffer is free
WRAPS_AT = 2**32  # the numbers of segments


class TcpCounts(NamedTuple):
    """Since the connection was made. `window_s`: something was to be sent, and the peer had no room
    for more.
    """

    resent: int = 0
    segments: int = 0  # with data, those that were sent again included
    window_s: float = 0.0

    def since(self, before: TcpCounts) -> TcpCounts:
        """The difference."""
        return TcpCounts(
            (self.resent - before.resent) % WRAPS_AT,
            (self.segments - before.segments) % WRAPS_AT,
            max(0.0, self.window_s - before.window_s),
        )


def counts_of(connection: socket.socket) -> TcpCounts | None:
    """None: it is not TCP's, has gone, or the kernel does not count all that."""
    if sys.platform != "linux" or connection.family == socket.AF_UNIX:
        return None
    try:
        said = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES)
    except OSError:
        return None
    if len(said) < _BYTES:
        return None
    (resent,), (segments,), (window_us,) = (
        form.unpack_from(said, at) for form, at in (_RETRANSMITTED, _SEGMENTS, _WINDOW)
    )
    return TcpCounts(resent, segments, window_us / 1e6)


def has_room(connection: socket.socket) -> bool:
    """Whether its buffer is emptier than it is while it keeps its sender waiting."""
    if sys.platform != "linux" or connection.family == socket.AF_UNIX:
        return False
    try:
        said = fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))
        room = connection.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    except (OSError, ValueError):
        return False
    return int.from_bytes(said, sys.byteorder) < FULL * room
