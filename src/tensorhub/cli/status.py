"""`tensorhub status`: what the coordinator knows, as tables or as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import tensorhub
from tensorhub.cli.common import (
    AddressOption,
    CommandError,
    JsonOption,
    TokenFileOption,
    check_address,
    check_token_file,
    report,
    run,
)
from tensorhub.types import LeaseView, ModelInfo, ReplicaView, VersionView, WorkerView

MB = 1_000_000


def status(
    model: Annotated[str | None, typer.Argument(help="One model; without it, all of them.")] = None,
    address: AddressOption = None,
    token_file: TokenFileOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    interval_s: Annotated[float, typer.Option(min=0.1, max=3600, help="With --watch: how often.")] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Show versions, replicas, running reads and workers.

    With --json: a list of models on one line; with --watch too, one such line each time.
    """
    try:
        body = partial(
            _status,
            check_address(address),
            check_token_file(token_file),
            model,
            interval_s if watch else None,
            as_json,
        )
    except CommandError as error:
        raise typer.Exit(report(error)) from None
    run(body)


async def _status(address: str, token: Path | None, model: str | None, interval_s: float | None, as_json: bool) -> int:
    """Ask once (`interval_s` None) or again and again, and print what comes back."""
    async with tensorhub.connect(address, token=token) as hub:
        models = await _models(hub, model)
        if as_json:
            print(json.dumps([asdict(each) for each in models]), flush=True)
            while interval_s is not None:
                await anyio.sleep(interval_s)
                print(json.dumps([asdict(each) for each in await _models(hub, model)]), flush=True)
        elif interval_s is None:
            Console().print(render(models))
        else:
            with Live(render(models), auto_refresh=False) as live:
                while True:
                    await anyio.sleep(interval_s)
                    live.update(render(await _models(hub, model)), refresh=True)
    return 0


async def _models(hub: tensorhub.Hub, model: str | None) -> tuple[ModelInfo, ...]:
    if model is None:
        return await hub.describe(None)
    return (await hub.describe(model),)


# Names come from the network: they are printed as `Text`, never as markup.


def render(models: tuple[ModelInfo, ...]) -> RenderableType:
    """Everything that is known about these models, as rich tables; empty ones are left out."""
    parts: list[RenderableType] = []
    for model in models:
        mark = "nothing published yet" if model.mark is None else f"mark {model.mark}"
        parts.append(Text(f"{model.model}: lineage {model.lineage}, {mark}, retains {model.retain}", "bold"))
        if model.versions:
            parts.append(_versions(model.versions))
        if model.replicas:
            parts.append(_replicas(model.replicas))
        if model.leases:
            parts.append(_leases(model.leases))
        if model.workers:
            parts.append(_workers(model.workers))
    return Group(*parts) if parts else Text("no model is registered")


def _table(title: str, *columns: str, numbers: tuple[str, ...] = ()) -> Table:
    table = Table(title=title, title_justify="left", title_style="italic")
    for column in columns:
        table.add_column(column, justify="right" if column in numbers else "left")
    return table


def _versions(versions: tuple[VersionView, ...]) -> Table:
    table = _table("versions", "version", "state", "MB", "shards", "retained", "content", numbers=("version", "MB"))
    for view in sorted(versions, key=lambda view: (view.lineage, view.version), reverse=True):
        retained = "yes" if view.retained else ""
        table.add_row(
            str(view.version),
            Text(view.state),
            f"{view.nbytes / MB:,.1f}",
            str(view.world_size),
            retained,
            Text(view.content_id[:12]),
        )
    return table


def _replicas(replicas: tuple[ReplicaView, ...]) -> Table:
    table = _table("replicas", "group", "version", "state", "where", "rank", "worker", "verified", "readers")
    for view in sorted(replicas, key=lambda view: (-view.version, view.group)):
        where = f"{view.medium} ({view.purpose}{', spot' if view.spot else ''})"
        for shard in sorted(view.shards, key=lambda shard: shard.rank):
            table.add_row(
                Text(view.group),
                str(view.version),
                Text(view.state),
                Text(where),
                str(shard.rank),
                Text(shard.worker),
                _verified(shard.chunks_verified, shard.chunks),
                str(shard.readers),
            )
    return table


def _verified(done: int, total: int) -> RenderableType:
    row = Table.grid(padding=(0, 1))
    row.add_row(ProgressBar(total=max(total, 1), completed=done, width=20), f"{done}/{total}")
    return row


def _leases(leases: tuple[LeaseView, ...]) -> Table:
    table = _table("reads", "reader", "reads from", "version", "rank", "state")
    for view in leases:
        table.add_row(Text(view.reader), Text(view.source), str(view.version), str(view.rank), Text(view.state))
    return table


def _workers(workers: tuple[WorkerView, ...]) -> Table:
    table = _table("workers", "name", "state", "site", "rack", "host", "reached at")
    for view in sorted(workers, key=lambda view: view.name):
        place = view.location
        endpoints = ", ".join(f"{endpoint.transport} {endpoint.address}" for endpoint in view.endpoints)
        table.add_row(*map(Text, (view.name, view.state, place.site, place.rack, place.host, endpoints)))
    return table
