"""What must stay: who may leave when, who is refused, and how pins begin and end (R4, R5, R7,
G5).
"""

from __future__ import annotations

import pytest

from tensorhub.coordinator import Tick, Unpinned, limits
from tensorhub.coordinator.entities import Model
from tensorhub.errors import CoordinatorUnavailable, RetentionError, VersionUnavailable
from tensorhub.messages import RetainedAck
from tensorhub.testing import CallRecord, Choice, SimHandle, StepwiseCluster
from tensorhub.testing.sim.host_copies import CopyRequest
from tensorhub.types import LATEST, HandleState, Selector


def model_of(cluster: StepwiseCluster) -> Model:
    return cluster.coordinator.cluster.models["actor"]


def retained(
    latest: int, *more: str, spot: bool = False
) -> tuple[StepwiseCluster, SimHandle, list[SimHandle]]:
    """The trainer holds version 1, and so many of the newest are kept."""
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer", spot=spot)
    others = [cluster.handle(name) for name in more]
    cluster.run()
    publish(cluster, trainer, latest=latest)
    return cluster, trainer, others


def fill(cluster: StepwiseCluster, *handles: SimHandle, version: Selector = LATEST) -> None:
    for handle in handles:
        ends(cluster, handle.replicate(version))


def publish(cluster: StepwiseCluster, *ranks: SimHandle, version: int = 1, latest: int = 1) -> None:
    """A group publishes; so many of the newest are kept."""
    cluster.run()
    ranks[0].worker.asks.retain(latest)
    cluster.run()
    ends(cluster, *[rank.publish(version) for rank in ranks])


def ends(cluster: StepwiseCluster, *calls: CallRecord | CopyRequest) -> None:
    """They are let go."""
    cluster.run()
    assert [(asked.has_ended(), asked.error) for asked in calls] == [(True, None)] * len(calls)


def waits(cluster: StepwiseCluster, asked: CallRecord | CopyRequest) -> None:
    cluster.run()
    assert not asked.has_ended()


def republish(cluster: StepwiseCluster, trainer: SimHandle, number: int) -> None:
    ends(cluster, trainer.unpublish())
    ends(cluster, trainer.publish(number))


def refused(cluster: StepwiseCluster, asked: CallRecord | CopyRequest, match: str) -> None:
    """Its deadline passes; it ends with RetentionError, and everything is as it was."""
    handle = asked.handle
    generation = handle.member.content and handle.member.content.generation
    waits(cluster, asked)
    cluster.advance(61)
    with pytest.raises(RetentionError, match=match) as caught:
        _ = asked.number
    assert (caught.value.retryable, caught.value.memory) == (True, "intact")
    assert handle.member.state is HandleState.READY
    assert handle.member.content is not None
    assert handle.member.content.generation == generation
    cluster.check_agreement()


# --------------------------------------------------------------------------------------------------
# leaving


def test_the_last_reliable_holder_of_a_retained_version_stays() -> None:
    cluster, trainer, (reader,) = retained(1, "reader")
    text = (
        "version 1 of 'actor' must stay: it is one of the newest 1, which are retained, and "
        "worker 'trainer' .* is among"
    )
    refused(cluster, trainer.unpublish(), text)
    refused(
        cluster,
        trainer.close(),
        "let others that are not spot replicate it, give workers host_memory_bytes .* lower retain",
    )
    fill(cluster, reader)
    assert reader.member.version == 1


def test_while_it_waits_it_serves_and_goes_once_another_has_it() -> None:
    cluster, trainer, (reader,) = retained(1, "reader")
    asked = trainer.unpublish()
    waits(cluster, asked)
    fill(cluster, reader)  # from the trainer
    ends(cluster, asked)
    assert trainer.member.state is HandleState.EMPTY
    cluster.check_agreement()


def test_of_two_last_holders_one_may_leave() -> None:
    cluster, trainer, (reader,) = retained(1, "reader")
    fill(cluster, reader)
    first, second = trainer.unpublish(), reader.unpublish()
    cluster.run()
    assert first.has_ended() != second.has_ended()
    cluster.advance(61)
    assert sorted(type(asked.error).__name__ for asked in (first, second)) == [
        "NoneType",
        "RetentionError",
    ]


