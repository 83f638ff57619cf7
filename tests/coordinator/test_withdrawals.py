"""Leaving: unpublish, close, grace, fences, and what becomes of the readers (R3, R5, R12, G2)."""

from __future__ import annotations

import pytest

from tensorhub.coordinator.states import LeaseState
from tensorhub.errors import StateError, VersionUnavailable
from tensorhub.testing import SimHandle, StepwiseCluster
from tensorhub.types import HandleState


def reading(host_bytes: int = 0) -> tuple[StepwiseCluster, SimHandle, SimHandle]:
    """A trainer that is being read: no byte has arrived yet."""
    cluster = StepwiseCluster(host_bytes=host_bytes)
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate(1, timeout_s=30)
    cluster.run("read")
    return cluster, trainer, reader


def holdings(cluster: StepwiseCluster, number: int = 1) -> int:
    return len(cluster.coordinator.cluster.models["actor"].versions[number].holdings[0])


def test_unpublish_without_readers_returns_at_once() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    asked = trainer.unpublish()
    cluster.run()
    assert asked.has_ended()
    assert asked.error is None
    assert trainer.member.state is HandleState.EMPTY
    assert holdings(cluster) == 0


def test_unpublish_moves_its_readers_to_another_source() -> None:
    cluster = StepwiseCluster()
    trainer, other, reader = (
        cluster.handle("trainer"),
        cluster.handle("other"),
        cluster.handle("reader"),
    )
    cluster.run()
    trainer.publish(1)
    cluster.run()
    other.replicate()
    cluster.run()
    reader.replicate()
    cluster.run("read")
    assert reader.pull is not None
    (grant,) = reader.pull.grants.values()
    source = cluster.find(grant)
    assert source in (trainer, other)
    asked = source.unpublish()
    cluster.run("read")
    assert asked.has_ended()  # no byte was waited for
    assert [g.source for g in reader.pull.grants.values()] == [
        "other" if source is trainer else "trainer"
    ]
    cluster.run()
    assert reader.member.version == 1


@pytest.mark.parametrize("call", ["unpublish", "close"])
def test_a_leave_waits_for_a_reader_that_has_no_other_source_within_the_grace(call: str) -> None:
    cluster, trainer, reader = reading()
    asked = getattr(trainer, call)()
    cluster.run("read")
    assert not asked.has_ended()
    cluster.run()
    assert asked.has_ended()
    assert reader.member.version == 1


@pytest.mark.parametrize("is_first", [True, False], ids=["away-before", "away-meanwhile"])
def test_a_leave_does_not_wait_for_a_reader_that_is_away(is_first: bool) -> None:
    """Most often its process was killed: a trainer must not wait its whole grace for that."""
    cluster, trainer, reader = reading()
    if is_first:
        reader.worker.disconnect()
        cluster.run("read")
    asked, asked_at = trainer.unpublish(), cluster.now
    if not is_first:
        cluster.run("read")
        assert not asked.has_ended()
        reader.worker.disconnect()
    cluster.run("read")
    assert asked.has_ended()
    assert cluster.now == asked_at


def test_who_was_away_while_its_source_left_hears_what_became_of_it() -> None:
    cluster, trainer, reader = reading()
    asked = trainer.unpublish()
    reader.worker.disconnect()
    cluster.run("read")
    assert asked.has_ended()
    reader.worker.connect()
    cluster.run()
    assert reader.last_call is not None
    with pytest.raises(VersionUnavailable, match="its last holder has left on purpose"):
        _ = reader.last_call.number


def test_after_the_grace_the_reader_is_cut_and_told_that_the_version_is_gone() -> None:
    cluster, trainer, reader = reading()
    asked = trainer.unpublish()
    until = cluster.now + 5.5
    while cluster.now < until:
        cluster.run("read")
        cluster.advance(0.5, run=False)
    cluster.run("read")
    assert asked.has_ended()
    assert asked.error is None
    assert reader.last_call is not None
    with pytest.raises(VersionUnavailable, match="its last holder has left on purpose") as caught:
        _ = reader.last_call.number
    assert caught.value.memory == "torn"
    assert caught.value.retryable


@pytest.mark.parametrize(("timeout_s", "cut_after_s"), [(4.0, 2.0), (60.0, 5.0)])
def test_readers_have_the_grace_but_no_more_than_half_of_the_owners_time(
    timeout_s: float, cut_after_s: float
) -> None:
    """The other half is for the owner's fence."""
    cluster, trainer, _ = reading()
    begun = cluster.now
    trainer.unpublish(timeout_s=timeout_s)
    cluster.run("read")
    (lease,) = cluster.coordinator.cluster.leases.values()
    while cluster.now < begun + cut_after_s - 0.2:
        cluster.advance(0.1, run=False)
        cluster.run("read")
    assert lease.state is LeaseState.ACTIVE
    cluster.advance(0.3, run=False)
    assert lease.state is not LeaseState.ACTIVE


