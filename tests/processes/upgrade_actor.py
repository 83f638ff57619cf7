"""A process of either release: a coordinator, a trainer or a rollout. It uses the public API only,
since the release before runs it, too.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import anyio
import numpy as np
import numpy.typing as npt

import tensorhub
from benches.commands import obey

TOKEN = "the token of both releases"
WORDS = 2**16


def filled(version: int) -> npt.NDArray[np.uint64]:
    return np.arange(WORDS, dtype=np.uint64) * np.uint64(2 * version + 1)


class Actor:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._own = AsyncExitStack()
        self._hub: tensorhub.Hub
        self._weights: tensorhub.Weights
        self._memory: npt.NDArray[np.uint64]
        self._last = 2**62  # the version at which `train` and `follow` end

    async def where(self) -> str:
        return str(Path(tensorhub.__file__).parent)

    async def serve(self, port: int, state_dir: str) -> str:
        serving = tensorhub.serve(port=port, state_dir=state_dir, token=TOKEN)
        return (await self._own.enter_async_context(serving)).address

    async def stop_serving(self) -> None:
        await self._own.aclose()

    async def connect(
        self, address: str, name: str, transports: list[str] | None, rank: int, ranks: int
    ) -> None:
        options = tensorhub.Options(chunk_bytes=2**16)
        process = name if ranks == 1 else f"{name}{rank}"
        connecting = tensorhub.connect(
            address, name=process, token=TOKEN, transports=transports, options=options
        )
        self._hub = await self._stack.enter_async_context(connecting)
        self._memory = np.zeros(WORDS, np.uint64)
        self._weights = await self._hub.register(
            "m", {"w": self._memory}, group=name, rank=rank, world_size=ranks
        )

    async def train(self, first: int) -> int:
        """Publish version after version; returns the last one."""
        version = first
        while True:
            async with self._weights.mutate(version):
                self._memory[:] = filled(version)
            if version >= self._last:
                return version
            await self._hub.retain("m", latest=1)
            version += 1
            await anyio.sleep(0.02)

    async def follow(self) -> int:
        """Take version after version, and check each; returns how many."""
        taken, held = 0, -1
        while held < self._last:
            newest = self._hub.newest("m")
            if newest is None or newest.version <= held:
                await anyio.sleep(0.005)
                continue
            report = await self._weights.update("latest", at_least=held + 1)
            held = report.version
            assert np.array_equal(self._memory, filled(held)), f"version {held}"
            taken += 1
        return taken

    async def newest(self, at_least: int = 1) -> int:
        return (await self._hub.wait_for("m", at_least=at_least)).version

    async def finish(self, after: int = 0) -> None:
        """End `train` or `follow` with this version, or the next one after it."""
        self._last = after

    async def releases(self) -> dict[str, str]:
        """Of the workers, as `status` shows them."""
        told = await self._hub.describe("m")
        return {worker.name: getattr(worker, "release", "") for worker in told.workers}

    async def fetch(self) -> None:
        """Pin a version, and fetch it as a tool does."""
        info = await self._hub.wait_for("m", at_least=1)
        async with self._hub.pin("m", info.version):
            fetched = await self._hub.fetch("m", info.version, rank=None)
            assert np.array_equal(fetched["w"].numpy(), filled(info.version))


if __name__ == "__main__":
    anyio.run(obey, Actor)