@pytest.mark.parametrize("connected", [True, False])
def test_a_spot_holder_is_not_told_leaves_freely_and_does_not_count(connected: bool) -> None:
    cluster, trainer, _ = retained(1)
    spot = cluster.handle("spot", spot=True)
    cluster.run()
    fill(cluster, spot)
    assert not knows(spot)
    refused(cluster, trainer.unpublish(), "last reliable holders")
    if not connected:
        spot.worker.disconnect()
    ends(cluster, spot.unpublish())


def test_a_group_is_spot_if_any_rank_is() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.handle("a", "g", 0, 2), cluster.handle("b", "g", 1, 2, spot=True)
    publish(cluster, first, second)
    ends(cluster, *[handle.unpublish() for handle in (first, second)])


def test_a_suspect_holder_does_not_count() -> None:
    cluster, trainer, (reader,) = retained(1, "reader")
    fill(cluster, reader)
    reader.worker.disconnect()
    cluster.run()
    asked = trainer.unpublish()
    waits(cluster, asked)
    reader.worker.connect()
    ends(cluster, asked)


def test_each_rank_has_to_stay_for_its_own_shard() -> None:
    cluster = StepwiseCluster()
    trainers, readers = cluster.group("trainer", 2), cluster.group("reader", 2)
    publish(cluster, *trainers)
    calls = [handle.unpublish() for handle in trainers]
    cluster.run()
    assert not any(asked.has_ended() for asked in calls)
    ends(cluster, *[handle.replicate() for handle in readers])
    ends(cluster, *calls)


def test_nothing_is_kept_for_a_version_that_is_lost() -> None:
    """Rank 1 has crashed: what rank 0 holds is of no use to anybody."""
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    publish(cluster, first, second)
    second.worker.crash()
    asked = first.unpublish()
    waits(cluster, asked)  # it may only have lost its connection
    cluster.advance(11)
    assert asked.has_ended()
    assert asked.error is None


@pytest.mark.parametrize("how", ["lower", "unpin", "roll back"])
def test_what_lets_a_waiting_holder_go(how: str) -> None:
    cluster, trainer, _ = retained(0 if how == "unpin" else 1)
    pin, request = trainer.worker.asks.pin(1) if how == "unpin" else ("", 0)
    cluster.run()
    assert trainer.worker.asks.answers.get(request) is None
    asked = trainer.unpublish()
    waits(cluster, asked)
    if how == "lower":
        trainer.worker.asks.retain(0)
    elif how == "unpin":
        trainer.worker.asks.unpin(pin)
    else:
        trainer.worker.asks.rollback(0)
    ends(cluster, asked)
    assert trainer.member.state is HandleState.EMPTY
    cluster.check_agreement()


def test_an_older_version_may_go_and_a_lost_one_counts() -> None:
    """Retained are the newest k visible numbers; that one of them is lost does not make an older
    one retained.
    """
    cluster, trainer, (keeper, other) = retained(1, "keeper", "other")
    fill(cluster, keeper)
    republish(cluster, trainer, 2)
    trainer.worker.crash()
    cluster.advance(11)
    asked = keeper.unpublish()
    ends(cluster, asked)
    other.worker.asks.retain(2)
    cluster.run()
    assert model_of(cluster).retained() == {1, 2}


@pytest.mark.parametrize("when", ["it waits", "no word came", "it is cut off"])
def test_who_cancels_stays_published(when: str) -> None:
    """An owner that does not know yet that its version is retained must not fence for a cancelled
    call either (R4).
    """
    cluster, trainer, _ = retained(1)
    if when == "it is cut off":
        trainer.worker.disconnect()
    asked = trainer.unpublish()
    if when != "no word came":
        cluster.run()
    trainer.cancel()
    cluster.advance(0.01)
    assert isinstance(asked.error, RetentionError)
    assert trainer.member.version == 1
    cluster.check_agreement()


# --------------------------------------------------------------------------------------------------
# cut off


def test_an_owner_that_is_cut_off_may_go_when_its_lease_is_over() -> None:
    """From then on the coordinator counts on others, or on nobody."""
    cluster, trainer, _ = retained(1)
    trainer.worker.disconnect()
    asked = trainer.unpublish()
    cluster.advance(12)
    assert not asked.has_ended()
    assert list(cluster.coordinator.cluster.workers) == []
    cluster.advance(5)
    assert asked.error is None
    assert trainer.member.state is HandleState.EMPTY


