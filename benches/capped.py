"""Readers behind equal, capped links: how close to bytes over goodput all of them are done. For
root, on Linux, with iperf3.

Each process is in a network namespace of its own (`benches.chaos.namespaces`). No link carries more
than `--mbit` each way. Before each round iperf3 measures what the links carry between two of the
same namespaces. The optimum of any number of readers is one reader's: each passes on what it gets,
while it gets it. See README.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benches.chaos import namespaces
from benches.chaos.namespaces import Namespaces
from benches.child_processes import Process
from benches.comparison.facts import facts

PUBLISHER = "publisher"
MODULE = "benches.capped_process"
GOODPUT_S = 3.0  # of one measurement of what a link carries
CHUNKS = 256
WAIT_S = 300.0


@dataclass(frozen=True, slots=True)
class Figure:
    """One update of so many readers at once. `optimum_s`: bytes over the goodput measured in this
    round.
    """

    readers: int
    round: int
    seconds: float
    optimum_s: float
    cpu: float  # of all cores, the processes' processes only

    @property
    def ratio(self) -> float:
        return self.seconds / self.optimum_s


class BenchProcesses:
    """A coordinator, a publisher and readers, each behind its link."""

    def __init__(self, network: Namespaces, stack: ExitStack, readers: int, nbytes: int) -> None:
        self._network = network
        self._version = 0
        state = stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorhub-capped-"))
        self._coordinator = self._start("coordinator", stack)
        host, port = network.coordinators["coordinator"]
        self._coordinator.do("serve", host=host, port=port, state_dir=state)
        self._publisher = self._join(PUBLISHER, stack, nbytes)
        self._readers = [self._join(name, stack, nbytes) for name in names(readers)]
        self._all = [self._coordinator, self._publisher, *self._readers]

    def _start(self, name: str, stack: ExitStack) -> Process:
        process = Process(
            name,
            MODULE,
            prefix=self._network.prefix(name),
            environment={"TENSORHUB_TOKEN": "of this run"},
        )
        stack.callback(process.end)
        return process

    def _join(self, name: str, stack: ExitStack, nbytes: int) -> Process:
        process = self._start(name, stack)
        address, host = self._network.address(name), self._network.location(name)
        process.do(
            "join",
            address=address,
            name=name,
            host=host,
            nbytes=nbytes,
            chunk_bytes=nbytes // CHUNKS,
        )
        return process

    def update(self, readers: int) -> tuple[float, float]:
        """A new version for the first so many: seconds from the first call to the last end; CPU
        seconds of all.
        """
        self._version += 1
        self._publisher.do("mutate", version=self._version)
        used = [process.do("cpu_s") for process in self._all]
        running = [process.begin("update") for process in self._readers[:readers]]
        done = [pending.result(WAIT_S) for pending in running]
        cpu_s = sum(process.do("cpu_s") for process in self._all) - sum(used)
        for process in self._readers[:readers]:
            if (holds := process.do("holds")) != [self._version]:
                raise RuntimeError(f"{process.name} holds {holds}, not {self._version}")
        return max(each["ended"] for each in done) - min(each["began"] for each in done), cpu_s


def names(readers: int) -> list[str]:
    return [f"reader-{number}" for number in range(readers)]


def goodput(network: Namespaces) -> float:
    """Bytes per second that iperf3 moves from the publisher's namespace to the first reader's."""
    reader = names(1)[0]
    command = [*network.prefix(reader), "iperf3", "--server", "--one-off", "--forceflush"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            if server.poll() is not None:
                raise RuntimeError(f"iperf3 ended with {server.returncode} before it listened")
        client = [
            "iperf3",
            "--client",
            network.host(reader),
            "--time",
            f"{GOODPUT_S:g}",
            "--omit",
            "1",
            "--json",
        ]
        done = subprocess.run(
            [*network.prefix(PUBLISHER), *client],
            capture_output=True,
            text=True,
            timeout=GOODPUT_S + 30,
            check=True,
        )
        server.communicate(timeout=30)
    finally:
        server.kill()
        server.wait()
    received: float = json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]
    return received / 8


def measure(readers: Sequence[int], rounds: int, mbit: float, mib: float) -> list[Figure]:
    nbytes = int(mib * 2**20) // CHUNKS * CHUNKS
    figures: list[Figure] = []
    with ExitStack() as stack:
        network = stack.enter_context(Namespaces([PUBLISHER, *names(max(readers))]))
        network.cap(mbit * 1e6)
        processes = BenchProcesses(network, stack, max(readers), nbytes)
        for number in range(rounds):
            optimum_s = nbytes / goodput(network)
            for count in readers if number % 2 == 0 else reversed(readers):
                started = time.monotonic()
                seconds, cpu_s = processes.update(count)
                cpu = cpu_s / (time.monotonic() - started) / len(os.sched_getaffinity(0))
                figures.append(Figure(count, number, seconds, optimum_s, cpu))
    return figures


def table(figures: Sequence[Figure]) -> list[dict[str, Any]]:
    """One row for each number of readers: medians, least and largest."""
    rows = []
    for count in sorted({figure.readers for figure in figures}):
        mine = [figure for figure in figures if figure.readers == count]
        row: dict[str, Any] = {"readers": count}
        for name in ("seconds", "optimum_s", "ratio", "cpu"):
            values = [getattr(figure, name) for figure in mine]
            row[name] = [
                round(value, 4) for value in (statistics.median(values), min(values), max(values))
            ]
        rows.append(row)
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    print(f"\n{'readers':<10}{'seconds':>24}{'bytes / goodput':>24}{'ratio':>26}{'CPU':>8}")
    for row in rows:
        cells = [
            f"{mid:.3f} [{low:.3f}-{high:.3f}]"
            for mid, low, high in (row["seconds"], row["optimum_s"], row["ratio"])
        ]
        print(
            f"{row['readers']:<10}{cells[0]:>24}{cells[1]:>24}{cells[2]:>26}{row['cpu'][0]:>8.0%}"
        )
    print("\nMedian [least-largest] of the rounds. CPU: of all cores, while the readers update.")


def why_not() -> str | None:
    """Why this cannot be measured here; None if it can."""
    if shutil.which("iperf3") is None:
        return "iperf3 is not installed (Debian: apt-get install iperf3)"
    return namespaces.why_not()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches capped", description=__doc__)
    parser.add_argument("--readers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mbit", type=float, default=40, help="of each link, either way")
    parser.add_argument("--mib", type=float, default=24, help=f"of the version, in {CHUNKS} chunks")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write facts, figures and rows"
    )
    options = parser.parse_args(arguments)
    if min(*options.readers, options.rounds, options.mbit, options.mib) < 1:
        parser.error("give at least 1 of everything")
    if (reason := why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    known = facts() | {"links, Mbit/s": options.mbit, "MiB": options.mib, "chunks": CHUNKS}
    for name, value in known.items():
        print(f"{name}: {value}")
    figures = measure(options.readers, options.rounds, options.mbit, options.mib)
    rows = table(figures)
    show(rows)
    if options.json is not None:
        options.json.write_text(
            json.dumps({"machine": known, "figures": [asdict(f) for f in figures], "rows": rows})
        )
    return 0
