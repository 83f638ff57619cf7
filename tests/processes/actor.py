"""One process of a test's cluster: does what its parent says (`benches.commands`), and answers each
command.

Commands run at the same time, but for `block`, which blocks this process' only Python thread and
its loop.
"""

from __future__ import annotations

import ctypes
import hashlib
import resource
import sys
import threading
import time
from contextlib import AsyncExitStack
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import numpy.typing as npt

import tensorhub
from benches import byte_patterns
from benches.commands import obey
from tensorhub.api.archiving import Archive
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.errors import TensorHubError
from tensorhub.runtime.worker import handle
from tensorhub.types import FetchReport, Options
from tensorhub.worker.calls import CheckRanks
from tests.processes import matrices
from tests.rig import Gate, gated, handle_of, worker_of


class Actor:
    """The commands; each returns what JSON can say."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._hub: Hub
        self._weights: dict[str, Weights] = {}
        self._memory: dict[str, dict[str, npt.NDArray[np.uint64]]] = {}
        self._parts: dict[str, matrices.Part] = {}
        self._gate: Gate
        self._archive: Archive
        self._checks: threading.Event
        self._last = 2**62  # the version at which `follow` ends

    async def serve(
        self,
        port: int = 0,
        state_dir: str | None = None,
        ha: str | None = None,
        **options: Any,
    ) -> str:
        serving = tensorhub.serve(
            port=port, state_dir=state_dir, ha=ha, token="", options=Options(**options)
        )
        return (await self._stack.enter_async_context(serving)).address

    async def gate(self, arrivals: int, transport: str = "tcp", heeds_cuts: bool = True) -> None:
        """Before `connect`: hold this process' reads after so many chunks."""
        self._gate = self._stack.enter_context(
            gated(arrivals, transport=transport, heeds_cuts=heeds_cuts)
        )

    async def hide(self) -> None:
        """Have the kernel forbid others to read this process' memory."""
        assert ctypes.CDLL(None).prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE

    async def gate_holds(self, lanes: int = 1) -> None:
        while self._gate.held < lanes:  # noqa: ASYNC110 - a lane's thread comes there
            await anyio.sleep(0.001)

    async def gate_open(self) -> None:
        self._gate.open()

    async def connect(
        self, address: str, name: str, transports: list[str] | None = None, **options: Any
    ) -> None:
        connecting = tensorhub.connect(
            address, name=name, token="", transports=transports, options=Options(**options)
        )
        self._hub = await self._stack.enter_async_context(connecting)

    async def register(self, nbytes: int, name: str = "w", **settings: Any) -> None:
        memory = self._memory[name] = byte_patterns.make(nbytes)
        self._weights[name] = await self._hub.register("m", memory, **settings)

    async def register_rows(
        self, rows: int, first: int, end: int, *, says_all: bool = False, **settings: Any
    ) -> None:
        """Rows of one tensor that has so many, of 4096 bytes each. `says_all`: how many, as a
        publisher must.
        """
        memory = np.zeros((end - first, 512), np.uint64)
        self._memory["w"] = {"t": memory.reshape(-1)}
        view = tensorhub.source("t", shape=(rows, 512) if says_all else None)[first:end]
        self._weights["w"] = await self._hub.register(
            "m", {"t": memory}, sources={"t": view}, **settings
        )

    async def paint(self, value: int, name: str = "w") -> None:
        """Every word is that one: it is the same wherever somebody else has it."""
        for tensor in self._memory[name].values():
            tensor[:] = value

    async def colours(self, name: str = "w") -> list[int]:
        """Which words the memory holds."""
        return sorted(
            {int(word) for tensor in self._memory[name].values() for word in np.unique(tensor)}
        )

    async def hold_checks(self) -> None:
        """From now on this process checks for ever whether its group reads everything."""
        self._checks = threading.Event()

        def check(action: CheckRanks, digest: object) -> None:
            self._checks.set()
            threading.Event().wait()

        handle.check = check  # type: ignore[assignment,attr-defined]  # which it has imported

    async def checks(self) -> None:
        await anyio.to_thread.run_sync(self._checks.wait)

    async def write(self, content: int, name: str = "w") -> None:
        """Every word says which content it belongs to, and where it is."""
        byte_patterns.write(self._memory[name], content)

    async def register_part(
        self, cut: str, part: int, parts: int, name: str = "w", **settings: Any
    ) -> None:
        """A part of the matrices: one of so many, cut by "rows" or "columns"."""
        mine = self._parts[name] = matrices.PARTS[cut](part, parts)
        memory = self._memory[name] = mine.made(0)
        self._weights[name] = await self._hub.register(
            "m", memory, sources=mine.sources(), **settings
        )

    async def write_part(self, content: int, name: str = "w") -> None:
        for tensor, made in zip(
            self._memory[name].values(), self._parts[name].made(content).values(), strict=True
        ):
            tensor[...] = made

    async def mutate_part(self, version: int, name: str = "w") -> None:
        async with self._weights[name].mutate(version):
            await self.write_part(version, name)

    async def has_part(self, content: int, name: str = "w") -> bool:
        """Whether it has that content, to the byte."""
        made = self._parts[name].made(content)
        return all(
            np.array_equal(tensor, made[part]) for part, tensor in self._memory[name].items()
        )

    async def erase(self, part: str, name: str = "w") -> None:
        self._memory[name][part][:] = 0

    async def publish(self, version: int, name: str = "w", timeout: float | None = None) -> int:
        return (await self._weights[name].publish(version, timeout)).version

    async def unpublish(self, name: str = "w", timeout: float | None = None) -> None:
        await self._weights[name].unpublish(timeout)

    async def mutate(self, version: int, name: str = "w") -> None:
        async with self._weights[name].mutate(version):
            await self.write(version, name)

    async def replicate(
        self, selector: int | str = "latest", name: str = "w", timeout: float | None = None
    ) -> Any:
        return _shown(await self._weights[name].replicate(selector, timeout))

    async def update(
        self, name: str = "w", at_least: int | None = None, timeout: float | None = None
    ) -> Any:
        return _shown(await self._weights[name].update(at_least=at_least, timeout=timeout))

    async def archive(self, url: str) -> None:
        archiving = tensorhub.archive(self._hub, "m", url)
        self._archive = await self._stack.enter_async_context(archiving)

    async def archived(self, at_least: int) -> int:
        """The newest archived number, once it is so high."""
        return (await self._archive.wait_for(at_least=at_least)).version

    async def retain(self, latest: int) -> None:
        await self._hub.retain("m", latest=latest)

    async def wait_for(self, at_least: int) -> int:
        return (await self._hub.wait_for("m", at_least=at_least)).version

    async def state(self, name: str = "w") -> list[Any]:
        return [self._weights[name].state.value, self._weights[name].version]

    async def incarnation(self) -> str:
        return worker_of(self._hub).incarnation

    async def describe(self) -> Any:
        model = await self._hub.describe("m")
        return {
            "mark": model.mark,
            "holders": sorted(
                s.worker for r in model.replicas if r.state == "ready" for s in r.shards
            ),
            "readers": sorted(lease.reader for lease in model.leases),
            "versions": {str(version.version): version.state for version in model.versions},
            "workers": {worker.name: worker.state for worker in model.workers},
        }

    async def sources(self) -> list[str]:
        """Whom this worker reads from now, as the coordinator knows."""
        model = await self._hub.describe("m")
        return sorted(
            lease.source for lease in model.leases if lease.reader == self._hub._worker.name
        )

    async def outcome(self, name: str = "w") -> str:
        """How the read from this worker's first source has ended, once it has."""
        pull = handle_of(self._weights[name])._filler._pull
        assert pull is not None
        assert pull.runner is not None
        while (outcome := pull.runner.report().sources[0].outcome) == "reading":  # noqa: ASYNC110 - a lane's thread says it
            await anyio.sleep(0.001)
        return outcome

    async def sha(self, name: str = "w") -> str:
        digest = hashlib.sha256()
        for tensor in self._memory[name].values():
            digest.update(tensor.data)
        return digest.hexdigest()

    async def contents(self, name: str = "w") -> list[int]:
        """Which contents' words the memory holds."""
        return sorted(byte_patterns.contents(self._memory[name]))

    async def peak_bytes(self) -> int:
        """The most memory that this process has had."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    async def block(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 - a trainer that computes

    async def train(self, first: int, seconds: float, name: str = "w") -> int:
        """Mutate as fast as one can; returns the last version."""
        version, until = first, time.monotonic() + seconds
        while time.monotonic() < until:
            await self.mutate(version, name)
            version += 1
        return version - 1

    async def follow(self, name: str = "w") -> dict[str, Any]:
        """Replicate and update until the parent says the last version; every content must be whole,
        and the right one.
        """
        seen, mixed, failures = list[int](), list[Any](), dict[str, int]()
        while not seen or seen[-1] < self._last:
            try:
                report = await self._weights[name].update()
            except TensorHubError as error:
                kind = type(error).__name__
                failures[kind] = failures.get(kind, 0) + 1
                continue
            found = byte_patterns.contents(self._memory[name])
            if found != {report.version} or self._weights[name].version != report.version:
                mixed.append([report.version, sorted(found)])
            if report.changed:
                seen.append(report.version)
        return {"seen": seen, "mixed": mixed, "failures": failures}

    async def stop_at(self, version: int) -> None:
        self._last = version

    async def close(self) -> None:
        await self._stack.aclose()


def _shown(report: FetchReport) -> dict[str, Any]:
    return {
        "version": report.version,
        "changed": report.changed,
        "bytes_read": report.bytes_read,
        "reread_bytes": report.reread_bytes,
        "retries": report.retries,
        "sources": {source.name: source.outcome for source in report.sources},
        "bytes": {source.kind: source.bytes_read for source in report.sources},
        "transports": {source.name: source.transport for source in report.sources},
    }


if __name__ == "__main__":
    anyio.run(obey, Actor, backend=sys.argv[1])
