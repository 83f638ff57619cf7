"""`tensorhub simulate SCENARIO`: the flow model, as a table and JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace

import typer
from rich.table import Table

from tensorhub.cli import common
from tensorhub.testing.flow.report import Report, Row, cut_bound
from tensorhub.testing.flow.run import check, possible, run_one
from tensorhub.testing.flow.scenario import Scenario, at_scale, in_groups, left_out, load


def simulate_flow(
    name_or_file: str,
    gpus: int | None,
    parameters: str | None,
    ranks: int | None,
    systems: str | None,
    seed: int | None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Run a scenario, and print what came of it. None: the scenario's own setting. What cannot be
    used is a usage error.
    """
    with common.checking(kind="scenario"):
        scenario = given = load(name_or_file)
    with common.checking():
        if seed is not None:
            scenario = replace(scenario, seed=seed)
        if gpus is not None:
            scenario = at_scale(scenario, gpus, parameters, ranks)
        elif ranks is not None:
            scenario = in_groups(scenario, ranks)
        names = [
            name.strip()
            for name in (systems or ",".join(possible(scenario))).split(",")
            if name.strip()
        ]
        check(scenario, names)
    if not names:
        raise common.usage(f"--systems: give some of {', '.join(possible(scenario))}")
    rows: list[Row] = []
    try:
        for name in names:
            if not quiet:
                print(f"{name} ...", file=sys.stderr, flush=True)
            rows.append(run_one(scenario, name).row)
    except KeyboardInterrupt:
        raise typer.Exit(common.INTERRUPTED) from None
    report = Report(scenario, rows)
    if as_json:
        print(json.dumps(report.as_json()), flush=True)
    else:
        _print(report, _conditions(scenario, "" if gpus is not None else left_out(given, scenario)))


def _conditions(scenario: Scenario, besides: str) -> str:
    """`besides`: of its hosts, what has to be said."""
    links, bound = scenario.links, cut_bound(scenario)
    of_ranks = f" of {scenario.ranks} ranks" if scenario.ranks > 1 else ""
    who = f"{scenario.count('rollout'):,} rollouts{of_ranks}{f' ({besides})' if besides else ''}"
    size = (
        f"{common.format_bytes(scenario.rank_bytes)} a rank over "
        f"{links.nic_mbit_per_s / 1000:g} Gbit/s"
    )
    if len(scenario.sites) > 1:  # a site that is written in two ways is seen here
        who += (
            f" in {len(scenario.sites)} sites "
            f"({', '.join(scenario.sites[:8])}{', ...' if len(scenario.sites) > 8 else ''})"
        )
    return (
        f"{who}; {size}: floor {scenario.copy_s:.3f} s; cut bound {bound[0]:.3f} s "
        f"({bound[1]}); seed {scenario.seed}"
    )


def _print(report: Report, conditions: str) -> None:
    print(f"{report.scenario.name}: {report.scenario.title}")
    print(conditions)
    table = Table("system", header_style="bold")
    for name in (
        "update",
        "of floor",
        "times",
        "median",
        "p95",
        "done",
        "cut short",
        "trainer",
        "WAN copies",
        "deep",
        "wall",
    ):
        table.add_column(name, justify="right")
    for row in report.rows:
        table.add_row(*_cells(row, report.rows))
    common.print_table(table)


def _cells(row: Row, rows: Sequence[Row]) -> list[str]:
    calls, times = row.calls, row.times(rows[0])
    return [
        row.system,
        _seconds(row.updates.mean_s),
        "-" if row.to_floor is None else f"{row.to_floor:.3f}",
        "-" if times is None else f"{times:.2f}",
        _seconds(calls.median_s),
        _seconds(calls.p95_s),
        f"{calls.done:,}",
        f"{calls.preempted + calls.unfinished:,}",
        _seconds(row.trainer_s),
        f"{row.wan_copies:.2f}",
        f"{row.depth_most}",
        f"{row.wall_s:.1f} s",
    ]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f} s"
