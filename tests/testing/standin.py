"""What a search looks like to `tensorhub simulate`: what becomes of a seed is in its number."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum

from tensorhub.testing.coverage import demands, transitions

BREAKS, RAISES, DIES, THIN, WAVERS, SLEEPS = 7, 17, 27, 37, 50, 99
REACHES_ALL = range(1_000, 100_000)
RECOVERY_PATHS = ("moved",)


class Fault(StrEnum):
    CRASH = "crash"
    DELAY = "delay"
    DROP = "drop"


@dataclass
class SeedReport:
    seed: int
    events: int
    groups: int
    versions: int
    faults: Counter[str]
    transitions: Counter[str]
    paths: Counter[str]
    demands: Counter[str]
    end_hash: str


def explain(
    seed: int, *, faults: Collection[Fault] | None = None, events: int = 1000, seconds: float
) -> str | None:
    assert events in (10, 1000)
    assert seconds in (5.0, 60.0)
    return f"content: [bold] is shorter\nreproduce: {seed}, {faults} in part" if seed == 7 else None


def run_part(
    seed: int,
    atoms: Collection[str],
    until: int,
    *,
    faults: Collection[Fault] | None = None,
    events: int = 1000,
) -> SeedReport:
    assert (list(atoms), until) == (["3", "g1.2"], 40)
    return run_seed(seed, faults=faults, events=events)


def run_seed(
    seed: int, *, faults: Collection[Fault] | None = None, events: int = 1000
) -> SeedReport:
    match seed:
        case 7:
            raise AssertionError("content: [bold] holds other bytes than were published")
        case 17:
            raise KeyError("lost")
        case 27:
            os._exit(3)
        case 99:
            time.sleep(3600)
        case _:
            pass
    # the hash of a str differs from process to process
    end = f"end {hash(str(seed)) if seed == WAVERS else seed}"
    reached = transitions() if seed in REACHES_ALL else []
    paths = Counter(RECOVERY_PATHS if seed in REACHES_ALL else ())
    return SeedReport(
        seed,
        events,
        3,
        2 if seed == THIN else 3,
        Counter(map(str, faults or Fault)),
        Counter(reached),
        paths,
        Counter([*demands()] if seed in REACHES_ALL else ()),
        end,
    )
