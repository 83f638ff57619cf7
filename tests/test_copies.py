"""Copies in host memory that the coordinator orders from a worker (R5): made, refused and ended,
over real sockets.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.api.hub import Hub
from tensorhub.errors import RetentionError
from tensorhub.runtime.worker import host_copies
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    all_of,
    cluster,
    connect,
    copies_of,
    holds,
    published,
    ranks_of,
    tensors,
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
        replicas = [
            r for r in (await trainer.describe("m")).replicas if r.group.startswith("copy/")
        ]
        assert [(r.medium, r.purpose, r.version) for r in replicas] == [("host", "retention", 1)]
        assert reserved(trainer) == NBYTES
        await source.publish(2)
        await trainer.retain("m", latest=0)
        await until(lambda: reserved(trainer) == 0)
        await until(lambda: copies(trainer) == 0)


async def test_a_copy_of_what_goes_with_its_worker_is_read_over_the_network() -> None:
    async with cluster("trainer", "reader") as c, connect(c.address, "keeper", HOSTED) as keeper:
        sources = [
            await c.hubs[0].register("m", tensors(r), group="p", rank=r, world_size=2)
            for r in range(2)
        ]
        await keeper.retain("m", latest=1)
        async with connect(c.address, "other", HOSTED):
            await all_of(*(source.publish(1) for source in sources))
            await all_of(*(source.close() for source in sources))
            replicas = [
                r for r in (await keeper.describe("m")).replicas if r.purpose == "retention"
            ]
            assert sorted(shard.rank for r in replicas for shard in r.shards) == [0, 1]
            ins = [tensors(), tensors()]
            ranks = await ranks_of(c.hubs[1:2], ins, "r")
            await all_of(*(rank.replicate() for rank in ranks))
            assert holds(ins[0], 0)
            assert holds(ins[1], 1)


async def test_a_copy_of_a_version_that_is_rolled_back_goes_without_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    monkeypatch.setattr(host_copies.log, "warning", lambda event, **fields: told.append(event))
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
    assert told == []


async def test_with_the_last_handle_what_the_worker_retains_is_handed_over() -> None:
    """Whatever that handle holds, or nothing (R5); refused, everything is as it was, and serves."""
    hasty = replace(HOSTED, op_timeout_s=0.5)
    async with cluster("reader") as c, connect(c.address, "trainer", hasty) as trainer:
        source, other = (
            await trainer.register("m", tensors(1)),
            await trainer.register("other", tensors()),
        )
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
