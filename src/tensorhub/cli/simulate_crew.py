"""The processes of `tensorhub simulate`: given seeds, heard, and ended together.

Each has a session of its own, so that Ctrl-C reaches the command alone, and a hash seed of its own, so that whatever
depends on the order of a set differs from one to the other.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

SEED_S_MAX = 300.0  # for one seed; a run of it takes about a second
ANSWER_BYTES_MAX = 16 * 2**20
KILL_S = 10.0


@dataclass(frozen=True, slots=True)
class Order:
    """One seed to run. `faults` None: the seed draws from all kinds."""

    seed: int
    events: int
    faults: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Result:
    """How one order ended: with the fields of its report, or with what was broken."""

    order: Order
    report: dict[str, Any] | None
    failure: str | None


class _Silent(Exception):
    """A process has ended, or does not answer."""


class _Worker:
    """One process, and the stream of its answers."""

    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self._process = process
        self._answers = BufferedByteReceiveStream(process.stdout)

    async def run(self, order: Order) -> Result:
        assert self._process.stdin is not None
        try:
            with anyio.fail_after(SEED_S_MAX):
                await self._process.stdin.send(json.dumps(asdict(order)).encode() + b"\n")
                answer = json.loads(await self._answers.receive_until(b"\n", ANSWER_BYTES_MAX))
        except TimeoutError:
            raise _Silent(f"it did not end within {SEED_S_MAX:g} s") from None
        except (anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead):
            code = await self._process.wait()
            raise _Silent(f"its process has ended, with exit code {code}") from None
        return Result(order, answer.get("report"), answer.get("failure"))


@contextlib.asynccontextmanager
async def _worker(module: str, hash_seed: int) -> AsyncIterator[_Worker]:
    process = await anyio.open_process(
        [sys.executable, "-m", "tensorhub.cli.simulate_worker", module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None,
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        start_new_session=True,
    )
    try:
        yield _Worker(process)
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(KILL_S):
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.aclose()


async def run_all(
    orders: Sequence[Order], jobs: int, hear: Callable[[Result], bool], *, module: str, hash_seeds: count[int]
) -> None:
    """Run each order in one of `jobs` processes, by `module.run_seed`. `hear` is told each result; False ends it all."""
    left = iter(orders)
    async with anyio.create_task_group() as tasks:

        async def work() -> None:
            """Give one process an order after the other; one that fell silent is replaced."""
            for first in left:
                order: Order | None = first
                async with _worker(module, next(hash_seeds)) as worker:
                    while order is not None:
                        try:
                            result = await worker.run(order)
                        except _Silent as why:
                            result, order = Result(order, None, str(why)), None
                        else:
                            order = next(left, None)
                        if not hear(result):
                            tasks.cancel_scope.cancel()
                            return

        for _ in range(min(jobs, len(orders))):
            tasks.start_soon(work)
