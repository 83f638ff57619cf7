"""A process of `benches.capped` and `benches.wan`: a coordinator, or a worker behind its own link
(`benches.commands`).
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

import anyio

import tensorhub
from benches import byte_patterns
from benches.commands import obey
from tensorhub.api.weights import Weights
from tensorhub.types import Location, Options


class BenchProcess:
    """The commands. Times are of the machine's one monotonic clock, in seconds."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._weights: Weights
        self._memory: byte_patterns.Tensors

    async def serve(self, host: str, port: int, state_dir: str) -> None:
        await self._stack.enter_async_context(
            tensorhub.serve(host=host, port=port, state_dir=state_dir)
        )

    async def join(
        self,
        address: str,
        name: str,
        host: str,
        nbytes: int,
        chunk_bytes: int,
        site: str = "default",
        wan_connections: int = 1,
    ) -> None:
        options = Options(chunk_bytes=chunk_bytes, wan_connections=wan_connections)
        location = Location(site=site, host=host)
        connecting = tensorhub.connect(address, name=name, location=location, options=options)
        hub = await self._stack.enter_async_context(connecting)
        self._memory = byte_patterns.make(nbytes)
        byte_patterns.write(self._memory, 0)  # so that every page has been touched
        self._weights = await hub.register("m", self._memory)

    async def mutate(self, version: int) -> None:
        async with self._weights.mutate(version):
            byte_patterns.write(self._memory, version)

    async def update(self) -> dict[str, Any]:
        """When it began and ended, and from whom how much came."""
        cpu_s, started_s = time.process_time(), time.monotonic()
        report = await self._weights.update()
        ended_s = time.monotonic()
        sources = [asdict(source) for source in report.sources]
        return {
            "began": started_s,
            "ended": ended_s,
            "cpu_s": time.process_time() - cpu_s,
            "sources": sources,
        }

    async def holds(self) -> list[int]:
        """Which versions' words the memory holds."""
        return sorted(byte_patterns.contents(self._memory))

    async def cpu_s(self) -> float:
        return time.process_time()


if __name__ == "__main__":
    anyio.run(obey, BenchProcess)
