"""Driver for a blocking socket with a thread of its own: frames, and payloads behind them, which
are not copied.

Responsible for exact reads (a frame never takes bytes of the payload behind it), for scatter and
gather of any number of buffers, and for a bound on every wait. These bounds are the kernel's own
timeouts, because payload is read by MSG_WAITALL on a socket that really blocks. Not responsible for
connecting, nor for what a message means.

Raises ProtocolError, AuthenticationFailed, OperationTimeout (nothing, or less than `PACE_BYTES`,
moved for `stall_timeout_s`) and ConnectionLost. Only `shutdown` may be called from other threads.
It ends any blocked call.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Final, Self, TypeVar

from tensorhub.errors import OperationTimeout, ProtocolError, TensorHubError, shortage
from tensorhub.messages import ClientHello, Message, ServerHello
from tensorhub.protocol import codec
from tensorhub.protocol.codec import Vocabulary
from tensorhub.protocol.frames import FrameDecoder, FrameEncoder
from tensorhub.protocol.handshake import Handshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.tcp_info import TcpCounts, counts_of, has_room
from tensorhub.protocol.tls import SEALED_BYTES_MAX, Tls

M = TypeVar("M")
PeerHello = TypeVar("PeerHello", ClientHello, ServerHello)

FRAME_BYTES_MAX: Final = 2**20
# a peer that moves less of a payload in `stall_timeout_s` has stalled
PACE_BYTES: Final = 64 * 2**10
BUFFERS_MAX: Final = 1024  # Linux' IOV_MAX: the most buffers that one system call takes


class BlockingConnection:
    """A connected socket, which this object owns from now on; close it here."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        stall_timeout_s: float,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        tls: Tls | None = None,
    ) -> None:
        self.stall_timeout_s = stall_timeout_s
        self._socket = sock
        # for the peer's version of the protocol, which the handshake tells
        self._encode = codec.encode
        self._tls = tls
        # what has arrived, and is to be opened
        self._room = memoryview(bytearray(SEALED_BYTES_MAX if tls is not None else 0))
        self._encoder, self._decoder = FrameEncoder(frame_bytes_max), FrameDecoder(frame_bytes_max)
        # that `receive_into` has taken in, also where it failed in the midst of it
        self.payload_bytes = 0
        self.sent_bytes = 0  # of payload
        self.calls = 0  # of the kernel, that move bytes
        # so that `shutdown` never meets a descriptor that `close` gave back
        self._ending = threading.Lock()
        self._wait_s = stall_timeout_s  # for the socket, at most
        sock.settimeout(None)
        self._limit_waits(stall_timeout_s)

    def __repr__(self) -> str:
        return f"<BlockingConnection on descriptor {self._socket.fileno()}: {self._decoder!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def passes_descriptors(self) -> bool:
        return self._socket.family == socket.AF_UNIX

    @property
    def descriptor(self) -> int:
        """The socket's, to wait for several sockets together."""
        return self._socket.fileno()

    def is_readable(self) -> bool:
        """Whether something has come, or the end, so that `receive` would not wait for its
        beginning.
        """
        waiting = select.poll()
        waiting.register(self._socket, select.POLLIN)
        return self._has_unread or bool(waiting.poll(0))

    @property
    def _has_unread(self) -> bool:
        """Whether bytes that the kernel has given are not received yet."""
        return self._tls is not None and self._tls.has_unread

    @property
    def is_quiet(self) -> bool:
        """Whether the peer has neither closed the connection nor said anything that was not
        received.
        """
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return not (self.is_inside_message or self._has_unread)
        except OSError:
            return False
        return False

    # --------------------------------------------------------------------------------------------
    # handshake

    def open_tls(self, timeout_s: float) -> bytes:
        """A client's TLS handshake, if there is TLS. Returns what `Handshake.binding` is then.
        `timeout_s` bounds all of it; on an error the connection is of no more use.
        """
        tls, deadline = self._tls, time.monotonic() + timeout_s
        if tls is None:
            return b""
        data: bytes | memoryview = b""
        try:
            while True:
                try:
                    tls.handshake(data)
                except TensorHubError:
                    with contextlib.suppress(OSError):
                        self._socket.send(tls.data_to_send())
                    raise
                if tls.is_open:  # the last bytes of the handshake go with the first message
                    return tls.binding
                self._limit_waits(deadline - time.monotonic())
                self._socket.sendall(tls.data_to_send())
                if not (arrived := self._socket.recv_into(self._room)):
                    raise tls.receive_eof()
                data = self._room[:arrived]
        except OperationTimeout as error:
            raise OperationTimeout(f"the TLS handshake took longer than {timeout_s:g} s") from error
        except OSError as error:
            raise self._failed(error, "sent nothing") from error

    def handshake(self, handshake: Handshake[PeerHello], timeout_s: float) -> PeerHello:
        """Run a handshake, either side's, and return the peer's hello. `timeout_s` bounds all of
        it.

        On an error the connection is of no more use; close it.
        """
        deadline = time.monotonic() + timeout_s
        try:
            self._send_before(deadline, handshake.data_to_send())
            while not handshake.done:
                self._step(handshake, deadline)
        except OperationTimeout as error:
            raise OperationTimeout(f"the handshake took longer than {timeout_s:g} s") from error
        self.go_on_from(handshake)
        self._limit_waits(self.stall_timeout_s)
        return handshake.peer

    def go_on_from(self, handshake: Handshake[PeerHello]) -> None:
        """Go on from a handshake that is done."""
        self._encode = codec.written_for(handshake.version).encode
        mine, theirs = handshake.frame_keys
        self._encoder.authenticate(mine)
        self._decoder.authenticate(theirs)
        self._decoder.receive_data(handshake.take_rest())

    def _step(self, handshake: Handshake[PeerHello], deadline: float) -> None:
        self._limit_waits(deadline - time.monotonic())
        try:
            data = self._receive(handshake.bytes_wanted)
        except ConnectionLost:
            handshake.receive_eof()
            raise
        if not data:
            handshake.receive_eof()
        try:
            handshake.receive_data(data)
        except TensorHubError:
            # the peer need not hear why
            with contextlib.suppress(ConnectionLost, OperationTimeout):
                self._send_before(deadline, handshake.data_to_send())
            raise
        self._send_before(deadline, handshake.data_to_send())

    def _send_before(self, deadline: float, data: bytes) -> None:
        if data:
            self._limit_waits(deadline - time.monotonic())
            self._send([memoryview(data)])

    def tcp_counts(self) -> TcpCounts | None:
        """What the kernel counts of sending; None: nothing."""
        return counts_of(self._socket)

    @property
    def has_room(self) -> bool:
        """Whether the socket's buffer, which is TCP's, is emptier than while it keeps its sender
        waiting.
        """
        return has_room(self._socket)

    @property
    def is_inside_message(self) -> bool:
        """Whether a part of a message has been received, and the rest has not."""
        return self._decoder.is_inside_frame

    # --------------------------------------------------------------------------------------------
    # receiving

    def receive(self, allowed: Vocabulary[M]) -> M | None:
        """The next message, or None if the peer closed, or `shutdown` was called, between two
        messages.

        Raises OperationTimeout if nothing came for `stall_timeout_s`, or a message took longer than
        twice that; the call can be repeated then. ProtocolError also if the stream ended inside a
        message; NotAuthentic.
        """
        deadline = time.monotonic() + self.stall_timeout_s
        while (body := self._decoder.next_frame()) is None:
            data = self._receive(self._decoder.bytes_wanted)
            if not data:
                self._decoder.receive_eof()
                return None
            self._decoder.receive_data(data)
            if time.monotonic() > deadline and self._decoder.bytes_wanted:
                raise OperationTimeout(
                    f"a message did not arrive whole within {self.stall_timeout_s:g} s"
                )
        return codec.decode(body, allowed)

    def receive_into(self, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, in order, with exactly the bytes that come next. They must be writable
        and contiguous.

        Raises OperationTimeout if less than PACE_BYTES came in `stall_timeout_s`, ConnectionLost if
        the stream ends before. After an error the connection is of no more use.
        """
        left = _Left(buffers)
        rest = self._decoder.take_rest()
        if rest:
            used = left.fill(rest)
            self.payload_bytes += used
            self._decoder.receive_data(rest[used:])
        pace = _Pace(self.stall_timeout_s)
        while left:
            self.calls += 1
            try:
                count = self._receive_some(left.next_buffers())
            except OSError as error:
                raise self._failed(error, "sent nothing") from error
            if count == 0:
                raise ConnectionLost("the peer closed the connection inside a payload")
            self.payload_bytes += count
            left.advance(count)
            if left:
                pace.check(count, "sent")

    def _receive(self, count: int) -> bytes:
        """At most `count` bytes; fewer only at the end of the stream, or when a timeout cut it
        short.
        """
        self.calls += 1
        try:
            if self._tls is None:
                return self._socket.recv(count, socket.MSG_WAITALL)
            room = memoryview(bytearray(count))
            return bytes(room[: self._receive_some([room])])
        except OSError as error:
            raise self._failed(error, "sent nothing") from error

    def _receive_some(self, buffers: Sequence[memoryview]) -> int:
        """How many of the bytes that come next are in these buffers now; 0 at the end of the
        stream. Fewer than fit: of TLS, or a timeout cut it short. OSError.
        """
        if self._tls is None:
            return self._socket.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]
        until = time.monotonic() + self._wait_s
        while not (count := self._tls.read_into(buffers)) and not self._tls.has_ended:
            if time.monotonic() > until:  # a peer that drips: a record is not whole yet
                raise BlockingIOError
            if not (arrived := self._socket.recv_into(self._room)):
                return 0
            self._tls.receive_data(self._room[:arrived])
        return count

    # ----------------------------------------------------------------------------------------------
    # sending

    def send(self, message: Message) -> None:
        """Send one message. Errors as of `send_with_payload`."""
        self.send_with_payload(message, ())

    def send_with_payload(self, message: Message, buffers: Sequence[memoryview]) -> None:
        """Send one message and, right behind it, the bytes of the buffers, which are not copied.

        Raises ProtocolError, with nothing sent, for a message that breaks its own bounds. Raises
        OperationTimeout if the peer took less than PACE_BYTES in `stall_timeout_s`, ConnectionLost
        if it is gone; the connection is of no more use then.
        """
        self._send([memoryview(self._encoder.frames(self._encode(message))), *buffers])
        self.sent_bytes += sum([buffer.nbytes for buffer in buffers])

    def send_payload(self, buffers: Sequence[memoryview]) -> None:
        """Send more of the bytes that follow the last message. Errors as of `send_with_payload`."""
        self._send(buffers)
        self.sent_bytes += sum([buffer.nbytes for buffer in buffers])

    def _send(self, buffers: Sequence[memoryview]) -> None:
        left, pace = _Left(buffers), _Pace(self.stall_timeout_s)
        while left:
            self.calls += 1
            try:
                if self._tls is None:
                    count = self._socket.sendmsg(left.next_buffers(), (), socket.MSG_NOSIGNAL)
                else:
                    count = self._tls.send(self._give, left.next_buffers())
            except OSError as error:
                raise self._failed(error, "took nothing") from error
            left.advance(count)
            if left:
                pace.check(count, "took")

    def _give(self, data: memoryview) -> int:
        return self._socket.send(data, socket.MSG_NOSIGNAL)

    # -------------------------------------------------------------------------------------------
    # descriptors

    def send_descriptors(self, descriptors: Sequence[int]) -> None:
        """Send one byte with these descriptors, over a Unix socket. ConnectionLost,
        OperationTimeout.
        """
        try:
            socket.send_fds(self._socket, [b"\0"], list(descriptors), socket.MSG_NOSIGNAL)
        except OSError as error:
            raise self._failed(error, "took nothing") from error

    def receive_descriptors(self, count: int) -> list[int]:
        """`count` descriptors, with the byte that carries them; close them. ConnectionLost,
        OperationTimeout, ProtocolError (another number came), StateError (this process has no room
        for them).
        """
        try:
            data, descriptors, flags, _ = socket.recv_fds(
                self._socket, 1, count, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise self._failed(error, "sent nothing") from error
        if not data or len(descriptors) != count or flags & socket.MSG_CTRUNC:
            for descriptor in descriptors:
                os.close(descriptor)
            # the kernel drops those that find no place here
            if len(descriptors) < count and flags & socket.MSG_CTRUNC:
                raise shortage(OSError(errno.EMFILE, "")) or OSError
            raise ProtocolError(f"{count} descriptors are said to follow, and others came")
        return descriptors

    # ----------------------------------------------------------------------------------------------
    # ending

    @property
    def has_ended(self) -> bool:
        """Whether `shutdown` was called, or the peer is seen to be gone, without reading. Does not
        block.
        """
        poll = select.poll()
        with self._ending:
            if self._socket.fileno() < 0:
                return True
            poll.register(self._socket, select.POLLRDHUP)
            return bool(poll.poll(0))

    def shutdown(self) -> None:
        """End the connection, from any thread: calls fail then, or see the end of the stream."""
        with self._ending, contextlib.suppress(OSError):  # it is down already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Give the socket back; for the thread that uses the connection. A second call does
        nothing.
        """
        with self._ending:
            self._socket.close()

    def _failed(self, error: OSError, idle: str) -> Exception:
        if isinstance(error, BlockingIOError):
            return OperationTimeout(f"the peer {idle} for {self.stall_timeout_s:g} s")
        return ConnectionLost(f"the connection is gone: {error}")

    def _limit_waits(self, seconds: float) -> None:
        """Bound each system call on the socket. OperationTimeout if there is no time left."""
        if seconds <= 0:
            raise OperationTimeout("no time left")
        self._wait_s = seconds
        whole, part = divmod(max(1, int(min(seconds, 10**9) * 1_000_000)), 1_000_000)
        limit = struct.pack("@ll", whole, part)  # a struct timeval; 0 would mean no limit
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        except OSError as error:
            raise ConnectionLost(f"the connection is gone: {error}") from error


class _Pace:
    """Checks that a payload moves: a peer that drips keeps memory from being written, or a place
    from other readers.
    """

    __slots__ = ("_bytes", "_since", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._since = time.monotonic()
        self._bytes = 0  # moved since then

    def check(self, count: int, did: str) -> None:
        """These bytes have moved, and more are to come. OperationTimeout: they were too few for the
        time.
        """
        self._bytes += count
        now = time.monotonic()
        if now - self._since < self._window_s:
            return
        if self._bytes < PACE_BYTES:
            raise OperationTimeout(
                f"the peer {did} only {self._bytes} bytes in {now - self._since:.1f} s"
            )
        self._since, self._bytes = now, 0


class _Left:
    """The part of a sequence of buffers that is still to be moved."""

    __slots__ = ("_buffers", "_index")

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        # Empty ones are dropped: a call with nothing to move looks like the end of the stream.
        self._buffers = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        self._index = 0  # the first buffer that is not moved whole; it is cut to its rest

    def __bool__(self) -> bool:
        return self._index < len(self._buffers)

    def next_buffers(self) -> list[memoryview]:
        return self._buffers[self._index : self._index + BUFFERS_MAX]

    def advance(self, count: int) -> None:
        while count:
            buffer = self._buffers[self._index]
            if count < buffer.nbytes:
                self._buffers[self._index] = buffer[count:]
                return
            count -= buffer.nbytes
            self._index += 1

    def fill(self, data: bytes) -> int:
        """Copy from `data` what fits, and return how much that was."""
        used = 0
        while self and used < len(data):
            buffer = self._buffers[self._index]
            part = data[used : used + buffer.nbytes]
            buffer[: len(part)] = part
            used += len(part)
            self.advance(len(part))
        return used
