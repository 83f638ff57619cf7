"""A real coordinator over real sockets, and thousands of thin workers: connecting, assignment,
idling, memory, faults.

The coordinator is a process of its own, all thin workers are in this one. They speak the real
protocol, MACs included. Every worker waits for the next version before it is published; its
*assignment* is the time from the publisher's `Publish` until the worker is told from whom to read:
until that is at its socket, by the kernel's stamp (`arrived`), and until the process of all workers
has come to it (`assigned`).
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from pathlib import Path

import anyio
import anyio.to_thread

from benches.comparison.facts import facts
from benches.remotes import Remote
from benches.scale.connected import WAIT_S, Cluster, coordinator_main
from tensorhub.types import Options

IDLE_S = 5.0
BURST_LEASE_S = 4.0  # less than a version takes with very many workers
PER_WORKER_S = 5e-2  # that a scenario may take


def _options(workers: int, lease_s: float) -> Options:
    return Options(sessions_max=max(4096, 2 * workers), lease_s=lease_s)


def _quantile(ordered: Sequence[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else float("nan")


# --------------------------------------------------------------------------------------------------
# assignment


@dataclass(frozen=True)
class Row:
    workers: int
    ranks: int
    connect_s: float  # until all are registered
    arrived_ms: list[float]  # of each worker and version, sorted
    assigned_ms: list[float]  # the same
    version_s: list[float]  # until all have it, of each version
    idle_share: float  # of a core that the coordinator takes while nothing happens but heartbeats
    kilobytes_per_worker: float  # by which the coordinator's resident memory has grown
    cpu_ms_per_worker_version: float
    lost: int

    def __str__(self) -> str:
        arrived, assigned = self.arrived_ms, self.assigned_ms
        return (
            f"{self.workers:>8}{self.ranks:>6}{self.connect_s:>11.2f}"
            f"{_quantile(arrived, 0.5):>12.0f}{_quantile(arrived, 0.99):>8.0f}"
            f"{_quantile(assigned, 0.5):>13.0f}{_quantile(assigned, 0.99):>8.0f}"
            f"{max(self.version_s):>11.2f}{self.cpu_ms_per_worker_version:>10.2f}"
            f"{self.idle_share:>8.1%}{self.kilobytes_per_worker:>12.0f}{self.lost:>6}"
        )


HEAD = (
    f"{'workers':>8}{'ranks':>6}{'connect s':>11}{'arrived ms':>12}{'p99':>8}{'assigned ms':>13}{'p99':>8}{'version s':>11}"
    f"{'CPU ms':>10}{'idle':>8}{'kB/worker':>12}{'lost':>6}"
)


async def measure(
    workers: int, ranks: int, versions: int, manifest_bytes: int, lease_s: float
) -> Row:
    cluster = Cluster(_options(workers, lease_s), ranks, manifest_bytes)
    arrived_ms, assigned_ms, version_s = list[float](), list[float](), list[float]()
    with anyio.fail_after(WAIT_S + PER_WORKER_S * workers * versions):
        async with cluster.running():
            _, bytes_before = await cluster.usage()
            began = time.perf_counter()
            publishers = await cluster.join(ranks)
            readers = await cluster.join(workers)
            connect_s = time.perf_counter() - began
            idle_before, bytes_after = await cluster.usage()
            await anyio.sleep(IDLE_S)
            busy_before, _ = await cluster.usage()
            for _ in range(versions):
                went = await cluster.version(publishers, readers)
                arrived_ms += went.arrived_ms
                assigned_ms += went.assigned_ms
                version_s.append(went.took_s)
            busy_after, _ = await cluster.usage()
    return Row(
        workers,
        ranks,
        connect_s,
        sorted(arrived_ms),
        sorted(assigned_ms),
        version_s,
        (busy_before - idle_before) / IDLE_S,
        (bytes_after - bytes_before) / workers / 1e3,
        (busy_after - busy_before) / workers / versions * 1e3,
        cluster.lost,
    )


# --------------------------------------------------------------------------------------------------
# faults


async def burst(workers: int, manifest_bytes: int, lease_s: float = BURST_LEASE_S) -> Row:
    """A version for so many workers that the coordinator is busy with it for longer than their
    lease.
    """
    return await measure(workers, 1, 1, manifest_bytes, lease_s)


@dataclass(frozen=True)
class Storm:
    """All workers connect at the same moment, from one address."""

    workers: int
    join_s: float  # until all are registered
    handshakes_in_vain: int  # that the coordinator has ended, and that were begun again
    lost: int

    def __str__(self) -> str:
        return (
            f"{self.workers} workers at the same moment: registered after {self.join_s:.2f} s, "
            f"{self.handshakes_in_vain} handshakes in vain, {self.lost} lost"
        )


async def storm(workers: int, manifest_bytes: int, lease_s: float) -> Storm:
    cluster = Cluster(_options(workers, lease_s), 1, manifest_bytes, dials=workers)
    with anyio.fail_after(WAIT_S + PER_WORKER_S * workers):
        async with cluster.running():
            began = time.perf_counter()
            await cluster.join(workers)
            return Storm(
                workers, time.perf_counter() - began, cluster.handshakes_in_vain, cluster.lost
            )


@dataclass(frozen=True)
class Churn:
    """Some workers are gone at once while all wait for a version, and as many others join."""

    workers: int
    replaced: int
    join_s: float  # until the newcomers are registered
    assigned_ms: list[float]  # of the next version: who has stayed, and who has come
    version_s: float
    lost: int  # of those

    def __str__(self) -> str:
        return (
            f"{self.replaced} of {self.workers} workers gone and replaced: registered after "
            f"{self.join_s:.2f} s, "
            f"assigned after {_quantile(self.assigned_ms, 0.5):.0f} ms (p99 "
            f"{_quantile(self.assigned_ms, 0.99):.0f}), "
            f"{self.lost} lost"
        )


async def churn(workers: int, manifest_bytes: int, lease_s: float) -> Churn:
    cluster = Cluster(_options(workers, lease_s), 1, manifest_bytes)
    with anyio.fail_after(WAIT_S + PER_WORKER_S * workers):
        async with cluster.running():
            publishers = await cluster.join(1)
            readers = await cluster.join(workers)
            await cluster.version(publishers, readers)
            gone, stay = readers[: workers // 4], readers[workers // 4 :]
            began = time.perf_counter()
            cluster.lose(gone)
            come = await cluster.join(len(gone))
            join_s = time.perf_counter() - began
            went = await cluster.version(publishers, [*stay, *come])
    return Churn(workers, len(gone), join_s, sorted(went.assigned_ms), went.took_s, cluster.lost)


@dataclass(frozen=True)
class Restart:
    """The coordinator is killed while all wait for a version, and started again on its state."""

    workers: int
    listening_s: float  # from its death until the next one listens
    back_s: float  # from then on, until all are registered again
    assigned_s: float  # the same, until all of the calls that waited are assigned a source
    back_cpu_s: float  # of the coordinator, from when it listens until all are registered again
    workers_cpu_s: float  # the same, of the process of all workers
    handshakes_in_vain: int  # that began before the kill, or that the coordinator has ended
    lost: int

    def __str__(self) -> str:
        return (
            f"restart with {self.workers} workers: listens after {self.listening_s:.2f} s; from "
            f"then on all are back after "
            f"{self.back_s:.2f} s (CPU: coordinator {self.back_cpu_s:.2f} s, workers "
            f"{self.workers_cpu_s:.2f} s; {self.handshakes_in_vain} handshakes in vain), and "
            f"assigned after {self.assigned_s:.2f} s; {self.lost} lost"
        )


async def restart(
    workers: int, manifest_bytes: int, lease_s: float, ha: str | None = None
) -> Restart:
    """`ha`: the engine by which a standby takes over, instead. TimeoutError says how far all are."""
    options = _options(workers, lease_s)
    cluster, within_s = Cluster(options, 1, manifest_bytes), WAIT_S + PER_WORKER_S * workers
    with tempfile.TemporaryDirectory() as directory, anyio.move_on_after(within_s):
        return await _restart(cluster, workers, options, directory, ha)
    raise TimeoutError(f"not over within {within_s:g} s: {cluster}")


async def _restart(
    cluster: Cluster, workers: int, options: Options, directory: str, ha: str | None
) -> Restart:
    state_dir = None if ha is not None and ha.startswith("etcd://") else directory
    setting = 0, state_dir, None, ha
    async with cluster.running(*setting):
        standby = None
        if ha is not None:
            remote = Remote("standby", coordinator_main, options, *setting)
            standby = remote, await anyio.to_thread.run_sync(remote.hear)
        publishers = await cluster.join(1)
        readers = await cluster.join(workers)
        await cluster.publish(publishers)
        await publishers[0].done.wait()
        await cluster.wait_for_next(readers)
        killed_at, listened_at = await cluster.restart(directory, standby)
        (used_s, _), mine_s = await cluster.usage(), time.process_time()
        await cluster.are_registered(publishers)
        await cluster.publish(publishers)
        await cluster.are_registered(readers)
        back_at, mine_s = time.perf_counter(), time.process_time() - mine_s
        used_s = (await cluster.usage())[0] - used_s
        for each in readers:
            await each.done.wait()
        assigned_at = max(each.assigned_at or inf for each in readers if not each.lost)
    return Restart(
        workers,
        listened_at - killed_at,
        back_at - listened_at,
        assigned_at - listened_at,
        used_s,
        mine_s,
        cluster.handshakes_in_vain,
        cluster.lost,
    )


@dataclass(frozen=True)
class Short:
    """The coordinator's `ulimit -n` is too low for its workers."""

    workers: int
    descriptors: int
    served: int
    refusal: str  # of the others
    assigned: int  # of those that are served
    lost: int

    def __str__(self) -> str:
        return (
            f"ulimit -n {self.descriptors} and {self.workers} workers: {self.served} served, "
            f"{self.assigned} assigned, "
            f"{self.lost} lost; the others hear: {self.refusal}"
        )


