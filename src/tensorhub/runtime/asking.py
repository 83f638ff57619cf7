"""What a reader says to an owner over the two workers' own connection, whichever way the bytes then take.

Responsible for connecting as who one is, for asking under the read right, for holding the owner to what it was asked, and
for naming failures. Several threads may ask at a time while one listens. Not responsible for bytes, digests or books.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence

from tensorhub.errors import AuthenticationFailed, OperationTimeout, ProtocolError, TensorHubError
from tensorhub.messages import (
    AllocationsAre,
    ChunkDigest,
    ChunkFollows,
    ChunksFollow,
    ChunksLie,
    Locate,
    MemoryIs,
    Read,
    ReadRefused,
    SegmentsAre,
    StillWaiting,
)
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_OWNER
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.transport import tcp, unix
from tensorhub.transport.base import Cutter, Lacking, ReadFailure, ReadRight
from tensorhub.transport.registry import Local

Answer = ChunksFollow | ChunkFollows | ChunkDigest | ChunksLie | MemoryIs | SegmentsAre | AllocationsAre | StillWaiting


def connect(local: Local, address: str, right: ReadRight, cutter: Cutter) -> tuple[BlockingConnection, bool]:
    """A connection to the right's owner, both proved, which the cutter ends; and whether the owner is on this host.

    ReadFailure("unreachable") if there is none. Whoever closes the connection detaches the cutter first.
    """
    options = local.options
    kind = unix if address.startswith(unix.PREFIX) else tcp
    sock = kind.connect(address, options.connect_timeout_s, cutter)
    is_local = tcp.is_local(sock)
    connection = BlockingConnection(sock, stall_timeout_s=options.stall_timeout_s)
    try:
        cutter.attach(connection.shutdown)
        nonce = os.urandom(NONCE_BYTES)
        handshake = ClientHandshake("reader", local.incarnation, local.secret, nonce, expected_incarnation=right.incarnation)
        connection.handshake(handshake, options.connect_timeout_s)
    except BaseException as error:
        cutter.detach()
        connection.close()
        if isinstance(error, TensorHubError | ConnectionLost):
            raise ReadFailure("unreachable", f"{address}: {error}") from error
        raise
    return connection, is_local


class Asking:
    """One reader's requests to one owner."""

    def __init__(self, connection: BlockingConnection, right: ReadRight) -> None:
        self._connection = connection
        self._right = right
        self._sending = threading.Lock()  # guards the order of requests
        self._next_request = 0
        self._asked: dict[int, set[int]] = {}  # request -> its chunks that were not announced yet; never empty

    def __repr__(self) -> str:
        return f"<Asking {self._right.incarnation}, {len(self._asked)} requests open>"

    @property
    def is_answered(self) -> bool:
        """Whether nothing is expected from the owner."""
        return not self._asked

    def ask(self, kind: type[Read | Locate], chunks: Sequence[int]) -> None:
        """Ask for these chunks."""
        right = self._right
        with self._sending, Failures(self._connection):
            request = self._next_request
            self._next_request += 1
            self._asked[request] = set(chunks)
            runs = tuple(_runs(chunks))
            self._connection.send(kind(request, right.lease, right.registration, right.generation, right.content_id, runs))

    def hear(self) -> Answer:
        """What the owner says next, within `Failures`. ReadFailure: "refused" if it serves no more, "lost" if it is gone."""
        message = self._connection.receive(FROM_OWNER)
        match message:
            case ReadRefused():
                raise ReadFailure("refused", message.reason)
            case None:
                raise ReadFailure("lost", "the source closed the connection")
            case _:
                return message

    def announced(self, request: int, chunks: Iterable[int]) -> None:
        """An answer names these chunks: each was asked for, and has not been named before, or it is a ProtocolError."""
        asked, named = self._asked.get(request, set()), list(chunks)
        arrived = set(named)
        if not arrived or len(arrived) != len(named) or not arrived <= asked:
            raise ProtocolError(f"request {request} is answered with chunks that it does not ask for")
        asked -= arrived
        if not asked:
            del self._asked[request]

    def lacking(self, message: StillWaiting) -> Lacking:
        """That request is over; what was asked for and has not come is not to be had here now."""
        chunks, end = self._asked.pop(message.request, None), 0
        if not chunks:
            raise ProtocolError(f"request {message.request} is ended, and was not asked, or is over")
        for first, count in message.has:
            if first < end or count < 1:
                raise ProtocolError("what a source has is told in ascending runs")
            end = first + count
        return Lacking(sorted(chunks), message.has)


def _runs(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending chunk numbers as (first, count) runs."""
    first = previous = chunks[0]
    for chunk in chunks[1:]:
        if chunk != previous + 1:
            yield first, previous - first + 1
            first = chunk
        previous = chunk
    yield first, previous - first + 1


class Failures:
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
