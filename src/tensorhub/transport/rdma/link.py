"""A reader's queue pair to one source, the memory in which reads land, and the way from there to
many places.

Responsible for setting the queue pair up over the two workers' own connection, for proving that the
peer's end is the source's memory, and for waiting. Not responsible for the reads (`rdma.reader`).
"""

from __future__ import annotations

import ctypes
import mmap
import select
import time
from collections import deque
from collections.abc import Generator

from tensorhub.errors import OperationTimeout, ProtocolError, StateError
from tensorhub.logs import Tally, get_logger
from tensorhub.memory.addresses import address_of
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport.base import Destination, ReadFailure, Unusable
from tensorhub.transport.connected import ReadClient
from tensorhub.transport.generation_words import NONCE_BYTES
from tensorhub.transport.rdma import ports as rdma
from tensorhub.transport.rdma.messages import GID_BYTES, Pair, Paired, QueueCard
from tensorhub.transport.rdma.ports import Move
from tensorhub.transport.rdma.queues import Buffers, ReaderQueue
from tensorhub.transport.staging import Pinned, Staging
from tensorhub.transport.streaming_digest import PiecewiseDigest


class Scatter:
    """Of one channel, whose destination is strided."""

    def __init__(self, destination: Destination) -> None:
        self.made: dict[int, int] = {}  # digests of whole chunks
        self.digest_s = 0.0  # what making those took
        self._destination = destination
        # of the present chunk, in host memory
        self._calls: Generator[list[memoryview]] | None = None
        self._views: deque[memoryview] = deque()  # of it: room for what comes next
        self._digest = PiecewiseDigest()

    def put(
        self, staging: Staging | None, chunk: int, offset: int, source: int, nbytes: int
    ) -> None:
        """The chunk's next bytes are at that address of the host. `staging`: for its device.
        StateError: that has failed.
        """
        if staging is not None:
            self._put_on(staging, chunk, offset, source, nbytes)
            return
        if not offset:
            self._calls, self._digest = self._destination.incoming(chunk), PiecewiseDigest()
        assert self._calls is not None
        end = offset + nbytes
        while nbytes:
            if not self._views:
                self._views.extend(next(self._calls))
            view = self._views.popleft()
            if view.nbytes > nbytes:
                self._views.appendleft(view[nbytes:])
                view = view[:nbytes]
            ctypes.memmove(address_of(view), source, view.nbytes)
            source, nbytes = source + view.nbytes, nbytes - view.nbytes
            if self._destination.is_digested:
                self._digest.go_on([view])
        if end == self._destination.sizes[chunk]:
            next(self._calls, None)  # the last of it goes where it belongs
            if self._destination.is_digested:
                self.made[chunk] = self._digest.made
                self.digest_s += self._digest.seconds

    def _put_on(self, staging: Staging, chunk: int, offset: int, source: int, nbytes: int) -> None:
        at, size = staging.room(max(self._destination.sizes)), self._destination.sizes[chunk]
        staging.scatter([(at + offset, source, nbytes)])
        if offset + nbytes == size:
            self.made |= self._destination.take_in([chunk], at)

    def close(self) -> None:
        """Nothing is written afterwards."""
        if self._calls is not None:
            self._calls.close()


_staged = Tally(get_logger("tensorhub.worker").info, "rdma_staged")


class Link:
    """A queue pair to one source. It is kept and closed with the connection over which it was made.
    For one thread.
    """

    def __init__(self, queue: ReaderQueue, place: int) -> None:
        """`place`: of the source's port, among those that it named. OSError."""
        self.queue = queue
        self.place = place
        self.theirs: QueueCard | None = None  # once it is connected
        self.words = queue.device.landing(2 * mmap.PAGESIZE)  # of groups; and of the source's nonce
        self.buffers = Buffers(queue.device)
        self._is_armed = False

    def ask(self, client: ReadClient) -> Paired:
        """Ask the source to be read through this queue pair, under the client's right. NotShared,
        Unusable; ReadFailure.
        """
        right = client.right
        paired = client.ask(
            Pair(right.registration, right.generation, self.place, self.queue.card), Paired
        )
        with client.failures():
            if len(paired.card.gid) != GID_BYTES or len(paired.nonce) != NONCE_BYTES:
                raise ProtocolError(f"a GID has {GID_BYTES} bytes, and a nonce {NONCE_BYTES}")
        return paired

    def wait(self, connection: BlockingConnection, until: float) -> None:
        """Wait until there may be completions, or a message from the source. OperationTimeout,
        OSError.
        """
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
        """Read the source's nonce. Unusable: it cannot be read, or it is wrong. ReadFailure,
        OSError.
        """
        there = Move(
            self.words.address + mmap.PAGESIZE,
            self.words.key,
            paired.address,
            paired.key,
            mmap.PAGESIZE,
        )
        self.queue.post([there], 0, frozenset([0]), frozenset())
        while not (done := self.queue.poll()):
            if connection.is_readable():
                raise ReadFailure("lost", "the source left while it was looked for over RDMA")
            self.wait(connection, until)
        status = done[0][1]
        if status:
            way = f"{self.queue.port} to {rdma.gid_text(paired.card.gid)}"
            raise Unusable(
                f"it cannot be read over RDMA from {way}: {rdma.failure_of(status).detail}"
            )
        if self.words.read(mmap.PAGESIZE, NONCE_BYTES) != paired.nonce:
            raise Unusable("another process is reached over RDMA")

    def close(self) -> None:
        """Nothing is written by it any more when this returns. The connection stays."""
        try:
            self.queue.close()
        finally:
            self.words.close()
            self.buffers.release()


def prepare_destination(link: Link, destination: Destination) -> Pinned | None:
    """The buffers in which reads land first; None: they go straight to the destination. Unusable:
    the destination cannot be registered, judging by its first span and the limit.
    """
    gpu = destination.device
    if not destination.is_strided:
        fault = link.queue.device.fault_of(destination)
        try:
            if fault is None and gpu is not None:
                gpu.settle()  # one that cannot is not written from outside
        except StateError as error:
            fault = str(error)
        if fault is None:
            return None
        if gpu is None:
            raise Unusable(f"the memory to read into: {fault}")
        _staged.count(reason=fault)
    try:
        return link.buffers.prepare(gpu)
    except (OSError, StateError) as error:
        raise Unusable(
            f"the memory to read into: {getattr(error, 'strerror', None) or error}"
        ) from error
