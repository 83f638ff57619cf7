"""`tensorhub demo`: a real run on this machine.

This process runs the coordinator. The trainer and the rollouts are child processes (`demo_worker`).
They talk to the coordinator and to each other over TCP, under a random secret. Each child digests
its own memory, and this process compares the digests.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

import tensorhub
from tensorhub.cli import common, progress
from tensorhub.cli.child_processes import AsyncChildProcess, ChildEnded, Line, closing_all
from tensorhub.cli.demo_results import TRAINER, Results
from tensorhub.cli.demo_worker import WorkerSettings
from tensorhub.memory.safetensors import read_header

LEAVE_S = 20.0  # for processes that were told to stop
LINES_AT_ONCE = 200  # of progress; then one a second


@dataclass(frozen=True, slots=True)
class Settings:
    versions: int
    rollouts: tuple[str, ...]
    weights: Path | None
    seed: int
    timeout_s: float
    as_json: bool
    quiet: bool


def demo(
    versions: Annotated[
        int, common.whole_option(1, 10_000, help="Optimizer steps to publish.")
    ] = 5,
    rollouts: Annotated[int, common.whole_option(1, 64, help="Rollout processes.")] = 4,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A safetensors file, instead of all-MiniLM-L6-v2."),
    ] = None,
    seed: Annotated[int, typer.Option(help="The seed of the training's randomness.")] = 0,
    timeout_s: Annotated[
        float, common.seconds_option(1, 86_400, help="Give up after so many seconds without news.")
    ] = 120.0,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Train a real model here, and let rollout processes follow its weights.

    One trainer and several rollouts, each a process, with TCP between them. Every rollout proves by
    a digest and a forward pass that it holds the trainer's bytes. The exit code is 1 if one does
    not. Progress goes to stderr, the tables to stdout; with --json, one JSON object, and no
    progress.
    """
    names = tuple(f"rollout-{number}" for number in range(1, rollouts + 1))
    if weights is not None:
        with common.checking("--weights", instead="a safetensors file"):
            if not read_header(weights).entries:
                raise ValueError(f"{weights} holds no tensor")
    common.run(partial(_demo, Settings(versions, names, weights, seed, timeout_s, as_json, quiet)))


async def _demo(settings: Settings) -> int:
    token = secrets.token_hex(16)
    results = Results(settings.rollouts)
    with _view(settings) as tell:
        async with (
            tensorhub.serve(token=token) as coordinator,
            _started(settings, coordinator.address, token) as children,
        ):
            await Run(settings, children, results, tell).conduct()
    _print_results(settings, results)
    for problem in results.problems():
        common.report(common.CommandError("DemoFailed", problem))
    return common.FAILED if results.problems() else 0


@contextlib.asynccontextmanager
async def _started(
    settings: Settings, address: str, token: str
) -> AsyncIterator[dict[str, AsyncChildProcess]]:
    """The trainer and the rollouts, by name."""
    environment = os.environ | {"TENSORHUB_TOKEN": token, "OMP_NUM_THREADS": "1"}
    async with closing_all() as children:
        for name in (TRAINER, *settings.rollouts):
            weights = None if settings.weights is None else str(settings.weights)
            worker = WorkerSettings(name, address, weights, settings.seed, settings.timeout_s)
            command = [
                sys.executable,
                "-m",
                "tensorhub.cli.demo_worker",
                json.dumps(asdict(worker)),
            ]
            children.append(AsyncChildProcess(name, command, environment=environment))
        yield {child.name: child for child in children}


@dataclass
class Run:
    """One run: the children, their messages, and the tasks that wait for more messages."""

    settings: Settings
    children: Mapping[str, AsyncChildProcess]
    results: Results
    tell: Callable[..., None]  # the user
    news: anyio.Event = field(default_factory=anyio.Event)  # set at the next line of any child
    is_over: bool = False  # from here on children end, because they were told to

    async def conduct(self) -> None:
        """All processes get ready; then, for each version, a step, and news until every rollout has
        it; then all leave.
        """
        async with anyio.create_task_group() as tasks:
            for child in self.children.values():
                tasks.start_soon(self._listen, child)
            await self._until(lambda: len(self.results.ready) == len(self.children))
            for version in range(1, self.settings.versions + 1):
                self.tell(TRAINER, f"version {version}: an optimizer step")
                await self.children[TRAINER].tell(do="step", version=version)
                await self._until(partial(self.results.is_done, version))
            self.is_over = True
            for child in self.children.values():
                await child.tell(do="stop")
            tasks.cancel_scope.deadline = anyio.current_time() + LEAVE_S
        late = sorted(child.name for child in self.children.values() if child.returncode is None)
        if late:
            raise common.CommandError(
                "DemoFailed", f"{', '.join(late)} did not leave within {LEAVE_S:g} s"
            )

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for news until the condition holds; CommandError if all are silent too long."""
        while not condition():
            self.news = anyio.Event()
            try:
                with anyio.fail_after(self.settings.timeout_s):
                    await self.news.wait()
            except TimeoutError:
                text = (
                    f"no process of the demo had news for {self.settings.timeout_s:g} s; see "
                    f"--timeout-s"
                )
                raise common.CommandError("DemoFailed", text) from None

    async def _listen(self, child: AsyncChildProcess) -> None:
        """Record all that a child says; CommandError if it fails, or ends unasked."""
        while True:
            try:
                line = await child.hear()
            except ChildEnded as ended:
                if self.is_over and ended.code == 0:
                    return
                raise common.CommandError("DemoFailed", str(ended)) from None
            self._record(child.name, line)
            self.news.set()

    def _record(self, name: str, line: Line) -> None:
        event = line.pop("event")
        if event == "failed":
            if line["kind"] == "usage":
                raise common.usage(line["text"])
            raise common.CommandError(line["kind"], f"in {name}: {line['text']}")
        self.tell(name, self.results.record(name, event, line), line.get("version"))


def _print_results(settings: Settings, results: Results) -> None:
    if settings.as_json:
        print(json.dumps(results.as_json(str(settings.weights or "all-MiniLM-L6-v2"))), flush=True)
        return
    common.print_table(results.table())
    if not results.problems():
        print(f"\n{results.summary()}", flush=True)


@contextlib.contextmanager
def _view(settings: Settings) -> Iterator[Callable[..., None]]:
    """Live progress on stderr: a bar for each process, or a line for each event where there is no
    terminal; of a long run, a line a second.
    """
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn())
    news_column = TextColumn("{task.fields[news]}", markup=False)
    shown = not (settings.quiet or settings.as_json)
    lines, lined_at = 0, 0.0
    with progress.bars("{task.description}", *columns, news_column, shown=shown) as bars:
        names = (TRAINER, *settings.rollouts)
        tasks = {
            name: bars.add_task(name, total=settings.versions, news="starting") for name in names
        }

        def tell(name: str, news: str, completed: int | None = None) -> None:
            nonlocal lines, lined_at
            bars.update(tasks[name], completed=completed, news=news)
            now = time.monotonic()
            if bars.disable and shown and (lines < LINES_AT_ONCE or now - lined_at >= 1):
                lines, lined_at = lines + 1, now
                print(f"{name}: {news}", file=sys.stderr, flush=True)

        yield tell
