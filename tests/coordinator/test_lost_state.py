"""A coordinator that comes back without its state is a new cluster, and every old handle says so once (R2, G3).

A story of several modules: `membership`, `operations`, and `worker.member`, which tells its caller.
"""

from __future__ import annotations

import pytest

from tensorhub.errors import GroupAborted, LeaseLost, StateError
from tensorhub.testing import CallRecord, Choice, SimHandle, StepwiseCluster
from tensorhub.types import HandleState
from tests.worker.test_member import published


def lose_state(cluster: StepwiseCluster) -> None:
    cluster.restart(lost=True)
    for worker in cluster.workers.values():
        worker.connect()
    cluster.run()


def says_so(asked: CallRecord, memory: str = "intact") -> None:
    assert isinstance(asked.error, LeaseLost), asked.error
    assert "has come back without its state, as a new cluster" in str(asked.error)
    assert (asked.error.retryable, asked.error.memory) == (True, memory)


def state_of(handle: SimHandle) -> HandleState:
    return handle.member.state


def run(cluster: StepwiseCluster, asked: CallRecord) -> CallRecord:
    cluster.run()
    assert asked.done
    return asked


@pytest.mark.parametrize("first", ["publish", "update", "unpublish"])
def test_a_trainer_goes_on_after_one_loud_error(first: str) -> None:
    cluster, trainer, _ = published()
    lose_state(cluster)
    assert (trainer.member.state, trainer.member.version) == (HandleState.EMPTY, None)
    if first == "publish":
        says_so(run(cluster, trainer.publish(2)))
    elif first == "update":
        says_so(run(cluster, trainer.update()))
    else:
        assert isinstance(run(cluster, trainer.unpublish()).error, LeaseLost)
        with pytest.raises(StateError, match="there is nothing to unpublish"):
            trainer.unpublish()
    assert run(cluster, trainer.publish(1)).number == 1  # the mark is that of the new cluster
    cluster.check_agreement()


def test_readers_that_held_it_or_nothing_are_told_before_they_get_another_one() -> None:
    """Without that, `latest` would silently go back from 1 to 0."""
    cluster, trainer, (holder, empty) = published("holder", "empty")
    holder.replicate()
    cluster.run()
    lose_state(cluster)
    says_so(run(cluster, trainer.publish(0)))
    assert run(cluster, trainer.publish(0)).number == 0
    for reader in (holder, empty):
        says_so(run(cluster, reader.update()))
        assert run(cluster, reader.update()).number == 0
    cluster.check_agreement()


def test_a_handle_that_is_registered_afterwards_has_nothing_to_tell() -> None:
    cluster, trainer, _ = published()
    lose_state(cluster)
    fresh = cluster.handle("fresh")
    cluster.run()
    assert run(cluster, fresh.publish(5)).number == 5
    says_so(run(cluster, trainer.replicate()))
    assert run(cluster, trainer.replicate()).number == 5


def test_one_that_was_not_confirmed_before_has_nothing_to_tell() -> None:
    cluster, trainer, _ = published()
    trainer.worker.disconnect()
    late = cluster.handle("trainer", "late")
    lose_state(cluster)
    assert run(cluster, late.publish(1)).number == 1


@pytest.mark.parametrize("phase", ["queued", "asked", "hook", "held", "fencing", "pulling", "voted"])
def test_a_fill_that_runs_ends_and_the_handle_goes_on(phase: str) -> None:
    cluster, trainer, (reader,) = published("reader")
    reader.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    if phase == "queued":
        reader.worker.disconnect()
    if phase == "fencing":
        reader.hold_access()
    asked = reader.update(hold=phase in ("hook", "held"))
    cluster.run(until=lambda: reader.member.running is None or reader.member.running.phase == phase)
    lose_state(cluster)
    reader.end_access()
    cluster.run()
    torn = phase in ("pulling", "voted")
    says_so(asked, "torn" if torn else "intact")
    assert state_of(reader) is (HandleState.TORN if torn else HandleState.EMPTY)
    says_so(run(cluster, trainer.publish(1)))
    run(cluster, trainer.publish(1))
    assert run(cluster, reader.update()).number == 1  # it was told already
    cluster.check_agreement()


