"""Published memory that its owner has written, replaced or freed: readers have what was published,
or an error (G1, R15).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from tensorhub import shared_empty_like
from tensorhub.api.hub import Hub
from tensorhub.errors import MutabilityViolation, RegistrationError, StateError, TensorHubError
from tensorhub.runtime.worker import handle
from tensorhub.runtime.worker.writes import Writes
from tensorhub.types import Options
from tests.rig import CHUNK_BYTES, OPTIONS, cluster, gated, until
from tests.runtime.data_rig import KINDS, waited_out_s

pytestmark = pytest.mark.anyio
LENGTH = 8 * CHUNK_BYTES // 4  # of a tensor of float32: 8 chunks
MERGED, UNMERGED = 1.5, 1.0
WAYS = [*KINDS, "shm"]


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are made when a chunk is first sent, and no sooner."""
    monkeypatch.setattr(handle.Handle, "_digest_early", lambda self: None, raising=False)


def model() -> dict[str, torch.Tensor]:
    return {name: torch.full((LENGTH,), MERGED) for name in ("a", "b")} | {
        "bias": torch.full((4,), MERGED)
    }


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in model().items()}


def is_merged(tensors: Mapping[str, torch.Tensor]) -> bool:
    return all(bool((tensor == MERGED).all()) for tensor in tensors.values())


async def states(hub: Hub) -> dict[str, str]:
    info = await hub.describe("m")
    return {shard.worker: shard.state for replica in info.replicas for shard in replica.shards}


def merge(tensors: Mapping[str, torch.Tensor]) -> None:
    for tensor in tensors.values():
        tensor.fill_(MERGED)


def unmerge(tensors: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.sub_(MERGED - UNMERGED)


@pytest.mark.parametrize(
    "options", [OPTIONS, replace(OPTIONS, chunk_bytes=4 * 2**20), replace(OPTIONS, integrity=False)]
)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("lazily")
async def test_a_reader_has_what_was_published_or_an_error(way: str, options: Options) -> None:
    """A trainer merges an adapter, publishes, and unmerges in place."""
    async with cluster("trainer", "rollout", options=options, transports=[way]) as c:
        memory, mine = empty(), model()
        if way == "shm":
            mine = shared_empty_like(mine)
            merge(mine)
        trainer = await c.hubs[0].register("m", mine)
        rollout = await c.hubs[1].register("m", memory)
        await trainer.publish(1)
        unmerge(mine)
        with pytest.raises(TensorHubError):
            await rollout.replicate(timeout=waited_out_s())
        assert await states(c.hubs[1]) == {"trainer": "quarantined"}
        with pytest.raises(MutabilityViolation, match="while it was published: 'a', 'b', 'bias'"):
            await trainer.unpublish()
        async with trainer.mutate(2):
            merge(mine)
        assert (await rollout.replicate()).version == 2
        assert is_merged(memory)
        del mine, trainer  # shared memory goes with its last tensor


@pytest.mark.usefixtures("lazily")
@pytest.mark.parametrize("way", WAYS[:2])
async def test_what_is_written_while_its_digest_is_made_is_not_served(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with cluster("trainer", "rollout", transports=[way]) as c:
        mine, memory = model(), empty()
        trainer = await c.hubs[0].register("m", mine)
        rollout = await c.hubs[1].register("m", memory)
        await trainer.publish(1)
        usual, is_kept = Writes.is_kept, []

        def writes_after_the_first_look(self: Writes, regions: Any) -> bool:
            is_kept.append(usual(self, regions))
            if len(is_kept) == 1:
                unmerge(mine)
            return is_kept[-1]

        monkeypatch.setattr(Writes, "is_kept", writes_after_the_first_look)
        with pytest.raises(TensorHubError):
            await rollout.replicate(timeout=waited_out_s())
        assert is_kept[0]
        with pytest.raises(MutabilityViolation, match="written"):
            await trainer.unpublish()


def frees(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def replaces(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


async def test_a_write_of_the_callers_during_a_fill_is_not_taken_for_the_fills() -> None:
    """Without digests nothing else would show it."""
    options = replace(OPTIONS, integrity=False)
    with gated(3) as gate:
        async with cluster("trainer", "rollout", options=options) as c:
            memory = empty()
            await (await c.hubs[0].register("m", model())).publish(1)
            rollout = await c.hubs[1].register("m", memory)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rollout.replicate)
                await until(lambda: gate.holds)
                memory["a"][:1].add_(1)
                gate.open()
            with pytest.raises(MutabilityViolation, match="while it was published: 'a'"):
                await rollout.unpublish()


@pytest.mark.parametrize("digested", [False, True])
@pytest.mark.parametrize("change", [frees, replaces])
@pytest.mark.parametrize("way", WAYS[:2])
async def test_memory_that_was_freed_or_replaced_is_offered_no_more(
    way: str,
    change: Callable[[torch.Tensor], None],
    digested: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not digested:
        monkeypatch.setattr(handle.Handle, "_digest_early", lambda self: None, raising=False)
    async with cluster("trainer", "other", "rollout", transports=[way]) as c:
        mine = model()
        trainer = await c.hubs[0].register("m", mine)
        await trainer.publish(1)
        if digested:
            await c.hubs[1].fetch("m")
        change(mine["b"])
        with pytest.raises(TensorHubError):
            await (await c.hubs[2].register("m", empty())).replicate(timeout=waited_out_s())
        assert await states(c.hubs[2]) == {"trainer": "quarantined"}
        assert (trainer.state, trainer.version) == ("torn", 1)
        with pytest.raises(StateError, match="torn"):
            trainer.stamp()
        for call in (trainer.update, trainer.unpublish):
            with pytest.raises(TensorHubError, match="'b'"):
                await call()
        assert trainer.state == "empty"


@pytest.mark.parametrize("change", [frees, replaces])
async def test_a_handle_can_be_closed_as_its_error_advises(
    change: Callable[[torch.Tensor], None],
) -> None:
    async with cluster("trainer", "rollout") as c:
        mine = model()
        trainer = await c.hubs[0].register("m", mine)
        await trainer.publish(1)
        change(mine["b"])
        with pytest.raises(TensorHubError):
            await c.hubs[1].fetch("m", timeout=waited_out_s())
        with pytest.raises(RegistrationError, match="close this handle and register anew"):
            await trainer.publish(2)
        await trainer.close()
        assert trainer.state == "closed"


@pytest.mark.usefixtures("lazily")
async def test_an_array_that_was_resized_is_not_touched() -> None:
    async with cluster("trainer", "rollout") as c:
        array = np.full(LENGTH, MERGED, np.float32)
        trainer = await c.hubs[0].register("m", {"a": array})
        await trainer.publish(1)
        array.resize(64 * LENGTH, refcheck=False)  # numpy frees the bytes that were published
        with pytest.raises(TensorHubError):
            await c.hubs[1].fetch("m", timeout=waited_out_s())
        with pytest.raises(MutabilityViolation, match="'a'"):
            await trainer.unpublish()
