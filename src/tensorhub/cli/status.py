"""`tensorhub status`: what the coordinator knows, as tables or as JSON."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated

import anyio
import typer
from rich.live import Live

import tensorhub
from tensorhub.cli import common
from tensorhub.cli.sheets import tables
from tensorhub.errors import CoordinatorUnavailable, OperationTimeout
from tensorhub.types import ModelInfo

ROWS_MAX = 40  # that a terminal shows unasked; more are counted instead

Models = tuple[Sequence[ModelInfo], bool]  # and whether they are to be shown in counts


def status(
    model: Annotated[str | None, typer.Argument(help="One model; without it, all of them.")] = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    summary: Annotated[
        bool, typer.Option("--summary", "-s", help="Counts, however few rows there are.")
    ] = False,
    details: Annotated[
        bool, typer.Option("--details", "-d", help="All rows, however many there are.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, common.seconds_option(0.1, 3600, help="With --watch: how often.")
    ] = 1.0,
    as_json: common.JsonOption = False,
) -> None:
    """Show versions, replicas, running reads and workers, or count them.

    On a terminal, more than 40 rows are counted instead: versions with their replicas, the calls
    that are under way with what they wait for, and the workers that are not heard. --summary and
    --details choose. A shard is doubtful while its worker is not heard: that worker may be dead. In
    a file or a pipe, each row is one plain line. With --json: a list of models on one line; with
    --watch too, one such line each time. --watch goes on while the coordinator is away, and says so
    on stderr; in a file or a pipe it begins each answer with the time.
    """
    if summary and details:
        raise common.usage("--summary counts everything: leave --details out")
    may_count = not details and sys.stdout.isatty() and not as_json
    asks = partial(ask, model, rows_max=0 if summary else ROWS_MAX if may_count else None)
    body = partial(
        _status,
        common.connecting(address, token_file),
        asks,
        interval_s if watch else None,
        as_json,
    )
    common.run(body, logs=logging.WARNING if watch else logging.ERROR)


async def ask(model: str | None, hub: tensorhub.Hub, *, rows_max: int | None) -> Models:
    """Rows of one model, or (None) of all; counts if there would be more than `rows_max` rows
    (None: never).
    """
    if rows_max is not None:
        counts = (
            await hub.describe(limit=0) if model is None else (await hub.describe(model, limit=0),)
        )
        if (
            not rows_max
            or sum(each.summary.rows for each in counts if each.summary is not None) > rows_max
        ):
            return counts, True
    return await hub.describe() if model is None else (await hub.describe(model),), False


async def _status(
    connect: common.Connect,
    asks: Callable[[tensorhub.Hub], Awaitable[Models]],
    interval_s: float | None,
    as_json: bool,
) -> int:
    """Ask once (`interval_s` None) or again and again, and print what comes back."""
    async with connect() as hub:
        with contextlib.ExitStack() as stack:
            show = _print
            if as_json:
                show = _print_json
            elif interval_s is not None and sys.stdout.isatty():
                live = stack.enter_context(Live(auto_refresh=False, vertical_overflow="visible"))
                show = lambda models: live.update(  # noqa: E731
                    tables(models[0], counted=models[1]), refresh=True
                )
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
    common.print_table(tables(models[0], counted=models[1]))
