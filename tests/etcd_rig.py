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
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

ETCD = shutil.which("etcd") or "/usr/bin/etcd"
needs_etcd = pytest.mark.skipif(
    not Path(ETCD).exists(), reason="etcd is not installed (Debian: etcd-server)"
)
START_S = 60.0
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
