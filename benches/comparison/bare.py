"""The baseline: the same bytes over bare blocking sockets, one connection and one sending thread
for each receiver.

It is what a careful program without a library would do, and no more: no names, no shapes, no
coordination, no retry. With `digests`, each piece is also digested on both sides while it is in the
cache, as TensorHub does: XXH3-64, made once by the sender, sent in front of the piece, compared by
every receiver.
"""

import socket
import struct
import threading
from collections.abc import Iterator, Sequence

import xxhash

CONGESTION_CONTROL = b"reno"  # any process may choose it; see README.md
PIECE_BYTES = 2**20
BATCH_BYTES, BATCH_PIECES = 4 * 2**20, 512
TIMEOUT_S = 120.0
HEADER = struct.Struct("<Q")


def pieces(views: Sequence[memoryview]) -> list[memoryview]:
    """The views, cut to at most PIECE_BYTES each."""
    return [
        view[at : at + PIECE_BYTES] for view in views for at in range(0, len(view), PIECE_BYTES)
    ]


def listen(host: str = "127.0.0.1", timeout_s: float = TIMEOUT_S) -> socket.socket:
    """A listener, on loopback unless another address of this machine is given."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=64)
    listener.settimeout(timeout_s)
    return listener


def send_all(
    listener: socket.socket,
    receivers: int,
    views: Sequence[memoryview],
    digests: bool,
    congestion: bytes | None = CONGESTION_CONTROL,
) -> None:
    """Accept that many receivers and send everything to each; returns when each has confirmed that
    it has it. `congestion`: None is the machine's own congestion control.
    """
    connections = []
    for _ in range(receivers):
        connection, _ = listener.accept()
        _set_up(connection, congestion)
        connections.append(connection)
    cut = pieces(views)
    known: list[int | None] = [None] * len(cut)
    failures: list[BaseException] = []

    def serve(connection: socket.socket) -> None:
        try:
            with connection:
                if digests:
                    _send_digested(connection, cut, known)
                else:
                    _send_plain(connection, cut)
                if connection.recv(1) != b"!":
                    raise ConnectionError("a receiver ended before it had everything")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=serve, args=(connection,)) for connection in connections]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def receive_all(
    address: tuple[str, int],
    views: Sequence[memoryview],
    digests: bool,
    congestion: bytes | None = CONGESTION_CONTROL,
) -> None:
    """Receive everything into the views; ValueError if a digest differs."""
    with socket.create_connection(address, timeout=TIMEOUT_S) as connection:
        _set_up(connection, congestion)
        header = bytearray(HEADER.size)
        for piece in pieces(views):
            if digests:
                _receive(connection, memoryview(header))
            _receive(connection, piece)
            if digests and xxhash.xxh3_64_intdigest(piece) != HEADER.unpack(header)[0]:
                raise ValueError("a piece arrived with other bytes than were sent")
        connection.sendall(b"!")


def _set_up(connection: socket.socket, congestion: bytes | None) -> None:
    # blocking calls, without the poll before each that a timeout brings
    connection.settimeout(None)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(TIMEOUT_S), 0))
    if congestion is not None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send_plain(connection: socket.socket, cut: list[memoryview]) -> None:
    for batch in _batches(cut):
        _send(connection, batch)


def _send_digested(
    connection: socket.socket, cut: list[memoryview], known: list[int | None]
) -> None:
    for number, piece in enumerate(cut):
        digest = known[number]
        if digest is None:
            known[number] = digest = xxhash.xxh3_64_intdigest(piece)
        _send(connection, [memoryview(HEADER.pack(digest)), piece])


def _batches(cut: list[memoryview]) -> Iterator[list[memoryview]]:
    batch: list[memoryview] = []
    size = 0
    for piece in cut:
        batch.append(piece)
        size += len(piece)
        if size >= BATCH_BYTES or len(batch) == BATCH_PIECES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _send(connection: socket.socket, parts: list[memoryview]) -> None:
    while parts:
        sent = connection.sendmsg(parts)
        while parts and sent >= len(parts[0]):
            sent -= len(parts[0])
            parts = parts[1:]
        if sent:
            parts = [parts[0][sent:], *parts[1:]]


def _receive(connection: socket.socket, view: memoryview) -> None:
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionError("the sender ended before everything was there")
        view = view[count:]
