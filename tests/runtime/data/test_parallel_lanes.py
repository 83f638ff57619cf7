"""A source in another site is read by several connections at once: equal bytes, what is kept of them, and which give way."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest

from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.runtime.data import source_lane
from tensorhub.runtime.data.lanes import PullRunner
from tensorhub.runtime.data.served_lanes import ServedLanes
from tensorhub.runtime.data.source_lane import SourceFailed
from tensorhub.transport.base import Arrival, Lacking
from tensorhub.transport.owner import Lane
from tensorhub.transport.tcp.reader import TcpChannel, TcpTransport
from tensorhub.types import READ_ONLY, Incarnation
from tests.runtime.data_rig import CHUNK_BYTES, WAIT_S, Node, finish, manifest_of, next_event, serving, until

pytestmark = pytest.mark.anyio
CHUNKS = 64
TOTAL = CHUNKS * CHUNK_BYTES
MANIFEST = manifest_of((TOTAL,))
CONNECTIONS = 4


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def nodes(readers_max: int = 64) -> tuple[Node, Node]:
    """A source that has nothing yet, and a reader."""
    a = Node("a", MANIFEST, filled=True, patience_s=WAIT_S, readers_max=readers_max).open(complete=False)
    return a, Node("b", MANIFEST, filled=False).open(complete=False)


@asynccontextmanager
async def reading(a: Node, b: Node, lease: str = "") -> AsyncIterator[PullRunner]:
    """Reads all of it; at the end of the block it is there."""
    async with b.runner(connections=CONNECTIONS, batch_bytes=TOTAL) as runner, anyio.create_task_group() as tasks:
        runner.add_source(a.grant(lease))
        tasks.start_soon(finish, runner)  # the loop starts threads that help
        yield runner


async def served(a: Node, count: int) -> None:
    """So many connections wait for what the source lacks."""
    await until(lambda: sum(bool(lane.lease) for lane in a.owner._lanes) == count)


def leases(a: Node) -> Counter[str]:
    """How many connections have asked for something under each."""
    return Counter(lane.lease for lane in list(a.owner._lanes) if lane.lease)


async def test_all_connections_are_used_and_kept_for_the_next_read() -> None:
    a, b = nodes()
    async with serving(a, b):
        async with reading(a, b) as runner:
            await until(lambda: leases(a) == {"from-a": CONNECTIONS})
            a.make_available(*range(CHUNKS))
        report = runner.report()
        assert b.arrays == a.arrays
        assert (report.bytes_read, report.reread_bytes, report.retries) == (TOTAL, 0, 0)
        assert [(source.transport, source.outcome) for source in report.sources] == [("tcp", "used")]
        (way,) = b.ways
        assert isinstance(way, TcpTransport)
        assert repr(way._peers) == f"<Peers, {CONNECTIONS} kept>"


async def test_what_has_come_already_is_not_left_for_a_further_source() -> None:
    a, b = nodes()
    async with serving(a, b), b.runner() as runner:
        runner.add_source(a.grant("first"))
        a.make_available(*range(CHUNKS - 4))
        await until(lambda: runner.report().chunks_verified == CHUNKS - 4)
        runner.add_source(a.grant("second"))
        await until(lambda: len(b.left) == 2)
    assert b.left == [TOTAL, 4 * CHUNK_BYTES]


async def test_threads_that_wait_for_a_network_help_on_without_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_lane, "CORE_SHARE_AFTER_S", 0.0)
    monkeypatch.setattr(source_lane, "CORE_SHARE_MIN", float("inf"))
    a, b = nodes()
    async with serving(a, b), reading(a, b) as runner:
        await until(lambda: leases(a) == {"from-a": CONNECTIONS})
        a.make_available(*range(CHUNKS - CONNECTIONS))
        await until(lambda: runner.report().chunks_verified == CHUNKS - CONNECTIONS)
        (lane,) = runner._lanes.values()
        assert lane.threads == CONNECTIONS
        a.make_available(*range(CHUNKS - CONNECTIONS, CHUNKS))
    assert b.arrays == a.arrays


async def test_what_came_in_vain_by_a_connection_that_broke_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    receive, told = TcpChannel.receive, [7]

    def receive_with_more(self: TcpChannel, bytes_max: int) -> Arrival | Lacking:
        answer = receive(self, bytes_max)
        return answer._replace(discarded_bytes=told.pop()) if isinstance(answer, Arrival) and told else answer

    monkeypatch.setattr(TcpChannel, "receive", receive_with_more)
    a, b = nodes()
    a.make_available(*range(CHUNKS))
    async with serving(a, b), b.runner() as runner:
        runner.add_source(a.grant())
        await finish(runner)
        report = runner.report()
    assert report.bytes_read == TOTAL + 7


async def test_others_bring_what_a_connection_that_broke_was_asked_for() -> None:
    a, b = nodes()
    async with serving(a, b):
        async with reading(a, b) as runner:
            await until(lambda: leases(a) == {"from-a": CONNECTIONS})
            for lane in list(a.owner._lanes)[1:]:
                a.owner.stop(lane)
            await until(lambda: leases(a) == {"from-a": 1})
            a.make_available(*range(CHUNKS))
        report = runner.report()
    assert b.arrays == a.arrays
    assert (report.bytes_read, report.reread_bytes, report.retries) == (TOTAL, 0, 0)
    assert [source.outcome for source in report.sources] == ["used"]


async def test_a_source_that_ends_all_connections_is_lost() -> None:
    a, b = nodes()
    async with serving(a, b), b.runner(connections=CONNECTIONS, batch_bytes=TOTAL) as runner:
        runner.add_source(a.grant())
        with anyio.fail_after(WAIT_S):
            async with anyio.create_task_group() as tasks:

                async def fail() -> None:
                    failed = await next_event(runner)
                    assert isinstance(failed, SourceFailed)
                    assert failed.reason == "lost"

                tasks.start_soon(fail)
                await until(lambda: leases(a) == {"from-a": CONNECTIONS})
                for lane in list(a.owner._lanes):
                    a.owner.stop(lane)


@pytest.mark.parametrize("connections", [1, CONNECTIONS])
@pytest.mark.parametrize("how", ["refused", "lost", "not a frame"])
async def test_a_pull_whose_source_has_failed_is_held_by_nobody(connections: int, how: str) -> None:
    """Else its destination would stay until cycles are collected, though its caller has let it go."""
    a, b = nodes()

    async def read() -> weakref.ref[PullRunner]:
        async with b.runner(connections=connections, batch_bytes=TOTAL) as runner:
            runner.add_source(a.grant(generation=8 if how == "refused" else 7))
            if how != "refused":
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(next_event, runner)
                    await until(lambda: leases(a) == {"from-a": connections})
                    for lane in list(a.owner._lanes):
                        assert isinstance(lane.connection, BlockingConnection)
                        if how == "not a frame":
                            lane.connection._socket.sendall(bytes(99))
                        a.owner.stop(lane)
            else:
                await next_event(runner)
            return weakref.ref(runner)

    async with serving(a, b):
        gc.disable()
        try:
            gone = await read()
            await until(lambda: gone() is None)
        finally:
            gc.enable()


async def test_a_source_with_few_places_is_read_by_as_many_as_it_gives() -> None:
    """One reader has half of them. It is refused no chunk for want of more."""
    a, b = nodes(readers_max=4)
    async with serving(a, b), reading(a, b):
        await until(lambda: leases(a) == {"from-a": 2} and repr(a.owner).endswith("2 lanes>"))
        a.make_available(*range(CHUNKS))
    assert b.arrays == a.arrays


async def test_further_connections_give_way_to_other_readers() -> None:
    a, b = nodes(readers_max=2 * CONNECTIONS)
    others = [Node(f"c{number}", MANIFEST, filled=False).open(complete=False) for number in range(6)]
    async with serving(a, b, *others), AsyncExitStack() as stack:
        await stack.enter_async_context(reading(a, b, "first"))
        await until(lambda: leases(a) == {"first": CONNECTIONS})
        for number, other in enumerate(others):
            runner = await stack.enter_async_context(other.runner())
            runner.add_source(a.grant(f"other-{number}"))
            left = min(CONNECTIONS, 2 * CONNECTIONS - number - 1)
            expected = {"first": left} | {f"other-{each}": 1 for each in range(number + 1)}
            await until(lambda expected=expected: leases(a) == expected)  # type: ignore[misc]
        a.make_available(*range(CHUNKS))
        # The block's end waits until the first one has everything.
    assert b.arrays == a.arrays


# ------------------------------------------------------------------------------------------------------ who gives way


class Ends:
    def shutdown(self) -> None:
        """A connection that nobody serves."""


def lanes_of(*served: tuple[str, str]) -> tuple[ServedLanes, list[Lane]]:
    """Connections of these (reader, lease), each being answered."""
    made = []
    places = ServedLanes(threading.Condition())
    for reader, lease in served:
        lane = Lane(Ends())
        lane.reader, lane.lease = Incarnation(reader), lease
        places.add(lane)
        made.append(lane)
    return places, made


def ask(places: ServedLanes, reader: str, readers_max: int, of_one_max: int) -> bool:
    """Whether there is a place for another connection of that reader."""
    lane = Lane(Ends())
    places.add(lane)
    with places._changed:
        return not places.admit(lane, Incarnation(reader), readers_max, of_one_max)


def test_the_read_with_most_connections_gives_one_up() -> None:
    places, made = lanes_of(("a", "1"), ("b", "2"), ("b", "2"), ("c", "3"), ("c", "3"), ("c", "3"))
    assert ask(places, "d", 6, 6)
    assert [lane.lease for lane in made if lane.is_stopped] == ["3"]


def test_nobody_gives_up_a_connection_for_somebody_who_has_as_many() -> None:
    places, made = lanes_of(("a", "1"), ("b", "2"), ("b", "2"))
    assert not ask(places, "a", 3, 3)  # a second one, for which b would have one
    assert ask(places, "c", 3, 3)
    assert not ask(places, "d", 3, 3)  # each has one now
    assert sum(lane.is_stopped for lane in made) == 1


@pytest.mark.parametrize("leases", [("1", "2", "3"), ("", "", "")])
def test_connections_of_different_reads_are_no_further_ones(leases: tuple[str, str, str]) -> None:
    """Those that have asked for nothing yet may be of different ones."""
    places, made = lanes_of(*[("a", lease) for lease in leases])
    assert not ask(places, "b", 3, 3)
    assert not any(lane.is_stopped for lane in made)


def test_a_further_connection_is_of_the_same_read() -> None:
    """It is neither another one of the same reader, nor another reader's, which may say that its lease has that name."""
    read, others = ("a", "its"), [*range(40)]
    places, made = lanes_of(read, read, *[("a", f"{each}") for each in others], *[(f"{each}", "its") for each in others])
    assert ask(places, "b", len(made), len(made))
    assert [(lane.reader, lane.lease) for lane in made if lane.is_stopped] == [read]


