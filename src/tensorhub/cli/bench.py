"""`tensorhub bench`: its options. The comparison itself is in benches/comparison, a part of an
installed TensorHub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tensorhub.cli import common

MIB_MIN = 2


def bench(
    rounds: Annotated[
        int,
        common.whole_option(
            1, help="How often each backend is visited; every second round goes in reverse order."
        ),
    ] = 3,
    copies: Annotated[int, common.whole_option(1, help="Timed copies in each visit.")] = 3,
    mib: Annotated[
        int,
        common.whole_option(
            MIB_MIN, help="Bytes of the weights, in MiB; every process holds them."
        ),
    ] = 1024,
    receivers: Annotated[
        str, typer.Option(metavar="N,M", help="To how many receivers at once.")
    ] = "1,4",
    only: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these backends; see --list.")
    ] = None,
    skip: Annotated[str | None, typer.Option(metavar="A,B", help="All but these backends.")] = None,
    timeout: Annotated[
        float,
        common.seconds_option(
            1, 1e9, help="Seconds for each step of a visit, which is ended after that."
        ),
    ] = 60.0,
    results: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every figure here, as JSON.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a picture here, as SVG.")
    ] = None,
    environments_at: Annotated[
        Path | None,
        typer.Option(
            "--environments",
            metavar="DIR",
            help="Where the peers are; default: ~/.cache/tensorhub/bench.",
        ),
    ] = None,
    install: Annotated[
        bool,
        typer.Option("--install", help="First install the peers, from PyPI, into --environments."),
    ] = False,
    list_backends: Annotated[
        bool, typer.Option("--list", help="Name the backends, and end.")
    ] = False,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Compare TensorHub with this machine's ceilings and with its peers: equal bytes, one source to
    some receivers.

    The backends take turns, each in processes of its own, and every copy is verified. Run by root,
    all of them share a new network namespace, and so one congestion control. Peers that are not
    installed are listed at the end (docs/benchmarks.md).
    """
    comparison = common.import_shipped("benches.comparison.command")
    if list_backends:
        comparison.list_backends(as_json=as_json)
        return
    comparison.compare(
        comparison.Wanted(
            rounds=rounds,
            copies=copies,
            mib=mib,
            receivers=receivers,
            only=only,
            skip=skip,
            timeout_s=timeout,
            results=results,
            picture=picture,
            environments=environments_at,
            install=install,
            quiet=quiet,
            as_json=as_json,
        )
    )
