"""What a FetchReport says is true: its phases are wall time and add up to the call; its bytes are
those of its sources.
"""

from __future__ import annotations

import math
import time

import anyio
import torch

from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.types import FetchReport, VersionInfo
from tests.rig import CHUNK_BYTES, CHUNKS, Tensors, cluster, connect, gated, tensors, until, write

PHASES = ["commit", "resolve", "transfer", "unpack", "verify", "wait"]


def check(report: FetchReport) -> None:
    assert sorted(report.phases) == (PHASES if report.changed else ["resolve"])
    assert all(seconds >= 0 for seconds in report.phases.values()), report
    assert math.isclose(sum(report.phases.values()), report.seconds, rel_tol=1e-6, abs_tol=1e-6), (
        report
    )
    assert report.bytes_read == sum(source.bytes_read for source in report.sources)
    assert report.reread_bytes == 0
    assert all(source.seconds <= report.seconds + 1e-6 for source in report.sources), report


async def published(hub: Hub, version: int = 1) -> tuple[Weights, Tensors]:
    source = tensors(version)
    weights = await hub.register("m", source)
    await weights.publish(version)
    return weights, source


async def test_replicate_update_fetch_and_an_update_that_changes_nothing() -> None:
    async with cluster("trainer", "reader") as c:
        source, memory = await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())
        check(await weights.replicate())
        same = await weights.update()
        check(same)
        assert (same.changed, same.bytes_read, same.sources) == (False, 0, ())
        async with source.mutate(2):
            write(memory, 2)
        check(await weights.update())
        check((await c.hubs[1].fetch("m")).report)
        nothing = (await c.hubs[1].fetch("m", names="a")).report
        check(nothing)
        assert nothing.bytes_read == 4 * CHUNK_BYTES


async def test_an_empty_tensor_is_no_work() -> None:
    async with cluster("trainer", "reader") as c:
        weights = await c.hubs[0].register("m", {"empty": torch.empty(0)})
        await weights.publish(1)
        report = (await c.hubs[1].fetch("m")).report
        check(report)
        assert (report.bytes_read, report.phases["transfer"], report.changed) == (0, 0, True)


async def test_before_write_is_waiting() -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        weights = await c.hubs[1].register("m", tensors())
        paused: list[float] = []

        async def before_write(info: VersionInfo) -> None:
            started = time.monotonic()
            await anyio.sleep(0.05)
            paused.append(time.monotonic() - started)

        report = await weights.update(before_write=before_write)
        check(report)
        assert report.phases["wait"] >= paused[0]


async def test_a_source_that_is_held_and_left_counts_as_waiting() -> None:
    async with cluster("trainer", "keeper") as c:
        source, _ = await published(c.hubs[0])
        keeper = await c.hubs[1].register("m", tensors())
        await keeper.replicate()
        with gated(2) as gate:
            async with connect(c.address, "reader") as reader, anyio.create_task_group() as tasks:
                found: list[FetchReport] = []

                async def fetch() -> None:
                    found.append((await reader.fetch("m")).report)

                tasks.start_soon(fetch)
                await until(lambda: gate.holds)
                (lease,) = (await reader.describe("m")).leases
                await (source if lease.source == "trainer" else keeper).unpublish()
                gate.open()
        (report,) = found
        check(report)
        assert {used.name for used in report.sources} == {"trainer", "keeper"}
        assert report.bytes_read >= CHUNKS * CHUNK_BYTES
