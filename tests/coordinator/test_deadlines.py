"""When ranks give up, and what the error says of what they have waited for (G7, R6)."""

from __future__ import annotations

import pytest

from tensorhub.errors import (
    GroupAborted,
    IntegrityError,
    OperationTimeout,
    VersionUnavailable,
)
from tensorhub.testing import Choice, StepwiseCluster
from tensorhub.types import HandleState
from tests.coordinator.test_availability import error_of, newest_left
from tests.coordinator.test_fills import let_fail, trainer_and_reader


def test_a_wait_for_a_version_that_never_comes_names_the_model() -> None:
    cluster = StepwiseCluster()
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate("latest", timeout_s=5)
    cluster.advance(6)
    with pytest.raises(
        VersionUnavailable,
        match=r"nothing was published under the model 'actor' \(is the name right\?\)",
    ):
        _ = asked.number


def test_at_least_that_never_comes_says_so() -> None:
    cluster, _, reader = trainer_and_reader()
    asked = reader.update("latest", at_least=3, timeout_s=2)
    cluster.advance(3)
    with pytest.raises(
        VersionUnavailable, match="version 3 of 'actor' was not published; the newest is 1"
    ):
        _ = asked.number


def test_a_lost_last_source_is_waited_for_until_the_deadline() -> None:
    cluster, trainer, reader = trainer_and_reader()
    asked = reader.replicate(timeout_s=30)
    cluster.run(until=lambda: reader.pull is not None)
    trainer.worker.crash()
    cluster.advance(29)
    assert not asked.done
    cluster.advance(3)
    with pytest.raises(
        VersionUnavailable, match=r"lost its last source.*none came back in time"
    ) as caught:
        _ = asked.number
    assert caught.value.memory == "torn"


def test_a_lost_shard_is_named_with_the_ranks_that_read_it() -> None:
    """Not the ranks of those who read it, which are others across layouts."""
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 3), cluster.group("reader", 3)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.replicate(timeout_s=30) for handle in readers]
    while readers[1].pull is None:
        cluster.do(next(choice for choice in cluster.choices() if choice.kind != "read"))
    trainers[1].worker.crash()
    cluster.advance(40)
    with pytest.raises(
        VersionUnavailable,
        match=r"has lost its last source of shard 1, which rank\(s\) \[1\] read, none came",
    ):
        _ = calls[1].number


def test_a_fill_that_takes_too_long_names_the_slow_ranks() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.replicate(timeout_s=5) for handle in readers]
    slow = Choice("read", readers[1].name)
    cluster.run(slow)
    cluster.advance(2, run=False)
    while cluster.now < 6:
        cluster.advance(0.5, run=False)
        cluster.run(slow)
    for call in calls:
        with pytest.raises(
            OperationTimeout, match=r"version 1 was not complete after 5 s on rank\(s\) \[1\]"
        ) as caught:
            _ = call.number
        assert caught.value.memory == "torn"


def test_a_before_write_that_takes_too_long_is_named_with_its_rank() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    calls = [handle.replicate(timeout_s=5, hold=True) for handle in readers]
    slow = Choice("hook", readers[1].name)
    cluster.run(slow)
    while cluster.now < 6:
        cluster.advance(0.5, run=False)
        cluster.run(slow)
    for call in calls:
        with pytest.raises(
            OperationTimeout,
            match=r"version 1: before_write did not return after 5 s on rank\(s\) \[1\]$",
        ) as caught:
            _ = call.number
        assert caught.value.memory == "intact"


def test_a_late_attempt_names_its_source_and_how_the_attempt_before_ended() -> None:
    """And not the whole timeout as its time: the attempt before has used most of it."""
    cluster, trainer, reader = trainer_and_reader()
    asked = reader.update("latest", timeout_s=30)
    slow = Choice("read", reader.name)
    cluster.run(slow, until=lambda: reader.pull is not None)
    trainer.unpublish()
    while cluster.now < 20:
        cluster.advance(0.5, run=False)
        cluster.run(slow)
    trainer.publish(2)
    while cluster.now < 32:
        cluster.advance(0.5, run=False)
        cluster.run(slow)
    with pytest.raises(
        OperationTimeout,
        match=r"version 2 was not complete in the [\d.]+ s that the attempt before left it on "
        r"rank\(s\) \[0\]; it was reading from 'trainer' in site 'default'; the attempt before "
        r"ended: version 1 of 'actor'",
    ):
        _ = asked.number


@pytest.mark.parametrize("last", ["corrupt", "stalled"])
def test_bad_digests_from_every_source_are_an_integrity_error(last: str) -> None:
    cluster, _, reader = trainer_and_reader()
    other = cluster.handle("other")
    cluster.run()
    other.replicate()
    cluster.run()
    asked = reader.replicate(timeout_s=5)
    let_fail(cluster, asked, {"trainer": "corrupt", "other": last})
    assert isinstance(
        asked.error, IntegrityError if last == "corrupt" else VersionUnavailable | OperationTimeout
    )
    assert (asked.error.retryable, asked.error.memory) == (True, "torn")
    for says in (
        "version 1",
        "reads that failed",
        "worker 'trainer': corrupt",
        f"worker 'other': {last}",
    ):
        assert says in str(asked.error)


def test_a_rank_without_a_sound_source_is_its_groups_cause() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    sound, bad = [handle.replicate(timeout_s=5) for handle in readers]
    let_fail(cluster, bad, {"trainer1": "corrupt"})
    cluster.run()
    assert isinstance(bad.error, IntegrityError)
    assert isinstance(sound.error, GroupAborted)
    assert sound.error.causes == {1: str(bad.error)}
    assert (sound.error.retryable, sound.error.memory) == (True, "torn")


def test_a_missing_rank_is_named_at_the_deadline_and_may_come_late() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    cluster.run()
    asked = first.publish(1, timeout_s=3)
    cluster.advance(4)
    with pytest.raises(
        OperationTimeout, match="waited 3 s for group 'trainer'; these ranks did not call: 1"
    ):
        _ = asked.number
    assert first.member.state is HandleState.EMPTY
    late, again = second.publish(1), first.publish(1)
    cluster.run()
    assert late.number == again.number == 1


def test_a_rank_that_was_not_registered_is_named() -> None:
    cluster = StepwiseCluster()
    first = cluster.handle("t0", "trainer", 0, 2)
    cluster.run()
    asked = first.publish(1, timeout_s=3)
    cluster.advance(4)
    with pytest.raises(OperationTimeout, match=r"did not call: 1 \(not registered\)"):
        _ = asked.number


def test_late_ranks_stay_in_step_however_often_one_times_out() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    cluster.run()
    for _ in range(5):
        first.publish(1, timeout_s=1)
        cluster.advance(2)
    calls = [second.publish(1), first.publish(1)]
    cluster.run()
    assert [call.number for call in calls] == [1, 1]


def test_what_was_left_of_a_calls_time_is_said_rounded() -> None:
    cluster, _, _, reader = newest_left()
    for timeout_s, told in ((59.99871, "60 s"), (2.99376, "3 s"), (0.9987, "0.999 s")):
        asked = reader.replicate("latest", timeout_s=timeout_s)
        cluster.advance(timeout_s + 1)
        assert str(error_of(asked)).endswith(f"; waited {told}")
