"""`tensorhub demo`: a real run on this machine.

This process runs the coordinator. The trainer and the rollouts are child processes (`demo_worker`). They talk to the
coordinator and to each other over TCP, under a random secret. Each process digests its own memory, and this one compares the
digests.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

import tensorhub
from tensorhub.cli.child_processes import AsyncChildProcess, ChildEnded, Line, closing_all
from tensorhub.cli.common import (
    FAILED,
    CommandError,
    JsonOption,
    QuietOption,
    print_table,
    progress_bars,
    report,
    run,
    seconds,
    usage,
    whole,
)
from tensorhub.cli.demo_results import TRAINER, Results
from tensorhub.cli.demo_worker import WorkerSettings
from tensorhub.memory.safetensors import read_header

LEAVE_S = 20.0  # for processes that were told to stop


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
        typer.Option(help="wait: each step waits until every rollout has the version before; free: it does not."),
    ] = Pace.WAIT,
    seed: Annotated[int, typer.Option(help="Of the training's randomness.")] = 0,
    timeout_s: Annotated[
        float, typer.Option(parser=seconds(1, 86_400), metavar="S", help="Give up after so long without news.")
    ] = 120.0,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a real model here, and let rollout processes follow its weights.

    One trainer and several rollouts, each a process, with TCP between them. Every rollout proves by a digest and a
    forward pass that it holds the trainer's bytes. The exit code is 1 if one does not. Progress goes to stderr, the tables
    (with --json, one JSON object) to stdout.
    """
    names = tuple(f"rollout-{number}" for number in range(1, rollouts + 1))
    if weights is not None:
        _check(weights)
    run(partial(_demo, Settings(versions, names, weights, pace, seed, timeout_s, as_json, quiet)))


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
    results = Results(settings.rollouts)
    with _view(settings) as tell:
        async with tensorhub.serve(token=token) as coordinator, _started(settings, coordinator.address, token) as children:
            await Run(settings, children, results, tell).conduct()
    _print_results(settings, results)
    for problem in results.problems():
        report(CommandError("DemoFailed", problem))
    return FAILED if results.problems() else 0


@contextlib.asynccontextmanager
async def _started(settings: Settings, address: str, token: str) -> AsyncIterator[dict[str, AsyncChildProcess]]:
    """The trainer and the rollouts, by name."""
    environment = os.environ | {"TENSORHUB_TOKEN": token, "OMP_NUM_THREADS": "1"}
    async with closing_all() as children:
        for name in (TRAINER, *settings.rollouts):
            weights = None if settings.weights is None else str(settings.weights)
            worker = WorkerSettings(name, address, weights, settings.seed, settings.timeout_s)
            command = [sys.executable, "-m", "tensorhub.cli.demo_worker", json.dumps(asdict(worker))]
            children.append(AsyncChildProcess(name, command, environment=environment))
        yield {child.name: child for child in children}


class Run:
    """One run: the children, what they have said, and who waits for more."""

    def __init__(
        self, settings: Settings, children: Mapping[str, AsyncChildProcess], results: Results, tell: Callable[..., None]
    ) -> None:
        self._settings = settings
        self._children = children
        self._results = results
        self._tell = tell  # the user
        self._news = anyio.Event()  # set at the next line of any child
        self._is_over = False  # from here on children end, because they were told to

    async def conduct(self) -> None:
        """Everyone is ready; then, for each version, a step, and news until the next may begin; then everyone leaves."""
        results, settings = self._results, self._settings
        async with anyio.create_task_group() as tasks:
            for child in self._children.values():
                tasks.start_soon(self._listen, child)
            await self._until(lambda: len(results.ready) == len(self._children))
            for version in range(1, settings.versions + 1):
                self._tell(TRAINER, f"version {version}: an optimizer step")
                await self._children[TRAINER].tell(do="step", version=version)
                wait = settings.pace is Pace.WAIT or version == settings.versions
                await self._until(partial(results.is_done, version, wait))
            self._is_over = True
            for child in self._children.values():
                await child.tell(do="stop")
            tasks.cancel_scope.deadline = anyio.current_time() + LEAVE_S
        late = sorted(child.name for child in self._children.values() if child.returncode is None)
        if late:
            raise CommandError("DemoFailed", f"{', '.join(late)} did not leave within {LEAVE_S:g} s")

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for news until the condition holds; CommandError if all are silent too long."""
        while not condition():
            self._news = anyio.Event()
            try:
                with anyio.fail_after(self._settings.timeout_s):
                    await self._news.wait()
            except TimeoutError:
                text = f"no process of the demo had news for {self._settings.timeout_s:g} s; see --timeout-s"
                raise CommandError("DemoFailed", text) from None

    async def _listen(self, child: AsyncChildProcess) -> None:
        """Record all that a child says; CommandError if it fails, or ends unasked."""
        while True:
            try:
                line = await child.hear()
            except ChildEnded as ended:
                if self._is_over and ended.code == 0:
                    return
                raise CommandError("DemoFailed", str(ended)) from None
            self._record(child.name, line)
            self._news.set()

    def _record(self, name: str, line: Line) -> None:
        event = line.pop("event")
        if event == "failed":
            if line["kind"] == "usage":
                raise usage(line["text"])
            raise CommandError(line["kind"], f"in {name}: {line['text']}")
        self._tell(name, self._results.record(name, event, line), line.get("version"))


def _print_results(settings: Settings, results: Results) -> None:
    if settings.as_json:
        print(json.dumps(results.as_json(str(settings.weights or "all-MiniLM-L6-v2"))), flush=True)
        return
    print_table(results.fetch_table())
    print()
    print_table(results.read_table())
    if not results.problems():
        print(f"\n{results.summary()}", flush=True)


@contextlib.contextmanager
def _view(settings: Settings) -> Iterator[Callable[..., None]]:
    """Live progress on stderr: a bar for each process, or a line for each event where there is no terminal."""
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    news_column = TextColumn("{task.fields[news]}", markup=False)
    with progress_bars("{task.description}", *columns, news_column, quiet=settings.quiet) as progress:
        names = (TRAINER, *settings.rollouts)
        bars = {name: progress.add_task(name, total=settings.versions, news="starting") for name in names}

        def tell(name: str, news: str, completed: int | None = None) -> None:
            progress.update(bars[name], completed=completed, news=news)
            if progress.disable and not settings.quiet:
                progress.console.print(f"{name}: {news}", markup=False, highlight=False, soft_wrap=True)

        yield tell
