"""Groups of eight ranks in one process, through two hubs: publish, fill, barrier, and a rank that
fails (G4, R6).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import anyio
import pytest

from tensorhub.api.weights import Weights
from tensorhub.errors import GroupAborted, RegistrationError
from tests.rig import Cluster, Tensors, all_of, cluster, handle_of, holds, tensors, until, write

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


async def mutate(rank: Weights) -> None:
    async with rank.mutate(2):
        pass


CALLS: dict[str, Callable[[Weights], Awaitable[Any]]] = {
    "publish": partial(publish, 2),
    "mutate": mutate,
    "replicate": Weights.replicate,
    "update": Weights.update,
}


@pytest.mark.filterwarnings("ignore::tensorhub.StaleWeightsWarning")
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("call", CALLS)
async def test_a_call_that_a_rank_refuses_by_itself_ends_on_the_other_ranks(
    call: str, is_first: bool
) -> None:
    """Before or after they have called; and the group goes on with its next call (G4)."""
    async with cluster("trainer", "one", "two") as c:
        sources = [
            await c.hubs[0].register("m", tensors(rank), group="p", rank=rank, world_size=2)
            for rank in range(2)
        ]
        await all_of(*[source.publish(1) for source in sources])
        memory = [dict(tensors()) for _ in range(2)]
        ranks = [
            await c.hubs[1 + rank].register("m", memory[rank], group="r", rank=rank, world_size=2)
            for rank in range(2)
        ]
        registered, memory[1]["b"] = memory[1]["b"], tensors(2)["b"]

        async def refused() -> None:
            with pytest.raises(RegistrationError, match="'b'"):
                await CALLS[call](ranks[1])

        async def aborted() -> None:
            with pytest.raises(
                GroupAborted, match=r"rank 1: .* raised RegistrationError"
            ) as caught:
                await CALLS[call](ranks[0])
            assert "'b'" in caught.value.causes[1]
            assert not caught.value.retryable

        if is_first:
            await refused()
            await aborted()
        else:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(aborted)
                member = handle_of(ranks[0]).member
                await until(lambda: member.running is not None and member.running.key is not None)
                tasks.start_soon(refused)
        memory[1]["b"] = registered
        await all_of(*[CALLS[call](rank) for rank in ranks])


@pytest.mark.filterwarnings("ignore::tensorhub.StaleWeightsWarning")
@pytest.mark.parametrize("first_call", ["replicate", "update"])
async def test_a_restarted_rank_joins_the_update_of_the_others(first_call: str) -> None:
    async with cluster("trainer", "one", "two", "two again") as c:
        memory = [tensors(rank) for rank in range(2)]
        sources = [
            await c.hubs[0].register("m", memory[rank], group="p", rank=rank, world_size=2)
            for rank in range(2)
        ]
        await all_of(*[source.publish(1) for source in sources])
        got = [tensors() for _ in range(3)]
        ranks = [
            await c.hubs[1 + at].register("m", got[at], group="r", rank=at, world_size=2)
            for at in range(2)
        ]
        await all_of(*[rank.update() for rank in ranks])
        await c.hubs[2].close()
        again = await c.hubs[3].register("m", got[2], group="r", rank=1, world_size=2)
        reports = await all_of(ranks[0].update(), CALLS[first_call](again))
        assert [(report.version, report.changed) for report in reports] == [(1, False), (1, True)]
        assert holds(got[2], 1)
        await all_of(*[mutate(source) for source in sources])
        reports = await all_of(ranks[0].update(at_least=2), again.update(at_least=2))
        assert [report.version for report in reports] == [2, 2]
