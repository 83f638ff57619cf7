"""A process of `benches.bottlenecks`: a coordinator, or a worker (`benches.commands`)."""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np

import tensorhub
from benches.commands import obey
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.types import Location, Options

TENSORS = 16


class BenchProcess:
    """The commands."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._hub: Hub
        self._weights: dict[str, list[Weights]] = {}  # of each rank
        self._memory: dict[str, list[dict[str, Any]]] = {}
        self._is_burning = False

    async def serve(self, host: str, port: int, state_dir: str) -> None:
        serving = tensorhub.serve(host=host, port=port, state_dir=state_dir)
        await self._stack.enter_async_context(serving)

    async def join(self, address: str, name: str, site: str) -> None:
        connecting = tensorhub.connect(
            address,
            name=name,
            location=Location(site=site, host=name),
            transports=["tcp"],
            options=Options(deltas="off"),
        )
        self._hub = await self._stack.enter_async_context(connecting)

    async def register(
        self,
        model: str,
        nbytes: int,
        group: str,
        ranks: int,
        rank: int | None = None,
        is_resharded: bool = False,
    ) -> None:
        """This rank of the group, or (None) all of them. `is_resharded`: each has its share of what
        one rank publishes.
        """
        self._memory[model], self._weights[model] = [], []
        async with anyio.create_task_group() as tasks:
            for each in range(ranks) if rank is None else [rank]:
                size, sources = nbytes // TENSORS, None
                if is_resharded:
                    size //= ranks
                    part = slice(each * size, (each + 1) * size)
                    sources = {f"t{n}": tensorhub.source(f"t{n}")[part] for n in range(TENSORS)}
                memory = {f"t{n}": np.ones(size, np.uint8) for n in range(TENSORS)}
                self._memory[model].append(memory)
                tasks.start_soon(self._register, model, memory, group, each, ranks, sources)

    async def _register(
        self,
        model: str,
        memory: dict[str, Any],
        group: str,
        rank: int,
        ranks: int,
        sources: dict[str, Any] | None,
    ) -> None:
        weights = await self._hub.register(
            model, memory, group=group, rank=rank, world_size=ranks, sources=sources
        )
        self._weights[model].append(weights)

    async def mutate(self, model: str, version: int) -> None:
        async with anyio.create_task_group() as tasks:
            for weights in self._weights[model]:
                if weights.version is not None:
                    tasks.start_soon(weights.unpublish)
        for memory in self._memory[model]:
            for tensor in memory.values():
                tensor[:] = version % 251
        async with anyio.create_task_group() as tasks:
            for weights in self._weights[model]:
                tasks.start_soon(weights.publish, version)

    async def update(self, model: str, version: int, hook_s: float = 0.0) -> float:
        """How long it took."""

        async def hook(_: object) -> None:
            await anyio.sleep(hook_s)

        (weights,), (memory,) = self._weights[model], self._memory[model]
        began = anyio.current_time()
        await weights.update(version, before_write=hook if hook_s else None)
        seconds = anyio.current_time() - began
        for tensor in memory.values():
            assert (tensor == version % 251).all()
        return seconds

    async def explain(self, model: str, version: int, group: str) -> dict[str, Any]:
        """Once the timings of its workers have come, which they do after their calls."""
        with anyio.move_on_after(5.0):
            while True:
                found = await self._hub.explain(model, version, group=group)
                if found.links:
                    break
                await anyio.sleep(0.1)
        await anyio.sleep(0.3)  # for those of the sources
        found = await self._hub.explain(model, version, group=group)
        parts = [[p.name, p.seconds, p.worker, p.peer, p.text] for p in found.parts]
        return {"seconds": found.seconds, "sentence": found.sentence, "parts": parts}

    async def hold_gil(self, threads: int) -> None:
        """Run pure Python in so many threads, until `let_go`."""
        self._is_burning = True

        def burn() -> None:
            number = 0
            while self._is_burning:
                number += 1

        for _ in range(threads):
            threading.Thread(target=burn, daemon=True).start()

    async def let_go(self) -> None:
        self._is_burning = False


if __name__ == "__main__":
    anyio.run(obey, BenchProcess)
