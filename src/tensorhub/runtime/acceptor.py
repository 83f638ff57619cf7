"""Accepting readers, and serving each with a blocking thread of its own (a lane).

Responsible for the life of these threads and sockets: none outlives `serve_readers`; and for how many there are: who has not
proved itself is one of the `Strangers`, apart from the readers, none of whom takes more than half of the places. Not
responsible for what may be read (`SharedOwner`), nor for what is said (`Answering`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread

from tensorhub.errors import AuthenticationFailed, OperationTimeout, StateError, TensorHubError
from tensorhub.messages import FromReader, ReadRefused
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_READER
from tensorhub.protocol.frames import NotAuthentic
from tensorhub.protocol.handshake import NONCE_BYTES, ServerHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.runtime.answering import Answering, not_served
from tensorhub.runtime.logs import Tally, get_logger
from tensorhub.runtime.serving import Lane, SharedOwner
from tensorhub.runtime.strangers import READING_STRANGERS_MAX, Strangers, origin_of
from tensorhub.transport import tcp, unix
from tensorhub.types import Incarnation

PATIENCE_S = 0.25  # how long one request waits for chunks that its owner lacks; then the reader may ask elsewhere
REVOKED_S = 1.0  # between two looks at whose token is accepted no more
RETRY_S = 0.1  # after an accept that failed for want of descriptors or memory
ROOM_S = 0.01  # the same, where a stranger goes for it

log = get_logger("tensorhub.owner")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How readers are served. `secrets`: each is accepted, as they are now; b"" is open access. `shared_memory_uids`: see
    `Options`.
    """

    incarnation: Incarnation
    secrets: Sequence[bytes]
    shared_memory_uids: Collection[int] = ()
    readers_max: int = 64
    handshake_timeout_s: float = 10.0
    stall_timeout_s: float = 10.0  # a reader that takes nothing for so long is given up
    patience_s: float = PATIENCE_S


