"""Tensors whose rows are padded are filled in place; their padding is nobody's, and stays as it
is.
"""

from __future__ import annotations

import pytest
import torch

import tensorhub
from tensorhub.errors import RegistrationError
from tests.rig import cluster

pytestmark = pytest.mark.anyio

PAD = -7.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_tensors_with_padded_rows_are_not_published() -> None:
    async with cluster("trainer") as c:
        weights = await c.hubs[0].register(
            "m", {"w": torch.zeros(4, 8)[:, :6], "v": torch.zeros(2)}
        )
        with pytest.raises(
            RegistrationError, match=r"1 tensor\(s\) have padded rows, .*: 'w'; register the .*"
        ) as caught:
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
