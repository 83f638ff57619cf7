"""What `tensorhub top` shows of what was seen: sheets of rows, and whole screens of lines.

Pure: the same is seen, the same is shown. Names come from the network: they are escaped, cut where
there is no room, and no markup. Nothing is told by colour.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Final, Literal

from rich.cells import cell_len, set_cell_size

from tensorhub.cli.common import format_bytes
from tensorhub.cli.sheets import RARE, Sheet
from tensorhub.cli.top_data import WORKERS_MAX, Seen
from tensorhub.types import ModelInfo, ReplicaView, ShardView, printable

STALLED_S = 5.0  # a call that waits for bytes for longer
SLOW = 4  # so many times slower than the median, of three at least
VERSIONS_SHOWN_MAX = 8
UPDATES_SHOWN_MAX = 6
PROSE = ("because", "")  # columns with sentences
CELL_MIN = 6  # to which a column may be cut

HELP: Final = """
q        quit
up, down choose a model; on a model's page, scroll
enter    one model, all of it
escape   back
?        this

age       since the version was published; > 9 s: longer than that
ready     groups, and copies, that hold all of it and can be read
filling   groups that read it now
waits for what the call that has stood still longest waits for
suspect   a worker that is silent: it may be dead
stalled   a reader that has got no byte for some seconds
slow      a reader with a fourth of the median rate, or less

