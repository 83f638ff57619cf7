"""`update(staged=True)` over real sockets: nothing is overwritten before all ranks have all of it
and have agreed.
"""

from __future__ import annotations

from dataclasses import replace

import anyio
import pytest

from tensorhub.api.weights import Weights
from tensorhub.errors import OperationTimeout, RetentionError, StateError, VersionUnavailable
from tensorhub.types import FetchReport, VersionInfo
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    Cluster,
    cluster,
    connect,
    gated,
    holds,
    tensors,
    until,
    worker_of,
    write,
)
from tests.runtime.data_rig import WAIT_S, waited_out_s

NBYTES = CHUNKS * CHUNK_BYTES
HOSTED = replace(OPTIONS, host_memory_bytes=NBYTES)


def memory_of(weights: Weights):  # type: ignore[no-untyped-def]
    return weights._handle.memory._given  # type: ignore[attr-defined]


def reserved(weights: Weights) -> int:
    return worker_of(weights).copies.budget.reserved_bytes


async def publish(source: Weights, version: int) -> None:
    async with source.mutate(version):
        write(memory_of(source), version)


async def ready(c: Cluster) -> tuple[Weights, Weights]:
    """The trainer holds version 2, the reader version 1."""
    source = await c.hubs[0].register("m", tensors(1))
    await source.publish(1)
    weights = await c.hubs[1].register("m", tensors(), group="r")
    await weights.replicate()
    await publish(source, 2)
    return source, weights


async def assert_intact(c: Cluster, weights: Weights) -> None:
    """Version 1 is there, published, and read by others."""
    assert (weights.state, weights.version) == ("ready", 1)
    assert holds(memory_of(weights), 1)
    mine = tensors()
    other = await c.hubs[-1].register("m", mine)
    assert [s.name for s in (await other.replicate(1)).sources] == ["reader"]
    assert holds(mine, 1)
    await other.close()
    await until(lambda: reserved(weights) == 0)


async def test_the_old_version_is_served_until_the_commit() -> None:
    async with cluster("trainer", "reader", "other", options=HOSTED) as c:
        _, weights = await ready(c)
        seen: list[object] = []

        async def pause(info: VersionInfo) -> None:
            (lease,) = {
                replica.group
                for replica in (await c.hubs[0].describe("m")).replicas
                if replica.version == 1
            }
            seen.extend(
                [info.version, weights.state, weights.version, holds(memory_of(weights), 1), lease]
            )
            assert reserved(weights) == NBYTES
            mine = tensors()
            other = await c.hubs[2].register("m", mine)
            await other.replicate(1)
            assert holds(mine, 1)

        report = await weights.update(staged=True, before_write=pause)
        assert seen == [2, "ready", 1, True, "r"]
        assert (report.version, report.changed, report.bytes_read) == (2, True, NBYTES)
        assert sum(report.phases.values()) == pytest.approx(report.seconds)
        assert report.phases["unpack"] > 0
        assert holds(memory_of(weights), 2)
        assert (weights.state, weights.version) == ("ready", 2)
        await until(lambda: reserved(weights) == 0)


async def test_a_hook_that_raises_leaves_the_old_version() -> None:
    async with cluster("trainer", "reader", "other", options=HOSTED) as c:
        _, weights = await ready(c)

        async def refuse(info: VersionInfo) -> None:
            raise LookupError("the engine is busy")

        with pytest.raises(LookupError, match="the engine is busy"):
            await weights.update(staged=True, before_write=refuse)
        await assert_intact(c, weights)
        assert (await weights.update(staged=True)).version == 2


async def test_a_source_that_leaves_in_the_midst_of_it_tears_nothing() -> None:
    with gated(CHUNKS + 4) as gate:
        async with cluster("trainer", "reader", "other", options=HOSTED) as c:
            source, weights = await ready(c)
            async with anyio.create_task_group() as tasks:

                async def update() -> None:
                    with pytest.raises(VersionUnavailable) as caught:
                        # by number: "latest" waits for a newer version
                        await weights.update(2, staged=True)
                    assert caught.value.memory == "intact"

                tasks.start_soon(update)
                await until(lambda: gate.holds)
                await source.unpublish()
            gate.open()
            await assert_intact(c, weights)


