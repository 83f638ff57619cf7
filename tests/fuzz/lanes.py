"""Targets: the data plane. What an owner answers to a reader's lane, and what a reader asks of an
owner's lane.
"""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import xxhash

from tensorhub.errors import ProtocolError
from tensorhub.layouts.reading import Selection
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import (
    ChunkDigest,
    ChunkFollows,
    ChunksFollow,
    ChunksLie,
    DoneReading,
    FromOwner,
    FromReader,
    Grant,
    Locate,
    NotThisWay,
    Origin,
    Read,
    ReadRefused,
    Select,
    Selected,
    StillWaiting,
    TransportReply,
    TransportRequest,
)
from tensorhub.model.accesses import CHUNKS_PER_ACCESS_MAX
from tensorhub.model.manifest import Digest, TensorDescription, build_manifest
from tensorhub.model.strips import Strip, straight
from tensorhub.protocol import codec
from tensorhub.protocol.blocking import FRAME_BYTES_MAX, BlockingConnection
from tensorhub.protocol.frames import frame
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.runtime.data.acceptor import _next_read
from tensorhub.runtime.data.lanes import PullRunner
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.data.source_lane import Opened, SourceLane
from tensorhub.scheduler.requests import Requests
from tensorhub.transport import (
    cma,
    cma as cma_messages,
    cuda_ipc,
    read_server,
    shm,
    tcp as tcp_owner,
)
from tensorhub.transport.base import Channel, Cutter, Destination, ReadRight
from tensorhub.transport.cma import CmaOwner
from tensorhub.transport.connected import ReadClient
from tensorhub.transport.cuda_ipc import CudaIpcOwner
from tensorhub.transport.dialect import Find, FindRegions, RegionsAre
from tensorhub.transport.generation_words import GenerationWords
from tensorhub.transport.one_sided import OneSidedChannel
from tensorhub.transport.owner import Lane
from tensorhub.transport.peers import Peer, Peers
from tensorhub.transport.rdma import messages as rdma
from tensorhub.transport.rdma.owner import RdmaOwner
from tensorhub.transport.rdma.queues import Fabric
from tensorhub.transport.read_server import ReadServer
from tensorhub.transport.registry import Local
from tensorhub.transport.shm import ShmOwner
from tensorhub.transport.streaming_digest import FIRST_SEND_BYTES
from tensorhub.transport.tcp import TcpChannel
from tensorhub.types import ContentId, Incarnation, LeaseId, Location, Options, RegistrationId
from tests.fuzz.source import Source

SIZES = (10, 5, 0, 1, 300, 7)  # of tensors: five chunks
CHUNKS = 5
CANARY = b"not to be written"
CONTENT, REGISTRATION, GENERATION = ContentId("content"), RegistrationId("mine"), 7
RIGHT = ReadRight(LeaseId("lease"), Incarnation("source.1"), RegistrationId("theirs"), 5, CONTENT)
GRANT = Grant("lease", "source", "source.1", "theirs", 5, (), Location(host="h"), complete=True)
STALL_S = 5.0
ANSWERS: tuple[type[Any], ...] = (
    *(ChunksFollow, ChunkFollows, ChunkDigest, StillWaiting, ReadRefused),
    *(ChunksLie, TransportReply, NotThisWay),
)
ASKED_MAX = 12  # requests of one input


@functools.cache
def _manifest(digest: Digest) -> Any:
    tensors = [
        TensorDescription(f"t{index}", "uint8", (size,), index << 40, size)
        for index, size in enumerate(SIZES)
    ]
    return build_manifest(tensors, 4096, digest)


def _honest(index: int, size: int) -> bytes:
    return bytes([(index * 31 + n) % 256 for n in range(size)])


class _Memory:
    """Registered memory with something behind each region that nobody may write."""

    def __init__(self, digest: Digest, *, filled: bool) -> None:
        self.arrays = [
            bytearray(_honest(i, n) if filled else n) + bytearray(CANARY)
            for i, n in enumerate(SIZES)
        ]
        views = [memoryview(array)[: -len(CANARY)] for array in self.arrays]
        self.chunks = ChunkMemory(_manifest(digest), views)

    def check(self) -> None:
        assert all(array.endswith(CANARY) for array in self.arrays), (
            "bytes beyond a region were written"
        )