tensorhub explain MODEL says where the seconds of an update went.
"""
KEYS = {
    "all": "q quit   up/down choose   enter one model   ? help",
    "model": "q quit   up/down scroll   escape back   ? help",
    "help": "q quit   escape back",
}


@dataclass(frozen=True, slots=True)
class View:
    """What is looked at. `offset`: so many lines of a model's page are above the screen."""

    page: Literal["all", "model", "help"] = "all"
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a screen. `style`: "", "bold", "dim" or "reverse"."""

    text: str
    style: str = ""


# --------------------------------------------------------------------------------------------------
# sheets


def overview(seen: Seen) -> Sheet:
    """A row for each model; the chosen one is marked."""
    if not seen.models:
        return Sheet("no model is registered")
    are_silent = any(each.summary is not None and each.summary.suspect for each in seen.models)
    silent = ["suspect"] if are_silent else []
    columns = ("  model", "newest", "age", "ready", "filling", "workers", *silent, "waits for")
    rows = tuple(_of_overview(seen, each, are_silent=are_silent) for each in seen.models)
    return Sheet("models", columns, rows)


def _of_overview(seen: Seen, model: ModelInfo, *, are_silent: bool) -> tuple[str, ...]:
    newest = next((each for each in model.versions if each.version == model.mark), None)
    held = newest.summary if newest is not None else None
    counts = model.summary
    calls = sorted(counts.calls if counts else (), key=lambda call: -call.longest_s)[:1]
    return (
        f"{'>' if model.model == seen.chosen else ' '} {model.model}",
        "-" if model.mark is None else str(model.mark),
        "-" if model.mark is None else age(seen, model.model, model.mark),
        "-" if held is None else str(held.ready),
        "-" if held is None else str(held.filling),
        "-" if counts is None else f"{counts.workers:,}",
        *([f"{counts.suspect:,}" if counts else "-"] if are_silent else []),
        *([f"{each.waits_for} {ago(each.longest_s)}" for each in calls] or ["-"]),
    )


def of_model(seen: Seen, *, everything: bool = False) -> list[Sheet]:
    """All about the chosen model; most important first."""
    model = seen.model
    if model is None:
        return [Sheet(f"{seen.chosen}: no such model")] if seen.chosen else []
    sheets = [
        Sheet(_title(seen, model)),
        _remarks(seen, model),
        _calls(model),
        _reads(seen),
        _updates(seen, None if everything else UPDATES_SHOWN_MAX),
        _versions(seen, model, None if everything else VERSIONS_SHOWN_MAX),
        _holders(seen),
    ]
    if seen.rows is None and model.summary is not None and model.summary.workers:
        sheets.append(Sheet(f"rows are left out: it has more than {WORKERS_MAX} workers"))
    return [sheet for sheet in sheets if sheet.rows or not sheet.columns]


def events(seen: Seen, most: int | None = None) -> Sheet:
    """The newest ones, of all models, oldest first."""
    shown = seen.events[-most:] if most is not None else seen.events
    rows = tuple(
        (
            time.strftime("%H:%M:%S", time.localtime(each.at)),
            each.kind,
            each.model + ("" if each.version is None else f" {each.version}"),
            " ".join(part for part in (each.worker, each.text) if part),
        )
        for each in shown
    )
    return Sheet("events", ("at", "kind", "of", ""), rows)


def _title(seen: Seen, model: ModelInfo) -> str:
    counts, total = model.summary, sum(seen.rates.values())
    reads = "" if counts is None else f", {counts.reads:,} reads"
    rate = f" at {_rate(total)}" if total else ""
    late = model.coordinator_behind_s
    behind = f"; the coordinator is {late:.1f} s behind" if late >= 0.1 else ""
    mark = "nothing published yet" if model.mark is None else f"newest {model.mark}"
    return f"{model.model}: {mark}, lineage {model.lineage}{reads}{rate}{behind}"


def _remarks(seen: Seen, model: ModelInfo) -> Sheet:
    """Workers and groups that are suspect, stalled or slow."""
    rows = list[tuple[str, ...]]()
    if (counts := model.summary) is not None:
        for each in counts.silent:
            rows.append(("suspect", each.name, f"silent for {ago(each.silent_s)}"))
        if (more := counts.suspect - len(counts.silent)) > 0:
            rows.append(("suspect", f"{more:,} more", ""))
        for call in counts.calls:
            if call.waits_for == "chunks" and call.longest_s > STALLED_S:
                text = f"{call.call}: no bytes for {ago(call.longest_s)}"
                rows.append(("stalled", call.who, text))
    usual = median(seen.rates.values()) if len(seen.rates) > 2 else 0.0
    for replica, shard in _shards(seen, "filling"):
        rate = seen.rates.get((replica.replica, shard.rank))
        if rate is not None and rate * SLOW <= usual:
            rows.append(("slow", shard.worker, f"{_rate(rate)}, the median is {_rate(usual)}"))
    return Sheet("to look at", ("what", "who", ""), tuple(rows))


def _calls(model: ModelInfo) -> Sheet:
    rows = tuple(
        (each.call, each.waits_for, str(each.count), ago(each.longest_s), each.who or "-")
        for each in (model.summary.calls if model.summary is not None else ())
    )
    return Sheet("calls", ("call", "waits for", "calls", "longest", "whose"), rows)


def _reads(seen: Seen) -> Sheet:
    """Who reads from whom. How much of it is there is known of memory that will serve readers."""
    sources = dict[tuple[str, int], list[str]]()
    for lease in seen.rows.leases if seen.rows is not None else ():
        state = "" if lease.state == "active" else f" ({lease.state})"
        sources.setdefault((lease.reader, lease.version), []).append(lease.source + state)
    rows = []
    for replica, shard in _shards(seen, "filling"):
        rate = seen.rates.get((replica.replica, shard.rank))
        done = f"{100 * shard.chunks_verified // max(1, shard.chunks)} %"
        of = sources.pop((shard.worker, replica.version), [])
        rows.append((shard.worker, replica.version, done, "-" if rate is None else _rate(rate), of))
    rows += [(reader, version, "-", "-", of) for (reader, version), of in sources.items()]
    shown = tuple(
        (reader, str(version), done, rate, ", ".join(dict.fromkeys(of)) or "-")
        for reader, version, done, rate, of in rows
    )
    return Sheet("reads", ("reader", "version", "done", "rate", "reads from"), shown)


def _updates(seen: Seen, most: int | None) -> Sheet:
    rows = tuple(
        (
            ago(max(0.0, seen.at + seen.ahead_s - each.ended_at)) + " ago"
            if each.outcome != "running"
            else "running",
            each.key.group,
            each.call,
            "-" if each.version is None else str(each.version),
            ago(each.seconds),
            each.sentence or each.outcome,
        )
        for each in seen.updates[:most]
    )
    columns = ("when", "group", "call", "version", "took", "because")
    return Sheet("updates", columns, rows)


def _versions(seen: Seen, model: ModelInfo, most: int | None) -> Sheet:
    views = sorted(model.versions, key=lambda view: (-view.lineage, -view.version))[:most]
    rare = [name for name in RARE if any(getattr(view.summary, name, 0) for view in views)]
    counted = ("ready", "filling", "readers", *rare)
    rows = tuple(
        (
            str(view.version),
            view.state,
            age(seen, model.model, view.version),
            format_bytes(view.nbytes),
            "yes" if view.retained else "no",
            *(str(getattr(view.summary, name, "-")) for name in counted),
        )
        for view in views
    )
    columns = ("version", "state", "age", "size", "kept", *counted)
    return Sheet("versions", columns, rows)


def _holders(seen: Seen) -> Sheet:
    """Shards that are not being filled."""
    rows = []
    for replica, shard in _shards(seen):
        if shard.state == "filling":
            continue
        kind = " ".join(
            word
            for word in (
                *((replica.medium,) if replica.medium != "device" else ()),
                *((replica.purpose,) if replica.purpose != "use" else ()),
                *(("spot",) if replica.spot else ()),
            )
        )
        state = shard.state if shard.state in ("doubtful", "quarantined") else replica.state
        rows.append(
            (
                str(replica.version),
                state,
                str(shard.rank),
                str(shard.readers),
                kind or "-",
                shard.worker,
                replica.group,
            )
        )
    columns = ("version", "state", "rank", "readers", "kind", "worker", "group")
    return Sheet("replicas", columns, tuple(rows))


def _shards(seen: Seen, state: str | None = None) -> Iterator[tuple[ReplicaView, ShardView]]:
    """The newest versions first."""
    replicas = seen.rows.replicas if seen.rows is not None else ()
    for replica in sorted(replicas, key=lambda each: (-each.version, each.group)):
        for shard in sorted(replica.shards, key=lambda each: each.rank):
            if state in (None, shard.state):
                yield replica, shard


def age(seen: Seen, model: str, version: int) -> str:
    """Since it was published; "> 9 s" if that is not known."""
    published = seen.published.get((model, version))
    if published is None:
        return f"> {ago(seen.at - seen.since)}"
    return ago(seen.at - published)


def ago(seconds: float) -> str:
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.0f} h"


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s"


def banner(seen: Seen) -> str:
    """Said while the coordinator does not answer; else ""."""
    if not seen.fault:
        return ""
    return f"the coordinator is away for {ago(seen.gone_s)}, and asked again: {seen.fault}"


def heading(seen: Seen) -> str:
    skew = f"  its clock is {seen.ahead_s:+.0f} s" if seen.ahead_s else ""
    at = time.strftime("%H:%M:%S", time.localtime(seen.at))
    return f"{at}  {seen.address}  models {len(seen.models):,}{skew}"


# --------------------------------------------------------------------------------------------------
# screens


def screen(seen: Seen, view: View, width: int, height: int) -> list[Line]:
    """At most `height` lines, none wider than `width`."""
    first = Line(banner(seen), "reverse") if banner(seen) else Line(heading(seen), "bold")
    room = max(0, height - 2)
    if view.page == "help":
        body = [Line(text) for text in HELP.strip().splitlines()][:room]
    elif view.page == "model":
        lines = model_page(seen, width)
        offset = min(view.offset, max(0, len(lines) - room))
        body = lines[offset : offset + room]
    else:
        body = _all(seen, width, room)
    body += [Line("")] * (room - len(body))
    lines = [first, *body, Line(KEYS[view.page], "dim")][-height:]
    return [Line(cut(shown(line.text), width, prose=True), line.style) for line in lines]


def model_page(seen: Seen, width: int) -> list[Line]:
    """All lines of the chosen model's page."""
    sheets = [*of_model(seen, everything=True), events(seen)]
    return [line for sheet in sheets for line in laid_out(sheet, width)]


