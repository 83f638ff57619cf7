"""The step itself: timers, what may be said by whom and when, and what a restart takes from the
store.
"""

from __future__ import annotations

from itertools import pairwise

from tensorhub.coordinator import Connected, Disconnected
from tensorhub.machine import SWEPT_AT_ONCE, Timers
from tensorhub.messages import Heartbeat, Join, Prepared, Publish, Welcome
from tensorhub.testing import StepwiseCluster
from tensorhub.types import Location, release
from tests.coordinator.test_membership import answers
from tests.coordinator.test_publishes import states
from tests.coordinator.test_recovery import reconnect


def test_deadlines_that_rounding_puts_in_the_past_end() -> None:
    """8.01 + 10 - 8.01 < 10: a timer that is due, and a lease that is a hair short of over."""
    cluster = StepwiseCluster()
    cluster.heartbeat_at = 1e9
    cluster.now = 8.01
    cluster.handle("trainer")
    cluster.run()
    cluster.advance(20, run=False)
    assert cluster.coordinator.cluster.workers == {}


def test_speaking_before_join_costs_the_connection() -> None:
    cluster = StepwiseCluster()
    cluster.coordinator.step(Connected(77, "x.1", "worker"), 0.0)
    assert answers(cluster, 77, Heartbeat(1)) == ["Heartbeat before Join"]
    assert answers(cluster, 99, Heartbeat(1)) == []  # a session that nobody knows


def test_only_workers_join_and_only_once() -> None:
    cluster = StepwiseCluster()
    join = Join("x", Location(), (), 1, 0)
    cluster.coordinator.step(Connected(77, "x.1", "observer"), 0.0)
    assert answers(cluster, 77, join) == ["only a worker joins, and only once"]
    cluster.coordinator.step(Connected(78, "x.2", "worker"), 0.0)
    assert answers(cluster, 78, join, join) == [
        Welcome("c", 1, 10.0, False, release=release(), term="term1"),
        "only a worker joins, and only once",
    ]
    cluster.coordinator.step(Disconnected(78), 0.0)
    cluster.coordinator.step(Disconnected(78), 0.0)


def test_messages_of_an_old_session_or_of_unknown_sessions_change_nothing() -> None:
    """G9: a key of another epoch is answered, and opens nothing."""
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    published = trainer.publish(1)
    cluster.run()
    key = published.key
    assert key is not None
    old = type(key)(key.model, key.group, key.epoch - 1, 0)
    trainer.worker.say(Publish(old, 0, trainer.id, 9, 999, 60.0))
    trainer.worker.say(Prepared(old, 0))
    trainer.worker.say(Prepared(key, 0))
    cluster.run()
    assert states(cluster) == {1: "available"}
    assert cluster.coordinator.cluster.models["actor"].groups["trainer"].operation is None


def test_timers_that_are_set_again_and_again_are_swept() -> None:
    timers = Timers()
    for number in range(10_000):
        timers.set("operation", "k", 1e6 + number)
        timers.set("other", str(number), 1e6)
        timers.cancel("other", str(number))
    assert len(timers) == 1
    assert len(timers._heap) < 200
    assert timers.next() == 1e6 + 9_999
    assert timers.pop_due(2e6) == ("operation", "k")
    assert timers.next() is None


def test_a_sweep_looks_at_a_few_deadlines_in_each_call_and_loses_none() -> None:
    timers = Timers()
    for number in range(1000):
        timers.set("few" if number % 10 == 0 else "most", str(number), float(number))
    for number in range(1000):
        timers.cancel("most", str(number))
    timers.set("last", "k", 1e6)
    left = [len(timers._swept)]
    assert left[0] > 900
    while left[-1]:
        timers.set("last", "k", 1e6 + len(left))
        left.append(len(timers._swept))
    assert max(before - after for before, after in pairwise(left)) <= SWEPT_AT_ONCE
    due = [timers.pop_due(1e9) for _ in range(len(timers))]
    assert due == [*(("few", str(number)) for number in range(0, 1000, 10)), ("last", "k")]


def test_a_deadline_that_is_hastened_is_never_put_off() -> None:
    timers = Timers()
    for when in (5.0, 3.0, 4.0):
        timers.hasten("retry", "k", when)
    assert timers.next() == 3.0
    assert timers.pop_due(9.0) == ("retry", "k")
    timers.hasten("retry", "k", 4.0)
    assert timers.next() == 4.0


def test_only_the_newest_versions_are_recovered() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    for number in range(80):
        if number:
            trainer.unpublish()
            cluster.run()
        trainer.publish(number)
        cluster.run()
    cluster.restart()
    model = cluster.coordinator.cluster.models["actor"]
    assert (len(model.versions), model.mark) == (64, 79)
    reconnect(cluster)
    cluster.advance(15)
    # what nobody holds is forgotten once everybody had time to come back
    assert sorted(model.versions) == [78, 79]
