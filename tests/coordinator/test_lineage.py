"""A new lineage: what stays, what is retired, who is told, and in which order it is recorded (R2,
G3).
"""

from __future__ import annotations

import pytest

from tensorhub.coordinator.entities import Model
from tensorhub.errors import CoordinatorUnavailable, StateError, VersionConflict, VersionUnavailable
from tensorhub.messages import Announce, Watch
from tensorhub.testing import SimHandle, StepwiseCluster
from tensorhub.types import HandleState


def trained(*more: str, to: int = 3) -> tuple[StepwiseCluster, SimHandle, list[SimHandle]]:
    """Versions 1 to `to`; each of `more` holds the version of its place, the trainer the newest."""
    cluster = StepwiseCluster()
    trainer, others = cluster.handle("trainer"), [cluster.handle(name) for name in more]
    cluster.run()
    for number in range(1, to + 1):
        if number > 1:
            trainer.unpublish()
            cluster.run()
        trainer.publish(number)
        cluster.run()
        if number <= len(others):
            others[number - 1].replicate(number)
            cluster.run()
    return cluster, trainer, others


def model_of(cluster: StepwiseCluster) -> Model:
    return cluster.coordinator.cluster.models["actor"]


def rollback(cluster: StepwiseCluster, handle: SimHandle, to: int) -> None:
    """Roll back and wait for the answer; raises what it is refused with."""
    request = handle.worker.asks.rollback(to)
    cluster.run()
    error = handle.worker.asks.answers[request]
    if error is not None:
        raise error


def until_it_is_being_stored(cluster: StepwiseCluster, records: int = 1) -> None:
    while len(cluster.unstored) < records:
        cluster.do(next(choice for choice in cluster.choices() if choice.kind != "store"))


def test_a_new_lineage_inherits_what_is_not_later() -> None:
    cluster, trainer, (one, two, late) = trained("one", "two", "late")
    rollback(cluster, trainer, 2)
    model = model_of(cluster)
    assert (model.history.lineage, model.mark, sorted(model.versions)) == (1, 2, [1, 2])
    assert (one.member.version, two.member.version) == (1, 2)
    for holder in (trainer, late):
        assert holder.member.state is HandleState.EMPTY
    cluster.check_agreement()
    asked = late.replicate("latest")
    cluster.run()
    assert asked.number == 2
    asked = trainer.publish(3)
    cluster.run()
    assert asked.number == 3
    asked = late.update("latest")
    cluster.run()
    assert asked.number == 3
    assert {v.number: v.lineage for v in model.versions.values()} == {1: 0, 2: 0, 3: 1}


def test_the_mark_itself_is_rolled_back_to() -> None:
    """A trainer that restarts from the newest checkpoint need not know that it is the newest."""
    cluster, trainer, _ = trained()
    rollback(cluster, trainer, 3)
    assert (model_of(cluster).history.lineage, model_of(cluster).mark, trainer.member.version) == (
        1,
        3,
        3,
    )


def test_what_cannot_be_rolled_back_to() -> None:
    cluster, trainer, _ = trained()
    with pytest.raises(VersionConflict, match="its newest number is 3; give 3 or less") as caught:
        rollback(cluster, trainer, 4)
    assert not caught.value.retryable
    cluster.handle("other", model="fresh")
    cluster.run()
    for name in ("fresh", "unknown"):
        request = trainer.worker.asks.rollback(0, name)
        cluster.run()
        assert "nothing was published under it yet" in str(trainer.worker.asks.answers[request])
    assert model_of(cluster).history.lineage == 0
    assert "unknown" not in cluster.coordinator.cluster.models


def test_the_mark_may_be_a_number_that_nobody_published() -> None:
    cluster, trainer, _ = trained(to=1)
    trainer.unpublish()
    cluster.run()
    trainer.publish(9)
    cluster.run()
    rollback(cluster, trainer, 5)
    asked = trainer.publish(5)
    cluster.run()
    with pytest.raises(VersionConflict, match="the newest number so far is 5"):
        _ = asked.number
    asked = trainer.publish(6)
    cluster.run()
    assert asked.number == 6


def test_a_publish_that_is_being_recorded_finishes_first() -> None:
    cluster, trainer, (other,) = trained("other", to=1)
    other.unpublish()
    cluster.run()
    asked = other.publish(2)
    until_it_is_being_stored(cluster)
    request = trainer.worker.asks.rollback(1)
    cluster.run("store")
    assert len(cluster.unstored) == 1  # the rollback waits
    cluster.run()
    assert asked.number == 2
    assert trainer.worker.asks.answers[request] is None
    assert (other.member.state, model_of(cluster).mark) == (HandleState.EMPTY, 1)