@pytest.mark.parametrize(("read_only", "gets"), [(1, True), (2, False), (3, False)])
def test_read_only_readers_that_have_half_of_all_end_no_workers_connection(read_only: int, gets: bool) -> None:
    """Each may call itself another reader, so they could leave every worker with one."""
    places, made = lanes_of(*[("a", "1")] * (4 - read_only), *[(f"{READ_ONLY}{each}", "2") for each in range(read_only)])
    assert ask(places, f"{READ_ONLY}new", 4, 4) == gets
    assert [lane.reader for lane in made if lane.is_stopped] == ["a"] * gets


def test_read_only_readers_that_have_half_of_all_give_way_to_one_another() -> None:
    places, made = lanes_of(("a", "1"), ("a", "1"), (f"{READ_ONLY}b", "2"), (f"{READ_ONLY}b", "2"))
    assert ask(places, f"{READ_ONLY}new", 4, 4)
    assert [lane.lease for lane in made if lane.is_stopped] == ["2"]


def test_a_readers_own_reads_share_its_places() -> None:
    places, made = lanes_of(("a", "1"), ("a", "1"), ("b", "2"), ("b", "2"))
    assert ask(places, "a", 8, 2)
    assert [lane.lease for lane in made if lane.is_stopped] == ["1"]
    assert not ask(places, "a", 8, 2)
