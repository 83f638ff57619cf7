"""The tcp transport: the owner sends the bytes over the reader's connection, by blocking sockets.
It works everywhere.

A large chunk whose digest is not known yet is sent in pieces. Each piece is digested right before
it is sent, and the digest follows the bytes.

Responsible for receiving exactly the chunks that were asked for. Not responsible for digests or
books.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from itertools import groupby

from tensorhub.cuda.device import Device
from tensorhub.deltas import Counts
from tensorhub.errors import ProtocolError, StateError
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import (
    ChunkDigest,
    ChunkFollows,
    ChunksFollow,
    DeltasFollow,
    StillWaiting,
)
from tensorhub.model.accesses import Access
from tensorhub.transport.base import DEVICE, HOST, Arrival, Channel, Destination, Lacking
from tensorhub.transport.connected import ConnectedTransport, ReadClient
from tensorhub.transport.dialect import Dialect
from tensorhub.transport.owner import CannotServe, OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.pace import Paces
from tensorhub.transport.registry import Local
from tensorhub.transport.staging import Place, Staging
from tensorhub.transport.streaming_digest import (
    FIRST_SEND_BYTES,
    SMALL_BYTES,
    PiecewiseDigest,
    StreamingDigests,
    cut,
)
from tensorhub.types import ContentId, DeltaUse, Location

# of one send call, once digests are known; a fence may have to wait for that call
SEND_BYTES = 16 * 2**20
# within a host, which takes some 20 ms; beside a busy Python thread a call costs 5 ms more
LOCAL_SEND_BYTES = 64 * 2**20


DIALECT = Dialect("tcp", from_reader={}, from_owner={})


class TcpSession:
    """See `OwnerSession`."""

    refusal = ""

    def __init__(self, reader: ServedReader) -> None:
        self._reader = reader
        self._connection = reader.connection
        self._staging: Staging | None = None  # for what is on a GPU

    @property
    def bytes_max(self) -> int:
        return LOCAL_SEND_BYTES if self._reader.lane.is_local else SEND_BYTES

    def answer(self, request: int, asked: object) -> None:
        """Nothing is asked for besides chunks."""

    def serve(self, request: int, access: Access, memory: ChunkMemory) -> None:
        """Send an access' chunks."""
        if self._goes_alone(access, memory):
            self._send_one(request, access, memory)
            return
        chunks = self._reader.digests_of(access, memory)
        said, sizes = (
            ChunksFollow(request, chunks),
            [memory.sizes[chunk] for chunk in access.chunks],
        )
        if memory.device is not None:
            staging, room = self._prepare(memory.device, max(sizes) if memory.is_strided else 0)
            self._connection.send(said)
            if not memory.is_strided:
                self._send_staged(
                    staging, list(zip(map(memory.address, access.chunks), sizes, strict=True))
                )
                return
            for chunk, nbytes in zip(access.chunks, sizes, strict=True):
                memory.gather([chunk], room)
                self._send_staged(staging, [(room, nbytes)])
        elif memory.is_strided:
            self._connection.send(said)
            for chunk in access.chunks:
                for views in memory.outgoing(chunk, SEND_BYTES):
                    self._connection.send_payload(views)
        else:
            self._connection.send_with_payload(
                said, [memory.buffer(chunk) for chunk in access.chunks]
            )

    def serve_deltas(
        self, request: int, access: Access, memory: ChunkMemory, base: ContentId
    ) -> Access:
        """Send the deltas of those chunks of an access that have any. Returns the access to the
        others.
        """
        found = self._reader.memory.deltas_of(access, memory, base)
        if not found:
            return access
        digests = self._reader.digests_of(access.only(found), memory)
        said = tuple([(chunk, digest, tuple(map(len, found[chunk]))) for chunk, digest in digests])
        payload = [memoryview(delta) for chunk, _ in digests for delta in found[chunk]]
        self._connection.send_with_payload(DeltasFollow(request, said), payload)
        return access.only(set(access.chunks) - found.keys())

    def close(self) -> None:
        """Nothing was set up."""

    def _goes_alone(self, access: Access, memory: ChunkMemory) -> bool:
        """Whether this is one large chunk whose digest is not known, and can be made while the
        chunk is sent.
        """
        return (
            len(access.chunks) == 1
            and access.digests[0] is None
            and memory.sizes[access.chunks[0]] > FIRST_SEND_BYTES
            and memory.is_digested
            and memory.device is None
            and not self._reader.is_contended
        )

    def _prepare(self, device: Device, room_bytes: int) -> tuple[Staging, int]:
        """Buffers for bytes of that GPU, and the address of so much room there. CannotServe: no
        memory.
        """
        try:
            if self._staging is None or self._staging.device is not device:
                self._staging = Staging(device)
            return self._staging, self._staging.room(room_bytes) if room_bytes else 0
        except StateError as error:
            raise CannotServe(str(error)[:1000]) from error

    def _send_staged(self, staging: Staging, places: Sequence[Place]) -> None:
        """Send bytes of a GPU: one piece is sent while the next one is copied to the host."""
        with closing(staging.outgoing(places)) as pieces:
            for piece in pieces:
                self._connection.send_payload([piece])

    def _send_one(self, request: int, access: Access, memory: ChunkMemory) -> None:
        """Send a large chunk in pieces, and digest each right before it is sent, so that memory is
        read once.
        """
        (chunk,) = access.chunks
        self._connection.send(ChunkFollows(request, chunk))
        digest = PiecewiseDigest()
        for call in memory.outgoing(chunk) if memory.is_strided else cut([memory.buffer(chunk)]):
            digest.go_on(call)
            self._connection.send_payload(call)
        made = self._reader.memory.keep_digest(access, memory, chunk, digest.made)
        self._connection.send(ChunkDigest(request, made))
        self._reader.digested(memory.sizes[chunk], digest.seconds)


