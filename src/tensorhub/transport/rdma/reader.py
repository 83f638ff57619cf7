"""The rdma transport: a reader's device reads the source's memory by itself, over a reliable
connection of queue pairs.

The reader asks where chunks lie, as by other one-sided transports, and reads them. It names them if
the generation word, read after them, is right (`rdma.reads`). The queue pair is set up over the two
workers' own connection, and lives as long as that. First of all the reader reads the source's nonce
through the queue pair, in a packet of full size. This shows that it is the right process, and that
packets of that size get through.

After a read that ended in order, connection and queue pair are kept together for the next version
(`peers`). The source is then asked for the new registration, with this end of the queue pair. After
a failure, both are closed.

If the device reaches the destination's GPU, it writes there. If not, reads land in a few registered
buffers on the host, and the GPU copies proved bytes out of one buffer while reads fill the next. A
source's bytes may be staged in the same way (`rdma.owner`), and then come in consecutive pieces, as
over tcp. So do chunks of many pieces of memory, which land in these buffers, too, and go from there
to their places (`rdma.link`).

Every message of the source is hostile. The reader only ever reads from its addresses, under its
keys, into the destination's own registered memory, with the lengths of its own manifest.
"""

from __future__ import annotations

import itertools
import mmap
import os
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from tensorhub.errors import OperationTimeout, ProtocolError, TransportUnavailable
from tensorhub.memory.addresses import address_of
from tensorhub.messages import ChunksFollow, StillWaiting
from tensorhub.protocol.blocking import PACE_BYTES
from tensorhub.transport.base import (
    DEVICE,
    HOST,
    Arrival,
    Channel,
    Destination,
    Lacking,
    NotShared,
    ReadFailure,
    Unusable,
)
from tensorhub.transport.connected import ConnectedTransport, ReadClient
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.rdma import ports as rdma
from tensorhub.transport.rdma.link import Link, Scatter, prepare_destination
from tensorhub.transport.rdma.messages import (
    DIALECT,
    ChunksPinned,
    FindPorts,
    PieceStaged,
    PieceTaken,
    PortsAre,
)
from tensorhub.transport.rdma.owner import RdmaOwner
from tensorhub.transport.rdma.ports import Move, Port
from tensorhub.transport.rdma.queues import Fabric
from tensorhub.transport.rdma.reads import WINDOW_BYTES, Group, Reads
from tensorhub.transport.rdma.verbs import Keys, verbs
from tensorhub.transport.registry import Local, MeantTransportUnavailable
from tensorhub.transport.staging import Packing, Pinned, Staging
from tensorhub.types import Location

GROUP_BYTES = 4 * 2**20  # of chunks that are named together, at least one
PAIRS_TRIED_MAX = 4  # of ports, for one link
PIECES_MAX = 64  # that a source has staged, and that are not read yet
# of one, unless it is the last one: less, now and then, would hold a chunk for days
PIECE_BYTES_MIN = PACE_BYTES


