"""`tensorhub bench`: its options. The comparison itself is in benches/comparison, a part of an
installed TensorHub.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Any, NoReturn

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
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="RANK/SIZE",
            help="Measure a cluster instead: run this on each machine, with --address.",
        ),
    ] = None,
    address: common.AddressOption = None,
    token_file: common.TokenFileOption = None,
    as_json: common.JsonOption = False,
    quiet: common.QuietOption = False,
) -> None:
    """Compare TensorHub with this machine's ceilings and with its peers: equal bytes, one source to
    some receivers.

    The backends take turns, each in processes of its own, and every copy is verified. Run by root,
    all of them share a new network namespace, and so one congestion control. Peers that are not
    installed are listed at the end (docs/benchmarks.md).

    --cluster 0/3, 1/3 and 2/3 on three machines: bare sockets over each link, then TensorHub over
    each transport that all have (--only and --skip name transports), from rank 0 to each rank and
    to all at once. --mib is the most that one copy has; a slow link gets less. Each rank refuses
    more than its own --mib, and transports that its own --only and --skip leave out. Rank 0 prints
    the report, in which machines have numbers only, and --results has all of it.
    """
    if cluster is not None:
        _cluster(
            cluster,
            address,
            token_file,
            rounds=rounds,
            copies=copies,
            mib=mib,
            only=_names(only),
            skip=_names(skip),
            timeout_s=timeout,
            results=results,
            as_json=as_json,
            quiet=quiet,
        )
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


def _cluster(text: str, address: str | None, token_file: Path | None, **measured: Any) -> NoReturn:
    """Take part in the bench of a cluster."""
    connect = common.connecting(address, token_file)
    cluster = common.import_shipped("benches.comparison.cluster")
    rank, size = cluster.rank_and_size(text)
    if measured["results"] is not None:
        common.import_shipped("benches.comparison.command").check_writable([measured["results"]])
    wanted = cluster.Wanted(rank, size, connect, **measured)
    common.run(functools.partial(cluster.run, wanted))


def _names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
