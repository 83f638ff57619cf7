"""A coordinator that comes back on what is durable (R2, R6, R11, G3).

A story of several modules: `core` (what the store gave back), `membership`, `decisions`, `versions` and `withdrawals`.
"""

from __future__ import annotations

import pytest

from tensorhub.errors import CoordinatorUnavailable, GroupAborted, VersionConflict, VersionUnavailable
from tensorhub.testing import CHUNK_BYTES, CHUNKS, Choice, StepwiseCluster
from tensorhub.types import HandleState


def reconnect(cluster: StepwiseCluster, *, but: str = "") -> None:
    for worker in cluster.workers.values():
        if worker.alive and worker.link is None and worker.name != but:
            worker.connect()


def until_it_is_being_stored(cluster: StepwiseCluster) -> None:
    while not cluster.unstored:
        cluster.do(next(choice for choice in cluster.choices() if choice.kind != "store"))


def test_everything_is_announced_again() -> None:
    cluster = StepwiseCluster()
    trainer, reader, late = cluster.handle("trainer"), cluster.handle("reader"), cluster.handle("late")
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
    trainer, keeper, reader = cluster.handle("trainer"), cluster.handle("keeper"), cluster.handle("reader")
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


def test_a_publish_that_did_not_is_aborted_and_its_number_free() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    asked = trainer.publish(1)
    until_it_is_being_stored(cluster)
    cluster.restart(kept=False)
    reconnect(cluster)
    cluster.run()
    with pytest.raises(GroupAborted, match="its coordinator restarted; call again"):
        _ = asked.number
    assert trainer.member.state is HandleState.EMPTY
    again = trainer.publish(1)
    cluster.run()
    assert again.number == 1


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


def test_a_group_of_which_one_rank_has_heard_the_outcome() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.replicate() for handle in readers]
    deaf = Choice("down", "reader1")
    until_it_is_being_stored(cluster)
    cluster.run(deaf)
    assert [call.done for call in calls] == [True, False]
    cluster.restart()
    reconnect(cluster)
    cluster.run()
    assert [call.number for call in calls] == [1, 1]
    cluster.check_agreement()


@pytest.mark.parametrize("kept", [0, 1])
def test_a_barrier_ends_the_same_on_all_ranks(kept: int) -> None:
    """Nothing was read; yet who has heard that it was a barrier must not differ from who has not."""
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


def test_both_ranks_lost_after_the_decision_still_hear_it() -> None:
    """The group was dissolved meanwhile: the record, not its memory, has the answer."""
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.replicate(timeout_s=100) for handle in readers]
    until_it_is_being_stored(cluster)
    for handle in readers:
        handle.worker.disconnect()
    cluster.advance(12)
    assert "reader" not in cluster.coordinator.cluster.models["actor"].groups
    for _ in range(2):
        reconnect(cluster)
        cluster.run()
    assert [call.number for call in calls] == [1, 1]
    cluster.check_agreement()


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
    """R2: the number was used by another content since; who still holds the old one is emptied."""
    cluster = StepwiseCluster()
    trainer, keeper = cluster.handle("trainer"), cluster.handle("keeper")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    keeper.replicate()
    cluster.run()
    keeper.worker.disconnect()
    trainer.worker.disconnect()
    cluster.guarantees.state_lost(cluster.store)
    cluster.store.clear()  # the state is lost: this is a new cluster
    cluster.restart()
    reconnect(cluster)
    cluster.run()
    assert (keeper.member.state, keeper.member.version) == (HandleState.EMPTY, None)
    asked = keeper.replicate(1)
    cluster.run()
    assert isinstance(asked.error, VersionUnavailable)


def test_a_call_without_a_coordinator_ends_and_says_so() -> None:
    cluster = StepwiseCluster()
    reader = cluster.handle("reader")
    cluster.run()
    reader.worker.disconnect()
    asked = reader.replicate(timeout_s=3)
    cluster.advance(6)
    with pytest.raises(CoordinatorUnavailable, match="the coordinator could not be reached within 3 s"):
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