def test_a_staged_publish_is_over() -> None:
    cluster, trainer, _ = trained(to=1)
    first, second = cluster.group("pair", 2)
    cluster.run()
    asked = first.publish(2)
    cluster.run()
    rollback(cluster, trainer, 1)
    with pytest.raises(VersionConflict, match="was rolled back to 1 meanwhile"):
        _ = asked.number
    assert first.member.state is HandleState.EMPTY
    calls = [handle.publish(2) for handle in (first, second)]
    cluster.run()
    assert [call.number for call in calls] == [2, 2]


@pytest.mark.parametrize("hold", [False, True])
def test_a_fill_of_a_later_version_is_over(hold: bool) -> None:
    cluster, trainer, (keeper,) = trained("keeper", to=2)
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate(2, hold=hold)
    cluster.run("read", "hook")
    rollback_request = keeper.worker.asks.rollback(1)
    cluster.run("read", "hook")
    assert keeper.worker.asks.answers[rollback_request] is None
    cluster.run()
    with pytest.raises(VersionUnavailable, match="was rolled back to 1; ask again") as caught:
        _ = asked.number
    assert caught.value.retryable
    assert caught.value.memory == ("intact" if hold else "torn")
    again = reader.replicate("latest")
    cluster.run()
    assert again.number == 1
    assert trainer.member.state is HandleState.EMPTY


@pytest.mark.parametrize("hold", [False, True])
def test_a_fill_of_what_was_the_latest_goes_on_with_what_is_the_latest_now(hold: bool) -> None:
    cluster, _, (keeper,) = trained("keeper", to=2)
    reader = cluster.handle("reader")
    cluster.run()
    asked = reader.replicate("latest", hold=hold)
    cluster.run("read", "hook")
    keeper.worker.asks.rollback(1)
    cluster.run("read", "hook")
    cluster.run()
    assert asked.number == 1


def test_watchers_hear_that_the_newest_is_an_older_one() -> None:
    cluster, trainer, _ = trained("one", "two")
    heard: list[int | None] = []
    hear = trainer.worker.hear

    def listening(message: object) -> None:
        if isinstance(message, Announce):
            heard.append(message.newest.version if message.newest is not None else None)
        hear(message)  # type: ignore[arg-type]

    trainer.worker.hear = listening  # type: ignore[method-assign]
    trainer.worker.say(Watch("actor"))
    request = trainer.worker.asks.rollback(2)
    cluster.run(until=lambda: request in trainer.worker.asks.answers)
    assert heard == [3, 2]  # before Done
    rollback(cluster, trainer, 0)
    assert heard == [3, 2, None]
    asked = trainer.replicate("latest", timeout_s=1)
    cluster.advance(4)
    with pytest.raises(VersionUnavailable, match="no version of 'actor' up to 0, its newest"):
        _ = asked.number


def test_a_retry_is_not_a_second_rollback() -> None:
    cluster, trainer, _ = trained()
    trainer.worker.asks.rollback(1, ident="mine")
    cluster.run()
    trainer.publish(2)
    cluster.run()
    for _ in range(2):
        request = trainer.worker.asks.rollback(1, ident="mine")
        cluster.run()
        assert trainer.worker.asks.answers[request] is None
        assert (model_of(cluster).history.lineage, trainer.member.version) == (1, 2)
        cluster.restart()
        trainer.worker.connect()
        cluster.run()
    first, second = (trainer.worker.asks.rollback(1, ident="twice") for _ in range(2))
    cluster.run()
    assert first not in trainer.worker.asks.answers  # the retry stands for it
    assert trainer.worker.asks.answers[second] is None
    assert model_of(cluster).history.lineage == 2


def test_a_store_that_fails_leaves_everything_as_it_was() -> None:
    cluster, trainer, _ = trained()
    request = trainer.worker.asks.rollback(1)
    until_it_is_being_stored(cluster)
    cluster.fail_store()
    cluster.run()
    assert isinstance(trainer.worker.asks.answers[request], CoordinatorUnavailable)
    assert (model_of(cluster).history.lineage, model_of(cluster).mark, trainer.member.version) == (
        0,
        3,
        3,
    )
    rollback(cluster, trainer, 1)
    assert model_of(cluster).history.lineage == 1


def test_a_holder_that_was_away_learns_it_when_it_announces() -> None:
    cluster, trainer, (one, two, late) = trained("one", "two", "late")
    late.worker.disconnect()
    rollback(cluster, one, 1)
    for holder in (trainer, two):
        assert holder.member.state is HandleState.EMPTY
    assert late.member.version == 3
    late.worker.connect()
    cluster.run()
    assert late.member.state is HandleState.EMPTY
    cluster.check_agreement()