class RdmaTransport(ConnectedTransport):
    """RDMA READs through reliable queue pairs; between hosts whose ports reach each other."""

    dialect = DIALECT
    lanes = 1  # the device reads while the lane digests what has come
    fills = HOST | DEVICE
    strides = True

    def __init__(self, local: Local) -> None:
        super().__init__(local)
        if self.name not in local.kept:
            local.kept[self.name] = _fabric(local.options.rdma_ports)
        self.fabric: Fabric = local.kept[self.name]
        self._turns = itertools.count()

    def __repr__(self) -> str:
        return f"<RdmaTransport, {self._peers!r}>"

    def reaches(self, here: Location, there: Location) -> bool:
        """Within a site: between datacenters every pair of ports would be tried in vain."""
        return here.site == there.site

    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """Set up a queue pair, or take up what there is of it. One that is of no use goes, at both
        ends.
        """
        link = self._linked(client)
        pinned = prepare_destination(link, destination)
        return RdmaChannel(client, link, destination, self._options.stall_timeout_s, pinned)

    def serve(self) -> OwnerSide:
        return RdmaOwner(self.fabric)

    def _linked(self, client: ReadClient) -> Link:
        """The connection's queue pair, if its source has kept it, too; else a new one. As of
        `Link.ask`.
        """
        peer = client.peer
        link = peer.link
        if isinstance(link, Link):
            if link.ask(client).card == link.theirs:
                return link
            peer.link = None
            link.close()
        peer.link = link = self._new_link(client)
        return link

    def _new_link(self, client: ReadClient) -> Link:
        """A link by one of the pairs of ports. Unusable names the obstacle of each pair."""
        until = time.monotonic() + self._options.connect_timeout_s
        ports = client.ask(FindPorts(), PortsAre).ports
        pairs = rdma.pairs(self.fabric.ports, ports, next(self._turns))
        if not pairs:
            raise Unusable(rdma.apart(self.fabric.ports, ports) if ports else NOT_OFFERED)
        faults: list[str] = []
        for here, there in pairs[:PAIRS_TRIED_MAX]:
            try:
                return self._pair(client, self.fabric.ports[here], there, until)
            except NotShared:
                raise
            except (Unusable, OSError, OperationTimeout) as error:
                faults.append(str(getattr(error, "strerror", None) or error))
                # (its end: nothing was asked)
                if client.connection.is_readable() or time.monotonic() > until:
                    break
        raise Unusable("; ".join(dict.fromkeys(faults)))

    def _pair(self, client: ReadClient, port: Port, place: int, until: float) -> Link:
        queue = self.fabric.reader(port)
        try:
            link = Link(queue, place)
        except BaseException:
            queue.close()
            raise
        try:
            paired = link.ask(client)
            link.theirs = paired.card
            queue.connect(paired.card)
            link.prove(client.connection, paired, until)
        except BaseException:
            link.close()
            raise
        return link


def _fabric(wanted: str | None) -> Fabric:
    """Of the ports that are wanted. TransportUnavailable."""
    try:
        ports = rdma.usable_ports(wanted)  # first: without a device nothing need be installed
        verbs()
    except TransportUnavailable as error:
        if wanted or os.environ.get(rdma.PORTS_VARIABLE):
            raise MeantTransportUnavailable(str(error)) from error
        raise
    return Fabric(ports)


NOT_OFFERED = "its memory is not to be read by RDMA"


class _Part(NamedTuple):
    """The part of a chunk that is read at a time: all of it, unless one end is staged."""

    chunk: int
    digest: int
    offset: int
    nbytes: int
    there: int  # address
    key: int
    word: tuple[int, int]  # (address, key)
    staged_for: int | None = None  # the request whose piece is taken with this part


class _Landed(NamedTuple):
    """What is to be done when a group is proved."""

    buffer: int | None  # it is in that one
    parts: Sequence[tuple[_Part, int]]  # each with its address there
    taken: Sequence[int]  # requests of pieces that are read


