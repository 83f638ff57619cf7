"""The versions of a model: numbers that may be published, and what selectors mean (R1, R12, G3)."""

from __future__ import annotations

import pytest

from tensorhub.errors import (
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.testing import StepwiseCluster
from tensorhub.types import HandleState
from tests.coordinator.test_fills import trainer_and_reader


def test_latest_waits_for_a_first_version() -> None:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    asked = reader.replicate("latest")
    cluster.run()
    assert not asked.done
    trainer.publish(7)
    cluster.run()
    assert asked.number == 7


def test_latest_1_is_the_one_before_and_does_not_fall_back() -> None:
    cluster, trainer, reader = trainer_and_reader()
    keeper = cluster.handle("keeper")
    cluster.run()
    asked = reader.replicate("latest-1", timeout_s=5)
    cluster.advance(6)
    with pytest.raises(VersionUnavailable, match="has one version only; there is no 'latest-1'"):
        _ = asked.number
    keeper.replicate("latest")
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    asked = reader.replicate("latest-1")
    cluster.run()
    assert asked.number == 1


def test_latest_1_waits_for_the_one_before_where_nobody_holds_that() -> None:
    """R12: it does not fall back to an older one that somebody holds."""
    cluster, trainer, keeper = trainer_and_reader()
    reader = cluster.handle("late")
    keeper.replicate()
    for number in (2, 3):
        cluster.run()
        trainer.unpublish()
        cluster.run()
        trainer.publish(number)
    cluster.run()
    asked = reader.replicate("latest-1", timeout_s=5)
    cluster.advance(6)
    with pytest.raises(VersionUnavailable, match="no live worker holds 'latest-1'"):
        _ = asked.number
    asked = reader.replicate("latest-1")
    cluster.run()
    assert not asked.has_ended()
    trainer.unpublish()
    cluster.run()
    trainer.publish(4)  # 3 is the one before now, and nobody holds that, either
    cluster.run()
    assert not asked.has_ended()
    other = cluster.handle("other")
    cluster.run()
    other.replicate("latest")
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(5)
    cluster.run()
    assert asked.number == 4


def test_a_newer_publication_replaces_an_unbound_target() -> None:
    """Version 1 is visible and held by nobody: nothing is bound, and 2 is what `latest` becomes."""
    cluster, trainer, reader = trainer_and_reader()
    trainer.unpublish()
    cluster.run()
    asked = reader.replicate("latest")
    cluster.run()
    assert not asked.done
    trainer.publish(2)
    cluster.run()
    assert asked.number == 2


def test_at_least_waits_for_that_number() -> None:
    cluster, trainer, reader = trainer_and_reader()
    asked = reader.update("latest", at_least=3)
    cluster.run()
    assert not asked.done
    trainer.unpublish()
    cluster.run()
    trainer.publish(3)
    cluster.run()
    assert asked.number == 3


@pytest.mark.parametrize("selector", ["latest-1", "available"])
def test_at_least_holds_for_every_selector(selector: str) -> None:
    cluster, trainer, reader = trainer_and_reader()
    keeper = cluster.handle("keeper")
    cluster.run()
    asked = reader.update(selector, at_least=3)
    for number in (2, 3, 4):
        cluster.run()
        assert not asked.has_ended()
        keeper.update("latest")
        cluster.run()
        trainer.unpublish()
        cluster.run()
        trainer.publish(number)
        if selector == "available" and number == 3:
            break
    cluster.run()
    assert asked.number == 3


def test_a_used_number_is_a_conflict_even_for_equal_bytes() -> None:
    cluster = StepwiseCluster()
    trainer, other = cluster.handle("trainer"), cluster.handle("other")
    cluster.run()
    trainer.publish(3)
    cluster.run()
    for number in (3, 2):
        asked = other.publish(number)
        cluster.run()
        with pytest.raises(
            VersionConflict, match="the newest number so far is 3; publish 4 or more"
        ) as refused:
            _ = asked.number
        assert f"hub.rollback('actor', to=N), N less than {number}" in str(refused.value)
        assert other.member.state is HandleState.EMPTY


def test_a_number_that_another_group_stages_is_a_conflict() -> None:
    cluster = StepwiseCluster()
    first, _ = cluster.group("trainer", 2)
    other = cluster.handle("other")
    cluster.run()
    first.publish(5)
    cluster.run()
    asked = other.publish(5)
    cluster.run()
    with pytest.raises(VersionConflict, match="is being published by group 'trainer'"):
        _ = asked.number


def test_a_staged_number_that_was_overtaken_is_not_published() -> None:
    """The mark never goes back, although 5 was free when its first rank called."""
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    other = cluster.handle("other")
    cluster.run()
    slow = first.publish(5)
    cluster.run()
    other.publish(7)
    cluster.run()
    second.publish(5)
    cluster.run()
    with pytest.raises(VersionConflict, match="the newest number so far is 7"):
        _ = slow.number
    assert cluster.coordinator.cluster.models["actor"].mark == 7


def test_what_is_no_selector_gets_no_version() -> None:
    """A worker's own check may be another version's: what it says must not be taken for a selector
    that there is.
    """
    cluster, trainer, reader = trainer_and_reader()
    cluster.handle("keeper").replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    asked = reader.replicate("oldest")
    cluster.run()
    with pytest.raises(
        VersionUnavailable, match="'oldest' is no selector that this coordinator knows"
    ) as caught:
        _ = asked.number
    assert not caught.value.retryable


def test_an_integer_that_is_not_visible_fails_at_once_and_says_what_to_do() -> None:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    nothing = reader.replicate(4)
    cluster.run()
    with pytest.raises(VersionUnavailable, match="nothing was published under that model yet"):
        _ = nothing.number
    trainer.publish(3)
    cluster.run()
    early = reader.replicate(4)
    cluster.run()
    with pytest.raises(
        VersionUnavailable, match=r"not published yet \(the newest is 3\); wait_for\(\)"
    ) as caught:
        _ = early.number
    assert caught.value.retryable
    never = reader.replicate(1)
    cluster.run()
    with pytest.raises(
        VersionUnavailable, match="no worker holds it any more; held now: version 3 by 1 replica"
    ) as caught:
        _ = never.number
    assert not caught.value.retryable