def test_a_publish_that_runs_ends_and_can_be_made_again() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    asked = trainer.publish(1)
    cluster.run(until=lambda: cluster.unstored)
    lose_state(cluster)
    says_so(asked)
    assert state_of(trainer) is HandleState.EMPTY
    assert run(cluster, trainer.publish(1)).number == 1


@pytest.mark.parametrize("what", ["publish", "fill"])
def test_a_doubt_that_nobody_can_resolve_any_more(what: str) -> None:
    cluster, trainer, (reader,) = published("reader")
    handle = reader
    asked = reader.replicate(timeout_s=3) if what == "fill" else reader.publish(2, timeout_s=3)
    if what == "fill":
        cluster.run(until=lambda: reader.pull is not None and reader.pull.ended)
    cluster.run(until=lambda: state_of(handle) is not HandleState.EMPTY or cluster.unstored)
    handle.worker.disconnect()
    cluster.advance(9)
    assert getattr(asked.error, "memory", "") == "in_doubt"
    assert state_of(handle) is HandleState.IN_DOUBT
    lose_state(cluster)
    assert state_of(handle) is (HandleState.TORN if what == "fill" else HandleState.EMPTY)
    says_so(run(cluster, handle.update()))
    says_so(run(cluster, trainer.publish(1)))


def test_a_leave_that_runs_ends_well() -> None:
    """The owner needs nobody for that, and nobody to tell."""
    cluster, trainer, (reader,) = published("reader")
    trainer.worker.asks.retain(1)
    cluster.run()
    reader.replicate()
    cluster.run("read")
    asked = trainer.unpublish()
    cluster.run("read")
    assert not asked.has_ended()
    lose_state(cluster)
    assert asked.has_ended()
    says_so(run(cluster, trainer.publish(1)))


def test_a_fence_is_over_before_its_owner_is_told() -> None:
    """Who is told that nobody reads the memory may write it (G2)."""
    cluster, trainer, _ = published()
    trainer.hold_access()
    lose_state(cluster)
    assert trainer.member.has_pending_work
    asked = trainer.update()
    cluster.run()
    assert not asked.has_ended()
    trainer.end_access()
    says_so(run(cluster, asked))


def test_every_rank_of_a_group_is_told_and_they_stay_in_step() -> None:
    cluster = StepwiseCluster()
    ranks = cluster.group("trainer", 3)
    cluster.run()
    for handle in ranks:
        handle.publish(7)
    cluster.run()
    early = ranks[0].update(at_least=8)  # one has called already
    cluster.run()
    lose_state(cluster)
    says_so(early)
    for handle in ranks[1:]:
        says_so(run(cluster, handle.publish(8)))
    calls = [handle.publish(8) for handle in ranks]
    cluster.run()
    assert [call.number for call in calls] == [8, 8, 8]
    cluster.check_agreement()


def test_a_coordinator_with_its_state_makes_no_such_noise() -> None:
    cluster, trainer, (reader,) = published("reader")
    cluster.restart()
    for worker in cluster.workers.values():
        worker.connect()
    cluster.run()
    assert run(cluster, reader.replicate()).number == 1
    trainer.unpublish()
    cluster.run()
    assert run(cluster, trainer.publish(2)).number == 2


def test_two_losses_are_told_of_once_by_who_called_in_between_twice() -> None:
    cluster, trainer, (reader,) = published("reader")
    lose_state(cluster)
    says_so(run(cluster, trainer.publish(1)))
    run(cluster, trainer.publish(1))
    lose_state(cluster)
    for handle in (trainer, reader):
        says_so(run(cluster, handle.update(timeout_s=1)))
    again = reader.update(timeout_s=1)
    cluster.advance(2)
    assert again.done
    assert not isinstance(again.error, LeaseLost | GroupAborted)


def test_a_fetch_that_runs_ends() -> None:
    cluster, _, _ = published()
    fetcher: SimHandle = cluster.fetcher("fetcher")
    cluster.run()
    asked = fetcher.fetch()
    while fetcher.pull is None:
        cluster.do(next(c for c in cluster.choices() if c != Choice("read", fetcher.name)))
    lose_state(cluster)
    assert isinstance(asked.error, LeaseLost)
