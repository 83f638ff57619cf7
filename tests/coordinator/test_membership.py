"""Workers and ranks: leases, incarnations, registrations, membership epochs (G9, R11)."""

from __future__ import annotations

import pytest

from tensorhub.coordinator import CloseSession, Connected, Received, Send, Silent
from tensorhub.coordinator.entities import Model, Operation
from tensorhub.coordinator.views import describe
from tensorhub.errors import GroupAborted, RegistrationError, StateError
from tensorhub.messages import (
    Deregister,
    Dismissed,
    Fill,
    Heartbeat,
    HeartbeatAck,
    Join,
    Leave,
    Prepared,
    Register,
    Welcome,
)
from tensorhub.testing import DEVICE, MANIFEST, Choice, SimHandle, StepwiseCluster
from tensorhub.types import HandleState, Location, OpKey, OpKind, release
from tensorhub.worker import registration_session
from tests.coordinator.test_testimonies import list_of, published as with_digests, tell_it
from tests.coordinator.test_wakeups import LEASE_S, Hall


def worker_state(cluster: StepwiseCluster, handle: SimHandle) -> str:
    worker = cluster.coordinator.cluster.workers.get(handle.worker.incarnation)
    return worker.state.value if worker is not None else "lost"


def published() -> tuple[StepwiseCluster, SimHandle, SimHandle]:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    return cluster, trainer, reader


def test_heartbeats_keep_a_worker_alive() -> None:
    cluster, trainer, _ = published()
    cluster.advance(100)
    assert worker_state(cluster, trainer) == "live"


def test_a_disconnected_worker_is_suspected_then_lost() -> None:
    cluster, trainer, reader = published()
    trainer.worker.crash()
    cluster.run()
    assert worker_state(cluster, trainer) == "suspect"
    asked = reader.replicate(timeout_s=30)
    cluster.run()
    assert not asked.has_ended()  # nobody is sent to a suspect
    cluster.advance(11)
    assert worker_state(cluster, trainer) == "lost"


def shard_states(cluster: StepwiseCluster) -> list[str]:
    info, _ = describe(cluster.coordinator.cluster.models["actor"], cluster.now)
    return [shard.state for replica in info.replicas for shard in replica.shards]


def test_what_a_suspect_holds_is_shown_as_doubtful() -> None:
    """As after a kill -9: nobody knows yet whether it is still there."""
    cluster, trainer, _ = published()
    assert shard_states(cluster) == ["complete"]
    trainer.worker.crash()
    cluster.run()
    assert (worker_state(cluster, trainer), shard_states(cluster)) == ("suspect", ["doubtful"])
    cluster.advance(11)
    assert shard_states(cluster) == []


def test_a_silent_worker_is_suspected_after_half_its_lease() -> None:
    cluster, trainer, _ = published()
    assert trainer.worker.link is not None
    cluster.heartbeat_at = 1e9
    cluster.advance(5.1)
    assert worker_state(cluster, trainer) == "suspect"
    trainer.worker.say(Heartbeat(1))
    cluster.run()
    assert worker_state(cluster, trainer) == "live"
    cluster.advance(10.1)
    assert trainer.worker.dismissals == ["worker 'trainer' was not heard of for 10.0 s"]


def test_a_worker_that_is_back_within_its_lease_has_lost_nothing() -> None:
    cluster, trainer, reader = published()
    trainer.worker.disconnect()
    cluster.advance(6)
    trainer.worker.connect()
    cluster.run()
    assert worker_state(cluster, trainer) == "live"
    asked = reader.replicate()
    cluster.run()
    assert asked.number == 1


def test_a_suspect_that_is_heard_again_wakes_who_waits_for_it() -> None:
    cluster, trainer, reader = published()
    trainer.worker.disconnect()
    cluster.advance(6)
    asked = reader.replicate()
    cluster.run()
    assert not asked.has_ended()
    trainer.worker.connect()
    cluster.run()
    assert asked.number == 1


