"""Layouts through the public API: what a caller may register, and what is said to be wrong with
it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import tensorhub
from tensorhub.errors import (
    IntegrityError,
    InvalidType,
    ManifestMismatch,
    RegistrationError,
    StateError,
)
from tests.rig import all_of, cluster

pytestmark = pytest.mark.anyio

W = tensorhub.source("w", shape=(8, 4))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def rows(count: int) -> dict[str, Any]:
    return {"w": np.zeros((count, 4), np.float32)}


async def test_what_is_wrong_with_sources_is_said_when_they_are_registered() -> None:
    async with cluster("one") as c:
        (hub,) = c.hubs
        with pytest.raises(
            InvalidType, match="sources=3: give a mapping of names to views, or a function"
        ):
            await hub.register("m", rows(4), sources=3)  # type: ignore[arg-type]
        with pytest.raises(InvalidType, match="partial='yes'"):
            await hub.register("m", rows(4), partial="yes")  # type: ignore[arg-type]
        with pytest.raises(
            RegistrationError,
            match=r"^2 tensor\(s\) cannot .*\n.*'w': give a view.*\n.*'v', and no",
        ):
            await hub.register("m", rows(4), sources={"w": [3], "v": W})
        with pytest.raises(
            RegistrationError,
            match=re.escape("source('w')[0:4] has shape (4, 4), and the tensor has (3, 4)"),
        ):
            await hub.register("m", rows(3), sources={"w": W[0:4]})


async def test_who_does_not_say_shapes_cannot_publish_nor_begin_to_mutate() -> None:
    async with cluster("one") as c:
        weights = await c.hubs[0].register(
            "m", rows(4), sources=lambda name: tensorhub.source(name)[0:4]
        )
        with pytest.raises(StateError, match=r"register it with source\('w', shape="):
            await weights.publish(1)
        with pytest.raises(StateError, match=r"register it with source\('w', shape="):
            async with weights.mutate(1):
                pytest.fail("its body is not run")
        assert weights.state == "empty"


async def test_who_says_the_same_of_its_tensors_reads_chunk_by_chunk() -> None:
    async with cluster("trainer", "reader") as c:
        mine, sources = rows(8), {"w": [W[4:8], W[0:4]]}
        held = await c.hubs[0].register("m", {"w": np.full((8, 4), 7, np.float32)}, sources=sources)
        wanted = await c.hubs[1].register("m", mine, sources=sources)
        await held.publish(1)
        await wanted.replicate()
        assert mine["w"].min() == 7


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (
            [slice(0, 5), slice(7, 12)],
            r"of tensor 'w', \[5:7, 0:4\] \(32 bytes\) is held by no rank",
        ),
        (
            [[slice(0, 8), slice(6, 12)]],
            r"rank 0 holds parts \[0:8, 0:4\] and \[6:12, 0:4\] of tensor 'w', which overlap",
        ),
        ([slice(0, 6), slice(6, 13)], None),
    ],
    ids=["a byte that nobody has", "a byte that one rank has twice", "a slice out of range"],
)
async def test_a_publication_must_make_one_whole(parts: list[Any], text: str | None) -> None:
    view = tensorhub.source("w", shape=(12, 4))
    async with cluster("trainer") as c:

        async def register(rank: int) -> tensorhub.Weights:
            slices = parts[rank] if isinstance(parts[rank], list) else [parts[rank]]
            memory = rows(sum(each.stop - each.start for each in slices))
            sources = {"w": [view[each] for each in slices]}
            return await c.hubs[0].register(
                "m", memory, sources=sources, group="t", rank=rank, world_size=len(parts)
            )

        if text is None:
            with pytest.raises(
                RegistrationError, match="slice 6:13 is not within the size there, 12"
            ):
                await register(1)
            return
        trained = [await register(rank) for rank in range(len(parts))]

        async def publish(weights: tensorhub.Weights) -> None:
            with pytest.raises(ManifestMismatch, match=text):
                await weights.publish(1)
            assert weights.state == "empty"

        await all_of(*(publish(each) for each in trained))
        assert c.hubs[0].newest("m") is None


async def test_what_ranks_of_different_shards_publish_must_be_equal() -> None:
    """A norm that each tensor-parallel rank has: readers take it from any of them."""
    norm, view = tensorhub.source("norm", shape=(3, 2)), tensorhub.source("w", shape=(12, 4))
    async with cluster("trainer", "reader") as c:
        memory = [rows(6) | {"norm": np.full((2, 3), 5, np.float32)} for _ in range(2)]
        sources = [{"w": view[0:6], "norm": norm.T}, {"w": view[6:12], "norm": norm.T}]
        trained = [
            await c.hubs[0].register(
                "m", memory[rank], sources=sources[rank], group="t", rank=rank, world_size=2
            )
            for rank in range(2)
        ]

        async def refused(weights: tensorhub.Weights) -> None:
            with pytest.raises(
                IntegrityError, match="both have 'norm', and their bytes differ"
            ) as caught:
                await weights.publish(1)
            assert not caught.value.retryable
            assert weights.state == "empty"

        memory[1]["norm"][1, 2] = 6
        await all_of(*(refused(each) for each in trained))
        memory[1]["norm"][1, 2] = 5
        for version in (1, 2):
            await all_of(*(each.publish(version) for each in trained))
            mine = {"norm": np.zeros((3, 2), np.float32)}
            reader = await c.hubs[1].register("m", mine, partial=True, group=f"r{version}")
            assert (await reader.replicate()).version == version
            assert mine["norm"].min() == 5
            await all_of(*(each.unpublish() for each in trained))
