"""`tensorhub report`: a run as one file, which shows the dashboard without a cluster."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

import tensorhub
from tensorhub.api.tools import events_page, recent_updates
from tensorhub.cli import common
from tensorhub.errors import VersionUnavailable
from tensorhub.observed import ClusterEvent, Explanation, UpdateRow
from tensorhub.types import ModelInfo, check_name, printable

MODELS_MAX = 64
ROWS_MAX = 20_000  # versions, shards, reads and workers of all models: some 5 MB
WORKERS_MAX = 1_000  # of a model that has more
EXPLANATIONS_MAX = 512


def report(
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write: run.html.")],
    model: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="One model; default: all.")
    ] = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Save what the coordinator knows as one page that opens in a browser without a cluster.

    The page is the dashboard, with versions, replicas, workers, the recent updates with their
    explanations, and the last events. It asks nothing of any machine. Names of models, workers and
    hosts are in it, weights and tokens are not. An output that exists is refused with exit code 2
    before anything is asked; --force replaces it. Of large clusters a part is saved, and the page
    says what was left out.
    """
    if model is not None:
        with common.checking("--model"):
            check_name("model", model)
    _check_output(out, force=force)
    connect = common.connecting(address, token_file)

    async def body() -> int:
        async with connect() as hub:
            run = await collect(hub, model)
        _write(out, page_of(run.document(str(address))), force=force)
        left_out = f"; left out: {'; '.join(run.left_out)}" if run.left_out else ""
        models = "1 model" if len(run.models) == 1 else f"{len(run.models)} models"
        what = f"{models}, {len(run.events)} events and {len(run.explanations)} updates"
        print(printable(f"saved {what} in {out}{left_out}"), flush=True)
        return 0

    common.run(body)


# --------------------------------------------------------------------------------------------------
# what is saved


@dataclass(slots=True)
class Run:
    """What a page shows. `now`: by the coordinator's clock, as far as that is known."""

    now: float = 0.0
    models: list[ModelInfo] = field(default_factory=list)
    updates: dict[str, tuple[UpdateRow, ...]] = field(default_factory=dict)
    explanations: list[Explanation] = field(default_factory=list)
    events: list[ClusterEvent] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def document(self, address: str) -> dict[str, Any]:
        """As the coordinator's endpoints have it, for `web/static/source.js`."""
        workers = {each.incarnation: each.state for info in self.models for each in info.workers}
        states = list(workers.values())
        since = {each.model: each.at for each in self.events if each.kind == "published"}
        began_at = next((each.at for each in self.events if each.kind == "serving"), None)
        about = {
            "address": address,
            "state": "serving",
            "behind_s": max((info.coordinator_behind_s for info in self.models), default=0.0),
            "workers": len(states),
            "suspect": states.count("suspect"),
            "models": len(self.models),
            "now": self.now,
            "release": tensorhub.__version__,
        }
        models = {info.model: asdict(info) for info in self.models}
        shown = [
            each
            | {
                "age_s": None if (at := since.get(name, began_at)) is None else self.now - at,
                "age_is_least": name not in since,
            }
            for name, each in models.items()
        ]
        return {
            "summary": {"coordinator": about, "models": shown, "events_last": len(self.events)},
            "models": models,
            "updates": {name: [asdict(row) for row in rows] for name, rows in self.updates.items()},
            "explanations": [asdict(each) for each in self.explanations],
            "events": [asdict(each) for each in self.events],
            "left_out": self.left_out,
        }


async def collect(hub: tensorhub.Hub, model: str | None) -> Run:
    """Ask the coordinator for all that a page shows. Raises as `Hub.describe`."""
    run = Run()
    counts = await hub.describe(limit=0) if model is None else [await hub.describe(model, limit=0)]
    # those with versions first
    for info in sorted(counts, key=lambda info: not info.versions)[:MODELS_MAX]:
        room = ROWS_MAX - sum(rows_of(each) for each in run.models)
        run.models.append(await _described(hub, info, room, run.left_out))
    if len(counts) > MODELS_MAX:
        run.left_out.append(f"{len(counts) - MODELS_MAX:,} models")
    for info in run.models:
        run.updates[info.model] = await recent_updates(hub, info.model)
    await _explain(hub, run)
    page = await events_page(hub, 0, None)
    while True:
        run.events += [each for each in page.events if model is None or each.model in ("", model)]
        if not page.more:
            break
        page = await events_page(hub, page.following, page.epoch)
    run.now = max([page.at or time.time(), *(event.at for event in run.events)])
    return run


