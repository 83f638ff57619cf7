"""Worker and coordinator in the test's own loop, under trio's mock clock: leases, beats and deadlines in no time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.abc
import pytest
import trio.testing

from tensorhub.errors import CoordinatorUnavailable, OperationTimeout, TensorHubError, VersionUnavailable
from tensorhub.layouts.pieces import Declaration
from tensorhub.memory.tensors import RegisteredMemory
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.runtime.control.store import MemoryStore, SqliteStore, Store
from tensorhub.runtime.ending import CLOSE_S, Parting
from tensorhub.runtime.worker import coordinator_client
from tensorhub.runtime.worker.handle import Handle
from tensorhub.runtime.worker.worker import Worker
from tensorhub.types import HandleState, Location, OpKind, Options
from tensorhub.worker.calls import FillCall
from tests.rig import nothing_left, tensors
from tests.runtime.data_rig import busy_threads
from tests.runtime.wires import Wire, WireListener

LEASE_S = 10.0
OPTIONS = Options(op_timeout_s=60, lease_s=LEASE_S, coordinator_wait_s=0)


def in_no_time(main: Callable[[], Awaitable[None]]) -> None:
    """Run a test in which time goes on only when everybody waits for it."""

    async def checked() -> None:
        async with nothing_left(10**6):
            await main()

    anyio.run(checked, backend="trio", backend_options={"clock": trio.testing.MockClock(autojump_threshold=0.03)})
    assert not busy_threads()


@dataclass
class Rig:
    """A coordinator that can be restarted, and wires to it."""

    tasks: anyio.abc.TaskGroup
    options: Options
    store: Store = field(default_factory=MemoryStore)
    wires: list[Wire] = field(default_factory=list)
    serving: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    listener: WireListener = field(default_factory=WireListener)

    async def serve(self) -> None:
        """Start a coordinator, on what the store has; every wire leads to it."""
        server = CoordinatorServer(options=self.options, secrets_accepted=(b"",), store=self.store)
        self.listener, self.serving, ready = WireListener(), anyio.CancelScope(), anyio.Event()

        async def run(scope: anyio.CancelScope, listener: WireListener) -> None:
            with scope:
                await server.run_on(listener, ready.set)

        self.tasks.start_soon(run, self.serving, self.listener)
        await ready.wait()
        for wire in self.wires:
            wire.lead_to(self.listener)

    def kill(self) -> None:
        """The coordinator's process is no more."""
        self.serving.cancel()
        for wire in self.wires:
            wire.break_off()

    async def worker(self, name: str) -> tuple[Worker, Wire]:
        wire = Wire(self.listener)
        self.wires.append(wire)
        worker, ready = self.new_worker(name, wire), anyio.Event()
        self.tasks.start_soon(worker.run, ready.set)
        await ready.wait()
        return worker, wire

    def new_worker(self, name: str, wire: Wire) -> Worker:
        address, here = ["tcp://127.0.0.1:1"], Location()
        return Worker(
            address, name=name, location=here, secrets_accepted=(b"",), transports=None, options=self.options, dial=wire.dial
        )


@contextlib.asynccontextmanager
async def rig(options: Options = OPTIONS, store: Store | None = None) -> AsyncIterator[Rig]:
    async with anyio.create_task_group() as tasks:
        made = Rig(tasks, options, store or MemoryStore())
        await made.serve()
        yield made
        for wire in made.wires:
            wire.heal()
        tasks.cancel_scope.cancel()


@contextlib.asynccontextmanager
async def joined(options: Options = OPTIONS) -> AsyncIterator[tuple[Worker, Wire, Worker]]:
    """A worker at the end of a way that can be cut, and one whose way stays open."""
    async with rig(options) as made:
        (far, way), (near, _) = await made.worker("far"), await made.worker("near")
        yield far, way, near
        way.heal()
        for worker in (far, near):
            await worker.close(Parting(CLOSE_S))