async def test_one_rank_that_fails_leaves_all_ranks_their_old_version() -> None:
    async with cluster("trainer", "one", "two", options=HOSTED) as c:
        sources = [
            await c.hubs[0].register("m", tensors(r), group="p", rank=r, world_size=2)
            for r in range(2)
        ]
        ranks = [
            await hub.register("m", tensors(), group="r", rank=r, world_size=2)
            for r, hub in enumerate(c.hubs[1:])
        ]

        async def all_ranks(*calls) -> None:  # type: ignore[no-untyped-def]
            async with anyio.create_task_group() as tasks:
                for call in calls:
                    tasks.start_soon(call)

        await all_ranks(
            *[lambda s=s: s.publish(1) for s in sources], *[rank.replicate for rank in ranks]
        )
        await all_ranks(*[lambda s=s: publish(s, 2) for s in sources])

        async def refuse(info: VersionInfo) -> None:
            raise LookupError("the engine is busy")

        async def fail(rank: Weights, hook) -> None:  # type: ignore[no-untyped-def]
            with pytest.raises(Exception, match="the engine is busy"):
                await rank.update(staged=True, before_write=hook)

        await all_ranks(lambda: fail(ranks[0], None), lambda: fail(ranks[1], refuse))
        assert [(rank.state, rank.version) for rank in ranks] == [("ready", 1)] * 2
        assert [holds(memory_of(rank), content) for content, rank in enumerate(ranks)] == [
            True,
            True,
        ]

        async def update(rank: Weights) -> None:
            assert (await rank.update(staged=True)).version == 2

        await all_ranks(*[lambda r=r: update(r) for r in ranks])
        assert [holds(memory_of(rank), 2) for rank in ranks] == [True, True]
        assert [rank.version for rank in ranks] == [2, 2]


async def test_what_became_retained_while_it_was_staged_is_not_given_up() -> None:
    """There is no room for a copy: what was staged waits for the leave, and at the deadline
    everything is as it was.
    """
    async with (
        cluster("trainer") as c,
        connect(c.address, "reader", HOSTED) as hub,
        connect(c.address, "other") as other,
    ):
        c.hubs.extend([hub, other])
        _, weights = await ready(c)

        async def retain(info: VersionInfo) -> None:
            await other.retain("m", latest=2)

        with pytest.raises(RetentionError, match="nothing was written"):
            await weights.update(staged=True, before_write=retain, timeout=waited_out_s(0.5))
        await other.retain("m", latest=1)
        await assert_intact(c, weights)


async def test_an_overdue_hook_leaves_the_old_version() -> None:
    async with cluster("trainer", "reader", "other", options=HOSTED) as c:
        _, weights = await ready(c)
        began, ended = anyio.Event(), anyio.Event()

        async def hang(info: VersionInfo) -> None:
            began.set()
            with anyio.move_on_after(WAIT_S):
                await ended.wait()

        async with anyio.create_task_group() as tasks:

            async def update() -> None:
                with pytest.raises(OperationTimeout) as caught:
                    await weights.update(staged=True, before_write=hang, timeout=waited_out_s(0.2))
                assert caught.value.memory == "intact"

            tasks.start_soon(update)
            await began.wait()
            await until(
                lambda: (
                    weights._handle.member.running is None
                    and weights.version == 1
                    and not reserved(weights)
                )
            )
            ended.set()
        await assert_intact(c, weights)


async def test_staged_uses_what_was_prefetched() -> None:
    async with cluster(
        "trainer", "reader", options=replace(HOSTED, host_memory_bytes=2 * NBYTES)
    ) as c:
        _, weights = await ready(c)
        await weights.prefetch()
        report = await weights.update(staged=True)
        assert (report.version, report.bytes_read) == (2, 0)
        assert holds(memory_of(weights), 2)
        await until(lambda: reserved(weights) == 0)


async def test_staged_needs_host_memory() -> None:
    async with cluster("trainer", "reader", "other") as c:
        _, weights = await ready(c)
        with pytest.raises(StateError, match=r"update\(staged=True\) needs host memory"):
            await weights.update(staged=True)
    async with cluster(
        "trainer", "reader", "other", options=replace(OPTIONS, host_memory_bytes=NBYTES - 1)
    ) as c:
        _, weights = await ready(c)
        with pytest.raises(StateError, match=f"needs {NBYTES} bytes of host memory") as caught:
            await weights.update(staged=True)
        assert caught.value.memory == "intact"
        await assert_intact(c, weights)


async def test_staged_on_an_empty_handle_is_replicate() -> None:
    async with cluster("trainer", "reader", options=HOSTED) as c:
        source = await c.hubs[0].register("m", tensors(1))
        await source.publish(1)
        mine, seen = tensors(), list[str]()
        weights = await c.hubs[1].register("m", mine)

        async def pause(info: VersionInfo) -> None:
            seen.append(weights.state)

        report: FetchReport = await weights.update(staged=True, before_write=pause)
        assert (report.version, seen) == (1, ["empty"])
        assert holds(mine, 1)
