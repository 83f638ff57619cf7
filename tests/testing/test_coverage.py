"""What the transitions of the machines and the demands are, and that both are counted."""

from __future__ import annotations

import importlib
import pkgutil
import re
import threading
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum

import pytest

from tensorhub.coordinator.entities import Worker
from tensorhub.coordinator.states import WorkerState
from tensorhub.machine import IllegalTransition, counting_transitions
from tensorhub.scheduler.pull import Pull
from tensorhub.testing.coverage import MACHINES, SOURCES, demands, judged, transitions
from tensorhub.testing.sim.assertion import GuaranteeBroken, demand
from tensorhub.testing.sim.recovery_paths import RECOVERY_PATHS
from tensorhub.testing.simulated import run_seed
from tensorhub.types import LeaseId, Location

PURE = ("coordinator", "worker", "scheduler")


def a_worker() -> Worker:
    return Worker("w.1", "w", Location(host="h"), (), 1, 0.0, 0.0, 0)


def test_every_table_of_the_pure_packages_is_listed() -> None:
    """A table: a mapping from states to sets of states."""
    found: list[Mapping[object, object]] = []
    for package in PURE:
        path = list(importlib.import_module(f"tensorhub.{package}").__path__)
        for module in pkgutil.iter_modules(path, f"tensorhub.{package}."):
            for name, value in vars(importlib.import_module(module.name)).items():
                if name.endswith("_TABLE") and not any(value is table for table in found):
                    found.append(value)
    assert found
    assert len(found) == len(MACHINES)
    assert all(any(table is machine.table for machine in MACHINES) for table in found)


def test_each_transition_has_one_name() -> None:
    names = transitions()
    assert (
        len(set(names))
        == len(names)
        == sum(len(new) for machine in MACHINES for new in machine.table.values())
    )
    assert "replica: filling -> ready" in names


@pytest.mark.heavy
def test_each_transition_is_counted_by_its_name() -> None:
    counted = Counter[str]()
    for seed in range(6):
        counted.update(run_seed(seed).transitions)
    assert set(counted) <= set(transitions())
    for machine in MACHINES:
        assert any(name.startswith(f"{machine.name}: ") for name in counted), machine.name


def test_each_demand_has_a_text_of_its_own() -> None:
    """By that it is counted, and by that a search knows of a demand that was never judged."""
    sources = [path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")]
    calls = sum(len(re.findall(r"^ +demand\(", source, re.MULTILINE)) for source in sources)
    assert len(demands()) == calls > 200


@pytest.mark.heavy
def test_a_seed_reports_how_often_each_demand_was_judged() -> None:
    found = run_seed(1).demands
    assert set(found) <= set(demands())
    assert len(found) > 200
    assert run_seed(1).demands == found


def test_a_demand_that_holds_is_counted_and_formats_nothing() -> None:
    class Costly:
        def __repr__(self) -> str:
            return "what it costs"

        __str__ = __repr__
        formatted = 0

        def __format__(self, _: str) -> str:
            self.formatted += 1
            return "costly"

    about, text = Costly(), "content: {} is of a test"
    before = judged()
    demand(True, text, about)
    assert about.formatted == 0
    with pytest.raises(GuaranteeBroken, match="content: costly is of a test"):
        demand(False, text, about)
    assert judged() - before == {text: 2}


@pytest.mark.heavy
def test_each_way_of_recovery_is_one_that_a_search_asks_for() -> None:
    """But for the kinds of errors: it depends on what users do which of them they meet. And but for
    what is too rare.
    """
    taken = Counter[str]()
    for seed in range(10):
        taken.update(run_seed(seed).paths)
    rare = ("copy not ended", "copy not released")  # tests/worker/test_host_copies.py has both
    not_asked_for = ("refused: ", "call ended with ", "copied from host memory (seed)", *rare)
    assert {way for way in taken if not way.startswith(not_asked_for)} <= set(RECOVERY_PATHS)
    assert len(set(RECOVERY_PATHS)) == len(RECOVERY_PATHS)


def test_the_sources_of_a_pull_are_counted() -> None:
    pull = Pull([1])
    with counting_transitions() as counted:
        for lease in (LeaseId("a"), LeaseId("b")):
            pull.add_source(lease, complete=True)
            pull.drop_source(lease)
            pull.lane_ended(lease)
    assert counted == {"source: live -> leaving": 2, "source: leaving -> ended": 2}


def test_only_what_the_block_itself_takes_is_counted() -> None:
    def move(new: StrEnum) -> None:
        worker.become(WorkerState(new), 1, 1.0, "because")

    worker = a_worker()
    move(WorkerState.SUSPECT)  # nobody counts
    with counting_transitions() as outer:
        move(WorkerState.LIVE)
        with counting_transitions() as inner:
            move(WorkerState.SUSPECT)
        thread = threading.Thread(target=move, args=(WorkerState.LIVE,))
        thread.start()
        thread.join()
        with pytest.raises(IllegalTransition):
            move(WorkerState.LOST)  # LIVE is never LOST at once: nothing is taken
    move(WorkerState.SUSPECT)
    assert outer == Counter({"worker lease: suspect -> live": 1})
    assert inner == Counter({"worker lease: live -> suspect": 1})
