"""The tcp transport: the owner sends the bytes over the reader's connection.

Responsible for receiving exactly the chunks that were asked for. Not responsible for digests or books.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import closing

from tensorhub.cuda.device import Device, DeviceBytes
from tensorhub.errors import ProtocolError
from tensorhub.messages import ChunkDigest, ChunkFollows, ChunksFollow, StillWaiting
from tensorhub.transport.base import DEVICE, HOST, Arrival, Channel, Destination, Lacking, Scattering
from tensorhub.transport.connected import ConnectedTransport
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.registry import Local
from tensorhub.transport.staging import Staging
from tensorhub.transport.streaming_digest import SMALL_BYTES, PiecewiseDigest, StreamingDigests, cut
from tensorhub.transport.tcp.owner import DIALECT, TcpOwner
from tensorhub.types import Location


class TcpTransport(ConnectedTransport):
    """Blocking sockets; works everywhere."""

    dialect = DIALECT
    lanes = 1
    fills = HOST | DEVICE
    strides = True

    def __init__(self, local: Local) -> None:
        super().__init__(local)
        self.connections = local.options.wan_connections

    def reaches(self, here: Location, there: Location) -> bool:
        """Always: locations tell nothing against it."""
        return True

    def serve(self) -> OwnerSide:
        return TcpOwner()

    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """Nothing more is set up."""
        return TcpChannel(client, destination)


class TcpChannel:
    """See `transport.base.Channel`."""

    def __init__(self, client: ReadClient, destination: Destination) -> None:
        self._client = client
        self._connection = client.connection
        self._destination = destination
        self._staging: Staging | None = None
        self._room: DeviceBytes | None = None  # of the GPU, for one chunk of several pieces
        self._coming: deque[tuple[int, int | None]] = deque()  # of the present frame; digest None: it follows

    def __repr__(self) -> str:
        return f"<TcpChannel, {self._client!r}>"

    def submit(self, chunks: Sequence[int]) -> None:
        self._client.read(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        started = time.perf_counter()
        with self._client.failures():
            if not self._coming:
                message = self._client.hear()
                match message:
                    case StillWaiting():
                        return self._client.lacking(message)
                    case ChunksFollow():
                        self._client.announced(message.request, [chunk for chunk, _ in message.chunks])
                        self._coming.extend(message.chunks)
                    case ChunkFollows():
                        self._client.announced(message.request, [message.chunk])
                        self._coming.append((message.chunk, None))
                    case _:
                        raise ProtocolError(f"a read is answered with {type(message).__name__}")
            first_byte = time.perf_counter()
            group = self._next_group(bytes_max)
            if self._destination.is_strided:
                return self._receive_strided(group, first_byte - started)
            is_on_host = self._destination.device is None
            views = [self._destination.buffer(chunk) for chunk, _ in group] if is_on_host else []
            digests = StreamingDigests(zip([chunk for chunk, _ in group], views, strict=is_on_host))
            if self._destination.device is not None:
                self._receive_staged(group, self._destination.device)
            elif self._destination.is_digested and bytes_max <= SMALL_BYTES:
                for call in cut(views):
                    self._connection.receive_into(call)
                    digests.go_on([view.nbytes for view in call])
            else:
                self._connection.receive_into(views)
            chunk, digest = group[0]
            if digest is None:
                group = [(chunk, self._digest_behind())]
        seconds = time.perf_counter() - first_byte - digests.seconds
        return Arrival(group, first_byte - started, seconds, digests.made, digests.seconds)

    def _receive_strided(self, group: list[tuple[int, int | None]], wait_s: float) -> Arrival:
        """Receive chunks of several pieces. Their digests are made while the bytes are still together."""
        began, destination, made, digest_s = time.perf_counter(), self._destination, dict[int, int](), 0.0
        for chunk, _ in group:
            if destination.device is not None:
                made |= self._receive_scattered(chunk, destination.device)
                continue
            digest = PiecewiseDigest()
            with closing(destination.incoming(chunk)) as calls:
                for views in calls:
                    self._connection.receive_into(views)
                    if destination.is_digested:
                        digest.go_on(views)
            digest_s += digest.seconds
            if destination.is_digested:
                made[chunk] = digest.made
        if group[0][1] is None:
            group = [(group[0][0], self._digest_behind())]
        return Arrival(group, wait_s, time.perf_counter() - began - digest_s, made, digest_s)

    def _receive_scattered(self, chunk: int, device: Device) -> Mapping[int, int]:
        """Receive a chunk of several pieces for a GPU, which digests it where it is in one piece, and then scatters it."""
        destination, nbytes = self._destination, self._destination.sizes[chunk]
        if self._staging is None:
            self._staging = Staging(device)
        if self._room is None or self._room.nbytes < nbytes:
            self._room = device.allocate(nbytes)
        place = self._room.address, nbytes
        with closing(self._staging.incoming([place])) as pieces:
            for piece in pieces:
                self._connection.receive_into([piece])
        assert isinstance(destination, Scattering)
        return destination.take_in([chunk], place[0])

    def _receive_staged(self, group: Sequence[tuple[int, int | None]], device: Device) -> None:
        """Receive bytes for a GPU: one piece is copied there while the next one is received."""
        if self._staging is None:
            self._staging = Staging(device)
        destination = self._destination
        places = [(destination.address(chunk), destination.sizes[chunk]) for chunk, _ in group]
        with closing(self._staging.incoming(places)) as pieces:
            for piece in pieces:
                self._connection.receive_into([piece])

    def _next_group(self, bytes_max: int) -> list[tuple[int, int | None]]:
        """Take the next chunks of the present frame: at least one, and further ones up to `bytes_max`."""
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
            raise ProtocolError(f"a chunk's digest is to follow, and {type(message).__name__} comes")
        return message.digest

    def close(self) -> None:
        if self._coming:  # their bytes are still to come
            self._client.peer.is_sound = False
        self._client.close()


class SharedTcpChannel(TcpChannel):
    """A tcp channel for several threads, which receive one after the other: for a transport with
    several `lanes`, where its own way is no good.
    """

    def __init__(self, client: ReadClient, destination: Destination) -> None:
        super().__init__(client, destination)
        self._turn = threading.Lock()

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        with self._turn:
            if not self._coming and self._client.is_answered:
                return Arrival((), 0.0, 0.0)
            return super().receive(bytes_max)
