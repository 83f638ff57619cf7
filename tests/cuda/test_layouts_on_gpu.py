"""Reads across layouts on a real GPU. What a reader ends up with is compared with whole tensors,
cut and joined by numpy.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.cuda.cupy_device import CudaDevice
from tensorhub.cuda.kernels import spread_rows
from tensorhub.memory.addresses import copy_bytes
from tensorhub.testing.strided_target import bytes_of
from tensorhub.types import Options
from tests.rig import all_of, cluster
from tests.test_resharding import (
    ROLLOUTS,
    SHAPES,
    TRAINERS,
    Tensors,
    engine,
    expected,
    rows,
    shard,
    whole,
)

pytestmark = [pytest.mark.anyio, pytest.mark.gpu]
OPTIONS = Options(op_timeout_s=60, chunk_bytes=2**16, host_memory_bytes=2**30)
OnGpu = dict[str, torch.Tensor]


def on_gpu(tensors: Tensors) -> OnGpu:
    return {name: torch.from_numpy(tensor).cuda() for name, tensor in tensors.items()}


def are_equal(held: Sequence[OnGpu], wanted: Sequence[Tensors]) -> bool:
    return all(
        torch.equal(mine[name].cpu(), torch.from_numpy(tensor))
        for mine, theirs in zip(held, wanted, strict=True)
        for name, tensor in theirs.items()
    )


async def trainer(hubs: Sequence[Hub]) -> tuple[list[Weights], list[OnGpu]]:
    """Cut by rows, some of them unevenly; a rank on each of these workers, in turn."""
    held = [on_gpu(shard(1, rank)) for rank in range(TRAINERS)]
    weights = []
    for rank, tensors in enumerate(held):
        sources = {
            name: tensorhub.source(name, shape=shape)[rows(name, rank)]
            for name, shape in SHAPES.items()
        }
        registering = hubs[rank % len(hubs)].register(
            "m", tensors, group="trainer", rank=rank, world_size=TRAINERS, sources=sources
        )
        weights.append(await registering)
    return weights, held


async def rollout(hubs: Sequence[Hub], group: str) -> tuple[list[Weights], list[OnGpu]]:
    """Cut by columns, fused and padded."""
    weights, held = [], []
    for rank in range(ROLLOUTS):
        tensors, sources = engine(rank)
        held.append(on_gpu(tensors))
        registering = hubs[rank % len(hubs)].register(
            "m", held[-1], sources=sources, group=group, rank=rank, world_size=ROLLOUTS
        )
        weights.append(await registering)
    return weights, held


def wanted(content: int) -> list[Tensors]:
    return [expected(content, rank) for rank in range(ROLLOUTS)]


async def write(weights: Sequence[Weights], held: Sequence[OnGpu], content: int) -> None:
    async def write_one(rank: int) -> None:
        async with weights[rank].mutate(content):
            for name, tensor in shard(content, rank).items():
                held[rank][name].copy_(torch.from_numpy(tensor))

    await all_of(*(write_one(rank) for rank in range(TRAINERS)))


def test_runs_are_gathered_and_scattered(device: CudaDevice) -> None:
    chance = random.Random(11)
    for unit in (1, 2, 4, 8, 16):
        run, loops = 3 * unit, ((5, 900 * unit), (7, -100 * unit), (9, 4 * unit), (2, 50 * unit))
        starts = [700 * unit]
        for times, apart in loops:
            starts = [at + n * apart for at in starts for n in range(times)]
        content = chance.randbytes(max(starts) + run)
        spread, together = device.allocate(len(content)), device.allocate(len(starts) * run)
        copy_bytes(memoryview(bytearray(content)), spread)
        table = list(spread_rows(0, [spread.address + 700 * unit], loops, run))
        device.relay(together.address, gathered=table)
        assert bytes_of(together) == b"".join([content[at : at + run] for at in starts])
        changed, rest = chance.randbytes(together.nbytes), bytearray(content)
        for number, at in enumerate(starts):
            rest[at : at + run] = changed[number * run : (number + 1) * run]
        copy_bytes(memoryview(bytearray(changed)), together)
        device.relay(together.address, scattered=table)
        assert bytes_of(spread) == rest


@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp"])
async def test_rows_become_columns_and_fused_tensors(transport: str) -> None:
    async with cluster("a", "b", "one", "two", options=OPTIONS, transports=[transport]) as c:
        (trained, held), (weights, mine) = (
            await trainer(c.hubs[:2]),
            await rollout(c.hubs[2:], "rollout"),
        )
        await all_of(*(each.publish(1) for each in trained))
        reports = await all_of(*(each.replicate() for each in weights))
        assert are_equal(mine, wanted(1))
        assert {source.transport for report in reports for source in report.sources} == {transport}
        await write(trained, held, 2)
        await all_of(*(each.update(2) for each in weights))
        assert are_equal(mine, wanted(2))


@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp"])
async def test_the_next_group_reads_from_the_first_and_a_whole_copy_is_made_of_shards(
    transport: str,
) -> None:
    async with cluster("a", "one", "two", options=OPTIONS, transports=[transport]) as c:
        (trained, _), (weights, _) = await trainer(c.hubs[:1]), await rollout(c.hubs[1:2], "first")
        await all_of(*(each.publish(1) for each in trained))
        await all_of(*(each.replicate() for each in weights))
        fetched = await c.hubs[2].fetch("m", rank=None, device="cuda")
        assert are_equal([dict(fetched)], [whole(1)])
        await all_of(*(each.close() for each in trained))
        others, theirs = await rollout(c.hubs[2:], "second")
        await all_of(*(each.replicate() for each in others))
        assert are_equal(theirs, wanted(1))


async def test_host_copies_of_another_layout_fill_the_gpu() -> None:
    async with cluster("a", "one", options=OPTIONS) as c:
        (trained, held), (weights, mine) = (
            await trainer(c.hubs[:1]),
            await rollout(c.hubs[1:], "rollout"),
        )
        await all_of(*(each.publish(1) for each in trained))
        await all_of(*(each.prefetch() for each in weights))
        reports = await all_of(*(each.update() for each in weights))
        assert [report.bytes_read for report in reports] == [0, 0]
        assert are_equal(mine, wanted(1))
        await write(trained, held, 2)
        await all_of(*(each.update(2, staged=True) for each in weights))
        assert are_equal(mine, wanted(2))


@pytest.mark.parametrize("transport", ["cuda_ipc", "tcp"])
async def test_odd_columns_of_single_bytes(transport: str) -> None:
    held = torch.randint(0, 256, (501, 77), dtype=torch.uint8, device="cuda")
    async with cluster("a", "b", options=OPTIONS, transports=[transport]) as c:
        published = await c.hubs[0].register(
            "m", {"w": held}, sources={"w": tensorhub.source("w", shape=(501, 77))}
        )
        await published.publish(1)
        for first, end in ((0, 1), (3, 50), (13, 77)):
            mine = torch.zeros(501, end - first, dtype=torch.uint8, device="cuda")
            sources = {"w": tensorhub.source("w")[:, first:end]}
            weights = await c.hubs[1].register("m", {"w": mine}, sources=sources, partial=True)
            await weights.replicate()
            assert torch.equal(mine, held[:, first:end])
            await weights.close()
