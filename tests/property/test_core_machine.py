"""The guarantees under faults, by Hypothesis, which shrinks what it finds (seeds: see tests/testing)."""

from __future__ import annotations

from inspect import signature
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RULE_MARKER, run_state_machine_as_test

from tensorhub.coordinator.entities import Operation
from tensorhub.machine import InvariantBroken
from tensorhub.scheduler.pull import Pull
from tensorhub.testing import Fault, GuaranteeBroken
from tensorhub.types import LeaseId
from tensorhub.worker.owner import Owner
from tests.property.core_machine import CoreMachine

EXAMPLES = 15  # the same ones each time: the slow tests below have many more


def run(examples: int, *, steps: int = 40, shrinks: bool = True) -> None:
    """The same examples in each run."""
    run_state_machine_as_test(
        CoreMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        ),
    )


ARGUMENTS: dict[str, Any] = {
    "index": 0,
    "other": None,
    "group": 0,
    "seconds": 3.0,
    "notice_s": 0.5,
    "then": None,
    "kept": True,
    "control": False,
    "count": 5,
    "calls": ["refuse", "", "update"],
}


@pytest.mark.parametrize("kind", Fault)
def test_each_fault_has_its_rule_and_strikes(kind: Fault) -> None:
    rule = getattr(CoreMachine, kind.replace("-", "_"))
    assert hasattr(rule, RULE_MARKER)
    machine = CoreMachine()
    machine.set_up(2, 1, spot=True)
    machine.update(2, "latest", hold=False, staged=False, timeout_s=60.0, then=[])
    machine.retain(0, 0, [])  # so that something is on its way
    if kind is Fault.RESTART:
        machine.crash(0, None)
    if kind is Fault.LIE:  # somebody has read what was published
        machine.work([(0, "publish", None), (1, "replicate", None), (1, "update", None)])
        machine.cluster.advance(4.0)
    rule(machine, **{name: ARGUMENTS[name] for name in signature(rule).parameters if name != "self"})
    machine.work([(1, "publish", None), (2, "update", None)])
    machine.cluster.advance(4.0)
    assert machine.cluster.happened[kind]
    machine.teardown()


@pytest.mark.timeout(600)  # shrinking takes minutes
def test_everything_holds_under_every_fault() -> None:
    run(EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_everything_holds_for_long() -> None:
    run(2000, steps=60)


def test_who_is_cut_off_again_at_the_moment_of_a_fence_had_decided_on_it_before() -> None:
    """Its lease was over, and over its newest connection nobody has heard it."""
    machine = CoreMachine()
    machine.set_up(1, 0, spot=False)
    machine.retain(0, 2, None)
    machine.behind(0, 15.0, None)
    machine.duplicate(0, 1)
    machine.overwrite(0, 8.0)
    machine.close(0, abandon=False, timeout_s=60.0, then=1.0)
    machine.coordinator(kept=False, then=4.0)
    machine.fetch(0, 0, "latest", 60.0, 8.0)
    machine.coordinator(kept=False, then=4.0)
    machine.teardown()


def test_what_was_announced_before_its_owner_found_it_changed_may_be_said_after_that() -> None:
    machine = CoreMachine()
    machine.set_up(1, 2, spot=False)
    machine.retain(0, 2, [])
    machine.overwrite(4, [])
    machine.unpublish(0, 60.0, [])
    machine.time_passes(4.0, None)
    machine.cut(4, [323, 610, 132, 110])
    machine.teardown()


# ------------------------------------------------------------------------------------------- that it finds what is wrong


def fence_that_shuts_nothing(owner: Owner, registration: str) -> None:
    pass


def bad_chunk_that_counts_as_good(pull: Pull, lease: LeaseId, chunk: int, ok: bool, arrived: Any = Pull.arrived) -> None:
    arrived(pull, lease, chunk, True)


def one_vote_that_is_enough(operation: Operation) -> bool:
    return operation.running and any(part.voted for part in operation.parts.values())


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("owner", "name", "bug"),
    [
        (Owner, "close", fence_that_shuts_nothing),
        (Pull, "arrived", bad_chunk_that_counts_as_good),
        (Operation, "all_voted", property(one_vote_that_is_enough)),
    ],
)
def test_it_finds_a_deliberate_bug(owner: type, name: str, bug: object) -> None:
    with patch.object(owner, name, bug), pytest.raises((GuaranteeBroken, InvariantBroken)):
        run(40 * EXAMPLES, shrinks=False)  # ends with the first that fails