def test_nobody_new_is_sent_to_a_source_that_leaves() -> None:
    cluster, trainer, _ = reading()
    late = cluster.handle("late")
    cluster.run("read")
    trainer.unpublish()
    cluster.run("read")
    asked = late.replicate()
    cluster.run("read")
    assert not asked.has_ended()
    cluster.run()
    assert asked.number == 1  # from `reader`, once that one had it
    assert any("late <- Start" in line and ":reader(" in line for line in cluster.log)


def test_unpublish_needs_no_coordinator() -> None:
    """R3: a trainer never hangs on a dead coordinator; the fence is local, and reported when it is
    back.
    """
    cluster, trainer, reader = reading()
    trainer.worker.disconnect()
    asked = trainer.unpublish()
    cluster.run("read")
    assert asked.has_ended()
    assert asked.error is None
    assert holdings(cluster) == 2  # the coordinator does not know
    trainer.worker.connect()
    cluster.run("read")
    assert holdings(cluster) == 0
    assert reader.last_call is not None
    cluster.advance(1)
    assert isinstance(reader.last_call.error, VersionUnavailable)


def test_unpublish_whose_connection_breaks_fences_by_itself() -> None:
    cluster, trainer, _ = reading()
    asked = trainer.unpublish()
    cluster.run("read")
    assert not asked.has_ended()
    trainer.worker.disconnect()
    cluster.run("read")
    assert asked.has_ended()
    assert asked.error is None


def test_an_update_gives_running_readers_without_another_source_the_grace() -> None:
    cluster, trainer, reader = reading()
    second = cluster.handle("second")
    cluster.run("read")
    second.publish(2)
    cluster.run("read")
    asked = trainer.update("latest")
    cluster.run("read")
    assert trainer.pull is None
    cluster.run()
    assert reader.last_call is not None
    assert (reader.last_call.number, asked.number) == (1, 2)


@pytest.mark.parametrize(("timeout_s", "grace_s"), [(60.0, 5.0), (4.0, 2.0)])
def test_an_update_cuts_readers_at_the_end_of_the_grace(timeout_s: float, grace_s: float) -> None:
    cluster, trainer, reader = reading()
    second = cluster.handle("second")
    cluster.run("read")
    second.publish(2)
    cluster.run("read")
    asked = trainer.update("latest", timeout_s=timeout_s)
    cluster.run("read")
    begun = cluster.now
    while trainer.pull is None:
        assert cluster.now < begun + grace_s + 0.2
        cluster.advance(0.1, run=False)
        cluster.run("read")
    assert cluster.now > begun + grace_s - 0.2
    cluster.run()
    assert asked.number == 2
    assert reader.last_call is not None
    assert isinstance(reader.last_call.error, VersionUnavailable)


def test_a_staged_update_does_not_wait_for_readers_before_it_overwrites_what_they_read() -> None:
    cluster, trainer, _ = reading(host_bytes=2**30)
    second = cluster.handle("second")
    cluster.run("read")
    second.publish(2)
    cluster.run("read")
    trainer.stage("latest")
    cluster.run("read")
    assert trainer.pull is not None


def test_an_update_does_not_wait_for_readers_that_have_another_source() -> None:
    cluster = StepwiseCluster()
    trainer, reader, second, third = map(cluster.handle, ("trainer", "reader", "second", "third"))
    cluster.run()
    trainer.publish(1)
    cluster.run()
    third.replicate(1)
    cluster.run()
    reader.replicate(1)
    cluster.run("read")
    second.publish(2)
    cluster.run("read")
    for holder in (trainer, third):
        holder.update("latest")
        cluster.run("read")
    assert trainer.member.state is HandleState.FILLING
    assert third.member.state is HandleState.READY  # it is the last source now
    cluster.run()
    assert reader.last_call is not None
    assert reader.last_call.number == 1


def test_close_lets_go_of_everything() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    asked = trainer.close()
    cluster.run()
    assert asked.has_ended()
    assert asked.error is None
    assert trainer.member.state is HandleState.CLOSED
    assert cluster.coordinator.cluster.members == {}
    assert cluster.coordinator.cluster.models["actor"].groups == {}
    with pytest.raises(StateError, match="is closed; register again"):
        trainer.publish(2)
