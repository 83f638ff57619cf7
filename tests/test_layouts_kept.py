"""What keeps a version beside those who use it, for readers of another layout: host copies, seeds,
prefetched copies; and adapters, which are models of their own beside their base.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.api.tools import seed_shard
from tensorhub.errors import VersionUnavailable
from tests.rig import OPTIONS, all_of, cluster
from tests.test_resharding import (
    TRAINERS,
    is_held,
    is_published,
    new_version,
    read_from,
    rollout,
    trainer,
)

pytestmark = pytest.mark.anyio

HOSTED = replace(OPTIONS, host_memory_bytes=2**23)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_retained_version_is_handed_over_as_it_was_published_though_rollouts_hold_it() -> (
    None
):
    """Then rollouts may leave, and a group of a third layout reads it."""
    async with (
        cluster("trainer", "engine", transports=["tcp"]) as c,
        tensorhub.connect(c.address, name="host", options=HOSTED, token=""),
    ):
        trained, memory = await trainer(c.hubs[:1], 1)
        await c.hubs[0].retain("m", latest=1)
        await all_of(*(each.publish(1) for each in trained))
        weights, _ = await rollout(c.hubs[1:], "rollout")
        await all_of(*(each.replicate() for each in weights))
        await all_of(*(each.unpublish() for each in trained))
        await all_of(*(each.close() for each in weights))
        held = [r for r in (await c.hubs[0].describe("m")).replicas if r.state == "ready"]
        assert {(r.medium, r.purpose) for r in held} == {("host", "retention")}
        for shard in memory:
            for tensor in shard.values():
                tensor.fill(9)
        fetched = await c.hubs[1].fetch("m", rank=None)
        assert {source.name for source in fetched.report.sources} == {"host"}
        await all_of(*(each.replicate() for each in trained))
        assert is_published(memory, 1)


async def test_a_version_that_only_another_layout_holds_is_counted_and_errors_say_who_can_read_it() -> (
    None
):
    async with cluster("trainer", "engine", transports=["tcp"]) as c:
        trained, _ = await trainer(c.hubs[:1], 1)
        await all_of(*(each.publish(1) for each in trained))
        weights, _ = await rollout(c.hubs[1:], "rollout")
        await all_of(*(each.replicate() for each in weights))
        await all_of(*(each.close() for each in trained))
        (version,) = (await c.hubs[0].describe("m", limit=0)).versions
        assert version.summary is not None
        assert (version.state, version.summary.copies) == ("available", 1)
        told = "held now: version 1 by 1 replica of other layouts than the published one"
        with pytest.raises(VersionUnavailable) as one_rank:
            await c.hubs[0].fetch("m", rank=0, timeout=0)
        only = "version 1 of 'm' is held in other layouts only"
        assert only in str(one_rank.value)
        assert "tensorhub seed" in str(one_rank.value)
        with pytest.raises(VersionUnavailable, match=only):
            await c.hubs[0].fetch("m", 1, rank=None)
        with pytest.raises(VersionUnavailable) as available:
            await c.hubs[0].fetch("m", "available", rank=None)
        assert f"{told}, which this call cannot read" in str(available.value)
        with pytest.raises(ExceptionGroup) as own:
            await all_of(*(each.update(2) for each in weights))
        assert str(own.value.exceptions[0]).endswith("; held now: version 1 by this group itself")
        another, mine = await rollout(c.hubs[:1], "another")
        await all_of(*(each.replicate("available") for each in another))
        assert is_held(mine, 1)
        assert (await c.hubs[0].plan("m", selector="available")).version.version == 1


async def seeds(hub: Hub) -> None:
    """This worker holds all shards of the newest version."""
    info = await hub.wait_for("m", at_least=0)
    await all_of(*(seed_shard(hub, info, shard) for shard in range(info.world_size)))


async def test_a_seed_holds_the_publications_layout_and_feeds_readers_of_others() -> None:
    async with cluster("trainer", "seed", "engine", transports=["tcp"], options=HOSTED) as c:
        trained, _ = await trainer(c.hubs[:1], 1)
        await all_of(*(each.publish(1) for each in trained))
        await seeds(c.hubs[1])
        await all_of(*(each.unpublish() for each in trained))
        weights, mine = await rollout(c.hubs[2:], "rollout")
        reports = await all_of(*(each.replicate() for each in weights))
        assert is_held(mine, 1)
        assert read_from(reports) == {"seed"}
        fetched = await c.hubs[2].fetch("m", rank=None)
        assert fetched.report.bytes_read == sum(
            tensor.numel() * tensor.itemsize for tensor in fetched.values()
        )


async def test_each_new_version_is_prefetched_in_the_engines_layout_by_itself() -> None:
    async with cluster("trainer", transports=["tcp"], options=HOSTED) as c:
        connecting = tensorhub.connect(
            c.address, name="engine", prefetch=True, options=HOSTED, token=""
        )
        async with connecting as engine:
            trained, memory = await trainer(c.hubs, 1)
            await all_of(*(each.publish(1) for each in trained))
            weights, mine = await rollout([engine], "rollout")
            await all_of(*(each.replicate() for each in weights))
            await all_of(*(new_version(trained, memory, rank, 2) for rank in range(TRAINERS)))
            described = await engine.describe("m")
            while (
                sum(
                    r.purpose == "prefetch" and r.state == "ready" and r.version == 2
                    for r in described.replicas
                )
                < 1
            ):
                described = await engine.describe("m")
            assert is_held(mine, 1)
            reports = await all_of(*(each.update() for each in weights))
            assert is_held(mine, 2)
            assert [report.bytes_read for report in reports] == [0, 0]
