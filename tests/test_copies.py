"""Copies in host memory that the coordinator orders from a worker (R5): made, refused and ended, over real sockets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import anyio
import pytest

from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import RetentionError, StateError
from tensorhub.messages import CopyRefused, FromWorker, MakeCopy
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    all_of,
    cluster,
    connect,
    copies_of,
    gated,
    holds,
    published,
    ranks_of,
    tensors,
    thread_of,
    until,
    worker_of,
    write,
)

NBYTES = CHUNKS * CHUNK_BYTES
HOSTED = replace(OPTIONS, host_memory_bytes=NBYTES)


def reserved(hub: Hub) -> int:
    return worker_of(hub).copies.budget.reserved_bytes


def copies(hub: Hub) -> int:
    return len(copies_of(hub))


async def assert_read_from(hub: Hub, source: str, content: int, model: str = "m") -> None:
    mine = tensors()
    weights = await hub.register(model, mine, spot=True)  # so that nobody leaves the version to it
    assert {s.name for s in (await weights.replicate()).sources} == {source}
    assert holds(mine, content)
    await weights.close(abandon=True)


async def test_unpublish_of_the_last_holder_leaves_a_local_copy_that_serves() -> None:
    async with cluster("reader") as c, connect(c.address, "trainer", HOSTED) as trainer:
        out = tensors(1)
        source = await trainer.register("m", out)
        await trainer.retain("m", latest=1)
        await source.publish(1)
        await source.unpublish()
        write(out, 9)
        await assert_read_from(c.hubs[0], "trainer", 1)
        replicas = [r for r in (await trainer.describe("m")).replicas if r.group.startswith("copy/")]
        assert [(r.medium, r.purpose, r.version) for r in replicas] == [("host", "retention", 1)]
        assert reserved(trainer) == NBYTES
        await source.publish(2)
        await trainer.retain("m", latest=0)
        await until(lambda: reserved(trainer) == 0)
        await until(lambda: copies(trainer) == 0)


async def test_a_copy_of_what_goes_with_its_worker_is_read_over_the_network() -> None:
    async with cluster("trainer", "reader") as c, connect(c.address, "keeper", HOSTED) as keeper:
        sources = [await c.hubs[0].register("m", tensors(r), group="p", rank=r, world_size=2) for r in range(2)]
        await keeper.retain("m", latest=1)
        async with connect(c.address, "other", HOSTED):
            await all_of(*(source.publish(1) for source in sources))
            await all_of(*(source.close() for source in sources))
            replicas = [r for r in (await keeper.describe("m")).replicas if r.purpose == "retention"]
            assert sorted(shard.rank for r in replicas for shard in r.shards) == [0, 1]
            ins = [tensors(), tensors()]
            ranks = await ranks_of(c.hubs[1:2], ins, "r")
            await all_of(*(rank.replicate() for rank in ranks))
            assert holds(ins[0], 0)
            assert holds(ins[1], 1)


async def test_a_copy_that_has_no_room_is_refused() -> None:
    async with cluster("trainer", options=replace(OPTIONS, host_memory_bytes=NBYTES - 1)) as c:
        source = await c.hubs[0].register("m", tensors(1))
        said = listen(c.hubs[0])
        info = await source.publish(1)
        order = MakeCopy("c1", info, 0)
        thread_of(c.hubs[0]).post(partial(worker_of(c.hubs[0]).received, order))
        await until(lambda: any(isinstance(message, CopyRefused) for message in said))
        (refused,) = [message for message in said if isinstance(message, CopyRefused)]
        assert refused.copy == "c1"
        assert f"retention needs {NBYTES} bytes" in refused.reason
        assert reserved(c.hubs[0]) == 0


def listen(hub: Hub) -> list[FromWorker]:
    """What this hub says from now on."""
    said: list[FromWorker] = []
    say: Callable[[FromWorker], None] = worker_of(hub).link.say

    def overhear(message: FromWorker) -> None:
        said.append(message)
        say(message)

    worker_of(hub).link.say = overhear  # type: ignore[method-assign]
    return said


async def test_a_retention_copy_takes_the_room_of_a_prefetched_one_and_never_the_other_way() -> None:
    async with cluster("trainer", "reader") as c, connect(c.address, "keeper", HOSTED) as keeper:
        await (await c.hubs[0].register("n", tensors(5))).publish(1)
        weights: Weights = await keeper.register("n", tensors())
        await weights.prefetch()
        source = await c.hubs[0].register("m", tensors(1))
        await keeper.retain("m", latest=1)
        await source.publish(1)
        await source.close()
        assert [r.purpose for m in await keeper.describe() for r in m.replicas if r.medium == "host"] == ["retention"]
        assert reserved(keeper) == NBYTES
        with pytest.raises(StateError, match="does not outrank"):
            await weights.prefetch()
        await assert_read_from(c.hubs[1], "keeper", 1)


async def test_a_copy_that_is_not_needed_any_more_while_it_is_made() -> None:
    with gated(3) as gate:
        async with cluster("trainer") as c, connect(c.address, "keeper", HOSTED) as keeper:
            source = await published(c.hubs[0])
            await c.hubs[0].retain("m", latest=1)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(source.close)
                await until(lambda: gate.holds)
                assert reserved(keeper) == NBYTES
                await c.hubs[0].retain("m", latest=0)
            await until(lambda: copies(keeper) == 0)
            await until(lambda: reserved(keeper) == 0)
            gate.open()


async def test_a_copy_of_a_version_that_is_rolled_back_goes() -> None:
    async with cluster("reader") as c, connect(c.address, "trainer", HOSTED) as trainer:
        source = await published(trainer)
        async with source.mutate(2):
            pass
        await trainer.retain("m", latest=1)
        await source.unpublish()
        assert reserved(trainer) == NBYTES
        await c.hubs[0].rollback("m", to=1)
        await until(lambda: reserved(trainer) == 0)
        await until(lambda: copies(trainer) == 0)


async def test_with_the_last_handle_what_the_worker_retains_is_handed_over() -> None:
    """Whatever that handle holds, or nothing (R5); refused, everything is as it was, and serves."""
    hasty = replace(HOSTED, op_timeout_s=0.5)
    async with cluster("reader") as c, connect(c.address, "trainer", hasty) as trainer:
        source, other = await trainer.register("m", tensors(1)), await trainer.register("other", tensors())
        await trainer.retain("m", latest=1)
        await source.publish(1)
        await source.unpublish(timeout=20)
        await source.close()  # another handle is left
        assert (copies(trainer), reserved(trainer)) == (1, NBYTES)
        with pytest.raises(RetentionError, match="version 1 of 'm' must stay"):
            await other.close()
        assert (other.state, copies(trainer), reserved(trainer)) == ("empty", 1, NBYTES)
        await assert_read_from(c.hubs[0], "trainer", 1)
        async with connect(c.address, "keeper", HOSTED) as keeper:
            worker_of(trainer).options = HOSTED  # it has time now
            await other.close()
            assert (copies(trainer), copies(keeper), reserved(trainer)) == (0, 1, 0)
            await assert_read_from(c.hubs[0], "keeper", 1)
