"""Accepting readers, and serving each with a blocking thread of its own (a lane).

Responsible for the life of these threads and sockets (none outlives `serve_readers`), and for how
many there are. A connection gets a thread once it has authenticated, and no reader takes more than
half of the places. Not responsible for pending connections (`AcceptLoop`), for permission to read
(`SharedOwner`), nor for answers (`ReadServer`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import anyio
import anyio.abc
import anyio.to_thread

from tensorhub.errors import AuthenticationFailed, OperationTimeout, StateError, TensorHubError
from tensorhub.logs import Tally, get_logger
from tensorhub.messages import DoneReading, FromReader, Locate, Read, ReadRefused
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.certificates import Certificates
from tensorhub.protocol.codec import FROM_READER
from tensorhub.protocol.frames import READ_BYTES_MAX, NotAuthentic
from tensorhub.protocol.handshake import NONCE_BYTES, ServerHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.protocol.tls import Tls
from tensorhub.protocol.tls_stream import accept
from tensorhub.runtime.control.accepting import AcceptLoop, Turns, pending_readers_max
from tensorhub.runtime.data.served_times import LaneTimes
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.transport import sockets, unix
from tensorhub.transport.owner import Lane
from tensorhub.transport.read_server import ReadServer, not_served
from tensorhub.types import Incarnation

# how long one request waits for chunks that its owner lacks; then the reader may ask elsewhere
PATIENCE_S = 0.25
# threads besides those that serve: of refused readers, and of lanes that were stopped and have not
# ended
ENDING_MAX = 64
REVOKED_S = 1.0  # between two looks for readers whose token is no longer accepted

log = get_logger("tensorhub.owner")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How readers are served. `secrets`: each is accepted, as they are now; b"" is open access.
    `shared_memory_uids`: see `Options`.
    """

    incarnation: Incarnation
    secrets: Sequence[bytes]
    shared_memory_uids: Collection[int] = ()
    readers_max: int = 64
    handshake_timeout_s: float = 10.0
    stall_timeout_s: float = 10.0  # a reader that takes nothing for so long is given up
    patience_s: float = PATIENCE_S
    certificates: Certificates | None = None  # None: no TLS


class _Acceptor:
    """One listener's connections. All belongs to the loop's thread."""

    def __init__(
        self, listener: socket.socket, owner: SharedOwner, settings: ServeSettings
    ) -> None:
        self.owner = owner
        self.settings = settings
        self.lanes: set[Lane] = set()  # all whose sockets are open
        self._tls_turns = Turns()
        closings, shortages = (
            Tally(log.warning, "pending_connection_closed"),
            Tally(log.warning, "accept_failed"),
        )
        self.accept_loop = AcceptLoop(
            listener, pending_readers_max(), self._serve, closings, shortages
        )

    async def _serve(self, accepted: socket.socket, authenticated: Callable[[], None]) -> None:
        handshake = ServerHandshake(
            "owner", self.settings.incarnation, self.settings.secrets, os.urandom(NONCE_BYTES)
        )
        certificates, tls = self.settings.certificates, None
        if certificates is not None and accepted.family != socket.AF_UNIX:
            tls = Tls(certificates, "server", peer="reader")
        try:
            until = anyio.current_time() + self.settings.handshake_timeout_s
            if tls is not None:
                turn = self._tls_turns.of(accepted)
                await accept(accepted, tls, turn, self.settings.handshake_timeout_s)
                handshake.binding = tls.binding
            await _authenticate(accepted, tls, handshake, until - anyio.current_time())
        except ConnectionLost:
            return
        except TensorHubError as error:
            _ended.count(reader=None, reason=str(error))
            return
        authenticated()
        if len(self.lanes) >= self.settings.readers_max + ENDING_MAX:
            _unserved.count(
                reader=handshake.client_incarnation, reason="too many connections have not ended"
            )
            return
        connection = _tuned(accepted, tls, self.settings.stall_timeout_s)
        if connection is not None:
            connection.go_on_from(handshake)
            not_given = _why_not_given(accepted, self.settings)
            lane = Lane(
                connection,
                is_local=sockets.is_local(accepted),
                not_given=not_given,
                address=_address_of(accepted),
            )
            lane.secret = handshake.secret
            self.lanes.add(lane)
            try:
                limiter = anyio.CapacityLimiter(1)  # its place is taken already
                await anyio.to_thread.run_sync(
                    _serve_lane, lane, connection, handshake, self, limiter=limiter
                )
            finally:
                connection.close()
                self.lanes.remove(lane)


async def _authenticate(
    connection: socket.socket, tls: Tls | None, handshake: ServerHandshake, timeout_s: float
) -> None:
    """Run the handshake in the loop, so that a pending connection takes no thread."""
    with anyio.move_on_after(timeout_s) as scope:
        await _handshake(connection, tls, handshake)
    if scope.cancelled_caught:
        raise OperationTimeout("the handshake did not end in time")


