"""A coordinator that comes back on what is durable (R2, R6, R11, G3).

A story of several modules: `core` (what the store gave back), `membership`, `decisions`, `versions`
and `withdrawals`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.errors import (
    CoordinatorUnavailable,
    GroupAborted,
    VersionConflict,
)
from tensorhub.messages import FORMER_KEYS_MAX
from tensorhub.testing import Choice, StepwiseCluster
from tensorhub.types import HandleState
from tensorhub.worker.registration_session import RegistrationSession


def reconnect(cluster: StepwiseCluster, *, but: str = "") -> None:
    for worker in cluster.workers.values():
        if worker.alive and worker.link is None and worker.name != but:
            worker.connect()


def until_it_is_being_stored(cluster: StepwiseCluster) -> None:
    while not cluster.unstored:
        cluster.do(next(choice for choice in cluster.choices() if choice.kind != "store"))


def test_everything_is_announced_again() -> None:
    cluster = StepwiseCluster()
    trainer, reader, late = (
        cluster.handle("trainer"),
        cluster.handle("reader"),
        cluster.handle("late"),
    )
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate()
    cluster.run()
    cluster.restart()
    reconnect(cluster)
    cluster.run()
    cluster.check_agreement()
    asked = late.replicate()
    cluster.run()
    assert asked.number == 1
    info = reader.member.content
    assert info is not None
    assert asked.version == info.version


def test_latest_is_what_is_durable_not_who_came_back_first() -> None:
    """G3: the holder of 1 is back, that of 2 is not yet: `latest` waits."""
    cluster = StepwiseCluster()
    trainer, keeper, reader = (
        cluster.handle("trainer"),
        cluster.handle("keeper"),
        cluster.handle("reader"),
    )
    cluster.run()
    trainer.publish(1)
    cluster.run()
    keeper.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    cluster.restart()
    reconnect(cluster, but="trainer")
    cluster.run()
    asked = reader.replicate("latest")
    cluster.run()
    assert not asked.has_ended()
    old = cluster.handle("other").replicate(1)
    cluster.run()
    assert old.number == 1
    trainer.worker.connect()
    cluster.run()
    assert asked.number == 2


def test_a_number_that_was_used_before_the_restart_stays_used() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.publish(3)
    cluster.run()
    trainer.worker.crash()
    cluster.restart()
    other = cluster.handle("other")
    cluster.run()
    asked = other.publish(3)
    cluster.run()
    with pytest.raises(VersionConflict, match="the newest number so far is 3"):
        _ = asked.number


def test_a_publish_that_became_durable_is_committed_although_its_coordinator_died() -> None:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    asked = trainer.publish(1)
    until_it_is_being_stored(cluster)
    cluster.restart(kept=True)
    reconnect(cluster)
    cluster.run()
    assert asked.number == 1
    cluster.check_agreement()
    got = reader.replicate()
    cluster.run()
    assert got.number == 1


def test_a_publish_that_did_not_is_repeated() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    asked = trainer.publish(1)
    until_it_is_being_stored(cluster)
    cluster.restart(kept=False)
    reconnect(cluster)
    cluster.run()
    assert asked.number == 1
    cluster.check_agreement()


@pytest.mark.parametrize(
    ("called", "times"), [(1, 1), (1, 3), (2, 1), (2, 3), (1, 2 * FORMER_KEYS_MAX + 1)]
)
def test_a_groups_publish_that_was_not_recorded_is_repeated(called: int, times: int) -> None:
    """Also where one rank has called its coordinator, and the other one calls the next one."""
    cluster = StepwiseCluster()
    trainers = cluster.group("trainer", 2)
    cluster.run()
    for version in (1, 2):
        calls = [handle.publish(version) for handle in trainers[:called]]
        for _ in range(times):
            if called == 2:
                until_it_is_being_stored(cluster)
            else:
                cluster.run()
            cluster.restart(kept=False)
            reconnect(cluster)
        cluster.run(until=lambda: len(cluster.coordinator.cluster.members) == 2)
        calls += [handle.publish(version) for handle in trainers[called:]]
        cluster.run()
        assert [call.number for call in calls] == [version] * 2
        cluster.check_agreement()
        for handle in trainers:
            handle.unpublish()
        cluster.run()


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_repeated_publish_is_not_joined_by_the_next_call_of_another_rank(restarts: int) -> None:
    """One rank has heard that the publish failed, and has written its memory since. That both were
    at a coordinator before the one that failed says nothing of these calls.
    """
    cluster = StepwiseCluster()
    trainers = first, second = cluster.group("trainer", 2)
    cluster.run()
    for _ in range(restarts):
        cluster.restart()
        reconnect(cluster)
        cluster.run()
    calls = [handle.publish(1) for handle in trainers]
    cluster.run("store")
    cluster.fail_store()
    cluster.run(Choice("down", "trainer0"))
    with pytest.raises(CoordinatorUnavailable, match="cannot make publish"):
        _ = calls[1].number
    assert not calls[0].done
    cluster.restart()
    again = second.publish(2)
    reconnect(cluster)
    cluster.run()
    for call in (calls[0], again):
        with pytest.raises(GroupAborted, match="another one of them has made a new call") as caught:
            _ = call.number
        assert (caught.value.retryable, caught.value.memory) == (True, "intact")
    assert first.member.state is HandleState.EMPTY
    calls = [handle.publish(2) for handle in trainers]
    cluster.run()
    assert [call.number for call in calls] == [2, 2]


def test_a_publish_is_repeated_in_the_lineage_that_its_rank_has_heard_of_last() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    other = cluster.handle("other")
    cluster.run()
    other.publish(1)
    cluster.run()
    other.worker.asks.rollback(1)
    cluster.run()
    for version in (2, 3):
        asked = trainer.publish(version)
        if version == 3:
            until_it_is_being_stored(cluster)
            cluster.restart(kept=False)
            reconnect(cluster)
        cluster.run()
        assert asked.number == version
        trainer.unpublish()
        cluster.run()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_publish_is_not_repeated_in_another_lineage(ranks: int) -> None:
    cluster = StepwiseCluster()
    other = cluster.handle("other")
    trainers = cluster.group("trainer", ranks)
    cluster.run()
    other.publish(1)
    cluster.run()
    calls = [handle.publish(2) for handle in trainers]
    until_it_is_being_stored(cluster)
    cluster.restart(kept=False)
    other.worker.connect()
    cluster.run()
    other.worker.asks.rollback(1)
    cluster.run()
    reconnect(cluster)
    cluster.run()
    for handle, call in zip(trainers, calls, strict=True):
        with pytest.raises(
            GroupAborted, match=r"rolled back since its coordinator restarted.* call again"
        ):
            _ = call.number
        assert handle.member.state is HandleState.EMPTY
    again = [handle.publish(2) for handle in trainers]
    cluster.run()
    assert [call.number for call in again] == [2] * ranks


@pytest.mark.parametrize("kept", [True, False])
def test_a_groups_fill_ends_the_same_on_all_ranks(kept: bool) -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.replicate() for handle in readers]
    until_it_is_being_stored(cluster)
    cluster.restart(kept=kept)
    reconnect(cluster)
    cluster.run()
    cluster.check_agreement()
    assert [call.number for call in calls] == [1, 1]  # without a record they vote again


@pytest.mark.parametrize("kept", [0, 1])
def test_a_barrier_ends_the_same_on_all_ranks(kept: int) -> None:
    """Nothing was read; yet who has heard that it was a barrier must not differ from who has
    not.
    """
    cluster = StepwiseCluster()
    trainers = cluster.group("trainer", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.update() for handle in trainers]
    deaf = Choice("down", f"trainer{kept}")
    cluster.run(deaf)
    cluster.restart()
    reconnect(cluster)
    cluster.run()
    assert [(call.number, call.changed) for call in calls] == [(1, False), (1, False)]


def test_a_decision_that_is_still_in_the_making_is_not_denied() -> None:
    cluster = StepwiseCluster()
    trainers = cluster.group("trainer", 2)
    cluster.run()
    calls = [handle.publish(1, timeout_s=100) for handle in trainers]
    until_it_is_being_stored(cluster)
    for handle in trainers:
        handle.worker.disconnect()
    record = dict(cluster.unstored)
    cluster.unstored.clear()  # the disk is slow
    cluster.advance(12)
    for _ in range(2):
        reconnect(cluster)
        cluster.run()
    assert [call.done for call in calls] == [False, False]
    cluster.unstored.update(record)
    cluster.run()
    assert [call.number for call in calls] == [1, 1]
    cluster.check_agreement()


def test_a_fence_begun_while_nobody_could_hear_it_is_not_announced_as_held() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    cluster.restart()
    reconnect(cluster)
    cluster.run(until=lambda: trainer.worker.link is not None and trainer.worker.link.welcomed)
    trainer.unpublish()  # between Register and its answer
    cluster.run()
    cluster.check_agreement()


def test_another_content_of_that_number_is_ordered_out() -> None:
    """R2: a rollback has given the number to another content since; a holder of the old content is
    emptied.
    """
    cluster = StepwiseCluster()
    trainer, keeper = cluster.handle("trainer"), cluster.handle("keeper")
    cluster.run()
    for version in (1, 2):
        trainer.publish(version)
        cluster.run()
        trainer.unpublish() if version == 1 else keeper.replicate()
        cluster.run()
    keeper.worker.disconnect()
    trainer.worker.asks.rollback(1)
    cluster.run()
    trainer.publish(2)
    cluster.run()
    keeper.worker.connect()
    cluster.run()
    assert (keeper.member.state, keeper.member.version) == (HandleState.EMPTY, None)


def test_a_call_without_a_coordinator_ends_and_says_so() -> None:
    cluster = StepwiseCluster()
    reader = cluster.handle("reader")
    cluster.run()
    reader.worker.disconnect()
    asked = reader.replicate(timeout_s=3)
    cluster.advance(6)
    with pytest.raises(
        CoordinatorUnavailable, match="the coordinator could not be reached within 3 s"
    ):
        _ = asked.number


def test_a_publisher_that_hears_nothing_is_in_doubt_and_resolves_it_first() -> None:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    asked = trainer.publish(1, timeout_s=3)
    until_it_is_being_stored(cluster)
    trainer.worker.disconnect()
    cluster.advance(9)
    assert isinstance(asked.error, CoordinatorUnavailable)
    assert asked.error.memory == "in_doubt"
    assert trainer.member.state is HandleState.IN_DOUBT
    trainer.worker.connect()
    cluster.run()
    assert (trainer.member.state, trainer.member.version) == (HandleState.READY, 1)
    cluster.check_agreement()
    got = reader.replicate()
    cluster.run()
    assert got.number == 1


@pytest.mark.parametrize("publishes", [False, True])
def test_whoever_comes_back_before_the_recovery_lease_is_over_keeps_what_it_holds(
    publishes: bool,
) -> None:
    """However old it is, and whoever came first: nobody can know yet that nobody holds it."""
    cluster = StepwiseCluster()
    trainer, keepers = (
        cluster.handle("trainer"),
        [cluster.handle(f"keeper{number}") for number in range(4)],
    )
    pair = cluster.group("pair", 2)
    cluster.run()
    for number, keeper in enumerate(keepers):
        if number:
            trainer.unpublish()
            cluster.run()
        trainer.publish(number)
        cluster.run()
        keeper.replicate()
        cluster.run()
    cluster.restart()
    for worker in [trainer.worker, *(handle.worker for handle in pair)]:
        worker.connect()
    cluster.run()
    if publishes:
        trainer.unpublish()
        cluster.run()
        trainer.publish(4)
        cluster.run()
    cluster.advance(cluster.options.lease_s * 0.95)
    for keeper in reversed(keepers):
        keeper.worker.connect()
        cluster.run()
    cluster.advance(cluster.options.lease_s)
    assert [keeper.member.version for keeper in keepers] == [0, 1, 2, 3]
    assert not any("Revoked" in line or "keep=False" in line for line in cluster.log)
    cluster.check_agreement()
    late = [cluster.handle(f"late{number}") for number in range(4)]
    cluster.run()
    calls = [handle.replicate(number) for number, handle in enumerate(late)]
    cluster.run()
    assert [call.number for call in calls] == [0, 1, 2, 3]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_publish_is_not_repeated_at_a_coordinator_that_tells_of_no_lineage(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the release before does not know with which calls the repeated one may count."""
    cluster = StepwiseCluster()
    trainers = cluster.group("trainer", ranks)
    cluster.run()
    calls = [handle.publish(1) for handle in trainers]
    until_it_is_being_stored(cluster)
    cluster.restart(kept=False)
    confirm = RegistrationSession.confirm
    monkeypatch.setattr(
        RegistrationSession,
        "confirm",
        lambda session, answer: confirm(session, replace(answer, in_lineage=None)),
    )
    reconnect(cluster)
    cluster.run()
    for handle, call in zip(trainers, calls, strict=True):
        with pytest.raises(GroupAborted, match="call again"):
            _ = call.number
        assert handle.member.state is HandleState.EMPTY


def test_a_publish_at_a_coordinator_that_tells_of_no_lineage_is_not_repeated() -> None:
    """One of the release before: the model may have been rolled back since."""
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.member._session.lineage = None
    asked = trainer.publish(1)
    until_it_is_being_stored(cluster)
    cluster.restart(kept=False)
    reconnect(cluster)
    cluster.run()
    with pytest.raises(GroupAborted, match="call again"):
        _ = asked.number
    assert trainer.member.state is HandleState.EMPTY
