"""What the kernel counts of a TCP connection's sending."""

from __future__ import annotations

import socket
import struct
import sys
from typing import NamedTuple

# of Linux' struct tcp_info, up to `tcpi_rwnd_limited`; kernels append to it, and change nothing
_BYTES = 184
_RETRANSMITTED = struct.Struct("@I"), 100
_SEGMENTS = struct.Struct("@I"), 156
_TIMES = struct.Struct("@QQ"), 168
WRAPS_AT = 2**32  # the numbers of segments


class TcpCounts(NamedTuple):
    """Since the connection was made. `busy_s`: something was to be sent, or not yet acknowledged.
    `window_s`: of that, the peer had no room for more.
    """

    resent: int = 0
    segments: int = 0  # with data, those that were sent again included
    busy_s: float = 0.0
    window_s: float = 0.0

    def since(self, before: TcpCounts) -> TcpCounts:
        """The difference."""
        return TcpCounts(
            (self.resent - before.resent) % WRAPS_AT,
            (self.segments - before.segments) % WRAPS_AT,
            max(0.0, self.busy_s - before.busy_s),
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
    (resent,), (segments,), (busy_us, window_us) = (
        form.unpack_from(said, at) for form, at in (_RETRANSMITTED, _SEGMENTS, _TIMES)
    )
    return TcpCounts(resent, segments, busy_us / 1e6, window_us / 1e6)