def test_a_lost_worker_comes_back_as_a_new_incarnation_behind_the_same_handle() -> None:
    cluster, trainer, reader = published()
    trainer.worker.disconnect()
    cluster.advance(11)
    assert worker_state(cluster, trainer) == "lost"
    trainer.worker.connect()
    cluster.run()
    assert trainer.worker.dismissals == ["this incarnation was lost; come back as a new one"]
    trainer.worker.connect()
    cluster.run()
    assert trainer.member.version == 1
    asked = reader.replicate()
    cluster.run()
    assert asked.number == 1


def test_a_half_open_connection_is_replaced() -> None:
    """The worker connects again before the coordinator has noticed that it was gone."""
    cluster, trainer, reader = published()
    trainer.worker.disconnect()
    trainer.worker.connect()
    cluster.run()
    assert worker_state(cluster, trainer) == "live"
    assert trainer.worker.link is not None
    asked = reader.replicate()
    cluster.run()
    assert asked.number == 1


def test_a_join_that_comes_late_over_a_former_connection_does_not_replace_the_newer_one() -> None:
    """G9: the worker has given that connection up before anybody heard of it."""
    cluster = StepwiseCluster()
    join = Join("x", Location(), (), 1, 0)
    for session in (77, 78):
        cluster.coordinator.step(Connected(session, "x.1", "worker"), 0.0)
    assert answers(cluster, 78, join) == [
        Welcome("c", 1, 10.0, False, release=release(), term="term1")
    ]
    assert answers(cluster, 77, join) == ["the same worker has a newer connection"]
    assert answers(cluster, 78, Heartbeat(1)) == [HeartbeatAck(1, cluster.now)]


def test_a_leaving_worker_is_lost_at_once() -> None:
    cluster, trainer, _ = published()
    trainer.worker.say(Leave("done"))
    cluster.run()
    assert worker_state(cluster, trainer) == "lost"
    assert trainer.worker.dismissals == ["worker 'trainer' has left: done"]


def test_a_connected_rank_is_not_replaced() -> None:
    cluster, _, _ = published()
    other = cluster.handle("other", "trainer")
    cluster.run()
    assert isinstance(other.registration_error, RegistrationError)
    assert "is registered by worker 'trainer', which is connected: close it first" in str(
        other.registration_error
    )
    with pytest.raises(StateError, match="was given up; register again"):
        other.publish(5)


def test_a_disconnected_rank_is_replaced_under_a_new_epoch() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    cluster.run()
    group = cluster.coordinator.cluster.models["actor"].groups["trainer"]
    epoch = group.epoch
    second.worker.disconnect()
    cluster.run()
    newcomer = cluster.handle("spare", "trainer", 1, 2)
    cluster.run()
    assert group.epoch > epoch
    calls = [first.publish(1), newcomer.publish(1)]
    cluster.run()
    assert [call.number for call in calls] == [1, 1]


def test_a_rank_that_missed_the_change_of_epoch_learns_of_it() -> None:
    """Without that, each of its calls would be of an epoch that is over, for ever."""
    cluster = StepwiseCluster()
    first, second, third = cluster.group("trainer", 3)
    cluster.run()
    first.worker.disconnect()
    third.worker.crash()
    cluster.run()
    newcomer = cluster.handle("spare", "trainer", 2, 3)
    cluster.run()
    first.worker.connect()
    cluster.run()
    calls = [handle.publish(1) for handle in (first, second, newcomer)]
    cluster.run()
    assert [call.number for call in calls] == [1, 1, 1]


def test_a_changed_epoch_ends_the_calls_of_the_old_one() -> None:
    cluster = StepwiseCluster()
    first, second = cluster.group("trainer", 2)
    cluster.run()
    asked = first.publish(1)
    cluster.run()
    second.close()
    cluster.run()
    with pytest.raises(GroupAborted, match="rank 1 of group 'trainer' was closed"):
        _ = asked.number


