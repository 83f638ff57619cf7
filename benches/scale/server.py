"""A real coordinator over real sockets, and thousands of thin workers: connecting, assignment, idling, memory.

The coordinator is a process of its own, all thin workers are in this one. They speak the real protocol, MACs included. Every
worker waits for the next version before it is published; its *assignment* is the time from the publisher's `Publish` until
the worker is told from whom to read. What the workers' own process takes of that is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import anyio
import anyio.abc

import tensorhub
from benches.comparison.facts import facts
from benches.remotes import Remote, obey
from benches.scale.thin import ThinWorker, make_manifest
from tensorhub.messages import (
    AddSource,
    FromCoordinator,
    FromWorker,
    Heartbeat,
    HeartbeatAck,
    LeaveGranted,
    Outcome,
    Registered,
    Start,
    Welcome,
    Write,
)
from tensorhub.protocol.codec import FROM_COORDINATOR
from tensorhub.protocol.handshake import NONCE_BYTES, ClientHandshake
from tensorhub.protocol.stream import MessageStream
from tensorhub.types import Options, parse_address

WAIT_S = 120.0
DIALS = 64  # connections that are begun at a time
IDLE_S = 5.0
BEATS_PER_LEASE = 4


def coordinator_main(pipe: Connection, options: Options) -> None:
    anyio.run(_coordinate, pipe, options)


async def _coordinate(pipe: Connection, options: Options) -> None:
    async with tensorhub.serve(options=options) as coordinator:
        pipe.send((True, coordinator.address))
        await obey(pipe, {"usage": _usage})


async def _usage() -> tuple[float, int]:
    """CPU seconds of this process, and its resident bytes."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, _resident_bytes()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Connected:
    """A thin worker's connection."""

    def __init__(self, worker: ThinWorker) -> None:
        self.worker = worker
        self.registered = anyio.Event()
        self.assigned_at: float | None = None
        self.done = anyio.Event()
        self.fenced = anyio.Event()
        self.lost = False
        self._answers = 0.0  # when the coordinator has said what came last
        self._messages: MessageStream[FromCoordinator]

    async def run(self, host: str, port: int, lease_s: float, dialling: anyio.Semaphore) -> None:
        """Connect, register, and answer what comes, until it is cancelled."""
        async with dialling:
            stream = await anyio.connect_tcp(host, port)
            self._messages = MessageStream(stream, FROM_COORDINATOR, Options().frame_bytes_max)
            nonce = secrets.token_bytes(NONCE_BYTES)
            await self._messages.handshake(ClientHandshake("worker", self.worker.incarnation, b"", nonce), WAIT_S)
        async with self._messages, anyio.create_task_group() as tasks:
            await self._messages.send(self.worker.join())
            tasks.start_soon(self._beat, lease_s)
            async for message in self._messages:
                await self._hear(message)
            self.lost = True

    async def _hear(self, message: FromCoordinator) -> None:
        if isinstance(message, Start | Write | AddSource) and self.worker.leases == {} and self.assigned_at is None:
            grants = (message.grant,) if isinstance(message, AddSource) else message.grants
            self.assigned_at = time.perf_counter() if grants else None
        if isinstance(message, Welcome | HeartbeatAck):
            self._answers = message.said_at
        await self.say(self.worker.hear(message))
        match message:
            case Welcome():
                await self._messages.send(self.worker.register())
            case Registered():
                self.registered.set()
            case Start(write=True) | Write() | AddSource():
                while (report := self.worker.report()) is not None:
                    await self._messages.send(report)
            case Outcome():
                self.done.set()
            case LeaveGranted():
                self.fenced.set()

    async def _beat(self, lease_s: float) -> None:
        sequence = 0
        while True:
            await anyio.sleep(lease_s / BEATS_PER_LEASE)
            sequence += 1
            await self._messages.send(Heartbeat(sequence, self._answers))

    async def say(self, messages: Iterable[FromWorker]) -> None:
        for message in messages:
            await self._messages.send(message)

    def begin(self) -> None:
        """Forget how the last version went."""
        self.assigned_at, self.done, self.fenced = None, anyio.Event(), anyio.Event()


