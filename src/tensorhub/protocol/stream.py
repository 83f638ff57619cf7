"""Driver for an anyio byte stream: typed messages on the control plane, on asyncio and on trio.

Responsible for the deadline of the handshake, for sends that do not interleave, and for one
exception that says that the stream is gone. Not responsible for connecting, for the deadline of a
message (the caller's cancel scope), nor for what a message means.

Raises ProtocolError, AuthenticationFailed, OperationTimeout (handshake) and ConnectionLost.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Generic, Self, TypeVar

import anyio
from anyio.abc import ByteStream, SocketAttribute

from tensorhub.errors import OperationTimeout, TensorHubError
from tensorhub.messages import PROTOCOL_VERSION, ClientHello, Message, ServerHello
from tensorhub.protocol import codec
from tensorhub.protocol.codec import UnknownMessage, Vocabulary
from tensorhub.protocol.frames import READ_BYTES_MAX, FrameDecoder, FrameEncoder
from tensorhub.protocol.handshake import Handshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.polled_stream import PolledStream
from tensorhub.protocol.pot import Pot

UNKNOWN_MAX = 1024  # messages of a younger release, that one stream passes over

M = TypeVar("M")
PeerHello = TypeVar("PeerHello", ClientHello, ServerHello)


class MessageStream(Generic[M]):
    """A byte stream, which this object owns from now on, as a stream of messages. `incoming`: what
    the peer may say.

    One task receives; any number may send. A receive that is cancelled loses nothing; a send that
    is cancelled under way may leave half a frame. Then no further send is possible, unless the
    stream is a `PolledStream`. Iterating gives messages until the peer closes.
    """

    def __init__(self, stream: ByteStream, incoming: Vocabulary[M], frame_bytes_max: int) -> None:
        self._stream = stream
        self._incoming = incoming
        self._decoder = FrameDecoder(frame_bytes_max)
        self._encoder = FrameEncoder(frame_bytes_max)
        self.version = PROTOCOL_VERSION  # the peer's, once the handshake has told it
        # told of each message of a younger release, which is passed over; None: it ends the stream
        self.on_unknown: Callable[[UnknownMessage], None] | None = None
        self._unknown_left = UNKNOWN_MAX
        self._sending = anyio.Lock(fast_acquire=True)
        self._pot: Pot | None = None  # for frames that are larger than what one read brings
        self._taken = 0  # bytes from there: for the frame that is received, or was received last
        self._torn = False  # True while, and after, a frame is sent in part
        # of what `send_nowait` was given; it goes before everything else
        self._rest = memoryview(b"")
        # True while its receiver waits for the peer: no byte that has arrived is kept here
        self.awaits_bytes = False

    def __repr__(self) -> str:
        torn = ", torn" if self._torn else ""
        return f"<MessageStream from {self._incoming.speaker}: {self._decoder!r}{torn}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def handshake(self, handshake: Handshake[PeerHello], timeout_s: float) -> PeerHello:
        """Run a handshake, either side's, and return the peer's hello. `timeout_s` bounds all of
        it.

        On an error the stream is of no more use; close it.
        """
        with anyio.move_on_after(timeout_s) as scope:
            await self._send_bytes(handshake.data_to_send())
            while not handshake.done:
                await self._step(handshake)
        if scope.cancelled_caught:
            silence = (
                ""
                if handshake.has_heard
                else ", and nothing was said at all: it has very much to do, or this is another "
                "program's port"
            )
            raise OperationTimeout(f"the handshake took longer than {timeout_s:g} s{silence}")
        self.version = handshake.version
        mine, theirs = handshake.frame_keys
        self._encoder.authenticate(mine)
        self._decoder.authenticate(theirs)
        self._decoder.receive_data(handshake.take_rest())
        return handshake.peer

    async def _step(self, handshake: Handshake[PeerHello]) -> None:
        try:
            data = await self._receive_bytes()
        except ConnectionLost:
            handshake.receive_eof()
            raise
        if not data:
            handshake.receive_eof()
        try:
            handshake.receive_data(data)
        except TensorHubError:
            with contextlib.suppress(ConnectionLost):  # the peer need not hear why
                await self._send_bytes(handshake.data_to_send())
            raise
        await self._send_bytes(handshake.data_to_send())

    async def send(self, *messages: Message) -> None:
        """Send messages, whole and at once, after those that other tasks are sending.

        Raises ProtocolError, with nothing sent, for a message that breaks its own bounds or is too
        large.
        """
        encode = codec.written_for(self.version).encode
        await self.send_encoded(*[encode(message) for message in messages])

    async def send_encoded(self, *bodies: bytes) -> None:
        """Send messages that are encoded already; see `send`."""
        async with self._sending:
            if not isinstance(self._stream, PolledStream):
                await self._send_bytes(self._encoder.frames(*bodies))
                return
            while not self.send_nowait(*bodies):
                # their rest waits in this object: a traceback of a cancelled send must not keep it
                bodies = ()
                await self._stream.wait_room()

    def send_nowait(self, *bodies: bytes) -> bool:
        """Send these at once over a `PolledStream`, if no other task is sending. False: the peer
        has not taken all of them, and the rest goes with the next message.
        """
        assert isinstance(self._stream, PolledStream)
        if bodies:
            self._rest = memoryview(bytes(self._rest) + self._encoder.frames(*bodies))
        try:
            while self._rest and (taken := self._stream.send_nowait(self._rest)):
                self._rest = self._rest[taken:]
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise ConnectionLost(f"the connection is gone: {error!r}") from error
        return not self._rest

    def limit_received(self, frame_bytes_max: int, pot: Pot | None = None) -> None:
        """From now on, refuse a larger frame unread. The limit for sent frames stays. `pot`: a
        frame that is larger than one read (`READ_BYTES_MAX`) takes its bytes from there when its
        header has come, and gives them back when the next message is asked for, or at the end.
        """
        self._decoder.frame_bytes_max = frame_bytes_max
        self._pot = pot

    async def receive(self) -> M | None:
        """The next message, None if the peer closed between two. ProtocolError if it did so inside
        one, NotAuthentic.
        """
        while True:
            self._give_back()
            while (body := self._decoder.next_frame()) is None:
                if self._pot is not None and (nbytes := self._room_needed()):
                    await self._pot.take(nbytes)
                    self._taken = nbytes
                data = await self._receive_bytes()
                if not data:
                    self._decoder.receive_eof()
                    return None
                self._decoder.receive_data(data)
            if (message := self._decoded(body)) is not None:
                return message

    def receive_nowait(self) -> M | None:
        """The next message of a `PolledStream`, if it is there. None while it is not
        (`awaits_bytes`), or if `receive` has to go on: there has to be room for it, or it is the
        end. Raises as `receive`.
        """
        assert isinstance(self._stream, PolledStream)
        self.awaits_bytes = False
        while True:
            self._give_back()
            while (body := self._decoder.next_frame()) is None:
                if self._pot is not None and self._room_needed():
                    return None
                try:
                    data = self._stream.receive_nowait(READ_BYTES_MAX)
                except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
                    raise ConnectionLost(f"the connection is gone: {error!r}") from error
                if not data:
                    self.awaits_bytes = data is None
                    return None
                self._decoder.receive_data(data)
            if (message := self._decoded(body)) is not None:
                return message

    def _decoded(self, body: bytes) -> M | None:
        """The message in it; None: it is one of a younger release, which is passed over."""
        try:
            return codec.decode(body, self._incoming)
        except UnknownMessage as error:
            if self.on_unknown is None or not self._unknown_left:
                raise
            self._unknown_left -= 1
            self.on_unknown(error)
        return None

    def tell_news(self, on_news: Callable[[], object] | None) -> None:
        """Have this called when `receive_nowait` may have more."""
        assert isinstance(self._stream, PolledStream)
        self._stream.on_news = on_news

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> M:
        message = await self.receive()
        if message is None:
            raise StopAsyncIteration
        return message

    async def aclose(self) -> None:
        """Close the stream; a second call does nothing."""
        self._give_back()
        self._rest = memoryview(b"")
        await self._stream.aclose()

    def _room_needed(self) -> int:
        """For the frame that has begun, if it is a large one that has none yet."""
        if self._taken or not self._decoder.is_inside_frame:
            return 0
        nbytes = self._decoder.bytes_announced
        return nbytes if nbytes > READ_BYTES_MAX else 0

    def _give_back(self) -> None:
        if self._pot is not None and self._taken:
            self._pot.give_back(self._taken)
            self._taken = 0

    async def _receive_bytes(self) -> bytes:
        """Some bytes, none at the end of the stream."""
        self.awaits_bytes = True
        try:
            return await self._stream.receive(READ_BYTES_MAX)
        except anyio.EndOfStream:
            return b""
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
            raise ConnectionLost(f"the connection is gone: {error!r}") from error
        finally:
            self.awaits_bytes = False

    @property
    def readiness(self) -> int:
        """What `poll` says of its socket now: `POLLIN` also for an end, `POLLOUT` if the peer takes
        what it is told.
        """
        connection: socket.socket = self._stream.extra(SocketAttribute.raw_socket)
        unread = isinstance(self._stream, PolledStream) and self._stream.has_unread
        if connection.fileno() < 0:
            return select.POLLIN  # its end, which is to be read
        look = select.poll()
        look.register(connection, select.POLLIN | select.POLLOUT)
        found = look.poll(0)
        return (found[0][1] if found else 0) | (select.POLLIN if unread else 0)

    async def _send_bytes(self, data: bytes) -> None:
        if not data:
            return
        if self._torn:
            raise ConnectionLost("an earlier message was sent in part only")
        self._torn = True
        try:
            await self._stream.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError, OSError) as error:
            raise ConnectionLost(f"the connection is gone: {error!r}") from error
        self._torn = False