@pytest.mark.parametrize(
    ("rank", "world_size", "text"),
    [
        (2, 2, "rank 2 does not exist in a group of 2"),
        (1, 3, "has 2 ranks, not 3: give every rank the same world_size"),
    ],
)
def test_registrations_that_do_not_fit(rank: int, world_size: int, text: str) -> None:
    cluster = StepwiseCluster()
    cluster.handle("t0", "trainer", 0, 2)
    cluster.run()
    odd = cluster.handle("t1", "trainer", rank, world_size)
    cluster.run()
    assert isinstance(odd.registration_error, RegistrationError)
    assert text in str(odd.registration_error)


# -- what a peer must not do


def answers(cluster: StepwiseCluster, session: int, *messages: object) -> list[object]:
    found: list[object] = []
    for message in messages:
        for action in cluster.coordinator.step(Received(session, message), cluster.now):  # type: ignore[arg-type]
            if isinstance(action, Send | CloseSession) and action.session == session:
                found.append(action.message if isinstance(action, Send) else action.reason)
    return found


def test_a_lost_incarnation_is_sent_away() -> None:
    cluster = StepwiseCluster()
    join = Join("x", Location(), (), 1, 0)
    cluster.coordinator.step(Connected(77, "x.1", "worker"), 0.0)
    said = answers(cluster, 77, join, Heartbeat(3), Leave("bye"))
    assert said[1] == HeartbeatAck(3, cluster.now)
    assert isinstance(said[2], Dismissed)
    cluster.coordinator.step(Connected(78, "x.1", "worker"), 0.0)
    again = answers(cluster, 78, join)
    assert again == [
        Dismissed("this incarnation was lost; come back as a new one"),
        "lost incarnation",
    ]


def test_memory_that_serves_no_reader_wakes_no_call_when_it_comes_and_goes(
    looked: list[Operation],
) -> None:
    hall = Hall()
    hall.connect(1)
    hall.register(1, "a")
    key = OpKey("m", "a", hall.core.cluster.models["m"].groups["a"].epoch, 0)
    call = (OpKind.REPLICATE, "available", None, 1, False, False, 1000.0)
    hall.say(1, Fill(key, 0, "a", *call))
    assert key in hall.core.cluster.models["m"].waiting.flexible
    looked.clear()
    hall.reader(2)
    hall.fetches(2, "f")
    hall.say(2, Deregister(99, "read-only-f", True))
    assert not looked
    assert key in hall.core.cluster.models["m"].waiting.flexible


def test_what_a_lost_worker_still_says_over_its_connection_is_not_heard() -> None:
    hall = Hall()
    hall.connect(1)
    hall.say(1, Leave("bye"))
    assert hall.register(1, "late") is None
    assert not hall.core.cluster.members


def test_what_a_worker_has_not_announced_a_lease_after_its_return_it_has_closed() -> None:
    hall = Hall()
    hall.arrives(1, "worker", "tcp")
    for name in ("kept", "closed"):
        hall.register(1, name)
    hall.arrives(2, "worker", "tcp")
    hall.register(2, "kept")
    for seconds, left in ((LEASE_S - 0.5, {"kept", "closed"}), (0.5, {"kept"})):
        hall.wait(seconds, beating=(2,))
        hall.step(Silent((2,)))  # nothing that it has said lies unread
        assert set(hall.core.cluster.members) == left


@pytest.mark.parametrize("host_bytes", [0, 1])
def test_that_a_worker_is_heard_again_is_news_for_models_of_others_if_it_may_take_copies(
    host_bytes: int,
) -> None:
    hall = Hall()
    hall.connect(1)
    hall.register(1, "a")
    hall.step(Connected(2, "life2", "worker"))
    hall.say(2, Join("w2", Location(), (), 1, host_bytes))
    hall.wait(LEASE_S * 3 / 4, beating=(1,))
    hall.step(Received(2, Heartbeat(1)))
    noted = hall.core.cluster.noted
    assert any(isinstance(each, Model) for each in noted) is bool(host_bytes)