@dataclass(frozen=True)
class Row:
    workers: int
    ranks: int
    connect_s: float  # until all are registered
    assigned_ms: list[float]  # of each worker and version, sorted
    version_s: list[float]  # until all have it, of each version
    idle_share: float  # of a core that the coordinator takes while nothing happens but heartbeats
    kilobytes_per_worker: float  # by which the coordinator's resident memory has grown
    cpu_ms_per_worker_version: float
    lost: int

    def __str__(self) -> str:
        ordered = self.assigned_ms
        return (
            f"{self.workers:>8}{self.ranks:>6}{self.connect_s:>11.2f}{_quantile(ordered, 0.5):>13.0f}"
            f"{_quantile(ordered, 0.99):>11.0f}{max(self.version_s):>11.2f}{self.cpu_ms_per_worker_version:>10.2f}"
            f"{self.idle_share:>8.1%}{self.kilobytes_per_worker:>12.0f}{self.lost:>6}"
        )


HEAD = (
    f"{'workers':>8}{'ranks':>6}{'connect s':>11}{'assigned ms':>13}{'p99 ms':>11}{'version s':>11}"
    f"{'CPU ms':>10}{'idle':>8}{'kB/worker':>12}{'lost':>6}"
)


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


async def _version(publishers: list[Connected], readers: list[Connected], number: int) -> tuple[list[float], float]:
    """Milliseconds until each reader was assigned a source, and seconds until all have the version."""
    for each in (*publishers, *readers):
        each.begin()
    for each in readers:
        await each.say([each.worker.fill(number)])
    await anyio.sleep(1.0)  # the calls have arrived, and wait: what is timed begins after that
    if number > 1:
        for each in publishers:
            await each.say([each.worker.unpublish()])
        for each in publishers:
            await each.fenced.wait()
    began = time.perf_counter()
    for each in publishers:
        await each.say(each.worker.publish(number))
    for each in (*publishers, *readers):
        await each.done.wait()
    took_s = time.perf_counter() - began
    return [(each.assigned_at - began) * 1e3 for each in readers if each.assigned_at is not None], took_s


async def measure(workers: int, ranks: int, versions: int, manifest_bytes: int, lease_s: float) -> Row:
    options = Options(sessions_max=max(4096, 2 * workers), lease_s=lease_s)
    coordinator = Remote("coordinator", coordinator_main, options)
    try:
        host, port = parse_address(coordinator.hear())
        manifest = make_manifest(manifest_bytes)
        everybody = [
            Connected(ThinWorker(number, f"g{number // ranks}", number % ranks, ranks, manifest))
            for number in range(workers + ranks)
        ]
        publishers, readers = everybody[:ranks], everybody[ranks:]
        _, bytes_before = coordinator.ask("usage")
        assigned_ms, version_s, dialling = list[float](), list[float](), anyio.Semaphore(DIALS)
        with anyio.fail_after(WAIT_S + 2e-2 * workers * versions):
            async with anyio.create_task_group() as tasks:
                began = time.perf_counter()
                for each in everybody:
                    tasks.start_soon(each.run, host, port, lease_s, dialling)
                for each in everybody:
                    await each.registered.wait()
                connect_s = time.perf_counter() - began
                _, bytes_after = coordinator.ask("usage")
                idle_before, _ = coordinator.ask("usage")
                await anyio.sleep(IDLE_S)
                busy_before, _ = coordinator.ask("usage")
                for number in range(1, versions + 1):
                    milliseconds, seconds = await _version(publishers, readers, number)
                    assigned_ms += milliseconds
                    version_s.append(seconds)
                busy_after, _ = coordinator.ask("usage")
                tasks.cancel_scope.cancel()
        return Row(
            workers,
            ranks,
            connect_s,
            sorted(assigned_ms),
            version_s,
            (busy_before - idle_before) / IDLE_S,
            (bytes_after - bytes_before) / workers / 1e3,
            (busy_after - busy_before) / workers / versions * 1e3,
            sum(each.lost for each in everybody),
        )
    finally:
        coordinator.end()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.scale.server", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of a group")
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--manifest", type=int, default=100_000, metavar="BYTES")
    parser.add_argument("--lease", type=float, default=10.0, metavar="S")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard < max(options.workers) + 200:
        print(f"skipped: ulimit -n is {hard}, and {max(options.workers)} workers have a connection each")
        return 0
    rows = []
    print(HEAD)
    for ranks in options.ranks:
        for workers in options.workers:
            rows.append(anyio.run(measure, workers, ranks, options.versions, options.manifest, options.lease))
            print(rows[-1], flush=True)
    if options.json:
        options.json.write_text(json.dumps({"facts": facts(), "rows": [asdict(row) for row in rows]}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
