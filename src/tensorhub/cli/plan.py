"""`tensorhub plan`: a reader's transfer plan, before it reads."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group

from tensorhub.api.tools import plan_group
from tensorhub.cli import common
from tensorhub.cli.sheets import Sheet
from tensorhub.memory.unallocated import Described, described
from tensorhub.model.read_plan import PlannedSource, ReadPlan
from tensorhub.types import DeltaUse, check_name, check_selector

WORKERS_SHOWN_MAX = 3  # of one source
RANKS_SHOWN_MAX = 4  # of one source
RANKS_MAX = 2**20


def plan(
    model: Annotated[str, typer.Argument(help="The model that would be read.")],
    reader: Annotated[
        str | None,
        typer.Option(
            "--reader",
            metavar="FILE.py:FUNCTION",
            help="Whose layout: see below; default: the whole model.",
        ),
    ] = None,
    world_size: Annotated[
        int, common.whole_option(1, RANKS_MAX, help="Ranks of the reading group.")
    ] = 1,
    rank: Annotated[
        int | None,
        common.whole_option(0, RANKS_MAX - 1, help="Only this rank; default: every rank."),
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="The group may leave published bytes unread.")
    ] = False,
    names: common.NamesOption = None,
    version: common.SelectorOption = "latest",
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Show a reader's transfer plan, and read nothing.

    Without --reader: the plan of `fetch`. FUNCTION is called with a rank and the world size, and
    returns that rank's tensors (on torch's meta device they take no memory), or a pair of these and
    their sources=, as Hub.register takes them. FILE.py may be the name of a module, too. It is run
    here, with your rights.

    The command checks whether all ranks together read everything. For each rank a table: each
    published shard that it reads, the shard's holders, the number of chunks, cells, runs and bytes,
    and the part of the shard; and whether chunks may come as deltas. With --json: a list of plans,
    one for each rank, on one line.
    """
    with common.checking():
        check_name("model", model)
    with common.checking("--version"):
        selector = check_selector(int(version) if version.isdecimal() else version)
    if rank is not None and rank >= world_size:
        raise common.usage(
            f"--rank {rank}: with --world-size {world_size}, ranks are 0 to {world_size - 1}"
        )
    if reader is None and (world_size > 1 or rank is not None or partial):
        raise common.usage(
            "--world-size, --rank and --partial are of a reader's layout: give --reader, too"
        )
    if reader is not None and names:
        raise common.usage("--names chooses of the whole model: leave it out, or --reader")
    layout = _function(reader) if reader is not None else None
    ranks = [rank] if rank is not None else list(range(world_size))
    connect = common.connecting(address, token_file)

    async def body() -> int:
        readers = (
            [_of_rank(layout, each, world_size, partial) for each in ranks]
            if layout is not None
            else []
        )
        async with connect() as hub:
            if readers:
                plans = await plan_group(hub, model, readers, selector)
            else:
                plans = [await hub.plan(model, selector=selector, names=names or None)]
        _print(plans, as_json=as_json)
        return 0

    common.run(body)


def _function(given: str) -> Callable[[int, int], Any]:
    """FILE.py:FUNCTION or MODULE:FUNCTION."""
    where, _, name = given.rpartition(":")
    if not where or not name:
        raise common.usage(f"--reader {given}: give FILE.py:FUNCTION or MODULE:FUNCTION")
    try:
        module = _from_file(Path(where)) if where.endswith(".py") else _module(where)
        function = getattr(module, name)
    except Exception as error:  # it is the user's own code
        raise common.usage(f"--reader {given}: {type(error).__name__}: {error}") from error
    if not callable(function):
        raise common.usage(f"--reader {given}: {name} is no function")
    return function  # type: ignore[no-any-return]  # checked when it is called


def _module(name: str) -> Any:
    sys.path.insert(0, "")  # as `python -m` does
    return importlib.import_module(name)


def _from_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    sys.path.insert(0, str(path.resolve().parent))  # as `python FILE` does
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _of_rank(
    layout: Callable[[int, int], Any], rank: int, world_size: int, partial: bool
) -> Described:
    try:
        made = layout(rank, world_size)
        tensors, sources = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
        return described(tensors, rank, world_size, sources, partial)
    except Exception as error:  # it is the user's own code, or what came of it
        raise common.usage(f"--reader: rank {rank}: {type(error).__name__}: {error}") from error


# --------------------------------------------------------------------------------------------------
# printing


def _print(plans: Sequence[ReadPlan], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([plan.as_dict() for plan in plans]), flush=True)
    else:
        common.print_table(Group(*(sheet.table() for plan in plans for sheet in sheets(plan))))


def sheets(plan: ReadPlan) -> list[Sheet]:
    """A title, and a row for each source."""
    version = plan.version
    what = (
        f"{common.format_bytes(plan.nbytes)} in {plan.chunks:,} chunks, {plan.cells:,} cells, "
        f"{plan.runs:,} runs"
    )
    excess = (
        f", {common.format_bytes(plan.excess_nbytes)} of them in excess"
        if plan.excess_nbytes
        else ""
    )
    title = (
        f"{version.model} version {version.version}, rank {plan.rank} of {plan.world_size}: "
        f"{what}{excess}"
    )
    found = [Sheet(title)]
    if plan.alike:
        found.append(
            Sheet(
                f"held in this layout already, and read from there: "
                f"{_some(plan.alike, WORKERS_SHOWN_MAX)}"
            )
        )
    why = (
        "decided while it is read, by what the reader holds and by each link"
        if plan.deltas is DeltaUse.UNDECIDED
        else f"none ({plan.deltas})"
    )
    found.append(Sheet(f"deltas: {why}"))
    columns = ("of rank", "held by", "chunks", "cells", "runs", "a run", "bytes", "of the shard")
    rows = tuple(_row(source) for source in plan.sources)
    return [*found, Sheet("sources", columns, rows)] if rows else found


def _row(source: PlannedSource) -> tuple[str, ...]:
    return (
        _some(source.ranks, RANKS_SHOWN_MAX),
        _some(source.workers, WORKERS_SHOWN_MAX) or "nobody now",
        f"{source.chunks:,}",
        f"{source.cells:,}",
        f"{source.runs:,}",
        common.format_bytes(source.nbytes // source.runs) if source.runs else "-",
        common.format_bytes(source.nbytes),
        f"{100 * source.nbytes / source.shard_nbytes:.1f} %" if source.shard_nbytes else "-",
    )


def _some(things: Sequence[object], most: int) -> str:
    more = len(things) - most
    return ", ".join(map(str, things[:most])) + (f" and {more:,} more" if more > 0 else "")