async def _handshake(
    connection: socket.socket, tls: Tls | None, handshake: ServerHandshake
) -> None:
    while not handshake.done:
        if tls is None or not tls.has_unread:
            await anyio.wait_readable(connection)
        try:
            if tls is None:
                data = connection.recv(handshake.bytes_wanted)
            else:
                data = tls.read(handshake.bytes_wanted)
                if not data and not tls.has_ended:
                    sealed = connection.recv(READ_BYTES_MAX)
                    tls.receive_data(sealed)
                    if sealed:
                        continue
            if not data:
                handshake.receive_eof()
            handshake.receive_data(data)
        except BlockingIOError:
            continue
        except OSError as error:
            raise ConnectionLost(f"the connection is gone: {error!r}") from error
        finally:
            # also where the handshake has failed: it says why
            if answer := handshake.data_to_send():
                # a peer that does not take so little is not worth waiting for
                with contextlib.suppress(OSError):
                    connection.send(answer if tls is None else tls.seal(answer))


async def serve_readers(
    listener: socket.socket, owner: SharedOwner, settings: ServeSettings
) -> None:
    """Serve each connection to this non-blocking listener, until cancelled; then end all lanes.
    Leaves the listener open.
    """
    async with anyio.create_task_group() as tasks:
        acceptor = _Acceptor(listener, owner, settings)
        if not isinstance(settings.secrets, tuple):  # else they never change
            tasks.start_soon(_end_revoked, acceptor)
        try:
            await acceptor.accept_loop.run(tasks)
        finally:
            for lane in acceptor.lanes:
                owner.stop(lane)


async def _end_revoked(acceptor: _Acceptor) -> None:
    """End the lanes of readers whose tokens are revoked, again and again. (A reader with a queue
    pair reads without sending a request.)
    """
    while True:
        await anyio.sleep(REVOKED_S)
        accepted = tuple(acceptor.settings.secrets)
        for lane in [
            lane
            for lane in acceptor.lanes
            if lane.secret is not None and lane.secret not in accepted
        ]:
            _ended.count(reader=lane.reader, reason="its token is not accepted any more")
            acceptor.owner.stop(lane)


def _address_of(accepted: socket.socket) -> str:
    """From where that connection comes: an address without its port, or a user of this host."""
    if accepted.family == socket.AF_UNIX:
        return f"user {unix.peer_uid(accepted)}"
    with contextlib.suppress(OSError):  # it has gone already
        return str(accepted.getpeername()[0])
    return ""


def _why_not_given(accepted: socket.socket, settings: ServeSettings) -> str:
    """Why the connected process may not map this process's memory; "" if it may."""
    if accepted.family != socket.AF_UNIX:
        return "it is not connected by a Unix socket"
    return unix.why_not_given(unix.peer_uid(accepted), settings.shared_memory_uids)


def _tuned(
    connection: socket.socket, tls: Tls | None, stall_timeout_s: float
) -> BlockingConnection | None:
    """That connection, for a thread; None if its peer has gone already."""
    try:
        if connection.family != socket.AF_UNIX:
            sockets.tune(connection)
    except OSError:
        connection.close()
        return None
    return BlockingConnection(connection, stall_timeout_s=stall_timeout_s, tls=tls)


# --------------------------------------------------------------------------------------------------
# one lane


_unserved = Tally(log.warning, "reader_refused")
_ended = Tally(log.info, "lane_ended")
_meddled = Tally(log.warning, "frame_not_authentic")


def _serve_lane(
    lane: Lane, connection: BlockingConnection, handshake: ServerHandshake, acceptor: _Acceptor
) -> None:
    """Serve one reader until it leaves, breaks the protocol, stops taking bytes, or the lane is
    stopped.
    """
    owner, settings = acceptor.owner, acceptor.settings
    owner.add_lane(lane)
    try:
        if lane.is_stopped:
            return
        reader, readers_max = Incarnation(handshake.client_incarnation), settings.readers_max
        refusal = owner.admit(lane, reader, readers_max, max(1, readers_max // 2))
        with (
            contextlib.closing(LaneTimes(lane, owner.served_times)) as times,
            contextlib.closing(
                ReadServer(lane, connection, owner, owner.sides, settings.patience_s, times.granted)
            ) as server,
        ):
            while (read := server.pending() or _next_read(lane, connection)) is not None:
                if handshake.secret not in settings.secrets:
                    raise AuthenticationFailed("its token is not accepted any more")
                if refusal:
                    _unserved.count(reader=handshake.client_incarnation, reason=refusal)
                    connection.send(ReadRefused(read.request, refusal))
                    return
                if isinstance(read, DoneReading):
                    times.done()
                    continue
                lane.rests_from = None
                if isinstance(read, Read | Locate):
                    times.asked(read.lease)
                server.answer(read)
                times.answered()
                lane.rests_from = time.monotonic()
    except ConnectionLost:
        pass
    except StateError as error:  # this process' own: a GPU that has failed, or a lack of memory
        not_served.count(reader=lane.reader, reason=str(error))
    except TensorHubError as error:
        (_meddled if isinstance(error, NotAuthentic) else _ended).count(
            reader=lane.reader, reason=str(error)
        )
    # a defect: it costs this reader its connection, and no other reader anything (G11)
    except Exception:
        log.exception("lane_failed", reader=lane.reader)
    finally:
        owner.remove_lane(lane)
        connection.shutdown()


def _next_read(lane: Lane, connection: BlockingConnection) -> FromReader | None:
    while not lane.is_stopped:
        try:
            return connection.receive(FROM_READER)
        except OperationTimeout:
            # Idle: a reader that is gone is found out by the socket's keepalive. One in the midst
            # of a message, or that is not served, is given up.
            if connection.is_inside_message or lane.reader is None:
                raise
    return None
