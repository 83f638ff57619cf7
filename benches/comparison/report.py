"""What the visits come to: a row for each number of receivers and backend. Pure but for the
printing.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from .backends import Backend
from .network import Network
from .suite import Plan, Visit

GIB = 2**30
BARE = "bare"
CEILINGS = ("memcpy-1", "memcpy-2")  # whichever is the faster in a round


class Spread(NamedTuple):
    """Median, least and largest."""

    median: float
    least: float
    largest: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread | None:
        return Spread(statistics.median(values), min(values), max(values)) if values else None

    def __str__(self) -> str:
        return f"{_short(self.median)} [{_short(self.least)}-{_short(self.largest)}]"


class Row(NamedTuple):
    """One backend to so many receivers. What could not be measured is None; `reason` says why.

    `seconds` to `peak_gib` are of all copies of all rounds. `of_bare`, `of_ceiling`: the other's
    seconds by this backend's, each the median of its copies in the same round: above 1 is faster.
    """

    receivers: int
    backend: Backend
    seconds: Spread | None
    offered_s: Spread | None
    gib_per_s: Spread | None
    of_bare: Spread | None
    of_ceiling: Spread | None
    cpu_s_per_gib: Spread | None
    peak_gib: float | None
    congestion_control: str | None
    versions: Mapping[str, str]
    reason: str | None


def rows(plan: Plan, visits: Sequence[Visit], network: Network) -> list[Row]:
    """In the order of the plan."""
    return [
        _row(plan, [v for v in visits if v.fan == fan], fan, backend, network)
        for fan in plan.fans
        for backend in plan.backends
    ]


def _row(plan: Plan, visits: Sequence[Visit], fan: int, backend: Backend, network: Network) -> Row:
    mine = [visit for visit in visits if visit.backend == backend.name]
    copies = [copy for visit in mine for copy in visit.copies]
    gib = fan * plan.nbytes / GIB
    return Row(
        fan,
        backend,
        Spread.of([copy.seconds for copy in copies]),
        Spread.of([copy.offered_s for copy in copies]),
        Spread.of([gib / copy.seconds for copy in copies]),
        Spread.of(ratios(visits, backend.name, (BARE,))),
        Spread.of(ratios(visits, backend.name, CEILINGS)),
        Spread.of([copy.cpu_s / gib for copy in copies]),
        max((visit.peak_bytes for visit in mine), default=0) / GIB if copies else None,
        network.congestion_control(backend),
        next((visit.versions for visit in mine if visit.versions), {}),
        next((visit.reason for visit in mine if visit.reason), None),
    )


def ratios(visits: Sequence[Visit], backend: str, baselines: Sequence[str]) -> list[float]:
    """Of each round that has both, to the same number of receivers: the fastest baseline's seconds
    by this backend's.
    """

    def medians(names: Sequence[str]) -> dict[int, float]:
        found: dict[int, float] = {}
        for visit in visits:
            if visit.backend in names and visit.copies:
                seconds = statistics.median(copy.seconds for copy in visit.copies)
                found[visit.round] = min(seconds, found.get(visit.round, seconds))
        return found

    mine, theirs = medians([backend]), medians(baselines)
    return [theirs[number] / mine[number] for number in sorted(mine.keys() & theirs.keys())]


def as_json(row: Row) -> dict[str, Any]:
    found: dict[str, Any] = {
        "receivers": row.receivers,
        "backend": row.backend.name,
        "title": row.backend.title,
        "kind": row.backend.kind,
    }
    for name in Row._fields[2:]:
        value = getattr(row, name)
        found[name] = value._asdict() if isinstance(value, Spread) else value
    return found


def table(found: Sequence[Row]) -> Table:
    """To be printed; medians, and the spread where it matters."""
    shown = Table(show_header=True, header_style="bold", pad_edge=False)
    titles = [
        "backend",
        "seconds",
        "offered",
        "GiB/s",
        "of bare sockets",
        "of memcpy",
        "CPU s/GiB",
        "peak GiB",
        "sockets",
    ]
    for title in titles:
        shown.add_column(
            title, justify="left" if title in ("backend", "sockets") else "right", overflow="fold"
        )
    fan = 0
    for row in found:
        if row.receivers != fan:
            fan = row.receivers
            shown.add_section()
            shown.add_row(Text(f"1 -> {fan}", "bold"))
        shown.add_row(Text(row.backend.title), *_cells(row))
    return shown


def _cells(row: Row) -> list[Text]:
    if row.seconds is None:
        return [Text("see below")]
    spreads = (
        row.seconds,
        row.offered_s,
        row.gib_per_s,
        row.of_bare,
        row.of_ceiling,
        row.cpu_s_per_gib,
    )
    texts = [str(spread) if spread else "" for spread in spreads]
    texts[1:3] = [_short(spread.median) if spread else "" for spread in spreads[1:3]]
    texts[5] = _short(row.cpu_s_per_gib.median) if row.cpu_s_per_gib else ""
    return [
        Text(text)
        for text in (*texts, f"{row.peak_gib or 0:.2f}", row.congestion_control or "none")
    ]


def complaints(found: Sequence[Row]) -> list[str]:
    """Of each backend that could not be measured, or not always: why, once."""
    lines: dict[str, list[int]] = {}
    for row in found:
        if row.reason is not None:
            lines.setdefault(f"{row.backend.name}: {row.reason}", []).append(row.receivers)
    every = {row.receivers for row in found}
    return [
        text if set(fans) == every else f"1 -> {fans[0]}: {text}" for text, fans in lines.items()
    ]


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.1f}"
