"""The guarantees under faults, by Hypothesis, which shrinks what it finds (seeds: see
tests/testing).
"""

from __future__ import annotations

from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tensorhub.coordinator.entities import Operation
from tensorhub.machine import InvariantBroken
from tensorhub.scheduler.pull import Pull
from tensorhub.testing import GuaranteeBroken
from tensorhub.types import LeaseId
from tensorhub.worker.owner import Owner
from tests.property.core_machine import CoreMachine

EXAMPLES = 4  # the same ones each time: the slow tests below have many more


def run(examples: int, *, steps: int = 40, shrinks: bool = False) -> None:
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
            suppress_health_check=[
                HealthCheck.too_slow,
                HealthCheck.filter_too_much,
                HealthCheck.data_too_large,
            ],
        ),
    )


def test_everything_holds_under_every_fault() -> None:
    run(EXAMPLES)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_everything_holds_for_long() -> None:
    run(2000, steps=60, shrinks=True)


# ------------------------------------------------------------------------------------------- that
# it finds what is wrong


def fence_that_shuts_nothing(owner: Owner, registration: str) -> None:
    pass


ARRIVED = Pull.arrived


def bad_chunk_that_counts_as_good(
    pull: Pull, lease: LeaseId, chunk: int, ok: bool, came: int | None = None
) -> None:
    ARRIVED(pull, lease, chunk, True, came)


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
        run(600)  # ends with the first that fails
