"""One scenario under several systems, one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from tensorhub.testing.flow.baselines import Broadcast, Pull
from tensorhub.testing.flow.hub_system import Phases, TensorHub
from tensorhub.testing.flow.report import Row, Stalls, depths, parents
from tensorhub.testing.flow.scenario import Scenario, ScenarioError, advice
from tensorhub.testing.flow.transfers import Edge
from tensorhub.testing.flow.workload import System, Workload, World

FIXED = (
    "broadcast",
    "broadcast-poor",
    "broadcast-pausing",
    "broadcast-pausing-poor",
)  # groups, in which nobody comes or goes
SYSTEMS: Mapping[str, Callable[[World], System]] = {
    "tensorhub": TensorHub,
    "tensorhub+seeds": lambda world: TensorHub(world, seeds=True),
    "tensorhub+prefetch": lambda world: TensorHub(world, prefetch=True),
    "tensorhub+resharded": lambda world: TensorHub(world, resharded=True),
    "broadcast": Broadcast,
    "broadcast-poor": lambda world: Broadcast(world, pipelined=False),
    "broadcast-pausing": lambda world: Broadcast(world, pauses=True),
    "broadcast-pausing-poor": lambda world: Broadcast(world, pauses=True, pipelined=False),
    "pull": Pull,
    "storage": lambda world: Pull(world, store=True),
}


@dataclass(frozen=True)
class Run:
    """What one system did: with it a picture is drawn."""

    row: Row
    world: World
    workload: Workload


def possible(scenario: Scenario) -> tuple[str, ...]:
    """The systems that this scenario can be run under."""
    changes = scenario.kills is not None or any(each.spot for each in scenario.hosts)
    without = [
        *(FIXED if changes else ()),
        *(() if scenario.count("seed") else ("tensorhub+seeds",)),
    ]
    without += () if scenario.ranks > 1 else ("tensorhub+resharded",)
    return tuple(name for name in SYSTEMS if name not in without)


def check(scenario: Scenario, systems: Sequence[str]) -> None:
    """Raise ScenarioError unless the scenario can be run under these."""
    for name in systems:
        if name not in possible(scenario):
            why = (
                "there is no system"
                if name not in SYSTEMS
                else f"{scenario.name} cannot be run under"
            )
            known = possible(scenario)
            give = advice(
                name, known if name not in SYSTEMS else (), f"give some of {', '.join(known)}"
            )
            raise ScenarioError(f"{why} {name!r}: {give}")


def last_edges(world: World, workload: Workload) -> list[Edge]:
    """The flows that carried the last version."""
    since = workload.puts[-1][0] if workload.puts else 0.0
    return [edge for edge in world.transfers.edges if edge.ended_s > since]


def run_one(scenario: Scenario, name: str) -> Run:
    began = time.perf_counter()
    world = World.of(scenario)
    system = SYSTEMS[name](world)
    workload = system.workload = Workload(world, system)
    workload.run()
    attempts, copy_s = workload.attempts, scenario.copy_s
    updates = Stalls.of([each for each in attempts if not each.joins])
    wan = [
        number for number, link in enumerate(world.topology.names) if link.startswith("wan into")
    ]
    crossed = sum(world.transfers.carried[number] for number in wan)
    phases: dict[str, float] = {}
    steps = 0
    if isinstance(system, TensorHub):
        steps = system.coordinated.steps
        if system.phases:
            phases = {
                each.name: fmean(getattr(p, each.name) for p in system.phases)
                for each in fields(Phases)
            }
    row = Row(
        system=name,
        updates=updates,
        joins=Stalls.of([each for each in attempts if each.joins]),
        calls=Stalls.of(attempts),
        to_floor=updates.mean_s / copy_s if updates.mean_s is not None else None,
        trainer_s=fmean(end - begin for begin, end in workload.puts) if workload.puts else 0.0,
        wan_copies=crossed / scenario.rank_bytes / scenario.ranks / max(1, len(workload.puts)),
        depth_most=max(depths(parents(last_edges(world, workload))).values(), default=0),
        wall_s=time.perf_counter() - began,
        steps=steps,
        phases=phases,
    )
    return Run(row, world, workload)
