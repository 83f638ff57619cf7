"""A leading coordinator is killed (SIGKILL): how long until another one leads, and from then on until
all calls go on and all workers are served.

Engines: `state_dir`, where the coordinator is started again; `lock` and `etcd` (one member, on
tmpfs if that is where temporary files are), where a standby takes over. The time of the lease, or
of the start, is shown apart: the rest is counted from when the next leader listens.

First some hubs that read in a loop what a trainer publishes, each of them a group of `--ranks`;
then thin workers (`benches.scale`), which all wait for the next version.
"""

from __future__ import annotations

import argparse
import contextlib
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import anyio
import anyio.to_thread
import numpy as np

import tensorhub
from benches.comparison.facts import facts
from benches.remotes import Remote
from benches.scale.connected import coordinator_main, listens
from benches.scale.server import restart
from tensorhub.api.weights import Weights
from tensorhub.types import Options, parse_address

ENGINES = ("state_dir", "lock", "etcd")
NBYTES = 8 * 2**20
LEASE_S = 2  # of etcd
MANIFEST_BYTES = 100_000  # of a thin worker
BEFORE_S, AFTER_S = 2.0, 3.0  # how long the hubs read before the kill, and after the takeover


@dataclass
class Seen:
    """When each caller's calls have ended, and how many have failed."""

    ended: dict[str, list[float]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def first_after(self, when: float) -> float:
        """Seconds until every caller has had a call that ended after that."""
        firsts = [
            next((at for at in ends if at > when), float("inf")) for ends in self.ended.values()
        ]
        return max(firsts) - when


@contextlib.contextmanager
def engine_of(name: str) -> Iterator[str | None]:
    """What `serve(ha=)` takes."""
    if name != "etcd":
        yield "lock" if name == "lock" else None
        return
    with tempfile.TemporaryDirectory() as directory:
        client, peer = _free_port(), _free_port()
        urls = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        command = [shutil.which("etcd") or "/usr/bin/etcd", f"--data-dir={directory}"]
        command += [f"--listen-client-urls={urls[0]}", f"--advertise-client-urls={urls[0]}"]
        command += [f"--listen-peer-urls={urls[1]}", f"--initial-advertise-peer-urls={urls[1]}"]
        command += [f"--initial-cluster=default={urls[1]}"]
        etcd = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            anyio.run(listens, client)
            yield f"etcd://127.0.0.1:{client}/bench?lease_s={LEASE_S}"
        finally:
            etcd.kill()
            etcd.wait()


def _free_port() -> int:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as made:
        port: int = made.getsockname()[1]
        return port


async def hubs(engine: str, ha: str | None, readers: int, ranks: int, lease_s: float) -> str:
    """Kill the leader under hubs that read and write all the time."""
    seen, options = Seen(), Options(lease_s=lease_s)
    with tempfile.TemporaryDirectory() as state_dir:
        setting = None if engine == "etcd" else state_dir, None, ha
        leader = Remote("leader", coordinator_main, options, 0, *setting)
        addresses = [await anyio.to_thread.run_sync(leader.hear)]
        remotes = [leader]
        if ha is not None:
            remotes.append(Remote("standby", coordinator_main, options, 0, *setting))
            addresses.append(await anyio.to_thread.run_sync(remotes[1].hear))
        try:
            async with contextlib.AsyncExitStack() as stack:
                handles = {
                    (group, rank): await stack.enter_async_context(
                        registered(addresses, f"w{group}", rank, ranks)
                    )
                    for group in range(readers + 1)
                    for rank in range(ranks)
                }
                async with anyio.create_task_group() as tasks:
                    for (group, rank), each in handles.items():
                        tasks.start_soon(read if group else train, f"w{group}.{rank}", each, seen)
                    await anyio.sleep(BEFORE_S)
                    killed_at = time.perf_counter()
                    await anyio.to_thread.run_sync(leader.kill)
                    port = parse_address(addresses[-1])[1]
                    if ha is None:
                        remotes.append(Remote("again", coordinator_main, options, port, *setting))
                    await listens(port)
                    leads_at = time.perf_counter()
                    with anyio.move_on_after(30.0):
                        while seen.first_after(leads_at) == float("inf"):  # noqa: ASYNC110
                            await anyio.sleep(0.01)
                    await anyio.sleep(AFTER_S)
                    tasks.cancel_scope.cancel()
        finally:
            for remote in remotes:
                remote.end()
    calls = sum(map(len, seen.ended.values()))
    return (
        f"{engine}: the next leads after {leads_at - killed_at:.2f} s; from then on a call of each of "
        f"{readers} readers and of the trainer, {ranks} rank(s) each, has ended after {seen.first_after(leads_at):.2f} s; "
        f"{calls} calls in all, {len(seen.failed)} failed {seen.failed[:1] or ''}"
    )


@contextlib.asynccontextmanager
async def registered(
    addresses: Sequence[str], group: str, rank: int, ranks: int
) -> AsyncIterator[Weights]:
    memory = {"w": np.zeros(NBYTES, np.uint8)}
    async with tensorhub.connect(addresses, name=f"{group}.{rank}") as hub:
        yield await hub.register("m", memory, group=group, rank=rank, world_size=ranks)


async def train(name: str, weights: Weights, seen: Seen) -> None:
    ends = seen.ended.setdefault(name, [])
    for version in range(1, 2**31):
        try:
            async with weights.mutate(version):
                pass
        except tensorhub.TensorHubError as error:
            seen.failed.append(str(error))
        ends.append(time.perf_counter())
        await anyio.sleep(0.05)


async def read(name: str, weights: Weights, seen: Seen) -> None:
    ends, least = seen.ended.setdefault(name, []), 1
    while True:
        try:
            least = (await weights.update(at_least=least)).version + 1
        except tensorhub.TensorHubError as error:
            seen.failed.append(str(error))
        ends.append(time.perf_counter())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches failover", description=__doc__)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--readers", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="of a group")
    parser.add_argument("--workers", type=int, default=1024, help="thin ones; 0: none")
    parser.add_argument("--lease", type=float, default=Options().lease_s, help="of workers")
    parser.add_argument("--rounds", type=int, default=1)
    given = parser.parse_args(arguments)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    print(facts())
    for engine in given.engines * given.rounds:
        for ranks in given.ranks:
            with engine_of(engine) as ha:
                told = anyio.run(hubs, engine, ha, given.readers, ranks, given.lease)
            print(told, flush=True)
        if given.workers:
            with engine_of(engine) as ha:
                thin = anyio.run(restart, given.workers, MANIFEST_BYTES, given.lease, ha)
            print(f"{engine}: {thin}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
