"""The rdma transport: a reader's device reads the source's memory by itself, over a reliable connection of queue pairs.

The conversation is that of the other one-sided transports: the reader asks where chunks lie, over the two workers' own
connection, reads them, and names them if the generation word, read after them, is as it must be (`transport.reads`). The
queue pair is set up over that connection too, and lives as long. Before anything is asked for, the reader reads the source's
nonce through it, in a packet as large as any: that it is the right process, and that the way is whole.

Connection and queue pair are kept together for the next version after a read that ended in order (`peers`): the source is
then asked for the new registration with the same end of the queue pair. After any failure, both go.

Everything that the source says is hostile: its addresses and keys are only ever read from, into the destination's own
registered memory, with the lengths of the reader's own manifest.
"""

from __future__ import annotations

import itertools
import mmap
import select
import time
from collections import deque
from collections.abc import Sequence
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
    StillWaiting,
    Unpaired,
)
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.runtime.asking import Asking
from tensorhub.runtime.peers import Peer, Peers
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
PAIRS_TRIED_MAX = 4  # of ports, for one link


class _Link:
    """A queue pair to one source; it is kept and closed with the connection over which it was made. For one thread."""

    def __init__(self, queue: ReaderQueue, place: int) -> None:
        """`place`: of the source's port, among those that it named. OSError."""
        self.queue = queue
        self.place = place
        self.theirs: QueueCard | None = None  # once it is connected
        self.words = queue.device.landing(2 * mmap.PAGESIZE)  # of groups; and of the source's nonce
        self._is_armed = False

    def __repr__(self) -> str:
        return f"<_Link by {self.queue!r}>"

    def ask(self, asking: Asking, right: ReadRight) -> Paired:
        """Ask the source to read that registration through this queue pair. NotShared, Unusable; ReadFailure."""
        with asking.failures():
            asking.connection.send(Pair(0, right.registration, right.generation, self.place, self.queue.card))
            message = asking.hear()
            match message:
                case Paired() if len(message.card.gid) == GID_BYTES and len(message.nonce) == NONCE_BYTES:
                    return message
                case Unpaired():
                    pass
                case _:
                    raise ProtocolError(f"it is asked for a queue pair, and answers {type(message).__name__}")
        raise (NotShared if message.is_usual else Unusable)(f"at the source: {message.reason}")

    def wait(self, connection: BlockingConnection, until: float) -> None:
        """Wait until there may be completions, or something to hear. OperationTimeout, OSError."""
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
        """Read the source's nonce. Unusable: it cannot be read, or is another one; OSError."""
        there = Move(self.words.address + mmap.PAGESIZE, self.words.key, paired.address, paired.key, mmap.PAGESIZE)
        self.queue.post([there], 0, frozenset([0]), frozenset())
        while not (done := self.queue.poll()):
            if connection.is_readable():
                raise Unusable("the source left while it was looked for over RDMA")
            self.wait(connection, until)
        status = done[0][1]
        if status:
            way = f"{self.queue.port} to {rdma.gid_text(paired.card.gid)}"
            raise Unusable(f"it cannot be read over RDMA from {way}: {rdma.failure_of(status).detail}")
        if self.words.read(mmap.PAGESIZE, NONCE_BYTES) != paired.nonce:
            raise Unusable("another process is reached over RDMA")

    def close(self) -> None:
        """Nothing is written by it any more when this returns. The connection stays."""
        self.queue.close()
        self.words.close()