DIALECTS = {
    each.transport: each
    for each in (cma_messages.DIALECT, shm.DIALECT, cuda_ipc.DIALECT, rdma.DIALECT)
}
NAMES = tuple(DIALECTS)  # of the owner's sides


@contextlib.contextmanager
def _connected() -> Iterator[tuple[BlockingConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    with theirs, BlockingConnection(ours, stall_timeout_s=STALL_S) as connection:
        yield connection, theirs


# --------------------------------------------------------------------------------------------------
# reader


def readers(data: bytes) -> None:
    """Whatever a source answers: the lane ends, only chunks that have their digest are offered to
    others, and the books of the pull are right.
    """
    source = Source(data)
    memory = _Memory(source.choice(("xxh3-64", "none")), filled=False)

    def make(client: ReadClient, destination: Destination) -> TcpChannel:
        return TcpChannel(client, destination)

    _read(source, memory, make, lambda: _answers(source, memory.chunks), len(data) + 2**17)


def locators(data: bytes) -> None:
    """The same of a source that says where its chunks lie, in this very process: only what is under
    the word counts.
    """
    source = Source(data)
    memory, theirs = _Memory("xxh3-64", filled=False), _Memory("xxh3-64", filled=True)
    words = GenerationWords()
    words.set(RIGHT.registration, RIGHT.generation)

    def make(client: ReadClient, destination: Destination) -> OneSidedChannel:
        return OneSidedChannel(client, cma.Process(words.header), destination, None)

    _read(
        source,
        memory,
        make,
        lambda: _places(source, theirs.chunks, words.address(RIGHT.registration)),
        2**17,
    )


def _read(
    source: Source,
    memory: _Memory,
    make: Callable[[ReadClient, Destination], Channel],
    answers: Callable[[], bytes],
    bytes_max: int,
) -> None:
    owner = SharedOwner()
    owner.open(REGISTRATION, GENERATION, CONTENT, memory.chunks, complete=False)
    peers = Peers(Local(Incarnation("reader"), (b"",), Options()), tcp_owner.DIALECT)
    peers.close()
    with _connected() as (connection, theirs):

        def open_channel(
            grant: Grant, destination: Destination, cutter: Cutter, left: int
        ) -> Opened:
            peer = Peer(connection, "", RIGHT.incarnation, b"", is_local=True)
            return Opened(
                "any",
                make(ReadClient(peers, peer, RIGHT, cutter), destination),
                batch_bytes=batch_bytes,
            )

        batch_bytes = source.choice((1, 20, 10**6))
        runner = PullRunner(memory.chunks, owner, REGISTRATION, GENERATION, open_channel)
        runner._wakeup = _Nobody()  # type: ignore[assignment]  # no loop waits here
        lease, origin = LeaseId(GRANT.lease), Origin(GRANT.registration, GRANT.generation)
        lane = SourceLane(GRANT, lease, origin, Requests(runner._pull, lease))
        runner._pull.add_source(lane.lease, source.flag())
        runner._lanes[lane.lease] = lane
        theirs.sendall(answers())
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.closing(connection):
            runner._lane_thread(lane)
    memory.check()
    pull = runner._pull
    pull.check_invariants()
    assert not pull.in_flight(lane.lease)
    report = runner.report()
    assert report.bytes_read <= bytes_max
    for chunk, is_verified in enumerate(pull.verified):
        known = owner._owner.digest(REGISTRATION, GENERATION, chunk)
        assert (
            not is_verified or not memory.chunks.is_digested or known == memory.chunks.digest(chunk)
        )
    available = {
        chunk
        for first, count in owner.has(REGISTRATION, GENERATION, 100)
        for chunk in range(first, first + count)
    }
    assert available == {chunk for chunk, is_verified in enumerate(pull.verified) if is_verified}
    owner.check_invariants()


class _Nobody:
    def set(self) -> None: ...


def _answers(source: Source, memory: ChunkMemory) -> bytes:
    """What a source says: frames with payload behind them, right, wrong or none at all."""
    said = bytearray()
    pools: dict[str, list[Any]] = {"request": [0, 1, 2, 3], "reason": ["gone"]}
    while source and len(said) < 2**16:
        kind = source.byte()
        if kind < 140:
            named = [source.below(CHUNKS) for _ in range(1 + source.below(3))]
            pairs = tuple([(chunk, _digest(chunk) if memory.is_digested else 0) for chunk in named])
            said += frame(codec.encode(ChunksFollow(source.below(4), pairs)), FRAME_BYTES_MAX)
            payload = bytearray(b"".join([_chunk(chunk) for chunk in named]))
            if source.byte() > 230 and payload:
                payload[source.below(len(payload))] ^= 1 + source.byte() % 255
            said += payload
        elif kind < 155:
            chunk = source.below(CHUNKS)
            said += frame(
                codec.encode(ChunkFollows(source.below(4), chunk)), FRAME_BYTES_MAX
            ) + _chunk(chunk)
            if source.byte() < 240:
                digest = _digest(chunk) if source.byte() < 240 else 1
                said += frame(codec.encode(ChunkDigest(source.below(4), digest)), FRAME_BYTES_MAX)
        elif kind < 200:
            said += frame(
                codec.encode(source.value(source.choice(ANSWERS), pools)), FRAME_BYTES_MAX
            )
        elif kind < 230:
            runs = tuple([(source.below(8), source.below(5)) for _ in range(source.below(4))])
            said += frame(codec.encode(StillWaiting(source.below(4), runs)), FRAME_BYTES_MAX)
        else:
            said += source.blob(60)
    return bytes(said)


def _places(source: Source, memory: ChunkMemory, word: int) -> bytes:
    """Where a source says that chunks lie, and under which word: rightly, or somewhere else."""
    said = bytearray()
    while source and len(said) < 2**14:
        kind = source.byte()
        if kind < 230:
            shift = source.choice((0, 0, 0, 1, 2**61, -1))
            places = [
                (chunk, _digest(chunk), max(0, memory.address(chunk) + shift))
                for chunk in [source.below(CHUNKS) for _ in range(1 + source.below(3))]
            ]
            at = (
                word
                if source.byte() < 240
                else source.choice((0, 1, word + 1, memory.address(0), 2**62))
            )
            said += frame(
                codec.encode(ChunksLie(source.below(4), tuple(places), at)), FRAME_BYTES_MAX
            )
        else:
            pools: dict[str, list[Any]] = {"request": [0, 1, 2, 3], "reason": ["gone"]}
            said += frame(
                codec.encode(source.value(source.choice(ANSWERS), pools)), FRAME_BYTES_MAX
            )
    return bytes(said)


@functools.cache
def _chunk(index: int) -> bytes:
    place = _manifest("none").chunks[index]
    return _honest(place.region, SIZES[place.region])[place.offset : place.offset + place.nbytes]


# --------------------------------------------------------------------------------------------------
# owner


def owners(data: bytes) -> None:
    """Whatever a reader asks: it hears what is held under the right that it names, byte for byte,
    or that it is refused.
    """
    source = Source(data)
    memory = _Memory("xxh3-64", filled=True)
    owner = SharedOwner([CmaOwner(), ShmOwner(), CudaIpcOwner(), RdmaOwner(Fabric([]))])
    available = (
        frozenset(range(CHUNKS))
        if source.flag()
        else frozenset(n for n in range(CHUNKS) if source.flag())
    )
    owner.open(REGISTRATION, GENERATION, CONTENT, memory.chunks, complete=len(available) == CHUNKS)
    owner.mark_available(
        REGISTRATION, GENERATION, [(chunk, memory.chunks.digest(chunk)) for chunk in available]
    )
    held: frozenset[int] | None = available
    with _connected() as (connection, theirs):
        lane = Lane(connection, is_local=len(data) % 2 == 0)
        owner.add_lane(lane)
        theirs.settimeout(STALL_S)
        for _ in range(ASKED_MAX):
            if not source:
                break
            kind = source.byte()
            if kind > 250:
                owner.fence(REGISTRATION, 0.0)
                held = None
            asked = _question(source, kind)
            theirs.sendall(asked)
            if not _asked(asked):
                theirs.shutdown(socket.SHUT_WR)  # what is no whole frame ends here
            if not _serve(lane, connection, owner, theirs, held, memory.chunks):
                break
        owner.remove_lane(lane)
    owner.check_invariants()
    memory.check()


def _question(source: Source, kind: int) -> bytes:
    if kind < 30:
        return source.blob(200)
    pools: dict[str, list[Any]] = {
        "registration": [REGISTRATION, REGISTRATION, "other"],
        "generation": [GENERATION, GENERATION, 5],
        "content_id": [CONTENT, CONTENT, "other"],
        "transport": [*NAMES, "other"],
        "selection": ["", "", "", SELECTED.selection_id, SELECTED.selection_id, "other"],
        "runs": [
            ((0, CHUNKS),),
            ((1, 2), (4, 1)),
            ((0, 1),) * 100,
            (),
            ((3, 9),),
            ((2**63, 1024),),
            ((0, 0),),
        ],
    }
    if 30 <= kind < 90:
        dialect = DIALECTS[source.choice(NAMES)]
        said = source.value(source.choice(list(dialect.from_reader.forms)), pools)
        return frame(codec.encode(dialect.request(source.below(2**16), said)), FRAME_BYTES_MAX)
    if 185 <= kind < 200:
        selection = source.choice((SELECTED, SELECTED, SELECTED, BEYOND, OTHER))
        blob, at = selection.encode(), source.choice((0, 0, 0, 9))
        piece = blob[at : source.choice((10_000, 10_000, 0, 9, at + source.below(100)))]
        name, total = (
            source.choice((selection.selection_id,) * 6 + ("other",)),
            source.choice((len(blob),) * 8 + (9, 0)),
        )
        generation = source.choice((GENERATION,) * 6 + (5,))
        said = Select(source.below(2**16), REGISTRATION, generation, name, total, at, piece)
        return frame(codec.encode(said), FRAME_BYTES_MAX)
    asked: type[FromReader] = TransportRequest if kind < 100 else Locate if kind > 200 else Read
    return frame(codec.encode(source.value(asked, pools)), FRAME_BYTES_MAX)


SELECTED = Selection(
    (
        (straight(0, 2, 5),),
        (Strip(4, 10, 0, 0, 1, ((4, 50),), 20),),
        (Strip(0, 0, 1, 0, 2, (), 4), straight(5, 1, 3)),
    )
)
OF = ((0,), (3,), (0, 1, 4))  # which chunks those of that selection have bytes of
BEYOND = Selection(((Strip(4, 10, 0, 0, 1, ((4, 50),), 141),),))
OTHER = Selection(((straight(4, 0, 7),),))


@functools.cache
def _selected_chunk(index: int) -> bytes:
    places = [(strip.run, *place) for strip in SELECTED.chunks[index] for place in strip.places()]
    return b"".join([_honest(region, SIZES[region])[at : at + run] for run, region, at in places])


def _asked(said: bytes) -> FromReader | None:
    size = int.from_bytes(said[:4], "big")
    if len(said) < 4 or len(said) != 4 + size:
        return None
    try:
        return codec.decode(said[4:], codec.FROM_READER)
    except ProtocolError:
        return None


def _serve(
    lane: Lane,
    connection: BlockingConnection,
    owner: SharedOwner,
    theirs: socket.socket,
    held: frozenset[int] | None,
    memory: ChunkMemory,
) -> bool:
    """Let the lane answer one question, and check the answer. `held`: None once it is fenced.
    False: it is over.
    """
    is_selected = SELECTED.selection_id in owner.selections(REGISTRATION)
    try:
        read = _next_read(lane, connection)
        if read is None:
            return False
        if isinstance(read, DoneReading):  # is not answered
            return True
        # so that some chunks go with their digest behind
        first_send_bytes = 8 if read.request % 2 else FIRST_SEND_BYTES
        with (
            patch.object(read_server, "FIRST_SEND_BYTES", first_send_bytes),
            patch.object(tcp_owner, "FIRST_SEND_BYTES", first_send_bytes),
        ):
            ReadServer(lane, connection, owner, owner.sides, 0.0).answer(read)
        if isinstance(read, TransportRequest):
            with BlockingConnection(theirs.dup(), stall_timeout_s=STALL_S) as hears:
                _check_answer(
                    read, hears.receive(codec.FROM_OWNER), lane, owner, memory, held is not None
                )
            return True
    except (ProtocolError, ConnectionLost):
        return False
    if isinstance(read, Select):
        with BlockingConnection(theirs.dup(), stall_timeout_s=STALL_S) as hears:
            told = hears.receive(codec.FROM_OWNER)
        assert isinstance(told, Selected | ReadRefused)
        if isinstance(told, Selected) and told.following == read.total:
            assert held is not None
            assert read.selection in owner.selections(REGISTRATION)
        return True
    # Of a longer run nothing is expected: where it is not refused, the read itself is, and its runs
    # are not looked at.
    wanted = [
        chunk
        for first, count in read.runs
        for chunk in range(first, first + min(count, CHUNKS_PER_ACCESS_MAX))
    ]
    right = (read.registration, read.generation, read.content_id)
    chunk_of = _selected_chunk if read.selection else _chunk
    count, of = (len(OF), OF) if read.selection else (CHUNKS, [(chunk,) for chunk in range(CHUNKS)])
    is_away = isinstance(read, Locate) and not (lane.is_local and read.transport in NAMES[:3])
    expected: list[int] = []
    last: type | None = ReadRefused
    if isinstance(read, Locate) and read.transport not in NAMES:
        last = NotThisWay
    elif (
        held is not None
        and right == (REGISTRATION, GENERATION, CONTENT)
        and max(wanted, default=count) < count
        and not is_away
        and (not read.selection or (is_selected and read.selection == SELECTED.selection_id))
    ):
        expected = [chunk for chunk in wanted if held.issuperset(of[chunk])]
        last = None if len(expected) == len(wanted) else StillWaiting
    got: list[int] = []
    with BlockingConnection(theirs.dup(), stall_timeout_s=STALL_S) as hears:
        while len(got) < len(expected) or last is not None:
            message = hears.receive(codec.FROM_OWNER)
            assert message is not None
            assert message.request == read.request
            if isinstance(message, ChunksLie):
                assert isinstance(read, Locate)
                for chunk, digest, address in message.chunks:
                    assert digest == xxhash.xxh3_64_intdigest(chunk_of(chunk))
                    assert address == (0 if read.selection else memory.address(chunk))
                    got.append(chunk)
                continue
            if isinstance(message, ChunkFollows):
                assert isinstance(read, Read)
                payload = bytearray(len(chunk_of(message.chunk)))
                hears.receive_into([memoryview(payload)])
                assert payload == chunk_of(message.chunk)
                assert hears.receive(codec.FROM_OWNER) == ChunkDigest(
                    read.request, xxhash.xxh3_64_intdigest(chunk_of(message.chunk))
                )
                got.append(message.chunk)
                continue
            if not isinstance(message, ChunksFollow):
                assert type(message) is last
                break
            assert isinstance(read, Read)
            for chunk, digest in message.chunks:
                payload = bytearray(len(chunk_of(chunk)))
                hears.receive_into([memoryview(payload)])
                assert payload == chunk_of(chunk)
                assert digest == xxhash.xxh3_64_intdigest(chunk_of(chunk))
                got.append(chunk)
    assert sorted(got) == sorted(expected)
    return True


def _check_answer(
    asked: TransportRequest,
    answer: FromOwner | None,
    lane: Lane,
    owner: SharedOwner,
    memory: ChunkMemory,
    is_held: bool,
) -> None:
    """What an owner says in a transport's dialect: where its memory is to who may know it, and
    nothing else of it.
    """
    if asked.transport not in NAMES:
        assert isinstance(answer, NotThisWay)
        return
    dialect = DIALECTS[asked.transport]
    match dialect.message(asked):
        case rdma.FindPorts():
            assert answer == dialect.reply(asked.request, rdma.PortsAre(()))
        case rdma.Pair():
            assert isinstance(answer, NotThisWay)  # it has no ports
        case Find(registration, generation):
            if not is_held or (registration, generation) != (REGISTRATION, GENERATION):
                assert isinstance(answer, ReadRefused)
            elif asked.transport == "cma" and lane.is_local and owner.header is not None:
                assert answer == dialect.reply(asked.request, cma_messages.MemoryIs(*owner.header))
            else:  # none of it is in shared memory, or on a GPU
                assert isinstance(answer, NotThisWay)
        case FindRegions(registration, generation, first):
            if not lane.is_local or owner.header is None:
                assert isinstance(answer, NotThisWay)
            elif not is_held or (registration, generation) != (REGISTRATION, GENERATION):
                assert isinstance(answer, ReadRefused)
            else:
                assert answer == dialect.reply(asked.request, RegionsAre(memory.addresses[first:]))
        case said:
            raise AssertionError(f"nothing is staged, and {said} is heard")


@functools.cache
def _digest(index: int) -> int:
    return xxhash.xxh3_64_intdigest(_chunk(index))
