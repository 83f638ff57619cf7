"""`describe` of everything: a page at a time, so that nobody else waits for them; and never older
than what the asker did.

Covers `runtime.control.server` (long answers), with `coordinator.views` and `coordinator.views`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NoReturn

import anyio
import anyio.lowlevel
import pytest

from tensorhub.coordinator import Connected, Coordinator, Received, Send, limits, views
from tensorhub.messages import Describe, Description, Heartbeat, HeartbeatAck
from tensorhub.runtime.control.server import CoordinatorServer
from tensorhub.testing import StepwiseCluster
from tests.rig import OPTIONS, connect, nothing_left, until
from tests.runtime.control.test_server import JOIN, serving, talk

MODELS = 2000
OBSERVER = 1000


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def many_models(coordinator: Coordinator, models: int = MODELS, prefix: str = "model") -> list[str]:
    """So many models are known; returns their names."""
    names = [f"{prefix}-{number:05d}" for number in range(models)]
    for name in reversed(names):
        coordinator.cluster.model(name).retain = 1
    return names


@pytest.mark.parametrize("limit", [None, 0])
async def test_everything_is_described_a_page_at_a_time_while_heartbeats_are_answered(
    monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """Eight sessions ask for everything at once. Counted are models that are described between two
    turns of the others.
    """
    described, askers, beats, runs = 0, 8, 0, [0]
    left = askers
    describe = views.describe

    def counting(*args: Any, **named: Any) -> Any:
        nonlocal described
        described += 1
        return describe(*args, **named)

    async def others_turn() -> None:
        while True:
            before = described
            await anyio.lowlevel.checkpoint()
            runs.append(described - before)

    async def ask(server: CoordinatorServer, names: list[str]) -> None:
        nonlocal left
        async with connect(server.address) as hub:
            found = await hub.describe(limit=limit)
        assert [model.model for model in found] == names
        left -= 1

    async def beat(server: CoordinatorServer) -> None:
        nonlocal beats
        async with await talk(server, JOIN) as messages:
            await messages.receive()  # Welcome
            sequence = 0
            while left:
                sequence += 1
                await messages.send(Heartbeat(sequence))
                ack = await messages.receive()
                assert isinstance(ack, HeartbeatAck)
                assert ack.sequence == sequence
                beats += 1

    monkeypatch.setattr(views, "describe", counting)
    async with nothing_left(), serving(OPTIONS) as server:
        names = many_models(server._core)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(others_turn)
            tasks.start_soon(beat, server)
            for _ in range(askers):
                tasks.start_soon(ask, server, names)
            await until(lambda: not left)
            tasks.cancel_scope.cancel()
    assert described == askers * MODELS
    assert max(runs) <= 2 * limits.DESCRIBED_MAX
    assert beats > MODELS // limits.DESCRIBED_MAX


async def test_a_description_that_no_frame_could_carry_arrives_whole() -> None:
    async with (
        nothing_left(),
        serving(replace(OPTIONS, frame_bytes_max=65_536)) as server,
        connect(server.address) as hub,
    ):
        names = many_models(server._core, prefix="m" * 100)
        assert [model.model for model in await hub.describe()] == names


# --------------------------------------------------------------------------------------------------
# what it shows


def ask(cluster: StepwiseCluster, message: Describe) -> Description:
    (answer,) = cluster.coordinator.step(Received(OBSERVER, message), cluster.now)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Description)
    return answer.message


def pages(cluster: StepwiseCluster) -> Iterator[Description]:
    after: str | None = None
    while True:
        page = ask(cluster, Describe(1, None, after))
        yield page
        if not page.more:
            return
        after = page.models[-1].model


def test_what_was_acknowledged_before_the_question_is_in_its_answer() -> None:
    cluster = StepwiseCluster()
    many_models(cluster.coordinator, 300)
    trainer = cluster.handle("trainer")
    cluster.run()
    cluster.coordinator.step(Connected(OBSERVER, "observer.1", "observer"), 0.0)
    for number in range(1, 5):
        assert [
            model.mark for page in pages(cluster) for model in page.models if model.model == "actor"
        ] == [number - 1 or None]
        call = trainer.publish(number)
        cluster.run()
        assert call.version is not None
        assert call.version.version == number
        trainer.unpublish()
        cluster.run()


class Unlooked(dict[str, Any]):
    """What nobody walks through."""

    def _walked(self) -> NoReturn:
        raise AssertionError("all leases of the cluster are looked through for one model")

    def values(self) -> Any:
        self._walked()

    def items(self) -> Any:
        self._walked()

    def __iter__(self) -> Any:
        self._walked()
