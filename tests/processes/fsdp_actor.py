"""A process of a test's cluster that trains with FSDP2, and one that reads what was trained, cut by
columns.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tensorhub
from benches.commands import obey
from tests.processes.actor import Actor

HIDDEN, INNER = 1023, 4099  # neither divides by 2 or by 4


class FsdpActor(Actor):
    def __init__(self, stack: AsyncExitStack) -> None:
        super().__init__(stack)
        self._model: nn.Module
        self._columns_of: dict[int, dict[str, Tensor]] = {}  # by rank

    async def join(self, rank: int, mesh: list[int], folder: str) -> None:
        """The ranks of a mesh: of one dimension FSDP, of two HSDP."""
        await anyio.to_thread.run_sync(self._join, rank, mesh, folder)

    def _join(self, rank: int, sizes: list[int], folder: str) -> None:
        torch.set_num_threads(1)
        world_size = torch.Size(sizes).numel()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size
        )
        mesh = init_device_mesh(
            "cpu", tuple(sizes), mesh_dim_names=("replicate", "shard")[-len(sizes) :]
        )
        torch.manual_seed(0)
        self._model = nn.Sequential(
            nn.Linear(HIDDEN, INNER), nn.ReLU(), nn.Linear(INNER, HIDDEN, bias=False)
        )
        for layer in self._model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)

    async def optimize(self, seed: int, folder: str) -> None:
        """An optimizer step; rank 0 notes what came of it, whole."""
        await anyio.to_thread.run_sync(self._train, seed, folder)

    def _train(self, seed: int, folder: str) -> None:
        torch.manual_seed(seed + dist.get_rank())
        optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.01)
        x = torch.randn(4, HIDDEN)
        F.mse_loss(self._model(x), x).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        full = {name: tensor.full_tensor() for name, tensor in self._model.state_dict().items()}
        if dist.get_rank() == 0:
            torch.save(full, Path(folder) / "full.pt")

    async def register_model(self, **settings: Any) -> None:
        self._weights["w"] = await self._hub.register("m", self._model, **settings)

    async def register_columns(self, rank: int, world_size: int, **settings: Any) -> None:
        """Of each matrix some columns; all of the vectors."""
        up, down = (self._columns(size, rank, world_size) for size in (HIDDEN, INNER))
        held = self._columns_of[rank] = {
            "up": torch.zeros(INNER, up.stop - up.start),
            "bias": torch.zeros(INNER),
            "down": torch.zeros(HIDDEN, down.stop - down.start),
        }
        sources = {
            "up": tensorhub.source("0.weight")[:, up],
            "bias": tensorhub.source("0.bias"),
            "down": tensorhub.source("2.weight")[:, down],
        }
        what = {"sources": sources, "rank": rank, "world_size": world_size, **settings}
        self._weights[f"w{rank}"] = await self._hub.register("m", held, **what)

    @staticmethod
    def _columns(size: int, rank: int, ranks: int) -> slice:
        return slice(rank * size // ranks, (rank + 1) * size // ranks)

    async def is_trained(self, rank: int, world_size: int, folder: str) -> bool:
        """Whether it has what was trained, to the byte."""
        full, held = torch.load(Path(folder) / "full.pt"), self._columns_of[rank]
        up, down = (self._columns(size, rank, world_size) for size in (HIDDEN, INNER))
        wanted = {
            "up": full["0.weight"][:, up],
            "bias": full["0.bias"],
            "down": full["2.weight"][:, down],
        }
        return all(torch.equal(held[name], tensor) for name, tensor in wanted.items())


if __name__ == "__main__":
    anyio.run(obey, FsdpActor, backend=sys.argv[1])
