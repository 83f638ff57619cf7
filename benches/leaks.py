"""Does anything pile up? Thousands of join, publish, update and leave cycles, and what every
process holds now and then.

`python -m benches.leaks --cycles 3000`. Exit status 1 if anything grows. How it is judged: see
README.md.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from benches import leak_roles as roles
from benches.comparison.facts import facts
from benches.leak_probe import KINDS, Sample
from benches.leak_roles import PERIOD, Hook, run_role
from benches.remotes import Remote
from tensorhub.machine import SWEEP_AT

SAMPLED = ("coordinator", "trainer", "follower", "comer")
HELD = 3  # workers that stay: trainer, follower, mortal
WARM_UP = 0.25  # of the samples
# Growth per 1,000 cycles that is still flat, and growth of the whole run that is too little to
# tell. What is not named: 0.
TOLERANCE: dict[str, tuple[float, float]] = {
    "RSS KiB": (48, 1024),
    "anonymous KiB": (48, 1024),
    "Python's blocks": (200, 4000),
    "other objects": (50, 50),
    "Timers._heap": (0, SWEEP_AT),  # what was cancelled is swept out when it is so many
}
Series = list[tuple[int, int]]  # (cycle, value)


@dataclass(frozen=True)
class Row:
    """One quantity of one process, from the end of the warm-up on."""

    process: str
    kind: str
    name: str
    first: int
    last: int
    per_1000: float
    tolerance: float
    flat: bool


# --------------------------------------------------------------------------------------------------
# judging


def growth(series: Series) -> float:
    """By how much the least value grows from each third of the samples to the next, per cycle: the
    lesser of the two, or 0.

    What is there for a moment comes on top of what stays, so the least value is what has leaked.
    What grows once, as a cache that is first used late, or a table of the interpreter's that
    doubles, does not pile up: it grows once.
    """
    third = max(1, len(series) // 3)
    first, middle, last = (
        min(v for _, v in part) for part in (series[:third], series[third:-third], series[-third:])
    )
    return max(0.0, 2 * min(middle - first, last - middle) / (series[-third][0] - series[0][0]))


def judge(process: str, kind: str, name: str, series: Series) -> Row:
    tolerance, noise = TOLERANCE.get(name) or TOLERANCE.get(kind) or (0.0, 0.0)
    values = [value for _, value in series]
    per_1000 = 1000 * growth(series)
    grown = per_1000 * (series[-1][0] - series[0][0]) / 1000
    flat = per_1000 <= tolerance or grown <= noise
    if kind == "threads" and name.startswith("pool"):
        flat = min(values[-(len(values) // 3 or 1) :]) <= max(values[: len(values) // 3 or 1])
    return Row(process, kind, name, values[0], values[-1], round(per_1000, 2), tolerance, flat)


def rows(samples: dict[str, list[tuple[int, Sample]]]) -> list[Row]:
    """Every quantity of every process, the totals of each kind first."""
    found: list[Row] = []
    for process, taken in samples.items():
        kept = taken[int(len(taken) * WARM_UP) :]
        for kind in KINDS:
            names = sorted({name for _, each in kept for name in each[kind]})
            found += [
                judge(process, kind, name, [(at, each[kind].get(name, 0)) for at, each in kept])
                for name in names
            ]
    return found


def show(found: Sequence[Row]) -> None:
    """A line for each quantity that is not flat, and the memory and the totals of what is."""
    print(f"\n{'process':<14}{'quantity':<62}{'first':>10}{'last':>10}{'per 1,000 cycles':>18}")
    for process in SAMPLED:
        mine = [row for row in found if row.process == process]
        for row in mine:
            if row.kind == "memory" or not row.flat:
                _line(
                    process,
                    row.name if row.kind == "memory" else f"{row.kind}: {row.name}",
                    row,
                    row.flat,
                )
        for kind in KINDS[1:]:
            good = [row for row in mine if row.kind == kind and row.flat]
            total = Row(
                process, kind, "", sum(r.first for r in good), sum(r.last for r in good), 0, 0, True
            )
            _line(process, f"{kind}, {len(good)} kinds, all flat", total, True)


def _line(process: str, text: str, row: Row, flat: bool) -> None:
    growth = f"{row.per_1000:,.1f}" if row.name else ""
    print(
        f"{process:<14}{text:<62}{row.first:>10,}{row.last:>10,}{growth:>18}{'' if flat else '  NOT FLAT'}"
    )


# --------------------------------------------------------------------------------------------------
# running


class BenchProcesses:
    """All processes of one run."""

    def __init__(
        self, stack: ExitStack, backend: str, durable: bool, hook: Hook, fetches: bool
    ) -> None:
        self._stack, self._backend = stack, backend
        self.coordinator = self._start("coordinator", roles.coordinator, durable)
        self.address: str = self.coordinator.hear()
        self.trainer = self._start("trainer", roles.trainer, self.address)
        self.follower = self._start("follower", roles.follower, self.address, hook, fetches)
        self.comer = self._start("comer", roles.comer, self.address)
        self.mortal = self._start("mortal", roles.mortal, self.address)
        for remote in (self.trainer, self.follower, self.comer, self.mortal):
            remote.hear()

    def _start(self, name: str, role: Callable[..., object], *arguments: object) -> Remote:
        remote = Remote(name, run_role, self._backend, role, *arguments)
        self._stack.callback(remote.end)
        return remote

    def fill(self, times: int) -> int:
        """Fill the books that the code bounds; returns the last version."""
        self.trainer.tell("fill", 1, times)
        self.comer.tell("fill", times)
        self.trainer.hear()
        self.comer.hear()
        return times

    def cycle(self, version: int) -> None:
        self.trainer.ask("cycle", version)
        others = (self.follower, self.comer, self.mortal)
        for remote in others:
            remote.tell("cycle", version)
        for remote in others:
            remote.hear()

    def replace_the_mortal(self) -> None:
        self.mortal.kill()
        self.mortal = self._start("mortal", roles.mortal, self.address)
        self.mortal.hear()

    def sample(self) -> dict[str, Sample]:
        self.coordinator.ask("settle", HELD)
        return {
            remote.name: remote.ask("sample")
            for remote in (self.coordinator, self.trainer, self.follower, self.comer)
        }

    def failures(self) -> dict[str, dict[str, int]]:
        return {
            remote.name: remote.ask("failures")
            for remote in (self.trainer, self.follower, self.comer)
        }


@contextmanager
def _one_arena() -> Iterator[None]:
    """Processes that start meanwhile allocate from one heap: glibc's many, one for a few threads,
    fragment for hours.
    """
    before = os.environ.get(name := "MALLOC_ARENA_MAX")
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def bench_processes(
    backend: str, durable: bool, hook: Hook, fetches: bool
) -> Iterator[BenchProcesses]:
    with ExitStack() as stack:
        stack.enter_context(_one_arena())
        yield BenchProcesses(stack, backend, durable, hook, fetches)


def run(options: argparse.Namespace, durable: bool, hook: Hook) -> list[Row]:
    """One run: its rows, shown."""
    samples: dict[str, list[tuple[int, Sample]]] = {name: [] for name in SAMPLED}
    with bench_processes(options.backend, durable, hook, not options.without_fetch) as all_of_it:
        version = all_of_it.fill(options.fill)
        for cycle in range(1, options.cycles + 1):
            all_of_it.cycle(version + cycle)
            if options.deaths and cycle % options.deaths == 0:
                all_of_it.replace_the_mortal()
            if cycle % options.every == 0:
                for name, each in all_of_it.sample().items():
                    samples[name].append((cycle, each))
                print(f"{cycle} cycles", file=sys.stderr, flush=True)
        failures = all_of_it.failures()
    found = rows(samples)
    print(f"\n{options.backend}, the coordinator {'with' if durable else 'without'} a state_dir")
    show(found)
    for name, counts in failures.items():
        print(f"calls of the {name} that failed, most on purpose: {counts}")
    return found


def main(arguments: list[str] | None = None, hook: Hook = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.leaks", description=__doc__)
    parser.add_argument("--cycles", type=int, default=3000)
    parser.add_argument(
        "--every", type=int, default=96, metavar="CYCLES", help=f"between two samples; of {PERIOD}"
    )
    parser.add_argument(
        "--fill",
        type=int,
        default=64,
        metavar="TIMES",
        help="fill books that the code bounds, first",
    )
    parser.add_argument(
        "--deaths",
        type=int,
        default=480,
        metavar="CYCLES",
        help="between two killed processes; 0: none",
    )
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio")
    parser.add_argument(
        "--state",
        choices=("both", "with", "without"),
        default="both",
        help="the coordinator's state_dir",
    )
    parser.add_argument(
        "--without-fetch", action="store_true", help="hub.fetch imports torch, which takes seconds"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and all rows")
    options = parser.parse_args(arguments)
    if options.cycles < 4 * options.every or options.every % PERIOD or options.fill % PERIOD:
        parser.error(
            f"give cycles for 4 samples or more; --every and --fill are multiples of {PERIOD}"
        )
    known = facts()
    for name, value in known.items():
        print(f"{name}: {value}")
    runs = {"both": (True, False), "with": (True,), "without": (False,)}[options.state]
    results = {"with" if durable else "without": run(options, durable, hook) for durable in runs}
    if options.json is not None:
        shown = {state: [asdict(row) for row in found] for state, found in results.items()}
        options.json.write_text(
            json.dumps({"machine": known, "backend": options.backend, "runs": shown})
        )
    flat = all(row.flat for found in results.values() for row in found)
    print("\nEverything is flat." if flat else "\nNOT FLAT: see above.")
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
