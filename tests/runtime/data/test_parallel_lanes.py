"""A source in another site is read by several connections at once: equal bytes, what is kept of
them, and which give way.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from unittest.mock import create_autospec

import anyio
import pytest

from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.runtime.data.lanes import PullRunner
from tensorhub.runtime.data.served_lanes import ServedLanes
from tensorhub.runtime.data.source_lane import SourceFailed
from tensorhub.transport.owner import Lane
from tensorhub.transport.tcp import TcpTransport
from tensorhub.types import READ_ONLY, Incarnation
from tests.runtime.data_rig import (
    CHUNK_BYTES,
    WAIT_S,
    Node,
    finish,
    manifest_of,
    next_event,
    serving,
    until,
)

pytestmark = pytest.mark.anyio
CHUNKS = 64
TOTAL = CHUNKS * CHUNK_BYTES
MANIFEST = manifest_of((TOTAL,))
CONNECTIONS = 4


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def nodes(readers_max: int = 64) -> tuple[Node, Node]:
    """A source that has nothing yet, and a reader."""
    a = Node("a", MANIFEST, filled=True, patience_s=WAIT_S, readers_max=readers_max).open(
        complete=False
    )
    return a, Node("b", MANIFEST, filled=False).open(complete=False)


@asynccontextmanager
async def reading(a: Node, b: Node, lease: str = "") -> AsyncIterator[PullRunner]:
    """Reads all of it; at the end of the block it is there."""
    async with (
        b.runner(connections=CONNECTIONS, batch_bytes=TOTAL) as runner,
        anyio.create_task_group() as tasks,
    ):
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
        assert [(source.transport, source.outcome) for source in report.sources] == [
            ("tcp", "used")
        ]
        (way,) = b.ways
        assert isinstance(way, TcpTransport)
        assert repr(way._peers) == f"<Peers, {CONNECTIONS} kept>"


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


async def test_further_connections_give_way_to_other_readers() -> None:
    a, b = nodes(readers_max=2 * CONNECTIONS)
    others = [
        Node(f"c{number}", MANIFEST, filled=False).open(complete=False) for number in range(6)
    ]
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


# --------------------------------------------------------------------------------------------------
# who gives way


def lanes_of(*served: tuple[str, str]) -> tuple[ServedLanes, list[Lane]]:
    """Connections of these (reader, lease), each being answered."""
    made = []
    places = ServedLanes(threading.Condition())
    for reader, lease in served:
        lane = Lane(create_autospec(BlockingConnection))
        lane.reader, lane.lease = Incarnation(reader), lease
        places.add(lane)
        made.append(lane)
    return places, made


def ask(places: ServedLanes, reader: str, readers_max: int, of_one_max: int) -> bool:
    """Whether there is a place for another connection of that reader."""
    lane = Lane(create_autospec(BlockingConnection))
    places.add(lane)
    with places._changed:
        return not places.admit(lane, Incarnation(reader), readers_max, of_one_max)


def test_the_read_with_most_connections_gives_one_up() -> None:
    places, made = lanes_of(("a", "1"), ("b", "2"), ("b", "2"), ("c", "3"), ("c", "3"), ("c", "3"))
    assert ask(places, "d", 6, 6)
    assert [lane.lease for lane in made if lane.is_stopped] == ["3"]


@pytest.mark.parametrize(("read_only", "gets"), [(1, True), (2, False), (3, False)])
def test_read_only_readers_that_have_half_of_all_end_no_workers_connection(
    read_only: int, gets: bool
) -> None:
    """Each may call itself another reader, so they could leave every worker with one."""
    places, made = lanes_of(
        *[("a", "1")] * (4 - read_only), *[(f"{READ_ONLY}{each}", "2") for each in range(read_only)]
    )
    assert ask(places, f"{READ_ONLY}new", 4, 4) == gets
    assert [lane.reader for lane in made if lane.is_stopped] == ["a"] * gets


def test_read_only_readers_that_have_half_of_all_give_way_to_one_another() -> None:
    places, made = lanes_of(("a", "1"), ("a", "1"), (f"{READ_ONLY}b", "2"), (f"{READ_ONLY}b", "2"))
    assert ask(places, f"{READ_ONLY}new", 4, 4)
    assert [lane.lease for lane in made if lane.is_stopped] == ["2"]
