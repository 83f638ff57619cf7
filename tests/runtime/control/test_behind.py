"""A coordinator that has more to do than it comes to: it says so, and whoever makes it so hurts himself alone.

Covers `runtime.control.pulse`, `runtime.control.hearing` and `runtime.control.link` (who waits is told).
"""

from __future__ import annotations

import resource
import time
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from tensorhub.coordinator import Action, Coordinator, Event, Received
from tensorhub.coordinator.states import WorkerState
from tensorhub.messages import (
    Dismissed,
    Heartbeat,
    HeartbeatAck,
    Held,
    Join,
    ReaderCut,
    Register,
    Registered,
    Welcome,
)
from tensorhub.protocol import codec
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.frames import READ_BYTES_MAX
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control import link, pulse
from tensorhub.runtime.control.hearing import MESSAGES_PER_TURN, TURNS_S
from tensorhub.runtime.control.pulse import Pulse
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.types import Location, Medium, Options, Purpose, parse_address
from tests.rig import WAIT_S, cluster, connect, nothing_left, tensors, until, worker_of
from tests.runtime.control.test_server import serving

LEASE_S = 0.8
STEP_S = 0.5  # more than two beats
ROUNDS = 8  # of the loop, which this test shares with its server: in them a word is said and answered


def takes_long(monkeypatch: pytest.MonkeyPatch, about: type, seconds: float) -> None:
    """Each such message takes the coordinator so long."""
    step = Coordinator.step

    def slow(self: Coordinator, event: Event, now: float) -> list[Action]:
        if isinstance(event, Received) and isinstance(event.message, about):
            time.sleep(seconds)
        return step(self, event, now)

    monkeypatch.setattr(Coordinator, "step", slow)


async def test_a_coordinator_that_is_behind_says_so_and_so_do_those_who_wait_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tensorhub.coordinator")

    def told(logger: str, what: str) -> bool:
        return any(record.name == logger and what in record.getMessage() for record in caplog.records)

    monkeypatch.setattr(pulse, "PULSE_S", 0.05)
    async with nothing_left(), serving(Options(lease_s=LEASE_S)) as server, connect(server.address) as hub:
        await hub.register("m", tensors())
        assert (await hub.describe("m")).coordinator_behind_s < STEP_S
        with monkeypatch.context() as slowed:
            takes_long(slowed, Heartbeat, STEP_S)
            await until(lambda: told("tensorhub.coordinator", "event='coordinator_behind'"))
            await until(lambda: told("tensorhub.worker", "event='coordinator_behind'"))
            while (await hub.describe("m")).coordinator_behind_s < LEASE_S / 8:
                pass
        await until(lambda: told("tensorhub.coordinator", "event='coordinator_caught_up'"))
        while (await hub.describe("m")).coordinator_behind_s > LEASE_S / 8:
            pass
        assert not told("tensorhub.worker", "worker_dismissed")


@pytest.mark.parametrize(("works", "reason"), [(True, pulse.TOO_MUCH), (False, pulse.STOPPED)])
async def test_it_says_whether_it_had_too_much_to_do_or_no_processor(
    works: bool, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pulse, "PULSE_S", 0.01)
    monkeypatch.setattr(time, "thread_time", time.monotonic if works else lambda: 7.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Pulse().keep, LEASE_S, lambda: 7, anyio.lowlevel.checkpoint)
        while "coordinator_behind" not in caplog.text:
            await anyio.lowlevel.checkpoint()
            time.sleep(STEP_S)  # noqa: ASYNC251
        tasks.cancel_scope.cancel()
    assert f"reason='{reason}'" in caplog.text
    assert "sessions=7" in caplog.text


async def test_a_worker_that_is_lost_is_named_in_the_log_and_one_that_leaves_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with nothing_left(), serving(Options(lease_s=LEASE_S)) as server:
        async with connect(server.address, name="leaver") as hub:
            await hub.register("m", tensors())
        gone = await thin_worker(server, 1)
        assert isinstance(await gone.receive(), Welcome)
        await gone.aclose()
        await until(lambda: "event='worker_lost' times=1 workers='w1'" in caplog.text)
        assert "since its connection ended" in caplog.text
        caplog.clear()
        async with await thin_worker(server, 2):
            await until(lambda: "event='worker_lost' times=1 workers='w2'" in caplog.text)
    assert "since its connection ended" not in caplog.text
    assert "leaver" not in caplog.text


async def thin_worker(server: CoordinatorServer, number: int) -> MessageStream[Any]:
    host, port = parse_address(server.address)
    messages = MessageStream[Any](await anyio.connect_tcp(host, port), FROM_COORDINATOR, 2**20)
    await messages.handshake(ClientHandshake("worker", f"life{number}", b"", bytes(NONCE_BYTES)), WAIT_S)
    await messages.send(Join(f"w{number}", Location(), (), 1, 0))
    return messages


