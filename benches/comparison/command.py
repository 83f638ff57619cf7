"""`tensorhub bench`: TensorHub, its ceilings and its peers, on the same bytes, in turns, on this
machine.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from rich.console import Console
from rich.text import Text

from tensorhub.cli.common import FAILED, print_table, run, usage

from . import environments, report, suite
from .backends import BACKENDS, Backend
from .facts import facts
from .network import Network, own_network
from .picture import draw
from .suite import Plan, Visit

RECEIVERS_MAX = 64


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command line says; see `tensorhub bench --help`."""

    rounds: int
    copies: int
    mib: int
    receivers: str
    only: str | None
    skip: str | None
    timeout_s: float
    results: Path | None
    picture: Path | None
    environments: Path | None
    install: bool
    quiet: bool
    as_json: bool = False


def list_backends(*, as_json: bool = False) -> None:
    if as_json:
        print(json.dumps([{"name": each.name, "title": each.title} for each in BACKENDS]))
        return
    for backend in BACKENDS:
        print(f"{backend.name:22} {backend.title}")


def compare(wanted: Wanted) -> None:
    """Visit all backends in turns, and report. Raises CommandError, and typer.Exit with the exit
    code.
    """
    backends, fans = _chosen(wanted.only, wanted.skip), _fans(wanted.receivers)
    directory = (wanted.environments or environments.default_directory()).absolute()
    check_writable([file for file in (wanted.results, wanted.picture) if file])
    plan = Plan(
        backends, wanted.rounds, wanted.copies, wanted.mib, fans, wanted.timeout_s, directory
    )
    if wanted.install:
        _install(directory, backends)
    known = facts()
    with own_network() as network:  # of this thread, in which every process is started
        run(partial(_bench, plan, known, network, wanted))


def _chosen(only: str | None, skip: str | None) -> list[Backend]:
    wanted, unwanted = _names(only), _names(skip)
    known = [backend.name for backend in BACKENDS]
    strange = [name for name in (*wanted, *unwanted) if name not in known]
    if strange:
        raise usage(f"there is no backend {strange[0]!r}: give some of {', '.join(known)}")
    chosen = [
        backend
        for backend in BACKENDS
        if (not wanted or backend.name in wanted) and backend.name not in unwanted
    ]
    if not chosen:
        raise usage("no backend is left: take some out of --skip")
    return chosen


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _fans(text: str) -> list[int]:
    try:
        fans = sorted({int(name) for name in _names(text)})
    except ValueError:
        fans = []
    if not fans or fans[0] < 1 or fans[-1] > RECEIVERS_MAX:
        raise usage(
            f"--receivers {text!r} are no numbers from 1 to {RECEIVERS_MAX}: give some, as in 1,4"
        )
    return fans


def check_writable(files: Sequence[Path]) -> None:
    """Now, and not after half an hour."""
    for file in files:
        try:
            file.open("a").close()
        except OSError as error:
            raise usage(
                f"{file} cannot be written ({error.strerror}): give another file"
            ) from error


def _install(directory: Path, backends: Sequence[Backend]) -> None:
    console = Console(stderr=True)
    for name in dict.fromkeys(
        backend.environment for backend in backends if backend.environment is not None
    ):
        console.print(f"installing {name} in {directory / name}", soft_wrap=True, highlight=False)
        if (reason := environments.install(directory, name)) is not None:
            console.print(Text(f"  failed: {reason}"), soft_wrap=True)


async def _bench(
    plan: Plan,
    known: dict[str, object],
    network: Network,
    wanted: Wanted,
) -> int:
    visits: list[Visit] = []

    def tell(visit: Visit) -> None:
        visits.append(visit)
        if not (wanted.quiet or wanted.as_json):
            _show(visit)

    try:
        await suite.run(plan, tell)
    except anyio.get_cancelled_exc_class():
        if visits:
            _report(plan, known, network, wanted, visits)
        raise
    return _report(plan, known, network, wanted, visits)


def _report(
    plan: Plan,
    known: dict[str, object],
    network: Network,
    wanted: Wanted,
    visits: Sequence[Visit],
) -> int:
    """Print and write what is known, also of a run that was broken off; the exit code."""
    found = report.rows(plan, visits, network)
    conditions = _conditions(plan, known, network)
    document = _document(plan, known, network, found, visits)
    if wanted.results is not None:
        wanted.results.write_text(json.dumps(document, indent=1) + "\n")
    if wanted.picture is not None:
        wanted.picture.write_text(
            draw(found, "From one source into each receiver's own tensors", conditions)
        )
    if wanted.as_json:
        print(json.dumps(document), flush=True)
    else:
        print_table(report.table(found))
        for line in (*conditions, *report.complaints(found)):
            print(line, flush=True)
    return FAILED if all(row.seconds is None for row in found) else 0


def _show(visit: Visit) -> None:
    """One line for each visit, on stderr."""
    seconds = [copy.seconds for copy in visit.copies]
    what = visit.reason or f"{statistics.median(seconds):.4f} s"
    print(
        f"round {visit.round}: 1 -> {visit.fan}: {visit.backend}: {what}",
        file=sys.stderr,
        flush=True,
    )


def _conditions(plan: Plan, known: dict[str, object], network: Network) -> list[str]:
    bytes_ = (
        f"{plan.mib} MiB in 300 tensors, half of them tiny, into "
        "each receiver's own touched tensors"
    )
    often = f"{plan.rounds} rounds of {plan.copies} timed copies; every copy verified"
    machine = f"{known['cpu']}, {known['cores']} cores, Linux {known['kernel']}"
    return [
        f"{bytes_}; {often}",
        (
            f"{machine}; Python {known['python']}, torch {known['torch']}, TensorHub "
            f"{known['tensorhub']}"
        ),
        str(network),
    ]


def _document(
    plan: Plan,
    known: dict[str, object],
    network: Network,
    found: Sequence[report.Row],
    visits: Sequence[Visit],
) -> Any:
    """Everything, so that another reader can come to other rows."""
    return {
        "machine": known,
        "network": asdict(network),
        "plan": {
            name: getattr(plan, name) for name in ("mib", "rounds", "copies", "fans", "timeout_s")
        },
        "rows": [report.as_json(row) for row in found],
        "visits": [asdict(visit) for visit in visits],
    }
