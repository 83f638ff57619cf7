"""Twelve bottlenecks are made, one after the other, and `Hub.explain` must name each. For root.

Coordinator, trainer and readers are processes in network namespaces. Each version is first read
without a bottleneck, then with it: `named` says whether the longest part of the explanation has one
of the expected names, on the expected worker; `sum` how much of the call's wall time, as its caller
measured it, has a part with a name (not "other"). See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from benches.child_processes import Pending, Process
from benches.comparison.facts import facts
from benches.testbed.network import Host, Network, Wan, why_not

MODULE: Final = "benches.bottleneck_process"
PORT: Final = 7070
FAST_MBIT: Final = 4000.0
SLOW_MBIT: Final = 150.0
NBYTES: Final = 32 * 2**20
WAIT_S: Final = 120.0
CGROUPS: Final = Path("/sys/fs/cgroup/cpu")  # version 1
STILL_S: Final = 1.5  # how long what stands still does so
BURNERS: Final = 4

# until its parent is gone
BURN: Final = """import os, sys
while os.getppid() == int(sys.argv[1]):
    sum(range(10000))
"""

# fsync that takes a while, as on a slow disk, while there is a file FLAG
SLOW_DISK: Final = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <unistd.h>
static int slowly(const char *name, int fd) {
    if (access("FLAG", F_OK) == 0) usleep(700000);
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(fd);
}
int fsync(int fd) { return slowly("fsync", fd); }
int fdatasync(int fd) { return slowly("fdatasync", fd); }
"""


@dataclass(slots=True)
class Cluster:
    """What a bottleneck is made of."""

    network: Network
    stack: ExitStack
    address: str
    directory: Path
    coordinator: Process = field(init=False)
    trainer: Process = field(init=False)
    readers: list[Process] = field(init=False)
    replica: Process | None = None
    observer: Process = field(init=False)  # it only asks
    version: int = 0

    @property
    def flag(self) -> Path:
        """While it is there, a slow disk is slow."""
        return self.directory / "slow"

    def publish(self, model: str = "actor") -> int:
        self.version += 1
        self.trainer.do("mutate", model=model, version=self.version)
        if self.replica is not None:
            self.replica.do("update", model=model, version=self.version)
        return self.version

    def start(self, name: str, host: str, **environment: str) -> Process:
        given = {"TENSORHUB_TOKEN": "of this run", **environment}
        process = Process(name, MODULE, prefix=self.network.prefix(host), environment=given)
        self.stack.callback(process.end)
        return process


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """`make` brings it about while an update of the first reader (or all ranks) runs within it."""

    name: str
    parts: tuple[str, ...]  # of which the longest is one
    worker: str  # "" : any
    make: Callable[[Cluster], contextlib.AbstractContextManager[object]]
    nbytes: int = NBYTES
    far: bool = False  # the first reader is in another site
    loss: float = 0.0
    ranks: int = 1  # of the readers' group, and of the trainers'
    # the trainer is one rank, and each reader reads its share of that from a replica in its site
    has_replica: bool = False
    hook_s: float = 0.0
    late_s: float = 0.0  # by which the last rank calls
    models: int = 1  # of the trainer, each read by a reader of its own
    slow_disk: bool = False
    readers: int = 1  # processes, of which further ones hold nothing


@contextlib.contextmanager
def nothing(_: Cluster) -> Iterator[None]:
    yield


@contextlib.contextmanager
def slow_link(cluster: Cluster) -> Iterator[None]:
    cluster.network.set_mbit("reader-0", SLOW_MBIT)
    yield
    cluster.network.set_mbit("reader-0", FAST_MBIT)


def pin(pid: int, core: int) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {core})


@contextlib.contextmanager
def burning(core: int) -> Iterator[None]:
    """Processes that take that core."""
    burners = [
        subprocess.Popen([sys.executable, "-c", BURN, str(os.getpid())], start_new_session=True)
        for _ in range(BURNERS)
    ]
    try:
        for burner in burners:
            os.sched_setaffinity(burner.pid, {core})
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@contextlib.contextmanager
def short_of_cpu(cluster: Cluster) -> Iterator[None]:
    first, last = sorted(os.sched_getaffinity(0))[:2]
    pin(cluster.readers[0].pid, first)
    pin(cluster.trainer.pid, last)
    pin(cluster.coordinator.pid, last)
    with burning(first):
        yield


@contextlib.contextmanager
def held_gil(cluster: Cluster) -> Iterator[None]:
    cluster.readers[0].do("hold_gil", threads=1)
    yield
    cluster.readers[0].do("let_go")