class RdmaTransport:
    """RDMA READs through reliable queue pairs; between hosts whose ports reach each other."""

    name = "rdma"
    lanes = 1  # the device reads while the lane digests what has come

    def __init__(self, local: Local) -> None:
        if self.name not in local.kept:
            ports = rdma.usable_ports(local.options.rdma_ports)  # first: without a device nothing need be installed
            verbs()
            local.kept[self.name] = Fabric(ports)
        self._options = local.options
        self._peers = Peers(local)
        self.fabric: Fabric = local.kept[self.name]
        self._turns = itertools.count()

    def __repr__(self) -> str:
        return f"<RdmaTransport, {self.fabric!r}, {self._peers!r}>"

    def reaches(self, here: Location, there: Location) -> bool:
        """Within a site: between datacenters every pair of ports would be tried in vain."""
        return here.site == there.site

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect, prove who is who, and set up a queue pair, or take up what there is of it; see `Transport.open`."""
        peer = self._peers.open(endpoint.address, right, cutter)
        asking = Asking(self._peers, peer, right, cutter)
        try:
            link = self._linked(peer, asking, right)
            _check_destination(link, destination)
        except BaseException:
            peer.is_sound = False  # a queue pair that is of no use goes, at both ends
            asking.close()
            raise
        return RdmaChannel(asking, peer, link, right, destination, cutter, self._options.stall_timeout_s)

    def sweep(self) -> None:
        """See `Keeping`."""
        self._peers.sweep()

    def close(self) -> None:
        """See `Keeping`."""
        self._peers.close()

    def _linked(self, peer: Peer, asking: Asking, right: ReadRight) -> _Link:
        """The connection's queue pair, if its source has kept it, too; else a new one. As of `_Link.ask`."""
        link = peer.link
        if isinstance(link, _Link):
            if link.ask(asking, right).card == link.theirs:
                return link
            peer.link = None
            link.close()
        peer.link = link = self._new_link(asking, right)
        return link

    def _new_link(self, asking: Asking, right: ReadRight) -> _Link:
        """By one of the pairs of ports. Unusable, which says of each what is in the way."""
        until = time.monotonic() + self._options.connect_timeout_s
        ports = self._ports_of(asking)
        pairs = rdma.pairs(self.fabric.ports, ports, next(self._turns))
        if not pairs:
            raise Unusable(rdma.apart(self.fabric.ports, ports) if ports else NOT_OFFERED)
        faults: list[str] = []
        for here, there in pairs[:PAIRS_TRIED_MAX]:
            try:
                return self._pair(asking, right, self.fabric.ports[here], there, until)
            except NotShared:
                raise
            except (Unusable, OSError, OperationTimeout) as error:
                faults.append(str(getattr(error, "strerror", None) or error))
                if asking.connection.is_readable() or time.monotonic() > until:  # (its end: nothing was asked)
                    break
        raise Unusable("; ".join(dict.fromkeys(faults)))

    @staticmethod
    def _ports_of(asking: Asking) -> Sequence[RdmaPort]:
        with asking.failures():
            asking.connection.send(FindPorts(0))
            message = asking.hear()
            if not isinstance(message, PortsAre):
                raise ProtocolError(f"it is asked for its RDMA ports, and answers {type(message).__name__}")
            return message.ports

    def _pair(self, asking: Asking, right: ReadRight, port: Port, place: int, until: float) -> _Link:
        queue = self.fabric.reader(port)
        try:
            link = _Link(queue, place)
        except BaseException:
            queue.close()
            raise
        try:
            paired = link.ask(asking, right)
            link.theirs = paired.card
            queue.connect(paired.card)
            link.prove(asking.connection, paired, until)
        except BaseException:
            link.close()
            raise
        return link


NOT_OFFERED = "its memory is not to be read by RDMA"


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
        asking: Asking,
        peer: Peer,
        link: _Link,
        right: ReadRight,
        destination: Destination,
        cutter: Cutter,
        stall_timeout_s: float,
    ) -> None:
        self._asking = asking
        self._connection = asking.connection
        self._peer = peer
        self._link = link
        self._right = right
        self._destination = destination
        self._cutter = cutter
        self._stall_timeout_s = stall_timeout_s
        self._reads = Reads(link.queue, link.words, mmap.PAGESIZE, link.queue.device.depth)
        self._located: deque[_Located] = deque()  # and not read yet
        self._proved: deque[tuple[int, int, int]] = deque()  # (chunk, digest, bytes) that are there, and not named yet

    def __repr__(self) -> str:
        return f"<RdmaChannel by {self._link!r}, {self._asking!r}, {self._reads!r}>"

    def submit(self, chunks: Sequence[int]) -> None:
        self._asking.ask(Locate, chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        started = time.perf_counter()
        try:
            with self._asking.failures():
                lacking, first_byte = self._read_some(started)
        except OSError as error:
            raise ReadFailure("lost", f"the queue pair fails: {error.strerror or error}") from error
        if lacking is not None:
            return lacking
        chunks = self._take(bytes_max)
        return Arrival(chunks, first_byte - started, time.perf_counter() - first_byte)

    def _read_some(self, started: float) -> tuple[Lacking | None, float]:
        """Go on until chunks are proved, or some are lacking, or nothing is asked for; and since when bytes come."""
        first_byte, until, done = started, time.monotonic() + self._stall_timeout_s, -1
        while True:
            if self._cutter.is_cut:
                raise ReadFailure("lost", "the read was given up", bytes_discarded=self._proved_bytes())
            try:
                self._proved.extend(chunk for group in self._reads.completed() for chunk in group.chunks)
            except ReadFailure as failure:
                failure.bytes_discarded += self._proved_bytes()
                raise
            while self._connection.is_readable():
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
            self._link.wait(self._connection, until)

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
            nbytes = destination.sizes[chunk]
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
        if not self._reads.is_idle:
            self._peer.is_sound = False  # the queue pair goes, and with it what is under way
        self._asking.close()
