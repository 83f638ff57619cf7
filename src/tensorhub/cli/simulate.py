"""`tensorhub simulate`: the real machines under simulated faults, seed after seed; coverage, and
broken guarantees.

With a scenario it is the flow model instead (`simulate_flow`).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from types import ModuleType
from typing import Annotated, Any

import anyio
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from tensorhub.cli import common, progress
from tensorhub.cli.child_processes import AsyncChildProcess, ChildEnded, closing_all
from tensorhub.cli.simulate_results import COMPLETE_FROM, LEAST, Results, SeedResult, lacking

SEARCH = "tensorhub.testing.shrinking"
SEEDS_END = 2**63  # seeds are below this
EVENTS = 1000
# for a child's imports: two seconds on a quiet machine, many times that on a busy one
START_S_MAX = 300.0
SEED_S_MAX = 1800.0  # for one seed: most take a second, with 192 workers a minute of a processor
SHRINK_S, SHRINK_S_MAX = 60.0, 36_000.0
TWICE_EACH = 50  # one of so many seeds is run again, in another process


@dataclass(frozen=True)
class Plan:
    """The seeds to run, and how."""

    seeds: Sequence[int]
    events: int
    faults: tuple[str, ...] | None
    jobs: int
    failures_max: int
    shrink_s: float
    only: tuple[str, ...] | None  # these parts of its one seed
    until: int | None

    @property
    def are_full(self) -> bool:
        """Whether each seed has to have all of `LEAST`: not with fewer events, or with some kinds
        of faults only.
        """
        return self.faults is None and self.only is None and self.events >= LEAST["events"]

    def reproduce(self, seed: int) -> str:
        """The command line that runs this seed again."""
        faults = "" if self.faults is None else f" --faults {','.join(self.faults)}"
        part = "" if self.only is None else f" --only {','.join(self.only)} --until {self.until}"
        return f"tensorhub simulate --seed {seed}{faults} --events {self.events}{part}"

    def command(self, seed: int, *, shrinks: bool) -> dict[str, Any]:
        """What a child is told."""
        return {
            "seed": seed,
            "events": self.events,
            "faults": self.faults,
            "shrink_s": self.shrink_s if shrinks else None,
            "only": self.only,
            "until": self.until,
        }


def simulate(
    context: typer.Context,
    scenario: Annotated[
        str | None,
        typer.Argument(
            help="Measure this workload instead: a built-in scenario's name, or a TOML file."
        ),
    ] = None,
    seeds: Annotated[int, common.whole_option(1, help="How many seeds to run.")] = 100,
    start: Annotated[int, common.whole_option(0, SEEDS_END - 1, help="The first of them.")] = 0,
    seed: Annotated[
        int | None, common.whole_option(0, SEEDS_END - 1, help="Run this one seed.")
    ] = None,
    jobs: Annotated[
        int | None, common.whole_option(1, 1024, help="Processes; one for each core, if not given.")
    ] = None,
    faults: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these kinds of faults, not all of them.")
    ] = None,
    events: Annotated[
        int, common.whole_option(1, help="Events of each seed, before its faults end.")
    ] = EVENTS,
    failures_max: Annotated[
        int, common.whole_option(1, help="Stop after so many seeds that fail.")
    ] = 1,
    shrink_s: Annotated[
        float,
        common.seconds_option(
            0, SHRINK_S_MAX, help="Look so long for the shortest history that fails; 0: print all."
        ),
    ] = SHRINK_S,
    only: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Run these parts of the seed, as its failure names them."),
    ] = None,
    until: Annotated[
        int | None, common.whole_option(1, help="With --only: faults end after so many events.")
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Also print what was covered: faults, transitions, recovery paths, demands.",
        ),
    ] = False,
    gpus: Annotated[
        int | None, common.whole_option(1, 65_536, help="With a scenario: so many rollout GPUs.")
    ] = None,
    parameters: Annotated[
        str | None,
        typer.Option(metavar="P", help="With --gpus: the model's parameters, as 7B, 70B or 1T."),
    ] = None,
    ranks: Annotated[
        int | None, common.whole_option(1, 65_536, help="With a scenario: ranks of a group.")
    ] = None,
    systems: Annotated[
        str | None, typer.Option(metavar="A,B", help="With a scenario: only these systems.")
    ] = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Search for broken guarantees: real coordinators and workers in a simulated cluster, where
    everything fails.

    A seed decides everything that happens. The verdict comes first. Each seed that failed follows,
    with the broken guarantee, the shortest history that still fails and the command that runs that
    again (stderr gets the command of the whole seed at once). From 1,000 seeds on, every fault,
    transition and recovery path must have occurred, and every demand been judged.

    With SCENARIO, measure instead: the real coordinator over a model of a network, beside other
    ways to move weights. Built in are standalone, elastic, cross-datacenter, churn and update.
    """
    _check_kind(context, of_flow=scenario is not None)
    if scenario is not None:
        from tensorhub.cli.simulate_flow import simulate_flow

        simulate_flow(
            scenario, gpus, parameters, ranks, systems, seed, as_json=as_json, quiet=quiet
        )
        return
    search = importlib.import_module(SEARCH)
    chosen = _chosen_faults(search, faults)
    numbers = range(start, min(start + seeds, SEEDS_END)) if seed is None else range(seed, seed + 1)
    if (only is None) != (until is None) or (only is not None and seed is None):
        raise common.usage("--only, --until and --seed go together: give what a failure has said")
    atoms = None if only is None else tuple(each for each in only.split(",") if each != "nothing")
    count = jobs or os.cpu_count() or 1
    plan = Plan(numbers, events, chosen, count, failures_max, shrink_s, atoms, until)
    common.run(partial(_simulate, plan, search, as_json, quiet, verbose))


