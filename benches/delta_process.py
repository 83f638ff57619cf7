"""A process of `benches.delta_reads`: a coordinator, or a worker that has a real model
(`benches.commands`).
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import xxhash

import tensorhub
from benches.commands import obey
from tensorhub.api.weights import Weights
from tensorhub.types import Location, Options


class BenchProcess:
    """The commands. `file`: an .npz of all tensors as bytes."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._weights: Weights
        self._memory: dict[str, Any]

    async def serve(self, host: str, port: int, state_dir: str) -> None:
        serving = tensorhub.serve(host=host, port=port, state_dir=state_dir)
        await self._stack.enter_async_context(serving)

    async def join(
        self, address: str, name: str, site: str, model: str, file: str, deltas: str, room: int
    ) -> None:
        """`room`: see `Options.host_memory_bytes`."""
        self._memory = dict(np.load(Path(file)))
        options = Options(deltas="off" if deltas == "off" else "auto", host_memory_bytes=room)
        location = Location(site=site, host=name)
        connecting = tensorhub.connect(address, name=name, location=location, options=options)
        hub = await self._stack.enter_async_context(connecting)
        self._weights = await hub.register(model, self._memory)

    async def mutate(self, version: int, file: str) -> None:
        """Publish the bytes of that file."""
        with np.load(Path(file)) as new:
            async with self._weights.mutate(version):
                for name, tensor in self._memory.items():
                    tensor[:] = new[name]

    async def update(self, version: int) -> dict[str, Any]:
        """How long it took, how many bytes came, and the digest of what is there now."""
        report = await self._weights.update(version)
        return {
            "seconds": report.seconds,
            "bytes_read": report.bytes_read,
            "codec_s": report.codec_s,
            "digest": await self.digest(),
        }

    async def digest(self) -> str:
        made = xxhash.xxh3_128()
        for name in sorted(self._memory):
            made.update(self._memory[name])
        return made.hexdigest()


if __name__ == "__main__":
    anyio.run(obey, BenchProcess)
