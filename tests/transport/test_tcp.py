"""What a channel over TCP tells of what has come: digests, seconds, and how fast its source is."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial

import pytest
import xxhash

from tensorhub import deltas
from tensorhub.memory.base import Base
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import ChunkDigest, ChunkFollows, ChunksFollow, DeltasFollow
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport import sockets
from tensorhub.transport.base import Arrival, Channel, Cutter, Destination, ReadRight
from tensorhub.transport.registry import Local
from tensorhub.transport.tcp import TcpTransport
from tensorhub.types import (
    ContentId,
    DeltaUse,
    Endpoint,
    Incarnation,
    LeaseId,
    Options,
    RegistrationId,
)
from tests.cuda.double import Double
from tests.runtime.data_rig import SECRET, WAIT_S, Nowhere, answers, manifest_of

SIZE, CHUNKS = 2**20, 3
MANIFEST = manifest_of((CHUNKS * SIZE,), chunk_bytes=SIZE)
BYTES = [bytes([chunk + 1]) * SIZE for chunk in range(CHUNKS)]
DIGESTS = {chunk: xxhash.xxh3_64_intdigest(each) for chunk, each in enumerate(BYTES)}
RIGHT = ReadRight(LeaseId("lease"), Incarnation("source"), RegistrationId("r"), 7, ContentId("new"))
Say = Callable[[BlockingConnection], object]


class Strided(Nowhere):
    """A destination of chunks that each lie in two pieces."""

    is_strided = True

    def __init__(self, *, is_digested: bool) -> None:
        super().__init__(*[SIZE] * CHUNKS)
        self.is_digested = is_digested
        self.arrays = [bytearray(SIZE) for _ in range(CHUNKS)]

    def incoming(self, chunk: int) -> Generator[list[memoryview]]:
        view = memoryview(self.arrays[chunk])
        yield [view[:1000], view[1000:5000]]
        yield [view[5000:]]


class OnGpu(Nowhere):
    """A destination in a GPU's memory."""

    def __init__(self) -> None:
        double = Double()
        super().__init__(*[SIZE] * CHUNKS, device=double)
        self.bytes = bytearray(MANIFEST.nbytes)
        self._there = double.bytes_of(self.bytes)

    def address(self, chunk: int) -> int:
        return self._there.address + chunk * SIZE


def whole() -> ChunkMemory:
    return ChunkMemory(MANIFEST, [memoryview(bytearray(MANIFEST.nbytes))])


def send_all(connection: BlockingConnection) -> None:
    connection.send_with_payload(
        ChunksFollow(0, tuple(DIGESTS.items())), [memoryview(each) for each in BYTES]
    )


def send_one(connection: BlockingConnection) -> None:
    """And its digest behind it."""
    connection.send_with_payload(ChunkFollows(0, 1), [memoryview(BYTES[1])])
    connection.send(ChunkDigest(0, DIGESTS[1]))


@contextlib.contextmanager
def reading_from(*says: Say) -> Iterator[Callable[[ReadRight, Destination], Channel]]:
    """Opens channels to a source that says this; all are of one transport."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(sockets.listen("127.0.0.1"))
        source = answers(listener, *says)
        stack.callback(source.join, WAIT_S)
        options = Options(stall_timeout_s=WAIT_S, connect_timeout_s=WAIT_S)
        way = TcpTransport(Local(Incarnation("reader"), (SECRET,), options))
        stack.callback(way.close)
        endpoint = Endpoint("any", sockets.address_of(listener))
        yield lambda right, there: way.open(endpoint, right, there, Cutter())


def receive(channel: Channel, bytes_max: int = MANIFEST.nbytes) -> Arrival:
    answer = channel.receive(bytes_max)
    assert isinstance(answer, Arrival)
    return answer


def read(channel: Channel) -> Arrival:
    """What comes first, of all chunks."""
    channel.submit(range(CHUNKS))
    return receive(channel)


def arrival_of(say: Say, there: Destination, right: ReadRight = RIGHT) -> Arrival:
    with reading_from(say) as opens, contextlib.closing(opens(right, there)) as channel:
        return read(channel)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes on whenever it is looked at, and only then: by so many seconds."""
    looks, ticks = itertools.count(), [2.0**-20]
    monkeypatch.setattr(time, "perf_counter", lambda: next(looks) * ticks[0])
    return ticks