async def _described(
    hub: tensorhub.Hub, counts: ModelInfo, room: int, left_out: list[str]
) -> ModelInfo:
    """All of the model if it has at most `room` rows; else its counts and its first workers."""
    assert counts.summary is not None
    workers = counts.summary.workers
    try:
        if counts.summary.rows <= room:
            return await hub.describe(counts.model)
        if room > 0:
            page = await hub.describe(counts.model, limit=WORKERS_MAX)
            workers -= len(page.workers)
            counts = replace(
                counts, replicas=page.replicas, leases=page.leases, workers=page.workers
            )
    except VersionUnavailable:  # the model has gone since
        return counts
    left_out.append(f"of {counts.model}: {workers:,} workers, with what they hold and read")
    return counts


def rows_of(info: ModelInfo) -> int:
    shards = sum(len(each.shards) for each in info.replicas)
    return len(info.versions) + shards + len(info.leases) + len(info.workers)


async def _explain(hub: tensorhub.Hub, run: Run) -> None:
    """Of each recent update, the newest of a version by a group."""
    wanted = {
        (row.key.model, row.version, row.key.group): None
        for rows in run.updates.values()
        for row in rows
        if row.version is not None
    }
    for name, version, group in list(wanted)[:EXPLANATIONS_MAX]:
        with contextlib.suppress(VersionUnavailable):  # it was forgotten since
            run.explanations.append(await hub.explain(name, version, group=group))
    if len(wanted) > EXPLANATIONS_MAX:
        run.left_out.append(f"{len(wanted) - EXPLANATIONS_MAX:,} explanations of updates")


# --------------------------------------------------------------------------------------------------
# the page


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>TensorHub</title>
<link rel="icon" href="data:image/svg+xml;base64,{icon}">
<style>{style}</style>
</head>
<body>
<noscript>This page needs JavaScript.</noscript>
<div id="app"></div>
<script type="application/json" id="run">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def page_of(document: dict[str, Any]) -> str:
    """The dashboard as one file, with `document` in it. The page may run its own script, and reach
    nothing.
    """
    static = resources.files("tensorhub.web") / "static"
    live = (static / "index.html").read_text(encoding="utf-8")
    names = re.findall(r'<script src="static/([\w.]+)"', live)
    script = "".join([(static / name).read_text(encoding="utf-8") for name in names])
    style = (static / "style.css").read_text(encoding="utf-8")
    return _PAGE.format(
        policy=f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none'; "
        f"script-src {_source_of(script)}; style-src {_source_of(style)}",
        icon=base64.b64encode((static / "icon.svg").read_bytes()).decode(),
        style=style,
        # JSON in ASCII escapes U+2028; without "<", nothing in it ends the element
        data=json.dumps(document).replace("<", "\\u003c"),
        script=script,
    )


def _source_of(text: str) -> str:
    """As a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _check_output(out: Path, *, force: bool) -> None:
    if out.is_dir():
        raise common.usage(f"--out {out} is a directory: give a file, such as run.html")
    if out.exists() and not force:
        raise common.usage(
            f"--out {out} exists: choose another name, or give --force to replace it"
        )
    if not out.parent.is_dir():
        raise common.usage(f"--out {out}: there is no directory {out.parent}: make it first")


def _write(out: Path, page: str, *, force: bool) -> None:
    """The whole page, or nothing. Raises CommandError."""
    temporary = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        try:
            with temporary.open("x", encoding="utf-8") as file:
                file.write(page)
                file.flush()
                os.fsync(file.fileno())
            _check_output(out, force=force)  # another may have come meanwhile
            temporary.replace(out)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise common.CommandError("output", f"{out} cannot be written: {error.strerror}") from None
