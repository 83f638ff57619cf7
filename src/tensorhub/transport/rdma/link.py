"""A reader's queue pair to one source, and the memory in which reads land.

Responsible for setting the queue pair up over the two workers' own connection, for proving that the
other end is the source's memory, and for waiting. Not responsible for the reads (`rdma.reader`).
"""

from __future__ import annotations

import mmap
import select
import time

from tensorhub.cuda.device import Device
from tensorhub.errors import OperationTimeout, ProtocolError, StateError
from tensorhub.logs import Tally, get_logger
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport.base import Destination, ReadFailure, Unusable
from tensorhub.transport.generation_words import NONCE_BYTES
from tensorhub.transport.rdma import ports as rdma
from tensorhub.transport.rdma.messages import GID_BYTES, Pair, Paired, QueueCard
from tensorhub.transport.rdma.ports import Move
from tensorhub.transport.rdma.queues import ReaderQueue
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.staging import Packing, Pinned, Staging

LANDING_BUFFERS = 4  # what they hold is about what is under way for host memory

_staged = Tally(get_logger("tensorhub.worker").info, "rdma_staged")


class Link:
    """A queue pair to one source. It is kept and closed with the connection over which it was made. For one thread."""

    def __init__(self, queue: ReaderQueue, place: int) -> None:
        """`place`: of the source's port, among those that it named. OSError."""
        self.queue = queue
        self.place = place
        self.theirs: QueueCard | None = None  # once it is connected
        self.words = queue.device.landing(2 * mmap.PAGESIZE)  # of groups; and of the source's nonce
        self.pinned: Pinned | None = None  # bytes for a GPU land there first
        self._is_armed = False

    def __repr__(self) -> str:
        return f"<Link by {self.queue!r}>"

    def ask(self, client: ReadClient) -> Paired:
        """Ask the source to be read through this queue pair, under the client's right. NotShared, Unusable; ReadFailure."""
        right = client.right
        paired = client.ask(Pair(right.registration, right.generation, self.place, self.queue.card), Paired)
        with client.failures():
            if len(paired.card.gid) != GID_BYTES or len(paired.nonce) != NONCE_BYTES:
                raise ProtocolError(f"a GID has {GID_BYTES} bytes, and a nonce {NONCE_BYTES}")
        return paired

    def wait(self, connection: BlockingConnection, until: float) -> None:
        """Wait until there may be completions, or a message from the source. OperationTimeout, OSError."""
        if not self._is_armed:
            self.queue.arm()  # what came before may have been missed: the caller looks first
            self._is_armed = True
            return
        waiting = select.poll()
        waiting.register(self.queue.descriptor, select.POLLIN)
        waiting.register(connection.descriptor, select.POLLIN)
        ready = waiting.poll(max(0.0, until - time.monotonic()) * 1000)
        if any(descriptor == self.queue.descriptor for descriptor, _ in ready):
            self.queue.take_event()
            self._is_armed = False
        elif not ready:
            raise OperationTimeout("the source's memory brought nothing in that time")

    def prove(self, connection: BlockingConnection, paired: Paired, until: float) -> None:
        """Read the source's nonce. Unusable: it cannot be read, or it is wrong. ReadFailure, OSError."""
        there = Move(self.words.address + mmap.PAGESIZE, self.words.key, paired.address, paired.key, mmap.PAGESIZE)
        self.queue.post([there], 0, frozenset([0]), frozenset())
        while not (done := self.queue.poll()):
            if connection.is_readable():
                raise ReadFailure("lost", "the source left while it was looked for over RDMA")
            self.wait(connection, until)
        status = done[0][1]
        if status:
            way = f"{self.queue.port} to {rdma.gid_text(paired.card.gid)}"
            raise Unusable(f"it cannot be read over RDMA from {way}: {rdma.failure_of(status).detail}")
        if self.words.read(mmap.PAGESIZE, NONCE_BYTES) != paired.nonce:
            raise Unusable("another process is reached over RDMA")

    def prepare(self, gpu: Device | None) -> Pinned:
        """The buffers for bytes that go to that GPU, or to many places of the host. StateError: no memory. OSError: they
        cannot be registered.
        """
        if self.pinned is None or self.pinned.staging.device is not gpu:
            pinned = Pinned(Packing(LANDING_BUFFERS) if gpu is None else Staging(gpu, buffers=LANDING_BUFFERS))
            for span in pinned.spans:
                self.queue.device.keys(pinned, *span)
            self._release()
            self.pinned = pinned
        return self.pinned

    def close(self) -> None:
        """Nothing is written by it any more when this returns. The connection stays."""
        try:
            self.queue.close()
        finally:
            self.words.close()
            self._release()

    def _release(self) -> None:
        pinned, self.pinned = self.pinned, None
        if pinned is not None:
            self.queue.device.release(pinned)


def prepare_destination(link: Link, destination: Destination) -> Pinned | None:
    """The buffers in which reads land first; None: they go straight to the destination. Unusable: the destination cannot be
    registered, judging by its first span and the limit.
    """
    spans, gpu = destination.spans, destination.device
    if destination.is_strided:
        try:
            return link.prepare(gpu)
        except (OSError, StateError) as error:
            raise Unusable(f"the memory to read into: {_reason(error)}") from error
    try:
        if spans:
            link.queue.device.keys(destination, *spans[0])
        if gpu is not None:
            gpu.settle()  # one that cannot is not written from outside
    except (OSError, StateError) as error:
        fault = _reason(error)
        if gpu is None:
            raise Unusable(f"the memory to read into: {fault}") from error
        _staged.count(reason=fault)
        try:
            return link.prepare(gpu)
        except (OSError, StateError) as lack:
            raise Unusable(f"the memory to read into: {_reason(lack)}") from lack
    if gpu is None and len(spans) > 1 and (short := rdma.memlock_fault(sum(nbytes for _, nbytes in spans[1:]))) is not None:
        raise Unusable(f"the memory to read into: {short}")
    return None


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
