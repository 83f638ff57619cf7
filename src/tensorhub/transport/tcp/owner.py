"""The owner's side of tcp: it sends chunks over the reader's connection.

A large chunk whose digest is not known yet is sent in pieces. Each piece is digested right before it is sent, and the digest
follows the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from tensorhub.cuda.device import Device, DeviceBytes
from tensorhub.errors import StateError
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import ChunkDigest, ChunkFollows, ChunksFollow
from tensorhub.model.accesses import Access
from tensorhub.transport.dialect import Dialect
from tensorhub.transport.owner import CannotServe, OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.staging import Place, Staging
from tensorhub.transport.streaming_digest import FIRST_SEND_BYTES, PiecewiseDigest, cut

SEND_BYTES = 16 * 2**20  # of one send call, once digests are known; a fence may have to wait for that call
LOCAL_SEND_BYTES = 64 * 2**20  # within a host, which takes some 20 ms; beside a busy Python thread a call costs 5 ms more


DIALECT = Dialect("tcp", from_reader={}, from_owner={})


class TcpSession:
    """See `OwnerSession`."""

    refusal = ""

    def __init__(self, reader: ServedReader) -> None:
        self._reader = reader
        self._connection = reader.connection
        self._staging: Staging | None = None  # for what is on a GPU
        self._room: DeviceBytes | None = None  # there, for one chunk

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
        if memory.is_strided and memory.device is not None:
            staging = self._staging_for(memory.device)
            room = self._room_for(memory.device, max([memory.sizes[chunk] for chunk in access.chunks]))
            self._connection.send(ChunksFollow(request, chunks))
            for chunk in access.chunks:
                memory.gather([chunk], room.address)
                self._send_staged(staging, [(room.address, memory.sizes[chunk])])
        elif memory.is_strided:
            self._connection.send(ChunksFollow(request, chunks))
            for chunk in access.chunks:
                for views in memory.outgoing(chunk, SEND_BYTES):
                    self._connection.send_payload(views)
        elif memory.device is not None:
            staging = self._staging_for(memory.device)
            self._connection.send(ChunksFollow(request, chunks))
            self._send_staged(staging, [(memory.address(chunk), memory.sizes[chunk]) for chunk in access.chunks])
        else:
            buffers = [memory.buffer(chunk) for chunk in access.chunks]
            self._connection.send_with_payload(ChunksFollow(request, chunks), buffers)

    def close(self) -> None:
        """Nothing was set up."""

    def _goes_alone(self, access: Access, memory: ChunkMemory) -> bool:
        """Whether this is one large chunk whose digest is not known, and can be made while the chunk is sent."""
        return (
            len(access.chunks) == 1
            and access.digests[0] is None
            and memory.sizes[access.chunks[0]] > FIRST_SEND_BYTES
            and memory.is_digested
            and memory.device is None
            and not self._reader.is_contended
        )

    def _staging_for(self, device: Device) -> Staging:
        """Buffers for bytes of that GPU. CannotServe: no memory."""
        if self._staging is None or self._staging.device is not device:
            try:
                self._staging = Staging(device)
            except StateError as error:
                raise CannotServe(str(error)[:1000]) from error
        return self._staging

    def _room_for(self, device: Device, nbytes: int) -> DeviceBytes:
        """Memory of that GPU, in which a chunk of several pieces is gathered. CannotServe: there is none."""
        if self._room is None or self._room.device is not device or self._room.nbytes < nbytes:
            try:
                self._room = device.allocate(nbytes)
            except StateError as error:
                raise CannotServe(str(error)[:1000]) from error
        return self._room

    def _send_staged(self, staging: Staging, places: Sequence[Place]) -> None:
        """Send bytes of a GPU: one piece is sent while the next one is copied to the host."""
        with closing(staging.outgoing(places)) as pieces:
            for piece in pieces:
                self._connection.send_payload([piece])

    def _send_one(self, request: int, access: Access, memory: ChunkMemory) -> None:
        """Send a large chunk in pieces, and digest each right before it is sent, so that memory is read once."""
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