class TcpOwner(OwnerSide):
    """Any worker can be read this way."""

    dialect = DIALECT
    strides = True

    def session(self, reader: ServedReader) -> OwnerSession:
        return TcpSession(reader)


class TcpTransport(ConnectedTransport):
    """Blocking sockets; works everywhere."""

    dialect = DIALECT
    lanes = 1
    private = True
    fills = HOST | DEVICE
    strides = True
    deltas = True

    def __init__(self, local: Local) -> None:
        super().__init__(local)
        self.connections = local.options.wan_connections
        self._paces = Paces()

    def reaches(self, here: Location, there: Location) -> bool:
        """Always: locations tell nothing against it."""
        return True

    def serve(self) -> OwnerSide:
        return TcpOwner()

    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """Nothing more is set up."""
        return TcpChannel(client, destination, self._paces)


class TcpChannel:
    """See `transport.base.Channel`. Several threads receive one after the other."""

    def __init__(
        self, client: ReadClient, destination: Destination, paces: Paces | None = None
    ) -> None:
        self._client = client
        self._paces = paces or Paces()
        self._connection = client.connection
        self._destination = destination
        self._use = DeltaUse.UNDECIDED  # of the last request; set under no lock
        self._turn = threading.Lock()  # guards what follows
        self._staging: Staging | None = None
        # of the present frame; digest None: it follows
        self._coming: deque[tuple[int, int | None]] = deque()
        # of the present frame, with the bytes of their deltas
        self._coming_deltas: deque[tuple[int, int, tuple[int, ...]]] = deque()

    def submit(self, chunks: Sequence[int]) -> None:
        right = self._client.right
        base = right.base
        if base is None or not self._paces.prefers_deltas(right.incarnation, right.full_rate):
            self._use = DeltaUse.UNDECIDED if base is None else DeltaUse.FAST_LINK
            self._client.read(chunks)
            return
        self._use = DeltaUse.NONE_SENT if any(map(base.has, chunks)) else DeltaUse.NO_BASE
        for is_there, group in groupby(chunks, base.has):
            self._client.read(list(group), base.content_id if is_there else "")

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        started, calls = time.perf_counter(), self._connection.calls
        with self._turn, self._client.failures():
            if not self._coming and not self._coming_deltas:
                if self._client.is_answered:
                    return Arrival((), 0.0, 0.0)
                message = self._client.hear()
                match message:
                    case StillWaiting():
                        return self._client.lacking(message)
                    case ChunksFollow():
                        self._client.announced(
                            message.request, [chunk for chunk, _ in message.chunks]
                        )
                        self._coming.extend(message.chunks)
                    case ChunkFollows():
                        self._client.announced(message.request, [message.chunk])
                        self._coming.append((message.chunk, None))
                    case DeltasFollow():
                        self._expect_deltas(message)
                    case _:
                        raise ProtocolError(f"a read is answered with {type(message).__name__}")
            first_byte = time.perf_counter()
            if self._coming_deltas:
                return self._receive_deltas(bytes_max, first_byte - started)
            group = self._next_group(bytes_max)
            if (base := self._client.right.base) is not None:
                for chunk, _ in group:
                    base.spoil(chunk)
            if self._destination.is_strided:
                return self._receive_strided(group, first_byte - started)
            destination = self._destination
            is_on_host = destination.device is None
            views = [destination.buffer(chunk) for chunk, _ in group] if is_on_host else []
            digests = StreamingDigests(zip([chunk for chunk, _ in group], views, strict=is_on_host))
            if destination.device is not None:
                self._staging = self._staging or Staging(destination.device)
                places = [
                    (destination.address(chunk), destination.sizes[chunk]) for chunk, _ in group
                ]
                self._receive_staged(places, self._staging)
            elif destination.is_digested and bytes_max <= SMALL_BYTES:
                for call in cut(views):
                    self._connection.receive_into(call)
                    digests.go_on([view.nbytes for view in call])
            else:
                self._connection.receive_into(views)
            chunk, digest = group[0]
            if digest is None:
                group = [(chunk, self._digest_behind())]
        seconds = time.perf_counter() - first_byte - digests.seconds
        nbytes = sum([destination.sizes[chunk] for chunk, _ in group])
        self._paces.came(self._client.right.incarnation, nbytes, seconds)
        calls = self._connection.calls - calls
        what = group, first_byte - started, seconds, digests.made, digests.seconds
        return Arrival(*what, use=self._use, calls=calls)

    # -- deltas

    def _expect_deltas(self, message: DeltasFollow) -> None:
        """ProtocolError: they are of chunks without a base here, or longer than the chunks."""
        self._client.announced(message.request, [chunk for chunk, _, _ in message.chunks])
        base, sizes = self._client.right.base, self._destination.sizes
        for chunk, _, lengths in message.chunks:
            if base is None or not base.has(chunk):
                raise ProtocolError(f"a delta of chunk {chunk} comes, which has no base here")
            if sum(lengths) > sizes[chunk]:
                raise ProtocolError(f"a delta of chunk {chunk} is longer than the chunk")
        self._coming_deltas.extend(message.chunks)

    def _receive_deltas(self, bytes_max: int, wait_s: float) -> Arrival:
        """Receive deltas, and apply each to its chunk. A delta that cannot be applied leaves a
        chunk that does not have its digest, as a wrong one does.
        """
        base, began, codec_s = self._client.right.base, time.perf_counter(), 0.0
        calls = self._connection.calls
        counts = Counts()
        assert base is not None
        group, brought = list[tuple[int, int | None]](), dict[int, tuple[bytes, ...]]()
        while self._coming_deltas and bytes_max > 0:
            chunk, digest, lengths = self._coming_deltas.popleft()
            received = [bytearray(length) for length in lengths]
            self._connection.receive_into([memoryview(each) for each in received])
            base.spoil(chunk)
            applying = time.perf_counter()
            with suppress(ProtocolError):
                counts = counts.and_of(base.apply(chunk, received))
            codec_s += time.perf_counter() - applying
            group.append((chunk, digest))
            brought[chunk] = tuple([bytes(each) for each in received])
            bytes_max -= sum(lengths)
        seconds = time.perf_counter() - began
        nbytes = sum([self._destination.sizes[chunk] for chunk, _ in group])
        self._paces.applied(self._client.right.incarnation, nbytes, codec_s)
        return Arrival(
            group,
            wait_s,
            seconds,
            deltas=brought,
            codec_s=codec_s,
            counts=counts,
            use=DeltaUse.USED,
            calls=self._connection.calls - calls,
        )

    def _receive_strided(self, group: list[tuple[int, int | None]], wait_s: float) -> Arrival:
        """Receive chunks of several pieces. Their digests are made while the bytes are still
        together.
        """
        began, destination, made, digest_s = (
            time.perf_counter(),
            self._destination,
            dict[int, int](),
            0.0,
        )
        calls = self._connection.calls
        for chunk, _ in group:
            if destination.device is not None:
                made |= self._receive_scattered(chunk, destination.device)
                continue
            digest = PiecewiseDigest()
            with closing(destination.incoming(chunk)) as places:
                for views in places:
                    self._connection.receive_into(views)
                    if destination.is_digested:
                        digest.go_on(views)
            digest_s += digest.seconds
            if destination.is_digested:
                made[chunk] = digest.made
        if group[0][1] is None:
            group = [(group[0][0], self._digest_behind())]
        seconds, calls = time.perf_counter() - began - digest_s, self._connection.calls - calls
        return Arrival(group, wait_s, seconds, made, digest_s, calls=calls)

    def _receive_scattered(self, chunk: int, device: Device) -> Mapping[int, int]:
        """Receive a chunk of several pieces for a GPU, which digests it where it is in one piece,
        and then scatters it.
        """
        destination, nbytes = self._destination, self._destination.sizes[chunk]
        staging = self._staging = self._staging or Staging(device)
        room = staging.room(nbytes)
        self._receive_staged([(room, nbytes)], staging)
        return destination.take_in([chunk], room)

    def _receive_staged(self, places: Sequence[Place], staging: Staging) -> None:
        """Receive bytes for a GPU: one piece is copied there while the next one is received."""
        with closing(staging.incoming(places)) as pieces:
            for piece in pieces:
                self._connection.receive_into([piece])

    def _next_group(self, bytes_max: int) -> list[tuple[int, int | None]]:
        """Take the next chunks of the present frame: at least one, and further ones up to
        `bytes_max`.
        """
        group: list[tuple[int, int | None]] = []
        while self._coming:
            bytes_max -= self._destination.sizes[self._coming[0][0]]
            if group and bytes_max < 0:
                break
            group.append(self._coming.popleft())
        return group

    def _digest_behind(self) -> int:
        message = self._client.hear()
        if not isinstance(message, ChunkDigest):
            raise ProtocolError(
                f"a chunk's digest is to follow, and {type(message).__name__} comes"
            )
        return message.digest

    def close(self) -> None:
        if self._coming or self._coming_deltas:  # their bytes are still to come
            self._client.peer.is_sound = False
        self._client.close()
