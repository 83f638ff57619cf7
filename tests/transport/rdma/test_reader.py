"""Reading by RDMA as a conversation: over a fabric that copies within this process (see tests/rdma
for the real one).
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from tensorhub.errors import StateError
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import ChunksLie, Locate, NotThisWay, ReadRefused, TransportReply
from tensorhub.model.manifest import TensorDescription, build_manifest
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.certificates import Certificates
from tensorhub.protocol.codec import FROM_OWNER
from tensorhub.runtime.data import acceptor
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.testing.conformance import CHECKS, Target, content
from tensorhub.testing.serving import ServedSource
from tensorhub.testing.strided_target import SIZES
from tensorhub.transport import read_server, sockets, staging
from tensorhub.transport.base import Cutter, NotShared, ReadFailure, ReadRight, Unusable
from tensorhub.transport.peers import Peers
from tensorhub.transport.rdma import reader as rdma_reader
from tensorhub.transport.rdma.messages import (
    DIALECT,
    ChunksPinned,
    FindPorts,
    Pair,
    Paired,
    PieceStaged,
    PieceTaken,
    PortsAre,
    QueueCard,
    RdmaPort,
)
from tensorhub.transport.rdma.owner import RdmaOwner
from tensorhub.transport.rdma.ports import Port, said_of
from tensorhub.transport.rdma.reader import RdmaTransport
from tensorhub.types import ContentId, Endpoint, Incarnation, LeaseId, RegistrationId
from tests.certificates import usual
from tests.cuda.double import Double
from tests.runtime.data_rig import SECRET, answers, busy_threads
from tests.transport import fabric as fabric_module
from tests.transport.fabric import GID, PORT, FakeFabric, OwnRdma, open_queues
from tests.transport.patience import QuietSource, local, note_readers

LARGEST = max(range(len(SIZES)), key=lambda chunk: SIZES[chunk])
RIGHT = ReadRight(LeaseId("l"), Incarnation("source"), RegistrationId("r"), 5, ContentId("c"))


def fabric_of(source: ServedSource) -> FakeFabric:
    assert isinstance(source.side, RdmaOwner)
    assert isinstance(source.side.fabric, FakeFabric)
    return source.side.fabric


@pytest.fixture
def fabric() -> Iterator[FakeFabric]:
    made = FakeFabric()
    yield made
    made.close()


@pytest.fixture
def transport(fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch) -> Iterator[RdmaTransport]:
    note_readers(monkeypatch)
    made = RdmaTransport(replace(local(), kept={"rdma": fabric}))
    yield made
    made.close()
    assert open_queues() == 0
    assert not busy_threads()


@pytest.mark.parametrize("check", CHECKS)
def test_the_conversation_keeps_the_rule(transport: RdmaTransport, check: str) -> None:
    CHECKS[check](transport, lambda: QuietSource(SECRET, side=OwnRdma(FakeFabric())))


@pytest.mark.parametrize("check", CHECKS)
def test_the_conversation_over_tls_keeps_the_rule(
    fabric: FakeFabric, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_readers(monkeypatch)
    certificates = Certificates(usual())
    of = replace(local(), kept={"rdma": fabric}, certificates=certificates)
    with closing(RdmaTransport(of)) as transport:
        CHECKS[check](
            transport,
            lambda: QuietSource(SECRET, side=OwnRdma(FakeFabric()), certificates=certificates),
        )


@pytest.fixture
def source() -> Iterator[ServedSource]:
    made = ServedSource(SECRET, side=OwnRdma(FakeFabric()))
    for chunk in range(len(SIZES)):
        made.fill(chunk, content(chunk))
    yield made
    made.close()


def receive_all(channel: Any) -> None:
    named = 0
    while named < len(SIZES):
        named += len(channel.receive(2**20).chunks)


def read_all(transport: RdmaTransport, source: ServedSource, target: Target | None = None) -> Any:
    target = target or Target()
    channel = transport.open(source.endpoint, source.right, target, Cutter())
    channel.submit(range(len(SIZES)))
    receive_all(channel)
    assert [target.holds(chunk) for chunk in range(len(SIZES))] == [
        content(chunk) for chunk in range(len(SIZES))
    ]
    target.check_edges()
    channel.close()
    return channel


def test_a_link_is_used_again(transport: RdmaTransport, source: ServedSource) -> None:
    link = read_all(transport, source)._link
    assert read_all(transport, source)._link is link
    assert "1 kept" in repr(transport)


def test_whose_token_is_revoked_is_cut_off_though_he_asks_for_nothing(
    transport: RdmaTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """He could read by himself what is registered, also later versions."""
    monkeypatch.setattr(acceptor, "REVOKED_S", 0.01)
    with closing(ServedSource(SECRET, side=OwnRdma(FakeFabric()))) as source:
        for chunk in range(len(SIZES)):
            source.fill(chunk, content(chunk))
        read_all(transport, source)
        (lane,) = source.owner._lanes
        assert isinstance(source._settings.secrets, list)
        source._settings.secrets[:] = [b"another"]
        with source.owner._changed:
            assert source.owner._changed.wait_for(lambda: lane not in source.owner._lanes, 30)
        connection = transport._peers._kept[0].connection
        assert select.select([connection.descriptor], [], [], 30)[0]  # it is closed right after
        assert not connection.is_quiet
        transport.close()
    assert open_queues() == 0


# --------------------------------------------------------------------------------------------------
# GPUs


def gpu(*, is_reached: bool) -> Double:
    made = Double()
    made.unreachable = "" if is_reached else "there is no peer memory"
    return made


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(staging, "PIECE_BYTES", 1000)
    monkeypatch.setattr(rdma_reader, "PIECE_BYTES_MIN", 1000)
    return 1000


@pytest.mark.heavy
@pytest.mark.parametrize("is_reached", [True, False])
@pytest.mark.parametrize("check", CHECKS)
def test_between_gpus_the_conversation_keeps_the_rule(
    transport: RdmaTransport, check: str, is_reached: bool, small_pieces: int
) -> None:
    """Whether the device reads their memory, or they copy what it reads through the host."""
    device = gpu(is_reached=is_reached)
    CHECKS[check](transport, lambda: QuietSource(SECRET, side=OwnRdma(FakeFabric()), device=device))
    if is_reached and not check.startswith("strided"):
        assert device.pinned_bytes == 0
    if not is_reached:
        assert device.settled == 0


@pytest.mark.parametrize("there", [None, True, False])
@pytest.mark.parametrize("here", [None, True, False])
def test_every_way_between_host_and_gpu(
    transport: RdmaTransport, here: bool | None, there: bool | None, small_pieces: int
) -> None:
    """`here`, `there`: a GPU that the device reaches, or does not; None: host memory."""
    mine, theirs = (None if each is None else gpu(is_reached=each) for each in (here, there))
    with closing(ServedSource(SECRET, side=OwnRdma(FakeFabric()), device=theirs)) as source:
        for chunk in range(len(SIZES)):
            source.fill(chunk, content(chunk))
        for _ in range(2):  # the second one by what is kept
            read_all(transport, source, Target(mine))
        assert "1 kept" in repr(transport)
    # what the device has written is there for the GPU, too
    assert mine is None or (mine.settled > 0) is here
    for device, is_reached in ((mine, here), (theirs, there)):
        assert device is None or device.pinned_bytes == (0 if is_reached else 4 * small_pieces)


def test_a_gpu_without_pinned_memory_is_read_in_another_way(
    transport: RdmaTransport, monkeypatch: pytest.MonkeyPatch, small_pieces: int
) -> None:
    def none(self: Double, nbytes: int) -> memoryview:
        raise StateError("out of memory")

    device = gpu(is_reached=False)
    with closing(ServedSource(SECRET, side=OwnRdma(FakeFabric()), device=device)) as source:
        monkeypatch.setattr(Double, "pinned", none)
        with pytest.raises(Unusable, match="at the source: out of memory"):
            transport.open(source.endpoint, source.right, Target(), Cutter())
    with (
        closing(ServedSource(SECRET, side=OwnRdma(FakeFabric()))) as source,
        pytest.raises(Unusable, match="the memory to read into: out of memory"),
    ):
        transport.open(source.endpoint, source.right, Target(gpu(is_reached=False)), Cutter())


def test_another_process_than_the_one_that_was_asked_is_found_out(
    transport: RdmaTransport, source: ServedSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = source.owner.header
    assert header is not None
    monkeypatch.setattr(SharedOwner, "header", header._replace(nonce=bytes(16)))
    with pytest.raises(Unusable, match="another process is reached over RDMA"):
        read_all(transport, source)


def test_memory_that_cannot_be_registered(
    transport: RdmaTransport, source: ServedSource, fabric: FakeFabric
) -> None:
    theirs = fabric_of(source)
    theirs.only.fault = OSError(14, "it is a file's mapping")
    with pytest.raises(NotShared, match="at the source: it is a file's mapping"):
        read_all(transport, source)
    theirs.only.fault = OSError(12, "RLIMIT_MEMLOCK is too small")
    with pytest.raises(Unusable, match="at the source: RLIMIT_MEMLOCK is too small") as caught:
        read_all(transport, source)
    assert not isinstance(caught.value, NotShared)  # it is warned of
    theirs.only.fault = None
    fabric.only.fault = OSError(12, "RLIMIT_MEMLOCK is too small")
    with pytest.raises(Unusable, match="the memory to read into: RLIMIT_MEMLOCK is too small"):
        read_all(transport, source)
    fabric.only.fault = None
    channel = transport.open(source.endpoint, source.right, Target(), Cutter())
    theirs.only.fault = OSError(12, "no room")  # once it is asked for
    channel.submit([0])
    with pytest.raises(ReadFailure, match="refused: no room"):
        channel.receive(1)
    channel.close()


# --------------------------------------------------------------------------------------------------
# sources that lie

CARD = QueueCard(5, 7, GID, 0, 5, 16)
PORTS = PortsAre(said_of([PORT]))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    made = sockets.listen("127.0.0.1")
    made.setblocking(True)
    yield made
    made.close()


def says(message: object) -> Callable[[BlockingConnection], object]:
    """Words of the dialect are, like any other's, about the request that was made last, which is
    0.
    """
    said: Any = DIALECT.reply(0, message) if type(message) in DIALECT.numbers else message
    return lambda connection: connection.send(said)


def elsewhere(port: Port) -> PortsAre:
    return PortsAre(said_of([port]))


LIES: dict[str, tuple[list[Any], type[Exception], str]] = {
    "no ports": ([says(PortsAre(()))], Unusable, "not to be read by RDMA"),
    "ports of nonsense": (
        [says(PortsAre((RdmaPort("ethernet", b"", 1.0),)))],
        Unusable,
        "no RDMA port here",
    ),
    "another network": (
        [says(elsewhere(Port("ib0", 1, "infiniband", 0, GID, 1.0, "ACTIVE")))],
        Unusable,
        "no RDMA port here",
    ),
    "something else": (
        [says(ChunksLie(0, ((0, 0, 0),), 0))],
        ReadFailure,
        "a ChunksLie is no message of rdma",
    ),
    "no queue pair": (
        [says(PORTS), says(NotThisWay(0, "not today", is_usual=False))],
        Unusable,
        "not today",
    ),
    "a file": (
        [says(PORTS), says(NotThisWay(0, "it is a file", is_usual=True))],
        NotShared,
        "it is a file",
    ),
    "a queue pair of nobody": (
        [says(PORTS), says(Paired(CARD, 4096, 1, bytes(16)))],
        Unusable,
        "cannot be read over RDMA from fake0:1:1 .* to 10.0.0.1: .*does not answer",
    ),
    "a short nonce": ([says(PORTS), says(Paired(CARD, 4096, 1, b""))], ReadFailure, "a nonce 16"),
    "a short GID": (
        [says(PORTS), says(Paired(replace(CARD, gid=b"short"), 4096, 1, bytes(16)))],
        ReadFailure,
        "a GID has 16 bytes",
    ),
    "chunks": (
        [says(PORTS), says(ChunksPinned(((0, 0, 0, 0),), 0, 0))],
        ReadFailure,
        "a Pair is answered with ChunksPinned",
    ),
    "the end": (
        [says(PORTS), lambda connection: connection.shutdown()],
        ReadFailure,
        "closed|gone",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_source_that_lies_is_left_and_nothing_stays(
    transport: RdmaTransport, listener: socket.socket, name: str
) -> None:
    said, kind, text = LIES[name]
    thread = answers(listener, *said)
    with pytest.raises(kind, match=text):
        transport.open(Endpoint("rdma", sockets.address_of(listener)), RIGHT, Target(), Cutter())
    transport.close()
    thread.join()


def test_what_a_source_says_of_its_memory_is_only_read_from(
    transport: RdmaTransport, source: ServedSource
) -> None:
    """Addresses and keys that are none give an error, and nothing is written."""
    target = Target()
    channel = transport.open(source.endpoint, source.right, target, Cutter())
    pairing_places = "tensorhub.transport.rdma.owner.RdmaSession._places"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairing_places, lambda self, memory, chunks: ((0, 0, 2**61, 77),))
        channel.submit([0])
        with pytest.raises(ReadFailure, match="not registered"):
            channel.receive(1)
    assert target.is_untouched(0)
    channel.close()


# --------------------------------------------------------------------------------------------------
# readers that lie


def locate(source: ServedSource, request: int, chunk: int) -> Locate:
    right = source.right
    return Locate(
        request,
        right.lease,
        right.registration,
        right.generation,
        right.content_id,
        ((chunk, 1),),
        "rdma",
    )


def asks(source: ServedSource, *messages: object, count: int = 0) -> list[object]:
    """What a source answers to a reader that says this, words of the dialect without what is around
    them; `count`: so many answers, if not one for each.
    """
    peers = Peers(local(), DIALECT)
    connection = peers.open(source.endpoint.address, source.right, Cutter()).connection
    answers: list[object] = []

    def hear() -> None:
        said = connection.receive(FROM_OWNER)
        answers.append(DIALECT.message(said) if isinstance(said, TransportReply) else said)

    with connection:
        for number, message in enumerate(messages, 1):
            connection.send(
                message if isinstance(message, Locate) else DIALECT.request(number, message)
            )
            hear()
        while len(answers) < count:
            hear()
    return answers


def test_a_source_makes_one_queue_pair_for_each_reader_and_none_for_what_is_not_there(
    source: ServedSource,
) -> None:
    registration, generation = source.right.registration, source.right.generation
    other = QueueCard(6, 7, GID, 0, 5, 16)
    answers = asks(
        source,
        FindPorts(),
        Pair(registration, generation, 9, CARD),
        Pair(registration, generation + 1, 0, CARD),
        Pair(registration, generation, 0, CARD),
        Pair(registration, generation, 0, CARD),
        Pair(registration, generation, 0, other),
    )
    assert answers[0] == PortsAre(said_of([PORT]))
    assert [type(answer).__name__ for answer in answers[1:]] == [
        "NotThisWay",
        "ReadRefused",
        "Paired",
        "Paired",
        "Paired",
    ]
    fourth, fifth, sixth = answers[3:]
    assert isinstance(fourth, Paired)
    assert isinstance(fifth, Paired)
    assert isinstance(sixth, Paired)
    assert fourth.card == fifth.card
    # it breaks the protocol
    assert asks(source, Pair(registration, generation, 0, replace(CARD, gid=b"short"))) == [None]
    source.close()
    assert open_queues() == 0


def test_a_queue_pair_for_what_is_in_host_memory_reads_nothing_on_a_gpu(
    source: ServedSource,
) -> None:
    """Its addresses would be registered, were it asked for them by the same queue pair."""
    tensor = TensorDescription("t", "uint8", (8,), 1 << 40, 8)
    on_gpu = ChunkMemory(
        build_manifest([tensor], 4096, "xxh3-64"), [gpu(is_reached=False).allocate(8)]
    )
    other, right = RegistrationId("on a GPU"), source.right
    source.owner.open(other, 1, right.content_id, on_gpu, complete=True)
    locates = [
        Locate(number, right.lease, registration, 1, right.content_id, ((0, 1),), "rdma")
        for number, registration in ((2, right.registration), (3, other))
    ]
    answers = asks(source, Pair(right.registration, right.generation, 0, CARD), *locates)
    assert [type(answer).__name__ for answer in answers[:2]] == ["Paired", "ChunksPinned"]
    assert answers[2] == ReadRefused(
        3, "its tensors are on a GPU, and the queue pair was made to read others"
    )
    registered = fabric_of(source).only._memories
    assert [memory for memory, found in registered.items() if found._regions] == [source._memory]


@pytest.mark.parametrize("is_gpu", [True, False])
def test_what_can_be_registered_in_part_only_is_staged_or_left(
    transport: RdmaTransport, fabric: FakeFabric, monkeypatch: pytest.MonkeyPatch, is_gpu: bool
) -> None:
    """A first span could be, a later one not: one read fails, and the next one knows."""
    device = gpu(is_reached=True) if is_gpu else None
    target, real = Target(device), fabric_module.FakeRegistered._registered

    def some(self: Any, start: int, size: int) -> Any:
        if self._memory() is target and start != target.spans[0][0]:
            raise OSError(12, "there is no room for more")
        return real(self, start, size)

    monkeypatch.setattr(fabric_module.FakeRegistered, "_registered", some)
    with closing(ServedSource(SECRET, side=OwnRdma(FakeFabric()))) as source:
        for chunk in range(len(SIZES)):
            source.fill(chunk, content(chunk))
        channel = transport.open(source.endpoint, source.right, target, Cutter())
        channel.submit(range(len(SIZES)))
        with pytest.raises(
            ReadFailure, match="lost: the memory to read into: there is no room for more"
        ):
            receive_all(channel)
        channel.close()
        if not is_gpu:
            with pytest.raises(
                Unusable, match="the memory to read into: there is no room for more"
            ):
                transport.open(source.endpoint, source.right, target, Cutter())
            return
        read_all(transport, source, target)


def test_a_reader_that_takes_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, small_pieces: int
) -> None:
    """It neither has buffers overwritten, nor requests piled up, nor its source wait for ever."""
    device = gpu(is_reached=False)
    monkeypatch.setattr(read_server, "PENDING_MAX", 2)
    with closing(ServedSource(SECRET, side=OwnRdma(FakeFabric()), device=device)) as source:
        source.fill(LARGEST, content(LARGEST))
        pair = Pair(source.right.registration, 1, 0, CARD)
        assert asks(source, pair, PieceTaken())[1] is None  # none is staged
        more = [locate(source, number, LARGEST) for number in range(3, 7)]
        answers = asks(source, pair, locate(source, 2, LARGEST), *more, count=12)
        staged = [answer for answer in answers if isinstance(answer, PieceStaged)]
        assert len({piece.address for piece in staged}) == len(staged)
        assert answers[-1] is None
    assert open_queues() == 0
