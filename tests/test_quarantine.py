"""Whose bytes have changed, over real sockets (R8): the guilty party is quarantined, and hears of
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tensorhub.api.hub import Hub
from tensorhub.api.tools import register_memory
from tensorhub.errors import IntegrityError, MutabilityViolation, VersionUnavailable
from tensorhub.memory.files import FileMemory
from tests.rig import cluster, connect, damaging, holds, published, tensors, until
from tests.runtime.data_rig import waited_out_s

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def states(hub: Hub) -> dict[str, str]:
    info = await hub.describe("m")
    return {shard.worker: shard.state for replica in info.replicas for shard in replica.shards}


async def test_a_replica_that_was_written_is_given_up_and_its_reader_goes_on_elsewhere() -> None:
    async with cluster("trainer", "other", "reader") as c:
        await published(c.hubs[0])
        others = tensors()
        other = await c.hubs[1].register("m", others)
        await other.replicate()
        others["c"][0] ^= 1
        memory = tensors()
        weights = await c.hubs[2].register("m", memory)
        report = await weights.replicate()
        assert holds(memory, 1)
        assert {source.name: source.outcome for source in report.sources} == {
            "other": "corrupt",
            "trainer": "used",
        }
        await until(lambda: other.state == "empty")
        assert await states(c.hubs[2]) == {"trainer": "complete", "reader": "complete"}
        with pytest.raises(MutabilityViolation, match="while it was held for others to read: 'c'"):
            await other.update()
        assert (await other.update()).version == 1
        assert holds(others, 1)


async def test_a_reader_that_damages_bytes_is_the_guilty_one() -> None:
    async with cluster("trainer", "other") as c:
        await published(c.hubs[0])
        other = await c.hubs[1].register("m", tensors())
        await other.replicate()
        with damaging():
            async with connect(c.address, "reader") as reader:
                weights = await reader.register("m", tensors())
                with pytest.raises(
                    IntegrityError,
                    match="The machine of worker 'reader', or the way to it, damages bytes",
                ):
                    await weights.replicate()
        assert await states(c.hubs[0]) == {"trainer": "complete", "other": "complete"}
        assert other.state == "ready"


async def test_a_file_that_was_written_is_found_out_by_reading_it_again(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    save_file({"w": torch.arange(100_000)}, path)
    with FileMemory(path) as memory:
        async with cluster("trainer", "reader") as c:
            source = await register_memory(c.hubs[0], "m", memory)
            await source.publish(1)
            with path.open("r+b") as file:
                file.seek(-5, 2)
                file.write(b"x")
            weights = await c.hubs[1].register("m", {"w": torch.zeros(100_000, dtype=torch.int64)})
            with pytest.raises((IntegrityError, VersionUnavailable)):
                await weights.replicate(timeout=waited_out_s())
            assert await states(c.hubs[1]) == {"trainer": "quarantined"}
            with pytest.raises(MutabilityViolation, match="while it was published: 'w'"):
                await source.unpublish()
