"""Groups of eight ranks in one process, through two hubs: publish, fill, barrier, and a rank that
fails (G4, R6).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio

from tensorhub.api.weights import Weights
from tensorhub.errors import GroupAborted
from tests.rig import Cluster, Tensors, cluster, holds, tensors, write

RANKS = 8


async def group(c: Cluster, name: str) -> tuple[list[Weights], list[Tensors]]:
    """Even ranks through one hub, odd ones through the other; each with bytes of its own."""
    memory = [tensors() for _ in range(RANKS)]
    ranks = [
        await c.hubs[rank % 2].register("m", memory[rank], group=name, rank=rank, world_size=RANKS)
        for rank in range(RANKS)
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
            assert [(report.version, report.changed) for report in reports] == [
                (version, True)
            ] * RANKS
            assert all(holds(mine, 10 * version + rank) for rank, mine in enumerate(got))
        reports = await each(readers, Weights.update)
        assert [report.changed for report in reports] == [False] * RANKS
