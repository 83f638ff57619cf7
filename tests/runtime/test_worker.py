"""Worker and coordinator in the test's own loop, under trio's mock clock: leases, beats and deadlines in no time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import anyio
import anyio.abc
import pytest
import trio.testing

from tensorhub.errors import CoordinatorUnavailable, OperationTimeout, TensorHubError, VersionUnavailable
from tensorhub.runtime.handle import Handle
from tensorhub.runtime.server import CoordinatorServer
from tensorhub.runtime.store import MemoryStore
from tensorhub.runtime.worker import Worker
from tensorhub.transport.memory import RegisteredMemory
from tensorhub.types import HandleState, Location, OpKind, Options, parse_address
from tensorhub.worker.calls import FillCall
from tests.rig import nothing_left, tensors
from tests.runtime.data_rig import busy_threads

LEASE_S = 10.0
OPTIONS = Options(op_timeout_s=60, lease_s=LEASE_S)


def in_no_time(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test in which time goes on only when everybody waits for it."""

    async def checked() -> None:
        async with nothing_left(10**6):
            await main()

    anyio.run(checked, backend="trio", backend_options={"clock": trio.testing.MockClock(autojump_threshold=0.03)})
    assert not busy_threads()


class Way:
    """Between a worker and its coordinator: passes bytes on, until it is cut; then nothing comes through, or back."""

    def __init__(self, server: CoordinatorServer) -> None:
        self._target = parse_address(server.address)
        self._open = anyio.Event()
        self._open.set()
        self.address = ""

    async def run(self, listening: anyio.Event) -> None:
        multi = await anyio.create_tcp_listener(local_host="127.0.0.1")
        async with multi:
            port = multi.extra(anyio.abc.SocketAttribute.local_port)
            self.address = f"tcp://127.0.0.1:{port}"
            listening.set()
            await multi.serve(self._serve)

    async def _serve(self, client: anyio.abc.ByteStream) -> None:
        async with client, await anyio.connect_tcp(*self._target) as server, anyio.create_task_group() as tasks:
            tasks.start_soon(self._pass_on, client, server, tasks.cancel_scope)
            tasks.start_soon(self._pass_on, server, client, tasks.cancel_scope)

    async def _pass_on(self, source: anyio.abc.ByteStream, sink: anyio.abc.ByteStream, scope: anyio.CancelScope) -> None:
        with contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            async for data in source:
                await self._open.wait()
                await sink.send(data)
        await self._open.wait()
        scope.cancel()

    def cut(self) -> None:
        self._open = anyio.Event()

    def heal(self) -> None:
        self._open.set()


@contextlib.asynccontextmanager
async def joined(options: Options = OPTIONS) -> AsyncIterator[tuple[Worker, Way, Worker]]:
    """A worker at the end of a way that can be cut, and one that is close to the coordinator."""
    server = CoordinatorServer(options=options, secrets_accepted=(b"",), store=MemoryStore())
    async with anyio.create_task_group() as tasks:
        listening, passing = anyio.Event(), anyio.Event()
        tasks.start_soon(server.run, "127.0.0.1", 0, listening.set)
        await listening.wait()
        way = Way(server)
        tasks.start_soon(way.run, passing)
        await passing.wait()
        workers = [await started(tasks, way.address, "far", options), await started(tasks, server.address, "near", options)]
        yield workers[0], way, workers[1]
        way.heal()
        for worker in workers:
            await worker.close()
        tasks.cancel_scope.cancel()


async def started(tasks: anyio.abc.TaskGroup, address: str, name: str, options: Options) -> Worker:
    worker = Worker([address], name=name, location=Location(), secret=b"", transports=None, options=options)
    ready = anyio.Event()
    tasks.start_soon(worker.run, ready.set)
    await ready.wait()
    return worker


async def registered(worker: Worker, group: str | None = None, content: int | None = 1) -> Handle:
    return await worker.register(
        "m", RegisteredMemory(tensors(content)), group=group, rank=0, world_size=1, spot=False, timeout_s=60
    )


async def states(worker: Worker) -> list[str]:
    return [info.state for info in (await worker.questions.describe("m", 60))[0].workers]


REPLICATE = FillCall(OpKind.REPLICATE, "latest")