_OF_FLOW = ("gpus", "parameters", "ranks", "systems")
_OF_SEARCH = (
    *("seeds", "start", "jobs", "faults", "events", "failures_max", "shrink_s", "only", "until"),
    "verbose",
)


def _check_kind(context: typer.Context, *, of_flow: bool) -> None:
    """A usage error if an option of scenarios is given to the search, or an option of the search to
    a scenario.
    """
    for name in _OF_SEARCH if of_flow else _OF_FLOW:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise common.usage(
                f"{option} belongs to the search for broken "
                "guarantees: leave it out, or the scenario"
                if of_flow
                else f"{option} belongs to a scenario: give one, as in tensorhub simulate "
                f"standalone {option} ..."
            )
    if (
        of_flow
        and context.params.get("gpus") is None
        and context.params.get("parameters") is not None
    ):
        raise common.usage(
            "--parameters goes with --gpus: without it, a scenario is as its file says"
        )


def _chosen_faults(search: ModuleType, names: str | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    known = [str(fault) for fault in search.Fault]
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    strange = [name for name in chosen if name not in known]
    if strange:
        raise common.usage(
            f"there is no fault {strange[0]!r}: give --faults some of {', '.join(known)}"
        )
    return chosen


async def _simulate(
    plan: Plan, search: ModuleType, as_json: bool, quiet: bool, verbose: bool
) -> int:
    from tensorhub.testing.coverage import demands, wanted

    kinds = plan.faults if plan.faults is not None else [str(fault) for fault in search.Fault]
    results = Results(kinds, wanted(), search.RECOVERY_PATHS, demands())
    with _bar(plan, shown=not (quiet or as_json)) as show:
        await _run(plan, results, show, as_json)
    never = results.never() if results.seeds >= COMPLETE_FROM and plan.faults is None else []
    if as_json:
        print(json.dumps(_as_json(plan, results)), flush=True)
    else:
        _print(plan, results, never, verbose)
    return common.FAILED if results.failures or never else 0


async def _run(
    plan: Plan, results: Results, show: Callable[[Results], None], as_json: bool
) -> None:
    """All seeds; then some of them again, in new processes: a repeated seed must come to its first
    end.
    """
    begun, hash_seeds = time.monotonic(), count(1)

    def hear(result: SeedResult) -> bool:
        lacks = lacking(result.report) if result.report is not None and plan.are_full else ""
        if lacks:
            result = SeedResult(result.seed, None, f"it proves too little: {lacks}")
        elif result.report is not None:
            results.add(result.report)
        return go_on(result)

    def hear_again(result: SeedResult) -> bool:
        results.repeated += 1
        first = results.hashes[result.seed]
        if result.report is not None and result.report["end_hash"] != first:
            text = (
                f"the same seed came to another end in another process: "
                f"{result.report['end_hash']}, first {first}"
            )
            result = SeedResult(result.seed, None, text)
        return go_on(result)

    def go_on(result: SeedResult) -> bool:
        if result.failure is not None:
            results.failures.append(result)
            if not as_json:  # at once: a search may go on for long
                print(
                    f"seed {result.seed} failed: {plan.reproduce(result.seed)}",
                    file=sys.stderr,
                    flush=True,
                )
        results.seconds = time.monotonic() - begun
        show(results)
        return len(results.failures) < plan.failures_max

    await _run_all(plan, plan.seeds, hash_seeds, hear)
    seconds = results.seconds
    again = [seed for seed in plan.seeds[::TWICE_EACH] if seed in results.hashes]
    if len(results.failures) < plan.failures_max:
        await _run_all(plan, again, hash_seeds, hear_again)
    results.seconds = seconds  # of the search alone: events per second are its
    if plan.shrink_s and plan.only is None:
        await _shrink(plan, results, hash_seeds)


async def _shrink(plan: Plan, results: Results, hash_seeds: Iterator[int]) -> None:
    """Have each seed that broke a guarantee explain itself."""
    explained: dict[int, SeedResult] = {}

    def hear(result: SeedResult) -> bool:
        explained[result.seed] = result
        return True

    broken = [result.seed for result in results.failures if result.is_broken]
    await _run_all(plan, broken, hash_seeds, hear, shrinks=True)
    for n, first in enumerate(results.failures):
        found = explained.get(first.seed)
        if found is not None and found.is_broken and found.failure is not None:
            results.failures[n] = found


async def _run_all(
    plan: Plan,
    seeds: Sequence[int],
    hash_seeds: Iterator[int],
    hear: Callable[[SeedResult], bool],
    *,
    shrinks: bool = False,
) -> None:
    """Run each seed in one of `plan.jobs` child processes. `hear` is told each result; False ends
    it all. `shrinks`: they have failed, and are explained.

    Each child has a hash seed of its own, so that what depends on the order of a set differs from
    child to child.
    """
    left = iter(seeds)
    command = [sys.executable, "-m", "tensorhub.cli.simulate_worker", SEARCH]

    async def work() -> None:
        """Give one child seed after seed. A child that has ended, or is too slow, is replaced."""
        for first in left:
            async with closing_all() as children:
                environment = os.environ | {"PYTHONHASHSEED": str(next(hash_seeds))}
                child = AsyncChildProcess(
                    "its process", command, environment=environment, keeps_errors=False
                )
                children.append(child)
                await _wait_until_ready(child)
                seed: int | None = first
                while seed is not None:
                    result, can_go_on = await _run_seed(plan, seed, child, shrinks=shrinks)
                    seed = next(left, None) if can_go_on else None
                    if not hear(result):
                        tasks.cancel_scope.cancel()
                        return

    async with anyio.create_task_group() as tasks:
        for _ in range(min(plan.jobs, len(seeds))):
            tasks.start_soon(work)


async def _wait_until_ready(child: AsyncChildProcess) -> None:
    """Imports take a child longer than a seed does, and do not count as the seed's time. Raises
    CommandError.
    """
    try:
        with anyio.fail_after(START_S_MAX):
            await child.hear()
    except (TimeoutError, ChildEnded) as error:
        reason = str(error) or f"it was not ready within {START_S_MAX:g} s"
        raise common.CommandError(
            "NotStarted", f"a process for seeds did not start: {reason}"
        ) from error


async def _run_seed(
    plan: Plan, seed: int, child: AsyncChildProcess, *, shrinks: bool
) -> tuple[SeedResult, bool]:
    """The result of one seed, and whether its child can run another one."""
    seconds = SEED_S_MAX + (plan.shrink_s if shrinks else 0.0)
    try:
        with anyio.fail_after(seconds):
            answer = await child.ask(**plan.command(seed, shrinks=shrinks))
    except TimeoutError:
        return SeedResult(seed, None, f"it did not end within {seconds:g} s"), False
    except ChildEnded as ended:
        return SeedResult(seed, None, str(ended)), False
    return SeedResult(seed, answer.get("report"), answer.get("failure"), "failure" in answer), True


@contextlib.contextmanager
def _bar(plan: Plan, *, shown: bool) -> Iterator[Callable[[Results], None]]:
    """A bar on stderr."""
    columns = (
        TextColumn("seeds"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with progress.bars(*columns, TimeElapsedColumn(), TimeRemainingColumn(), shown=shown) as bars:
        task = bars.add_task("", total=len(plan.seeds))

        def show(results: Results) -> None:
            failed = f", {len(results.failures)} failed" if results.failures else ""
            again = f", {results.repeated} run twice" if results.repeated else ""
            description = f"{results.speed:,.0f} events/s{failed}{again}"
            bars.update(
                task, completed=results.seeds + len(results.failures), description=description
            )

        yield show


def _as_json(plan: Plan, results: Results) -> dict[str, Any]:
    failures = [
        {"seed": r.seed, "failure": r.failure, "reproduce": plan.reproduce(r.seed)}
        for r in results.failures
    ]
    return {
        **results.as_json(),
        "start": plan.seeds[0],
        "jobs": plan.jobs,
        "seconds": round(results.seconds, 3),
        "events_per_second": round(results.speed, 1),
        "run_twice": results.repeated,
        "failures": failures,
    }


def _print_failure(plan: Plan, result: SeedResult) -> None:
    again = plan.reproduce(result.seed)
    print(f"\nseed {result.seed} failed:\n{result.failure}")
    if "\nreproduce: " not in (result.failure or ""):  # what a broken guarantee says ends with it
        print(f"reproduce: {again}")


def _print(plan: Plan, results: Results, never: list[str], verbose: bool) -> None:
    """The verdict first; then faults; the coverage, if `verbose`; and which seeds failed."""
    verdict = "FAILED" if results.failures or never else "passed"
    each = f"{results.speed / min(plan.jobs, len(plan.seeds)):,.0f} per process"
    words = [
        f"{verdict}: {results.seeds:,} seeds passed, {len(results.failures)} failed",
        f"{results.events:,} events, {results.speed:,.0f} per second ({each})",
        f"{results.repeated} seeds run twice{'' if results.failures else ', to the same end'}",
    ]
    print("; ".join(words))
    for name in never:
        print(f"never reached: {name}")
    least = ", ".join(f"{number:,} {name}" for name, number in LEAST.items())
    print(f"{results.full:,} seeds had at least {least}")
    for result in results.failures:
        _print_failure(plan, result)
    if verbose:
        print(f"\n{results.render()}")
    sys.stdout.flush()
