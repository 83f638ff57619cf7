"""Published memory that its owner has written, replaced or freed: readers have what was published, or an error (G1, R15)."""

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
from tensorhub.errors import MutabilityViolation, RegistrationError, TensorHubError
from tensorhub.messages import Digests, TellDigests
from tensorhub.runtime.worker import handle
from tensorhub.runtime.worker.writes import Writes
from tensorhub.types import Options
from tests.rig import CHUNK_BYTES, OPTIONS, cluster, handle_of, until
from tests.runtime.data_rig import KINDS

pytestmark = pytest.mark.anyio
LENGTH = 8 * CHUNK_BYTES // 4  # of a tensor of float32: 8 chunks
MERGED, UNMERGED = 1.5, 1.0
WAYS = [*KINDS, "shm"]


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digests are made when a chunk is first sent, and no sooner."""
    monkeypatch.setattr(handle.Handle, "_digest_early", lambda self: None, raising=False)


def model() -> dict[str, torch.Tensor]:
    return {name: torch.full((LENGTH,), MERGED) for name in ("a", "b")} | {"bias": torch.full((4,), MERGED)}


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


@pytest.mark.parametrize("options", [OPTIONS, replace(OPTIONS, chunk_bytes=4 * 2**20), replace(OPTIONS, integrity=False)])
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
            await rollout.replicate(timeout=1)
        assert await states(c.hubs[1]) == {"trainer": "quarantined"}
        with pytest.raises(MutabilityViolation, match="while it was published: 'a', 'b', 'bias'"):
            await trainer.unpublish()
        async with trainer.mutate(2):
            merge(mine)
        assert (await rollout.replicate()).version == 2
        assert is_merged(memory)
        del mine, trainer  # shared memory goes with its last tensor


@pytest.mark.usefixtures("lazily")
async def test_a_reader_goes_on_with_a_holder_that_has_kept_it() -> None:
    async with cluster("trainer", "other", "rollout") as c:
        mine, others, memory = model(), empty(), empty()
        trainer = await c.hubs[0].register("m", mine)
        await trainer.publish(1)
        await (await c.hubs[1].register("m", others)).replicate()
        unmerge({"a": mine["a"]})
        assert (await (await c.hubs[2].register("m", memory)).replicate()).version == 1
        assert is_merged(memory)


@pytest.mark.usefixtures("lazily")
@pytest.mark.parametrize("way", WAYS[:2])
async def test_what_is_written_while_its_digest_is_made_is_not_served(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
            await rollout.replicate(timeout=1)
        assert is_kept[0]
        with pytest.raises(MutabilityViolation, match="written"):
            await trainer.unpublish()


def frees(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def replaces(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


@pytest.mark.parametrize("digested", [False, True])
@pytest.mark.parametrize("change", [frees, replaces])
@pytest.mark.parametrize("way", WAYS[:2])
async def test_memory_that_was_freed_or_replaced_is_offered_no_more(
    way: str, change: Callable[[torch.Tensor], None], digested: bool, monkeypatch: pytest.MonkeyPatch
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
            await (await c.hubs[2].register("m", empty())).replicate(timeout=1)
        assert await states(c.hubs[2]) == {"trainer": "quarantined"}
        assert (trainer.state, trainer.version) == ("torn", 1)
        for call in (trainer.update, trainer.unpublish):
            with pytest.raises(TensorHubError, match="'b'"):
                await call()
        assert trainer.state == "empty"


@pytest.mark.parametrize("change", [frees, replaces])
async def test_what_was_replaced_or_freed_is_not_called_written_as_well(change: Callable[[torch.Tensor], None]) -> None:
    async with cluster("trainer") as c:
        mine = model()
        trainer = await c.hubs[0].register("m", mine)
        await trainer.publish(1)
        unmerge({"a": mine["a"]})
        change(mine["b"])
        assert handle_of(trainer)._writes.broken() == "'a' (written); 'b' (replaced or freed)"


@pytest.mark.usefixtures("lazily")
async def test_digests_of_memory_that_was_written_since_are_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster("trainer") as c:
        mine = model()
        trainer = await c.hubs[0].register("m", mine)
        await trainer.publish(1)
        handle, said = handle_of(trainer), list[object]()

        async def tell() -> None:
            make = handle._making()
            assert make is not None
            make()
            unmerge(mine)
            monkeypatch.setattr(handle._link, "say", said.append)
            handle.tell_made(if_all=False)
            content = handle.member.content
            assert content is not None
            asked = TellDigests(handle.member.shard.registration, content.generation, "")
            await handle._tell_digests(asked, anyio.CapacityLimiter(1))
            monkeypatch.undo()

        await trainer._thread.call(tell)
        assert not [each for each in said if isinstance(each, Digests)]


@pytest.mark.parametrize("change", [frees, replaces])
async def test_a_handle_can_be_closed_as_its_error_advises(change: Callable[[torch.Tensor], None]) -> None:
    async with cluster("trainer", "rollout") as c:
        mine = model()
        trainer = await c.hubs[0].register("m", mine)
        await trainer.publish(1)
        change(mine["b"])
        with pytest.raises(TensorHubError):
            await c.hubs[1].fetch("m", timeout=1)
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
            await c.hubs[1].fetch("m", timeout=1)
        with pytest.raises(MutabilityViolation, match="'a'"):
            await trainer.unpublish()


@pytest.mark.usefixtures("lazily")
async def test_a_copy_that_was_freed_is_given_up_and_its_reader_goes_on_elsewhere() -> None:
    async with cluster("trainer", "other", "rollout") as c:
        await (await c.hubs[0].register("m", model())).publish(1)
        others, memory = empty(), empty()
        other = await c.hubs[1].register("m", others)
        await other.replicate()
        frees(others["b"])
        assert (await (await c.hubs[2].register("m", memory)).replicate()).version == 1
        assert is_merged(memory)


@pytest.mark.usefixtures("lazily")
async def test_what_is_handed_over_or_copied_is_not_what_was_written() -> None:
    """Of a retained version its last holder makes a copy before it lets go of it."""
    options = replace(OPTIONS, host_memory_bytes=2**26, op_timeout_s=2)
    async with cluster("trainer", "rollout", options=options) as c:
        mine = model()
        trainer = await c.hubs[0].register("m", mine)
        await trainer.publish(1)
        unmerge(mine)
        await c.hubs[1].retain("m", latest=2)
        with pytest.raises(TensorHubError):
            await trainer.unpublish()
        try:
            fetched = await c.hubs[1].fetch("m", 1, timeout=1)
        except TensorHubError:
            return
        assert is_merged(dict(fetched))


async def test_digests_are_made_right_after_a_publication() -> None:
    """Nobody has read it. What is written then is noticed by its reader, too."""
    async with cluster("trainer", "rollout") as c:
        array = np.full(LENGTH, MERGED, np.float32)  # whose writes nobody counts
        trainer = await c.hubs[0].register("m", {"a": array})
        await trainer.publish(1)
        owner = handle_of(trainer)._owner

        def digests() -> list[int | None]:
            return [digest for each in owner._owner._memories.values() for digest in each.own.digests]

        await until(lambda: len(digests()) == 8 and None not in digests())
        array[:] = UNMERGED
        with pytest.raises(TensorHubError):
            await c.hubs[1].fetch("m", timeout=1)
        with pytest.raises(MutabilityViolation):
            await trainer.unpublish()