def test_beats_keep_the_lease() -> None:
    async def main() -> None:
        async with joined() as (far, _, near):
            handle = await registered(far)
            await handle.publish(1, 60)
            life = far.incarnation
            await anyio.sleep(12 * LEASE_S)
            assert (far.incarnation, handle.member.state) == (life, HandleState.READY)
            assert await states(near) == ["live"]

    in_no_time(main)


def test_a_cut_way_costs_the_lease_and_healing_brings_the_version_back_under_a_new_life() -> None:
    async def main() -> None:
        async with joined() as (far, way, near):
            handle = await registered(far)
            info = await handle.publish(1, 60)
            life = far.incarnation
            way.cut()
            await anyio.sleep(0.8 * LEASE_S)
            assert await states(near) == ["suspect"]
            await anyio.sleep(LEASE_S)
            assert (await near.questions.describe("m", 60))[0].replicas == ()
            assert "offline" in repr(far)  # it has noticed by itself
            assert handle.member.state is HandleState.READY  # its memory is its own
            way.heal()
            await anyio.sleep(3 * LEASE_S)
            assert far.incarnation != life
            assert await near.news.wait_for("m", 1, 60) == info
            assert [r.state for r in (await near.questions.describe("m", 60))[0].replicas] == ["ready"]
            assert handle.member.version == 1

    in_no_time(main)


def test_a_short_cut_costs_nothing() -> None:
    async def main() -> None:
        async with joined() as (far, way, near):
            handle = await registered(far)
            await handle.publish(1, 60)
            life = far.incarnation
            way.cut()
            await anyio.sleep(0.6 * LEASE_S)
            way.heal()
            await anyio.sleep(2 * LEASE_S)
            assert (far.incarnation, await states(near)) == (life, ["live"])

    in_no_time(main)


def test_unpublish_without_a_coordinator_takes_a_lease_at_most() -> None:
    async def main() -> None:
        async with joined() as (far, way, _):
            handle = await registered(far)
            await handle.publish(1, 60)
            way.cut()
            before = anyio.current_time()
            await handle.unpublish(3600)
            assert anyio.current_time() - before <= 1.5 * LEASE_S
            assert handle.member.state is HandleState.EMPTY

    in_no_time(main)


async def timed(call: Awaitable[object]) -> tuple[TensorHubError, float]:
    before = anyio.current_time()
    with pytest.raises(TensorHubError) as caught:
        await call
    return caught.value, anyio.current_time() - before


def test_every_call_ends_at_its_deadline() -> None:
    async def main() -> None:
        async with joined() as (far, way, near):
            handle = await registered(near, content=None)
            error, seconds = await timed(handle.fill(REPLICATE, 45))
            assert (type(error), error.memory) == (VersionUnavailable, "intact")
            assert 45 <= seconds < 46
            error, seconds = await timed(near.news.wait_for("m", 1, 33))
            assert type(error) is OperationTimeout
            assert 33 <= seconds < 34
            lonely = await registered(far)
            way.cut()
            error, seconds = await timed(lonely.fill(REPLICATE, 45))
            assert (type(error), error.retryable, error.memory) == (CoordinatorUnavailable, True, "intact")
            assert 45 <= seconds < 50
            error, seconds = await timed(far.questions.describe("m", 20))
            assert type(error) is CoordinatorUnavailable
            assert 20 <= seconds < 21

    in_no_time(main)


def test_a_publish_whose_outcome_is_not_known_is_in_doubt_until_it_is() -> None:
    async def main() -> None:
        async with joined(Options(op_timeout_s=60, lease_s=600)) as (far, way, near):
            handle = await registered(far)
            way.cut()
            error, _ = await timed(handle.publish(1, 5))
            assert (error.memory, handle.member.state) == ("in_doubt", HandleState.IN_DOUBT)
            way.heal()
            with contextlib.suppress(TensorHubError):  # there is nothing to unpublish if it never happened
                await handle.unpublish(60)
            assert handle.member.state is HandleState.EMPTY
            await near.questions.check_number("m", 5, 60)
            assert (await handle.publish(5, 60)).version == 5

    in_no_time(main)


def test_a_coordinator_that_says_nothing_at_first() -> None:
    async def main() -> None:
        async with joined() as (_, way, _near):
            way.cut()
            late = Worker([way.address], name="late", location=Location(), secret=b"", transports=None, options=OPTIONS)
            error, seconds = await timed(late.run(lambda: None))
            assert type(error) is CoordinatorUnavailable
            assert 10 <= seconds < 11

    in_no_time(main)
