"""Leaving: unpublish, close, grace, fences, and what becomes of the readers (R3, R5, R12, G2)."""

from __future__ import annotations

import pytest

from tensorhub.coordinator.entities import Withdrawal
from tensorhub.coordinator.holdings import Withdrawals
from tensorhub.coordinator.states import LeaseState
from tensorhub.errors import DrainTimeout, RetentionError, StateError, VersionUnavailable
from tensorhub.messages import LeaveGranted, LeaveRequest, Retain
from tensorhub.testing import SimHandle, StepwiseCluster
from tensorhub.types import HandleState, Options
from tests.coordinator.layout_world import World
from tests.coordinator.test_layouts_over_time import held_by


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
    trainer, other, reader = cluster.handle("trainer"), cluster.handle("other"), cluster.handle("reader")
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
    assert [g.source for g in reader.pull.grants.values()] == ["other" if source is trainer else "trainer"]
    cluster.run()
    assert reader.member.version == 1


def test_a_leave_that_waits_for_its_readers_is_looked_at_when_the_last_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Withdrawal] = []
    settle_one = Withdrawals._settle_one

    def counted(self: Withdrawals, withdrawal: Withdrawal) -> None:
        looked.append(withdrawal)
        settle_one(self, withdrawal)

    monkeypatch.setattr(Withdrawals, "_settle_one", counted)
    cluster, trainer, _ = reading()
    asked = trainer.unpublish()
    cluster.run("read")
    before = len(looked)
    assert before
    cluster.handle("another")
    cluster.run("read")  # something of the model has changed
    assert len(looked) == before
    cluster.run()
    assert asked.has_ended()
    assert len(looked) == before + 1


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
def test_readers_have_the_grace_but_no_more_than_half_of_the_owners_time(timeout_s: float, cut_after_s: float) -> None:
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
    """R3: a trainer never hangs on a dead coordinator; the fence is local, and reported when it is back."""
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


def test_a_fence_that_was_never_heard_of_is_restated() -> None:
    """Fenced is lost on the way: after the next Register nobody is sent to that memory."""
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    asked = trainer.unpublish()
    while not asked.done:
        cluster.do(next(c for c in cluster.choices() if c.kind != "up" or " Fenced" not in str(trainer.worker.link)))
    trainer.worker.disconnect()
    trainer.worker.connect()
    cluster.run()
    cluster.check_agreement()
    got = reader.replicate(timeout_s=3)
    cluster.advance(4)
    with pytest.raises(VersionUnavailable, match="no live worker holds 'latest' of 'actor'"):
        _ = got.number


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


def test_a_handle_that_was_closed_while_nobody_heard_it_is_forgotten() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    trainer.worker.disconnect()
    asked = trainer.close()
    cluster.run()
    assert asked.has_ended()
    trainer.worker.connect()
    cluster.advance(11)
    assert cluster.coordinator.cluster.members == {}
    again = cluster.handle("other", "trainer")
    cluster.run()
    assert again.registered