@contextlib.contextmanager
def still(process: Process) -> Iterator[None]:
    """The process stands still for a while, from now on."""
    os.kill(process.pid, signal.SIGSTOP)
    timer = threading.Timer(STILL_S, os.kill, (process.pid, signal.SIGCONT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@contextlib.contextmanager
def throttled(cluster: Cluster) -> Iterator[None]:
    """The reader's container has a tenth of a core."""
    group = CGROUPS / f"tensorhub-{os.getpid()}"
    group.mkdir()
    pid = cluster.readers[0].pid
    try:
        (group / "cpu.cfs_quota_us").write_text("10000")
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        (CGROUPS / "cgroup.procs").write_text(str(pid))
        group.rmdir()


@contextlib.contextmanager
def busy_source(cluster: Cluster) -> Iterator[None]:
    """The trainer's uplink is shared by readers of several models."""
    cluster.network.set_mbit("trainer", SLOW_MBIT)
    others = [
        (number, reader, cluster.publish(f"actor-{number}"))
        for number, reader in enumerate(cluster.readers[1:], 1)
    ]
    reading = [
        reader.begin("update", model=f"actor-{number}", version=version)
        for number, reader, version in others
    ]
    yield
    for one in reading:
        one.result(WAIT_S)
    cluster.network.set_mbit("trainer", FAST_MBIT)


BOTTLENECKS: Final = (
    Bottleneck("slow link", ("link",), "reader-0", slow_link),
    Bottleneck("CPU", ("cpu",), "reader-0", short_of_cpu, 8 * NBYTES),
    Bottleneck("held GIL", ("gil",), "reader-0", held_gil, 8 * NBYTES),
    Bottleneck("slow disk", ("store",), "", nothing, ranks=2, slow_disk=True),
    Bottleneck("straggler rank", ("ranks",), "reader-1", nothing, ranks=2, late_s=STILL_S),
    Bottleneck("paused engine", ("before_write",), "reader-0", nothing, hook_s=STILL_S),
    Bottleneck("packet loss", ("loss",), "reader-0", nothing, far=True, loss=0.03),
    Bottleneck(
        "coordinator behind", ("coordinator",), "", lambda cluster: still(cluster.coordinator)
    ),
    Bottleneck(
        "late digest",
        ("digests",),
        "",
        lambda cluster: still(cluster.trainer),
        far=True,
        ranks=2,
        has_replica=True,
    ),
    Bottleneck("busy source", ("source busy",), "reader-0", busy_source, models=4),
    Bottleneck("WAN", ("link",), "reader-0", nothing, far=True),
    Bottleneck("throttled reader", ("cpu", "reader"), "reader-0", throttled, 16 * NBYTES),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """`seconds`: as the caller measured it. `plain_s`: without the bottleneck."""

    name: str
    round: int
    named: bool
    sum: float
    seconds: float
    plain_s: float
    sentence: str
    parts: list[Any] = field(default_factory=list)


def measure(bottleneck: Bottleneck, rounds: int) -> list[Figure]:
    with built(bottleneck) as cluster:
        return [_round(bottleneck, cluster, number) for number in range(1, rounds + 1)]


@contextlib.contextmanager
def built(
    bottleneck: Bottleneck,
    mbit: float = FAST_MBIT,
    options: Mapping[str, Mapping[str, object]] | None = None,
) -> Iterator[Cluster]:
    """The cluster that it needs. `mbit`: of each host's link.
    `options`: of `connect`, by worker.
    """
    far = "far" if bottleneck.far else "near"
    count = max(bottleneck.ranks, bottleneck.models, bottleneck.readers)
    hosts = [
        Host("coordinator", "near", mbit),
        Host("trainer", "near", mbit),
        *[Host(f"reader-{number}", far, mbit) for number in range(count)],
    ]
    wan = Wan(SLOW_MBIT, 20.0, bottleneck.loss, 1) if bottleneck.far else None
    with ExitStack() as stack:
        network = stack.enter_context(Network(hosts, wan, "cubic"))
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tensorhub-")))
        address = network.address("coordinator")
        cluster = Cluster(network, stack, f"tcp://{address}:{PORT}", directory)
        environment = (
            {"LD_PRELOAD": _slow_disk(directory, cluster.flag)} if bottleneck.slow_disk else {}
        )
        cluster.coordinator = cluster.start("coordinator", "coordinator", **environment)
        cluster.coordinator.do("serve", host=address, port=PORT, state_dir=str(directory / "state"))
        given = partial(_worker, cluster, options or {})
        cluster.trainer = given("trainer", "near")
        cluster.readers = [given(f"reader-{number}", far) for number in range(count)]
        cluster.observer = given("observer", "near", host="coordinator")
        for number in range(bottleneck.models):
            model = f"actor-{number}" if number else "actor"
            what = {"model": model, "nbytes": bottleneck.nbytes}
            ranks = 1 if bottleneck.has_replica else bottleneck.ranks
            cluster.trainer.do("register", group="trainers", ranks=ranks, **what)
            if number:
                cluster.readers[number].do("register", group=f"readers-{number}", ranks=1, **what)
        if bottleneck.has_replica:
            cluster.replica = given("replica", far, host="reader-0")
            one = {"model": "actor", "nbytes": bottleneck.nbytes}
            cluster.replica.do("register", group="replicas", ranks=1, **one)
        group = {"group": "readers", "ranks": bottleneck.ranks, "model": "actor"}
        joining = [
            reader.begin(
                "register",
                rank=rank,
                nbytes=bottleneck.nbytes,
                is_resharded=bottleneck.has_replica,
                **group,
            )
            for rank, reader in enumerate(cluster.readers[: bottleneck.ranks])
        ]
        for each in joining:
            each.result(WAIT_S)
        yield cluster


def _round(bottleneck: Bottleneck, cluster: Cluster, number: int) -> Figure:
    ranks = cluster.readers[: bottleneck.ranks]
    plain_s = max(_updated(ranks, cluster.publish()))
    version = cluster.publish()
    with bottleneck.make(cluster):
        seconds = max(_updated(ranks, version, bottleneck.hook_s, bottleneck.late_s))
    told = cluster.observer.do("explain", model="actor", version=version, group="readers")
    longest = max(told["parts"], key=lambda part: part[1])
    is_right = longest[0] in bottleneck.parts and bottleneck.worker in ("", longest[2])
    found_s = sum(part[1] for part in told["parts"] if part[0] != "other")
    what = bottleneck.name, number, is_right, found_s / seconds, seconds, plain_s
    return Figure(*what, told["sentence"], told["parts"])


def _updated(
    ranks: list[Process], version: int, hook_s: float = 0.0, late_s: float = 0.0
) -> list[float]:
    reading = list[Pending]()
    for reader in ranks:
        if reading:
            time.sleep(late_s)
        reading.append(reader.begin("update", model="actor", version=version, hook_s=hook_s))
    return [one.result(WAIT_S) for one in reading]


def _worker(
    cluster: Cluster,
    options: Mapping[str, Mapping[str, object]],
    name: str,
    site: str,
    host: str = "",
) -> Process:
    process = cluster.start(name, host or name)
    given = dict(options.get(name, {}))
    process.do("join", address=cluster.address, name=name, site=site, options=given)
    return process


def _slow_disk(directory: Path, flag: Path) -> str:
    source, library = directory / "slow.c", directory / "slow.so"
    flag.touch()
    source.write_text(SLOW_DISK.replace("FLAG", str(flag)))
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return str(library)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches bottlenecks", description=__doc__)
    names = [each.name for each in BOTTLENECKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and figures")
    parser.add_argument("--parts", action="store_true", help="show the parts of each explanation")
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    known, figures = facts(), list[Figure]()
    for name, value in known.items():
        print(f"{name}: {value}")
    for bottleneck in [each for each in BOTTLENECKS if each.name in options.only]:
        if bottleneck.slow_disk and shutil.which("gcc") is None:
            print(f"{bottleneck.name:<20}skipped: there is no gcc")
            continue
        for figure in measure(bottleneck, options.rounds):
            figures.append(figure)
            verdict = "named" if figure.named else "WRONG"
            times = f"{figure.seconds:>7.2f} s (plain {figure.plain_s:.2f})"
            print(f"{figure.name:<20}{verdict:<7}{figure.sum:>7.1%}{times}  {figure.sentence}")
            if options.parts:
                for part in figure.parts:
                    print(f"    {part[1]:8.3f} {part[0]:<14}{part[2]:<12}{part[3]:<12}{part[4]}")
            sys.stdout.flush()
    right = sum(figure.named for figure in figures)
    print(f"{right} of {len(figures)} named, least sum {min(f.sum for f in figures):.1%}")
    if options.json is not None:
        rows = [asdict(figure) for figure in figures]
        options.json.write_text(json.dumps({"machine": known, "rows": rows}) + "\n")
    return 0
