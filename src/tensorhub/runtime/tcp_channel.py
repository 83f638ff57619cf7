"""The tcp transport's channel: the bytes come over the reader's own connection to the owner's lane.

Responsible for taking exactly the chunks that were asked for. Not responsible for digests or books.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

from tensorhub.errors import ProtocolError
from tensorhub.messages import ChunksFollow, Read, StillWaiting
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.runtime.asking import Asking, Failures, connect
from tensorhub.transport.base import Arrival, Channel, Cutter, Destination, Lacking, ReadRight
from tensorhub.transport.registry import Local
from tensorhub.types import Endpoint, Location


class TcpTransport:
    """Blocking sockets; works everywhere."""

    name = "tcp"
    lanes = 1

    def __init__(self, local: Local) -> None:
        self._local = local

    def reaches(self, here: Location, there: Location) -> bool:
        """Always, as far as locations say."""
        return True

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect and prove who is who; see `Transport.open`."""
        connection, _ = connect(self._local, endpoint.address, right, cutter)
        return TcpChannel(connection, right, destination, cutter)


class TcpChannel:
    """See `transport.base.Channel`."""

    def __init__(self, connection: BlockingConnection, right: ReadRight, destination: Destination, cutter: Cutter) -> None:
        self._connection = connection
        self._asking = Asking(connection, right)
        self._destination = destination
        self._cutter = cutter
        self._coming: deque[tuple[int, int]] = deque()  # announced by the present frame, and not received yet

    def __repr__(self) -> str:
        return f"<TcpChannel, {self._asking!r}>"

    def submit(self, chunks: Sequence[int]) -> None:
        self._asking.ask(Read, chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        started = time.perf_counter()
        with Failures(self._connection):
            if not self._coming:
                message = self._asking.hear()
                match message:
                    case StillWaiting():
                        return self._asking.lacking(message)
                    case ChunksFollow():
                        self._asking.announced(message.request, [chunk for chunk, _ in message.chunks])
                        self._coming.extend(message.chunks)
                    case _:
                        raise ProtocolError(f"a read is answered with {type(message).__name__}")
            first_byte = time.perf_counter()
            group = self._next_group(bytes_max)
            self._connection.receive_into([self._destination.buffer(chunk) for chunk, _ in group])
        return Arrival(group, first_byte - started, time.perf_counter() - first_byte)

    def _next_group(self, bytes_max: int) -> list[tuple[int, int]]:
        """Take the next chunks of the present frame: one at least, then up to `bytes_max`."""
        group: list[tuple[int, int]] = []
        while self._coming:
            bytes_max -= self._destination.buffer(self._coming[0][0]).nbytes
            if group and bytes_max < 0:
                break
            group.append(self._coming.popleft())
        return group

    def close(self) -> None:
        self._cutter.detach()
        self._connection.close()
