"""What is said while an entry is on its way to the store: lower numbers, other models, and calls
that come after it.

Covers `decisions`, `operations` (calls that wait for a decision) and `lineage` (the order of
recording).
"""

from __future__ import annotations

import pytest

from tensorhub.coordinator import Publication
from tensorhub.errors import CoordinatorUnavailable, VersionConflict
from tensorhub.testing import CallRecord, SimHandle, StepwiseCluster


def handles(cluster: StepwiseCluster, *names: str) -> list[SimHandle]:
    found = [cluster.handle(name) for name in names]
    cluster.run()
    return found


def numbers(cluster: StepwiseCluster, model: str = "actor") -> list[int]:
    """What is durable, in the order in which it was stored: a store whose mark goes back cannot be
    opened again.
    """
    return [
        entry.number
        for entry in cluster.store
        if isinstance(entry, Publication) and entry.model == model
    ]


def is_overtaken(asked: CallRecord, by: int) -> bool:
    assert isinstance(asked.error, VersionConflict), asked.error
    assert asked.error.retryable
    return f"{by} is being recorded" in str(asked.error)


# --------------------------------------------------------------------------------------------------
# lower numbers


def test_a_lower_number_is_refused_while_a_higher_one_is_being_recorded() -> None:
    cluster = StepwiseCluster()
    first, second = handles(cluster, "first", "second")
    higher = first.publish(5)
    cluster.run("store")
    lower = second.publish(3)
    cluster.run("store")
    assert is_overtaken(lower, by=5)
    cluster.run()
    assert higher.number == 5
    assert numbers(cluster) == [5]
    again = second.publish(6)
    cluster.run()
    assert again.number == 6


def test_a_lower_number_that_was_staged_before_is_refused_when_its_last_rank_calls() -> None:
    cluster = StepwiseCluster()
    pair, (other,) = cluster.group("pair", 2), handles(cluster, "other")
    calls = [pair[0].publish(3)]
    cluster.run("store")
    higher = other.publish(5)
    cluster.run("store")
    calls.append(pair[1].publish(3))
    cluster.run("store")
    assert [is_overtaken(call, by=5) for call in calls] == [True, True]
    cluster.run()
    assert higher.number == 5
    assert numbers(cluster) == [5]


def test_a_lower_number_may_be_tried_again_where_the_higher_one_was_not_recorded() -> None:
    cluster = StepwiseCluster()
    first, second = handles(cluster, "first", "second")
    first.publish(5)
    cluster.run("store")
    lower = second.publish(3)
    cluster.run("store")
    assert is_overtaken(lower, by=5)
    cluster.fail_store()
    cluster.run()
    again = second.publish(3)
    cluster.run()
    assert again.number == 3
    assert numbers(cluster) == [3]


# ------------------------------------------------------------------------------------------- behind
# a write that fails


def not_recorded(asked: CallRecord) -> bool:
    return isinstance(asked.error, CoordinatorUnavailable) and "disk full" in str(asked.error)


def replaced_while_recording(cluster: StepwiseCluster) -> tuple[SimHandle, CallRecord, SimHandle]:
    """A group's publish is being recorded; one of its processes was lost meanwhile, and another one
    is in its place.
    """
    first, second = cluster.group("trainer", 2)
    cluster.run()
    asked = first.publish(1)
    second.publish(1)
    cluster.run("store")
    second.worker.crash()
    cluster.run("store")
    newcomer = cluster.handle("spare", "trainer", 1, 2)
    cluster.run("store")
    return first, asked, newcomer


@pytest.mark.parametrize("breaks", [False, True])
def test_a_call_that_waits_for_a_decision_goes_on_when_its_write_fails(breaks: bool) -> None:
    cluster = StepwiseCluster()
    first, asked, newcomer = replaced_while_recording(cluster)
    theirs = newcomer.publish(2)
    cluster.run("store")
    if breaks:  # it asks again what has become of its call
        newcomer.worker.disconnect()
        cluster.run("store")
        newcomer.worker.connect()
        cluster.run("store")
    cluster.fail_store()
    cluster.run()
    assert not_recorded(asked)
    assert not theirs.has_ended()
    ours = first.publish(2)
    cluster.run()
    assert (ours.number, theirs.number) == (2, 2)
    assert numbers(cluster) == [2]
