"""The pure coordinator alone: CPU per worker and version, and its longest steps, as workers grow in number.

Everybody connects and registers, a group publishes, all others replicate at once; then it publishes again, and all update.
All messages are made before they are timed; each step is timed alone, in this thread's CPU time. What the garbage collector
takes is shown apart, and the collector is left on.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import log2
from pathlib import Path

from benches.scale.thin import ThinWorker, make_manifest
from tensorhub.coordinator.actions import CloseSession, Persist, Send
from tensorhub.coordinator.core import Coordinator
from tensorhub.coordinator.events import Connected, Event, Persisted, Received, Tick
from tensorhub.messages import FromWorker
from tensorhub.types import Options

EVENT_S = 1e-5  # of virtual time between two events


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
    seconds: Counter[str] = field(default_factory=Counter)
    longest: Counter[str] = field(default_factory=Counter)
    collector_s: float = 0.0

    def add(self, name: str, seconds: float, collector_s: float) -> None:
        own = seconds - collector_s
        self.count[name] += 1
        self.seconds[name] += own
        self.longest[name] = max(self.longest[name], own)
        self.collector_s += collector_s

    @property
    def total_s(self) -> float:
        return sum(self.seconds.values())


class Core:
    """A coordinator and all its thin workers, in one thread: what is said is heard in the order in which it was said."""

    def __init__(self, workers: int, group: int, manifest_bytes: int) -> None:
        ids = itertools.count(1)
        options = Options(sessions_max=max(4096, 2 * workers))
        self.coordinator = Coordinator(cluster="c" * 32, epoch=1, options=options, ids=lambda: f"{next(ids):032x}", now=0.0)
        self.manifest = make_manifest(manifest_bytes)
        everybody = [self._worker(number, group) for number in range(workers + group)]
        self.publishers, self.readers = everybody[:group], everybody[group:]
        self.everybody = everybody
        self.now = 0.0
        self.steps = Steps()
        self.said: deque[Event] = deque()
        self._collector = Collector()

    def _worker(self, number: int, group: int) -> ThinWorker:
        return ThinWorker(number, f"g{number // group}", number % group, group, self.manifest)

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
                    self.say(worker, worker.hear(action.message))
                case Persist():
                    self.said.append(Persisted(action.record))
                case CloseSession():
                    raise AssertionError(f"session {action.session} was closed: {action.reason}")

    def say(self, worker: ThinWorker, messages: Iterable[FromWorker]) -> None:
        self.said.extend(Received(worker.number, message) for message in messages)

    def run(self) -> None:
        """Until nobody has anything to say; who fills says how far it is in turns."""
        while True:
            while self.said:
                self.step(self.said.popleft())
            deadline = self.coordinator.next_deadline()
            if deadline is not None and deadline <= self.now:
                self.step(Tick())
                continue
            reports = [(worker, worker.report()) for worker in self.readers]
            for worker, report in reports:
                if report is not None:
                    self.say(worker, [report])
            if not self.said:
                return

    def connect(self) -> None:
        for worker in self.everybody:
            self.said.append(Connected(worker.number, worker.incarnation, "worker"))
            self.say(worker, [worker.join(), worker.register()])
        self.run()

    def version(self, number: int, *, wait_first: bool) -> None:
        """Publish it, and have all readers take it; `wait_first`: they ask before it is there."""
        if wait_first:
            self._fill(number)
        if self.publishers[0].held is not None:
            for worker in self.publishers:
                self.say(worker, [worker.unpublish()])
            self.run()
        for worker in self.publishers:
            self.say(worker, worker.publish(number))
        if not wait_first:
            self.run()
            self._fill(number)
        self.run()
        assert all(worker.held == number for worker in self.readers), "somebody was left behind"

    def _fill(self, number: int) -> None:
        for worker in self.readers:
            self.say(worker, [worker.fill(number)])
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
        return self.steps


def measure(workers: int, group: int, versions: int, manifest_bytes: int, *, wait_first: bool) -> dict[str, object]:
    core = Core(workers, group, manifest_bytes)
    connecting = core.measured(core.connect)

    def publish_and_fill() -> None:
        for number in range(1, versions + 1):
            core.version(number, wait_first=wait_first and number > 1)

    steps = core.measured(publish_and_fill)
    core.coordinator.check_invariants()
    events = sum(steps.count.values())
    longest = max(steps.longest, key=lambda name: steps.longest[name])
    return {
        "workers": workers,
        "group": group,
        "events": events,
        "connecting_us": connecting.total_s / workers * 1e6,
        "us_per_worker_version": steps.total_s / workers / versions * 1e6,
        "us_per_event": steps.total_s / events * 1e6,
        "longest_ms": steps.longest[longest] * 1e3,
        "longest_of": longest,
        "collector_us_per_worker_version": steps.collector_s / workers / versions * 1e6,
        "by_event_us": {name: steps.seconds[name] / steps.count[name] * 1e6 for name in sorted(steps.count)},
        "longest_by_event_ms": {name: steps.longest[name] * 1e3 for name in sorted(steps.count)},
        "counts": dict(sorted(steps.count.items())),
    }


def slope(rows: list[dict[str, object]]) -> float | None:
    """The least-squares slope of log cost on log workers."""
    points = [(log2(row["workers"]), log2(row["us_per_worker_version"])) for row in rows]  # type: ignore[arg-type]
    if len(points) < 2:
        return None
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches scale core", description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[16, 64, 256, 1024])
    parser.add_argument("--groups", type=int, nargs="+", default=[1, 8], help="ranks of a group")
    parser.add_argument("--versions", type=int, default=2)
    parser.add_argument("--manifest", type=int, default=100_000, metavar="BYTES")
    parser.add_argument("--wait-first", action="store_true", help="readers ask before the second version is published")
    parser.add_argument("--verbose", action="store_true", help="cost by kind of event")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    rows = []
    print(f"{'workers':>8}{'group':>6}{'us/worker/version':>19}{'us/event':>10}{'longest ms':>12}  of{'collector us':>18}")
    for group in options.groups:
        mine = []
        for workers in options.workers:
            row = measure(workers, group, options.versions, options.manifest, wait_first=options.wait_first)
            mine.append(row)
            print(
                f"{workers:>8}{group:>6}{row['us_per_worker_version']:>19.0f}{row['us_per_event']:>10.1f}"
                f"{row['longest_ms']:>12.1f}  {row['longest_of']:<14}{row['collector_us_per_worker_version']:>6.0f}",
                flush=True,
            )
            if options.verbose:
                for name, cost in row["by_event_us"].items():  # type: ignore[attr-defined]
                    longest = row["longest_by_event_ms"][name]  # type: ignore[index]
                    print(f"    {name:<16}{row['counts'][name]:>8}{cost:>10.1f} us{longest:>10.2f} ms")  # type: ignore[index]
        grows = slope(mine)
        if grows is not None:
            print(f"   group {group}: cost per worker and version grows as workers ** {grows:.2f}")
        rows += mine
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
