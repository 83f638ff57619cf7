"""Byte streams over the sockets of one server, all of which one `epoll` watches.

anyio's own streams register interest with the loop twice for each piece that arrives, and yield to
other tasks with each piece that is sent. With a thousand sessions that costs more than the
messages. Here a socket is registered once, and is read and written directly. A caller that sends in
a loop has to yield to other tasks, since `send` does so only if the kernel is full.

Responsible for waiting, and for closing the sockets. Not responsible for connecting, nor for frames
(`protocol.stream`).
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Mapping
from typing import Any

import anyio
import anyio.lowlevel
from anyio.abc import ByteStream, SocketAttribute

from tensorhub.protocol.tls import Tls

_ENDED = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
# a read also stops at a byte that was sent as urgent, and what follows is told with that
_UNTOLD = _ENDED | select.EPOLLPRI
# a change: once
_WATCHED = select.EPOLLIN | select.EPOLLPRI | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET


class Poller:
    """What wakes the streams of one loop, while `keep` runs."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._streams: dict[int, PolledStream] = {}  # by descriptor: those that are open

    def __repr__(self) -> str:
        return f"<Poller of {len(self._streams)} streams>"

    async def keep(self) -> None:
        """Wake streams until cancelled."""
        native: Any = anyio.lowlevel.current_token().native_token
        try:
            if not hasattr(native, "add_reader"):
                while True:
                    await anyio.wait_readable(self._epoll)
                    self._look()
            # asyncio: no task has to be woken each time
            native.add_reader(self._epoll.fileno(), self._look)
            try:
                await anyio.sleep_forever()
            finally:
                native.remove_reader(self._epoll.fileno())
        finally:
            self._epoll.close()

    def _look(self) -> None:
        for descriptor, events in self._epoll.poll(0):
            self._streams[descriptor].changed(events)

    def stream(self, connection: socket.socket, tls: Tls | None = None) -> PolledStream:
        """A connected non-blocking socket as a stream, which owns it from now on. Raises OSError;
        then it does not. `tls`: open already.
        """
        stream = PolledStream(connection, self._forget, tls)
        self._epoll.register(connection, _WATCHED)
        self._streams[connection.fileno()] = stream
        return stream

    def _forget(self, descriptor: int) -> None:
        """Its stream is about to close it."""
        del self._streams[descriptor]
        if not self._epoll.closed:
            self._epoll.unregister(descriptor)


class PolledStream(ByteStream):
    """One socket, which can also be used without waiting. One task receives and one sends at a
    time.
    """

    def __init__(
        self, connection: socket.socket, forget: Callable[[int], object], tls: Tls | None
    ) -> None:
        self._connection = connection
        self._forget = forget
        self._tls = tls
        # called when there may be something to receive
        self.on_news: Callable[[], object] | None = None
        # what is left after a short read may never be told: an end, or what follows an urgent byte
        self._is_untold = False
        self._may_hear = True  # bytes, or an end, may lie in the kernel
        self._heard: anyio.Event | None = None  # set for the task that waits for them
        self._taken: anyio.Event | None = None  # set for the task that waits for room in the kernel

    def __repr__(self) -> str:
        return f"<PolledStream {self._connection.fileno()}>"

    @property
    def extra_attributes(self) -> Mapping[Any, Callable[[], Any]]:
        return {SocketAttribute.raw_socket: lambda: self._connection}

    def changed(self, events: int) -> None:
        """What epoll tells of the socket."""
        if events & (select.EPOLLIN | _UNTOLD):
            self._is_untold = self._is_untold or bool(events & _UNTOLD)
            self._may_hear = True
            _set(self._heard)
            if self.on_news is not None:
                self.on_news()
        if events & (select.EPOLLOUT | _ENDED):
            _set(self._taken)

    async def receive(self, max_bytes: int = 65536) -> bytes:
        if self._may_hear:
            await anyio.lowlevel.checkpoint()
        while (data := self.receive_nowait(max_bytes)) is None:
            self._heard = anyio.Event()
            await self._heard.wait()
        if not data:
            raise anyio.EndOfStream
        return data

    def receive_nowait(self, max_bytes: int) -> bytes | None:
        """Some bytes, none at the end of the stream, or None: there is nothing now."""
        if not self._may_hear:
            return None
        if self._tls is None:
            return self._receive_nowait(max_bytes)
        while not (data := self._tls.read(max_bytes)) and not self._tls.has_ended:
            if not (sealed := self._receive_nowait(max_bytes)):
                return sealed
            self._tls.receive_data(sealed)
        if self.has_unread:
            self._may_hear = True
        return data

    @property
    def has_unread(self) -> bool:
        """Whether bytes that the kernel has given are not received yet."""
        return self._tls is not None and self._tls.has_unread

    def _receive_nowait(self, max_bytes: int) -> bytes | None:
        """See `receive_nowait`; sealed, with TLS."""
        try:
            data = self._connection.recv(max_bytes)
        except BlockingIOError:
            data = None
        except OSError as error:
            raise self._broken() from error
        # What comes after a short read is told, unless it was told together with what was read.
        self._may_hear = self._is_untold or (data is not None and len(data) in (0, max_bytes))
        return data

    def send_nowait(self, item: bytes | memoryview) -> int:
        """How many of these bytes the kernel has taken at once."""
        try:
            if self._tls is None:
                return self._connection.send(item)
            return self._tls.send(self._connection.send, [memoryview(item)])
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._broken() from error

    async def send(self, item: bytes) -> None:
        rest = memoryview(item)
        while rest:
            taken = self.send_nowait(rest)
            if not taken:
                await self.wait_room()
            rest = rest[taken:]

    async def wait_room(self) -> None:
        """Until it may take more, or has ended."""
        self._taken = anyio.Event()
        await self._taken.wait()

    async def send_eof(self) -> None:
        self._connection.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        """Close the socket, and wake the tasks that wait for it. Bytes that the kernel has taken
        are still sent.
        """
        if self._connection.fileno() >= 0:
            self._forget(self._connection.fileno())
            self._connection.close()
            self._may_hear = True
            _set(self._heard)
            _set(self._taken)

    def _broken(self) -> anyio.ClosedResourceError | anyio.BrokenResourceError:
        return (
            anyio.BrokenResourceError()
            if self._connection.fileno() >= 0
            else anyio.ClosedResourceError()
        )


def _set(event: anyio.Event | None) -> None:
    if event is not None:
        event.set()
