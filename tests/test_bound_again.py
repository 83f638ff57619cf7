"""R12: a call by selector whose version goes away goes on with the version that the selector names
next (`rebinds`).
"""

from __future__ import annotations

import anyio
import pytest

from tensorhub.errors import VersionUnavailable
from tensorhub.types import FetchReport
from tests.rig import (
    all_of,
    cluster,
    connect,
    gated,
    holds,
    published,
    ranks_of,
    tensors,
    until,
    write,
)
from tests.runtime.data_rig import waited_out_s


@pytest.mark.parametrize(("selector", "number"), [("latest", 3), ("latest-1", 2), ("available", 3)])
async def test_the_trainer_moves_on_in_mid_read(selector: str, number: int) -> None:
    async with cluster("trainer", "older") as c:
        with gated(2) as gate:
            async with connect(c.address, "reader") as hub:
                memory, older = tensors(1), tensors(0)
                source, keeper = (
                    await c.hubs[0].register("m", memory),
                    await c.hubs[1].register("m", older),
                )
                await source.publish(1)
                if selector == "latest-1":
                    await keeper.publish(2)
                mine = tensors()
                weights, reports = await hub.register("m", mine), list[FetchReport]()

                async def fill() -> None:
                    reports.append(await weights.replicate(selector))

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(fill)
                    await until(lambda: gate.holds)
                    await source.unpublish()
                    write(memory, 3)
                    await source.publish(3)
                    gate.open()
                (report,) = reports
                assert (report.version, report.rebinds) == (number, 1)
                assert holds(mine, 3 if number == 3 else 0)


async def test_all_ranks_of_a_group_go_on_with_one_version() -> None:
    async with cluster("trainer0", "trainer1") as c:
        with gated(2) as gate:
            async with (
                connect(c.address, "reader0") as first,
                connect(c.address, "reader1") as second,
            ):
                memories = [tensors(1), tensors(1)]
                sources = await ranks_of(c.hubs, memories, "t")
                await all_of(*(source.publish(1) for source in sources))
                mine = [tensors(), tensors()]
                weights = await ranks_of((first, second), mine, "r")
                reports = list[FetchReport]()

                async def fill(rank: int) -> None:
                    reports.append(await weights[rank].replicate("latest"))

                async def step(rank: int) -> None:
                    async with sources[rank].mutate(2):
                        write(memories[rank], 2)

                async with anyio.create_task_group() as tasks:
                    for rank in range(2):
                        tasks.start_soon(fill, rank)
                    await until(lambda: gate.holds)
                    async with anyio.create_task_group() as steps:
                        for rank in range(2):
                            steps.start_soon(step, rank)
                    gate.open()
                assert [(report.version, report.rebinds) for report in reports] == [(2, 1)] * 2
                assert all(holds(tensor, 2) for tensor in mine)


async def test_before_write_runs_once_and_is_given_the_first_version() -> None:
    async with cluster("trainer", "reader") as c:
        memory, mine, told = tensors(1), tensors(0), list[int]()
        source = await c.hubs[0].register("m", memory)
        weights = await c.hubs[1].register("m", mine)
        await source.publish(1)

        async def before_write(info: object) -> None:
            told.append(getattr(info, "version", 0))
            async with source.mutate(2):
                write(memory, 2)

        report = await weights.update("latest", before_write=before_write)
        assert (report.version, report.rebinds, told) == (2, 1, [1])
        assert holds(mine, 2)


async def test_without_a_newer_version_it_waits_until_its_deadline() -> None:
    async with cluster("trainer") as c:
        with gated(2) as gate:
            async with connect(c.address, "reader") as hub:
                source = await published(c.hubs[0])
                weights = await hub.register("m", tensors())

                async def fill() -> None:
                    with pytest.raises(
                        VersionUnavailable, match="has lost its last source"
                    ) as caught:
                        await weights.replicate("latest", timeout=waited_out_s(2))
                    assert (caught.value.memory, caught.value.retryable) == ("torn", True)

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(fill)
                    await until(lambda: gate.holds)
                    await source.unpublish()
