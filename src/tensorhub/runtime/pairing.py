"""The owner's side of rdma, for one reader: which ports there are, a queue pair to read through, the keys of what is there.

What is on a GPU that the device does not reach is *staged*: it goes, piece by piece, through a few registered buffers on the
host, each of which is used again when the reader has said that it has read it.

The queue pair lives as long as the reader's connection, and is taken apart with it: that is how a reader is cut off, also
one that hears nothing. Everything that the reader says is checked by its form, and used only to set up that one queue pair.
Responsible for what a reader is told. Not responsible for who may read (`SharedOwner`).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from tensorhub.accesses import Refusal
from tensorhub.cuda.device import Device
from tensorhub.errors import ProtocolError, StateError
from tensorhub.logs import Tally, get_logger
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.tensors import address_of
from tensorhub.messages import FindPorts, Pair, Paired, PieceStaged, PortsAre, QueueCard, ReadRefused, Unpaired
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.transport.rdma import ports as rdma, verbs
from tensorhub.transport.rdma.verbs import Queue
from tensorhub.transport.staging import Pinned, Staging
from tensorhub.types import RegistrationId

NOT_BY_RDMA = "this worker's memory is not to be read by RDMA: its transports are others"
STAGED_BUFFERS = 4  # one is copied by the GPU, one is on the wire, one is announced, one is free
UNTAKEN_MAX = STAGED_BUFFERS - 2  # when another piece is to be staged (see `Staging.outgoing`)

log = get_logger("tensorhub.owner")
_staged = Tally(log.info, "rdma_staged")
_unpaired = Tally(log.warning, "rdma_unpaired")


class Pairing:
    """One reader's. For its lane's thread."""

    def __init__(self, owner: SharedOwner) -> None:
        self._owner = owner
        self._fabric = owner.fabric
        self._queue: Queue | None = None
        self._theirs: QueueCard | None = None  # what the queue pair is connected to
        self._pinned: Pinned | None = None  # what is staged goes through it
        self._untaken = 0  # pieces that are staged

    def __repr__(self) -> str:
        return f"<Pairing: {self._queue or 'none'}>"

    @property
    def is_made(self) -> bool:
        """Whether there is a queue pair to read through."""
        return self._queue is not None

    def ports(self, read: FindPorts) -> PortsAre:
        """What a reader is to know before it asks for a queue pair."""
        return PortsAre(read.request, rdma.said_of(self._fabric.ports) if self._fabric is not None else ())

    def pair(self, read: Pair) -> Paired | Unpaired | ReadRefused:
        """A queue pair to the reader's end, in place of the last one if that was to another."""
        fabric, header = self._fabric, self._owner.header
        if fabric is None or header is None or read.port >= len(fabric.ports):
            return Unpaired(read.request, NOT_BY_RDMA, is_usual=False)
        if len(read.card.gid) != rdma.GID_BYTES:
            raise ProtocolError(f"a GID has {rdma.GID_BYTES} bytes")
        memory = self._owner.memory_of(RegistrationId(read.registration), read.generation)
        if isinstance(memory, Refusal):
            return ReadRefused(read.request, memory.reason)
        if memory.is_read_only:
            return Unpaired(read.request, "its memory is a file, which cannot be registered", is_usual=True)
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
            return Unpaired(read.request, error.strerror or str(error), is_usual=False)
        if fault is not None:
            return Unpaired(read.request, fault, is_usual=memory.device is None and not rdma.is_of_limit(fault))
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
        if pinned is not None and self._fabric is not None:
            self._fabric.release(pinned)