@pytest.mark.parametrize(
    "why", ["its lease is over", "it is not retained", "abandoned", "abandoned, connected"]
)
def test_who_goes_at_once(why: str) -> None:
    cluster, trainer, _ = retained(0 if why == "it is not retained" else 1)
    if "connected" not in why:
        trainer.worker.disconnect()
    cluster.advance(20 if "lease" in why else 0)
    ends(cluster, trainer.close(abandon=True) if "abandoned" in why else trainer.unpublish())


# --------------------------------------------------------------------------------------------- what
# holders are told


def knows(handle: SimHandle) -> bool:
    return handle.member.content is not None and handle.member.content.retained


@pytest.mark.parametrize("how", ["retain", "pin"])
def test_retain_and_pin_return_when_every_holder_knows(how: str) -> None:
    cluster, trainer, (reader, other) = retained(0, "reader", "other")
    fill(cluster, reader)
    request = other.worker.asks.retain(1) if how == "retain" else other.worker.asks.pin(1)[1]
    cluster.run(("down", "reader"))
    assert request not in other.worker.asks.answers
    assert knows(trainer)
    cluster.run()
    assert other.worker.asks.answers[request] is None
    assert knows(reader)


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_holder_that_is_away_is_waited_for_until_it_is_told_or_lost(comes_back: bool) -> None:
    cluster, trainer, (reader, other) = retained(0, "reader", "other")
    fill(cluster, reader)
    reader.worker.disconnect()
    request = other.worker.asks.retain(1)
    cluster.advance(9)
    assert request not in other.worker.asks.answers
    if comes_back:
        reader.worker.connect()
    cluster.advance(0 if comes_back else 2)
    assert other.worker.asks.answers[request] is None
    assert (knows(trainer), knows(reader)) == (True, comes_back)
    other.worker.asks.retain(0)
    cluster.run()
    assert not knows(trainer)


def test_new_holders_know_from_the_beginning_and_of_a_version_in_its_place() -> None:
    cluster, trainer, (reader,) = retained(1, "reader")
    fill(cluster, reader)
    assert knows(reader)
    assert not any("<- SetRetained" in line for line in cluster.log if line.split()[1] == "reader")
    cluster.restart()
    for worker in cluster.workers.values():
        worker.connect()
    cluster.run()
    assert knows(reader)
    republish(cluster, trainer, 2)
    assert (knows(trainer), knows(reader)) == (True, False)


# --------------------------------------------------------------------------------------------------
# update


def newer(
    latest: int, world_size: int = 1
) -> tuple[StepwiseCluster, list[SimHandle], list[SimHandle]]:
    """One group holds version 1 and another one version 2; so many are kept."""
    cluster = StepwiseCluster()
    old, new = cluster.group("old", world_size), cluster.group("new", world_size)
    cluster.run()
    for number, group in enumerate((old, new), start=1):
        publish(cluster, *group, version=number, latest=latest)
    return cluster, old, new


def test_only_an_acknowledgement_of_the_newest_notice_of_what_its_rank_holds_counts() -> None:
    cluster, trainer, (reader,) = retained(0, "reader")
    trainer.worker.asks.retain(1)
    notices = model_of(cluster).notices
    cluster.run(until=lambda: notices.unaware)
    told = cluster.coordinator.cluster.members[trainer.id]
    content_id = model_of(cluster).versions[1].info.content_id
    seq = told.retained_seq
    for rank, registration, content, of in (
        (trainer, "gone", content_id, seq),
        (reader, reader.id, content_id, seq),  # it holds nothing
        (trainer, trainer.id, "another", seq),
        (trainer, trainer.id, content_id, seq - 1),
    ):
        rank.worker.say(RetainedAck(registration, content, True, of))
        cluster.do(Choice("up", rank.worker.name))
    assert list(notices.unaware) == [trainer.id]
    cluster.run()
    assert not notices.unaware


def test_a_version_is_noted_by_the_step_in_which_it_begins_or_ceases_to_be_retained() -> None:
    cluster, trainer, _ = retained(0)
    version, asks = model_of(cluster).versions[1], trainer.worker.asks
    asks.retain(1)
    cluster.run(until=lambda: version.retained)
    assert version in cluster.coordinator.cluster.noted
    asks.retain(0)
    cluster.run(until=lambda: not version.retained)
    assert version in cluster.coordinator.cluster.noted