async def test_who_says_everything_faster_than_it_can_be_heard_fills_his_own_sockets_and_nobody_elses_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it says is read no faster than it is handled. The rest stays in the kernel, and in the end with its sender."""
    heard: list[int] = []
    step = Coordinator.step

    def counting(self: Coordinator, event: Event, now: float) -> list[Action]:
        if isinstance(event, Received) and isinstance(event.message, ReaderCut):
            heard.append(event.session)
        return step(self, event, now)

    monkeypatch.setattr(Coordinator, "step", counting)
    step_s = 0.0005
    takes_long(monkeypatch, ReaderCut, step_s)
    async with nothing_left(), serving(Options()) as server, AsyncExitStack() as stack:
        greedy, other = [await stack.enter_async_context(await thin_worker(server, number)) for number in range(2)]
        for messages in (greedy, other):
            assert isinstance(await messages.receive(), Welcome)
        loud = server._sessions[1]
        body, said = codec.encode(ReaderCut("unknown")), 0

        async def shout() -> None:
            nonlocal said
            while True:
                await greedy._stream.send(greedy._encoder.frames(*[body] * 1000))
                said += 1000

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(shout)
            await until(lambda: len(heard) > 100)
            for sequence in range(50):
                before = len(heard)
                await other.send(Heartbeat(sequence))
                assert isinstance(await other.receive(), HeartbeatAck)
                assert len(heard) - before <= ROUNDS * (MESSAGES_PER_TURN + TURNS_S / step_s)
                assert len(loud.messages._decoder._buffer) <= 2 * READ_BYTES_MAX
            tasks.cancel_scope.cancel()
        assert set(heard) == {1}
        states = {worker.name: worker.state for worker in server._core.cluster.workers.values()}
        assert states == dict.fromkeys(("w0", "w1"), WorkerState.LIVE)


async def test_who_has_more_to_say_than_his_queue_holds_connects_again_and_is_the_one_that_he_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that says everything twice as fast as it can be heard is behind itself, in the end: nobody else is."""
    monkeypatch.setattr(link, "OUTBOX_MESSAGES_MAX", 64)
    async with cluster("greedy", "other") as c:
        greedy, other = c.hubs
        weights = [await hub.register(name, tensors(1)) for hub, name in ((greedy, "m"), (other, "n"))]
        for each in weights:
            await each.publish(1)
        lives = [worker_of(hub).incarnation for hub in c.hubs]

        async def shout() -> None:
            for _ in range(1000):
                worker_of(greedy).link.say(ReaderCut("unknown"))

        await greedy._thread.call(shout)
        await until(lambda: "coordinator_too_slow" in caplog.text)
        for each in weights:
            await each.unpublish()
        assert [worker_of(hub).incarnation for hub in c.hubs] == lives
        assert sum("coordinator_lost" in record.getMessage() for record in caplog.records) == 0


WORKERS = 1000


def registers(number: int, held: Held | None) -> Register:
    use = (True, False, Medium.DEVICE, Purpose.USE, "", 1, 1, b"manifest", held)
    return Register(1, f"r{number}", "m", f"g{number}", 0, 0, 1, *use)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio takes as long again, for the same server
async def test_a_thousand_workers_that_come_back_at_once_are_the_ones_that_they_were() -> None:
    """Their connections all break, as with a switch, and they all dial at once. Nobody is lost, or a newcomer."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 3 * WORKERS:
        pytest.skip(f"{soft} descriptors are too few")
    known = list[bool]()

    async def lives(server: CoordinatorServer, number: int, stack: AsyncExitStack) -> None:
        messages = await stack.enter_async_context(await thin_worker(server, number))
        welcome = await messages.receive()
        assert isinstance(welcome, Welcome), welcome
        known.append(welcome.known)
        await messages.send(registers(number, None))
        while not isinstance(said := await messages.receive(), Registered):
            assert not isinstance(said, Dismissed), said

    async with nothing_left(), serving(Options(lease_s=WAIT_S, connect_timeout_s=WAIT_S)) as server:
        for known_before in (False, True):
            known.clear()
            async with AsyncExitStack() as stack, anyio.create_task_group() as tasks:
                for number in range(WORKERS):
                    tasks.start_soon(lives, server, number, stack)
            assert known == [known_before] * WORKERS
            await until(lambda: not server._sessions)
            assert len(server._core.cluster.workers) == len(server._core.cluster.members) == WORKERS
