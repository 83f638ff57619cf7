"""`tensorhub top`: a cluster as it is now, again and again, on a terminal or as plain lines."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import anyio
import typer
from rich.console import Group

from tensorhub.cli import common, top_rows
from tensorhub.cli.top_data import Seen, Watch
from tensorhub.errors import install
from tensorhub.types import check_name

ANSWER_S = 2.0  # a coordinator that has not answered by then is asked again


def top(
    model: Annotated[
        str | None, typer.Argument(help="The model to begin with; default: the newest.")
    ] = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    interval_s: Annotated[float, common.seconds_option(0.2, 3600, help="How often.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print it once, as plain lines.")] = False,
    as_json: common.JsonOption = False,
) -> None:
    """Watch a cluster: models, versions with their age, readers and their sources, what is slow.

    On a terminal (extra "top"): arrows choose a model, Enter shows one alone, ? explains the words,
    q quits. Models of more than 64 workers are counted. In a pipe: plain lines, each time. While
    the coordinator is away, the last answer stays, with the time since. With --json: one document a
    line each time, with the events since the last one; "gone_s" is above 0 while no answer comes.
    """
    if model is not None:
        with common.checking():
            check_name("model", model)
    is_screen = not (once or as_json) and _is_terminal()
    if is_screen and importlib.util.find_spec("textual") is None:
        raise common.usage(
            f"on a terminal top needs textual, which is not installed: {install('top')}; "
            "--once prints plain lines without it"
        )
    connect = common.connecting(address, token_file)

    async def body() -> int:
        async with connect() as hub:
            watch = Watch(hub, str(address))
            look = partial(watch.look, timeout_s=ANSWER_S)
            seen = await look(model)
            if once and model is not None and seen.model is None and not seen.fault:
                await hub.describe(model, limit=0)  # says that it is not known
            if is_screen:
                return await _on_terminal(look, seen, model, interval_s)
            show = _JsonLines() if as_json else _print
            while True:
                show(seen)
                if once:
                    return 0
                await anyio.sleep(interval_s)
                seen = await look(model)

    common.run(body, logs=logging.CRITICAL if is_screen else logging.ERROR)


def _is_terminal() -> bool:
    return (
        sys.stdout.isatty()
        and sys.stdin.isatty()
        and os.environ.get("TERM", "dumb") not in ("dumb", "unknown")
    )


async def _on_terminal(
    look: Callable[..., Any], seen: Seen, model: str | None, interval_s: float
) -> int:
    """Until it is left. A signal ends it in order: the terminal is as it was before."""
    from tensorhub.cli.top_app import TopApp

    app = TopApp(look, seen, chosen=model, interval_s=interval_s)

    async def leave_if_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            app.exit()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(leave_if_cancelled)
        with anyio.CancelScope(shield=True):
            code = await app.run_async(mouse=False)
        tasks.cancel_scope.cancel()
    if app.error is not None:
        raise app.error
    return code if code is not None else app.return_code or 0


def _print(seen: Seen) -> None:
    if text := top_rows.banner(seen):
        print(top_rows.shown(text), file=sys.stderr, flush=True)
        return
    sheets = [top_rows.overview(seen), *top_rows.of_model(seen), top_rows.events(seen, 20)]
    print(top_rows.shown(top_rows.heading(seen)))
    if sys.stdout.isatty():  # no row wraps, however long names are
        width = shutil.get_terminal_size().columns
        lines = [line.text for sheet in sheets for line in top_rows.laid_out(sheet, width)]
        print("\n".join(lines), flush=True)
        return
    common.print_table(Group(*(sheet.table() for sheet in sheets)))


class _JsonLines:
    """One document a line."""

    def __init__(self) -> None:
        self._last: tuple[float, int] | None = None  # the last event that was shown

    def __call__(self, seen: Seen) -> None:
        said = asdict(seen) | {"gone_s": seen.gone_s}
        events = [(each.at, each.number) for each in seen.events]
        fresh = events.index(self._last) + 1 if self._last in events else 0
        self._last = events[-1] if events else self._last
        said["events"] = [] if seen.fault else said["events"][fresh:]
        said["published"] = [
            {"model": model, "version": version, "at": at}
            for (model, version), at in seen.published.items()
        ]
        said["rates"] = [
            {"replica": replica, "rank": rank, "bytes_per_s": rate}
            for (replica, rank), rate in seen.rates.items()
        ]
        print(json.dumps(said), flush=True)