def _all(seen: Seen, width: int, room: int) -> list[Line]:
    """The models around the chosen one, what is most important of that, and the newest events."""
    happened = laid_out(events(seen, max(1, room // 5)), width)[1:]  # without the title
    models = laid_out(overview(seen), width)[1:] if seen.models else laid_out(overview(seen), width)
    head, models = models[:1], models[1:]
    most = max(1, room // 4)
    names = [each.model for each in seen.models]
    at = names.index(seen.chosen) if seen.chosen in names else 0
    begin = min(max(0, at - most // 2), max(0, len(models) - most))
    above = [*head, *models[begin : begin + most]]
    left = max(0, room - len(above) - len(happened))
    sheets = [laid_out(sheet, width) for sheet in of_model(seen)]
    detail = [line for sheet in sheets for line in sheet]
    if len(detail) > left:
        more = len(detail) - max(0, left - 1)
        detail = [*detail[: max(0, left - 1)], Line(f"{more} more lines: enter", "dim")][:left]
    detail += [Line("")] * (left - len(detail))
    return [*above, *detail, *happened][:room]


def laid_out(sheet: Sheet, width: int) -> list[Line]:
    """Columns as wide as they need to be, or the widest ones cut."""
    above = Line(shown(sheet.title), "bold")
    if not sheet.rows:
        return [above]
    table = [[shown(cell) for cell in row] for row in (sheet.columns, *sheet.rows)]
    widths = [min(width, max(map(cell_len, column))) for column in zip(*table, strict=True)]
    room = width - 2 * (len(widths) - 1)
    while sum(widths) > room and max(widths) > CELL_MIN:
        widths[widths.index(max(widths))] -= 1
    lines = [
        "  ".join(
            set_cell_size(cut(cell, size, prose=title in PROSE), size)
            for title, cell, size in zip(sheet.columns, row, widths, strict=True)
        ).rstrip()
        for row in table
    ]
    return [
        above,
        Line(lines[0], "dim"),
        *(Line(text, "reverse" if text.startswith(">") else "") for text in lines[1:]),
    ]


def cut(text: str, width: int, *, prose: bool = False) -> str:
    """Names differ at their ends: what has no room is missing in the middle; of `prose` at the
    end.
    """
    if cell_len(text) <= width:
        return text
    if prose and width > 2:
        return set_cell_size(text, width - 1).rstrip() + "…"
    head, tail = text[: (width + 1) // 2], text[-(width // 2) :]
    while head and cell_len(head) + 1 + cell_len(tail) > width:
        head, tail = (head[:-1], tail) if cell_len(head) >= cell_len(tail) else (head, tail[1:])
    return f"{head}…{tail}" if width > 2 else set_cell_size(text, width)


def shown(text: str) -> str:
    return printable(text).replace("\n", "\\n")