def test_an_update_that_would_lose_a_version_is_refused_before_the_first_byte() -> None:
    cluster, (old,), _ = newer(2)
    asked = old.update("latest", hold=True)
    refused(
        cluster, asked, "update of 'actor' to version 2: nothing was written: version 1 of 'actor'"
    )
    assert old.hook_calls == 0  # no engine was paused for it


@pytest.mark.parametrize("latest", [1, 2])
def test_an_update_waits_until_another_has_a_version_that_is_kept(latest: int) -> None:
    cluster, (old,), _ = newer(latest)
    asked = old.update("latest")
    cluster.run()
    assert asked.has_ended() is (latest == 1)
    if latest == 2:
        fill(cluster, cluster.handle("keeper"), version=1)
    assert asked.number == 2


def test_very_many_holders_are_told_some_in_each_step_and_count_once_they_know(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "NOTICES_PER_STEP", 2)
    cluster, trainer, (*others, user) = retained(0, *"abcd", "user")
    fill(cluster, *others)
    model, books = model_of(cluster), cluster.coordinator.cluster
    user.worker.asks.retain(1)
    left: list[int] = []
    while choices := [choice for choice in cluster.choices() if choice.kind != "down"]:
        cluster.do(choices[0])
        left += [len(model.notices.queue)] if model.notices.queue else []
    assert left == [3]
    cluster.step(Tick())
    cluster.step(Tick())
    assert not model.notices.queue
    assert model.notices.unanswered  # everybody was told, and nobody knows
    cluster.run()
    assert not model.notices.unanswered
    holders = [books.members[handle.id] for handle in (trainer, *others)]
    reliable = [holder.holding for holder in holders if holder.holding is not None]
    assert all(map(cluster.coordinator._retentions.is_reliable, reliable))
    for holding in reliable:
        holding.told = False
    assert not any(map(cluster.coordinator._retentions.is_reliable, reliable))


# --------------------------------------------------------------------------------------------------
# pins


def ask_pin(cluster: StepwiseCluster, handle: SimHandle, version: int = 1) -> str:
    pin, request = handle.worker.asks.pin(version)
    cluster.run()
    error = handle.worker.asks.answers[request]
    if error is not None:
        raise error
    return pin


def test_a_pinned_version_stays_until_its_last_pin_ends() -> None:
    cluster, trainer, (evaluator,) = retained(0, "evaluator")
    pins = [ask_pin(cluster, evaluator) for _ in range(2)]
    refused(cluster, trainer.unpublish(), "is pinned by 2 block")
    evaluator.worker.asks.unpin(pins[0])
    refused(cluster, trainer.unpublish(), "is pinned by 1 block")
    asked = trainer.unpublish()
    evaluator.worker.asks.unpin(pins[1])
    ends(cluster, asked)


def test_a_refusal_counts_the_pins_of_its_own_version_only() -> None:
    cluster, trainer, (reader,) = retained(1, "reader")
    fill(cluster, reader)
    ask_pin(cluster, reader)
    ends(cluster, trainer.unpublish())
    trainer.publish(2)
    cluster.run()
    text = "version 2 of 'actor' must stay: it is one of the newest 1, which are retained"
    refused(cluster, trainer.unpublish(), text)


def test_what_cannot_be_pinned() -> None:
    cluster, trainer, (evaluator,) = retained(0, "evaluator")
    with pytest.raises(VersionUnavailable, match="it is not published, or not any more") as caught:
        ask_pin(cluster, evaluator, 2)
    assert caught.value.retryable
    with pytest.raises(VersionUnavailable) as caught:
        ask_pin(cluster, evaluator, 0)
    assert not caught.value.retryable
    trainer.worker.crash()
    cluster.advance(11)
    with pytest.raises(VersionUnavailable, match="no worker holds it now"):
        ask_pin(cluster, evaluator, 1)
    assert model_of(cluster).pins == {}


def test_a_pin_counts_from_its_question_on() -> None:
    cluster, trainer, (evaluator,) = retained(0, "evaluator")
    evaluator.worker.asks.pin(1)
    cluster.run(until=lambda: cluster.unstored)
    asked = trainer.unpublish()
    cluster.run("store")
    assert not asked.has_ended()
    cluster.fail_store()
    cluster.run()
    assert asked.has_ended()
    (error,) = (e for e in evaluator.worker.asks.answers.values() if e is not None)
    assert isinstance(error, CoordinatorUnavailable)


