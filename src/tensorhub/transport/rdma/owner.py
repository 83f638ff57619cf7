"""The owner's side of rdma, for one reader: which ports there are, a queue pair to read through, the keys of what is there.

What is on a GPU that the device does not reach is *staged*: it goes, piece by piece, through a few registered buffers on the
host, each of which is used again when the reader has said that it has read it.

The queue pair lives as long as the reader's connection, and is taken apart with it: that is how a reader is cut off, also
one that hears nothing. Everything that the reader says is checked by its form, and used only to set up that one queue pair.
Responsible for what a reader is told. Not responsible for who may read (`OwnedMemory`).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import closing

from tensorhub.accesses import Access, Refusal
from tensorhub.cuda.device import Device
from tensorhub.errors import ProtocolError, StateError
from tensorhub.logs import Tally, get_logger
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.tensors import address_of
from tensorhub.messages import (
    ChunksFollow,
    ChunksPinned,
    FindPorts,
    FromReader,
    NotThisWay,
    Pair,
    Paired,
    PieceStaged,
    PieceTaken,
    PortsAre,
    QueueCard,
    ReadRefused,
)
from tensorhub.protocol.codec import FROM_READER
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.transport.one_sided_owner import LOCATE_BYTES
from tensorhub.transport.owner import CannotServe, OwnedMemory, OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.rdma import ports as rdma, verbs
from tensorhub.transport.rdma.verbs import Fabric, Queue
from tensorhub.transport.staging import Pinned, Staging
from tensorhub.transport.tcp.owner import LOCAL_SEND_BYTES, SEND_BYTES
from tensorhub.types import RegistrationId

NOT_BY_RDMA = "this worker's memory is not to be read by RDMA: its transports are others"
STAGED_BUFFERS = 4  # one is copied by the GPU, one is on the wire, one is announced, one is free
UNTAKEN_MAX = STAGED_BUFFERS - 2  # when another piece is to be staged (see `Staging.outgoing`)

log = get_logger("tensorhub.owner")
_staged = Tally(log.info, "rdma_staged")
_unpaired = Tally(log.warning, "rdma_unpaired")


class RdmaOwner(OwnerSide):
    """See `OwnerSide`. `fabric`: by which the memory is read; it is its transport's, and closed with that."""

    name = "rdma"
    asks = (FindPorts, Pair, PieceTaken)
    is_one_sided = True

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric

    def session(self, reader: ServedReader) -> OwnerSession:
        """See `OwnerSide`."""
        return _RdmaSession(reader, QueuePairServer(self.fabric, reader.memory))

    def release(self, memory: ChunkMemory) -> None:
        """See `OwnerSide`."""
        self.fabric.release(memory)


class _RdmaSession:
    """See `OwnerSession`."""

    def __init__(self, reader: ServedReader, pairs: QueuePairServer) -> None:
        self._reader = reader
        self._connection = reader.connection
        self._pairs = pairs

    @property
    def bytes_max(self) -> int:
        if not self._pairs.has_buffers:
            return LOCATE_BYTES
        return LOCAL_SEND_BYTES if self._reader.lane.is_local else SEND_BYTES

    @property
    def refusal(self) -> str:
        return "" if self._pairs.is_made else "no queue pair was asked for"

    def answer(self, asked: FromReader) -> None:
        """Set up what the reader reads through; or hear that it has read a piece."""
        match asked:
            case FindPorts():
                self._connection.send(self._pairs.ports(asked))
            case Pair():
                self._connection.send(self._pairs.pair(asked))
            case PieceTaken():
                self._pairs.taken()
            case _:
                raise ProtocolError(f"a {type(asked).__name__} is not asked for by rdma")

    def serve(self, request: int, access: Access, memory: ChunkMemory) -> None:
        """Say where the chunks are; or stage them, which takes until the reader has read all pieces but the last ones."""
        chunks = self._reader.digests_of(access, memory)
        word = self._reader.memory.word_of(access)
        try:
            if self._pairs.stages(memory):
                self._stage(request, chunks, access, memory, word)
            else:
                places = self._pairs.places(memory, chunks)
                self._connection.send(ChunksPinned(request, places, word, self._pairs.word_key(word)))
        except OSError as error:
            raise CannotServe(error.strerror) from error

    def close(self) -> None:
        self._pairs.close()

    def _stage(
        self, request: int, chunks: tuple[tuple[int, int], ...], access: Access, memory: ChunkMemory, word: int
    ) -> None:
        """Have the reader read what is on a GPU out of buffers: the next piece is copied there while one is read."""
        places = [(memory.address(chunk), memory.sizes[chunk]) for chunk in access.chunks]
        staging = self._pairs.staging(memory)
        self._connection.send(ChunksFollow(request, chunks))
        with closing(staging.outgoing(places)) as pieces:
            for piece in pieces:
                self._connection.send(self._pairs.staged(request, piece, word))
                while not self._pairs.has_room:
                    self._hear_meanwhile()

    def _hear_meanwhile(self) -> None:
        """Wait for the reader to take a piece; what else it says is answered later. OperationTimeout."""
        match asked := self._connection.receive(FROM_READER):
            case PieceTaken():
                self._pairs.taken()
            case None:
                raise ConnectionLost("the reader has left while pieces were staged for it")
            case _:
                self._reader.put_aside(asked)


