"""What `tensorhub status` shows: sheets of rows, for a terminal or as plain lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tensorhub.cli import common
from tensorhub.protocol.secret import loopback_address
from tensorhub.types import (
    MISSING_TOLD_MAX,
    CallsSummary,
    DeltaUse,
    LeaseView,
    ModelInfo,
    ReplicaView,
    ShardView,
    VersionSummary,
    VersionView,
    WorkerView,
    printable,
)


@dataclass(frozen=True)
class Sheet:
    """Rows under a title. Names come from the network: they are escaped, and no markup."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()

    def table(self) -> RenderableType:
        """What does not fit goes on in the next line of its column, and nothing is cut."""
        title = Text(_shown(self.title), "bold" if not self.rows else "italic")
        if not self.rows:
            return title
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        for column in self.columns:
            table.add_column(column, overflow="fold", no_wrap=column in NARROW)
        for row in self.rows:
            table.add_row(*(Text(_shown(cell)) for cell in row))
        return Group(title, table)


NARROW = (
    *("version", "state", "size", "shards", "retained", "rank", "chunks", "readers", "content"),
    *("copies", "ready", "filling", "calls", "longest", "silent for"),
)
MISSING = "missing as published"  # in other layouts they may be there


def _shown(cell: str) -> str:
    return printable(cell).replace("\n", "\\n")


def sheets(models: Sequence[ModelInfo], *, counted: bool = False) -> list[Sheet]:
    """Everything that is known about these models, or only the counts; empty sheets are left
    out.
    """
    if not models:
        return [Sheet("no model is registered", ())]
    return [sheet for model in models for sheet in (_counts(model) if counted else _of(model))]


def tables(models: Sequence[ModelInfo], *, counted: bool = False) -> RenderableType:
    """The sheets, and on a terminal a hint."""
    rows = sum(
        model.summary.rows
        for model in models
        if counted and model.summary is not None and sys.stdout.isatty()
    )
    hint = [Text(f"{rows:,} rows: --details shows them", "dim")] if rows else []
    return Group(*(sheet.table() for sheet in sheets(models, counted=counted)), *hint)


def _of(model: ModelInfo) -> Iterator[Sheet]:
    yield Sheet(_title(model), ())
    found = (
        _versions(model.versions),
        _replicas(model),
        _leases(model.leases),
        _workers(model.workers),
    )
    yield from (sheet for sheet in found if sheet.rows)


def _versions(versions: tuple[VersionView, ...]) -> Sheet:
    newest_first = sorted(versions, key=lambda view: (view.lineage, view.version), reverse=True)
    is_missing = any(view.missing for view in versions)
    rows = tuple(
        (
            str(view.version),
            view.state,
            common.format_bytes(view.nbytes),
            str(view.world_size),
            *([_missing(view)] if is_missing else []),
            "yes" if view.retained else "no",
            view.content_id[:12],
        )
        for view in newest_first
    )
    missing = [MISSING] if is_missing else []
    return Sheet(
        "versions", ("version", "state", "size", "shards", *missing, "retained", "content"), rows
    )


def _missing(view: VersionView) -> str:
    """The published ranks with shards that no worker has."""
    if not view.missing:
        return "-"
    if len(view.missing) == view.world_size:
        return "all"
    return ", ".join(map(str, view.missing)) + (
        ", ..." if len(view.missing) == MISSING_TOLD_MAX else ""
    )


def _replicas(model: ModelInfo) -> Sheet:
    """With the layouts, if any replica's is not the published one. A torn replica without shards
    has a row, too.
    """
    published = {view.version: view.layout_id for view in model.versions}
    others = {
        id(view)
        for view in model.replicas
        if published.get(view.version, view.layout_id) != view.layout_id
    }
    rows = tuple(
        (
            str(view.version),
            shard.state
            if shard is not None and shard.state in ("doubtful", "quarantined")
            else view.state,
            *(_shard(shard) if shard is not None else ("-", "-", "-")),
            *([_layout(view.layout_id, is_published=id(view) not in others)] if others else []),
            _kind(view),
            shard.worker if shard is not None else "-",
            view.group,
        )
        for view in sorted(model.replicas, key=lambda view: (-view.version, view.group))
        for shard in sorted(view.shards, key=lambda shard: shard.rank) or (None,)
    )
    layout = ["layout"] if others else []
    return Sheet(
        "replicas",
        ("version", "state", "rank", "chunks", "readers", *layout, "kind", "worker", "group"),
        rows,
    )


def _shard(shard: ShardView) -> tuple[str, ...]:
    return str(shard.rank), f"{shard.chunks_verified}/{shard.chunks}", str(shard.readers)


def _layout(layout_id: str, *, is_published: bool) -> str:
    return "published" if is_published else layout_id[:12]


def _kind(view: ReplicaView) -> str:
    """The replica's particulars: spot, a copy in host memory and its purpose, or filled from
    another layout now.
    """
    words = [
        view.medium if view.medium != "device" else "",
        view.purpose if view.purpose != "use" else "",
    ]
    last = ["spot" if view.spot else "", "bridging" if view.bridging else ""]
    return " ".join(word for word in (*words, *last) if word) or "-"