def test_a_publisher_in_doubt_whose_publication_failed_is_empty() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.publish(1, timeout_s=3)
    until_it_is_being_stored(cluster)
    trainer.worker.disconnect()
    cluster.fail_store()
    cluster.advance(9)
    assert "in_doubt" in repr(trainer.member)
    asked = trainer.unpublish()
    cluster.run()
    assert not asked.has_ended()
    trainer.worker.connect()
    cluster.run()
    assert asked.has_ended()
    assert asked.error is None
    assert trainer.member.state is HandleState.EMPTY


@pytest.mark.parametrize("publishes", [False, True])
def test_whoever_comes_back_before_the_recovery_lease_is_over_keeps_what_it_holds(publishes: bool) -> None:
    """However old it is, and whoever came first: nobody can know yet that nobody holds it."""
    cluster = StepwiseCluster()
    trainer, keepers = cluster.handle("trainer"), [cluster.handle(f"keeper{number}") for number in range(4)]
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


def test_a_rank_that_comes_back_late_is_kept_with_its_group() -> None:
    """One rank is back at once, the other one at the end of the recovery lease: neither is ordered out meanwhile."""
    cluster = StepwiseCluster()
    trainers, keepers = cluster.group("trainer", 2), cluster.group("keeper", 2)
    cluster.run()
    for number in range(4):
        for handle in trainers:
            if number:
                handle.unpublish()
        cluster.run()
        for handle in trainers:
            handle.publish(number)
        cluster.run()
        if number == 0:
            for handle in keepers:
                handle.replicate()
            cluster.run()
    cluster.restart()
    reconnect(cluster, but=keepers[1].worker.name)
    cluster.advance(cluster.options.lease_s * 0.95)
    assert keepers[0].member.version == 0
    reconnect(cluster)
    cluster.run()
    cluster.advance(cluster.options.lease_s)
    assert [handle.member.version for handle in keepers] == [0, 0]
    cluster.check_agreement()


def test_a_call_after_a_doubt_that_ended_badly_waits_for_the_fence() -> None:
    """A new coordinator counts on what was voted for; it must hear that it is gone before it hears the next call."""
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate(timeout_s=3)
    cluster.run(until=lambda: reader.pull is not None)
    reader.worker.disconnect()
    cluster.run()
    cluster.advance(9)
    assert "in_doubt" in repr(reader.member)
    cluster.restart()
    reconnect(cluster, but="reader")
    cluster.run()
    asked = reader.update()
    reader.worker.connect()
    cluster.run()
    assert (asked.number, asked.changed) == (1, True)
    cluster.check_agreement()


def test_a_rank_that_announces_what_is_still_being_decided_makes_no_whole_replica() -> None:
    """G4: it has voted, was taken for dead and comes back; its group's decision is on its way to the store."""
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for rank in trainers:
        rank.publish(1)
    cluster.run()
    asked = [rank.replicate(timeout_s=60) for rank in readers]
    until_it_is_being_stored(cluster)
    readers[1].worker.disconnect()
    for _ in range(12):
        cluster.advance(1, run=False)
        cluster.run("store")
    readers[1].cancel()
    for _ in range(2):  # the first time it is dismissed
        if readers[1].worker.link is None:
            readers[1].worker.connect()
        cluster.run("store")
    assert readers[1].worker.lives == 2
    reconnect(cluster)
    cluster.run()
    cluster.advance(3)
    assert [each.number for each in asked if each.error is None] != []
    assert {rank.member.version for rank in readers} == {1}


