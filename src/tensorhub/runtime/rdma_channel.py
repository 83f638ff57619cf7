"""The rdma transport: a reader's device reads the source's memory by itself, over a reliable connection of queue pairs.

The conversation is that of the other one-sided transports: the reader asks where chunks lie, over the two workers' own
connection, reads them, and names them if the generation word, read after them, is as it must be (`transport.reads`). The
queue pair is set up over that connection too, and lives as long. Before anything is asked for, the reader reads the source's
nonce through it, in a packet as large as any: that it is the right process, and that the way is whole.

A *link* is such a connection with its queue pair. One whose read has ended in order is kept for the next version: it
rests, and the source may end it where it needs the place. Another one is made then, as after any failure.

Everything that the source says is hostile: its addresses and keys are only ever read from, into the destination's own
registered memory, with the lengths of the reader's own manifest.
"""

from __future__ import annotations

import itertools
import mmap
import select
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tensorhub.errors import OperationTimeout, ProtocolError
from tensorhub.messages import (
    ChunksPinned,
    FindPorts,
    Locate,
    Pair,
    Paired,
    PortsAre,
    QueueCard,
    RdmaPort,
    Rest,
    StillWaiting,
    Unpaired,
)
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.runtime.asking import Asking, Failures, connect
from tensorhub.transport import rdma
from tensorhub.transport.base import (
    Arrival,
    Channel,
    Cutter,
    Destination,
    Lacking,
    NotShared,
    ReadFailure,
    ReadRight,
    Unusable,
)
from tensorhub.transport.cma import NONCE_BYTES
from tensorhub.transport.rdma import GID_BYTES, Move, Port
from tensorhub.transport.reads import WINDOW_BYTES, Reads
from tensorhub.transport.registry import Local
from tensorhub.transport.verbs import Fabric, ReaderQueue, verbs
from tensorhub.types import Endpoint, Location

GROUP_BYTES = 4 * 2**20  # of chunks that are named together, at least one
KEPT_S = 60.0  # of a link that rests
RESTING_MAX = 16  # of one worker
PAIRS_TRIED_MAX = 4  # of ports, for one link


class _Link:
    """A connection to one source, with a queue pair. For one thread."""

    def __init__(self, connection: BlockingConnection, queue: ReaderQueue, place: int) -> None:
        """`place`: of the source's port, among those that it named. OSError."""
        self.connection = connection
        self.queue = queue
        self.place = place
        self.theirs: QueueCard | None = None  # once it is connected
        self.used = time.monotonic()
        self.words = queue.device.landing(2 * mmap.PAGESIZE)  # of groups; and of the source's nonce
        self._is_armed = False

    def __repr__(self) -> str:
        return f"<_Link by {self.queue!r}>"

    def ask(self, right: ReadRight) -> Paired:
        """Ask the source to read that registration through this queue pair. NotShared, Unusable; ReadFailure."""
        with Failures(self.connection):
            self.connection.send(Pair(0, right.registration, right.generation, self.place, self.queue.card))
            message = Asking(self.connection, right).hear()
            match message:
                case Paired() if len(message.card.gid) == GID_BYTES and len(message.nonce) == NONCE_BYTES:
                    return message
                case Unpaired():
                    raise (NotShared if message.is_usual else Unusable)(message.reason)
                case _:
                    raise ProtocolError(f"it is asked for a queue pair, and answers {type(message).__name__}")

    def wait(self, until: float) -> None:
        """Wait until there may be completions, or something to hear. OperationTimeout, OSError."""
        if not self._is_armed:
            self.queue.arm()  # what came before may have been missed: the caller looks first
            self._is_armed = True
            return
        waiting = select.poll()
        waiting.register(self.queue.descriptor, select.POLLIN)
        waiting.register(self.connection.descriptor, select.POLLIN)
        ready = waiting.poll(max(0.0, until - time.monotonic()) * 1000)
        if any(descriptor == self.queue.descriptor for descriptor, _ in ready):
            self.queue.take_event()
            self._is_armed = False
        elif not ready:
            raise OperationTimeout("the source's memory brought nothing in that time")

    def prove(self, paired: Paired, until: float) -> None:
        """Read the source's nonce. Unusable: it cannot be read, or is another one; OSError."""
        there = Move(self.words.address + mmap.PAGESIZE, self.words.key, paired.address, paired.key, mmap.PAGESIZE)
        self.queue.post([there], 0, frozenset([0]), frozenset())
        while not (done := self.queue.poll()):
            if self.connection.is_readable():
                raise Unusable("the source left while it was looked for over RDMA")
            self.wait(until)
        status = done[0][1]
        if status:
            raise Unusable(f"it cannot be read over RDMA, {self.queue.port}: {rdma.failure_of(status).detail}")
        if self.words.read(mmap.PAGESIZE, NONCE_BYTES) != paired.nonce:
            raise Unusable("another process is reached over RDMA")

    def take_apart(self) -> None:
        """Nothing is written by it any more when this returns. The connection stays."""
        self.queue.close()
        self.words.close()

    def close(self) -> None:
        """As `take_apart`; the connection goes, too."""
        self.take_apart()
        self.connection.close()