async def registered(worker: Worker, group: str | None = None, content: int | None = 1) -> Handle:
    memory = RegisteredMemory(tensors(content))
    described = worker.describe_memory(memory, Declaration())
    handle = await worker.register("m", memory, described, group=group, rank=0, world_size=1, spot=False, timeout_s=60)
    assert isinstance(handle, Handle)
    return handle


async def states(worker: Worker) -> list[str]:
    return [info.state for info in (await worker.coordinator.describe("m", 60))[0].workers]


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
            assert (await near.coordinator.describe("m", 60))[0].replicas == ()
            assert "offline" in repr(far)  # it has noticed by itself
            assert handle.member.state is HandleState.READY  # its memory is its own
            way.heal()
            await anyio.sleep(3 * LEASE_S)
            assert far.incarnation != life
            assert await near.version_watches.wait_for("m", 1, 60) == info
            assert [r.state for r in (await near.coordinator.describe("m", 60))[0].replicas] == ["ready"]
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


def test_every_call_ends_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_client, "RECONNECT_S_FIRST", 1.0)  # each wait costs the mock clock 0.03 s of ours

    async def main() -> None:
        async with joined(Options(lease_s=20)) as (far, way, near):
            handle = await registered(near, content=None)
            error, seconds = await timed(handle.fill(REPLICATE, 45))
            assert (type(error), error.memory) == (VersionUnavailable, "intact")
            assert 45 <= seconds < 46
            error, seconds = await timed(near.version_watches.wait_for("m", 1, 33))
            assert type(error) is OperationTimeout
            assert 33 <= seconds < 34
            lonely = await registered(far)
            way.cut()
            error, seconds = await timed(lonely.fill(REPLICATE, 45))
            assert (type(error), error.retryable, error.memory) == (CoordinatorUnavailable, True, "intact")
            assert 45 <= seconds < 50
            error, seconds = await timed(far.coordinator.describe("m", 20))
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
            await near.coordinator.check_number("m", 5, 60)
            assert (await handle.publish(5, 60)).version == 5

    in_no_time(main)


def test_a_coordinator_that_says_nothing_at_first() -> None:
    async def main() -> None:
        async with rig() as made:
            wire = Wire(made.listener)
            wire.cut()
            error, seconds = await timed(made.new_worker("late", wire).run(lambda: None))
            assert type(error) is CoordinatorUnavailable
            assert 10 <= seconds < 11

    in_no_time(main)


def test_a_coordinator_that_restarts_on_its_state_finds_everything_again(tmp_path: Path) -> None:
    async def main() -> None:
        store = SqliteStore(tmp_path)
        async with rig(store=store) as made:
            (trainer, _), (reader, _) = await made.worker("trainer"), await made.worker("reader")
            handle, other = await registered(trainer), await registered(reader, "g", None)
            info = await handle.publish(1, 60)
            made.kill()
            store.close()
            store = made.store = SqliteStore(tmp_path)
            await anyio.sleep(LEASE_S)
            await made.serve()
            report = await other.fill(REPLICATE, 60)
            assert (report.version, other.member.version, handle.member.version) == (1, 1, 1)
            assert await reader.version_watches.wait_for("m", 1, 60) == info
            for worker in (trainer, reader):
                await worker.close(Parting(CLOSE_S))
        store.close()

    in_no_time(main)


def test_a_call_outlives_many_resets_of_its_connection() -> None:
    async def main() -> None:
        async with joined() as (far, way, near):
            waiting = await registered(far, content=None)
            handle = await registered(near, "g")
            async with anyio.create_task_group() as tasks:

                async def fill() -> None:
                    assert (await waiting.fill(REPLICATE, 60)).version == 1

                tasks.start_soon(fill)
                for _ in range(5):
                    await anyio.sleep(LEASE_S / 5)
                    way.break_off()
                await handle.publish(1, 60)
            assert waiting.member.version == 1

    in_no_time(main)