@pytest.mark.parametrize("how", ["leave", "loss", "rollback"])
def test_what_ends_a_pin(how: str) -> None:
    cluster, trainer, (evaluator,) = retained(0, "evaluator")
    ask_pin(cluster, evaluator)
    if how == "rollback":
        trainer.worker.asks.rollback(0)
        cluster.run()
    else:
        evaluator.worker.crash() if how == "loss" else evaluator.worker.disconnect()
        cluster.advance(5)
        assert model_of(cluster).pins
        cluster.advance(6)
    assert model_of(cluster).pins == {}
    cluster.restart()
    assert not cluster.coordinator.cluster.models["actor"].pins


def test_a_pin_outlives_its_coordinator_as_long_as_its_worker_may_come_back() -> None:
    cluster, trainer, (evaluator, other) = retained(0, "evaluator", "other")
    kept, gone = ask_pin(cluster, evaluator), ask_pin(cluster, other)
    cluster.restart()
    trainer.worker.connect()
    evaluator.worker.connect()
    cluster.run()
    assert set(model_of(cluster).pins) == {kept, gone}
    cluster.advance(9)
    assert set(model_of(cluster).pins) == {kept, gone}
    cluster.advance(2)
    assert set(model_of(cluster).pins) == {kept}
    asked = trainer.unpublish()
    waits(cluster, asked)
    evaluator.worker.asks.unpin(kept)
    cluster.run()
    assert asked.has_ended()
    cluster.restart()
    assert model_of(cluster).pins == {}


def test_a_pin_that_has_ended_does_not_come_back_with_an_older_copy_of_the_state() -> None:
    """Else its version would have to stay for as long as its worker lives."""
    cluster, trainer, (evaluator,) = retained(0, "evaluator")
    kept, ended = ask_pin(cluster, evaluator), ask_pin(cluster, evaluator)
    evaluator.worker.asks.unpin(ended)
    cluster.run()
    assert isinstance(cluster.store[-1], Unpinned)
    cluster.take_older_state(len(cluster.store) - 1)
    cluster.restart()
    for handle in (trainer, evaluator):
        handle.worker.connect()
    cluster.run()
    assert set(model_of(cluster).pins) == {kept, ended}
    cluster.advance(11)
    assert set(model_of(cluster).pins) == {kept}
    cluster.restart()
    assert set(model_of(cluster).pins) == {kept}


# --------------------------------------------------------------------------------------------------
# policy


def test_the_last_retain_wins_and_is_durable() -> None:
    cluster = StepwiseCluster()
    worker = cluster.worker("w")
    cluster.run()
    for latest in (3, 1, 2):
        worker.asks.retain(latest, "fresh")
    worker.asks.retain(5)
    cluster.run()
    cluster.restart()
    models = cluster.coordinator.cluster.models
    assert {name: model.retain for name, model in models.items()} == {"actor": 5, "fresh": 2}
    worker.connect()
    cluster.run()
    request = worker.asks.retain(9)
    cluster.run(until=lambda: cluster.unstored)
    cluster.fail_store()
    cluster.run()
    assert isinstance(worker.asks.answers[request], CoordinatorUnavailable)
    assert models["actor"].retain == 5


def test_an_old_version_that_is_retained_is_not_forgotten() -> None:
    cluster, trainer, (keeper, other) = retained(0, "keeper", "other")
    fill(cluster, keeper)
    pin = ask_pin(cluster, other)
    for number in (2, 3, 4):
        republish(cluster, trainer, number)
    keeper.worker.crash()
    cluster.advance(11)
    assert sorted(model_of(cluster).versions) == [1, 3, 4]
    other.worker.asks.unpin(pin)
    cluster.run()
    assert sorted(model_of(cluster).versions) == [3, 4]


def test_what_is_retained_is_recovered_however_old_it_is() -> None:
    cluster, trainer, (keeper,) = retained(0, "keeper")
    fill(cluster, keeper)
    pin = ask_pin(cluster, keeper)
    for number in range(2, 70):
        republish(cluster, trainer, number)
    cluster.restart()
    assert [number for number in model_of(cluster).versions if number < 6] == [1]
    for worker in cluster.workers.values():
        worker.connect()
    cluster.run()
    assert (keeper.member.version, set(model_of(cluster).pins)) == (1, {pin})
