"""Which transitions the state machines have, which of them a search need not meet, and which
demands the judges and the machines make.

Responsible for the lists that a search is measured by. Not responsible for counting:
`machine.counting_transitions` and both functions `demand` are.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from tensorhub import machine
from tensorhub.coordinator import states
from tensorhub.coordinator.core import Coordinator
from tensorhub.coordinator.entities import Operation, RankPart, ReadLease, Replica, Version, Worker
from tensorhub.machine import Stateful, transition
from tensorhub.scheduler.pull import SOURCE, SOURCE_TABLE, SourceState
from tensorhub.testing.sim import assertion
from tensorhub.types import HandleState
from tensorhub.worker.active_call import Refusing
from tensorhub.worker.filling import Filling
from tensorhub.worker.leaving import Leaving
from tensorhub.worker.member_memory import MemberMemory
from tensorhub.worker.publishing import Publishing
from tensorhub.worker.states import Phase


class Machine(NamedTuple):
    """One kind of entity, the state in which it begins, and its table."""

    name: str
    first: StrEnum
    table: Mapping[Any, frozenset[Any]]


def _machine(entity: type[Stateful[Any]], first: StrEnum) -> Machine:
    return Machine(entity.machine, first, entity.table)


MACHINES: Final = (
    _machine(Coordinator, states.CoordinatorState.RECOVERING),
    _machine(Worker, states.WorkerState.LIVE),
    _machine(Version, states.VersionState.STAGED),
    _machine(Replica, states.ReplicaState.FILLING),
    _machine(ReadLease, states.LeaseState.ACTIVE),
    _machine(Operation, states.OperationState.GATHERING),
    _machine(RankPart, states.PartState.CALLED),
    _machine(MemberMemory, HandleState.EMPTY),
    _machine(Publishing, Phase.QUEUED),
    _machine(Filling, Phase.QUEUED),
    _machine(Leaving, Phase.QUEUED),
    _machine(Refusing, Phase.QUEUED),
    Machine(SOURCE, SourceState.LIVE, SOURCE_TABLE),
)

# What a search need not meet: tests/worker/test_phases.py takes each of them.
RARE: Final = (
    "fill: asked -> fencing",
    "fill: fencing -> asked",
    "fill: held -> asked",
    "fill: hook -> asked",
    "fill: manifest -> asked",
    "fill: manifest -> copying",
    "fill: manifest -> fencing",
    "fill: manifest -> room",
    "fill: room -> stopping",
    "fill: hook -> fencing",
    "fill: copying -> copying",
    "fill: copying -> stopping",
    "fill: stopping -> asked",
    "fill: voted -> asked",
    "fill: voted -> pulling",
)


def transitions() -> tuple[str, ...]:
    """Every transition of every table, as it is counted: `"replica: filling -> ready"`. In the
    order of the tables.
    """
    return tuple(
        transition(machine.name, old, new)
        for machine in MACHINES
        for old, targets in machine.table.items()
        for new in sorted(targets)
    )


def wanted() -> tuple[str, ...]:
    """The transitions that a long search has to meet."""
    return tuple(name for name in transitions() if name not in RARE)


SOURCES = Path(__file__).parents[1]


@cache
def demands() -> Mapping[str, str]:
    """All that is demanded, in which module. A text of two calls is there once."""
    found: dict[str, str] = {}
    for path in sorted(SOURCES.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)) if "demand(" in source else ():
            match node:
                case ast.Call(
                    func=ast.Name(id="demand"), args=[_, ast.Constant(value=str(what)), *_]
                ):
                    found[what] = path.relative_to(SOURCES).as_posix()
                case _:
                    pass
    return found


def judged() -> Counter[str]:
    """How often each demand was judged in this process."""
    return Counter(machine.judged) + Counter(assertion.judged)
