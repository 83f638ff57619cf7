"""Publishing: numbers, visibility, groups, durability (R1, R2, R6, G3, G4)."""

from __future__ import annotations

import pytest

from tensorhub.errors import (
    CoordinatorUnavailable,
    GroupAborted,
    StateError,
)
from tensorhub.testing import StepwiseCluster
from tensorhub.types import HandleState


def states(cluster: StepwiseCluster) -> dict[int, str]:
    return {
        n: v.state.value for n, v in cluster.coordinator.cluster.models["actor"].versions.items()
    }


def test_a_version_is_visible_once_it_is_durable() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    published = trainer.publish(1)
    cluster.run(until=lambda: cluster.unstored)
    assert states(cluster) == {1: "staged"}
    assert not published.done
    cluster.run()
    assert published.number == 1
    assert states(cluster) == {1: "available"}
    assert (trainer.member.state, trainer.member.version) == (HandleState.READY, 1)


def test_a_group_publishes_together() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    cluster.run()
    one = first.publish(1)
    cluster.run()
    assert states(cluster) == {1: "staged"}
    assert not one.done
    two = second.publish(1)
    cluster.run()
    assert one.number == two.number == 1
    assert one.version == two.version
    assert one.version is not None
    assert one.version.world_size == 2


def test_differing_calls_abort_all_and_name_both() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    cluster.run()
    one, two = first.publish(1), second.publish(2)
    cluster.run()
    for asked in (one, two):
        with pytest.raises(
            GroupAborted, match=r"publish\(1\) on rank 0, publish\(2\) on rank 1"
        ) as caught:
            _ = asked.number
        assert caught.value.causes == {0: "called publish(1)", 1: "called publish(2)"}
        assert not caught.value.retryable
    assert states(cluster) == {}


def test_a_publish_and_a_fill_differ() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    cluster.run()
    one, two = first.publish(1), second.replicate("latest")
    cluster.run()
    for asked in (one, two):
        with pytest.raises(
            GroupAborted, match=r"publish\(1\) on rank 0, replicate\('latest'\) on rank 1"
        ):
            _ = asked.number


def test_a_rank_that_refuses_ends_the_others_call_at_once() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    cluster.run()
    first.refuse("ValueError: loss is NaN")
    asked = second.publish(1)
    cluster.run()
    with pytest.raises(GroupAborted, match="loss is NaN") as caught:
        _ = asked.number
    assert caught.value.causes == {0: "ValueError: loss is NaN"}
    both = [first.publish(1), second.publish(1)]
    cluster.run()
    assert [call.number for call in both] == [1, 1]


def test_a_refusal_after_the_others_called_counts_as_well() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    cluster.run()
    asked = second.publish(1)
    cluster.run()
    first.refuse("ValueError: loss is NaN")
    cluster.run()
    with pytest.raises(GroupAborted, match="loss is NaN"):
        _ = asked.number


def test_cancelling_a_publish_before_the_decision_ends_it_on_all_ranks() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    cluster.run()
    asked = first.publish(1)
    cluster.run()
    first.cancel("not any more")
    late = second.publish(1)
    cluster.run()
    with pytest.raises(StateError, match="not any more"):
        _ = asked.number
    with pytest.raises(GroupAborted, match="not any more"):
        _ = late.number


def test_cancelling_after_the_decision_is_in_the_making_comes_too_late() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    asked = trainer.publish(1)
    cluster.run(until=lambda: cluster.unstored)
    trainer.cancel()
    cluster.run()
    assert asked.number == 1


def test_a_store_that_fails_leaves_the_number_unused() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    asked = trainer.publish(1)
    cluster.run(until=lambda: cluster.unstored)
    cluster.fail_store()
    cluster.run()
    with pytest.raises(CoordinatorUnavailable, match="disk full; see its state_dir"):
        _ = asked.number
    again = trainer.publish(1)
    cluster.run()
    assert again.number == 1


def test_a_retry_by_key_is_not_a_second_publication() -> None:
    """The outcome is lost with the connection; the same message, said again, is answered with
    it.
    """
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    asked = trainer.publish(1)
    cluster.run(until=lambda: cluster.unstored)
    trainer.worker.disconnect()
    cluster.run()
    trainer.worker.connect()
    cluster.run()
    assert asked.number == 1
    assert len(cluster.store) == 1
    assert sum(" -> Publish " in line for line in cluster.log) == 2


def test_publishing_published_memory_is_refused_here() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    with pytest.raises(StateError, match="holds version 1, which is published"):
        trainer.publish(2)


def test_one_call_at_a_time() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.publish(1)
    with pytest.raises(
        StateError, match="a call is still running on this handle; one call at a time"
    ):
        trainer.replicate()


def test_a_rank_that_is_lost_before_the_decision_aborts_it() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    cluster.run()
    asked = first.publish(1)
    cluster.run()
    second.worker.crash()
    cluster.advance(11)
    with pytest.raises(
        GroupAborted, match=r"worker 'trainer1' was not heard of for 10\.0 s"
    ) as caught:
        _ = asked.number
    assert list(caught.value.causes) == [1]
    assert states(cluster) == {}