class RdmaTransport:
    """RDMA READs through reliable queue pairs; between hosts whose ports reach each other."""

    name = "rdma"
    lanes = 1  # the device reads while the lane digests what has come

    def __init__(self, local: Local) -> None:
        if self.name not in local.kept:
            verbs()
            local.kept[self.name] = Fabric(rdma.usable_ports(local.options.rdma_ports))
        self._local = local
        self.fabric: Fabric = local.kept[self.name]
        self._turns = itertools.count()
        self._lock = threading.Lock()  # guards the links that rest
        self._resting: dict[tuple[str, str], _Link] = {}  # by (incarnation, address); the one that was used last at the end

    def __repr__(self) -> str:
        return f"<RdmaTransport, {self.fabric!r}, {len(self._resting)} links rest>"

    def reaches(self, here: Location, there: Location) -> bool:
        """Within a site: between datacenters every pair of ports would be tried in vain."""
        return here.site == there.site

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Take up the link that there is, or connect, prove who is who, and set up a queue pair; see `Transport.open`."""
        link = self._woken(endpoint.address, right, cutter) or self._linked(endpoint.address, right, cutter)
        try:
            _check_destination(link, destination)
        except BaseException:
            cutter.detach()
            link.close()
            raise
        return RdmaChannel(self, link, endpoint.address, right, destination, cutter, self._local.options.stall_timeout_s)

    # ------------------------------------------------------------------------------------------------ links that rest

    def _woken(self, address: str, right: ReadRight, cutter: Cutter) -> _Link | None:
        """The link that rests, if its source has kept it, too. As of `_Link.ask`."""
        with self._lock:
            link = self._resting.pop((right.incarnation, address), None)
        if link is None:
            return None
        try:
            cutter.attach(link.connection.shutdown)
            if link.ask(right).card == link.theirs:
                return link
        except ReadFailure as failure:
            if failure.reason == "refused":
                _end(link, cutter)
                raise
        except BaseException:
            _end(link, cutter)
            raise
        _end(link, cutter)
        return None

    def rest(self, address: str, right: ReadRight, link: _Link) -> None:
        """Keep a link that has nothing under way."""
        try:
            link.connection.send(Rest(0))
        except (ConnectionLost, OperationTimeout):
            link.close()
            return
        link.used = time.monotonic()
        with self._lock:
            gone = [self._resting.pop((right.incarnation, address), None)]
            self._resting[right.incarnation, address] = link
            if len(self._resting) > RESTING_MAX:
                gone.append(self._resting.pop(next(iter(self._resting))))
        _close(gone)

    def sweep(self) -> None:
        """Close links that have rested for long. Called now and then."""
        before = time.monotonic() - KEPT_S
        with self._lock:
            gone = [self._resting.pop(key) for key, link in list(self._resting.items()) if link.used < before]
        _close(gone)

    def close(self) -> None:
        """Close all that rest: this incarnation reads no more."""
        with self._lock:
            gone = list(self._resting.values())
            self._resting.clear()
        _close(gone)

    # -------------------------------------------------------------------------------------------------- new ones

    def _linked(self, address: str, right: ReadRight, cutter: Cutter) -> _Link:
        """A new link. Unusable, which says of each pair of ports what is in the way."""
        connection, _ = connect(self._local, address, right, cutter)
        until = time.monotonic() + self._local.options.connect_timeout_s
        try:
            ports = self._ports_of(connection, right)
            pairs = rdma.pairs(self.fabric.ports, ports, next(self._turns))
            if not pairs:
                raise Unusable(rdma.apart(self.fabric.ports, ports) if ports else NOT_OFFERED)
            faults: list[str] = []
            for here, there in pairs[:PAIRS_TRIED_MAX]:
                try:
                    return self._pair(connection, right, self.fabric.ports[here], there, until)
                except NotShared:
                    raise
                except (Unusable, OSError, OperationTimeout) as error:
                    faults.append(str(getattr(error, "strerror", None) or error))
                    if connection.is_readable() or time.monotonic() > until:  # (its end: nothing was asked)
                        break
            raise Unusable("; ".join(faults))
        except BaseException:
            cutter.detach()
            connection.close()
            raise

    @staticmethod
    def _ports_of(connection: BlockingConnection, right: ReadRight) -> Sequence[RdmaPort]:
        with Failures(connection):
            connection.send(FindPorts(0))
            message = Asking(connection, right).hear()
            if not isinstance(message, PortsAre):
                raise ProtocolError(f"it is asked for its RDMA ports, and answers {type(message).__name__}")
            return message.ports

    def _pair(self, connection: BlockingConnection, right: ReadRight, port: Port, place: int, until: float) -> _Link:
        queue = self.fabric.reader(port)
        try:
            link = _Link(connection, queue, place)
        except BaseException:
            queue.close()
            raise
        try:
            paired = link.ask(right)
            link.theirs = paired.card
            queue.connect(paired.card)
            link.prove(paired, until)
        except BaseException:
            link.take_apart()
            raise
        return link


NOT_OFFERED = "its memory is not to be read by RDMA"


def _end(link: _Link, cutter: Cutter) -> None:
    cutter.detach()
    link.close()


def _close(links: Iterable[_Link | None]) -> None:
    for link in links:
        if link is not None:
            link.close()


def _check_destination(link: _Link, destination: Destination) -> None:
    """Unusable: the memory to read into cannot be registered, as far as its first span and the limit tell."""
    spans = destination.spans
    try:
        if spans:
            link.queue.device.keys(destination, *spans[0])
    except OSError as error:
        raise Unusable(f"the memory to read into: {error.strerror}") from error
    fault = rdma.memlock_fault(sum(nbytes for _, nbytes in spans[1:])) if len(spans) > 1 else None
    if fault is not None:
        raise Unusable(f"the memory to read into: {fault}")


class _Located(NamedTuple):
    chunk: int
    digest: int
    address: int
    key: int
    word: tuple[int, int]  # (address, key)


class RdmaChannel:
    """See `transport.base.Channel`."""

    def __init__(
        self,
        transport: RdmaTransport,
        link: _Link,
        address: str,
        right: ReadRight,
        destination: Destination,
        cutter: Cutter,
        stall_timeout_s: float,
    ) -> None:
        self._transport = transport
        self._link = link
        self._address = address
        self._right = right
        self._asking = Asking(link.connection, right)
        self._destination = destination
        self._cutter = cutter
        self._stall_timeout_s = stall_timeout_s
        self._reads = Reads(link.queue, link.words, mmap.PAGESIZE, link.queue.device.depth)
        self._located: deque[_Located] = deque()  # and not read yet
        self._proved: deque[tuple[int, int, int]] = deque()  # (chunk, digest, bytes) that are there, and not named yet
        self._is_cuttable = True  # the cutter ends the link; not where nothing is under way, so that the link can rest

    def __repr__(self) -> str:
        return f"<RdmaChannel by {self._link!r}, {self._asking!r}, {self._reads!r}>"

    def submit(self, chunks: Sequence[int]) -> None:
        if not self._is_cuttable:
            self._cutter.attach(self._link.connection.shutdown)
            self._is_cuttable = True
        self._asking.ask(Locate, chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        started = time.perf_counter()
        try:
            with Failures(self._link.connection):
                lacking, first_byte = self._read_some(started)
        except OSError as error:
            raise ReadFailure("lost", f"the queue pair fails: {error.strerror or error}") from error
        if lacking is not None:
            return lacking
        chunks = self._take(bytes_max)
        if self._reads.is_idle and self._asking.is_answered and not self._located and self._is_cuttable:
            self._cutter.detach()
            self._is_cuttable = False
        return Arrival(chunks, first_byte - started, time.perf_counter() - first_byte)

    def _read_some(self, started: float) -> tuple[Lacking | None, float]:
        """Go on until chunks are proved, or some are lacking, or nothing is asked for; and since when bytes come."""
        first_byte, until, done = started, time.monotonic() + self._stall_timeout_s, -1
        while True:
            if self._cutter.is_cut:
                raise ReadFailure("lost", "the read was given up", bytes_discarded=self._proved_bytes())
            if not self._is_cuttable:
                return None, first_byte
            try:
                self._proved.extend(chunk for group in self._reads.completed() for chunk in group.chunks)
            except ReadFailure as failure:
                failure.bytes_discarded += self._proved_bytes()
                raise
            while self._link.connection.is_readable():
                if (lacking := self._hear()) is not None:
                    return lacking, first_byte
            while self._located and self._reads.is_hungry and self._proved_bytes() < WINDOW_BYTES:
                self._add_group()
            self._reads.post()
            if self._proved or (self._reads.is_idle and self._asking.is_answered):
                return None, first_byte
            if self._reads.is_idle:
                if (lacking := self._hear()) is not None:
                    return lacking, first_byte
                first_byte = time.perf_counter()
                continue
            if self._reads.done != done:
                done, until = self._reads.done, time.monotonic() + self._stall_timeout_s
            self._link.wait(until)

    def _hear(self) -> Lacking | None:
        message = self._asking.hear()
        match message:
            case StillWaiting():
                return self._asking.lacking(message)
            case ChunksPinned():
                self._asking.announced(message.request, [chunk for chunk, *_ in message.chunks])
                word = message.word, message.key
                self._located.extend([_Located(*chunk, word) for chunk in message.chunks])
                return None
            case _:
                raise ProtocolError(f"a Locate is answered with {type(message).__name__}")

    def _add_group(self) -> None:
        """Have the next chunks read, under one word: one at least, then up to GROUP_BYTES."""
        device, destination, word = self._link.queue.device, self._destination, self._located[0].word
        chunks: list[tuple[int, int, int]] = []
        moves: list[Move] = []
        room = GROUP_BYTES
        while self._located and self._located[0].word == word:
            chunk, digest, there, key, _ = self._located[0]
            nbytes = destination.buffer(chunk).nbytes
            room -= nbytes
            if chunks and room < 0:
                break
            self._located.popleft()
            chunks.append((chunk, digest, nbytes))
            if nbytes:
                here = destination.address(chunk)
                moves.append(Move(here, device.keys(destination, here, nbytes).local, there, key, nbytes))
        self._reads.add(chunks, moves, word, self._right.generation)

    def _take(self, bytes_max: int) -> list[tuple[int, int]]:
        """Proved chunks: one, and then up to `bytes_max`."""
        taken: list[tuple[int, int]] = []
        while self._proved:
            bytes_max -= self._proved[0][2]
            if taken and bytes_max < 0:
                break
            chunk, digest, _ = self._proved.popleft()
            taken.append((chunk, digest))
        return taken

    def _proved_bytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self._proved)

    def close(self) -> None:
        if self._is_cuttable:  # something is under way, or has failed
            _end(self._link, self._cutter)
        else:
            self._transport.rest(self._address, self._right, self._link)
