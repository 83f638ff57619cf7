"""`tensorhub bench`: TensorHub, its ceilings and its peers, on the same bytes, in turns, on this machine."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import anyio
import typer
from rich.console import Console
from rich.text import Text

from tensorhub.cli.bench import environments, report, suite
from tensorhub.cli.bench.facts import facts
from tensorhub.cli.bench.network import Network, own_network
from tensorhub.cli.bench.picture import draw
from tensorhub.cli.bench.suite import Plan, Visit
from tensorhub.cli.bench.ways import WAYS, Way
from tensorhub.cli.common import (
    FAILED,
    CommandError,
    QuietOption,
    print_table,
    report as report_error,
    run,
    seconds,
    usage,
    whole,
)

RECEIVERS_MAX = 64
MIB_MIN = 2


def bench(
    rounds: Annotated[
        int, typer.Option(parser=whole(1), metavar="N", help="How often each way is visited; every other round backwards.")
    ] = 3,
    copies: Annotated[int, typer.Option(parser=whole(1), metavar="N", help="Timed copies of each visit.")] = 3,
    mib: Annotated[
        int, typer.Option(parser=whole(MIB_MIN), metavar="N", help="Bytes of the weights, in MiB; every process holds them.")
    ] = 1024,
    receivers: Annotated[str, typer.Option(metavar="N,M", help="To how many receivers at once.")] = "1,4",
    only: Annotated[str | None, typer.Option(metavar="A,B", help="Only these ways; see --list.")] = None,
    skip: Annotated[str | None, typer.Option(metavar="A,B", help="All but these ways.")] = None,
    timeout: Annotated[
        float, typer.Option(parser=seconds(1, 1e9), metavar="S", help="Seconds for each step of a visit; then it is ended.")
    ] = 60.0,
    results: Annotated[Path | None, typer.Option(metavar="FILE", help="Write every figure here, as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a picture here, as SVG.")] = None,
    environments_at: Annotated[
        Path | None,
        typer.Option("--environments", metavar="DIR", help="Where the peers are; default: ~/.cache/tensorhub/bench."),
    ] = None,
    install: Annotated[bool, typer.Option("--install", help="First install the peers there, from PyPI.")] = False,
    list_ways: Annotated[bool, typer.Option("--list", help="Name the ways, and end.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Compare TensorHub with the ceilings of this machine and with its peers: the same bytes, one source to some receivers.

    Each way runs in processes of its own, in turns; what arrives is verified. As root, all of them run in a network
    namespace of their own, under the same congestion control. What is not installed is told at the end (docs/benchmarks.md).
    """
    if list_ways:
        for way in WAYS:
            print(f"{way.name:22} {way.title}")
        return
    try:
        ways, fans = _chosen(only, skip), _fans(receivers)
        directory = (environments_at or environments.default_directory()).absolute()
        _check_writable([file for file in (results, picture) if file])
        plan = Plan(ways, rounds, copies, mib, fans, timeout, directory)
    except CommandError as error:
        raise typer.Exit(report_error(error)) from None
    if install:
        _install(directory, ways)
    known = facts()
    with own_network() as network:  # of this thread, in which every process is started
        run(partial(_bench, plan, known, network, results, picture, quiet))


def _chosen(only: str | None, skip: str | None) -> list[Way]:
    wanted, unwanted = _names(only), _names(skip)
    known = [way.name for way in WAYS]
    strange = [name for name in (*wanted, *unwanted) if name not in known]
    if strange:
        raise usage(f"there is no way {strange[0]!r}: give some of {', '.join(known)}")
    chosen = [way for way in WAYS if (not wanted or way.name in wanted) and way.name not in unwanted]
    if not chosen:
        raise usage("no way is left: take some out of --skip")
    return chosen


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _fans(text: str) -> list[int]:
    try:
        fans = sorted({int(name) for name in _names(text)})
    except ValueError:
        fans = []
    if not fans or fans[0] < 1 or fans[-1] > RECEIVERS_MAX:
        raise usage(f"--receivers {text!r} are no numbers from 1 to {RECEIVERS_MAX}: give some, as in 1,4")
    return fans


def _check_writable(files: Sequence[Path]) -> None:
    """Now, and not after half an hour."""
    for file in files:
        try:
            file.open("a").close()
        except OSError as error:
            raise usage(f"{file} cannot be written ({error.strerror}): give another file") from error


def _install(directory: Path, ways: Sequence[Way]) -> None:
    console = Console(stderr=True)
    for name in dict.fromkeys(way.environment for way in ways if way.environment is not None):
        console.print(f"installing {name} in {directory / name}", soft_wrap=True, highlight=False)
        if (reason := environments.install(directory, name)) is not None:
            console.print(Text(f"  failed: {reason}"), soft_wrap=True)


async def _bench(
    plan: Plan, known: dict[str, object], network: Network, results: Path | None, picture: Path | None, quiet: bool
) -> int:
    visits: list[Visit] = []

    def tell(visit: Visit) -> None:
        visits.append(visit)
        if not quiet:
            _show(visit)

    try:
        await suite.run(plan, tell)
    except anyio.get_cancelled_exc_class():
        if visits:
            _report(plan, known, network, results, picture, visits)
        raise
    return _report(plan, known, network, results, picture, visits)


def _report(
    plan: Plan,
    known: dict[str, object],
    network: Network,
    results: Path | None,
    picture: Path | None,
    visits: Sequence[Visit],
) -> int:
    """Print and write what is known, also of a run that was broken off; the exit code."""
    found = report.rows(plan, visits, network)
    conditions = _conditions(plan, known, network)
    if results is not None:
        results.write_text(json.dumps(_document(plan, known, network, found, visits), indent=1) + "\n")
    if picture is not None:
        picture.write_text(draw(found, "From one source into each receiver's own tensors", conditions))
    print_table(report.table(found))
    for line in (*conditions, *report.complaints(found)):
        print(line, flush=True)
    return FAILED if all(row.seconds is None for row in found) else 0


def _show(visit: Visit) -> None:
    """One line for each visit, on stderr."""
    seconds = [copy.seconds for copy in visit.copies]
    what = visit.reason or f"{statistics.median(seconds):.4f} s"
    print(f"round {visit.round}: 1 -> {visit.fan}: {visit.way}: {what}", file=sys.stderr, flush=True)


def _conditions(plan: Plan, known: dict[str, object], network: Network) -> list[str]:
    bytes_ = f"{plan.mib} MiB in 300 tensors, half of them tiny, into each receiver's own touched tensors"
    often = f"{plan.rounds} rounds of {plan.copies} timed copies; every copy verified"
    machine = f"{known['cpu']}, {known['cores']} cores, Linux {known['kernel']}"
    return [
        f"{bytes_}; {often}",
        f"{machine}; Python {known['python']}, torch {known['torch']}, TensorHub {known['tensorhub']}",
        str(network),
    ]


def _document(
    plan: Plan, known: dict[str, object], network: Network, found: Sequence[report.Row], visits: Sequence[Visit]
) -> Any:
    """Everything, so that another reader can come to other rows."""
    return {
        "machine": known,
        "network": asdict(network),
        "plan": {name: getattr(plan, name) for name in ("mib", "rounds", "copies", "fans", "timeout_s")},
        "rows": [report.as_json(row) for row in found],
        "visits": [asdict(visit) for visit in visits],
    }
