"""The publisher's digests decide (R8), over real sockets: whoever vouches for other bytes poisons
nobody.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import anyio
import pytest

from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import IntegrityError
from tests.rig import (
    OPTIONS,
    Tensors,
    cluster,
    connect,
    holds,
    published,
    tensors,
    until,
    worker_of,
    write,
)
from tests.runtime.data_rig import waited_out_s
from tests.test_coordinator_restart import cluster as restartable

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def lie(hub: Hub, memory: Tensors, content: int = 9) -> None:
    """Overwrite what is held, and forget its digests, so that those of the new bytes vouch for
    them.
    """
    write(memory, content)
    for held in worker_of(hub)._owner._owner._memories.values():
        held.own.digests[:] = [None] * len(held.own.digests)


async def replica(hub: Hub) -> tuple[Weights, Tensors]:
    memory = tensors()
    weights = await hub.register("m", memory)
    await weights.replicate()
    return weights, memory


async def test_who_overwrites_a_copy_and_vouches_for_it_poisons_nobody() -> None:
    readers = [f"reader {n}" for n in range(5)]
    async with cluster("trainer", "liar", *readers) as c:
        await published(c.hubs[0])
        lying, memory = await replica(c.hubs[1])
        lie(c.hubs[1], memory)
        filled: list[tuple[Weights, Tensors]] = []

        async def fill(hub: Hub) -> None:
            filled.append(await replica(hub))

        async with anyio.create_task_group() as tasks:
            for hub in c.hubs[2:]:
                tasks.start_soon(fill, hub)
        assert [holds(got, 1) for _, got in filled] == [True] * 5
        await until(lambda: lying.state == "empty")  # it is told that it holds something else
        shards = (await c.hubs[0].describe("m")).replicas
        assert {shard.worker: shard.state for each in shards for shard in each.shards} == {
            "trainer": "complete",
            **dict.fromkeys(readers, "complete"),
        }


async def test_a_fetch_is_compared_too_also_of_some_names() -> None:
    async with cluster("trainer", "liar", "reader") as c:
        await published(c.hubs[0])
        _, memory = await replica(c.hubs[1])
        lie(c.hubs[1], memory)
        fetched = await c.hubs[2].fetch("m", names="b")
        assert (fetched["b"].numpy() == tensors(1)["b"]).all()
        assert fetched.report.bytes_read > fetched.report.reread_bytes
        lie(c.hubs[1], memory)
        assert holds(
            {name: tensor.numpy() for name, tensor in (await c.hubs[2].fetch("m")).items()}, 1
        )


async def test_where_only_a_liar_is_left_nobody_commits() -> None:
    async with cluster("liar", "reader") as c:
        async with connect(c.address, "trainer") as trainer:
            await published(trainer)
            _, memory = await replica(c.hubs[0])
        lie(c.hubs[0], memory)
        weights = await c.hubs[1].register("m", tensors())
        with pytest.raises(IntegrityError, match="has another digest than was published") as caught:
            await weights.replicate(timeout=waited_out_s())
        assert (caught.value.memory, weights.state) == ("torn", "torn")


async def test_a_coordinator_that_comes_back_knows_the_root(tmp_path: Path) -> None:
    async with restartable("liar", "honest", "reader", state_dir=tmp_path) as (coordinator, hubs):
        async with connect(coordinator.address, "trainer") as trainer:
            await published(trainer)
            _, memory = await replica(hubs[0])
            await replica(hubs[1])
        lie(hubs[0], memory)
        await coordinator.restart(*hubs)
        assert holds((await replica(hubs[2]))[1], 1)


@pytest.mark.parametrize("transport", ["tcp", "cma"])
async def test_a_publisher_can_choose_a_cryptographic_digest(transport: str) -> None:
    """It is the publisher's alone: the reader's own options say nothing."""
    chosen = dataclasses.replace(OPTIONS, digest="sha-256")
    async with (
        cluster("reader", "other", transports=[transport]) as c,
        connect(c.address, "trainer", chosen, "", [transport]) as hub,
    ):
        await published(hub)
        weights, memory = await replica(c.hubs[0])
        assert holds(memory, 1)
        content = weights._handle.member.content
        assert content is not None
        assert content.manifest.digest == "sha-256"
        lie(c.hubs[0], memory)
        assert holds((await replica(c.hubs[1]))[1], 1)
        assert (await c.hubs[0].fetch("m", names="a"))["a"].numpy().tobytes() == tensors(1)[
            "a"
        ].tobytes()


def test_what_is_no_digest_is_refused() -> None:
    with pytest.raises(ValueError, match="digest = 'md5': give 'xxh3-64'"):
        dataclasses.replace(OPTIONS, digest="md5")  # type: ignore[arg-type]
