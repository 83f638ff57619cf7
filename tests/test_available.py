"""The selector "available" through the public API: the trainer has published, and left."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tensorhub.errors import VersionUnavailable
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    WAIT_S,
    Cluster,
    cluster,
    holds,
    tensors,
    write,
)

HELD = "held now: version 1 by 1 replica; the selector 'available' gets 1"


@asynccontextmanager
async def trainer_left(*names: str) -> AsyncIterator[Cluster]:
    """Version 1 is held by a keeper. Version 2 was published, and its trainer has gone before
    anybody has fetched it.
    """
    options = replace(OPTIONS, host_memory_bytes=2 * CHUNKS * CHUNK_BYTES)
    async with cluster("trainer", "keeper", *names, options=options) as c:
        memory = tensors(1)
        source = await c.hubs[0].register("m", memory)
        await source.publish(1)
        await (await c.hubs[1].register("m", tensors())).replicate()
        async with source.mutate(2):
            write(memory, 2)
        await source.close()
        yield c


async def test_elastic_workers_get_the_newest_that_is_held() -> None:
    async with trainer_left("reader") as c:
        memory = tensors()
        weights = await c.hubs[2].register("m", memory)
        assert (await weights.prefetch("available")).version == 1
        report = await weights.update("available")
        assert (report.version, report.changed, report.bytes_read) == (1, True, 0)
        assert holds(memory, 1)
        assert (await weights.update("available")).changed is False
        await weights.unpublish()
        assert (await weights.replicate("available")).version == 1
        assert (await c.hubs[2].fetch("m", "available")).info.version == 1


async def test_latest_says_what_is_held_and_how_to_get_it() -> None:
    async with trainer_left("reader") as c:
        weights = await c.hubs[2].register("m", tensors())
        with pytest.raises(VersionUnavailable) as caught:
            await weights.replicate(timeout=0.05)
        assert HELD in str(caught.value)
        with pytest.raises(VersionUnavailable, match=HELD):
            await c.hubs[2].fetch("m", 2, timeout=0.05)


async def test_at_least_is_waited_for() -> None:
    async with trainer_left("reader") as c:
        weights = await c.hubs[2].register("m", tensors())
        with pytest.raises(VersionUnavailable, match="version 3 of 'm' was not published"):
            await weights.update("available", at_least=3, timeout=0.05)
        with pytest.raises(
            VersionUnavailable, match="no complete copy of version 2 of 'm' or a newer one"
        ):
            await weights.update("available", at_least=2, timeout=WAIT_S)
        assert weights.state == "empty"