def test_another_holder_is_asked_for_digests_at_once_when_the_one_that_was_asked_is_closed() -> (
    None
):
    cluster, (trainer, *copies, reader) = with_digests("one", "two", "reader")
    for copy in copies:
        copy.replicate()
        cluster.run()
    trainer.unpublish()
    cluster.run()
    cluster.coordinator.cluster.forget_list(list_of(cluster))
    asked = reader.replicate()
    cluster.run(Choice("read", reader.name))
    assert asked.key is not None
    tell_it(cluster, reader, Prepared(asked.key, 0, b"another root"))
    (first,) = list_of(cluster).asked
    (second,) = {copy.id for copy in copies} - {first}
    (closed,) = (copy for copy in copies if copy.id == first)
    tell_it(cluster, closed, Deregister(99, first, True))
    assert list(list_of(cluster).asked) == [second]


def test_an_announced_content_of_another_world_size_is_ordered_out() -> None:
    """A peer that says nonsense must not break the coordinator."""
    cluster, trainer, _ = published()
    content = trainer.member.content
    assert content is not None
    cluster.coordinator.step(Connected(77, "x.1", "worker"), 0.0)
    register = Register(
        1,
        "odd",
        "actor",
        "odd",
        1,
        1,
        2,
        True,
        False,
        *DEVICE,
        "",
        8192,
        2,
        MANIFEST.encode(),
        content.held(told=True),
    )
    said = answers(cluster, 77, Join("x", Location(), (), 1, 0), register)
    assert getattr(said[1], "keep", None) is False
    cluster.coordinator.check_invariants()


def test_handles_states_are_shown() -> None:
    cluster, trainer, _ = published()
    assert trainer.member.state is HandleState.READY
    assert repr(trainer.member) == "<Member actor/trainer[0] ready idle>"
    assert "workers=2 models=1 operations=0 leases=0" in repr(cluster.coordinator)


def asked_for_manifests(cluster: StepwiseCluster) -> list[str]:
    """The workers that the coordinator has asked, since this was called last."""
    asked = [line.split()[1] for line in cluster.log if " RegisterAgain " in f"{line} "]
    cluster.log.clear()
    return asked


def test_a_manifest_is_told_by_who_comes_first_and_named_by_all_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration_session, "TOLD_UNASKED_BYTES", 0)
    cluster, trainer, reader = published()
    assert asked_for_manifests(cluster) == ["trainer"]
    asked = reader.replicate()
    late = cluster.handle("late")
    cluster.run()
    assert asked.number == 1
    assert late.replicate() is not None
    cluster.run()
    assert late.member.version == 1
    assert asked_for_manifests(cluster) == []
    kept = cluster.coordinator.cluster
    assert kept.manifests.nbytes == len(MANIFEST.encode())
    # counted as if each had told it
    assert set(kept.manifest_bytes.values()) == {len(MANIFEST.encode())}
    trainer.worker.disconnect()
    trainer.worker.connect()
    cluster.run()
    assert asked_for_manifests(cluster) == []
    assert trainer.member.version == 1


def test_a_coordinator_that_has_restarted_asks_for_manifests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(registration_session, "TOLD_UNASKED_BYTES", 0)
    cluster, trainer, reader = published()
    reader.replicate()
    cluster.run()
    cluster.log.clear()
    cluster.restart()
    reader.worker.connect()
    cluster.run()
    assert asked_for_manifests(cluster) == ["reader"]
    trainer.worker.connect()
    late = cluster.handle("late")
    cluster.run()
    assert asked_for_manifests(cluster) == []
    asked = late.replicate()
    cluster.run()
    assert asked.number == 1
    assert (trainer.member.version, reader.member.version) == (1, 1)
    cluster.check_agreement()
