"""`tensorhub status`: what the coordinator knows, as tables or as JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import anyio
import typer
from rich.console import Console
from rich.live import Live

import tensorhub
from tensorhub.api.arguments import WORKERS_OF_PAGE_MAX
from tensorhub.cli import common
from tensorhub.cli.sheets import sheets, tables
from tensorhub.errors import CoordinatorUnavailable, OperationTimeout
from tensorhub.types import VERSION_MAX, ModelInfo, check_name

ROWS_MAX = 40  # that a terminal shows unasked; more are counted instead

Models = tuple[Sequence[ModelInfo], bool]  # and whether they are to be shown in counts


def status(
    model: Annotated[str | None, typer.Argument(help="One model; without it, all of them.")] = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    summary: Annotated[bool, typer.Option("--summary", "-s", help="Counts, however few rows there are.")] = False,
    details: Annotated[bool, typer.Option("--details", "-d", help="All rows, however many there are.")] = False,
    version: Annotated[int | None, common.whole_option(0, VERSION_MAX, help="Rows of one version of MODEL.")] = None,
    after: Annotated[str | None, typer.Option(metavar="WORKER", help="Rows of MODEL's workers after this name.")] = None,
    limit: Annotated[
        int | None, common.whole_option(1, WORKERS_OF_PAGE_MAX, help="Rows of so many of MODEL's workers, by name.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    interval_s: Annotated[float, common.seconds_option(0.1, 3600, help="With --watch: how often.")] = 1.0,
    as_json: common.JsonOption = False,
) -> None:
    """Show versions, replicas, running reads and workers, or count them.

    On a terminal, more than 40 rows are counted instead: versions with their replicas, the calls that are under way with
    what they wait for, and the workers that are not heard. --summary and --details choose. A shard is doubtful while its
    worker is not heard: that worker may be dead. In a file or a pipe, each row is one plain line. With --json: a list of
    models on one line; with --watch too, one such line each time. --watch goes on while the coordinator is away, and says so
    on stderr; in a file or a pipe it begins each answer with the time.
    """
    question = _Question(model, summary, details, version, after, limit)
    question.check()
    may_count = sys.stdout.isatty() and not as_json
    asks = partial(question.ask, may_count=may_count)
    body = partial(_status, common.connecting(address, token_file), asks, interval_s if watch else None, as_json)
    common.run(body, logs=logging.WARNING if watch else logging.ERROR)


@dataclass(frozen=True)
class _Question:
    """What the user wants to see."""

    model: str | None
    summary: bool
    details: bool
    version: int | None
    after: str | None
    limit: int | None

    @property
    def is_of_part(self) -> bool:
        return (self.version, self.after, self.limit) != (None, None, None)

    def check(self) -> None:
        if self.summary and (self.details or self.is_of_part):
            raise common.usage("--summary counts everything: leave --details, --version, --after and --limit out")
        if self.is_of_part and self.model is None:
            raise common.usage("--version, --after and --limit choose a part of one model: give MODEL, too")
        if self.after is not None:
            with common.checking("--after"):
                check_name("worker", self.after)

    async def ask(self, hub: tensorhub.Hub, *, may_count: bool) -> Models:
        """Counts if they are wanted, or (`may_count`) if there would be too many rows; else the rows."""
        if self.summary or (may_count and not self.details and not self.is_of_part):
            counts = (await hub.describe(self.model, limit=0),) if self.model is not None else await hub.describe(limit=0)
            if self.summary or sum(each.summary.rows for each in counts if each.summary is not None) > ROWS_MAX:
                return counts, True
        if self.model is None:
            return await hub.describe(), False
        return (await hub.describe(self.model, version=self.version, after=self.after, limit=self.limit),), False


async def _status(
    connect: common.Connect, asks: Callable[[tensorhub.Hub], Awaitable[Models]], interval_s: float | None, as_json: bool
) -> int:
    """Ask once (`interval_s` None) or again and again, and print what comes back."""
    async with connect() as hub:
        with contextlib.ExitStack() as stack:
            show = _print
            if as_json:
                show = _print_json
            elif interval_s is not None and sys.stdout.isatty():
                live = stack.enter_context(Live(auto_refresh=False, vertical_overflow="visible"))
                show = lambda models: live.update(tables(models[0], counted=models[1]), refresh=True)  # noqa: E731
            if interval_s is None:
                show(await asks(hub))
                return 0
            while True:
                try:
                    models = await asks(hub)
                except (CoordinatorUnavailable, OperationTimeout) as error:
                    common.report(error)
                else:
                    if not as_json and not sys.stdout.isatty():
                        print(time.strftime("%Y-%m-%d %H:%M:%S"))
                    show(models)
                await anyio.sleep(interval_s)


def _print_json(models: Models) -> None:
    print(json.dumps([asdict(each) for each in models[0]]), flush=True)


def _print(models: Models) -> None:
    found, counted = models
    if sys.stdout.isatty():
        Console().print(tables(found, counted=counted))
    else:
        print("\n".join(line for sheet in sheets(found, counted=counted) for line in sheet.lines()), flush=True)
