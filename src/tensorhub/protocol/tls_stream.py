"""TLS on the control plane and for accepted connections, on asyncio and on trio.

Responsible for the deadline of the TLS handshake, and for its share of a server's loop. Not
responsible for TLS itself (`tls`).

Raises AuthenticationFailed, ProtocolError, OperationTimeout and ConnectionLost.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream

from tensorhub.errors import OperationTimeout, TensorHubError
from tensorhub.protocol.frames import READ_BYTES_MAX
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.tls import SEALED_BYTES_MAX, Tls

Turn = tuple[anyio.Lock, anyio.Lock]


async def accept(connection: socket.socket, tls: Tls, turn: Turn, timeout_s: float) -> None:
    """A server's handshake over a non-blocking socket. `turn`: the handshakes of an address share
    the first lock, all handshakes of a loop the second. So each turn of the loop has one step of
    one handshake, and a flood of them does not keep the loop from its other tasks.
    """
    with _deadline(timeout_s):
        await _accept(connection, tls, turn)


@contextmanager
def _deadline(timeout_s: float) -> Iterator[None]:
    with anyio.move_on_after(timeout_s) as scope:
        yield
    if scope.cancelled_caught:
        raise OperationTimeout("the TLS handshake did not end in time")


async def _accept(connection: socket.socket, tls: Tls, turn: Turn) -> None:
    while not tls.is_open:
        await anyio.wait_readable(connection)
        async with turn[0], turn[1]:
            try:
                if not (data := connection.recv(READ_BYTES_MAX)):
                    raise tls.receive_eof()
                try:
                    tls.handshake(data)
                finally:
                    if answer := tls.data_to_send():
                        # a peer that does not take so little is not worth waiting for
                        connection.send(answer)
            except BlockingIOError:
                continue
            except OSError as error:
                raise ConnectionLost(f"the connection is gone: {error!r}") from error
            await anyio.lowlevel.checkpoint()


class TlsStream(ByteStream):
    """A client's TLS over another stream. One task receives and one sends at a time."""

    def __init__(self, stream: ByteStream, tls: Tls) -> None:
        self._stream = stream
        self._tls = tls

    def __repr__(self) -> str:
        return f"<TlsStream: {self._tls!r}>"

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return self._stream.extra_attributes

    async def open(self, timeout_s: float) -> None:
        """The handshake; its last bytes go with the first that are sent."""
        with _deadline(timeout_s):
            await self._open()

    async def _open(self) -> None:
        data = b""
        try:
            while True:
                try:
                    self._tls.handshake(data)
                except TensorHubError:
                    with suppress(anyio.BrokenResourceError, OSError):
                        await self._stream.send(self._tls.data_to_send())
                    raise
                if self._tls.is_open:
                    return
                await self._stream.send(self._tls.data_to_send())
                data = await self._stream.receive()
        except anyio.EndOfStream:
            raise self._tls.receive_eof() from None
        except (anyio.BrokenResourceError, OSError) as error:
            raise ConnectionLost(f"the connection is gone: {error!r}") from error

    async def receive(self, max_bytes: int = READ_BYTES_MAX) -> bytes:
        while not (data := self._tls.read(max_bytes)):
            if self._tls.has_ended:
                raise anyio.EndOfStream
            self._tls.receive_data(await self._stream.receive(READ_BYTES_MAX))
        return data

    async def send(self, item: bytes) -> None:
        rest = memoryview(item)
        while rest:
            await self._stream.send(self._tls.seal(rest[:SEALED_BYTES_MAX]))
            rest = rest[SEALED_BYTES_MAX:]

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def aclose(self) -> None:
        await self._stream.aclose()
