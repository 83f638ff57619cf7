"""A rank without tensors, as a pipeline's stage without an adapter, takes part in all that its
group does.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import pytest
import torch

from tensorhub import Options
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import RegistrationError
from tensorhub.layouts.views import source
from tests.rig import (
    CHUNK_BYTES,
    OPTIONS,
    WAIT_S,
    Cluster,
    all_of,
    cluster,
    equal,
    holds,
    tensors,
    write,
)

STAGED = Options(
    op_timeout_s=WAIT_S, chunk_bytes=CHUNK_BYTES, drain_grace_s=0.2, host_memory_bytes=2**24
)
NONE: Mapping[str, Any] = {}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def group(
    hubs: Sequence[Hub],
    name: str,
    ranks: Sequence[Mapping[str, Any]],
    sources: Sequence[Any] | None = None,
) -> list[Weights]:
    said = sources or [None] * len(ranks)
    settings = {"group": name, "world_size": len(ranks)}
    return [
        await hub.register("m", its, rank=rank, sources=what, **settings)  # type: ignore[arg-type]
        for rank, (hub, its, what) in enumerate(zip(hubs, ranks, said, strict=True))
    ]


def shapes(of: Mapping[str, Any]) -> dict[str, object]:
    return {name: source(name, shape=tensor.shape) for name, tensor in of.items()}


async def publish(ranks: Sequence[Weights], version: int) -> None:
    await all_of(*(rank.publish(version) for rank in ranks))


@pytest.mark.parametrize("where", [0, 1, 2])
async def test_ranks_of_the_same_layout(where: int) -> None:
    names = [f"{side}{rank}" for side in "tr" for rank in range(3)]
    async with cluster(*names, options=STAGED) as c:
        given: list[Mapping[str, Any]] = [tensors(5) for _ in range(3)]
        wanted: list[Mapping[str, Any]] = [tensors() for _ in range(3)]
        given[where] = wanted[where] = NONE
        trainer, rollout = await group(c.hubs[:3], "t", given), await group(c.hubs[3:], "r", wanted)
        await publish(trainer, 1)
        reports = await all_of(*(each.replicate(1) for each in rollout))
        assert [each.version for each in reports] == [1, 1, 1]
        assert reports[where].bytes_read == 0
        assert [each.state for each in rollout] == ["ready"] * 3
        assert all(holds(its, 5) for its in wanted if its)
        await all_of(*(each.unpublish() for each in trainer))
        for its in given:
            write(its, 6)
        await publish(trainer, 2)
        await all_of(*(each.prefetch() for each in rollout))
        await all_of(*(each.update(staged=True) for each in rollout))
        assert all(holds(its, 6) for its in wanted if its)
        fetched = await c.hubs[0].fetch("m", rank=where)
        assert dict(fetched) == {}
        await c.hubs[0].retain("m", latest=1)
        await all_of(*(each.close() for each in trainer))
        again = await c.hubs[0].register(
            "m", tensors(), group="late", rank=(where + 1) % 3, world_size=3
        )
        assert again.state == "empty"
        assert [each.version for each in rollout] == [2, 2, 2]


@contextlib.asynccontextmanager
async def trainer_and_rollout(*, packed: int = 0) -> AsyncIterator[Cluster]:
    options = Options(
        op_timeout_s=WAIT_S, chunk_bytes=CHUNK_BYTES, drain_grace_s=0.2, pack_bytes=packed
    )
    async with cluster("t0", "t1", "r0", "r1", options=options) as c:
        yield c


@pytest.mark.parametrize("packed", [0, 2**20])
async def test_the_whole_model_of_a_group_with_an_empty_rank(packed: int) -> None:
    async with trainer_and_rollout(packed=packed) as c:
        given = tensors(5)
        await publish(await group(c.hubs[:2], "t", [NONE, given], [None, shapes(given)]), 1)
        fetched = await c.hubs[2].fetch("m", rank=None)
        assert {name: bytes(tensor.numpy().tobytes()) for name, tensor in fetched.items()} == {
            name: tensor.tobytes() for name, tensor in given.items()
        }
        mine = tensors()
        reader = await c.hubs[2].register("m", mine)
        assert (await c.hubs[3].plan("m", mine)).nbytes == sum(
            tensor.nbytes for tensor in mine.values()
        )
        await reader.replicate(1)
        assert equal(mine, given)


async def test_a_reading_group_with_an_empty_rank_and_another_layout_than_the_trainer() -> None:
    async with trainer_and_rollout() as c:
        given, mine = tensors(5), tensors()
        trainer = await c.hubs[0].register("m", given)
        await trainer.publish(1)
        rollout = await group(
            c.hubs[2:], "r", [mine, NONE], [{name: source(name) for name in mine}, None]
        )
        await all_of(*(each.replicate(1) for each in rollout))
        assert equal(mine, given)
        await trainer.unpublish()
        write(given, 6)
        await trainer.publish(2)
        reports = await all_of(*(each.update() for each in rollout))
        assert equal(mine, given)
        assert reports[1].bytes_read == 0
        await trainer.close()  # the group serves what it has
        other = tensors()
        late = await group(
            c.hubs[:2], "late", [other, NONE], [{name: source(name) for name in other}, None]
        )
        await all_of(*(each.replicate(2) for each in late))
        assert equal(other, given)


async def test_a_module_without_parameters() -> None:
    async with cluster("t0", "t1", options=OPTIONS) as c:
        adapter, nothing = torch.nn.Linear(4, 4), torch.nn.ReLU()
        settings: dict[str, Any] = {"group": "t", "world_size": 2}
        ranks = [
            await c.hubs[0].register("m", adapter, rank=0, **settings),
            await c.hubs[1].register("m", nothing, rank=1, **settings),
        ]
        await publish(ranks, 1)

        async def step(rank: Weights, tensor: torch.Tensor | None) -> None:
            async with rank.mutate(2):
                if tensor is not None:
                    tensor.data.add_(1)

        await all_of(step(ranks[0], adapter.weight), step(ranks[1], None))
        assert [each.version for each in ranks] == [2, 2]
        nothing.register_buffer("late", torch.zeros(3))
        with pytest.raises(RegistrationError, match="'late': the module did not have it"):
            await ranks[1].publish(3)


async def test_a_whole_model_without_tensors_is_refused() -> None:
    async with cluster("worker") as c:
        empty: list[Any] = [{}, torch.nn.ReLU(), {"nested": {}}]
        for nothing in empty:
            with pytest.raises(RegistrationError, match="there are none; give at least one"):
                await c.hubs[0].register("m", nothing)
            with pytest.raises(RegistrationError, match="there are none; give at least one"):
                await c.hubs[0].plan("m", nothing)
