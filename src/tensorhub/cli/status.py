"""`tensorhub status`: what the coordinator knows, as tables or as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import anyio
import typer
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

import tensorhub
from tensorhub.cli import common
from tensorhub.types import LeaseView, ModelInfo, ReplicaView, VersionView, WorkerView, printable


def status(
    model: Annotated[str | None, typer.Argument(help="One model; without it, all of them.")] = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on until Ctrl-C.")] = False,
    interval_s: Annotated[float, common.seconds_option(0.1, 3600, help="With --watch: how often.")] = 1.0,
    as_json: common.JsonOption = False,
) -> None:
    """Show versions, replicas, running reads and workers.

    A replica is doubtful while its worker is not heard: it may be dead. In a file or a pipe, each row is one plain line.
    With --json: a list of models on one line; with --watch too, one such line each time.
    """
    common.run(partial(_status, common.connecting(address, token_file), model, interval_s if watch else None, as_json))


async def _status(connect: common.Connect, model: str | None, interval_s: float | None, as_json: bool) -> int:
    """Ask once (`interval_s` None) or again and again, and print what comes back."""
    async with connect() as hub:
        with contextlib.ExitStack() as stack:
            show = _print
            if as_json:
                show = _print_json
            elif interval_s is not None and sys.stdout.isatty():
                live = stack.enter_context(Live(auto_refresh=False, vertical_overflow="visible"))
                show = lambda models: live.update(_tables(models), refresh=True)  # noqa: E731
            while True:
                show(await _models(hub, model))
                if interval_s is None:
                    return 0
                await anyio.sleep(interval_s)


def _print_json(models: tuple[ModelInfo, ...]) -> None:
    print(json.dumps([asdict(each) for each in models]), flush=True)


def _print(models: tuple[ModelInfo, ...]) -> None:
    if sys.stdout.isatty():
        Console().print(_tables(models))
    else:
        print("\n".join(line for sheet in sheets(models) for line in sheet.lines()), flush=True)


def _tables(models: tuple[ModelInfo, ...]) -> RenderableType:
    return Group(*(sheet.table() for sheet in sheets(models)))


async def _models(hub: tensorhub.Hub, model: str | None) -> tuple[ModelInfo, ...]:
    if model is None:
        return await hub.describe(None)
    return (await hub.describe(model),)


# ------------------------------------------------------------------------------------------------------ what is shown


@dataclass(frozen=True)
class Sheet:
    """Rows under a title. Names come from the network: they are escaped, and no markup."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...] = ()

    def lines(self) -> list[str]:
        """Plain text, each row whole and on one line: for files, pipes and other programs."""
        cells = [self.columns, *(tuple(map(_shown, row)) for row in self.rows)] if self.rows else []
        widths = [max(cell_len(row[at]) for row in cells) for at in range(len(self.columns) if cells else 0)]
        padded = ((cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)) for row in cells)
        return [_shown(self.title), *("  ".join(row).rstrip() for row in padded)]

    def table(self) -> RenderableType:
        """For a terminal: what does not fit goes on in the next line of its column, and nothing is cut."""
        title = Text(_shown(self.title), "bold" if not self.rows else "italic")
        if not self.rows:
            return title
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        for column in self.columns:
            table.add_column(column, overflow="fold", no_wrap=column in NARROW)
        for row in self.rows:
            table.add_row(*(Text(_shown(cell)) for cell in row))
        return Group(title, table)


NARROW = ("version", "state", "size", "shards", "retained", "rank", "chunks", "readers", "content")


def _shown(cell: str) -> str:
    return printable(cell).replace("\n", "\\n")


def sheets(models: tuple[ModelInfo, ...]) -> list[Sheet]:
    """Everything that is known about these models; what is empty is left out."""
    if not models:
        return [Sheet("no model is registered", ())]
    return [sheet for model in models for sheet in _of(model)]


def _of(model: ModelInfo) -> Iterator[Sheet]:
    mark = "nothing published yet" if model.mark is None else f"mark {model.mark}"
    yield Sheet(f"{model.model}: lineage {model.lineage}, {mark}, retains {model.retain}", ())
    found = (_versions(model.versions), _replicas(model.replicas), _leases(model.leases), _workers(model.workers))
    yield from (sheet for sheet in found if sheet.rows)


def _versions(versions: tuple[VersionView, ...]) -> Sheet:
    newest_first = sorted(versions, key=lambda view: (view.lineage, view.version), reverse=True)
    rows = tuple(
        (
            str(view.version),
            view.state,
            common.format_bytes(view.nbytes),
            str(view.world_size),
            "yes" if view.retained else "no",
            view.content_id[:12],
        )
        for view in newest_first
    )
    return Sheet("versions", ("version", "state", "size", "shards", "retained", "content"), rows)


def _replicas(replicas: tuple[ReplicaView, ...]) -> Sheet:
    rows = tuple(
        (
            str(view.version),
            shard.state if shard.state in ("doubtful", "quarantined") else view.state,
            str(shard.rank),
            f"{shard.chunks_verified}/{shard.chunks}",
            str(shard.readers),
            _kind(view),
            shard.worker,
            view.group,
        )
        for view in sorted(replicas, key=lambda view: (-view.version, view.group))
        for shard in sorted(view.shards, key=lambda shard: shard.rank)
    )
    return Sheet("replicas", ("version", "state", "rank", "chunks", "readers", "kind", "worker", "group"), rows)


def _kind(view: ReplicaView) -> str:
    """What is particular: spot, or a copy in host memory and what for."""
    words = [view.medium if view.medium != "device" else "", view.purpose if view.purpose != "use" else ""]
    return " ".join(word for word in (*words, "spot" if view.spot else "") if word) or "-"


def _leases(leases: tuple[LeaseView, ...]) -> Sheet:
    rows = tuple((str(view.version), view.state, str(view.rank), view.reader, view.source) for view in leases)
    return Sheet("reads", ("version", "state", "rank", "reader", "reads from"), rows)


def _workers(workers: tuple[WorkerView, ...]) -> Sheet:
    rows = tuple(
        (
            view.state,
            view.name,
            view.location.site or "-",
            view.location.rack or "-",
            view.location.host or "-",
            ", ".join(f"{endpoint.transport} {endpoint.address}" for endpoint in view.endpoints),
        )
        for view in sorted(workers, key=lambda view: view.name)
    )
    return Sheet("workers", ("state", "name", "site", "rack", "host", "reached at"), rows)
