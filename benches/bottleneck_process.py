"""A process of `benches.bottlenecks`: a coordinator, or a worker (`benches.commands`)."""

from __future__ import annotations

import contextlib
import os
import threading
from contextlib import AsyncExitStack
from typing import Any

import anyio
import numpy as np

import tensorhub
from benches.commands import obey
from tensorhub.api.hub import Hub
from tensorhub.api.tools import recent_updates
from tensorhub.api.weights import Weights
from tensorhub.errors import VersionUnavailable
from tensorhub.flows.what_if import COMPARED_MAX, changes
from tensorhub.observed import Explanation
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
        self._saved = 0

    async def serve(self, host: str, port: int, state_dir: str) -> None:
        serving = tensorhub.serve(host=host, port=port, state_dir=state_dir)
        await self._stack.enter_async_context(serving)

    async def join(self, address: str, name: str, site: str, options: dict[str, Any]) -> None:
        """`options`: `transports`, and those of `connect`."""
        transports = options.pop("transports", ["tcp"])
        given: dict[str, Any] = {"deltas": "off", **options}
        given["direct"] = tuple(given.get("direct", ()))
        connecting = tensorhub.connect(
            address,
            name=name,
            location=Location(site=site, host=name),
            transports=transports,
            options=Options(**given),
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

    async def mutate(self, model: str, version: int, noise: float = 0.0) -> None:
        """`noise`: the share of the new bytes that no codec makes shorter."""
        async with anyio.create_task_group() as tasks:
            for weights in self._weights[model]:
                if weights.version is not None:
                    tasks.start_soon(weights.unpublish)
        for memory in self._memory[model]:
            for tensor in memory.values():
                tensor[:] = _content(version, tensor.nbytes, noise)
        async with anyio.create_task_group() as tasks:
            for weights in self._weights[model]:
                tasks.start_soon(weights.publish, version)

    async def update(
        self, model: str, version: int, hook_s: float = 0.0, noise: float = 0.0
    ) -> float:
        """How long it took."""

        async def hook(_: object) -> None:
            await anyio.sleep(hook_s)

        (weights,), (memory,) = self._weights[model], self._memory[model]
        began = anyio.current_time()
        report = await weights.update(version, before_write=hook if hook_s else None)
        seconds = anyio.current_time() - began
        self._saved = report.bytes_saved
        for tensor in memory.values():
            assert (tensor == _content(version, tensor.nbytes, noise)).all()
        return seconds

    async def saved(self) -> int:
        """The bytes that deltas saved the last update."""
        return self._saved

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

    async def prefetch(self, model: str, version: int) -> None:
        (weights,) = self._weights[model]
        await weights.prefetch(version)

    async def what_if(self, model: str, version: int, group: str) -> list[tuple[str, float, str]]:
        """Changes, with the seconds that the update would have taken with each."""
        await self.explain(model, version, group)
        found, others = await self._hub.explain(model, version, group=group), list[Explanation]()
        rows = await recent_updates(self._hub, model)
        for row in [row for row in rows if row.outcome == "committed"][:COMPARED_MAX]:
            with contextlib.suppress(VersionUnavailable):  # it was forgotten meanwhile
                others.append(await self._hub.explain(model, row.version, group=row.key.group))
        info = await self._hub.describe(model)
        sites = {each.name: each.location.site for each in info.workers}
        made = changes(found, others, sites)
        return [(each.name, each.seconds, each.text) for each in made]

    async def keep_objects(self, host: str) -> tuple[str, dict[str, str]]:
        """An S3 server: its URL, and the environment that finds it."""
        from tests.archives.servers import seaweedfs

        server = self._stack.enter_context(seaweedfs(host))
        found = {f"AWS_{name.upper()}": value for name, value in server.options.items()}
        return server.url, found

    async def set_environment(self, found: dict[str, str]) -> None:
        os.environ.update(found)

    async def archive(self, model: str, url: str) -> None:
        """Keep and serve versions there, until this process ends."""
        archiving = tensorhub.archive(self._hub, model, url, serve=True)
        self._archive = await self._stack.enter_async_context(archiving)

    async def archived(self, version: int) -> None:
        """Once the archive has it."""
        await self._archive.wait_for(at_least=version)

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


def _content(version: int, nbytes: int, noise: float) -> Any:
    """With noise: all else is as in the version before."""
    made = np.full(nbytes, 0 if noise else version % 251, np.uint8)
    drawn = int(noise * nbytes)
    made[:drawn] = np.random.default_rng(version).integers(0, 256, drawn, np.uint8)
    return made


if __name__ == "__main__":
    anyio.run(obey, BenchProcess)
