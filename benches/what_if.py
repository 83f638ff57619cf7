"""Ten changes that would help are predicted, and then carried out. For root.

Coordinator, trainer and readers are processes in network namespaces. An update is explained, as
`tensorhub explain` does it: with other updates of the model to go by. Then the same update is made
with the change; `off` says by how much the prediction missed what that took. See
docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

from benches.bottlenecks import (
    NBYTES,
    SLOW_MBIT,
    STILL_S,
    WAIT_S,
    Bottleneck,
    Cluster,
    built,
    busy_source,
    nothing,
)
from benches.child_processes import Pending, Process
from benches.comparison.facts import facts
from benches.testbed.network import why_not

MBIT: Final = 500.0  # of fast links: so few that processors do not matter
LIMIT: Final = 0.2  # by which a prediction may be off
ROOM: Final = 1 << 30
NOISE: Final = 0.2  # less than the share that a source keeps of deltas
VERSIONS_MAX: Final = 8
COMPARED_S: Final = 1.0  # in which a source keeps a version, or compares one with that before
DELTAS: Final = {"deltas": "auto", "host_memory_bytes": ROOM}


PLAIN: Final = Bottleneck("", (), "", nothing)


@dataclass(frozen=True, slots=True)
class Trial:
    """`carry_out` returns the version and the seconds of an update, which had the change if
    `changed`. `before`: updates that show what the change is worth.
    """

    name: str
    change: str  # of `Change.name`
    carry_out: Callable[[Cluster, bool], tuple[int, float]]
    before: Callable[[Cluster], object] = nothing
    cluster: Bottleneck = PLAIN
    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    mbit: float = MBIT


# --------------------------------------------------------------------------------------------------
# updates


def updated(
    readers: Sequence[Process], version: int, hook_s: float = 0.0, late_s: float = 0.0
) -> float:
    """Of ranks that call one after the other: the seconds of the slowest."""
    reading = list[Pending]()
    for reader in readers:
        if reading:
            time.sleep(late_s)
        reading.append(reader.begin("update", model="actor", version=version, hook_s=hook_s))
    seconds: list[float] = [one.result(WAIT_S) for one in reading]
    return max(seconds)


def alone(cluster: Cluster, number: int = 0) -> tuple[int, float]:
    """One reader updates to the next version."""
    version = cluster.publish()
    return version, updated([cluster.readers[number]], version)


def register(cluster: Cluster, number: int, nbytes: int = NBYTES) -> None:
    """A further reader, as a group of its own."""
    what = {"model": "actor", "nbytes": nbytes, "group": f"readers-{number}", "ranks": 1}
    cluster.readers[number].do("register", **what)


def in_turn(cluster: Cluster, *numbers: int) -> tuple[int, float]:
    """Readers update to the next version, one after the other; how long the last one takes."""
    version = cluster.publish()
    seconds = [updated([cluster.readers[number]], version) for number in numbers]
    return version, seconds[-1]


# --------------------------------------------------------------------------------------------------
# what the ten are made of


def beside_a_copy(cluster: Cluster, changed: bool) -> tuple[int, float]:
    return in_turn(cluster, 1, 0) if changed else in_turn(cluster, 0)


def near_copy(cluster: Cluster) -> None:
    """The other reader reads from the first one, in their site."""
    register(cluster, 1)
    in_turn(cluster, 0, 1)


def slow_source(cluster: Cluster) -> None:
    """The first reader knows a fast source; then the other one finds it slow."""
    register(cluster, 1)
    alone(cluster)
    cluster.network.set_mbit("trainer", SLOW_MBIT)
    alone(cluster, 1)


def alone_at_source(cluster: Cluster, changed: bool) -> tuple[int, float]:
    if not changed:
        version = cluster.publish()
        with busy_source(cluster):
            return version, updated(cluster.readers[:1], version)
    cluster.network.set_mbit("trainer", SLOW_MBIT)
    return alone(cluster)


def hooked(cluster: Cluster, changed: bool) -> tuple[int, float]:
    version = cluster.publish()
    return version, updated(cluster.readers[:1], version, hook_s=0.0 if changed else STILL_S)


def straggling(cluster: Cluster, changed: bool) -> tuple[int, float]:
    version = cluster.publish()
    return version, updated(cluster.readers[:2], version, late_s=0.0 if changed else STILL_S)


def prefetched(cluster: Cluster, changed: bool = True) -> tuple[int, float]:
    version = cluster.publish()
    if changed:
        cluster.readers[0].do("prefetch", model="actor", version=version)
    return version, updated(cluster.readers[:1], version)


def by_the_other(cluster: Cluster, changed: bool) -> tuple[int, float]:
    """The second reader has the change."""
    return alone(cluster, 1 if changed else 0)


def other_reads(cluster: Cluster) -> None:
    register(cluster, 1)
    noisy(cluster, changed=True)


def noisy(cluster: Cluster, changed: bool) -> tuple[int, float]:
    """A fifth of the bytes is noise. The second reader goes on until a version came as deltas:
    from the third one on, if the source had the time to compare it.
    """
    reader = cluster.readers[1 if changed else 0]
    for _ in range(VERSIONS_MAX if changed else 1):
        cluster.version += 1
        what = {"model": "actor", "version": cluster.version, "noise": NOISE}
        cluster.trainer.do("mutate", **what)
        time.sleep(COMPARED_S)
        seconds: float = reader.do("update", **what)
        time.sleep(COMPARED_S)
        if reader.do("saved"):
            break
    return cluster.version, seconds


def joined(cluster: Cluster) -> None:
    register(cluster, 1)
    alone(cluster, 1)


def stored(cluster: Cluster, changed: bool) -> tuple[int, float]:
    version = cluster.publish()
    with ExitStack() as stack:
        if not changed:
            stack.enter_context(slow_store(cluster))
        return version, updated(cluster.readers[:2], version)


@contextlib.contextmanager
def slow_store(cluster: Cluster) -> Iterator[None]:
    cluster.flag.touch()
    yield
    cluster.flag.unlink()


def archived(cluster: Cluster) -> None:
    """An archive in the trainer's host; the second reader, which may, reads there by itself. The
    first of its reads also opens the store: three show how fast they are.
    """
    register(cluster, 1)
    host = cluster.network.address("trainer")
    url, found = cluster.start("objects", "trainer").do("keep_objects", host=host)
    for process in cluster.observer, cluster.readers[1]:
        process.do("set_environment", found=found)
    cluster.observer.do("archive", model="actor", url=url)
    for _ in range(3):
        from_archive(cluster, changed=True)


def from_archive(cluster: Cluster, changed: bool) -> tuple[int, float]:
    version = cluster.publish()
    cluster.observer.do("archived", version=version)
    cluster.observer.do("archived", version=cluster.publish())
    if not changed:
        cluster.network.set_mbit("coordinator", SLOW_MBIT / 3)  # the archiving worker's link
    return version, updated([cluster.readers[1 if changed else 0]], version)


def of(**what: Any) -> Bottleneck:
    """A cluster without a bottleneck."""
    return replace(PLAIN, **what)


TRIALS: Final = (
    Trial("a seed in the site", "seed", beside_a_copy, near_copy, of(far=True, readers=2)),
    Trial(
        "deltas",
        "deltas",
        noisy,
        other_reads,
        of(readers=2),
        {"trainer": DELTAS, "reader-1": DELTAS},
        mbit=SLOW_MBIT,
    ),
    Trial("a second source", "second source", beside_a_copy, slow_source, of(readers=2)),
    Trial("fewer readers", "readers", alone_at_source, alone, of(models=4)),
    Trial("no before_write", "hook", hooked, mbit=SLOW_MBIT),
    Trial(
        "prefetch",
        "ahead",
        prefetched,
        partial(prefetched, changed=True),
        of(nbytes=8 * NBYTES),
        {"reader-0": {"host_memory_bytes": ROOM}},
    ),
    Trial("no straggler", "ranks", straggling, cluster=of(ranks=2), mbit=SLOW_MBIT),
    Trial("a faster store", "store", stored, cluster=of(ranks=2, slow_disk=True), mbit=SLOW_MBIT),
    Trial(
        "more WAN connections",
        "connections",
        by_the_other,
        joined,
        of(far=True, loss=0.03, readers=2),
        {
            "trainer": {"chunk_bytes": 2**18},
            "reader-0": {"wan_connections": 2},
            "reader-1": {"wan_connections": 4},
        },
    ),
    Trial(
        "direct reads of the archive",
        "direct",
        from_archive,
        archived,
        of(readers=2),
        {
            "observer": {"host_memory_bytes": ROOM, "transports": ["archive", "tcp"]},
            "reader-1": {"direct": ["s3://archives"], "transports": ["archive", "tcp"]},
        },
        mbit=SLOW_MBIT,
    ),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """`seconds`: without the change; `predicted_s`: None if nothing was said."""

    name: str
    round: int
    seconds: float
    predicted_s: float | None
    measured_s: float
    text: str

    @property
    def off(self) -> float:
        return inf if self.predicted_s is None else self.predicted_s / self.measured_s - 1.0


def measure(trial: Trial, number: int) -> Figure:
    with built(trial.cluster, trial.mbit, trial.options) as cluster:
        cluster.flag.unlink(missing_ok=True)
        trial.before(cluster)
        version, seconds = trial.carry_out(cluster, False)
        what = {"model": "actor", "version": version, "group": "readers"}
        said = cluster.observer.do("what_if", **what)
        _, measured_s = trial.carry_out(cluster, True)
    predicted_s, text = next(
        ((seconds, text) for name, seconds, text in said if name == trial.change), (None, "")
    )
    return Figure(trial.name, number, seconds, predicted_s, measured_s, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches what_if", description=__doc__)
    names = [each.name for each in TRIALS]
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and figures")
    options = parser.parse_args(arguments)
    if reason := why_not():
        print(f"skipped: {reason}")
        return 0
    known, figures = facts(), list[Figure]()
    for name, value in known.items():
        print(f"{name}: {value}")
    print(f"{'change':<30}{'without':>9}{'predicted':>11}{'measured':>10}{'off':>8}")
    for trial in [each for each in TRIALS if each.name in options.only]:
        if trial.cluster.slow_disk and shutil.which("gcc") is None:
            print(f"{trial.name:<30}skipped: there is no gcc")
            continue
        for number in range(1, options.rounds + 1):
            figure = measure(trial, number)
            figures.append(figure)
            said = "" if figure.predicted_s is None else f"{figure.predicted_s:.3f}"
            times = f"{figure.seconds:>9.3f}{said:>11}{figure.measured_s:>10.3f}"
            print(f"{figure.name:<30}{times}{figure.off:>+8.0%}  {figure.text}", flush=True)
    near = sum(abs(figure.off) <= LIMIT for figure in figures)
    print(f"{near} of {len(figures)} within {LIMIT:.0%}")
    if options.json is not None:
        rows = [asdict(figure) for figure in figures]
        options.json.write_text(json.dumps({"machine": known, "rows": rows}) + "\n")
    return 0
