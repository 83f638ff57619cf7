"""The same memory in two registrations of a process: each may publish it, and no fill overwrites
what the other holds.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch

from tensorhub.errors import StateError
from tensorhub.memory.claims import Claim
from tensorhub.memory.tensors import RegisteredMemory
from tests.rig import all_of, cluster, equal, gated, holds, published, tensors, until

BOTH = (
    r"^tensor '[abc]' of 'm' \(group 'rollout', rank 0\) shares memory with '[abc]' of 'm' "
    r"\(group 'trainer', rank 0\)"
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def torch_tensors(content: int) -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(each) for name, each in tensors(content).items()}


@pytest.mark.parametrize("hubs", [1, 2])
async def test_a_trainer_and_a_rollout_on_the_same_tensors(hubs: int) -> None:
    """The rollout's fill is refused, the trainer's promise stands, and nobody is said to have
    written.
    """
    async with cluster("worker", "other", "far") as c:
        mine = torch_tensors(1)
        trainer = await c.hubs[0].register("m", mine, group="trainer")
        rollout = await c.hubs[hubs - 1].register("m", mine, group="rollout")
        far = await c.hubs[2].register("m", tensors())
        await trainer.publish(1)
        for fill in (rollout.replicate, rollout.update):
            with pytest.raises(
                StateError, match=BOTH + ", and that registration holds version 1"
            ) as caught:
                await fill(1)
            assert (caught.value.memory, rollout.state, trainer.state) == (
                "intact",
                "empty",
                "ready",
            )
        await far.replicate(1)
        async with trainer.mutate(2):  # no MutabilityViolation
            mine["a"].add_(1)
        assert trainer.version == 2
        await far.update(2)
        await trainer.unpublish()
        report = await rollout.replicate(2)  # from `far`, now that it overwrites nothing
        assert (report.version, rollout.state) == (2, "ready")
        with pytest.raises(
            StateError,
            match=r"'[abc]' of 'm' \(group 'trainer', rank 0\) shares "
            r"memory with .*holds version 2",
        ):
            await trainer.replicate(2)
        await rollout.close()
        assert (await trainer.replicate(2)).version == 2


async def test_a_fill_that_waited_while_the_trainer_published_writes_nothing() -> None:
    """What is allowed when the call is made may be no longer when it is to write."""
    async with cluster("worker", "far") as c:
        mine = torch_tensors(1)
        trainer = await c.hubs[0].register("m", mine, group="trainer")
        rollout = await c.hubs[0].register("m", mine, group="rollout")
        far = await c.hubs[1].register("m", tensors(7), group="far")
        failed: list[StateError] = []

        async def wait() -> None:
            with pytest.raises(
                StateError, match=BOTH + ", and that registration holds version 1"
            ) as caught:
                await rollout.update(at_least=2)
            failed.append(caught.value)

        async def publish() -> None:
            await until(lambda: rollout._handle.interpreter.is_busy)
            await trainer.publish(1)
            await far.publish(2)

        await all_of(wait(), publish())
        assert failed
        assert equal({name: each.numpy() for name, each in mine.items()}, tensors(1))
        assert rollout.version is None
        await trainer.unpublish()  # no MutabilityViolation
        assert trainer.state == "empty"
        assert (await rollout.update()).version == 2
        assert equal({name: each.numpy() for name, each in mine.items()}, tensors(7))


async def test_a_mutate_writes_nothing_that_another_registration_has_published() -> None:
    async with cluster("worker", "far") as c:
        mine = torch_tensors(1)
        trainer = await c.hubs[0].register("m", mine, group="trainer")
        rollout = await c.hubs[0].register("m", mine, group="rollout")
        await trainer.publish(1)
        await rollout.publish(2)
        with pytest.raises(
            StateError, match=BOTH + r", and that registration holds version 1: mutate\(\) of this"
        ) as caught:
            async with rollout.mutate(3):
                pytest.fail("the body ran")
        assert (caught.value.memory, rollout.version, trainer.version) == ("intact", 2, 1)
        await trainer.unpublish()
        async with rollout.mutate(3):
            mine["a"].add_(1)
        assert rollout.version == 3


async def test_memory_that_is_filled_is_not_published() -> None:
    with gated(0) as gate:
        async with cluster("worker", "far") as c:
            mine = torch_tensors(1)
            trainer = await c.hubs[0].register("m", mine, group="trainer")
            rollout = await c.hubs[0].register("m", mine, group="rollout")
            await published(c.hubs[1], content=7)

            async def publish() -> None:
                await until(lambda: gate.holds)
                with pytest.raises(
                    StateError,
                    match=r"'[abc]' of 'm' \(group 'trainer', rank 0\) shares .* is being filled",
                ):
                    await trainer.publish(2)
                gate.open()

            await all_of(rollout.replicate(1), publish())
            assert holds({name: each.numpy() for name, each in mine.items()}, 7)
            assert trainer.state == "empty"


def test_claims_end_with_their_memory_and_with_a_fork() -> None:
    memory, other = RegisteredMemory(tensors(1)), RegisteredMemory(tensors(1))
    alone = Claim("alone", other.descriptions, lambda: "holds version 1")
    first, second = (
        Claim("a", memory.descriptions, lambda: "holds version 1"),
        Claim("b", memory.descriptions, str),
    )
    with pytest.raises(
        StateError,
        match=r"'[abc]' of b shares memory with '[abc]' of a, and that "
        r"registration holds version 1: ",
    ):
        second.check_write()
    first.check_write()
    alone.check_write()
    pid = os.fork()
    if not pid:
        try:
            third = Claim("c", memory.descriptions, str)  # of the child's own hub
            third.check_write()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    del first
    gc.collect()
    second.check_write()
