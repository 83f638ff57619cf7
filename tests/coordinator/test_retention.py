"""What must stay: who may leave when, who is refused, and how pins begin and end (R4, R5, R7, G5)."""

from __future__ import annotations

import pytest

from tensorhub.coordinator import Received, Tick, limits
from tensorhub.coordinator.entities import Model
from tensorhub.coordinator.states import WorkerState
from tensorhub.errors import CoordinatorUnavailable, GroupAborted, RetentionError, VersionUnavailable
from tensorhub.messages import Heartbeat
from tensorhub.testing import CallRecord, Choice, SimHandle, StepwiseCluster
from tensorhub.testing.sim.host_copies import CopyRequest
from tensorhub.types import LATEST, HandleState, Selector
from tensorhub.worker.calls import Fence


def model_of(cluster: StepwiseCluster) -> Model:
    return cluster.coordinator.cluster.models["actor"]


def retained(latest: int, *more: str, spot: bool = False) -> tuple[StepwiseCluster, SimHandle, list[SimHandle]]:
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


# ---------------------------------------------------------------------------------------------------------- leaving


def test_the_last_reliable_holder_of_a_retained_version_stays() -> None:
    cluster, trainer, (reader,) = retained(1, "reader")
    text = "version 1 of 'actor' must stay: it is one of the newest 1, which are retained, and worker 'trainer' .* is among"
    refused(cluster, trainer.unpublish(), text)
    refused(
        cluster, trainer.close(), "let others that are not spot replicate it, give workers host_memory_bytes .* lower retain"
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
    assert sorted(type(asked.error).__name__ for asked in (first, second)) == ["NoneType", "RetentionError"]


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
    """Retained are the newest k visible numbers; that one of them is lost does not make an older one retained."""
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
    """An owner that does not know yet that its version is retained must not fence for a cancelled call either (R4)."""
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


def test_a_cancel_that_crosses_the_refusal_is_answered_by_what_is_known_then() -> None:
    """The answer to the newest request counts: another worker holds the version by then."""
    cluster, trainer, (reader,) = retained(1, "reader")
    asked = trainer.unpublish(timeout_s=1)
    cluster.run()
    cluster.now += 1
    cluster.time_passes()  # the refusal is on its way down
    trainer.cancel()  # and this on its way up
    got = reader.replicate()
    cluster.run(("up", "trainer"), ("down", "trainer"))
    assert got.number == 1
    cluster.run()
    assert asked.error is None
    assert trainer.member.version is None
    cluster.check_agreement()


def test_who_cancels_a_withdrawal_that_waits_for_readers_cuts_them() -> None:
    cluster, trainer, (reader,) = retained(0, "reader")
    got = reader.replicate(1)
    cluster.run(until=lambda: reader.pull is not None)
    asked = trainer.unpublish()
    cluster.run("read")
    assert not asked.has_ended()
    trainer.cancel()
    cluster.run("read")
    cluster.advance(0.01, run=False)
    cluster.run("read")
    assert asked.has_ended()
    assert asked.error is None
    cluster.run()
    assert isinstance(got.error, VersionUnavailable)


def test_a_holder_that_loses_its_connection_while_it_waits_stays_published() -> None:
    """It knows that its version is retained (R4); nothing was fenced, so it is what it was."""
    cluster, trainer, _ = retained(1)
    asked = trainer.unpublish(timeout_s=5)
    cluster.run()
    trainer.worker.disconnect()
    waits(cluster, asked)
    cluster.advance(5)
    assert isinstance(asked.error, RetentionError)
    assert (asked.error.retryable, asked.error.memory) == (True, "intact")
    assert (trainer.member.state, trainer.member.version) == (HandleState.READY, 1)
    trainer.worker.connect()
    cluster.run()
    assert model_of(cluster).withdrawals == {}
    cluster.check_agreement()
    fill(cluster, cluster.handle("late"))


def test_a_waiting_holder_that_restates_itself_goes_on_waiting() -> None:
    """It hears late how an earlier call of its group ended, and says again what it holds."""
    cluster, trainer, (reader,) = retained(1, "reader")
    update = trainer.update("latest", at_least=9)
    cluster.run()
    trainer.cancel()
    cluster.run(("down", "trainer"))
    cluster.advance(3, run=False)
    cluster.run(("down", "trainer"))
    assert update.has_ended()
    asked = trainer.unpublish()
    cluster.run()
    assert sum(" Register " in line and line.split()[1] == "trainer" for line in cluster.log) == 2
    assert not asked.has_ended()
    fill(cluster, reader)
    assert asked.error is None
    assert asked.has_ended()
    cluster.check_agreement()


# ---------------------------------------------------------------------------------------------------------- cut off


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


def test_what_a_stopped_coordinator_reads_late_counts_only_while_the_owner_stays() -> None:
    """Nothing is counted on whose owner has taken it back without a word, however late its last heartbeat was read."""
    cluster, trainer, _ = retained(1)
    trainer.worker.beat()
    cluster.run()
    link = trainer.worker.link
    assert link is not None
    trainer.worker.disconnect()
    trainer.unpublish()
    cluster.now += cluster.options.lease_s - 0.1  # the coordinator was stopped, and has not seen that connection end
    cluster.step(Received(link.session, Heartbeat(0)))
    (worker,) = cluster.coordinator.cluster.workers.values()
    states = [worker.state]
    while states[-1] is WorkerState.LIVE:
        assert not trainer.todo
        cluster.advance(0.1, run=False)
        states.append(worker.state)
    assert len(states) > 1
    cluster.advance(7, run=False)
    assert any(isinstance(action, Fence) for action in trainer.todo)


@pytest.mark.parametrize("what", ["unpublish", "close"])
def test_a_wish_that_is_heard_only_when_it_was_given_up_takes_nothing_from_anybody(what: str) -> None:
    cluster, trainer, (reader,) = retained(1, "reader")
    fill(cluster, reader)
    asked = trainer.unpublish(3) if what == "unpublish" else trainer.close(3)
    cluster.advance(6, run=False)  # its question is under way all that time
    assert trainer.member.state is HandleState.READY  # it has stayed
    cluster.run()  # only now it is let go
    assert isinstance(asked.error, RetentionError)
    assert trainer.member.state is HandleState.READY
    cluster.check_agreement()
    again = reader.unpublish()
    cluster.run()
    assert again.error is None  # the trainer counts
    assert again.has_ended()


@pytest.mark.parametrize("why", ["its lease is over", "it is not retained", "abandoned", "abandoned, connected"])
def test_who_goes_at_once(why: str) -> None:
    cluster, trainer, _ = retained(0 if why == "it is not retained" else 1)
    if "connected" not in why:
        trainer.worker.disconnect()
    cluster.advance(20 if "lease" in why else 0)
    ends(cluster, trainer.close(abandon=True) if "abandoned" in why else trainer.unpublish())


@pytest.mark.parametrize("stays", [True, False])
def test_who_comes_back_while_it_waits_asks_anew(stays: bool) -> None:
    cluster, trainer, (reader,) = retained(1, "reader")
    if not stays:
        fill(cluster, reader)
    trainer.worker.disconnect()
    asked = trainer.unpublish(timeout_s=30)
    cluster.advance(3)
    assert not asked.has_ended()
    trainer.worker.connect()
    cluster.run()
    assert asked.has_ended() is not stays
    cluster.advance(30)
    assert isinstance(asked.error, RetentionError) is stays
    assert trainer.member.version == (1 if stays else None)
    cluster.check_agreement()


def test_a_waiting_holder_survives_its_coordinator() -> None:
    cluster, trainer, (reader,) = retained(1, "reader")
    asked = trainer.unpublish()
    cluster.run()
    cluster.restart()
    for worker in cluster.workers.values():
        worker.connect()
    waits(cluster, asked)
    fill(cluster, reader)
    ends(cluster, asked)
    cluster.check_agreement()


def test_a_waiting_holder_whose_content_nobody_knows_any_more_goes() -> None:
    cluster, trainer, (other,) = retained(1, "other")
    asked = trainer.unpublish()
    cluster.run()
    trainer.worker.disconnect()
    cluster.run()
    other.worker.asks.rollback(0)
    cluster.run()
    trainer.worker.connect()
    ends(cluster, asked)
    cluster.check_agreement()


# --------------------------------------------------------------------------------------------- what holders are told


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


def test_who_asks_again_for_a_pin_is_answered_once_all_know() -> None:
    cluster, trainer, (reader,) = retained(0, "reader")
    pin, first = reader.worker.asks.pin(1)
    cluster.run(("down", "trainer"))
    reader.worker.disconnect()
    reader.worker.connect()  # and says it again
    cluster.run(("down", "trainer"))
    assert reader.worker.asks.answers == {}
    cluster.run()
    (answer,) = reader.worker.asks.answers.items()
    assert answer[0] != first
    assert answer[1] is None
    assert knows(trainer)
    assert set(model_of(cluster).pins) == {pin}
    assert model_of(cluster).notices.unanswered == []


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


def test_a_publisher_in_doubt_knows_when_it_learns_the_outcome() -> None:
    cluster, trainer, _ = retained(0)
    trainer.unpublish()
    trainer.worker.asks.retain(1)
    cluster.run()
    asked = trainer.publish(2, timeout_s=1)
    cluster.run(("down", "trainer"))
    trainer.worker.disconnect()
    cluster.advance(6)
    assert asked.has_ended()
    assert trainer.member.state is HandleState.IN_DOUBT
    leave = trainer.unpublish(timeout_s=10)
    trainer.worker.connect()
    waits(cluster, leave)
    cluster.advance(11)
    assert isinstance(leave.error, RetentionError)
    assert trainer.member.version == 2


# ----------------------------------------------------------------------------------------------------------- update


def newer(latest: int, world_size: int = 1) -> tuple[StepwiseCluster, list[SimHandle], list[SimHandle]]:
    """One group holds version 1 and another one version 2; so many are kept."""
    cluster = StepwiseCluster()
    old, new = cluster.group("old", world_size), cluster.group("new", world_size)
    cluster.run()
    for number, group in enumerate((old, new), start=1):
        publish(cluster, *group, version=number, latest=latest)
    return cluster, old, new


def test_an_update_that_would_lose_a_version_is_refused_before_the_first_byte() -> None:
    cluster, (old,), _ = newer(2)
    asked = old.update("latest", hold=True)
    refused(cluster, asked, "update of 'actor' to version 2: nothing was written: version 1 of 'actor'")
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


def test_very_many_holders_are_told_some_in_each_step_and_count_once_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_rank_counts_once_all_ranks_of_its_group_know_that_they_stay() -> None:
    """Its replica stops serving when the first of them leaves, and who does not know may leave unasked."""
    cluster = StepwiseCluster()
    ranks, user = cluster.group("writers", 2), cluster.handle("user")
    publish(cluster, *ranks, latest=0)
    user.worker.asks.retain(1)
    cluster.run(("up", ranks[1].worker.name))
    members, is_reliable = cluster.coordinator.cluster.members, cluster.coordinator._retentions.is_reliable
    holdings = [holding for rank in ranks if (holding := members[rank.id].holding) is not None]
    assert [holding.kept for holding in holdings] == [True, False]
    assert not any(map(is_reliable, holdings))
    cluster.run()
    assert all(map(is_reliable, holdings))


def test_a_rank_does_not_count_while_another_one_has_yet_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """All first ranks are told before all second ones; and these may leave unasked as long as they are not told."""
    monkeypatch.setattr(limits, "NOTICES_PER_STEP", 1)
    cluster = StepwiseCluster()
    ranks, mates, user = cluster.group("writers", 2), cluster.group("others", 2), cluster.handle("user")
    publish(cluster, *ranks, latest=0)
    for mate in mates:
        mate.replicate()
    cluster.run()
    user.worker.asks.retain(1)
    cluster.run(*(("down", rank.worker.name) for rank in (*mates, ranks[1])))
    members, is_reliable = cluster.coordinator.cluster.members, cluster.coordinator._retentions.is_reliable
    first, second = (members[rank.id].holding for rank in ranks)
    assert first is not None
    assert second is not None
    assert (first.told, first.kept, second.told) == (True, True, False)
    assert not is_reliable(first)
    cluster.run()
    cluster.step(Tick())
    cluster.run()
    assert is_reliable(first)


def test_an_answer_to_an_earlier_telling_does_not_count() -> None:
    """Told to keep it, not to, and to keep it again: its first answer comes when it has yet to hear the last word."""
    cluster, trainer, (user,) = retained(0, "user")
    user.worker.asks.retain(1)
    cluster.run(("up", "trainer"))
    for latest in (0, 1):
        user.worker.asks.retain(latest)
        cluster.run(("up", "trainer"), ("down", "trainer"))
    cluster.do(Choice("up", "trainer"))
    holding = cluster.coordinator.cluster.members[trainer.id].holding
    assert holding is not None
    assert (holding.told, holding.kept) == (True, False)
    cluster.run()
    assert (holding.told, holding.kept) == (True, True)
    assert model_of(cluster).notices.unanswered == []


def test_the_other_ranks_hear_who_must_stay() -> None:
    """Rank 1 was replaced and holds nothing; its shard is left with a spot group."""
    cluster, (first, second), _ = newer(2, world_size=2)
    spot = cluster.group("spot", 2, spot=True)
    cluster.run()
    ends(cluster, *[handle.replicate(1) for handle in spot])
    second.worker.crash()
    cluster.advance(11)
    fresh = cluster.handle("fresh", "old", 1, 2)
    cluster.run()
    calls = [handle.update("latest") for handle in (first, fresh)]
    cluster.advance(61)
    assert isinstance(calls[0].error, RetentionError)
    assert isinstance(calls[1].error, GroupAborted)
    assert list(calls[1].error.causes) == [0]
    assert first.member.version == 1


def test_a_rank_stays_for_the_other_shards_of_its_replica() -> None:
    """With rank 0 its replica would stop to serve, and rank 1 is the last to hold its shard."""
    cluster, old, _ = newer(2, world_size=2)
    pair = cluster.group("pair", 2)
    cluster.run()
    ends(cluster, *[handle.replicate(1) for handle in pair])
    pair[1].worker.crash()
    cluster.advance(11)
    asked = old[0].unpublish()
    waits(cluster, asked)
    assert model_of(cluster).versions[1].has_live_source()


def test_the_last_other_holder_leaves_between_start_and_write() -> None:
    cluster, (old,), _ = newer(2)
    keeper = cluster.handle("keeper")
    cluster.run()
    fill(cluster, keeper, version=1)
    asked = old.update("latest", hold=True)
    cluster.run("hook")
    gone = keeper.unpublish()
    cluster.run("hook")
    assert gone.error is None
    assert gone.has_ended()
    cluster.run()
    assert old.hook_calls == 1
    assert not asked.has_ended()
    cluster.advance(61)
    assert isinstance(asked.error, RetentionError)
    assert old.member.version == 1


# ------------------------------------------------------------------------------------------------------------- pins


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
    with pytest.raises(VersionUnavailable, match="nobody holds it now"):
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


def test_a_worker_that_was_taken_for_dead_pins_again() -> None:
    cluster, trainer, (evaluator,) = retained(0, "evaluator")
    pin = ask_pin(cluster, evaluator)
    evaluator.worker.disconnect()
    cluster.advance(11)
    for _ in range(2):  # the first time it is dismissed
        evaluator.worker.connect()
        cluster.run()
    assert model_of(cluster).pins[pin].incarnation == evaluator.worker.incarnation
    evaluator.worker.disconnect()
    cluster.advance(11)
    trainer.unpublish()
    for _ in range(2):
        cluster.run()
        evaluator.worker.connect()
    cluster.run()
    assert model_of(cluster).pins == {}
    assert isinstance(list(evaluator.worker.asks.answers.values())[-1], VersionUnavailable)


def test_an_unpin_that_is_not_recorded_is_asked_again() -> None:
    cluster, _, (evaluator,) = retained(0, "evaluator")
    pin = ask_pin(cluster, evaluator)
    request = evaluator.worker.asks.unpin(pin)
    cluster.run(until=lambda: cluster.unstored)
    cluster.fail_store()
    cluster.run()
    assert isinstance(evaluator.worker.asks.answers[request], CoordinatorUnavailable)
    assert pin in model_of(cluster).pins
    for _ in range(2):
        evaluator.worker.asks.pins[pin] = ("actor", 1)
        request = evaluator.worker.asks.unpin(pin)
        cluster.run()
        assert evaluator.worker.asks.answers[request] is None
    assert model_of(cluster).pins == {}


# ----------------------------------------------------------------------------------------------------------- policy


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
