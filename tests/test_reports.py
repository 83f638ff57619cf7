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
from tensorhub.runtime.data.source_lane import KINDS
from tensorhub.types import DeltaUse, FetchReport, Purpose, SourceReport, VersionInfo
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


def test_a_source_has_a_kind_for_each_purpose_of_memory() -> None:
    assert KINDS.keys() >= set(Purpose)


def test_what_its_sources_say_together() -> None:
    assert (FetchReport(1, False).changed_words, FetchReport(1, False).bytes_by_kind) == (None, {})
    live = SourceReport("a", "tcp", 10, 1.0, "used", words=100, words_changed=1)
    seed = SourceReport("b", "tcp", 20, 1.0, "used", kind="seed", words=300, words_changed=7)
    report = FetchReport(1, True, sources=(live, seed, SourceReport("c", "cma", 5, 1.0, "used")))
    assert report.changed_words == 0.02
    assert report.bytes_by_kind == {"live": 15, "seed": 20}


async def test_on_one_host_no_delta_is_asked_for() -> None:
    async with cluster("trainer", "reader") as c:
        await published(c.hubs[0])
        (source,) = (await (await c.hubs[1].register("m", tensors())).replicate()).sources
        assert (source.kind, source.deltas) == ("live", DeltaUse.SAME_HOST)


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
