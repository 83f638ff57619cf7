"""A worker lies about what it has read in another layout, while its trainer is out of touch: over real sockets."""

from __future__ import annotations

from typing import Any, NoReturn

import anyio
import numpy as np
import pytest

import tensorhub
from tensorhub.hub import Hub
from tensorhub.runtime.worker.fill import Filler
from tensorhub.types import ContentId
from tensorhub.weights import Weights
from tests.rig import CHUNK_BYTES, OPTIONS, cluster, connect, gated, thread_of, until, worker_of

pytestmark = pytest.mark.anyio

HALF = 4 * CHUNK_BYTES


async def halves(hub: Hub) -> tuple[Weights, dict[str, Any]]:
    """Memory of another layout than the trainer's."""
    memory = {"first": np.zeros(HALF, np.uint8), "second": np.zeros(HALF, np.uint8)}
    whole = tensorhub.source("w")
    views = {"first": whole[:HALF], "second": whole[HALF:]}
    return await hub.register("m", memory, sources=views), memory


def holds(memory: dict[str, Any], content: int) -> bool:
    return all((each == content).all() for each in memory.values())


async def test_the_word_of_a_trainer_that_is_back_stands_against_that_of_a_liar(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, liars = Filler._roots, list[Hub]()
    memories = list[dict[str, Any]]()

    async def roots(self: Filler, manifest: Any, target: Any, generation: int) -> Any:
        """The liar overwrites what it has read, before it votes, and makes digests of that."""
        for hub in liars:
            held = worker_of(hub)._owner._owner._memories.get(target)
            if self._owner is worker_of(hub)._owner and held is not None:
                memories[0]["first"][:] = 9
                held.own.digests[:] = [None] * len(held.own.digests)
                self._owner.make_digests(target, generation, ContentId(held.content_id))
        return await usual(self, manifest, target, generation)

    async def refuse(host: str, port: int) -> NoReturn:
        raise OSError("refused")

    monkeypatch.setattr(Filler, "_roots", roots)
    async with cluster("trainer", "copy", "follower") as c:
        trainer, copy, follower = c.hubs
        await (await trainer.register("m", {"w": np.full(2 * HALF, 1, np.uint8)})).publish(1)
        await (await copy.register("m", {"w": np.zeros(2 * HALF, np.uint8)})).replicate()
        with gated(4) as gate:
            async with connect(c.address, "liar", OPTIONS) as liar:
                lying, memory = await halves(liar)
                memories.append(memory)
                liars.append(liar)
                with monkeypatch.context() as cut_off:
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(lying.replicate)
                        await until(lambda: gate.holds)
                        cut_off.setattr(worker_of(trainer).link, "_dial", refuse)
                        thread_of(trainer).post(lambda: worker_of(trainer).link._outbox.close())  # type: ignore[union-attr]
                        await until(lambda: not worker_of(trainer).link.online)
                        gate.open()
                await until(lambda: worker_of(trainer).link.online)
                assert lying.state == "ready"
                assert not holds(memory, 1)
                following, memory = await halves(follower)
                await following.replicate()
                assert holds(memory, 1)
                await until(lambda: lying.state == "empty")
