"""Searching for a seed that breaks a guarantee: one run, and what it has covered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from tensorhub.machine import counting_transitions
from tensorhub.testing.sim.faults import Fault
from tensorhub.testing.sim.recovery_paths import RECOVERY_PATHS
from tensorhub.testing.simulated import SimulatedCluster

__all__ = ["RECOVERY_PATHS", "Fault", "SeedReport", "run_seed"]


@dataclass(frozen=True)
class SeedReport:
    """What one seed's run did. Can be pickled."""

    seed: int
    events: int  # messages, chunks and timers that were delivered
    groups: int
    versions: int  # whose publish has returned
    faults: Counter[str] = field(default_factory=Counter)  # by kind: that really happened
    transitions: Counter[str] = field(default_factory=Counter)  # like "replica: filling -> ready"
    paths: Counter[str] = field(default_factory=Counter)  # ways of recovery that were really taken
    end_hash: str = ""  # of everything that happened, in its order


def run_seed(seed: int, *, faults: Collection[Fault] | None = None, events: int = 1000) -> SeedReport:
    """Run one seed to its end.

    `faults`: the kinds that may be drawn; None: all. `events`: how many are delivered at least while faults happen. Raises
    GuaranteeBroken, with the last lines of the trace, and at the end one line that runs this seed again.
    """
    with counting_transitions() as transitions:
        cluster = SimulatedCluster(seed, faults=faults, events=events)
        cluster.run()
    return SeedReport(
        seed=seed,
        events=cluster.timeline.events,
        groups=len(cluster.users.groups),
        versions=len(cluster.users.published),
        faults=Counter({str(kind): times for kind, times in cluster.injector.happened.items()}),
        transitions=transitions,
        paths=cluster.timeline.paths,
        end_hash=cluster.end_hash,
    )
