"""`tensorhub versions`: which versions of a model exist where, in the cluster and in an archive."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

import anyio.to_thread
import typer
from rich.table import Table
from rich.text import Text

from tensorhub.archives.catalogue import Key, Version, VersionCatalogue
from tensorhub.archives.store import Store
from tensorhub.cli import common
from tensorhub.errors import IntegrityError, VersionUnavailable
from tensorhub.types import ModelInfo, ReplicaView, VersionView, check_name, printable

FAULTS_SHOWN_MAX = 20
KINDS = ("device", "host", "seed", "archive")
LIVE = {"available": "yes", "unavailable": "no"}


@dataclass(frozen=True, slots=True)
class Copies:
    """Of one kind: whole copies of the version, and shards."""

    copies: int
    shards: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A version in the archive. `chain`: how many deltas lie between its anchor and the version; 0:
    it is an anchor; None: a part of the chain is missing. `stored_bytes`: of its own objects.
    """

    chain: int | None
    stored_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """`state`: None, if the coordinator does not know the version, or was not asked. `archived`:
    None, if it is not in the archive, or none was looked at.
    """

    version: int
    lineage: int
    content_id: str
    nbytes: int
    world_size: int
    state: str | None
    retained: bool
    replicas: Mapping[str, Copies]
    archived: Stored | None


def versions(
    model: Annotated[str, typer.Argument(help="The model to list.")],
    at: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="An archive to look into, as s3://BUCKET/PREFIX; without --address, only this.",
        ),
    ] = None,
    newest: Annotated[int, common.whole_option(1, help="How many versions at most.")] = 32,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """List a model's versions, newest first: what exists where, with sizes.

    From the coordinator: whether a version can be fetched now (live), whether retention or a pin
    keeps it (kept), and how many whole copies are in the memory of trainers and rollouts (device),
    in host copies, seeds and archives; "1/4": only one shard of four. From the archive: "anchor", a
    whole checkpoint, or "delta N", N differences away from its anchor, and the bytes of its
    objects. Objects that are missing or have another size are named on stderr, and the exit code is
    1. With --json: one line with the same in full.
    """
    with common.checking():
        check_name("model", model)
    if at is None:
        common.check_address(address)
    connect = None if address is None else common.connecting(address, token_file)

    async def run() -> int:
        info = None if connect is None else await _described(connect, model, at)
        found, faults = dict[Key, tuple[Version, Stored]](), list[str]()
        if at is not None:
            with common.checking():
                store = await anyio.to_thread.run_sync(Store, at)
            found, faults = await anyio.to_thread.run_sync(looked_at, store, model)
            if info is None and not found and not faults:
                raise VersionUnavailable(f"{at} has no version of {model!r}", retryable=False)
        rows = rows_of(info, found)
        faults += _other_contents(info, found)
        if as_json:
            said = {"model": model, "at": at, "known": len(rows)}
            shown = [asdict(row) for row in rows[:newest]]
            print(json.dumps({**said, "versions": shown, "faults": faults}), flush=True)
        else:
            print_rows(model, rows, newest, in_cluster=info is not None, in_archive=at is not None)
            for fault in faults[:FAULTS_SHOWN_MAX]:
                print(f"fault: {printable(fault)}", file=sys.stderr, flush=True)
            if (more := len(faults) - FAULTS_SHOWN_MAX) > 0:
                print(f"and {more} more faults: --json lists all", file=sys.stderr, flush=True)
        return common.FAILED if faults else 0

    common.run(run, logs=logging.WARNING)


async def _described(connect: common.Connect, model: str, at: str | None) -> ModelInfo | None:
    async with connect() as hub:
        try:
            return await hub.describe(model)
        except VersionUnavailable:
            if at is None:
                raise
            return None


# --------------------------------------------------------------------------------------------------
# the archive


def looked_at(store: Store, model: str) -> tuple[dict[Key, tuple[Version, Stored]], list[str]]:
    """The versions that an archive has, and its faults: manifests that are none, and objects that
    are missing or have another size.
    """
    catalogue = VersionCatalogue(store, model).load()
    complete = {each.path for each in catalogue.versions.values()}
    there = {each.path: each.nbytes for each in store.objects(catalogue.at(""))}
    catalogue.load()  # without the versions that an archiver has removed meanwhile
    found, faults = dict[Key, tuple[Version, Stored]](), dict.fromkeys(catalogue.faults)
    for key, version in catalogue.versions.items():
        if version.path in complete:
            faults |= dict.fromkeys(_faults(catalogue, version, there))
        try:
            chain: int | None = len(catalogue.chain(key)) - 1
        except IntegrityError as error:
            chain = None
            faults[str(error)] = None
        found[key] = version, Stored(chain, sum(version.own_objects.values()))
    return found, list(faults)


