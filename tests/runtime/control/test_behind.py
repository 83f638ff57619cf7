"""A coordinator that has more to do than it comes to: it says so, and whoever makes it so hurts
himself alone.

Covers `runtime.control.pulse`, `runtime.control.hearing` and `runtime.control.link` (who waits is
told).
"""

from __future__ import annotations

import time
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest

from tensorhub.coordinator import Action, Coordinator, Event, Received
from tensorhub.messages import (
    Fill,
    Heartbeat,
    Join,
    ReaderCut,
    Welcome,
)
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.stream import MessageStream
from tensorhub.runtime.control import link, pulse
from tensorhub.runtime.control.pulse import Pulse
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.types import Location, Options, parse_address
from tests.rig import WAIT_S, cluster, connect, nothing_left, tensors, until, worker_of
from tests.runtime.control.test_server import serving

LEASE_S = 0.8
STEP_S = 0.5  # more than two beats


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


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
        return any(
            record.name == logger and what in record.getMessage() for record in caplog.records
        )

    monkeypatch.setattr(pulse, "PULSE_S", 0.05)
    async with (
        nothing_left(),
        serving(Options(lease_s=LEASE_S)) as server,
        connect(server.address) as hub,
    ):
        await hub.register("m", tensors())
        assert (await hub.describe("m")).coordinator_behind_s < STEP_S
        with monkeypatch.context() as slowed:
            takes_long(slowed, Heartbeat, STEP_S)
            await until(lambda: told("tensorhub.coordinator", "event='coordinator_behind'"))
            await until(lambda: told("tensorhub.worker", "event='coordinator_behind'"))
            while (await hub.describe("m")).coordinator_behind_s < LEASE_S / 8:
                pass
        assert "behind" in [event.kind async for event in hub.events()]
        await until(lambda: told("tensorhub.coordinator", "event='coordinator_caught_up'"))
        while (await hub.describe("m")).coordinator_behind_s > LEASE_S / 8:
            pass
        assert not told("tensorhub.worker", "worker_dismissed")


async def test_an_update_that_a_late_coordinator_holds_up_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulse, "PULSE_S", 0.02)
    async with (
        nothing_left(),
        serving(Options(lease_s=LEASE_S)) as server,
        connect(server.address, name="trainer") as trainer,
        connect(server.address, name="reader") as reader,
    ):
        await (await trainer.register("m", tensors(1))).publish(1)
        weights = await reader.register("m", tensors())
        with monkeypatch.context() as slowed:
            takes_long(slowed, Fill, 2 * STEP_S)
            await weights.replicate()
        found = await reader.explain("m")
        while not found.links:
            found = await reader.explain("m")
        late_s = sum(part.seconds for part in found.parts if part.name == "coordinator")
        assert late_s >= STEP_S
        assert late_s <= found.unsure_s


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
    await messages.handshake(
        ClientHandshake("worker", f"life{number}", b"", bytes(NONCE_BYTES)), WAIT_S
    )
    await messages.send(Join(f"w{number}", Location(), (), 1, 0))
    return messages


async def test_who_has_more_to_say_than_his_queue_holds_connects_again_and_is_the_one_that_he_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that says everything twice as fast as it can be heard is behind itself, in the end:
    nobody else is.
    """
    monkeypatch.setattr(link, "OUTBOX_MESSAGES_MAX", 64)
    async with cluster("greedy", "other") as c:
        greedy, other = c.hubs
        weights = [
            await hub.register(name, tensors(1)) for hub, name in ((greedy, "m"), (other, "n"))
        ]
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