@pytest.mark.parametrize("kept", [True, False])
def test_a_coordinator_that_comes_back(kept: bool) -> None:
    cluster, trainer, (one,) = trained("one")
    trainer.worker.asks.rollback(1)
    until_it_is_being_stored(cluster)
    cluster.restart(kept=kept)
    for worker in cluster.workers.values():
        worker.connect()
    cluster.run()
    model = model_of(cluster)
    assert (model.history.lineage, model.mark) == ((1, 1) if kept else (0, 3))
    assert trainer.member.version == (None if kept else 3)
    assert one.member.version == 1
    cluster.check_agreement()


def test_the_lineage_is_recovered_without_any_version() -> None:
    cluster, trainer, _ = trained()
    rollback(cluster, trainer, 0)
    cluster.restart()
    trainer.worker.connect()
    cluster.run()
    assert (model_of(cluster).history.lineage, model_of(cluster).mark) == (1, 0)
    asked = trainer.publish(1)
    cluster.run()
    assert asked.number == 1
    cluster.restart()
    trainer.worker.connect()
    cluster.run()
    assert (model_of(cluster).history.lineage, model_of(cluster).mark, trainer.member.version) == (
        1,
        1,
        1,
    )


def begin_unpublish(cluster: StepwiseCluster, trainer: SimHandle) -> None:
    trainer.unpublish()


def begin_close(cluster: StepwiseCluster, trainer: SimHandle) -> None:
    trainer.close()


def begin_update(cluster: StepwiseCluster, trainer: SimHandle) -> None:
    trainer.update(2, hold=True)


def begin_no_op(cluster: StepwiseCluster, trainer: SimHandle) -> None:
    trainer.update("latest")


def cancel_update(cluster: StepwiseCluster, trainer: SimHandle) -> None:
    trainer.update(2, hold=True)
    cluster.run("store", "hook")
    trainer.cancel()


CALLS = [begin_unpublish, begin_close, begin_update, begin_no_op, cancel_update]


def test_unpublish_of_what_was_rolled_back_says_so() -> None:
    cluster, trainer, _ = trained()
    rollback(cluster, trainer, 1)
    with pytest.raises(StateError, match="is empty: there is nothing to unpublish"):
        trainer.unpublish()


def test_latest_is_not_older_than_a_forgotten_version_that_a_rollback_made_the_newest() -> None:
    """G3: version 2 was published, and the new lineage inherits it; nobody holds it any more, so
    `latest` fails loudly.
    """
    cluster, trainer, (keeper,) = trained("keeper", to=5)
    assert sorted(model_of(cluster).versions) == [1, 4, 5]
    rollback(cluster, trainer, 2)
    late = cluster.handle("late")
    asked = late.replicate("latest", timeout_s=3)
    other = cluster.handle("other").replicate("latest-1", timeout_s=3)
    cluster.advance(4)
    with pytest.raises(
        VersionUnavailable,
        match=r"version 2 of 'actor', which a rollback has made the newest, is held by no worker",
    ):
        _ = asked.number
    assert other.number == 1
    trainer.publish(3)
    cluster.run()
    again = late.replicate("latest")
    cluster.run()
    assert again.number == 3
    assert keeper.member.version == 1


def test_what_a_rollback_has_made_the_newest_and_no_worker_holds_was_published() -> None:
    cluster, trainer, _ = trained(to=5)
    rollback(cluster, trainer, 2)
    assert not model_of(cluster).versions
    late = cluster.handle("late")
    cluster.run()
    for selector, says in (
        (2, "version 2 of 'actor' was published, and no worker holds it any more"),
        (0, "version 0 of 'actor' was never published, or no worker holds it any more"),
        (3, "version 3 of 'actor' is not published yet"),
        ("latest", "version 2 of 'actor', which a rollback has made the newest, is held by no"),
    ):
        asked = late.replicate(selector, timeout_s=1)
        cluster.advance(2)
        with pytest.raises(VersionUnavailable, match=says):
            _ = asked.number


def test_a_call_by_selector_whose_version_was_rolled_back_while_its_worker_was_away_goes_on() -> (
    None
):
    """R12: the coordinator has restarted, and does not know any more what the fill had begun to
    read.
    """
    cluster = StepwiseCluster()
    trainer, reader, other = map(cluster.handle, ("trainer", "reader", "other"))
    cluster.run()
    trainer.publish(1)
    cluster.run()
    asked = reader.replicate("latest")
    cluster.run("read")
    cluster.restart()
    other.worker.connect()
    cluster.run("read")
    rollback(cluster, other, 0)
    reader.worker.connect()
    cluster.run("read")
    assert not asked.has_ended()
    other.publish(1)
    cluster.run()
    assert asked.number == 1
