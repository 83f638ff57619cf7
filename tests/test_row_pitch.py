"""Tensors whose rows are padded are filled in place; their padding is nobody's, and stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import RegistrationError
from tests.rig import cluster
from tests.test_resharding import whole, world

pytestmark = pytest.mark.anyio

PAD = -7.0


class Padded:
    """Buffers with padded rows, and the parts of them that are registered."""

    def __init__(self) -> None:
        self.o = torch.full((128, 100), PAD)  # rows of 96 of the 100
        self.q = np.full((50, 2, 130), PAD, np.float32)  # two of three dimensions are padded
        self.norm = torch.full((8,), PAD)

    @property
    def tensors(self) -> dict[str, Any]:
        return {"o": self.o[:, 2:98], "q": self.q[:48, :, :128], "norm": self.norm[2:5]}

    @property
    def sources(self) -> dict[str, object]:
        q = tensorhub.source("q")
        return {"q": [(tensorhub.at[:, half], q[48 * half : 48 * half + 48]) for half in range(2)]}

    async def register(self, hub: Hub, group: str) -> Weights:
        return await hub.register("m", self.tensors, sources=self.sources, group=group, partial=True)

    def holds(self, content: int) -> bool:
        full, mine = whole(content), self.tensors
        rest = self.o.clone(), self.q.copy(), self.norm.clone()
        rest[0][:, 2:98] = rest[2][2:5] = PAD
        rest[1][:48, :, :128] = PAD
        is_padded = all(bool((each == PAD).all()) for each in rest)
        halves = np.stack([full["q"][:48], full["q"][48:]], axis=1)
        return is_padded and all(
            np.array_equal(np.asarray(mine[name]), each)
            for name, each in {"o": full["o"], "q": halves, "norm": full["norm"]}.items()
        )


async def test_padded_rows_are_filled_and_their_padding_is_not() -> None:
    async with world("one", "two") as (c, trained, _):
        mine, theirs = Padded(), Padded()
        report = await (await mine.register(c.hubs[2], "first")).replicate()
        assert mine.holds(1)
        assert report.bytes_read == 4 * (128 * 96 + 96 * 128 + 3)
        for each in trained:
            await each.unpublish()
        second = await theirs.register(c.hubs[3], "second")
        report = await second.replicate(1)  # from the first, chunk by chunk
        assert theirs.holds(1)
        assert {source.name for source in report.sources} == {"one"}


async def test_tensors_with_padded_rows_are_not_published() -> None:
    async with cluster("trainer") as c:
        weights = await c.hubs[0].register("m", {"w": torch.zeros(4, 8)[:, :6], "v": torch.zeros(2)})
        with pytest.raises(RegistrationError, match=r"1 tensor\(s\) have padded rows, .*: 'w'; register the .*") as caught:
            await weights.publish(1)
        assert "{'w': [(at[0:4, 0:6], source('w', shape=(4, 6)))]}" in str(caught.value)
        with pytest.raises(RegistrationError, match="have padded rows"):
            async with weights.mutate(1):
                raise AssertionError("its body runs")
        assert weights.state == "empty"


async def test_padded_rows_are_published_as_a_part_of_what_they_are_in() -> None:
    """As the error above says. The padding, which the reader has as well, travels to nobody."""
    buffer, mine = torch.full((8, 10), PAD), torch.full((8, 7), PAD)
    buffer[:, :6] = torch.arange(48).reshape(8, 6)
    async with cluster("trainer", "reader") as c:
        sources = {"w": [(tensorhub.at[0:8, 0:6], tensorhub.source("w", shape=(8, 6)))]}
        await (await c.hubs[0].register("m", {"w": buffer}, sources=sources)).publish(1)
        report = await (await c.hubs[1].register("m", {"w": mine[:, :6]})).replicate()
    assert torch.equal(mine[:, :6], buffer[:, :6])
    assert (mine[:, 6:] == PAD).all()
    assert report.bytes_read == 8 * 6 * 4


async def test_columns_of_one_tensor_are_said_by_places() -> None:
    both = torch.zeros(4, 8)
    async with cluster("reader") as c:
        with pytest.raises(RegistrationError, match="Of columns of one tensor, register that one"):
            await c.hubs[0].register("m", {"left": both[:, :4], "right": both[:, 4:]})