def test_a_publish_is_not_denied_to_the_rank_that_comes_when_its_version_is_forgotten() -> None:
    """One rank has heard of the commit, the other has not; the coordinator restarts, and newer ones overtake it (G4)."""
    cluster = StepwiseCluster()
    trainers, others = cluster.group("trainer", 2), cluster.group("other", 2)
    cluster.run()
    calls = [handle.publish(1, timeout_s=100) for handle in trainers]
    until_it_is_being_stored(cluster)
    deaf = Choice("down", trainers[1].worker.name)
    cluster.run(deaf)
    cluster.restart()
    for handle in others:
        handle.worker.connect()
    cluster.run()
    cluster.advance(12)
    for number in (2, 3):
        for handle in others:
            handle.publish(number)
        cluster.run()
        for handle in others:
            handle.unpublish()
        cluster.run()
    assert [call.done for call in calls] == [True, False]
    assert 1 not in cluster.coordinator.cluster.models["actor"].versions
    reconnect(cluster)
    cluster.run()
    assert [call.number for call in calls] == [1, 1]


def test_a_version_that_a_dissolved_group_is_about_to_commit_is_not_forgotten() -> None:
    """Its record is on its way to the store: what it says has to be true when it is there (R2)."""
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    for handle in readers:
        handle.replicate()
    until_it_is_being_stored(cluster)
    record = dict(cluster.unstored)
    cluster.unstored.clear()  # the disk is slow
    for handle in readers:
        handle.worker.crash()
    for number in (2, 3):
        for handle in trainers:
            handle.unpublish()
        cluster.run()
        for handle in trainers:
            handle.publish(number)
        cluster.run()
    cluster.advance(12)
    assert "reader" not in cluster.coordinator.cluster.models["actor"].groups
    cluster.coordinator.check_invariants()
    cluster.unstored.update(record)
    cluster.run()
    assert cluster.coordinator.cluster.records == {}
    assert 1 not in cluster.coordinator.cluster.models["actor"].versions


def test_what_a_rank_is_about_to_lose_by_a_commit_that_it_has_not_heard_of_is_not_counted_on() -> None:
    """G5: who else holds it may not go on the word of a rank that is staged, in doubt, and behind."""
    cluster = StepwiseCluster(host_bytes=CHUNKS * CHUNK_BYTES)
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    for handle in readers:
        handle.replicate()
    cluster.run()
    for handle in trainers:
        handle.unpublish()
    cluster.run()
    for handle in trainers:
        handle.publish(2)
    cluster.run()
    calls = [handle.stage(timeout_s=100) for handle in readers]
    until_it_is_being_stored(cluster)
    deaf = Choice("down", readers[1].worker.name)
    cluster.run(deaf)
    cluster.restart()
    behind = readers[1]
    behind.worker.connect()
    while behind.id not in cluster.coordinator.cluster.members:
        cluster.do(next(choice for choice in cluster.choices() if choice.kind != "store"))
    assert cluster.coordinator.cluster.members[behind.id].holding is None
    assert not any(cluster.coordinator.cluster.models["actor"].versions[1].holdings.values())
    reconnect(cluster)
    cluster.run()
    assert [call.number for call in calls] == [2, 2]
    cluster.check_agreement()


def test_a_copy_that_a_prefetch_of_what_is_held_already_has_left_as_it_was_is_counted_on() -> None:
    """That prefetch commits its group to a content, and fills nothing."""
    cluster, worlds = StepwiseCluster(host_bytes=CHUNKS * CHUNK_BYTES), 2
    trainers, others = cluster.group("trainer", worlds), cluster.group("other", worlds)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    for handle in others:
        handle.prefetch()
    cluster.run()
    for handle in others:
        handle.publish(2)
    cluster.run()
    calls = [handle.prefetch() for handle in others]
    cluster.run()
    assert [(call.number, call.changed) for call in calls] == [(2, False)] * worlds
    cluster.restart()
    reconnect(cluster)
    cluster.run()
    held = cluster.coordinator.cluster.models["actor"].versions[1].holdings
    assert [{holding.member.group.name for holding in held[shard]} for shard in held] == [{"trainer", "other/host"}] * worlds
    cluster.check_agreement()
