"""Accepting readers, and serving each with a blocking thread of its own (a lane).

Responsible for the life of these threads and sockets: none outlives `serve_readers`; and for how many there are: who has not
proved itself is one of the `Strangers`, apart from the readers, none of whom takes more than half of the places. Not
responsible for what may be read (`SharedOwner`).
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import anyio
import anyio.to_thread

from tensorhub.errors import AuthenticationFailed, OperationTimeout, ProtocolError, TensorHubError
from tensorhub.messages import (
    HAS_RUNS_MAX,
    SEGMENTS_MAX,
    ChunkDigest,
    ChunkFollows,
    ChunksFollow,
    ChunksLie,
    FindMemory,
    FindSegments,
    FromReader,
    Locate,
    MemoryIs,
    Read,
    ReadRefused,
    SegmentsAre,
    StillWaiting,
)
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_READER
from tensorhub.protocol.handshake import NONCE_BYTES, ServerHandshake
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.runtime.chunks import ChunkMemory, is_gil_contended
from tensorhub.runtime.hot import HOT_BYTES, Digests, cut
from tensorhub.runtime.logs import Tally, get_logger
from tensorhub.runtime.serving import Lane, SharedOwner
from tensorhub.runtime.strangers import READING_STRANGERS_MAX, Strangers, origin_of
from tensorhub.transport import tcp
from tensorhub.types import ContentId, Incarnation, RegistrationId
from tensorhub.worker.owner import CHUNKS_PER_ACCESS_MAX, Access, Refusal, Wait

SEND_BYTES = 16 * 2**20  # of one send call whose digests are known; a fence may have to wait for it
LOCAL_SEND_BYTES = 64 * 2**20  # the same within a host, in some 20 ms: beside a busy Python thread each call costs 5 ms more
FIRST_SEND_BYTES = HOT_BYTES  # of one whose digests are made before
LOCATE_BYTES = 2**40  # of one answer that says where chunks lie, and sends none
PATIENCE_S = 0.25  # how long one request waits for chunks that its owner lacks; then the reader may ask elsewhere
RETRY_S = 0.1  # after an accept that failed for want of descriptors or memory
ROOM_S = 0.01  # the same, where a stranger goes for it
NOT_ONE_SIDED = "this worker's memory is not to be read from here: its transports are others, or it is on another host"

log = get_logger("tensorhub.owner")


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """How readers are served. `secrets`: each is accepted, as they are now; b"" is open access."""

    incarnation: Incarnation
    secrets: Sequence[bytes]
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
        try:
            while True:
                accepted, origin = await _accept(listener, acceptor)
                connection = BlockingConnection(accepted, stall_timeout_s=settings.stall_timeout_s)
                lane = Lane(connection, is_local=tcp.is_local(accepted))
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


def _is_shortage(error: OSError) -> bool:
    return error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


# --------------------------------------------------------------------------------------------------- one lane


_unserved = Tally(log.warning, "reader_refused")
_ended = Tally(log.info, "lane_ended")


def _serve_lane(lane: Lane, connection: BlockingConnection, acceptor: _Acceptor) -> None:
    """Serve one reader until it leaves, breaks the protocol, stops taking bytes, or the lane is stopped."""
    owner, settings = acceptor.owner, acceptor.settings
    owner.add_lane(lane)
    try:
        if lane.is_stopped:
            return
        handshake = ServerHandshake("owner", settings.incarnation, settings.secrets, os.urandom(NONCE_BYTES))
        connection.handshake(handshake, settings.handshake_timeout_s)
        refusal = acceptor.admitted(lane, Incarnation(handshake.client_incarnation))
        while (read := _next_read(lane, connection)) is not None:
            if handshake.secret not in settings.secrets:
                raise AuthenticationFailed("its token is not accepted any more")
            if refusal:
                _unserved.count(reader=handshake.client_incarnation, reason=refusal)
                connection.send(ReadRefused(read.request, refusal))
                return
            if isinstance(read, FindMemory):
                _find(read, lane, connection, owner)
            elif isinstance(read, FindSegments):
                _share(read, connection, owner)
            else:
                _answer(read, lane, connection, owner, settings.patience_s)
    except ConnectionLost:
        pass
    except TensorHubError as error:
        _ended.count(reader=lane.reader, reason=str(error))
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


def _find(read: FindMemory, lane: Lane, connection: BlockingConnection, owner: SharedOwner) -> None:
    """Say in which process this is, so that the reader can prove that it reads that one; or that it may not."""
    header = owner.header
    said = MemoryIs(read.request, *header) if header is not None and lane.is_local else MemoryIs(read.request, 0, 0, b"")
    connection.send(said)


def _share(read: FindSegments, connection: BlockingConnection, owner: SharedOwner) -> None:
    """Hand over the descriptors of the memory in which a registration is, if that can be shared."""
    found = owner.segments_of(RegistrationId(read.registration), read.generation) if connection.passes_descriptors else ()
    if isinstance(found, Refusal):
        connection.send(ReadRefused(read.request, found.reason))
        return
    found = found if len(found) <= SEGMENTS_MAX else ()
    connection.send(SegmentsAre(read.request, tuple([(segment.address, segment.nbytes) for segment in found])))
    if found:
        connection.send_descriptors([segment.descriptor for segment in found])


def _answer(read: Read | Locate, lane: Lane, connection: BlockingConnection, owner: SharedOwner, patience_s: float) -> None:
    """Send what is asked for, or say where it is, as far as it is available and becomes so within `patience_s` of waiting;
    or refuse it.
    """
    if isinstance(read, Locate) and (owner.header is None or not lane.is_local):
        connection.send(ReadRefused(read.request, NOT_ONE_SIDED))
        return
    waited_until = time.monotonic() + patience_s
    wanted: Sequence[int] = _chunks_of(read)
    registration, content_id = RegistrationId(read.registration), ContentId(read.content_id)
    send_bytes = LOCAL_SEND_BYTES if lane.is_local else SEND_BYTES
    large_bytes, is_contended = (LOCATE_BYTES if isinstance(read, Locate) else send_bytes), False
    while wanted:
        bytes_max = large_bytes if lane.is_digested or is_contended else FIRST_SEND_BYTES
        right = (lane, registration, read.generation, content_id)
        with owner.access(*right, wanted, bytes_max, waited_until - time.monotonic()) as answer:
            if isinstance(answer, tuple):
                access, memory = answer
                is_first = memory.is_digested and None in access.digests
                is_hot = is_first and not is_contended and isinstance(read, Read) and len(access.chunks) == 1
                digest_s = (_send_hot if is_hot else _send)(read, access, memory, connection, owner)
                wanted = access.rest
                is_contended = is_first and is_gil_contended(sum(memory.sizes[chunk] for chunk in access.chunks), digest_s)
                lane.is_digested = not is_first
        if isinstance(answer, Wait):
            has = owner.has(registration, read.generation, HAS_RUNS_MAX)
            connection.send(StillWaiting(read.request, has))
            return
        if isinstance(answer, Refusal):
            connection.send(ReadRefused(read.request, answer.reason))
            return


def _send(
    read: Read | Locate, access: Access, memory: ChunkMemory, connection: BlockingConnection, owner: SharedOwner
) -> float:
    """Send an access' chunks, or say where they are. Returns the seconds that missing digests took, made before."""
    started = time.perf_counter()
    chunks = tuple(owner.digests_of(access, memory))
    digest_s = time.perf_counter() - started
    if isinstance(read, Locate):
        places = tuple([(chunk, digest, memory.address(chunk)) for chunk, digest in chunks])
        connection.send(ChunksLie(read.request, places, owner.word_of(access)))
    else:
        buffers = [memory.buffer(chunk) for chunk in access.chunks]
        connection.send_with_payload(ChunksFollow(read.request, chunks), buffers)
    return digest_s


def _send_hot(
    read: Read | Locate, access: Access, memory: ChunkMemory, connection: BlockingConnection, owner: SharedOwner
) -> float:
    """Send an access' one chunk, and make its digest of each piece just before it is sent: it is read from memory once.
    Returns the seconds that the digest took.
    """
    (chunk,) = access.chunks
    digests = Digests([(chunk, memory.buffer(chunk))])
    connection.send(ChunkFollows(read.request, chunk))
    for call in cut([memory.buffer(chunk)]):
        digests.go_on([view.nbytes for view in call])
        connection.send_payload(call)
    connection.send(ChunkDigest(read.request, owner.keep_digest(access, chunk, digests.made[chunk])))
    return digests.seconds


def _chunks_of(read: Read | Locate) -> list[int]:
    if not 0 < sum(count for _, count in read.runs) <= CHUNKS_PER_ACCESS_MAX or any(
        first < 0 or count < 1 for first, count in read.runs
    ):
        raise ProtocolError(f"a read names 1 to {CHUNKS_PER_ACCESS_MAX} chunks, in runs of one or more")
    return [chunk for first, count in read.runs for chunk in range(first, first + count)]