class RdmaChannel:
    """See `transport.base.Channel`."""

    def __init__(
        self,
        client: ReadClient,
        link: Link,
        destination: Destination,
        stall_timeout_s: float,
        pinned: Pinned | None = None,
    ) -> None:
        """`pinned`: the buffers in which reads land first."""
        self._client = client
        self._connection = client.connection
        self._link = link
        self._right = client.right
        self._destination = destination
        self._cutter = client.cutter
        self._stall_timeout_s = stall_timeout_s
        self._pinned = pinned
        self._scatter = Scatter(destination) if destination.is_strided else None
        # that are free
        self._buffers = deque(range(len(pinned.staging.buffers) if pinned is not None else 0))
        self._reads = Reads(link.queue, link.words, mmap.PAGESIZE, link.queue.device.depth)
        self._coming: deque[tuple[int, int]] = deque()  # (chunk, digest) whose pieces follow
        self._come_bytes = 0  # of the first of them
        self._pieces = 0  # that are staged for this reader
        self._located: deque[_Part] = deque()  # and not read yet
        # (chunk, digest, bytes) that are there, and not named yet
        self._proved: deque[tuple[int, int, int]] = deque()
        # that are there, those of chunks of which parts are lacking included
        self._unnamed_bytes = 0

    def submit(self, chunks: Sequence[int]) -> None:
        self._client.locate(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        started = time.perf_counter()
        try:
            with self._client.failures():
                lacking, first_byte = self._read_some(started)
        except OSError as error:
            text = f"the queue pair fails: {error.strerror or error}"
            raise ReadFailure("lost", text, bytes_discarded=self._unnamed_bytes) from error
        except ReadFailure as failure:
            failure.bytes_discarded += self._unnamed_bytes
            raise
        if lacking is not None:
            return lacking
        chunks = self._take(bytes_max)
        seconds, made, digest_s = time.perf_counter() - first_byte, dict[int, int](), 0.0
        if self._scatter is not None:
            made = {
                chunk: self._scatter.made.pop(chunk)
                for chunk, _ in chunks
                if chunk in self._scatter.made
            }
            digest_s, self._scatter.digest_s = self._scatter.digest_s, 0.0
        return Arrival(chunks, first_byte - started, max(0.0, seconds - digest_s), made, digest_s)

    def _read_some(self, started: float) -> tuple[Lacking | None, float]:
        """Read until chunks are proved, or the source lacks some, or nothing is left. Also says
        when bytes began to come.
        """
        first_byte, until, done = started, time.monotonic() + self._stall_timeout_s, -1
        while True:
            if self._cutter.is_cut:
                raise ReadFailure("lost", "the read was given up")
            self._land(self._reads.completed())
            while self._connection.is_readable():
                if (lacking := self._hear()) is not None:
                    return lacking, first_byte
            while self._located and self._reads.is_hungry and self._has_room():
                self._add_group()
            self._reads.post()
            if self._proved or (
                self._reads.is_idle and self._client.is_answered and not self._coming
            ):
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
        message = self._client.hear()
        match message:
            case StillWaiting():
                return self._client.lacking(message)
            case ChunksFollow():
                self._client.announced(message.request, [chunk for chunk, _ in message.chunks])
                self._coming.extend(message.chunks)
                self._name_empty()
                return None
            case _:
                self._hear_places(message.request, self._client.dialect.message(message))
                return None

    def _hear_places(self, request: int, message: object) -> None:
        match message:
            case ChunksPinned():
                self._client.announced(request, [chunk for chunk, *_ in message.chunks])
                word = message.word, message.key
                for chunk, digest, there, key in message.chunks:
                    self._locate(
                        _Part(chunk, digest, 0, self._destination.sizes[chunk], there, key, word)
                    )
            case PieceStaged():
                self._locate_piece(request, message)
            case _:
                raise ProtocolError(f"a Locate is answered with {type(message).__name__}")

    def _locate(self, part: _Part) -> None:
        """Note where that is to be read, in parts that fit where they land."""
        room = part.nbytes if self._pinned is None else self._pinned.staging.piece_bytes
        for start in range(0, part.nbytes, room) if part.nbytes else (0,):
            size, offset, there = (
                min(room, part.nbytes - start),
                part.offset + start,
                part.there + start,
            )
            self._located.append(part._replace(offset=offset, nbytes=size, there=there))

    def _locate_piece(self, request: int, piece: PieceStaged) -> None:
        """A piece is staged: the next bytes of the chunks that are coming."""
        self._pieces += 1
        if self._pieces > PIECES_MAX:
            raise ProtocolError(f"more than {PIECES_MAX} pieces are staged, and not taken")
        there, left, word = piece.address, piece.nbytes, (piece.word, piece.word_key)
        while left:
            if not self._coming:
                raise ProtocolError("a piece is staged, of no chunk that is to follow")
            chunk, digest = self._coming[0]
            nbytes = min(left, self._destination.sizes[chunk] - self._come_bytes)
            self._locate(_Part(chunk, digest, self._come_bytes, nbytes, there, piece.key, word))
            self._come_bytes, there, left = self._come_bytes + nbytes, there + nbytes, left - nbytes
            if self._come_bytes == self._destination.sizes[chunk]:
                self._coming.popleft()
                self._come_bytes = 0
                self._name_empty()
        if self._coming and piece.nbytes < PIECE_BYTES_MIN:
            raise ProtocolError(f"a piece of {piece.nbytes} bytes is staged, and more is to follow")
        self._located[-1] = self._located[-1]._replace(staged_for=request)

    def _name_empty(self) -> None:
        """Chunks without bytes need no piece."""
        while (
            self._coming
            and not self._come_bytes
            and not self._destination.sizes[self._coming[0][0]]
        ):
            self._proved.append((*self._coming.popleft(), 0))

    def _has_room(self) -> bool:
        """Whether more can be read before bytes that have landed are taken."""
        return (
            bool(self._buffers) if self._pinned is not None else self._proved_bytes() < WINDOW_BYTES
        )

    def _add_group(self) -> None:
        """Begin to read the next parts, under one word: at least one, and further ones up to
        GROUP_BYTES.
        """
        word, room = self._located[0].word, GROUP_BYTES
        if self._pinned is not None:
            room = min(room, self._pinned.staging.piece_bytes)
        parts: list[_Part] = []
        while self._located and self._located[0].word == word:
            room -= self._located[0].nbytes
            if parts and room < 0:
                break
            parts.append(self._located.popleft())
        sizes = self._destination.sizes
        ends = [part for part in parts if part.offset + part.nbytes == sizes[part.chunk]]
        chunks = [(part.chunk, part.digest, sizes[part.chunk]) for part in ends]
        moves, landed = self._moves([part for part in parts if part.nbytes])
        taken = [part.staged_for for part in parts if part.staged_for is not None]
        self._reads.add(chunks, moves, word, self._right.generation, landed._replace(taken=taken))

    def _moves(self, parts: Sequence[_Part]) -> tuple[list[Move], _Landed]:
        """The moves that read these parts, and what to do when they are proved."""
        device, destination = self._link.queue.device, self._destination
        moves: list[Move] = []
        if self._pinned is None:
            for part in parts:
                here = destination.address(part.chunk) + part.offset
                keys = self._keys_of(here, part.nbytes)
                moves.append(Move(here + keys.shift, keys.local, part.there, part.key, part.nbytes))
            return moves, _Landed(None, (), ())
        buffer, landing = self._buffers.popleft(), list[tuple[_Part, int]]()
        here = address_of(self._pinned.staging.buffers[buffer])
        for part in parts:
            keys = device.keys(self._pinned, here, part.nbytes)
            moves.append(Move(here, keys.local, part.there, part.key, part.nbytes))
            landing.append((part, here))
            here += part.nbytes
        return moves, _Landed(buffer, landing, ())

    def _keys_of(self, address: int, nbytes: int) -> Keys:
        """The destination's keys there. ReadFailure: this part cannot be registered, although the
        first one could be.
        """
        try:
            return self._link.queue.device.keys(self._destination, address, nbytes)
        except OSError as error:
            raise ReadFailure("lost", f"the memory to read into: {error.strerror}") from error

    def _land(self, groups: Sequence[Group]) -> None:
        """These groups are proved: bring their chunks to where they belong. StateError: the GPU has
        failed.
        """
        for group in groups:
            landed: _Landed = group.tag
            for request in landed.taken:
                self._pieces -= 1
                self._client.say(request, PieceTaken())
            if self._pinned is not None and landed.buffer is not None:
                self._bring(self._pinned.staging, landed.parts)
                self._buffers.append(landed.buffer)
            self._unnamed_bytes += group.nbytes
            self._proved.extend(group.chunks)
        if groups and self._pinned is None and self._destination.device is not None:
            self._destination.device.settle()

    def _bring(self, staging: Staging | Packing, parts: Sequence[tuple[_Part, int]]) -> None:
        """Copy these parts, which are in a buffer, to where they belong. StateError."""
        gpus = staging if isinstance(staging, Staging) else None
        if self._scatter is not None:
            for part, here in parts:
                self._scatter.put(gpus, part.chunk, part.offset, here, part.nbytes)
        elif gpus is not None:
            to = self._destination.address
            gpus.scatter(
                [(to(part.chunk) + part.offset, here, part.nbytes) for part, here in parts]
            )

    def _take(self, bytes_max: int) -> list[tuple[int, int]]:
        """Proved chunks: at least one, and further ones up to `bytes_max`."""
        taken: list[tuple[int, int]] = []
        while self._proved:
            bytes_max -= self._proved[0][2]
            if taken and bytes_max < 0:
                break
            chunk, digest, nbytes = self._proved.popleft()
            self._unnamed_bytes -= nbytes
            taken.append((chunk, digest))
        return taken

    def _proved_bytes(self) -> int:
        return sum(nbytes for _, _, nbytes in self._proved)

    def close(self) -> None:
        if not self._reads.is_idle or self._located or self._coming:
            self._client.peer.is_sound = False  # the queue pair goes, and with it what is under way
        if self._scatter is not None:
            self._scatter.close()
        self._client.close()
