"""`tensorhub demo`: a real run on this machine.

This process embeds the coordinator. A trainer and the rollouts are processes of their own (`demo_worker`), which talk
to it and to each other over TCP, under a random secret. What they hold is compared here, by digests that each of them
computed from its own memory.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

import tensorhub
from tensorhub.cli.common import (
    FAILED,
    CommandError,
    JsonOption,
    QuietOption,
    print_table,
    report,
    run,
    seconds,
    usage,
    whole,
)
from tensorhub.cli.demo_crew import Crew, Event, hire
from tensorhub.cli.demo_ledger import MB, TRAINER, Fetch, Ledger, Publication
from tensorhub.memory.safetensors import read_header


class Pace(StrEnum):
    WAIT = "wait"  # a step begins when every rollout has the version before
    FREE = "free"  # a step begins when the version before is published


@dataclass(frozen=True, slots=True)
class Settings:
    versions: int
    rollouts: tuple[str, ...]
    weights: Path | None
    pace: Pace
    seed: int
    timeout_s: float
    as_json: bool
    quiet: bool


def demo(
    versions: Annotated[int, typer.Option(parser=whole(1, 10_000), metavar="N", help="Optimizer steps to publish.")] = 5,
    rollouts: Annotated[int, typer.Option(parser=whole(1, 64), metavar="N", help="Rollout processes.")] = 4,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Any safetensors file, instead of the installed all-MiniLM-L6-v2."),
    ] = None,
    pace: Annotated[
        Pace,
        typer.Option(help="wait: the trainer waits until every rollout has its version; free: it goes on."),
    ] = Pace.WAIT,
    seed: Annotated[int, typer.Option(help="Of the training's randomness.")] = 0,
    timeout_s: Annotated[
        float, typer.Option(parser=seconds(1, 86_400), metavar="S", help="Give up when nobody has news for this long.")
    ] = 120.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a real model here, and let rollout processes follow its weights.

    One trainer and several rollouts, each a process, with TCP between them. Every rollout proves by a digest and a
    forward pass that it holds the trainer's bytes; exit code 1 if one does not. Progress goes to stderr, the tables
    (or, with --json, one JSON object) to stdout.
    """
    names = tuple(f"rollout-{number}" for number in range(1, rollouts + 1))
    settings = Settings(versions, names, weights, pace, seed, timeout_s, as_json, quiet)
    try:
        if weights is not None:
            _check(weights)
    except CommandError as error:
        raise typer.Exit(report(error)) from None
    run(partial(_demo, settings))


def _check(weights: Path) -> None:
    """A usage error, before anything is started, if this file cannot be a model."""
    try:
        if not read_header(weights).entries:
            raise ValueError(f"{weights} holds no tensor")
    except OSError as error:
        raise usage(f"--weights {weights}: {error.strerror}; give a safetensors file") from error
    except ValueError as error:
        raise usage(f"--weights: {error}; give a safetensors file") from error


async def _demo(settings: Settings) -> int:
    token = secrets.token_hex(16)
    ledger = Ledger(settings.rollouts)
    with View(settings) as view:
        async with (
            tensorhub.serve(token=token) as coordinator,
            hire(_children(settings, coordinator.address), token) as crew,
        ):
            await _conduct(settings, crew, ledger, view)
            await crew.dismiss()
    _print_results(settings, ledger)
    for problem in ledger.problems():
        report(CommandError("DemoFailed", problem))
    return FAILED if ledger.problems() else 0


def _children(settings: Settings, address: str) -> dict[str, list[str]]:
    """Arguments of each process by name."""
    common = [
        "--address",
        address,
        f"--seed={settings.seed}",
        f"--op-timeout-s={settings.timeout_s}",
    ]
    if settings.weights is not None:
        common += ["--weights", str(settings.weights)]
    children = {TRAINER: ["trainer", "--name", TRAINER, *common]}
    return children | {name: ["rollout", "--name", name, *common] for name in settings.rollouts}


async def _conduct(settings: Settings, crew: Crew, ledger: Ledger, view: View) -> None:
    """The run itself: everyone is ready; then, for each version, a step, and news until the next may begin."""
    ready: set[str] = set()
    while len(ready) < len(settings.rollouts) + 1:
        event = await crew.event(settings.timeout_s)
        ready.add(event.name)
        record(event, ledger)
        view.show(event, ledger)
    for version in range(1, settings.versions + 1):
        view.training(version)
        await crew.order(TRAINER, do="step", version=version)
        wait = settings.pace is Pace.WAIT or version == settings.versions
        while version not in ledger.publications or (wait and not ledger.passed_by_all(version)):
            event = await crew.event(settings.timeout_s)
            record(event, ledger)
            view.show(event, ledger)


def record(event: Event, ledger: Ledger) -> None:
    """Enter one event of a healthy child."""
    fields = event.fields
    match event.kind:
        case "ready":
            ledger.tensors, ledger.nbytes = fields["tensors"], fields["nbytes"]
        case "published":
            ledger.publications[fields["version"]] = Publication(**fields)
        case "fetched":
            ledger.fetches[fields["version"], event.name] = Fetch(**fields)
        case "retry":
            ledger.retried.append(fields["kind"])
        case _:
            raise CommandError("DemoFailed", f"{event.name} said {event.kind!r}, which is not known here")


def _print_results(settings: Settings, ledger: Ledger) -> None:
    weights = str(settings.weights or "all-MiniLM-L6-v2")
    if settings.as_json:
        print(json.dumps(ledger.as_json(weights)), flush=True)
        return
    print_table(ledger.fetch_table())
    print()
    print_table(ledger.read_table())
    if not ledger.problems():
        print(f"\n{ledger.summary()}", flush=True)


class View:
    """Live progress on stderr: a bar for each process, or a line for each event where there is no terminal."""

    def __init__(self, settings: Settings) -> None:
        self._quiet = settings.quiet
        self._console = Console(stderr=True, soft_wrap=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[news]}", markup=False),
            console=self._console,
            disable=settings.quiet or not self._console.is_terminal,
        )
        self._bars: dict[str, TaskID] = {
            name: self._progress.add_task(name, total=settings.versions, news="starting")
            for name in (TRAINER, *settings.rollouts)
        }

    def __enter__(self) -> View:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def training(self, version: int) -> None:
        self._tell(TRAINER, f"version {version}: an optimizer step")

    def show(self, event: Event, ledger: Ledger) -> None:
        """Show one event that the ledger knows."""
        match event.kind:
            case "ready":
                self._tell(event.name, f"ready: {ledger.tensors} tensors, {ledger.nbytes / MB:,.1f} MB")
            case "published":
                made = ledger.publications[event.fields["version"]]
                self._tell(event.name, f"version {made.version} published, loss {made.loss:.4f}", made.version)
            case "fetched":
                fetch = ledger.fetches[event.fields["version"], event.name]
                sources = ", ".join(source["name"] for source in fetch.sources)
                news = f"version {fetch.version} in {fetch.seconds:.3f} s from {sources}"
                self._tell(event.name, news, fetch.version)
            case "retry":
                self._tell(event.name, f"tries again: {event.fields['kind']}")

    def _tell(self, name: str, news: str, completed: int | None = None) -> None:
        self._progress.update(self._bars[name], completed=completed, news=news)
        if self._progress.disable and not self._quiet:
            self._console.print(f"{name}: {news}", markup=False, highlight=False)
