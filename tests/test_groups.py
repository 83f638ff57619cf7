"""Groups of eight ranks in one process, through two hubs: publish, fill, barrier, and a rank that fails (G4, R6)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import pytest

from tensorhub.api.weights import Weights
from tensorhub.errors import GroupAborted
from tests.rig import Cluster, Tensors, cluster, holds, tensors, write

RANKS = 8


async def group(c: Cluster, name: str) -> tuple[list[Weights], list[Tensors]]:
    """Even ranks through one hub, odd ones through the other; each with bytes of its own."""
    memory = [tensors() for _ in range(RANKS)]
    ranks = [
        await c.hubs[rank % 2].register("m", memory[rank], group=name, rank=rank, world_size=RANKS) for rank in range(RANKS)
    ]
    return ranks, memory


async def each(ranks: Sequence[Weights], call: Callable[[Weights], Awaitable[Any]]) -> list[Any]:
    """What each rank's call came to, all at the same time: its result or its error."""
    found: list[Any] = [None] * len(ranks)

    async def one(place: int, rank: Weights) -> None:
        try:
            found[place] = await call(rank)
        except GroupAborted as error:
            found[place] = error

    async with anyio.create_task_group() as tasks:
        for place, rank in enumerate(ranks):
            tasks.start_soon(one, place, rank)
    return found


async def publish(version: int, rank: Weights) -> None:
    await rank.publish(version)


async def test_eight_ranks_through_two_hubs_change_version_together() -> None:
    async with cluster("even", "odd") as c:
        sources, bytes_of = await group(c, "sources")
        readers, got = await group(c, "readers")
        for version in (1, 2):
            for rank, source in enumerate(sources):
                if version > 1:
                    await source.unpublish()
                write(bytes_of[rank], 10 * version + rank)
            await each(sources, partial(publish, version))
            reports = await each(readers, Weights.update)
            assert [(report.version, report.changed) for report in reports] == [(version, True)] * RANKS
            assert all(holds(mine, 10 * version + rank) for rank, mine in enumerate(got))
        reports = await each(readers, Weights.update)
        assert [report.changed for report in reports] == [False] * RANKS


async def test_one_of_eight_whose_hook_raises_ends_it_for_all_with_everything_intact() -> None:
    async with cluster("even", "odd") as c:
        sources, bytes_of = await group(c, "sources")
        readers, got = await group(c, "readers")
        for version in (1, 2):
            for rank, source in enumerate(sources):
                if version > 1:
                    await source.unpublish()
                write(bytes_of[rank], 10 * version + rank)
            await each(sources, partial(publish, version))
            if version == 1:
                await each(readers, Weights.update)

        async def update(rank: Weights) -> object:
            async def pause(_: object) -> None:
                if rank is readers[5]:
                    raise RuntimeError("engine 5 does not pause")

            if rank is not readers[5]:
                return await rank.update(before_write=pause)
            with pytest.raises(RuntimeError, match="engine 5 does not pause"):
                await rank.update(before_write=pause)
            return None

        errors = await each(readers, update)
        assert errors.pop(5) is None
        for error in errors:
            assert isinstance(error, GroupAborted)
            assert (set(error.causes), error.memory) == ({5}, "intact")
        assert [(reader.state, reader.version) for reader in readers] == [("ready", 1)] * RANKS
        assert all(holds(mine, 10 + rank) for rank, mine in enumerate(got))
        reports = await each(readers, Weights.update)
        assert [report.version for report in reports] == [2] * RANKS


async def test_two_groups_of_eight_in_one_process_do_not_wait_for_one_another() -> None:
    async with cluster("even", "odd") as c:
        sources, bytes_of = await group(c, "sources")
        front, got_front = await group(c, "front")
        back, got_back = await group(c, "back")
        for rank, mine in enumerate(bytes_of):
            write(mine, rank)
        await each(sources, lambda rank: rank.publish(1))
        async with anyio.create_task_group() as tasks:
            for early in front[:-1]:
                tasks.start_soon(early.replicate)  # one rank has not called yet
            reports = await each(back, Weights.replicate)
            assert [report.version for report in reports] == [1] * RANKS
            assert not any(rank.version for rank in front)
            tasks.start_soon(front[-1].replicate)
        for got in (got_front, got_back):
            assert all(holds(mine, rank) for rank, mine in enumerate(got))