async def short(workers: int, descriptors: int, manifest_bytes: int, lease_s: float) -> Short:
    cluster = Cluster(_options(workers, lease_s), 1, manifest_bytes)
    with anyio.fail_after(WAIT_S + PER_WORKER_S * workers):
        async with cluster.running(0, None, descriptors):
            publishers = await cluster.join(1)
            readers = await cluster.join(workers)
            served = [each for each in readers if not each.refused]
            went = await cluster.version(publishers, served)
            refusal = next((each.refused for each in readers if each.refused), "")
    lost = sum(each.lost for each in (*publishers, *served))
    return Short(workers, descriptors, len(served), refusal, len(went.assigned_ms), lost)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.scale.server", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1], help="of a group")
    parser.add_argument("--versions", type=int, default=3)
    parser.add_argument("--manifest", type=int, default=100_000, metavar="BYTES")
    parser.add_argument("--lease", type=float, default=10.0, metavar="S")
    parser.add_argument(
        "--burst", type=int, metavar="N", help=f"also N workers with a lease of {BURST_LEASE_S:g} s"
    )
    parser.add_argument(
        "--faults",
        type=int,
        metavar="N",
        help="also N at once, losses and joins, a restart, too few descriptors",
    )
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    most = max([*given.workers, given.burst or 0, given.faults or 0])
    if hard < most * 4 // 3 + 400:
        print(f"skipped: ulimit -n is {hard}, and {most} workers have a connection each")
        return 0
    rows = list[Row]()
    print(HEAD)
    for ranks in given.ranks:
        for workers in given.workers:
            rows.append(
                anyio.run(measure, workers, ranks, given.versions, given.manifest, given.lease)
            )
            print(rows[-1], flush=True)
    if given.burst:
        rows.append(anyio.run(burst, given.burst, given.manifest))
        print(f"{rows[-1]}  (a burst, lease {BURST_LEASE_S:g} s)", flush=True)
    faults = list[Storm | Churn | Restart | Short]()
    if given.faults:
        faults.append(anyio.run(storm, given.faults, given.manifest, given.lease))
        print(faults[-1], flush=True)
        faults.append(anyio.run(churn, given.faults, given.manifest, given.lease))
        print(faults[-1], flush=True)
        faults.append(anyio.run(restart, given.faults, given.manifest, given.lease))
        print(faults[-1], flush=True)
        faults.append(anyio.run(short, given.faults, given.faults, given.manifest, given.lease))
        print(faults[-1], flush=True)
    if given.json:
        found = {
            "facts": facts(),
            "rows": [asdict(row) for row in rows],
            "faults": [asdict(each) for each in faults],
        }
        given.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
