"""The owner's side of rdma: a queue pair for each reader, and the addresses and keys of the memory
that is read through it.

If the device does not reach a GPU, that GPU's bytes are *staged*: they go piece by piece through a
few registered buffers on the host. A buffer is used again once the reader has said that it has read
the piece. Chunks of many pieces of memory are staged as well, wherever they are: a device would be
asked for each run by itself.

The queue pair lives as long as the reader's connection, and is taken apart with it. That is how a
reader is cut off, even a reader that takes no messages. A reader's messages are checked, and used
only to set up that queue pair.

Responsible for the answers to a reader. Not responsible for permission to read (`OwnedMemory`).
"""

from __future__ import annotations

import errno
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import chain

from tensorhub.cuda.device import Device
from tensorhub.errors import ProtocolError, StateError
from tensorhub.logs import Tally, get_logger
from tensorhub.memory.addresses import address_of
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.strided import blocks
from tensorhub.messages import ChunksFollow, TransportRequest
from tensorhub.model.accesses import Access
from tensorhub.protocol.codec import FROM_READER
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.transport.base import NotShared, Unusable
from tensorhub.transport.one_sided import LOCATE_BYTES
from tensorhub.transport.owner import CannotServe, OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.rdma import ports as rdma
from tensorhub.transport.rdma.messages import (
    DIALECT,
    GID_BYTES,
    ChunksPinned,
    FindPorts,
    Pair,
    Paired,
    PieceStaged,
    PieceTaken,
    PortsAre,
    QueueCard,
)
from tensorhub.transport.rdma.queues import BUFFERS, Buffers, Fabric, Queue
from tensorhub.transport.staging import Packing, Staging
from tensorhub.transport.tcp import LOCAL_SEND_BYTES, SEND_BYTES

NOT_BY_RDMA = "this worker's memory is not to be read by RDMA: its transports are others"
UNTAKEN_MAX = BUFFERS - 2  # when another piece is to be staged (see `Staging.outgoing`)

Chunks = tuple[tuple[int, int], ...]
"""(chunk, digest)."""

log = get_logger("tensorhub.owner")
_staged = Tally(log.info, "rdma_staged")
_unpaired = Tally(log.warning, "rdma_unpaired")


class RdmaOwner(OwnerSide):
    """See `OwnerSide`. `fabric`: by which the memory is read. It belongs to the transport, and is
    closed with it.
    """

    dialect = DIALECT
    is_one_sided = True
    strides = True

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric

    def session(self, reader: ServedReader) -> OwnerSession:
        return RdmaSession(reader, self.fabric)

    def release(self, memory: ChunkMemory) -> None:
        self.fabric.release(memory)


