"""What a plan says that would be read is what is read, and what reports say that was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.errors import InvalidValue, ManifestMismatch, RegistrationError, VersionUnavailable
from tensorhub.model.read_plan import PlannedSource
from tensorhub.types import FetchReport, VersionInfo
from tests.rig import all_of, cluster
from tests.test_resharding import (
    PAD,
    ROLLOUTS,
    SHAPES,
    TRAINERS,
    engine,
    expected,
    rollout,
    whole,
    world,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def plans(hub: Hub, *, meta: bool = False) -> list[tensorhub.ReadPlan]:
    """Of each rank of the rollout."""
    found = []
    for rank in range(ROLLOUTS):
        tensors, sources = engine(rank)
        shapes = {
            name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()
        }
        given: Any = shapes if meta else tensors
        found.append(await hub.plan("m", given, rank=rank, world_size=ROLLOUTS, sources=sources))
    return found


def read(report: FetchReport) -> list[tuple[int | None, int, int, int]]:
    """Of each published shard: which, cells, runs, bytes."""
    return sorted(
        (each.shard, each.cells, each.runs, each.bytes_read)
        for each in report.sources
        if each.bytes_read
    )


def said(plan: tensorhub.ReadPlan) -> list[tuple[int | None, int, int, int]]:
    return sorted((each.ranks[0], each.cells, each.runs, each.nbytes) for each in plan.sources)


async def test_a_fill_reads_what_was_planned_and_its_report_says_so() -> None:
    async with world("one", "two") as (c, _, _):
        before = await plans(c.hubs[2])
        assert await plans(c.hubs[3], meta=True) == before
        weights, _ = await rollout(c.hubs[2:], "rollout")
        reports = await all_of(*(each.replicate() for each in weights))
        assert [said(plan) for plan in before] == [read(report) for report in reports]
        for rank, (plan, report) in enumerate(zip(before, reports, strict=True)):
            assert (plan.cells, plan.runs, plan.nbytes) == (
                report.cells,
                report.runs,
                report.bytes_read,
            )
            assert report.bytes_across == report.bytes_read
            assert plan.nbytes == sum(
                int((tensor != PAD).sum()) * 4 for tensor in expected(1, rank).values()
            )
            assert (plan.excess_nbytes, plan.alike, plan.rank, plan.world_size) == (
                0,
                (),
                rank,
                ROLLOUTS,
            )
            assert {worker for each in plan.sources for worker in each.workers} == {
                "trainer-0",
                "trainer-1",
            }
            assert sum(each.shard_nbytes for each in plan.sources) == sum(
                tensor.nbytes for tensor in whole(1).values()
            )


def test_a_plan_counts_what_is_read_of_all_sources() -> None:
    sources = (
        PlannedSource((0,), ("a",), 1, 2, 3, 40, 50),
        PlannedSource((1,), (), 10, 20, 30, 400, 500),
    )
    plan = tensorhub.ReadPlan(VersionInfo("m", 1, "c", 0, 2), "own", 0, 1, 430, sources)
    assert (plan.chunks, plan.cells, plan.runs) == (11, 22, 33)
    assert (plan.nbytes, plan.excess_nbytes) == (440, 10)


async def test_the_whole_model_and_parts_of_it_are_planned_without_tensors() -> None:
    async with world("one") as (c, _, _):
        plan = await c.hubs[2].plan("m")
        assert (plan.nbytes, len(plan.sources)) == (
            4 * sum(map(int, map(np.prod, SHAPES.values()))),
            TRAINERS,
        )
        fetched = await c.hubs[2].fetch("m", rank=None)
        assert said(plan) == read(fetched.report)
        some = await c.hubs[2].plan("m", names=["q", "*n*"])
        assert some.nbytes == sum(int(np.prod(SHAPES[name])) * 4 for name in ("q", "norm", "down"))


async def test_whoever_has_the_readers_layout_is_named() -> None:
    async with cluster("trainer", "one", "two", transports=["tcp"]) as c:
        made = await c.hubs[0].register("m", {"w": np.zeros((4, 4), np.float32)})
        await made.publish(1)
        sources = {"half": tensorhub.source("w")[:2]}
        reader = await c.hubs[1].register(
            "m", {"half": np.zeros((2, 4), np.float32)}, sources=sources, partial=True
        )
        await reader.replicate()
        meta = torch.empty(2, 4, device="meta")
        plan = await c.hubs[2].plan("m", {"half": meta}, 1, sources=sources, partial=True)
        assert (plan.alike, plan.nbytes, plan.version.version) == (("one",), 32, 1)
        assert plan.sources[0].workers == ("trainer",)
        tied: Sequence[tensorhub.ReadPlan] = [await c.hubs[2].plan("m", {"w": torch.zeros(4, 4)})]
        # its layout is the published one
        assert [(each.nbytes, each.alike) for each in tied] == [(64, ())]


async def test_what_a_fill_would_refuse_is_refused() -> None:
    async with world("one") as (c, _, _):
        hub = c.hubs[2]
        with pytest.raises(VersionUnavailable):
            await hub.plan("m", selector=2)
        with pytest.raises(VersionUnavailable):
            await hub.plan("nothing")
        with pytest.raises(ManifestMismatch, match=r"tensor 'q' .* is read by no rank"):
            await hub.plan("m", {"norm": torch.empty(3, device="meta")})
        with pytest.raises(ManifestMismatch, match="there are"):
            await hub.plan("m", names="x*")
        with pytest.raises(RegistrationError, match="cannot be registered"):
            await hub.plan(
                "m",
                {"norm": torch.empty(6, device="cpu")[::2]},
                sources={"gone": tensorhub.source("q")},
            )
        with pytest.raises(RegistrationError, match="there are none"):
            await hub.plan("m", {})
        wrong: list[dict[str, Any]] = [
            {"rank": 1, "world_size": 2},
            {"partial": True},
            {"sources": {}},
            {"names": 3},
        ]
        for arguments in wrong:
            with pytest.raises((InvalidValue, tensorhub.InvalidType)):
                await hub.plan("m", **arguments)
        with pytest.raises(InvalidValue, match="names="):
            await hub.plan("m", {"norm": torch.empty(3)}, names="q")