class _Acceptor:
    """One listener's connections. All but `admitted` belongs to the loop's thread."""

    def __init__(self, owner: SharedOwner, settings: ServeSettings) -> None:
        self.owner = owner
        self.settings = settings
        self._strangers: Strangers[Lane] = Strangers(READING_STRANGERS_MAX)
        self._lock = threading.Lock()  # guards the strangers
        self._crowding = Tally(log.warning, "stranger_thrown_out")
        self._shortages = Tally(log.warning, "accept_failed")
        self.lanes: set[Lane] = set()  # all whose sockets are open
        # Who was thrown out has a thread until it notices: so many may be on their way out before the next one is let in.
        self.places = anyio.CapacityLimiter(settings.readers_max + 2 * READING_STRANGERS_MAX)

    def came(self, lane: Lane, origin: str) -> None:
        """A connection, of a stranger yet."""
        self.lanes.add(lane)
        with self._lock:
            gone = self._strangers.admit(lane, origin)
        self._throw_out(gone)

    def make_room(self, reason: str) -> float:
        """Descriptors are short: a stranger goes. How long to wait before the next attempt."""
        self._shortages.count(reason=reason)
        with self._lock:
            gone = self._strangers.oldest_of_most()
        self._throw_out(gone)
        return RETRY_S if gone is None else ROOM_S

    def _throw_out(self, lane: Lane | None) -> None:
        if lane is not None:
            self._crowding.count(strangers_max=READING_STRANGERS_MAX)
            self.owner.stop(lane)

    def went(self, lane: Lane) -> None:
        with self._lock:
            self._strangers.dismiss(lane)

    def admitted(self, lane: Lane, reader: Incarnation) -> str:
        """It has proved who it is: "", or why it is not served, from its own thread."""
        self.went(lane)
        readers_max = self.settings.readers_max
        return self.owner.admit(lane, reader, readers_max, max(1, readers_max // 2))


async def serve_readers(listener: socket.socket, owner: SharedOwner, settings: ServeSettings) -> None:
    """Serve whoever connects to this non-blocking listener, until cancelled; then end all lanes. Leaves it
    open.
    """
    acceptor = _Acceptor(owner, settings)

    async def serve(lane: Lane, connection: BlockingConnection) -> None:
        try:
            limiter = anyio.CapacityLimiter(1)  # its place is taken already
            await anyio.to_thread.run_sync(_serve_lane, lane, connection, acceptor, limiter=limiter)
        finally:
            connection.close()
            acceptor.went(lane)
            acceptor.lanes.remove(lane)
            acceptor.places.release_on_behalf_of(lane)

    async with anyio.create_task_group() as tasks:
        if not isinstance(settings.secrets, tuple):  # else they never change
            tasks.start_soon(_end_revoked, acceptor)
        try:
            while True:
                accepted, origin = await _accept(listener, acceptor)
                connection = BlockingConnection(accepted, stall_timeout_s=settings.stall_timeout_s)
                not_given = _why_not_given(accepted, settings)
                lane = Lane(connection, is_local=tcp.is_local(accepted), not_given=not_given)
                try:
                    await acceptor.places.acquire_on_behalf_of(lane)
                except BaseException:
                    connection.close()
                    raise
                acceptor.came(lane, origin)
                tasks.start_soon(serve, lane, connection)
        finally:
            for lane in acceptor.lanes:
                owner.stop(lane)


async def _end_revoked(acceptor: _Acceptor) -> None:
    """End the lanes of readers whose token is not accepted any more, again and again: one that has a queue pair reads by
    itself, whether it asks for anything or not.
    """
    while True:
        await anyio.sleep(REVOKED_S)
        accepted = tuple(acceptor.settings.secrets)
        for lane in [lane for lane in acceptor.lanes if lane.secret is not None and lane.secret not in accepted]:
            _ended.count(reader=lane.reader, reason="its token is not accepted any more")
            acceptor.owner.stop(lane)


async def _accept(listener: socket.socket, acceptor: _Acceptor) -> tuple[socket.socket, str]:
    """The next connection, tuned, and where it comes from."""
    while True:
        await anyio.wait_readable(listener)
        try:
            accepted, address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError, InterruptedError):
            continue
        except OSError as error:
            if not _is_shortage(error):
                raise
            await anyio.sleep(acceptor.make_room(str(error)))
            continue
        if accepted.family == socket.AF_UNIX:
            return accepted, "this host"
        try:
            tcp.tune(accepted)
        except OSError:  # it has gone already
            accepted.close()
            continue
        return accepted, origin_of(address[0])


def _why_not_given(accepted: socket.socket, settings: ServeSettings) -> str:
    """Why this connection's process may not map this one's memory; "": it may."""
    if accepted.family != socket.AF_UNIX:
        return "it is not connected by a Unix socket"
    return unix.why_not_given(unix.peer_uid(accepted), settings.shared_memory_uids)


def _is_shortage(error: OSError) -> bool:
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


# --------------------------------------------------------------------------------------------------- one lane


_unserved = Tally(log.warning, "reader_refused")
_ended = Tally(log.info, "lane_ended")
_meddled = Tally(log.warning, "frame_not_authentic")


def _serve_lane(lane: Lane, connection: BlockingConnection, acceptor: _Acceptor) -> None:
    """Serve one reader until it leaves, breaks the protocol, stops taking bytes, or the lane is stopped."""
    owner, settings = acceptor.owner, acceptor.settings
    owner.add_lane(lane)
    try:
        if lane.is_stopped:
            return
        handshake = ServerHandshake("owner", settings.incarnation, settings.secrets, os.urandom(NONCE_BYTES))
        connection.handshake(handshake, settings.handshake_timeout_s)
        lane.secret = handshake.secret
        refusal = acceptor.admitted(lane, Incarnation(handshake.client_incarnation))
        with contextlib.closing(Answering(lane, connection, owner, settings.patience_s)) as answering:
            while (read := answering.pending() or _next_read(lane, connection)) is not None:
                if handshake.secret not in settings.secrets:
                    raise AuthenticationFailed("its token is not accepted any more")
                if refusal:
                    _unserved.count(reader=handshake.client_incarnation, reason=refusal)
                    connection.send(ReadRefused(read.request, refusal))
                    return
                lane.rests_from = None
                answering.answer(read)
                lane.rests_from = time.monotonic()
    except ConnectionLost:
        pass
    except StateError as error:  # this process' own: a GPU that has failed, or a lack of memory
        not_served.count(reader=lane.reader, reason=str(error))
    except TensorHubError as error:
        (_meddled if isinstance(error, NotAuthentic) else _ended).count(reader=lane.reader, reason=str(error))
    except Exception:  # a defect: it costs this reader its connection, and nobody else anything (G11)
        log.exception("lane_failed", reader=lane.reader)
    finally:
        owner.remove_lane(lane)
        connection.shutdown()


def _next_read(lane: Lane, connection: BlockingConnection) -> FromReader | None:
    while not lane.is_stopped:
        try:
            return connection.receive(FROM_READER)
        except OperationTimeout:
            # Idle: a reader that is gone is found out by the socket's keepalive. One in the midst of a message, or that is
            # not served, is given up.
            if connection.is_inside_message or lane.reader is None:
                raise
    return None
