"""What came of a run: stalls against their floor, and systems against one another. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import inf
from statistics import fmean
from typing import Any

from tensorhub.testing.flow.scenario import Scenario
from tensorhub.testing.flow.topology import Topology
from tensorhub.testing.flow.transfers import Edge
from tensorhub.testing.flow.workload import Attempt


@dataclass(frozen=True)
class Stalls:
    """Of one kind of calls. Quantiles take a call that was cut short for one that took longer than
    that (Kaplan and Meier). None: so many were cut short that it is not known.
    """

    done: int
    preempted: int
    unfinished: int
    mean_s: float | None  # of those that are done
    median_s: float | None
    p95_s: float | None
    max_s: float | None
    total_s: float  # of all, cut short or not

    @classmethod
    def of(cls, attempts: Sequence[Attempt]) -> Stalls:
        outcomes = Counter(each.outcome for each in attempts)
        done = [each.seconds for each in attempts if each.outcome == "done"]
        return cls(
            done=outcomes["done"],
            preempted=outcomes["preempted"],
            unfinished=outcomes["unfinished"],
            mean_s=fmean(done) if done else None,
            median_s=quantile(attempts, 0.5),
            p95_s=quantile(attempts, 0.95),
            max_s=max(done, default=None),
            total_s=sum(each.seconds for each in attempts),
        )


def quantile(attempts: Sequence[Attempt], share: float) -> float | None:
    """The time in which this share of the calls would be done."""
    alive, left = 1.0, len(attempts)
    for each in sorted(attempts, key=lambda a: (a.seconds, a.outcome != "done")):
        if each.outcome == "done":
            alive *= 1 - 1 / left
            if alive <= 1 - share + 1e-12:
                return each.seconds
        left -= 1
    return None


@dataclass(frozen=True)
class Row:
    """One system's. `to_floor`: the mean stall of an update in copies. `trainer_s`: the mean stall
    of the trainer for each version. `wan_copies`: what has crossed into other sites, for each
    version. `phases`: means of an update's, in seconds.
    """

    system: str
    updates: Stalls
    joins: Stalls
    calls: Stalls  # both together
    to_floor: float | None
    trainer_s: float
    wan_copies: float
    depth_most: int  # of the last version's tree
    wall_s: float
    steps: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    def times(self, ours: Row) -> float | None:
        """How many times the mean stall of `ours`."""
        if self.updates.mean_s is None or not ours.updates.mean_s:
            return None
        return self.updates.mean_s / ours.updates.mean_s


@dataclass(frozen=True)
class Report:
    scenario: Scenario
    rows: Sequence[Row]

    def as_json(self) -> dict[str, Any]:
        scenario, ours = self.scenario, self.rows[0]
        bound_s, bound_by = cut_bound(scenario)
        what = {
            "scenario": scenario.name,
            "title": scenario.title,
            "seed": scenario.seed,
            "rollouts": scenario.count("rollout"),
            "ranks": scenario.ranks,
            "rank_bytes": scenario.rank_bytes,
            "versions": scenario.versions,
            "floor_s": scenario.copy_s,
            "cut_bound_s": bound_s,
            "cut_bound_of": bound_by,
            "links": {key: value for key, value in asdict(scenario.links).items() if value < inf},
        }
        systems = [{**asdict(row), "times_the_first": row.times(ours)} for row in self.rows]
        return {**what, "systems": systems}


def cut_bound(scenario: Scenario) -> tuple[float, str]:
    """The shortest time in which one version could come to all rollouts, and the link that decides
    it: the largest, over links, of bytes that must cross over capacity.
    """
    topology = Topology(scenario)
    nbytes = float(scenario.rank_bytes)
    trainer = topology.places[next(name for name in topology.places if name.startswith("trainer"))]
    found = [(nbytes / topology.capacities[trainer.up], "the trainer's NICs")]
    slowest = max(hosts.slow for hosts in scenario.hosts if hosts.role == "rollout")
    found.append((nbytes * slowest / scenario.links.nic_bytes_per_s, "a rollout's NIC"))
    if len(scenario.sites) > 1:
        wan = scenario.links.wan_mbit_per_s * 125_000
        found.append((nbytes * scenario.ranks / wan, "the WAN"))
    if scenario.links.rack_mbit_per_s < inf:
        rack = scenario.links.rack_mbit_per_s * 125_000
        workers = scenario.gpus_per_host * scenario.hosts_per_rack
        found.append((nbytes * min(scenario.ranks, workers) / rack, "a rack's uplink"))
    return max(found)


def parents(edges: Sequence[Edge]) -> dict[str, str]:
    """The source from which each reader had most of its bytes."""
    most: dict[str, Edge] = {}
    for edge in edges:
        if edge.source != edge.reader and (
            edge.reader not in most or edge.nbytes > most[edge.reader].nbytes
        ):
            most[edge.reader] = edge
    return {reader: edge.source for reader, edge in most.items()}


def depths(tree: dict[str, str]) -> dict[str, int]:
    """The distance of each worker from a worker that read from no source."""
    found: dict[str, int] = {}
    for name in tree:
        way = list[str]()
        at = name
        while at in tree and at not in found and at not in way:
            way.append(at)
            at = tree[at]
        depth = found.get(at, 0)
        for each in reversed(way):
            depth += 1
            found[each] = depth
    return found
