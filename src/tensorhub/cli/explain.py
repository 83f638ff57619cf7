"""`tensorhub explain`: where the seconds of one update went."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group

from tensorhub.cli import common
from tensorhub.cli.sheets import Sheet
from tensorhub.observed import Explanation
from tensorhub.types import VERSION_MAX, check_name


def explain(
    model: Annotated[str, typer.Argument(help="The model that was updated.")],
    version: Annotated[
        int | None,
        typer.Argument(
            parser=common.whole(0, VERSION_MAX),
            metavar="[VERSION]",
            help="To which version; default: the newest that was updated to.",
        ),
    ] = None,
    group: Annotated[
        str | None,
        typer.Option(
            "--group", metavar="NAME", help="Whose; default: the group that took longest."
        ),
    ] = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    as_json: common.JsonOption = False,
) -> None:
    """Say where the seconds of an update went, over all machines.

    An update is any call that fills memory, also a running or a failed one. The first line has the
    longest part. Below, all parts of the critical path in their order in time: on which worker,
    and for which other worker it waited. They add up to the wall time of the rank that took
    longest. Then come changes that would have helped, where other updates show how much. With
    --json: one object on one line.
    """
    with common.checking():
        check_name("model", model)
    if group is not None:
        with common.checking("--group"):
            check_name("group", group)
    connect = common.connecting(address, token_file)

    async def body() -> int:
        async with connect() as hub:
            found = await hub.explain(model, version, group=group)
        if as_json:
            print(json.dumps(asdict(found)), flush=True)
        else:
            common.print_table(Group(*(sheet.table() for sheet in sheets(found))))
        return 0

    common.run(body)


def sheets(found: Explanation) -> list[Sheet]:
    """The sentence, a row for each part, and notes."""
    version = f"{found.version}" + (f" of lineage {found.lineage}" if found.lineage else "")
    what = f"{found.call} of {found.model!r} to version {version} by {found.group}"
    rows = [
        (
            f"{part.seconds:.3f}",
            f"{part.seconds / found.seconds:.0%}" if found.seconds else "",
            part.name,
            part.worker + (f" <- {part.peer}" if part.peer else ""),
            part.text,
        )
        for part in found.parts
    ]
    notes = [f"between machines, parts may be off by {found.unsure_s:.3f} s", *found.help]
    return [
        Sheet(found.sentence),
        Sheet(what, ("seconds", "share", "part", "worker", "figures"), tuple(rows)),
        *(Sheet(note) for note in notes),
    ]
