"""A coordinator that comes back without its state is a new cluster, and every old handle says so
once (R2, G3).

A story of several modules: `membership`, `operations`, and `worker.member`, which tells its caller.
"""

from __future__ import annotations

import pytest

from tensorhub.errors import LeaseLost, StateError
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


@pytest.mark.parametrize(
    "phase", ["queued", "asked", "hook", "held", "fencing", "pulling", "voted"]
)
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


def test_a_fetch_that_runs_ends() -> None:
    cluster, _, _ = published()
    fetcher: SimHandle = cluster.fetcher("fetcher")
    cluster.run()
    asked = fetcher.fetch()
    while fetcher.pull is None:
        cluster.do(next(c for c in cluster.choices() if c != Choice("read", fetcher.name)))
    lose_state(cluster)
    assert isinstance(asked.error, LeaseLost)