class RdmaSession:
    """See `OwnerSession`."""

    def __init__(self, reader: ServedReader, fabric: Fabric) -> None:
        self._reader = reader
        self._connection = reader.connection
        self._fabric = fabric
        self._queue: Queue | None = None
        self._theirs: QueueCard | None = None  # what the queue pair is connected to
        self._buffers: Buffers | None = None  # staged bytes go through them

    @property
    def bytes_max(self) -> int:
        if self._buffers is None or self._buffers.pinned is None:
            return LOCATE_BYTES
        return LOCAL_SEND_BYTES if self._reader.lane.is_local else SEND_BYTES

    @property
    def refusal(self) -> str:
        return "" if self._queue is not None else "no queue pair was asked for"

    def answer(self, request: int, asked: FindPorts | Pair | PieceTaken) -> None:
        """Set up what the reader reads through; or note that it has read a piece."""
        match asked:
            case FindPorts():
                self._connection.send(
                    DIALECT.reply(request, PortsAre(rdma.said_of(self._fabric.ports)))
                )
            case Pair():
                self._connection.send(DIALECT.reply(request, self._pair(asked)))
            case PieceTaken():
                self._hear_taken()

    def serve(self, request: int, access: Access, memory: ChunkMemory) -> None:
        """Say where the chunks are; or stage them, which lasts until the reader has read all pieces
        but the last ones.
        """
        chunks = self._reader.digests_of(access, memory)
        word = self._reader.memory.word_of(access)
        try:
            assert self._queue is not None
            word_key = self._queue.device.page_key(word)
            if memory.is_strided or (
                memory.device is not None and self._queue.device.fault_of(memory) is not None
            ):
                self._stage(request, chunks, memory, word, word_key)
            else:
                places = self._places(memory, chunks)
                self._connection.send(DIALECT.reply(request, ChunksPinned(places, word, word_key)))
        except OSError as error:
            raise CannotServe(error.strerror) from error

    def close(self) -> None:
        """Take the queue pair apart: this reader reads nothing more."""
        queue, buffers = self._queue, self._buffers
        self._queue = self._buffers = self._theirs = None
        try:
            if queue is not None:
                queue.close()
        finally:
            if buffers is not None:
                buffers.release()

    # ---------------------------------------------------------------------------------------------
    # the queue pair

    def _pair(self, asked: Pair) -> Paired:
        """A queue pair to the reader's end. One that was connected to another end goes. NotOpen,
        Unusable.
        """
        header = self._reader.memory.header
        if header is None or asked.port >= len(self._fabric.ports):
            raise Unusable(NOT_BY_RDMA)
        if len(asked.card.gid) != GID_BYTES:
            raise ProtocolError(f"a GID has {GID_BYTES} bytes")
        memory, _ = self._reader.find(asked.registration, asked.generation)
        if memory.is_read_only:
            raise NotShared("its memory is a file, which cannot be registered")
        try:
            queue = self._connected(asked)
            key = queue.device.page_key(header.address)
            fault = queue.device.fault_of(memory)
            if fault is not None and memory.device is not None:
                _staged.count(reason=fault)
                fault = self._prepare(memory.device)
        except OSError as error:
            self.close()
            _unpaired.count(reason=error.strerror)
            raise Unusable(error.strerror or str(error)) from error
        if fault is not None:
            raise (
                NotShared if memory.device is None and not rdma.is_of_limit(fault) else Unusable
            )(fault)
        return Paired(queue.card, header.address, key, header.nonce)

    def _connected(self, asked: Pair) -> Queue:
        if self._queue is None or self._theirs != asked.card:
            self.close()
            self._queue = self._fabric.source(self._fabric.ports[asked.port])
            self._buffers = Buffers(self._queue.device)
            self._queue.connect(asked.card)
            self._theirs = asked.card
        return self._queue

    def _prepare(self, gpu: Device | None) -> str | None:
        """Have buffers to stage bytes of that GPU, or of the host. Returns why there are none.
        OSError: they cannot be registered.
        """
        assert self._buffers is not None
        try:
            self._buffers.prepare(gpu)
        except StateError as error:
            return str(error)[:1000]
        return None

    def _places(self, memory: ChunkMemory, chunks: Chunks) -> tuple[tuple[int, int, int, int], ...]:
        """Each chunk with its digest, its address and its remote key. OSError: it cannot be
        registered.
        """
        assert self._queue is not None
        found: list[tuple[int, int, int, int]] = []
        for chunk, digest in chunks:
            address = memory.address(chunk)
            keys = self._queue.device.keys(memory, address, memory.sizes[chunk])
            found.append((chunk, digest, address + keys.shift, keys.remote))
        return tuple(found)

    # ----------------------------------------------------------------------------------------------
    # staging

    def _stage(
        self, request: int, chunks: Chunks, memory: ChunkMemory, word: int, word_key: int
    ) -> None:
        """Let the reader read out of buffers: one piece is read while the next one is copied.
        OSError: the queue pair was made to read other memory.
        """
        assert self._queue is not None
        assert self._buffers is not None
        if memory.is_strided and (fault := self._prepare(memory.device)) is not None:
            raise CannotServe(fault)
        pinned = self._buffers.pinned
        if pinned is None or pinned.staging.device is not memory.device:
            raise OSError(
                errno.EOPNOTSUPP,
                "its tensors are on a GPU, and the queue pair was made to read others",
            )
        outgoing = self._outgoing(pinned.staging, memory, [chunk for chunk, _ in chunks])
        self._connection.send(ChunksFollow(request, chunks))
        with closing(outgoing) as pieces:
            for piece in pieces:
                self._buffers.untaken += 1
                address = address_of(piece)
                key = self._queue.device.keys(pinned, address, piece.nbytes).remote
                staged = PieceStaged(address, piece.nbytes, key, word, word_key)
                self._connection.send(DIALECT.reply(request, staged))
                while self._buffers.untaken > UNTAKEN_MAX:
                    self._hear_meanwhile()

    def _outgoing(
        self, staging: Staging | Packing, memory: ChunkMemory, chunks: Sequence[int]
    ) -> Generator[memoryview]:
        """Their bytes, in registered buffers. CannotServe: no memory."""
        if isinstance(staging, Packing):
            strips = chain.from_iterable(map(memory.strips, chunks))
            return staging.outgoing(
                blocks(strips, memory.addresses), sum([memory.sizes[chunk] for chunk in chunks])
            )
        if not memory.is_strided:
            return staging.outgoing(
                [(memory.address(chunk), memory.sizes[chunk]) for chunk in chunks]
            )
        nbytes = sum([memory.sizes[chunk] for chunk in chunks])
        try:
            room = staging.room(nbytes)
        except StateError as error:
            raise CannotServe(str(error)[:1000]) from error
        memory.gather(chunks, room)
        return staging.outgoing([(room, nbytes)])

    def _hear_meanwhile(self) -> None:
        """Wait for the reader to take a piece. Its other requests are put aside.
        OperationTimeout.
        """
        asked = self._connection.receive(FROM_READER)
        if asked is None:
            raise ConnectionLost("the reader has left while pieces were staged for it")
        if isinstance(asked, TransportRequest) and isinstance(DIALECT.message(asked), PieceTaken):
            self._hear_taken()
        else:
            self._reader.put_aside(asked)

    def _hear_taken(self) -> None:
        """The reader has read a piece."""
        if self._buffers is None or not self._buffers.untaken:
            raise ProtocolError("a piece is said to be taken, and none is staged")
        self._buffers.untaken -= 1