def test_an_abandoned_version_that_is_held_again_is_waited_for_like_any_other() -> None:
    """Once a new holder has come, losing that one by a crash is no leave on purpose."""
    cluster = StepwiseCluster()
    trainer, second, reader = cluster.handle("trainer"), cluster.handle("second"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    second.replicate()
    cluster.run()
    second.worker.disconnect()
    cluster.advance(11)  # lost
    trainer.unpublish()
    cluster.run()
    version = cluster.coordinator.cluster.models["actor"].versions[1]
    assert version.abandoned
    for _ in range(2):  # the first time it is dismissed
        second.worker.connect()
        cluster.run()
    assert version.has_live_source()
    asked = reader.replicate(timeout_s=20)
    cluster.run(until=lambda: reader.pull is not None)
    second.worker.crash()
    cluster.advance(15)
    assert not asked.has_ended()
    cluster.advance(10)
    assert isinstance(asked.error, VersionUnavailable)


def test_a_group_whose_rank_could_not_leave_serves_as_before() -> None:
    """One rank could not be fenced in time: it stays published under a new generation, and the version with it (R4)."""
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainers", 2), cluster.group("readers", 2)
    cluster.run()
    for trainer in trainers:
        trainer.publish(1)
    cluster.run()
    trainers[0].hold_access()
    asked = trainers[0].unpublish(2.0)
    cluster.advance(5.0)
    assert isinstance(asked.error, DrainTimeout)
    (replica,) = cluster.coordinator.cluster.models["actor"].groups["trainers"].replicas
    assert replica.state == "ready"
    calls = [reader.replicate() for reader in readers]
    cluster.run()
    assert [call.number for call in calls] == [1, 1]


def test_a_group_that_one_rank_leaves_serves_no_more_although_another_could_not() -> None:
    cluster = StepwiseCluster()
    trainers = cluster.group("trainers", 2)
    cluster.run()
    for trainer in trainers:
        trainer.publish(1)
    cluster.run()
    trainers[0].hold_access()
    calls = [trainer.unpublish(2.0) for trainer in trainers]
    cluster.advance(5.0)
    assert isinstance(calls[0].error, DrainTimeout)
    assert calls[1].error is None
    assert not cluster.coordinator.cluster.models["actor"].versions[1].has_live_source()


def test_a_source_that_is_lost_while_its_readers_have_their_grace_leaves_no_wish_behind() -> None:
    cluster = StepwiseCluster(Options(lease_s=2.0, drain_grace_s=60.0))
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    asked = reader.replicate(timeout_s=20)
    cluster.run(until=lambda: reader.pull is not None)
    trainer.unpublish()
    model = cluster.coordinator.cluster.models["actor"]
    for second in range(4):
        cluster.run("read")
        cluster.advance(1, run=False)
        if second == 0:
            assert model.withdrawals
            trainer.worker.crash()
    assert not model.withdrawals
    cluster.heal()
    assert asked.error is not None


def test_a_rank_that_gave_its_wish_to_leave_up_while_it_was_read_is_not_thought_to_leave() -> None:
    """Its fence was not over at the deadline: it is open under a new generation, and nothing is left of the old."""
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate(timeout_s=30)
    cluster.run(until=lambda: reader.pull is not None and any(lane.access for lane in reader.pull.lanes.values()))
    trainer.hold_access()
    asked = trainer.unpublish(0.05)
    for _ in range(3):
        while choices := [choice for choice in cluster.choices() if choice.kind == "do"]:
            cluster.do(choices[0])
        cluster.advance(0.05, run=False)
    assert isinstance(asked.error, DrainTimeout)
    cluster.heal()
    assert cluster.coordinator.cluster.members[trainer.id].leaving == []


def test_a_wish_that_its_owner_gave_up_while_it_was_away_is_not_granted_later() -> None:
    """It has come back within its lease, and is published as before: nobody may think that it leaves."""
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    trainer.worker.asks.retain(1)
    cluster.run()
    asked = trainer.unpublish()
    cluster.run()
    trainer.worker.disconnect()
    trainer.cancel()
    cluster.run()
    assert isinstance(asked.error, RetentionError)
    trainer.worker.connect()
    cluster.run()
    reader.replicate()
    cluster.run()  # from now on it might go
    assert reader.member.version == 1
    assert not cluster.coordinator.cluster.models["actor"].withdrawals
    assert holdings(cluster) == 2
    cluster.check_agreement()


def test_while_its_version_must_stay_its_readers_are_not_cut_if_they_are_away() -> None:
    cluster, trainer, reader = reading()
    trainer.worker.asks.retain(1)
    cluster.run("read")
    asked = trainer.unpublish()
    cluster.run("read")
    (lease,) = cluster.coordinator.cluster.leases.values()
    reader.worker.disconnect()
    cluster.run("read")
    assert not asked.has_ended()
    assert lease.state is LeaseState.ACTIVE


def test_an_owner_that_was_away_hears_again_whom_it_is_to_cut() -> None:
    cluster, trainer, reader = reading()
    (lease,) = cluster.coordinator.cluster.leases.values()
    for worker in (trainer.worker, reader.worker):
        worker.disconnect()
    cluster.run("read")
    cluster.handle("another", reader.shard.group)  # takes the reader's place
    cluster.run("read")
    assert lease.state is LeaseState.FENCING
    trainer.worker.connect()
    cluster.run("read")
    assert not cluster.coordinator.cluster.leases


def test_a_leave_that_is_over_leaves_no_deadline_behind() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    trainer.unpublish()
    cluster.run()
    assert ("withdrawal", trainer.id) not in cluster.coordinator.cluster.timers


def test_a_wish_to_leave_with_what_nobody_knows_of_is_granted_and_changes_nothing() -> None:
    """It is of a former generation, or of a registration that was replaced meanwhile."""
    world = World()
    (trainer,) = world.group("t", [("world/1", ())])
    world.publish([trainer], 1)
    world.say(trainer, Retain(1, "m", 1))
    for registration, generation in ((trainer.name, trainer.generation + 1), ("another", trainer.generation)):
        world.say(trainer, LeaveRequest(7, registration, generation, 1000.0, False, False))
        assert [granted.request for granted in trainer.take(LeaveGranted)] == [7]
        assert world.version.has_live_source()


def test_an_owner_that_holds_it_under_a_new_generation_has_given_its_wish_up() -> None:
    """Nobody had answered, its fence was not over in time, and it says so over the same connection."""
    world = World()
    (trainer,), (reader,) = (world.group(name, [("world/1", ())]) for name in ("t", "r"))
    world.publish([trainer], 1)
    world.fill([reader])
    world.leave(trainer)
    assert not trainer.take(LeaveGranted)  # it is read
    trainer.generation += 1
    world.register(trainer, held_by(trainer, world.version.info, is_publisher=True))
    assert not world.core.cluster.models["m"].withdrawals
    assert [holding.generation for holding in world.member(trainer).holdings] == [trainer.generation]
