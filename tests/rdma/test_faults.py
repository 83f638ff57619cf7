"""What goes wrong between two workers that read by RDMA: each has its name, and the next read works
where it can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest

from tensorhub.testing.conformance import Target, content
from tensorhub.testing.serving import ServedSource
from tensorhub.testing.strided_target import SIZES
from tensorhub.transport.base import Arrival, Cutter, ReadFailure, Unusable
from tensorhub.transport.rdma import reader as rdma_reader
from tensorhub.transport.rdma.messages import QueueCard
from tensorhub.transport.rdma.ports import Move, usable_ports
from tensorhub.transport.rdma.queues import Fabric, ReaderQueue, _event_descriptors
from tensorhub.transport.rdma.reader import RdmaChannel, RdmaTransport
from tensorhub.transport.registry import Local
from tensorhub.types import Incarnation, Options
from tests.transport.fabric import OwnRdma

pytestmark = pytest.mark.rdma
SECRET = b"a secret of the test"
CHUNKS = range(len(SIZES))
SMALL = 5  # the first chunks, of 78 KB together


def transport_on(ports: str | None = None) -> RdmaTransport:
    options = Options(stall_timeout_s=5.0, connect_timeout_s=5.0, rdma_ports=ports)
    return RdmaTransport(Local(Incarnation("reader"), (SECRET,), options))


@pytest.fixture
def make_source() -> Iterator[Callable[..., ServedSource]]:
    made: list[ServedSource] = []

    def make(ports: str | None = None) -> ServedSource:
        made.append(ServedSource(SECRET, side=OwnRdma(Fabric(usable_ports(ports)))))
        for chunk in CHUNKS:
            made[-1].fill(chunk, content(chunk))
        return made[-1]

    yield make
    for source in made:
        source.close()


@pytest.fixture
def transport() -> Iterator[RdmaTransport]:
    made = transport_on()
    yield made
    made.close()
    made.fabric.close()


def opened(
    transport: RdmaTransport, source: ServedSource, target: Target | None = None
) -> RdmaChannel:
    channel = transport.open(source.endpoint, source.right, target or Target(), Cutter())
    assert isinstance(channel, RdmaChannel)
    return channel


def read_all(transport: RdmaTransport, source: ServedSource) -> RdmaChannel:
    target = Target()
    channel = opened(transport, source, target)
    channel.submit(CHUNKS)
    take(channel, len(SIZES))
    assert all(target.holds(chunk) == content(chunk) for chunk in CHUNKS)
    target.check_edges()
    channel.close()
    return channel


def take(channel: RdmaChannel, count: int) -> list[int]:
    named: list[int] = []
    while len(named) < count:
        answer = channel.receive(1)
        assert isinstance(answer, Arrival)
        named += [chunk for chunk, _ in answer.chunks]
    return named


def in_mid_read(
    transport: RdmaTransport, source: ServedSource, monkeypatch: pytest.MonkeyPatch
) -> tuple[RdmaChannel, Target]:
    """A channel that knows where all chunks lie, has read the first, and goes on one request at a
    time.
    """
    monkeypatch.setattr(rdma_reader, "GROUP_BYTES", 1)
    target = Target()
    channel = opened(transport, source, target)
    channel._reads._depth = 1
    channel.submit(range(SMALL))  # all are located by one answer, with which the first is read
    assert take(channel, 1) == [0]
    return channel, target


def failure(act: Callable[[], object]) -> ReadFailure:
    with pytest.raises(ReadFailure) as caught:
        act()
    return caught.value


def rest_of(channel: RdmaChannel) -> Callable[[], object]:
    return lambda: take(channel, SMALL - 1)


# --------------------------------------------------------------------------------------------------
# in mid-read


def test_a_region_that_is_deregistered_in_mid_read(
    transport: RdmaTransport,
    make_source: Callable[..., ServedSource],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = make_source()
    channel, _ = in_mid_read(transport, source, monkeypatch)
    source.side.release(source._memory)
    found = failure(rest_of(channel))
    assert found.reason == "refused"
    assert "not registered (any more)" in found.detail
    channel.close()
    read_all(transport, source)  # it is registered again, and another queue pair is made


def test_a_queue_pair_in_error_is_replaced(
    transport: RdmaTransport,
    make_source: Callable[..., ServedSource],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = make_source()
    channel, _ = in_mid_read(transport, source, monkeypatch)
    channel._link.queue.fail()
    found = failure(rest_of(channel))
    assert found.reason == "lost"
    assert "queue pair" in found.detail
    channel.close()
    assert read_all(transport, source)._link is not channel._link


def test_a_reader_that_is_cut_off_reads_nothing_more_though_it_hears_nothing(
    transport: RdmaTransport,
    make_source: Callable[..., ServedSource],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source takes its end of the queue pair away; what was registered, and where, the reader
    still knows.
    """
    source = make_source()
    channel, _ = in_mid_read(transport, source, monkeypatch)
    located, link = channel._located[-1], channel._link
    there = Move(link.words.address, link.words.key, located.there, located.key, 8)

    def status() -> int:
        link.queue.post([there], number := channel._reads._posted, frozenset([number]), frozenset())
        channel._reads._posted += 1
        while not (done := link.queue.poll()):
            link.queue.arm()
        return done[-1][1]

    assert status() == 0
    source.owner.cut(Incarnation("reader"))
    assert status() == 12
    channel.close()