class QueuePairServer:
    """One reader's. For its lane's thread."""

    def __init__(self, fabric: Fabric, owned: OwnedMemory) -> None:
        self._owned = owned
        self._fabric = fabric
        self._queue: Queue | None = None
        self._theirs: QueueCard | None = None  # what the queue pair is connected to
        self._pinned: Pinned | None = None  # what is staged goes through it
        self._untaken = 0  # pieces that are staged

    def __repr__(self) -> str:
        return f"<QueuePairServer: {self._queue or 'none'}>"

    @property
    def is_made(self) -> bool:
        """Whether there is a queue pair to read through."""
        return self._queue is not None

    def ports(self, read: FindPorts) -> PortsAre:
        """What a reader is to know before it asks for a queue pair."""
        return PortsAre(read.request, rdma.said_of(self._fabric.ports))

    def pair(self, read: Pair) -> Paired | NotThisWay | ReadRefused:
        """A queue pair to the reader's end, in place of the last one if that was to another."""
        fabric, header = self._fabric, self._owned.header
        if header is None or read.port >= len(fabric.ports):
            return NotThisWay(read.request, NOT_BY_RDMA, is_usual=False)
        if len(read.card.gid) != rdma.GID_BYTES:
            raise ProtocolError(f"a GID has {rdma.GID_BYTES} bytes")
        found = self._owned.find(RegistrationId(read.registration), read.generation)
        if isinstance(found, Refusal):
            return ReadRefused(read.request, found.reason)
        memory = found.memory
        if memory.is_read_only:
            return NotThisWay(read.request, "its memory is a file, which cannot be registered", is_usual=True)
        try:
            if self._queue is None or self._theirs != read.card:
                self.close()
                self._queue = fabric.source(fabric.ports[read.port])
                self._queue.connect(read.card)
                self._theirs = read.card
            key = self._queue.device.page_key(header.address)
            fault = self._first_fault(memory)
            if fault is not None and memory.device is not None:
                _staged.count(reason=fault)
                fault = self._prepare(self._queue.device, memory.device)
        except OSError as error:
            self.close()
            _unpaired.count(reason=error.strerror)
            return NotThisWay(read.request, error.strerror or str(error), is_usual=False)
        if fault is not None:
            return NotThisWay(read.request, fault, is_usual=memory.device is None and not rdma.is_of_limit(fault))
        return Paired(read.request, self._queue.card, header.address, key, header.nonce)

    def _first_fault(self, memory: ChunkMemory) -> str | None:
        """Why the memory cannot be registered, as far as its first span and the limit tell; it is registered by then."""
        assert self._queue is not None
        if not memory.spans:
            return None
        try:
            self._queue.device.keys(memory, *memory.spans[0])
        except OSError as error:
            return error.strerror
        if len(memory.spans) == 1 or memory.device is not None:
            return None
        return rdma.memlock_fault(sum(nbytes for _, nbytes in memory.spans[1:]))

    def _prepare(self, device: verbs.Device, gpu: Device) -> str | None:
        """Have buffers to stage what is on that GPU. Why there are none, if so. OSError: they cannot be registered."""
        if self._pinned is not None and self._pinned.staging.device is gpu:
            return None
        self._release()
        try:
            pinned = Pinned(Staging(gpu, buffers=STAGED_BUFFERS))
        except StateError as error:
            return str(error)[:1000]
        for span in pinned.spans:
            device.keys(pinned, *span)
        self._pinned = pinned
        return None

    def stages(self, memory: ChunkMemory) -> bool:
        """Whether that is to be staged, since the device does not reach it."""
        return self._queue is not None and memory.device is not None and self._first_fault(memory) is not None

    def staging(self, memory: ChunkMemory) -> Staging:
        """What that goes through. OSError: a queue pair was not asked for to read it."""
        if self._pinned is None or self._pinned.staging.device is not memory.device:
            raise OSError(errno.EOPNOTSUPP, "its tensors are on a GPU, and the queue pair was made to read others")
        return self._pinned.staging

    def staged(self, request: int, piece: memoryview, word: int) -> PieceStaged:
        """A piece of what `staging` has, which is the reader's until that has taken it. OSError."""
        assert self._queue is not None
        assert self._pinned is not None
        self._untaken += 1
        address = address_of(piece)
        key = self._queue.device.keys(self._pinned, address, piece.nbytes).remote
        return PieceStaged(request, address, piece.nbytes, key, word, self.word_key(word))

    @property
    def has_buffers(self) -> bool:
        """Whether something may have to be staged."""
        return self._pinned is not None

    @property
    def has_room(self) -> bool:
        """Whether another piece can be staged."""
        return self._untaken <= UNTAKEN_MAX

    def taken(self) -> None:
        """The reader has read a piece."""
        if not self._untaken:
            raise ProtocolError("a piece is said to be taken, and none is staged")
        self._untaken -= 1

    def places(self, memory: ChunkMemory, chunks: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int, int], ...]:
        """Each chunk with its digest, its address and its remote key. OSError: it cannot be registered."""
        assert self._queue is not None
        found: list[tuple[int, int, int, int]] = []
        for chunk, digest in chunks:
            address = memory.address(chunk)
            keys = self._queue.device.keys(memory, address, memory.sizes[chunk])
            found.append((chunk, digest, address + keys.shift, keys.remote))
        return tuple(found)

    def word_key(self, word: int) -> int:
        """The remote key of the generation word there. OSError."""
        assert self._queue is not None
        return self._queue.device.page_key(word)

    def close(self) -> None:
        """Take the queue pair apart: this reader reads nothing more."""
        queue, self._queue, self._theirs = self._queue, None, None
        try:
            if queue is not None:
                queue.close()
        finally:
            self._release()

    def _release(self) -> None:
        pinned, self._pinned, self._untaken = self._pinned, None, 0
        if pinned is not None:
            self._fabric.release(pinned)
