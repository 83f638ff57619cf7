"""A converted copy is what is published: cast, fused, tied as the original, in two buffers that
take turns.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

import anyio
import pytest
import torch
from torch import nn

import tensorhub
from tensorhub.conversion import Conversion, ConvertedWeights, cast, register_converted
from tensorhub.errors import (
    GroupAborted,
    InvalidType,
    InvalidValue,
    RegistrationError,
    StateError,
    VersionConflict,
    VersionUnavailable,
)
from tests.rig import CHUNK_BYTES, OPTIONS, all_of, cluster, gated, until

SIZE = 4 * CHUNK_BYTES  # elements


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Parameter(torch.zeros(SIZE))
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros(3, dtype=torch.int64))

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.body.fill_(value)
            self.embed.weight.fill_(value)
            self.get_buffer("steps").fill_(int(value))


def zeros(dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    state = Tied().state_dict()
    return {
        n: torch.zeros_like(t, dtype=dtype if t.is_floating_point() else t.dtype)
        for n, t in state.items()
    }


def holds(tensors: Mapping[str, torch.Tensor], value: float) -> bool:
    return all(
        bool(tensor.eq(int(value) if name == "steps" else value).all())
        for name, tensor in tensors.items()
    )


@pytest.mark.anyio
async def test_a_cast_copy_is_published_and_the_masters_may_change_meanwhile() -> None:
    async with cluster("trainer", "rollout") as c:
        trainer, rollout = c.hubs
        model, held = Tied(), zeros()
        weights = await register_converted(
            trainer, "actor", cast(model, torch.bfloat16), group="trainer"
        )
        model.set(1.5)
        report = await weights.publish(1)
        # what is tied is there once
        assert (report.version, report.nbytes, weights.version) == (1, 2 * (SIZE + 24) + 24, 1)
        model.set(2.5)  # the masters are nobody's but the trainer's
        reader = await rollout.register("actor", held)
        assert (await reader.replicate()).version == 1
        assert holds(held, 1.5)
        await weights.publish(2)
        assert (await reader.update()).version == 2
        assert holds(held, 2.5)
        for version in (3, 4, 5):
            model.set(version)
            await weights.publish(version)
        assert weights.version == 5
        assert (await reader.update()).version == 5
        assert holds(held, 5)


@pytest.mark.anyio
async def test_a_publication_waits_for_no_reader_of_the_version_before() -> None:
    """A reader of version 1 is held in mid-read, and version 2 is published all the same."""
    with gated(1) as gate:
        async with cluster("trainer", "rollout") as c:
            trainer, rollout = c.hubs
            model, held = Tied(), zeros()
            weights = await register_converted(
                trainer, "actor", cast(model, torch.bfloat16), group="trainer"
            )
            model.set(1)
            await weights.publish(1)
            reader = await rollout.register("actor", held)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(reader.replicate, 1)
                await until(lambda: gate.holds)
                model.set(2)
                await weights.publish(2)
                assert gate.holds
                gate.open()
            assert reader.version == 1
            assert holds(held, 1)


@pytest.mark.anyio
async def test_a_publication_waits_for_readers_of_the_version_before_that_for_the_grace_and_no_longer() -> (
    None
):
    """A reader of version 1 is held in mid-read, and version 3 takes the memory of version 1."""
    with gated(1) as gate:
        async with cluster("trainer", "rollout") as c:
            trainer, rollout = c.hubs
            model, held = Tied(), zeros()
            weights = await register_converted(
                trainer, "actor", cast(model, torch.bfloat16), group="trainer"
            )
            await weights.publish(1)
            reader = await rollout.register("actor", held)
            failed: list[VersionUnavailable] = []

            async def read() -> None:
                try:
                    await reader.replicate(1)
                except VersionUnavailable as error:
                    failed.append(error)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                await until(lambda: gate.holds)
                await weights.publish(2)
                model.set(3)
                third = await weights.publish(3)
                assert third.reclaim_s >= OPTIONS.drain_grace_s
                gate.open()
            assert [error.retryable for error in failed] == [True]
            assert (await reader.replicate()).version == 3
            assert holds(held, 3)


@pytest.mark.anyio
async def test_ranks_of_a_group_cast_what_they_have_and_a_reader_puts_it_together() -> None:
    """Each rank says which rows its masters are; both choose the same buffer for each version, also
    after a failure.
    """
    async with cluster("trainer", "rollout") as c:
        trainer, rollout = c.hubs
        masters = [torch.zeros(SIZE // 2) for _ in range(2)]

        async def register(rank: int) -> ConvertedWeights:
            rows = tensorhub.source("w", shape=(SIZE,))[rank * SIZE // 2 : (rank + 1) * SIZE // 2]
            conversion = cast({"mine": masters[rank]}, torch.bfloat16, sources={"mine": rows})
            return await register_converted(
                trainer, "actor", conversion, group="t", rank=rank, world_size=2
            )

        ranks, held = (
            [await register(rank) for rank in range(2)],
            torch.zeros(SIZE, dtype=torch.bfloat16),
        )
        reader = await rollout.register("actor", {"w": held})

        async def publish(version: int) -> None:
            for rank, tensor in enumerate(masters):
                tensor.fill_(version + rank / 2)
            await all_of(*(each.publish(version) for each in ranks))
            await reader.update()
            assert torch.equal(held, torch.cat(masters).bfloat16())

        await publish(1)
        await publish(2)
        ranks[1]._conversion = Conversion(dict, fails)
        found = await all_of(*(outcome_of(each.publish(3)) for each in ranks))
        assert [type(error) for error in found] == [GroupAborted, ZeroDivisionError]
        ranks[1]._conversion = cast({"mine": masters[1]}, torch.bfloat16)
        for version in (3, 4, 5):
            await publish(version)


def fails(target: object) -> None:
    raise ZeroDivisionError


async def outcome_of(call: Awaitable[object]) -> Any:
    try:
        return await call
    except Exception as error:
        return error


@pytest.mark.anyio
async def test_what_fails_publishes_nothing_and_may_be_tried_again() -> None:
    async with cluster("trainer") as c:
        model = Tied()
        weights = await register_converted(
            c.hubs[0], "actor", cast(model, torch.bfloat16), group="trainer"
        )
        await weights.publish(1)
        model.extra = nn.Parameter(torch.zeros(2))
        with pytest.raises(RegistrationError, match="'extra'"):
            await weights.publish(2)
        assert repr(weights) == "<ConvertedWeights of actor, versions 1, None>"
        del model.extra
        await weights.publish(2)
        with pytest.raises(VersionConflict):
            await weights.publish(2)
        await weights.publish(3)
        await weights.close(abandon=True)
        with pytest.raises(StateError):
            await weights.publish(4)


@pytest.mark.anyio
async def test_bad_arguments_register_nothing() -> None:
    async with cluster("trainer") as c:
        (hub,) = c.hubs
        for buffers in (0, 1, 17, 2.0, True):
            with pytest.raises(InvalidValue, match="buffers"):
                await register_converted(
                    hub,
                    "actor",
                    cast(Tied(), torch.bfloat16),
                    group="g",
                    buffers=buffers,  # type: ignore[arg-type]
                )
        with pytest.raises(InvalidType, match="group"):
            await register_converted(hub, "actor", cast(Tied(), torch.bfloat16), group=None)  # type: ignore[arg-type]
        sets = iter([{"w": torch.zeros(2)}, {"w": torch.zeros(2, 2).t()[:, :1].expand(2, 2)}])
        with pytest.raises(RegistrationError):
            await register_converted(
                hub, "actor", Conversion(lambda: next(sets), lambda target: None), group="g"
            )
        assert not any(model.workers for model in await hub.describe())


def test_a_cast_ties_what_is_tied_and_takes_what_is_there_now() -> None:
    model = Tied()
    conversion = cast(model, torch.float16)
    target = conversion.allocate()
    assert target["embed.weight"] is target["head.weight"]
    assert {name: tensor.dtype for name, tensor in target.items() if name in ("body", "steps")} == {
        "body": torch.float16,
        "steps": torch.int64,
    }
    model.body = nn.Parameter(torch.full((SIZE,), 3.0))  # replaced, not written
    conversion.convert(target)
    assert target["body"].eq(3).all()
    assert not any(tensor.requires_grad for tensor in target.values())
    model.body = nn.Parameter(torch.zeros(1))
    with pytest.raises(RegistrationError, match="'body'"):
        conversion.convert(target)


def test_a_cast_publishes_no_tensor_for_another_that_it_was_tied_to() -> None:
    model = Tied()
    conversion = cast(model, torch.float16)
    target = conversion.allocate()
    model.head.weight = nn.Parameter(torch.ones(6, 4))  # as load_state_dict(assign=True) leaves it
    with pytest.raises(RegistrationError, match=r"1 tensor.* not any more: 'head\.weight'.*anew"):
        conversion.convert(target)
    model.embed.weight = model.head.weight
    conversion.convert(target)
    assert target["head.weight"].eq(1).all()


def test_a_cast_copies_each_view_of_one_memory_as_that_view_is() -> None:
    square = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    views = {"square": square, "turned": square.t(), "bits": square.view(torch.int32)}
    conversion = cast(views, torch.float64)
    target = conversion.allocate()
    conversion.convert(target)
    assert {name: tensor.tolist() for name, tensor in target.items()} == {
        name: tensor.tolist() for name, tensor in views.items()
    }
