"""The pure coordinator alone: CPU per worker and version, and its longest steps, as workers grow in
number.

Everybody connects and registers, a group publishes, all others replicate at once; then it publishes
again, and all update. `--bursts`: instead, what happens to all at once: retention begins
(`retain`), a version is filled while it is kept (`retained`) and ends (`release`), every reader
takes its memory back (`leave`), and half of the workers are lost while all fill (`lose`). Thin
workers say what workers say and move no byte, so that the figures are the coordinator's. Each has
one registration of one rank, publishes, or replicates and then updates to the newest version. A
fill says Progress `REPORTS` times, then Prepared. All messages are made before they are timed; each
step is timed alone, in this thread's CPU time. What the garbage collector takes is shown apart, and
the collector is left on.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import log2
from pathlib import Path
from statistics import fmean

from benches.comparison.facts import facts
from tensorhub.coordinator.actions import (
    CloseSession,
    Connected,
    Disconnected,
    Event,
    LookFor,
    Persist,
    Persisted,
    Received,
    Send,
    Silent,
    Tick,
)
from tensorhub.coordinator.core import Coordinator
from tensorhub.messages import Fill, FromWorker, Grant, Heartbeat, Join, Outcome, Progress, Retain
from tensorhub.model.manifest import TensorDescription
from tensorhub.testing.flow.thin import MODEL, Shard, ThinWorker
from tensorhub.types import Endpoint, Location, OpKind, Options

EVENT_S = 1e-5  # of virtual time between two events
CHUNKS = 256
CHUNK_BYTES = 4 * 2**20
# of one fill: with its call, ReadyToWrite and Prepared some 17 messages a worker and version
REPORTS = 14
RANKS_PER_HOST = 8
HOSTS_PER_RACK = 32


def make_shard(manifest_bytes: int) -> Shard:
    """A shard whose manifest has about that many bytes, as a model of many tensors has it."""
    tensors = max(1, manifest_bytes // 62)
    size = CHUNKS * CHUNK_BYTES // tensors // 2 * 2
    described = (
        TensorDescription(
            f"model.layers.{n // 9}.block.{n % 9}.weight", "bfloat16", (size // 2,), n * size, size
        )
        for n in range(tensors)
    )
    return Shard(CHUNKS * CHUNK_BYTES, CHUNK_BYTES, described)


@dataclass(slots=True, eq=False)
class LoadWorker(ThinWorker):
    """A worker whose fills only say how far they are. `number` counts all workers. `outbox`: not
    sent yet.
    """

    number: int = 0
    outbox: list[FromWorker] = field(default_factory=list)
    leases: dict[str, None] = field(default_factory=dict)
    reports: int = -1  # of the fill that is under way; -1: it may not write yet
    call: Fill | None = None  # that is under way

    @classmethod
    def of(cls, number: int, ranks: int, shard: Shard) -> LoadWorker:
        group, rank = divmod(number, ranks)
        return cls(shard, f"{number:031x}r", f"g{group}", rank, rank, ranks, number=number)

    @property
    def incarnation(self) -> str:
        return f"{self.number:032x}"

    def sent(self) -> list[FromWorker]:
        """Empty the outbox."""
        outbox, self.outbox = self.outbox, []
        return outbox

    def join(self) -> Join:
        host = self.number // RANKS_PER_HOST
        location = Location(rack=f"r{host // HOSTS_PER_RACK}", host=f"h{host}")
        endpoint = Endpoint(
            "tcp", f"10.{host >> 16 & 255}.{host >> 8 & 255}.{host & 255}:{7000 + self.rank}"
        )
        return Join(f"w{self.number}", location, (endpoint,), self.number + 1, 0)

    def call_newest(self, at_least: int | None = None) -> None:
        """Replicate, or update."""
        self.call = self.fill(OpKind.REPLICATE if self.held is None else OpKind.UPDATE, at_least)

    def call_again(self) -> None:
        """Repeat the call that was under way when the connection ended, and had not begun to
        write.
        """
        if self.call is not None and self.key is not None:
            former = self.key
            self.call = replace(self.call, key=self.next_key(), former=(former,))
            self.say(self.call)

    def publish_next(self, version: int) -> None:
        self.generation += 1
        self.publish(version)

    def report(self) -> None:
        """Say Progress for a fill that has a source, in the end Prepared."""
        if self.key is None or self.reports < 0 or not self.leases:
            return
        self.reports += 1
        if self.reports > REPORTS:
            self.reports = -1
            self.leases.clear()
            self.prepared()
        else:
            done = CHUNKS * self.reports // (REPORTS + 1)
            self.say(Progress(self.key, self.rank, done, done * CHUNK_BYTES))

    def say(self, message: FromWorker) -> None:
        self.outbox.append(message)

    def write(self, grants: tuple[Grant, ...]) -> None:
        self.generation += 1
        self.reports = 0
        for grant in grants:
            self.read(grant)

    def read(self, grant: Grant) -> None:
        self.leases[grant.lease] = None

    def drop(self, lease: str) -> bool:
        return self.leases.pop(lease, "") is None

    def ended(self, message: Outcome) -> None:
        if not message.committed:
            raise AssertionError(f"{self.group}/{self.rank}: {message.error}")
        self.call = None


@dataclass
class Collector:
    """CPU seconds that the garbage collector has taken."""

    seconds: float = 0.0
    _began: float = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            self.seconds += time.thread_time() - self._began


@dataclass
class Steps:
    """What steps have cost, by what they took."""

    count: Counter[str] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)
    longest_s: dict[str, float] = field(default_factory=dict)
    collector_s: float = 0.0

    def add(self, name: str, seconds: float, collector_s: float) -> None:
        own = seconds - collector_s
        self.count[name] += 1
        self.seconds[name] = self.seconds.get(name, 0.0) + own
        self.longest_s[name] = max(self.longest_s.get(name, 0.0), own)
        self.collector_s += collector_s

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class Core:
    """A coordinator and all its thin workers, in one thread: what is said is heard in the order in
    which it was said.
    """

    def __init__(self, workers: int, group: int, manifest_bytes: int) -> None:
        ids = itertools.count(1)
        options = Options(sessions_max=max(4096, 2 * workers))
        self.coordinator = Coordinator(
            cluster="c" * 32, epoch=1, options=options, ids=lambda: f"{next(ids):032x}", now=0.0
        )
        shard = make_shard(manifest_bytes)
        everybody = [LoadWorker.of(number, group, shard) for number in range(workers + group)]
        self.publishers, self.readers = everybody[:group], everybody[group:]
        self.everybody = everybody
        self.now = 0.0
        self.steps = Steps()
        self.said: deque[Event] = deque()
        self._collector = Collector()

    def step(self, event: Event) -> None:
        self.now += EVENT_S
        collected, began = self._collector.seconds, time.thread_time()
        actions = self.coordinator.step(event, self.now)
        took = time.thread_time() - began
        name = type(event.message if isinstance(event, Received) else event).__name__
        self.steps.add(name, took, self._collector.seconds - collected)
        for action in actions:
            match action:
                case Send():
                    worker = self.everybody[action.session]
                    worker.hear(action.message)
                    self.say(worker)
                case Persist():
                    self.said.append(Persisted(action.record))
                case LookFor():
                    self.said.append(Silent((action.session,)))
                case CloseSession():
                    raise AssertionError(f"session {action.session} was closed: {action.reason}")

    def say(self, worker: LoadWorker, *messages: FromWorker) -> None:
        """These messages, after those in the worker's outbox."""
        self.said.extend(
            Received(worker.number, message) for message in (*worker.sent(), *messages)
        )

    def run(self) -> None:
        """Until nobody has anything to say; who fills says how far it is in turns."""
        while True:
            while self.said:
                self.step(self.said.popleft())
            deadline = self.coordinator.next_deadline()
            if deadline is not None and deadline <= self.now:
                self.step(Tick())
                continue
            for worker in self.readers:
                worker.report()
                self.say(worker)
            if not self.said:
                return

    def connect(self) -> None:
        for worker in self.everybody:
            self.said.append(Connected(worker.number, worker.incarnation, "worker"))
            self.say(worker, worker.join(), worker.register(1))
        self.run()

    def version(self, number: int, *, wait_first: bool) -> None:
        """Publish it, and have all readers take it; `wait_first`: they ask before it is there."""
        if wait_first:
            self._fill(number)
        if self.publishers[0].held is not None:
            self.unpublish(self.publishers)
            self.run()
        self.publish(number)
        if not wait_first:
            self.run()
            self._fill(number)
        self.run()
        assert all(worker.held and worker.held.version == number for worker in self.readers), (
            "somebody was left behind"
        )

    # -- what happens to all at once

    def retain(self, latest: int) -> None:
        self.say(self.publishers[0], Retain(3, MODEL, latest))
        self.run()

    def leave(self) -> None:
        """Every reader takes its memory back."""
        self.unpublish(self.readers)
        self.run()
        assert all(worker.held is None for worker in self.readers), "somebody could not leave"

    def begin_version(self, number: int) -> None:
        """Publish it, and have all readers begin to take it."""
        self.unpublish(self.publishers)
        self.run()
        self.publish(number)
        self.run()
        self._fill(number)

    def lose(self) -> None:
        """Every other group is cut off, and is lost a lease later; the others are heard of."""
        lease_s = self.coordinator.cluster.options.lease_s
        lost = {worker: None for worker in self.readers if worker.number // worker.world_size % 2}
        left = [worker for worker in self.everybody if worker not in lost]
        self.said.extend(Disconnected(worker.number) for worker in lost)
        for _ in range(4):
            for worker in left:
                self.say(worker, Heartbeat(1, self.now))
            self._pass(lease_s / 3)
        assert len(self.coordinator.cluster.workers) == len(left), "others are lost"

    def _pass(self, seconds: float) -> None:
        """Hear what was said, and do what is due, for so long."""
        end = self.now + seconds
        while True:
            while self.said:
                self.step(self.said.popleft())
            deadline = self.coordinator.next_deadline()
            if deadline is None or deadline > end:
                break
            self.now = max(self.now, deadline)
            self.step(Tick())
        self.now = max(self.now, end)

    def unpublish(self, workers: Iterable[LoadWorker]) -> None:
        for worker in workers:
            worker.unpublish(2)
            self.say(worker)

    def publish(self, number: int) -> None:
        for worker in self.publishers:
            worker.publish_next(number)
            self.say(worker)

    def call(self, number: int) -> None:
        for worker in self.readers:
            worker.call_newest(number)
            self.say(worker)

    def _fill(self, number: int) -> None:
        self.call(number)
        while self.said:
            self.step(self.said.popleft())

    def measured(self, work: Callable[[], None]) -> Steps:
        """What `work` costs."""
        self.steps = Steps()
        gc.collect()
        gc.callbacks.append(self._collector)
        try:
            work()
        finally:
            gc.callbacks.remove(self._collector)
        steps, self.steps = self.steps, Steps()
        return steps


@dataclass(frozen=True)
class Row:
    """One size's figures: CPU times of the coordinator's steps, without the collector's."""

    workers: int
    ranks: int  # of a group
    versions: int
    connecting: Steps
    filling: Steps

    @property
    def us_per_worker_version(self) -> float:
        return self.filling.total_s / self.workers / self.versions * 1e6

    @property
    def longest(self) -> str:
        """What the longest step took."""
        return max(self.filling.longest_s, key=lambda name: self.filling.longest_s[name])

    def __str__(self) -> str:
        steps, events = self.filling, self.filling.count.total()
        return (
            f"{self.workers:>8}{self.ranks:>6}{self.connecting.total_s / self.workers * 1e6:>12.0f}"
            f"{self.us_per_worker_version:>12.0f}{steps.total_s / events * 1e6:>10.1f}{steps.total_s:>9.2f}"
            f"{steps.collector_s:>13.2f}{steps.longest_s[self.longest] * 1e3:>12.1f}  "
            f"{self.longest}"
        )

    def by_event(self) -> str:
        steps = self.filling
        return "\n".join(
            f"    "
            f"{name:<16}{steps.count[name]:>8}{steps.seconds[name] / steps.count[name] * 1e6:>10.1f} us"
            f"{steps.longest_s[name] * 1e3:>10.2f} ms at most"
            for name in sorted(steps.count)
        )


HEAD = (
    f"{'workers':>8}{'ranks':>6}{'connect us':>12}{'version us':>12}{'event us':>10}{'all s':>9}"
    f"{'collector s':>13}{'longest ms':>12}"
)


def measure(
    workers: int, ranks: int, versions: int, manifest_bytes: int, *, wait_first: bool
) -> Row:
    """`versions` of them, one after the other, each filled by all workers at once."""
    core = Core(workers, ranks, manifest_bytes)
    connecting = core.measured(core.connect)

    def publish_and_fill() -> None:
        for number in range(1, versions + 1):
            core.version(number, wait_first=wait_first and number > 1)

    filling = core.measured(publish_and_fill)
    core.coordinator.check_invariants()
    return Row(workers, ranks, versions, connecting, filling)


def bursts(workers: int, ranks: int, manifest_bytes: int) -> dict[str, Steps]:
    """What it costs when something happens to all at once, by what happens."""
    core, found = Core(workers, ranks, manifest_bytes), dict[str, Steps]()

    def measured(name: str, work: Callable[[], None]) -> None:
        found[name] = core.measured(work)
        core.coordinator.check_invariants()

    core.connect()
    core.version(1, wait_first=False)
    measured("retain", lambda: core.retain(1))
    measured("retained", lambda: core.version(2, wait_first=False))
    measured("release", lambda: core.retain(0))
    measured("leave", core.leave)
    core.begin_version(3)
    measured("lose", core.lose)
    return found


def slope(rows: Sequence[Row]) -> float:
    """How cost per worker and version grows with workers: the least-squares slope, log on log."""
    points = [(log2(row.workers), log2(row.us_per_worker_version)) for row in rows]
    mean_x, mean_y = fmean(x for x, _ in points), fmean(y for _, y in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches scale", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 8], help="of a group")
    parser.add_argument("--versions", type=int, default=2)
    parser.add_argument("--manifest", type=int, default=100_000, metavar="BYTES")
    parser.add_argument(
        "--wait-first",
        action="store_true",
        help="readers ask before the second version is published",
    )
    parser.add_argument(
        "--bursts", action="store_true", help="what happens to all at once, instead of fills"
    )
    parser.add_argument("--verbose", action="store_true", help="cost by kind of event")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    odd = [
        (workers, ranks)
        for workers in options.workers
        for ranks in options.ranks
        if workers % ranks
    ]
    if odd:
        parser.error(f"{odd[0][0]} workers are no groups of {odd[0][1]} ranks: give a multiple")
    if options.bursts:
        return _print_bursts(options.workers, options.ranks, options.manifest)
    rows: list[Row] = []
    print(HEAD)
    for ranks in options.ranks:
        mine: list[Row] = []
        for workers in options.workers:
            mine.append(
                measure(
                    workers,
                    ranks,
                    options.versions,
                    options.manifest,
                    wait_first=options.wait_first,
                )
            )
            print(mine[-1], flush=True)
            if options.verbose:
                print(mine[-1].by_event())
        if len(mine) > 1:
            print(
                f"   with groups of {ranks}, the cost per worker and version grows as workers ** "
                f"{slope(mine):.2f}"
            )
        rows += mine
    if options.json:
        options.json.write_text(
            json.dumps({"facts": facts(), "rows": rows}, default=vars, indent=1)
        )
    return 0


def _print_bursts(sizes: Sequence[int], groups: Sequence[int], manifest_bytes: int) -> int:
    print(
        f"{'workers':>8}{'ranks':>6}  "
        f"{'what':<10}{'us a worker':>12}{'all s':>9}{'collector s':>13}{'longest ms':>12}"
    )
    for ranks in groups:
        for workers in sizes:
            for name, steps in bursts(workers, ranks, manifest_bytes).items():
                longest = max(steps.longest_s, key=lambda kind: steps.longest_s[kind])
                print(
                    f"{workers:>8}{ranks:>6}  "
                    f"{name:<10}{steps.total_s / workers * 1e6:>12.0f}{steps.total_s:>9.2f}"
                    f"{steps.collector_s:>13.2f}{steps.longest_s[longest] * 1e3:>12.1f}  {longest}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