# --------------------------------------------------------------------------------------------------
# links


def test_a_link_is_used_again_and_made_anew_when_its_source_has_ended_it(
    make_source: Callable[..., ServedSource],
) -> None:
    source, transport = make_source("rxe0"), transport_on("rxe0")
    before = len(_event_descriptors())
    first = read_all(transport, source)
    link, opened_by_one = first._link, len(_event_descriptors())
    assert all(read_all(transport, source)._link is link for _ in range(3))
    assert len(_event_descriptors()) == opened_by_one > before
    source.owner.cut(Incarnation("reader"))
    assert read_all(transport, source)._link is not link
    transport.close()
    # the devices' own are open until the worker ends
    assert len(_event_descriptors()) == opened_by_one - 1
    transport.fabric.close()


def test_what_was_registered_is_not_registered_again(
    transport: RdmaTransport, make_source: Callable[..., ServedSource]
) -> None:
    source, target = make_source(), Target()
    keys: list[list[int]] = []
    for _ in range(2):
        channel = opened(transport, source, target)
        channel.submit(CHUNKS)
        take(channel, len(SIZES))
        device = channel._link.queue.device
        keys.append([device.keys(target, *span).local for span in target.spans])
        channel.close()
    assert keys[0] == keys[1]
    assert len(set(keys[0])) == len(SIZES)
    assert len(device._memories) == 1
    del target, channel
    assert not device._memories  # deregistered with the last reference


# -------------------------------------------------------------------------------------------------
# ports and limits


def test_a_way_that_leads_nowhere_is_found_before_anything_is_asked_for(
    make_source: Callable[..., ServedSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a wrong GID, a filter, or an MTU that the network does not carry: both ends are set
    up, and nothing comes.
    """
    source, transport = make_source("rxe0"), transport_on("rxe0")
    connect = ReaderQueue.connect

    def astray(queue: ReaderQueue, theirs: QueueCard) -> None:
        connect(queue, dataclasses.replace(theirs, number=1))

    monkeypatch.setattr(ReaderQueue, "connect", astray)
    with pytest.raises(Unusable, match="does not answer over RDMA"):
        opened(transport, source)
    monkeypatch.undo()
    read_all(transport, source)
    transport.close()
    transport.fabric.close()


def test_nothing_is_left_when_all_is_closed(make_source: Callable[..., ServedSource]) -> None:
    before = _event_descriptors()
    source, transport = make_source(), transport_on()
    read_all(transport, source)
    source.die()
    transport.close()
    transport.fabric.close()
    assert _event_descriptors() == before
