"""A matrix that is cut by rows at two ranks of a trainer and by columns at a reader, in memory of a
stand-in for a GPU or of the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.api.tools import register_memory
from tensorhub.api.weights import Weights
from tensorhub.cuda.device import Device
from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.views import View
from tensorhub.memory.tensors import RegisteredMemory
from tests.cuda.double import Double

SHAPE = (64, 6000)  # of 4 bytes each
COLUMNS = slice(100, 3100)  # the reader's: runs of 12,000 bytes


def matrix(version: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(version))


def _empty(device: Double | None, rows: int, columns: int) -> torch.Tensor:
    held = bytearray(4 * rows * columns)
    if device is not None:
        device.bytes_of(held)
    return torch.frombuffer(held, dtype=torch.float32).reshape(rows, columns)


class Rows:
    """A trainer of two ranks, which are two of these hubs or one."""

    def __init__(self, device: Double | None) -> None:
        self.device = device
        self.tensors = [_empty(device, SHAPE[0] // 2, SHAPE[1]) for _ in range(2)]

    async def register(self, hubs: Sequence[Hub]) -> list[Weights]:
        def cut(rank: int) -> slice:
            return slice(rank * SHAPE[0] // 2, (rank + 1) * SHAPE[0] // 2)

        return [
            await _register(
                hubs[rank % len(hubs)],
                tensor,
                self.device,
                tensorhub.source("w", shape=SHAPE)[cut(rank)],
                rank,
                2,
            )
            for rank, tensor in enumerate(self.tensors)
        ]

    def fill(self, version: int) -> None:
        for rank, tensor in enumerate(self.tensors):
            tensor.copy_(matrix(version)[rank * SHAPE[0] // 2 :][: SHAPE[0] // 2])


class Columns:
    """A reader of some of the columns."""

    def __init__(self, device: Double | None, columns: slice = COLUMNS) -> None:
        self.device = device
        self.columns = columns
        self.tensor = _empty(device, SHAPE[0], columns.stop - columns.start)

    async def register(self, hub: Hub) -> Weights:
        return await _register(
            hub, self.tensor, self.device, tensorhub.source("w")[:, self.columns], 0, 1
        )

    def holds(self, version: int) -> bool:
        return torch.equal(self.tensor, matrix(version)[:, self.columns])


async def _register(
    hub: Hub, tensor: torch.Tensor, device: Device | None, view: View, rank: int, world_size: int
) -> Weights:
    sources = {"w": [view]}
    memory = RegisteredMemory({"w": tensor}, sources)
    memory.device = device
    declared = Declaration(rank, world_size, memory.shardings, memory.entries, partial=True)
    group = "trainer" if world_size > 1 else None
    return await register_memory(
        hub, "m", memory, group=group, rank=rank, world_size=world_size, declared=declared
    )