def test_chunks_of_pieces_arrive_with_digests_if_they_are_to_be_compared() -> None:
    """They are made while the bytes are together: later that costs another look at all pieces."""
    there = Strided(is_digested=True)
    arrival = arrival_of(send_all, there)
    assert [bytes(each) for each in there.arrays] == BYTES
    assert arrival.made == DIGESTS == dict(arrival.chunks)
    there = Strided(is_digested=False)
    assert arrival_of(send_all, there).made == {}
    assert [bytes(each) for each in there.arrays] == BYTES


@pytest.mark.parametrize("make", [whole, partial(Strided, is_digested=True)])
def test_a_chunk_has_the_digest_that_follows_it(make: Callable[[], Destination]) -> None:
    assert arrival_of(send_one, make()).chunks == [(1, DIGESTS[1])]


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize(("say", "arrivals"), [(send_all, 2), (send_one, 1)])
@pytest.mark.parametrize("make", [whole, partial(Strided, is_digested=True)])
def test_each_second_of_a_read_is_told_once(
    make: Callable[[], Destination], say: Say, arrivals: int
) -> None:
    with reading_from(say) as opens, contextlib.closing(opens(RIGHT, make())) as channel:
        channel.submit(range(CHUNKS))
        for number in range(arrivals):
            began = time.perf_counter()
            told = receive(channel, MANIFEST.nbytes if number else 1)
            took_s = time.perf_counter() - began
            assert min(told.wait_s, told.transfer_s) > 0
            assert told.wait_s + told.transfer_s + told.digest_s < took_s


@pytest.mark.usefixtures("ticks")
def test_applying_deltas_is_a_part_of_the_seconds_of_their_read() -> None:
    pytest.importorskip("zstandard", reason="the extra delta is not installed")
    there = whole()
    base = Base(there, ContentId("old"), [0] * CHUNKS, bytearray([1]) * CHUNKS)
    old, new = bytes(SIZE), bytes(8) + b"x" + bytes(SIZE - 9)
    made = deltas.encode(memoryview(old), memoryview(new), 1) or b""
    right = replace(RIGHT, base=base, full_rate=0.0)

    def say(connection: BlockingConnection) -> None:
        connection.send_with_payload(DeltasFollow(0, ((0, 1, (len(made),)),)), [memoryview(made)])

    began = time.perf_counter()
    told = arrival_of(say, there, right)
    took_s = time.perf_counter() - began
    assert told.use is DeltaUse.USED
    assert bytes(there.buffer(0)) == new
    assert 0 < told.codec_s < told.transfer_s
    assert told.wait_s + told.transfer_s < took_s


@pytest.mark.parametrize("make", [whole, OnGpu])
@pytest.mark.parametrize(
    ("tick_s", "thought", "use"),
    [(2.0**-20, 0.0, DeltaUse.FAST_LINK), (1.0, math.inf, DeltaUse.NONE_SENT)],
    ids=["fast", "slow"],
)
def test_a_channel_knows_from_others_how_fast_its_source_is(
    make: Callable[[], Destination],
    tick_s: float,
    thought: float,
    use: DeltaUse,
    ticks: list[float],
) -> None:
    """Over another connection, or before: it asks for deltas where whole chunks came slowly."""
    ticks[0] = tick_s
    there, old = make(), whole()
    base = Base(old, ContentId("old"), [0] * CHUNKS, bytearray([1]) * CHUNKS)
    right = replace(RIGHT, base=base, full_rate=thought)
    with reading_from(send_all, lambda done: None, send_all) as opens:
        with contextlib.closing(opens(RIGHT, there)) as channel:
            assert read(channel).use is DeltaUse.UNDECIDED
        with contextlib.closing(opens(right, old)) as channel:
            assert read(channel).use is use
