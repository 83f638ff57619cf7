"""The owner's side of rdma, for one reader: which ports there are, a queue pair to read through, the keys of what is there.

The queue pair lives as long as the reader's connection, and is taken apart with it: that is how a reader is cut off, also
one that hears nothing. Everything that the reader says is checked by its form, and used only to set up that one queue pair.
Responsible for what a reader is told. Not responsible for who may read (`SharedOwner`).
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from tensorhub.errors import ProtocolError
from tensorhub.messages import FindPorts, Pair, Paired, PortsAre, QueueCard, ReadRefused, Unpaired
from tensorhub.runtime.chunks import ChunkMemory
from tensorhub.runtime.logs import get_logger
from tensorhub.runtime.serving import SharedOwner
from tensorhub.transport import rdma
from tensorhub.transport.verbs import Queue
from tensorhub.types import RegistrationId
from tensorhub.worker.owner import Refusal

NOT_BY_RDMA = "this worker's memory is not to be read by RDMA: its transports are others"
ON_GPU = "its tensors are on a GPU, which is not read this way"

log = get_logger("tensorhub.owner")


class Pairing:
    """One reader's. For its lane's thread."""

    def __init__(self, owner: SharedOwner) -> None:
        self._owner = owner
        self._fabric = owner.fabric
        self._queue: Queue | None = None
        self._theirs: QueueCard | None = None  # what the queue pair is connected to

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
        if memory.device is not None:
            return Unpaired(read.request, ON_GPU, is_usual=True)
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
        except OSError as error:
            self.close()
            log.warning("rdma_unpaired", reason=error.strerror)
            return Unpaired(read.request, error.strerror or str(error), is_usual=False)
        if fault is not None:
            return Unpaired(read.request, fault, is_usual=not rdma.is_of_limit(fault))
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
        return rdma.memlock_fault(sum(nbytes for _, nbytes in memory.spans[1:])) if len(memory.spans) > 1 else None

    def places(self, memory: ChunkMemory, chunks: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int, int], ...]:
        """Each chunk with its digest, its address and its remote key. OSError: it cannot be registered."""
        assert self._queue is not None
        if memory.device is not None:  # a queue pair for one registration can be asked about another
            raise OSError(errno.EOPNOTSUPP, ON_GPU)
        found: list[tuple[int, int, int, int]] = []
        for chunk, digest in chunks:
            address = memory.address(chunk)
            found.append((chunk, digest, address, self._queue.device.keys(memory, address, memory.sizes[chunk]).remote))
        return tuple(found)

    def word_key(self, word: int) -> int:
        """The remote key of the generation word there. OSError."""
        assert self._queue is not None
        return self._queue.device.page_key(word)

    def close(self) -> None:
        """Take the queue pair apart: this reader reads nothing more."""
        queue, self._queue, self._theirs = self._queue, None, None
        if queue is not None:
            queue.close()