def _leases(leases: tuple[LeaseView, ...]) -> Sheet:
    """With whether layouts are crossed, if any are; and with the use of deltas, once readers have
    told of it.
    """
    across = any(view.across for view in leases)
    is_told = any(view.deltas is not DeltaUse.UNDECIDED for view in leases)
    rows = tuple(
        (
            str(view.version),
            view.state,
            str(view.rank),
            *([_across(view)] if across else []),
            *([view.deltas] if is_told else []),
            view.reader,
            view.source,
        )
        for view in leases
    )
    return Sheet(
        "reads",
        (
            *("version", "state", "rank", *(["reads"] if across else [])),
            *(["deltas"] if is_told else []),
            *("reader", "reads from"),
        ),
        rows,
    )


def _across(view: LeaseView) -> str:
    return "a part" if view.across else "all"


def _workers(workers: tuple[WorkerView, ...]) -> Sheet:
    has_several = len({view.location.host for view in workers}) > 1
    rows = tuple(
        (
            "not heard" if view.state == "suspect" else view.state,
            view.name,
            view.location.site or "-",
            view.location.rack or "-",
            view.location.host or "-",
            view.release or "-",
            ", ".join(f"{endpoint.transport} {endpoint.address}" for endpoint in view.endpoints)
            + (NOT_ELSEWHERE if has_several and loopback_address(view.endpoints) else ""),
        )
        for view in sorted(workers, key=lambda view: view.name)
    )
    columns = ("state", "name", "site", "rack", "host", "release", "reached at")
    return Sheet("workers", columns, rows)


NOT_ELSEWHERE = " (not from other hosts: set Options.advertise or Options.listen_host there)"
BEHIND_S = 0.1  # with less, a coordinator is not behind


def _title(model: ModelInfo) -> str:
    mark = "nothing published yet" if model.mark is None else f"mark {model.mark}"
    late_s = model.coordinator_behind_s
    late = (
        f"; the coordinator is {late_s:.1f} s behind: calls take longer by that"
        if late_s >= BEHIND_S
        else ""
    )
    return f"{model.model}: lineage {model.lineage}, {mark}, retains {model.retain}{late}"


# --------------------------------------------------------------------------------------------------
# in counts


def _counts(model: ModelInfo) -> Iterator[Sheet]:
    yield Sheet(_title(model))
    counts = model.summary
    if counts is None:
        return
    unheard = f", {counts.suspect} of them not heard" if counts.suspect else ""
    there = (
        f"workers {counts.workers:,}{unheard}; groups {counts.groups:,}; shards "
        f"{counts.shards:,}; reads {counts.reads:,}"
    )
    yield Sheet(there)
    versions = [
        (view, view.summary) for view in reversed(model.versions) if view.summary is not None
    ]
    if versions:
        yield _version_counts(versions)
    for view, summary in versions:
        if summary.layouts:
            yield _layout_counts(view.version, summary)
    if counts.versions_known > len(versions):
        yield Sheet(f"and {counts.versions_known - len(versions):,} older versions")
    if counts.calls:
        yield _call_counts(counts.calls)
    if counts.silent:
        rows = tuple((worker.name, _ago(worker.silent_s)) for worker in counts.silent)
        yield Sheet("workers that are not heard", ("worker", "silent for"), rows)
    if counts.suspect > len(counts.silent):
        yield Sheet(f"and {counts.suspect - len(counts.silent):,} more")


# columns that are shown only if there are some
RARE = ("draining", "torn", "doubtful", "quarantined", "missing")


def _version_counts(versions: Sequence[tuple[VersionView, VersionSummary]]) -> Sheet:
    rare = [name for name in RARE if any(getattr(summary, name) for _, summary in versions)]
    counted = ("copies", "ready", "filling", *rare, "readers")
    columns = (
        "version",
        "state",
        "retained",
        *(MISSING if name == "missing" else name for name in counted),
    )
    rows = tuple(
        (
            str(view.version),
            view.state,
            "yes" if view.retained else "no",
            *(str(getattr(summary, name)) for name in counted),
        )
        for view, summary in versions
    )
    return Sheet("versions, with their replicas", columns, rows)


def _layout_counts(version: int, summary: VersionSummary) -> Sheet:
    more = summary.layouts_known - len(summary.layouts)
    rows = tuple(
        (
            _layout(view.layout_id, is_published=view.published),
            *(str(each) for each in (view.replicas, view.ready, view.bridging, view.shards)),
            f"{view.chunks_verified}/{view.chunks}",
        )
        for view in summary.layouts
    )
    columns = ("layout", "replicas", "ready", "bridging", "shards", "chunks")
    return Sheet(
        f"version {version} by layout" + (f", and {more:,} others" if more > 0 else ""),
        columns,
        rows,
    )


def _call_counts(calls: tuple[CallsSummary, ...]) -> Sheet:
    rows = tuple(
        (view.call, view.waits_for, str(view.count), _ago(view.longest_s), view.who or "-")
        for view in calls
    )
    return Sheet("calls", ("call", "waits for", "calls", "longest", "whose"), rows)


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:,.0f} s"
