"""`tensorhub events`: what has happened in a cluster, a line for each event."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import Annotated

import anyio
import typer

import tensorhub
from tensorhub.api.tools import events_page
from tensorhub.cli import common
from tensorhub.errors import CoordinatorUnavailable, OperationTimeout
from tensorhub.observed import ClusterEvent
from tensorhub.types import check_name, printable

ANSWER_S = 3.0  # a coordinator that has not answered by then is away
EVERY_S = 0.5  # between two questions


def events(
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    model: Annotated[
        str | None, typer.Option("--model", "-m", metavar="NAME", help="Only of this model.")
    ] = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """List what has happened, oldest first: versions, updates, workers, sources that failed.

    The coordinator keeps its last 1,024 events. Each line has the coordinator's time, as this
    machine's time of day, the kind, and the model with the version, or the worker. With --json,
    each line is an object ({"epoch", "number", "at", "kind", "model", "version", "worker",
    "text"}; "at": seconds since 1970). --follow goes on while the coordinator is away, and says so
    on stderr. A coordinator that has started again counts from 1 again, in a new epoch.
    """
    if model is not None:
        with common.checking("--model"):
            check_name("model", model)
    connect = common.connecting(address, token_file)

    async def body() -> int:
        is_known = False
        async with connect() as hub:
            async for epoch, event in listed(hub, follow=follow):
                if model in (None, event.model):
                    about = {"epoch": epoch, **asdict(replace(event, epoch=epoch))}
                    print(json.dumps(about) if as_json else line(event), flush=True)
                    is_known = True
            if model is not None and not is_known:
                await hub.describe(model, limit=0)  # says that it is not known
        return 0

    common.run(body)


async def listed(hub: tensorhub.Hub, *, follow: bool) -> AsyncIterator[tuple[int, ClusterEvent]]:
    """Each event with its epoch. To follow, a coordinator that is away is waited for, which stderr
    says.
    """
    after, epoch, is_away = 0, None, False
    while True:
        try:
            page = await events_page(hub, after, epoch, ANSWER_S)
        except (CoordinatorUnavailable, OperationTimeout) as error:
            if not (follow and error.retryable):
                raise
            if not is_away:
                _say(f"the coordinator is away, and is waited for: {error}")
            is_away = True
            continue
        if is_away:
            _say("the coordinator is back")
            is_away = False
        if epoch not in (None, page.epoch):
            _say("it has started again: its events count from 1 again")
        for event in page.events:
            yield page.epoch, event
        after, epoch = page.following, page.epoch
        if not page.more:
            if not follow:
                return
            await anyio.sleep(EVERY_S)


def line(event: ClusterEvent) -> str:
    """ "2026-11-29 14:20:03.1 updated actor 7 by rollout-1: ..."."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.at))
    version = "" if event.version is None else f" {event.version}"
    model = f" {event.model}{version}" if event.model else ""
    worker = f" {event.worker}" if event.worker else ""
    text = f": {event.text}" if event.text else ""
    return _plain(f"{at}.{int(event.at * 10) % 10} {event.kind}{model}{worker}{text}")


def _say(text: str) -> None:
    print(_plain(text), file=sys.stderr, flush=True)


def _plain(text: str) -> str:
    return printable(text).replace("\n", "\\n")
