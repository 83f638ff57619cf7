"""A coordinator that is behind with reading, or was stopped: nobody is lost for that, and nobody
counts for what is old.
"""

from __future__ import annotations

import pytest

from tensorhub.coordinator import DOOR, Disconnected, Silent, Tick
from tensorhub.coordinator.entities import Holding
from tensorhub.coordinator.states import WorkerState
from tensorhub.messages import Heartbeat, Unwatch
from tensorhub.testing import SimHandle, StepwiseCluster
from tensorhub.testing.drivers.stepwise import Choice


class Behind(StepwiseCluster):
    """Of each session something lies unread, or the answer that nothing does is given by the
    test.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def looked_for(self, session: int, term: object) -> None:
        self.asked.append(session)


def published() -> tuple[Behind, SimHandle, SimHandle]:
    cluster = Behind()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.worker.asks.retain(1)
    trainer.publish(1)
    reader.replicate()
    cluster.run()
    return cluster, trainer, reader


def states(cluster: StepwiseCluster) -> set[WorkerState]:
    return {worker.state for worker in cluster.coordinator.cluster.workers.values()}


def holding(cluster: StepwiseCluster, handle: SimHandle) -> Holding:
    found = cluster.coordinator.cluster.members[handle.id].holding
    assert found is not None
    return found


def read_backlog(cluster: StepwiseCluster, handle: SimHandle) -> None:
    """The coordinator reads what the worker had said; its answers are still on their way."""
    assert handle.worker.link is not None
    for _ in range(len(handle.worker.link.up)):
        cluster.do(Choice("up", handle.worker.name))


def test_whose_messages_lie_unread_is_suspected_and_not_lost() -> None:
    cluster, trainer, reader = published()
    cluster.advance(5 * cluster.options.lease_s, run=False)
    assert len(cluster.asked) > 10
    assert len(cluster.coordinator.cluster.workers) == 2
    assert states(cluster) == {WorkerState.SUSPECT}
    cluster.advance(cluster.options.lease_s)
    assert states(cluster) == {WorkerState.LIVE}
    assert (
        cluster.coordinator.cluster.members[trainer.id].worker.incarnation
        == trainer.worker.incarnation
    )
    assert reader.worker.dismissals == trainer.worker.dismissals == []


def test_who_is_silent_and_has_said_nothing_that_lies_unread_is_lost() -> None:
    cluster, trainer, reader = published()
    for handle in (trainer, reader):
        handle.worker.stopped_until = 1000.0
    cluster.advance(2 * cluster.options.lease_s, run=False)
    cluster.step(Silent(tuple(cluster.asked)))
    assert not cluster.coordinator.cluster.workers


def test_who_is_heard_after_it_was_asked_about_is_not_silent() -> None:
    cluster, trainer, _ = published()
    cluster.advance(2 * cluster.options.lease_s, run=False)
    read_backlog(cluster, trainer)
    cluster.step(Silent((*cluster.asked, 12345)))
    assert list(cluster.coordinator.cluster.workers) == [trainer.worker.incarnation]


def test_old_heartbeats_count_for_no_retention() -> None:
    """Their worker may have been cut off since, and have given up what it held (R4)."""
    cluster, trainer, reader = published()
    cluster.advance(2 * cluster.options.lease_s, run=False)
    for handle in (trainer, reader):
        read_backlog(cluster, handle)
    retentions = cluster.coordinator._retentions
    assert states(cluster) == {WorkerState.SUSPECT}
    assert not retentions.is_reliable(holding(cluster, reader))
    assert retentions.must_stay(holding(cluster, trainer))
    cluster.run()
    reader.worker.beat()  # it answers the newest that the coordinator has said
    cluster.run()
    assert retentions.is_reliable(holding(cluster, reader))
    assert not retentions.must_stay(holding(cluster, trainer))


def test_what_is_no_heartbeat_answers_the_welcome_and_nothing_newer() -> None:
    """It may have lain unread as long as a heartbeat may."""
    cluster, trainer, reader = published()
    cluster.advance(2 * cluster.options.lease_s, run=False)
    for handle in (trainer, reader):
        handle.worker.say(Unwatch("actor"))
        read_backlog(cluster, handle)
    assert states(cluster) == {WorkerState.SUSPECT}
    assert not cluster.coordinator._retentions.is_reliable(holding(cluster, reader))


def test_who_has_come_back_counts_once_it_answers() -> None:
    cluster, _, reader = published()
    retentions, lease_s = cluster.coordinator._retentions, cluster.options.lease_s
    cluster.advance(0.6 * lease_s, run=False)
    reader.worker.disconnect()
    cluster.run()
    cluster.advance(0.6 * lease_s)
    reader.worker.connect()
    cluster.run()
    assert retentions.is_reliable(holding(cluster, reader))


def test_who_is_cut_off_has_a_lease_from_when_the_end_is_read() -> None:
    cluster, trainer, _ = published()
    cluster.heartbeat_at = 1e9
    workers, worker = (
        cluster.coordinator.cluster.workers,
        cluster.coordinator.cluster.members[trainer.id].worker,
    )
    cluster.advance(0.9 * cluster.options.lease_s, run=False)
    assert worker.session is not None
    cluster.step(Disconnected(worker.session))
    for passed, is_there in ((0.9, True), (0.2, False)):
        cluster.advance(passed * cluster.options.lease_s, run=False)
        cluster.step(Silent((DOOR,)))
        assert (worker.incarnation in workers) is is_there


def test_who_counted_on_a_moment_ago_counts_no_more_even_if_its_timer_is_late() -> None:
    cluster, _, reader = published()
    retentions = cluster.coordinator._retentions
    assert retentions.is_reliable(holding(cluster, reader))
    cluster.coordinator.cluster.now += cluster.options.lease_s
    assert holding(cluster, reader).member.worker.state is WorkerState.LIVE
    assert not retentions.is_reliable(holding(cluster, reader))


def test_a_stopped_coordinator_loses_nobody_and_listens_for_a_lease_first() -> None:
    cluster, trainer, reader = published()
    reader.worker.disconnect()
    cluster.run()
    cluster.now += 10 * cluster.options.lease_s
    cluster.step(Tick())
    assert states(cluster) == {WorkerState.SUSPECT}
    cluster.advance(cluster.options.lease_s - 0.1)
    assert len(cluster.coordinator.cluster.workers) == 2
    cluster.advance(0.2)  # who has not come back is lost, if nobody is at the door
    assert len(cluster.coordinator.cluster.workers) == 2
    cluster.step(Silent((DOOR,)))
    assert list(cluster.coordinator.cluster.workers) == [trainer.worker.incarnation]
    assert states(cluster) == {WorkerState.LIVE}


@pytest.mark.parametrize("goes_again", [False, True])
def test_who_was_missed_and_is_back_before_the_door_is_known_to_be_empty_is_not_lost(
    goes_again: bool,
) -> None:
    cluster, trainer, _ = published()
    lease_s, missed = cluster.options.lease_s, cluster.coordinator._membership._missed
    trainer.worker.disconnect()
    cluster.run()
    cluster.advance(1.1 * lease_s, run=False)
    assert DOOR in cluster.asked
    assert list(missed) == [trainer.worker.incarnation]
    trainer.worker.connect()
    cluster.run()
    if goes_again:
        trainer.worker.disconnect()
        cluster.run()
    else:
        cluster.advance(1.1 * lease_s, run=False)  # what it says lies unread
    cluster.step(Silent((DOOR,)))
    assert trainer.worker.incarnation in cluster.coordinator.cluster.workers
    assert not missed


@pytest.mark.parametrize("answers", [1e9, -0.0])
def test_what_a_heartbeat_claims_to_answer_is_at_most_now(answers: float) -> None:
    cluster, trainer, _ = published()
    worker = cluster.coordinator.cluster.members[trainer.id].worker
    trainer.worker.say(Heartbeat(1, answers))
    cluster.run()
    assert worker.answers <= cluster.now
