"""What a caller waits for where no weights move: publish of many tensors, update with nothing new,
newest.

The coordinator is a process of its own; the callers are in this one. Every round takes each call
once, in turns; a round trip to the coordinator (`describe` of a small model) is the yardstick
beside them. See README.md.
"""

import argparse
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import anyio
import torch

import tensorhub
from benches.comparison.facts import facts
from benches.one_to_n import spread
from benches.remotes import Remote
from benches.workers import coordinator_main, rank_main

ARRIVED_S = 0.02  # after this long, a rank's call has reached the coordinator
NEWEST_CALLS = 10_000  # of one round; one alone is too short to time
TRIP = "round trip"
IDLE_TRIP = "round trip of a process that was idle"
LAST_OF_TWO = "update, nothing new, last of 2 ranks"

T = TypeVar("T")
Figures = dict[str, list[float]]  # seconds of each round, by what was called


async def _timed(figures: Figures, name: str, call: Callable[[], Awaitable[T]]) -> T:
    started = time.perf_counter()
    result = await call()
    figures.setdefault(name, []).append(time.perf_counter() - started)
    return result


async def measure(address: str, ranks: list[Remote], tensors: int, rounds: int) -> Figures:
    figures: Figures = {}
    async with (
        tensorhub.connect(address, name="caller") as hub,
        tensorhub.connect(address, name="reader") as other,
    ):
        many = {f"layers.{n}.weight": torch.zeros(16) for n in range(tensors)}
        trainer = await hub.register("many", many)
        few = await hub.register("few", {"w": torch.ones(1024)})
        await few.publish(1)
        reader = await other.register("few", {"w": torch.zeros(1024)})
        await reader.replicate()
        await other.wait_for("few", at_least=1)  # from here on `newest` knows it
        for number in range(rounds + 1):
            if number == 1:
                figures.clear()  # the first round warms up
            await _timed(
                figures,
                f"publish, {tensors:,} tensors",
                lambda number=number: trainer.publish(number),  # type: ignore[misc]
            )
            await trainer.unpublish()
            await _timed(figures, TRIP, lambda: other.describe("few"))
            report = await _timed(figures, "update, nothing new", reader.update)
            assert not report.changed
            for rank in ranks[:-1]:
                rank.tell("update")
            await anyio.sleep(ARRIVED_S)
            figures.setdefault(LAST_OF_TWO, []).append(ranks[-1].ask("update"))
            ranks[0].hear()
            await anyio.sleep(ARRIVED_S)
            figures.setdefault(IDLE_TRIP, []).append(ranks[-1].ask("trip"))
            started = time.perf_counter()
            for _ in range(NEWEST_CALLS):
                other.newest("few")
            figures.setdefault("newest", []).append((time.perf_counter() - started) / NEWEST_CALLS)
            started = time.perf_counter()
            for _ in range(NEWEST_CALLS):
                str(reader.stamp())
            figures.setdefault("stamp, as text", []).append(
                (time.perf_counter() - started) / NEWEST_CALLS
            )
    return figures


def table(figures: Figures) -> list[dict[str, object]]:
    """One row for each call: microseconds, and as a multiple of the round trip of the same
    round.
    """
    rows: list[dict[str, object]] = []
    for name, seconds in figures.items():
        trips = figures[IDLE_TRIP if name == LAST_OF_TWO else TRIP]
        us, ratios = (
            [1e6 * second for second in seconds],
            [mine / trip for mine, trip in zip(seconds, trips, strict=True)],
        )
        rows.append({"call": name, "us": spread(us), "of a round trip": spread(ratios)})
    return rows


def show(rows: list[dict[str, object]]) -> None:
    print(f"\n{'call':<40}{'us':>34}{'of a round trip':>26}")
    for row in rows:
        cells = [value for value in row.values() if isinstance(value, list)]
        (us, low, high), (ratio, least, most) = cells
        print(
            f"{row['call']:<40}{f'{us:,.1f} [{low:,.1f}-{high:,.1f}]':>34}{f'{ratio:.3f} [{least:.2f}-{most:.2f}]':>26}"
        )
    print("\nMedian [least-largest] of the rounds.")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benches calls", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--tensors", type=int, default=10_000, help="of the model that is published"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write facts and rows")
    options = parser.parse_args(arguments)
    if min(options.rounds, options.tensors) < 1:
        parser.error("give at least 1 round and 1 tensor")
    known = facts()
    for name, value in known.items():
        print(f"{name}: {value}")
    remotes = [Remote("coordinator", coordinator_main)]
    try:
        address = remotes[0].hear()
        remotes += [Remote(f"rank-{rank}", rank_main, address, rank, 2) for rank in range(2)]
        ranks = remotes[1:]
        for rank in ranks:
            rank.hear()  # registered
            rank.tell("publish", 1)
        for rank in ranks:
            rank.hear()
        rows = table(anyio.run(measure, address, ranks, options.tensors, options.rounds))
    finally:
        for remote in reversed(remotes):
            remote.end()
    show(rows)
    if options.json is not None:
        options.json.write_text(json.dumps({"machine": known, "rows": rows}))
    return 0
