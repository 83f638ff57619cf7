"""Real etcd servers for tests, with short times of their own, on loopback."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import anyio
import anyio.to_thread
import pytest

from tensorhub.coordinator import Durable, Entry, Publication
from tensorhub.runtime.control.etcd import Etcd, Place
from tensorhub.runtime.control.etcd_election import EtcdElection, EtcdTerm
from tensorhub.types import OpKey

ETCD = shutil.which("etcd") or "/usr/bin/etcd"
needs_etcd = pytest.mark.skipif(
    not Path(ETCD).exists(), reason="etcd is not installed (Debian: etcd-server)"
)
START_S = 60.0
ADDRESS = "tcp://10.0.0.1:7411"  # of a candidate
_prefixes = iter(range(10**6))
TIMES = ("--heartbeat-interval=20", "--election-timeout=200", "--unsafe-no-fsync")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in made:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in made]


class Member:
    """One server, which can be stopped, killed and started again."""

    def __init__(
        self, directory: Path, name: str, ports: Sequence[int], peers: str, more: Sequence[str]
    ) -> None:
        client, peer, health = ports
        self.endpoint = f"127.0.0.1:{client}"
        self._health = f"http://127.0.0.1:{health}"
        self._log = directory / f"{name}.log"
        scheme = "https" if more and more[0].startswith("--cert") else "http"
        here, there = f"{scheme}://{self.endpoint}", f"http://127.0.0.1:{peer}"
        self._command = [
            ETCD,
            f"--name={name}",
            f"--data-dir={directory / name}",
            f"--listen-client-urls={here}",
            f"--advertise-client-urls={here}",
            f"--listen-peer-urls={there}",
            f"--initial-advertise-peer-urls={there}",
            f"--initial-cluster={peers}",
            f"--listen-metrics-urls={self._health}",
            *TIMES,
            *more,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_S)
            self._process = None

    def wait(self) -> None:
        """Until it serves."""
        deadline = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self._health}/health", timeout=1.0):
                    return
            except (urllib.error.URLError, OSError):
                died = self._process is None or self._process.poll() is not None
                if died or time.monotonic() > deadline:
                    raise AssertionError(self._log.read_text()[-3000:]) from None
                time.sleep(0.02)


@contextlib.contextmanager
def etcd_servers(directory: Path, count: int = 1, *more: str) -> Iterator[list[Member]]:
    """A cluster of etcd that serves. `more`: options of etcd."""
    ports = free_ports(3 * count)
    named = ",".join(f"m{n}=http://127.0.0.1:{port}" for n, port in enumerate(ports[1::3]))
    members = [
        Member(directory, f"m{n}", ports[3 * n : 3 * n + 3], named, more) for n in range(count)
    ]
    try:
        for each in members:
            each.start()
        for each in members:
            each.wait()
        yield members
    finally:
        for each in members:
            each.kill()


# --------------------------------------------------------------------------------------------------
# coordinators' terms, and what they keep


def place_at(member: Member) -> Place:
    """A prefix that no other test uses."""
    return Place((member.endpoint,), f"test-{next(_prefixes)}", 60)


@contextlib.asynccontextmanager
async def connected(place: Place) -> AsyncIterator[Etcd]:
    client = Etcd(place)
    try:
        yield client
    finally:
        await client.aclose()


@contextlib.asynccontextmanager
async def elected(place: Place) -> AsyncIterator[EtcdTerm]:
    """A term; its lease is longer than a test."""
    election = EtcdElection(place)
    try:
        with anyio.fail_after(30):
            term = await election.campaign(ADDRESS, lambda leader: None)
        try:
            yield term
        finally:
            await term.resign()
    finally:
        await election.aclose()


async def read(term: EtcdTerm) -> Durable:
    return await anyio.to_thread.run_sync(term.store.read)


async def write(term: EtcdTerm, *entries: Entry) -> None:
    await anyio.to_thread.run_sync(term.store.write, entries)


async def kept(place: Place) -> Durable:
    """What the next leader reads."""
    async with elected(place) as term:
        return await read(term)


async def values(place: Place) -> dict[bytes, bytes]:
    async with connected(place) as client:
        return {each.key: each.value for each in await client.values(place.key(""))}


def publication(number: int, lineage: int = 0, ids: bytes = b"", model: str = "m") -> Publication:
    key = OpKey(model, "g", 7, number)
    return Publication(model, lineage, number, f"c-{lineage}-{number}", 12, 1, "world/1", key, ids)