def _faults(
    catalogue: VersionCatalogue, version: Version, there: Mapping[str, int]
) -> Iterable[str]:
    sizes: dict[str, int | None] = {f"parts/{each}": None for each in sorted(version.parts)}
    for path, nbytes in (sizes | dict(version.own_objects)).items():
        size = there.get(catalogue.at(path))
        if size is None:
            yield f"{catalogue.name(path)} is missing: another process has deleted it"
        elif nbytes not in (None, size):
            yield (
                f"{catalogue.name(path)} has {size} bytes, and not {nbytes}: another process has "
                f"changed it"
            )


def _other_contents(
    info: ModelInfo | None, found: Mapping[Key, tuple[Version, Stored]]
) -> Iterable[str]:
    for view in () if info is None else info.versions:
        archived, _ = found.get(Key(view.lineage, view.version), (None, None))
        if archived is not None and archived.content_id != view.content_id:
            yield (
                f"version {view.version} in the archive has another content than in the cluster: "
                f"it is of another cluster"
            )


# --------------------------------------------------------------------------------------------------
# rows


def rows_of(info: ModelInfo | None, found: Mapping[Key, tuple[Version, Stored]]) -> list[Row]:
    """The versions that either knows, newest first."""
    views = {} if info is None else {Key(v.lineage, v.version): v for v in info.versions}
    replicas: dict[int, list[ReplicaView]] = {}
    for replica in () if info is None else info.replicas:
        replicas.setdefault(replica.version, []).append(replica)
    rows = []
    for key in sorted({*views, *found}, reverse=True):
        view = views.get(key)
        archived, stored = found.get(key, (None, None))
        of = view if view is not None else archived.info if archived is not None else None
        if of is not None:
            rows.append(
                Row(
                    key.number,
                    key.lineage,
                    of.content_id,
                    of.nbytes,
                    of.world_size,
                    None if view is None else view.state,
                    view is not None and view.retained,
                    {} if view is None else _copies(view, replicas.get(key.number, ())),
                    stored,
                )
            )
    return rows


def _copies(view: VersionView, replicas: Iterable[ReplicaView]) -> dict[str, Copies]:
    """What can be read, of each kind. Replicas of trainers and rollouts count as wholes, as each
    group holds all of its layout; host copies hold one shard each.
    """
    wholes, shards = Counter[str](), {kind: Counter[int]() for kind in KINDS}
    for replica in replicas:
        kind = replica.purpose if replica.purpose in KINDS else replica.medium
        if replica.state != "ready" or kind not in KINDS:
            continue
        wholes[kind] += 1
        shards[kind].update(each.rank for each in replica.shards if each.state == "complete")
    return {
        kind: Copies(
            wholes[kind]
            if kind == "device"
            else min(shards[kind][rank] for rank in range(view.world_size)),
            shards[kind].total(),
        )
        for kind in KINDS
    }


def print_rows(
    model: str, rows: Sequence[Row], newest: int, *, in_cluster: bool, in_archive: bool
) -> None:
    """As a table; numbers to the right."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    has_lineages = len({row.lineage for row in rows}) > 1
    columns = [
        "version",
        *(["lineage"] if has_lineages else []),
        "size",
        *(["live", "kept", *KINDS] if in_cluster else []),
        *(["archived", "stored"] if in_archive else []),
    ]
    left = ("live", "kept", "archived")
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows[:newest]:
        cells = [str(row.version), *([str(row.lineage)] if has_lineages else [])]
        cells.append(common.format_bytes(row.nbytes))
        if in_cluster:
            live = "-" if row.state is None else LIVE.get(row.state, row.state)
            cells += [live, "yes" if row.retained else "no" if row.state else "-"]
            cells += [_shown(row, kind) for kind in KINDS]
        if in_archive:
            cells += _stored(row.archived)
        table.add_row(*map(Text, cells))
    if not rows:
        print(f"no version of {printable(model)}", flush=True)
        return
    common.print_table(table)
    if (more := len(rows) - newest) > 0:
        print(f"and {more:,} older versions: --newest {len(rows)} shows all", flush=True)


def _shown(row: Row, kind: str) -> str:
    there = row.replicas.get(kind, Copies(0, 0))
    if there.shards and not there.copies:
        return f"{there.shards}/{row.world_size}"
    return str(there.copies) if there.copies else "-"


def _stored(archived: Stored | None) -> tuple[str, str]:
    if archived is None:
        return "-", "-"
    kinds = {None: "broken", 0: "anchor"}
    kind = kinds.get(archived.chain, f"delta {archived.chain}")
    return kind, common.format_bytes(archived.stored_bytes)
