"""One process of the run: a coordinator or a worker that does what the run says
(`benches.commands`).

Each call answers with what it returned or raised and with which contents' words the memory holds
then, found word by word (`benches.byte_patterns`). An error that is not a TensorHubError is told as
such.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

import tensorhub
from benches import byte_patterns
from benches.commands import obey
from tensorhub.api.archiving import Archive
from tensorhub.api.hub import Hub
from tensorhub.api.tools import fetch_into
from tensorhub.api.weights import Weights
from tensorhub.errors import TensorHubError
from tensorhub.memory.file_target import FileTarget
from tensorhub.types import FetchReport, Location, Options, VersionInfo

MODEL = "m"
# states in which nobody but the caller may write the memory
SETTLED = ("ready", "empty", "draining", "closed")
# the next version changes two words of so many: as a delta it is a fraction
STRIPES = 64


class BenchProcess:
    """The commands; each returns what JSON can say."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._hub: Hub
        self._archive: Archive | None = None
        self._weights = dict[int, Weights]()  # by rank
        self._memory = dict[int, byte_patterns.Tensors]()

    async def serve(
        self, host: str, port: int, state_dir: str | None, ha: str | None, options: dict[str, Any]
    ) -> str:
        logging.basicConfig(level=logging.INFO)  # the run counts when it leads
        serving = tensorhub.serve(
            host=host, port=port, state_dir=state_dir, ha=ha, options=Options(**options)
        )
        return (await self._stack.enter_async_context(serving)).address

    async def connect(
        self,
        address: str,
        name: str,
        location: dict[str, str],
        prefetch: bool,
        transports: list[str] | None,
        options: dict[str, Any],
    ) -> Any:
        options["direct"] = tuple(options["direct"])
        given: dict[str, Any] = {
            "name": name,
            "location": Location(**location),
            "prefetch": prefetch,
            "transports": transports,
        }
        connecting = tensorhub.connect(address, **given, options=Options(**options))
        return await self._told(self._enter(connecting))

    async def _enter(self, connecting: Any) -> None:
        self._hub = await self._stack.enter_async_context(connecting)

    async def register(
        self, nbytes: int, group: str, rank: int, world_size: int, spot: bool, shared: bool
    ) -> Any:
        memory = byte_patterns.make(nbytes)
        if shared:
            memory = tensorhub.shared_empty_like(memory)
        byte_patterns.write(memory, 0, rank, STRIPES)
        registering = self._hub.register(
            MODEL, memory, group=group, rank=rank, world_size=world_size, spot=spot
        )
        return await self._told(self._took(registering, rank, memory), rank)

    async def _took(
        self, registering: Awaitable[Weights], rank: int, memory: byte_patterns.Tensors
    ) -> None:
        self._weights[rank], self._memory[rank] = await registering, memory

    async def mutate(self, rank: int, version: int, content: int, timeout: float) -> Any:
        return await self._told(self._mutate(rank, version, content, timeout), rank)

    async def _mutate(self, rank: int, version: int, content: int, timeout: float) -> None:
        async with self._weights[rank].mutate(version, timeout):
            byte_patterns.write(self._memory[rank], content, rank, STRIPES)

    async def update(
        self, rank: int, timeout: float, staged: bool = False, at_least: int | None = None
    ) -> Any:
        updating = self._weights[rank].update(staged=staged, at_least=at_least, timeout=timeout)
        return await self._told(updating, rank)

    async def fetch(self, rank: int, timeout: float, version: int | None = None) -> Any:
        """That number, else the latest, into a file, by a handle that is nobody's; its words are
        read from the file.
        """
        with tempfile.TemporaryDirectory(prefix="tensorhub-chaos-fetch-") as folder:
            out = Path(folder) / "shard.safetensors"
            with FileTarget(out) as target:
                fetching = fetch_into(
                    self._hub, MODEL, version or "latest", target, rank=rank, timeout=timeout
                )
                said = await self._told(self._kept(fetching, target))
            if said["outcome"] == "ok":
                memory = byte_patterns.read(out)
                said |= {
                    "holds": said["version"],
                    "contents": sorted(byte_patterns.contents(memory, rank, STRIPES)),
                }
                said["checked"] = sum(tensor.nbytes for tensor in memory.values())
        return said

    async def _kept(
        self, fetching: Awaitable[tuple[VersionInfo, FetchReport]], target: FileTarget
    ) -> FetchReport:
        _, report = await fetching
        await anyio.to_thread.run_sync(target.commit)
        return report

    async def close_handle(self, rank: int, abandon: bool) -> Any:
        return await self._told(self._weights[rank].close(abandon), rank)

    async def retain(self, latest: int, timeout: float) -> Any:
        return await self._told(self._hub.retain(MODEL, latest=latest, timeout=timeout))

    async def rollback(self, to: int, timeout: float) -> Any:
        return await self._told(self._hub.rollback(MODEL, to=to, timeout=timeout))

    async def archive(self, url: str, keep: int) -> Any:
        """Begin one; one that has ended is let go."""
        return await self._told(self._begin_archive(url, keep))

    async def _begin_archive(self, url: str, keep: int) -> None:
        if self._archive is not None:
            archive, self._archive = self._archive, None
            with contextlib.suppress(TensorHubError):  # what has ended it
                await archive.close()
        self._archive = await tensorhub.archive(self._hub, MODEL, url, keep=keep)

    async def archived(self, at_least: int, timeout: float) -> Any:
        """The numbers in the archive, once there is one from `at_least` on."""
        assert self._archive is not None
        await self._archive.wait_for(at_least=at_least, timeout=timeout)
        return [each.version for each in self._archive.versions]

    async def describe(self, timeout: float) -> Any:
        model = await self._hub.describe(MODEL, timeout)
        return {
            "mark": model.mark,
            "versions": {str(version.version): version.state for version in model.versions},
            "replicas": [
                [
                    r.group,
                    r.version,
                    r.state,
                    r.medium,
                    [[s.worker, s.rank, s.state] for s in r.shards],
                ]
                for r in model.replicas
            ],
            "leases": [
                [lease.reader, lease.source, lease.version, lease.state] for lease in model.leases
            ],
            "workers": [[worker.name, worker.state] for worker in model.workers],
        }

    async def _told(self, call: Awaitable[object], rank: int | None = None) -> dict[str, Any]:
        """What a call did, and how the memory is after it."""
        started, said = time.monotonic(), dict[str, Any](outcome="ok")
        try:
            result = await call
        except TensorHubError as error:
            said |= {
                "outcome": type(error).__name__,
                "memory": error.memory,
                "text": str(error),
                "retryable": error.retryable,
            }
        except Exception as error:
            said |= {"outcome": "untyped", "text": repr(error)}
        else:
            if isinstance(result, FetchReport):
                said |= {
                    "version": result.version,
                    "changed": result.changed,
                    "reread": result.reread_bytes,
                    "read": result.bytes_read,
                    "saved": result.bytes_saved,
                    "direct": sum(
                        each.bytes_read for each in result.sources if each.transport == "archive"
                    ),
                }
        said["seconds"] = time.monotonic() - started
        if rank is not None and rank in self._weights:
            weights, memory = self._weights[rank], self._memory[rank]
            said |= {"state": weights.state.value, "holds": weights.version}
            if said["state"] in SETTLED:
                said["contents"] = sorted(byte_patterns.contents(memory, rank, STRIPES))
                said["checked"] = sum(tensor.nbytes for tensor in memory.values())
        return said


if __name__ == "__main__":
    anyio.run(obey, BenchProcess, backend=sys.argv[1])
