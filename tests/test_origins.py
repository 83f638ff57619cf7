"""Reading out of a group that is neither in the published layout nor in the reader's: by each transport of one host, staged,
and prefetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.types import FetchReport, VersionInfo
from tests.rig import OPTIONS, Cluster, all_of, cluster, gated, until
from tests.test_resharding import (
    ROLLOUTS,
    SHAPES,
    TRAINERS,
    Array,
    Tensors,
    engine,
    new_version,
    read_from,
    rollout,
    rows,
    shard,
    trainer,
    whole,
)

pytestmark = pytest.mark.anyio

HOSTED = replace(OPTIONS, host_memory_bytes=2**23)


def holds(memory: Mapping[str, Array], content: int) -> bool:
    return all(np.array_equal(memory[name], tensor) for name, tensor in whole(content).items())


async def all_of_it(hub: Hub) -> tuple[Weights, Tensors]:
    """Memory for the whole model."""
    memory = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    return await hub.register("m", memory), memory


def of(reports: list[FetchReport]) -> set[tuple[str, str]]:
    return {(source.name, source.transport) for report in reports for source in report.sources if source.bytes_read}


def shared(tensors: Tensors) -> Tensors:
    """The same, where workers of this host may map it."""
    made: Tensors = tensorhub.shared_empty_like(tensors)
    for name, tensor in tensors.items():
        made[name][...] = tensor
    return made


@pytest.mark.parametrize("transport", ["tcp", "cma", "shm"])
async def test_each_transport_reads_it(transport: str) -> None:
    published = [shared(shard(1, rank)) for rank in range(TRAINERS)]
    engines = [(shared(tensors), views) for tensors, views in map(engine, range(ROLLOUTS))]
    mine = shared(whole(0))
    async with cluster("trainer", "origin", "reader", transports=[transport]) as c:
        trained, ranks = [], []
        for rank, memory in enumerate(published):
            sources = {name: tensorhub.source(name, shape=shape)[rows(name, rank)] for name, shape in SHAPES.items()}
            use: dict[str, Any] = {"group": "trainer", "rank": rank, "world_size": TRAINERS, "sources": sources}
            trained.append(await c.hubs[0].register("m", memory, **use))
        await all_of(*(each.publish(1) for each in trained))
        for rank, (memory, views) in enumerate(engines):
            use = {"group": "origin", "rank": rank, "world_size": ROLLOUTS, "sources": views}
            ranks.append(await c.hubs[1].register("m", memory, **use))
        await all_of(*(each.replicate() for each in ranks))
        await all_of(*(each.unpublish() for each in trained))
        report = await (await c.hubs[2].register("m", mine)).replicate(1)
        assert holds(mine, 1)
        assert of([report]) == {("origin", transport)}


async def with_the_next_version(c: Cluster) -> tuple[Weights, Tensors]:
    """A reader that has version 1; of version 2 there is an origin alone."""
    trained, memory = await trainer(c.hubs[:1], 1)
    await all_of(*(each.publish(1) for each in trained))
    ranks, _ = await rollout(c.hubs[1:2], "origin")
    weights, mine = await all_of_it(c.hubs[2])
    await all_of(weights.replicate(), *(each.replicate() for each in ranks))
    await all_of(*(new_version(trained, memory, rank, 2) for rank in range(TRAINERS)))
    await all_of(*(each.update() for each in ranks))
    await all_of(*(each.unpublish() for each in trained))
    assert holds(mine, 1)
    return weights, mine


async def test_a_staged_update_out_of_it_leaves_the_old_version_until_all_is_there() -> None:
    async with cluster("trainer", "origin", "reader", transports=["tcp"], options=HOSTED) as c:
        weights, mine = await with_the_next_version(c)
        seen = []

        async def before_write(info: VersionInfo) -> None:
            seen.append((info.version, holds(mine, 1)))

        report = await weights.update(2, staged=True, before_write=before_write)
        assert holds(mine, 2)
        assert seen == [(2, True)]
        assert read_from([report]) == {"origin"}


async def test_what_was_prefetched_out_of_it_is_copied() -> None:
    async with cluster("trainer", "origin", "reader", transports=["tcp"], options=HOSTED) as c:
        weights, mine = await with_the_next_version(c)
        report = await weights.prefetch()
        assert holds(mine, 1)
        assert read_from([report]) == {"origin"}
        assert (await weights.update()).bytes_read == 0
        assert holds(mine, 2)


@pytest.mark.parametrize("how", ["replicate", "update", "staged", "prefetch", "fetch"])
async def test_a_call_whose_source_leaves_in_mid_read_goes_over_to_it(how: str) -> None:
    """One call, which ends well; its `before_write` runs once."""
    seen = list[int]()
    with gated(0) as gate:
        gate.open()
        async with (
            cluster("trainer", "origin", "reader", transports=["tcp"], options=HOSTED) as c,
            anyio.create_task_group() as tasks,
        ):
            trained, memory = await trainer(c.hubs[:1], 1)
            await all_of(*(each.publish(1) for each in trained))
            ranks, _ = await rollout(c.hubs[1:2], "origin")
            weights, mine = await all_of_it(c.hubs[2])
            number = 1
            if how not in ("replicate", "fetch"):
                await weights.replicate()
                number = 2
                await all_of(*(new_version(trained, memory, rank, 2) for rank in range(TRAINERS)))
            await all_of(*(each.replicate() if number == 1 else each.update() for each in ranks))
            reports = list[FetchReport]()

            async def call() -> None:
                async def note(info: VersionInfo) -> None:
                    seen.append(info.version)

                if how == "fetch":
                    fetched = await c.hubs[2].fetch("m", rank=None)
                    assert holds({name: fetched[name].numpy() for name in SHAPES}, 1)
                    reports.append(fetched.report)
                elif how == "replicate":
                    reports.append(await weights.replicate())
                elif how == "prefetch":
                    reports.append(await weights.prefetch())
                else:
                    reports.append(await weights.update(staged=how == "staged", before_write=note))

            gate.close(3)
            tasks.start_soon(call)
            await until(lambda: gate.holds)
            await all_of(*(each.unpublish() for each in trained))
            gate.open()
        (report,) = reports
        assert report.version == number
        assert read_from([report]) == {"trainer", "origin"}
        assert how == "fetch" or holds(mine, 1 if how in ("prefetch", "replicate") else 2)
        assert sum(report.phases.values()) == pytest.approx(report.seconds)
        assert min(report.phases.values()) >= 0
        assert seen == ([2] if how in ("update", "staged") else [])
