"""The tcp transport's channel: a reader's connection to an owner's lane.

Responsible for saying `Read` and for taking exactly the chunks that were asked for. Not responsible for
digests or books.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence

from tensorhub.errors import AuthenticationFailed, OperationTimeout, ProtocolError, TensorHubError
from tensorhub.messages import ChunksFollow, Read, ReadRefused, StillWaiting
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_OWNER
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.transport import tcp
from tensorhub.transport.base import Arrival, Channel, Cutter, Destination, Lacking, ReadFailure, ReadRight
from tensorhub.transport.registry import Local
from tensorhub.types import Endpoint, Location


class TcpTransport:
    """Blocking sockets; works everywhere."""

    name = "tcp"

    def __init__(self, local: Local) -> None:
        self._local = local

    def reaches(self, here: Location, there: Location) -> bool:
        """Always, as far as locations say."""
        return True

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect and prove who is who; see `Transport.open`."""
        options = self._local.options
        sock = tcp.connect(endpoint.address, options.connect_timeout_s, cutter)
        connection = BlockingConnection(sock, stall_timeout_s=options.stall_timeout_s)
        channel = TcpChannel(connection, right, destination, cutter)
        try:
            cutter.attach(connection.shutdown)
            handshake = ClientHandshake(
                "reader",
                self._local.incarnation,
                self._local.secret,
                os.urandom(NONCE_BYTES),
                expected_incarnation=right.incarnation,
            )
            connection.handshake(handshake, options.connect_timeout_s)
        except (TensorHubError, ConnectionLost) as error:
            channel.close()
            raise ReadFailure("unreachable", f"{endpoint.address}: {error}") from error
        except BaseException:
            channel.close()
            raise
        return channel


class TcpChannel:
    """See `transport.base.Channel`."""

    def __init__(self, connection: BlockingConnection, right: ReadRight, destination: Destination, cutter: Cutter) -> None:
        self._connection = connection
        self._right = right
        self._destination = destination
        self._cutter = cutter
        self._next_request = 0
        self._asked: dict[int, set[int]] = {}  # request -> its chunks that were not announced yet; never empty
        self._coming: deque[tuple[int, int]] = deque()  # announced by the present frame, and not received yet

    def __repr__(self) -> str:
        return f"<TcpChannel to {self._right.incarnation}, {len(self._asked)} requests open>"

    def submit(self, chunks: Sequence[int]) -> None:
        right, request = self._right, self._next_request
        self._next_request += 1
        self._asked[request] = set(chunks)
        runs = tuple(_runs(chunks))
        read = Read(request, right.lease, right.registration, right.generation, right.content_id, runs)
        with _Failures(self._connection):
            self._connection.send(read)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        started = time.perf_counter()
        with _Failures(self._connection):
            if not self._coming:
                message = self._next_message()
                if isinstance(message, StillWaiting):
                    return self._lacking(message)
                self._coming.extend(self._announced(message))
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

    def _announced(self, message: ChunksFollow) -> Sequence[tuple[int, int]]:
        """The chunks that a frame announces; each was asked for, and has not come before."""
        asked = self._asked.get(message.request, set())
        arrived = {chunk for chunk, _ in message.chunks}
        if not arrived or len(arrived) != len(message.chunks) or not arrived <= asked:
            raise ProtocolError(f"request {message.request} is answered with chunks that it does not ask for")
        asked -= arrived
        if not asked:
            del self._asked[message.request]
        return message.chunks

    def _lacking(self, message: StillWaiting) -> Lacking:
        """That request is over; what was asked for and has not come is not to be had here now."""
        chunks, end = self._asked.pop(message.request, None), 0
        if not chunks:
            raise ProtocolError(f"request {message.request} is ended, and was not asked, or is over")
        for first, count in message.has:
            if first < end or count < 1:
                raise ProtocolError("what a source has is told in ascending runs")
            end = first + count
        return Lacking(sorted(chunks), message.has)

    def _next_message(self) -> ChunksFollow | StillWaiting:
        message = self._connection.receive(FROM_OWNER)
        match message:
            case ChunksFollow() | StillWaiting():
                return message
            case ReadRefused():
                raise ReadFailure("refused", message.reason)
            case None:
                raise ReadFailure("lost", "the source closed the connection")

    def close(self) -> None:
        self._cutter.detach()
        self._connection.close()


def _runs(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending chunk numbers as (first, count) runs."""
    first = previous = chunks[0]
    for chunk in chunks[1:]:
        if chunk != previous + 1:
            yield first, previous - first + 1
            first = chunk
        previous = chunk
    yield first, previous - first + 1


class _Failures:
    """Turns what a connection raises into the reason that the coordinator hears, and counts what came in in vain."""

    def __init__(self, connection: BlockingConnection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        self._before = self._connection.payload_bytes

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        discarded = self._connection.payload_bytes - self._before
        match error:
            case OperationTimeout():
                raise ReadFailure("stalled", str(error), bytes_discarded=discarded) from error
            case ConnectionLost() | ProtocolError() | AuthenticationFailed():
                raise ReadFailure("lost", str(error), bytes_discarded=discarded) from error
