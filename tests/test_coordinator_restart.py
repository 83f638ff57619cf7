"""A coordinator that restarts under real workers: with its state everything goes on, without it everybody is told."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest

import tensorhub
from tensorhub.hub import Hub
from tensorhub.types import FetchReport, VersionInfo, parse_address
from tensorhub.weights import Weights
from tests.rig import CHUNK_BYTES, CHUNKS, OPTIONS, connect, gated, holds, nothing_left, tensors, until, write

NBYTES = CHUNKS * CHUNK_BYTES


class Restartable:
    """A coordinator at one address; without a `state_dir` each one is a new cluster."""

    def __init__(self, state_dir: Path | None) -> None:
        self.address = ""
        self._state_dir = state_dir
        self._stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        port = parse_address(self.address)[1] if self.address else 0
        serving = tensorhub.serve(port=port, state_dir=self._state_dir, token="", options=OPTIONS)
        self.address = (await self._stack.enter_async_context(serving)).address

    async def stop(self) -> None:
        await self._stack.aclose()

    async def restart(self, *hubs: Hub) -> None:
        """Returns when these hubs know the new one."""
        await self.stop()
        await until(lambda: all("offline" in repr(hub) for hub in hubs))
        await self.start()
        await until(lambda: all("online" in repr(hub) for hub in hubs))


@contextlib.asynccontextmanager
async def cluster(*names: str, state_dir: Path | None = None) -> AsyncIterator[tuple[Restartable, list[Hub]]]:
    async with nothing_left(), contextlib.AsyncExitStack() as stack:
        coordinator = Restartable(state_dir)
        await coordinator.start()
        stack.push_async_callback(coordinator.stop)
        yield coordinator, [await stack.enter_async_context(connect(coordinator.address, name)) for name in names]


async def ranks_of(hubs: list[Hub], group: str, content: int | None = None) -> list[Weights]:
    """Ranks spread over the hubs."""
    world_size = 4
    return [
        await hubs[rank % len(hubs)].register("m", tensors(content), group=group, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]


async def reports_of(ranks: list[Weights], started: anyio.Event) -> list[FetchReport]:
    found: list[FetchReport] = []

    async def fill(rank: Weights) -> None:
        found.append(await rank.replicate())

    async with anyio.create_task_group() as tasks:
        for rank in ranks:
            tasks.start_soon(fill, rank)
        started.set()
    return found


@pytest.mark.parametrize("where", ["one rank", "four ranks", "fetch"])
async def test_fills_in_mid_read_go_on(where: str, tmp_path: Path) -> None:
    """Nothing that was verified is read again, and the caller notices nothing."""
    with gated(3) as gate:
        async with cluster("trainer", "one", "two", state_dir=tmp_path) as (coordinator, hubs):
            ranks = await ranks_of(hubs[1:], "readers")
            source = await hubs[0].register("m", tensors(1))
            if where == "four ranks":
                await source.close()
                sources = await ranks_of(hubs[:1], "trainers", 1)
                async with anyio.create_task_group() as tasks:
                    for each in sources:
                        tasks.start_soon(each.publish, 1)
            else:
                await source.publish(1)
                ranks = [await hubs[1].register("m", tensors())]
            found: list[FetchReport] = []

            async def fill() -> None:
                if where == "fetch":
                    fetched = await hubs[1].fetch("m")
                    assert holds({name: tensor.numpy() for name, tensor in fetched.items()}, 1)
                    found.append(fetched.report)
                else:
                    found.extend(await reports_of(ranks, anyio.Event()))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(fill)
                await until(lambda: gate.holds)
                await coordinator.restart(*hubs)
                gate.open()
            assert [(r.version, r.bytes_read, r.reread_bytes) for r in found] == [(1, NBYTES, 0)] * len(found)
            assert len(found) == (4 if where == "four ranks" else 1)


async def test_before_write_runs_once_though_its_coordinator_is_another_one_when_it_returns(tmp_path: Path) -> None:
    async with cluster("trainer", "reader", state_dir=tmp_path) as (coordinator, hubs):
        mine = tensors(1)
        source = await hubs[0].register("m", mine)
        await source.publish(1)
        weights = await hubs[1].register("m", tensors())
        await weights.replicate()
        async with source.mutate(2):
            write(mine, 2)
        told: list[int] = []

        async def pause(info: VersionInfo) -> None:
            told.append(info.version)
            await coordinator.restart(*hubs)

        report = await weights.update(before_write=pause)
        assert (report.version, told, weights.version) == (2, [2], 2)
