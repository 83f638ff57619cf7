"""Handing over: copies in host memory that let a last holder go, who makes them, and when they are
dropped (R4, R5, G5).
"""

from __future__ import annotations

from collections import Counter

import pytest

from tensorhub.coordinator import handovers
from tensorhub.coordinator.entities import Member
from tensorhub.coordinator.retention import Retentions
from tensorhub.errors import RetentionError
from tensorhub.messages import MakeCopy
from tensorhub.testing import CHUNK_BYTES, CHUNKS, SimHandle, StepwiseCluster
from tensorhub.types import HandleState, Location, Purpose
from tensorhub.worker.calls import CloseCall, ReleaseCall
from tests.coordinator.test_retention import ends, model_of, publish, republish

ROOM = CHUNKS * CHUNK_BYTES  # for one copy


def cluster_of(
    *more: str, room: tuple[str, ...] = (), latest: int = 1, spot: bool = False
) -> tuple[StepwiseCluster, SimHandle]:
    """The trainer, and others, who are registered if their name does not begin with a dash. Those
    in `room` take a copy.
    """
    cluster = StepwiseCluster()
    for name in ("trainer", *more):
        cluster.host_bytes = ROOM if name.lstrip("-") in room else 0
        if name.startswith("-"):
            cluster.worker(name[1:])
        else:
            cluster.handle(name, spot=spot and name == "trainer")
    trainer = cluster.workers["trainer"].handles[0]
    publish(cluster, trainer, latest=latest)
    return cluster, trainer


def copies(cluster: StepwiseCluster) -> dict[str, int]:
    """The version that each worker's copy holds."""
    held = [member for member in model_of(cluster).copies.values() if member.holding is not None]
    return {member.worker.name: number_of(member) for member in held}


def number_of(member: Member) -> int:
    assert member.holding is not None
    return member.holding.version.number


def questions(readers: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How often it is asked whether a holder, or a group, could keep a version, while so many spot
    readers take it.
    """
    cluster, _ = cluster_of()
    cluster.host_bytes = ROOM - 1  # too little for a copy
    spot = [cluster.handle(f"spot{number}", spot=True) for number in range(readers)]
    cluster.run()
    for reader in spot[1:]:
        reader.replicate()
    cluster.run()
    asked = Counter[str]()

    def counted(owner: object, name: str) -> None:
        before = getattr(owner, name)

        def ask(*arguments: object) -> bool:
            asked[name] += 1
            return bool(before(*arguments))

        monkeypatch.setattr(owner, name, ask)

    counted(Retentions, "may_count")
    counted(handovers, "_could_take")
    spot[0].replicate()
    cluster.run()
    monkeypatch.undo()
    return asked["may_count"], asked["_could_take"]


def test_however_many_spot_holders_there_are_nobody_looks_at_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert questions(9, monkeypatch) == questions(2, monkeypatch)


def asked_for(cluster: StepwiseCluster) -> list[str]:
    """Whom the coordinator has asked to make a copy, in order."""
    return [line.split()[1] for line in cluster.log if "<- MakeCopy" in line]


def still_there(cluster: StepwiseCluster, number: int = 1) -> bool:
    """Whether somebody who comes now gets that version."""
    name = f"late{next(cluster.numbers)}"
    late = cluster.handle(name)
    cluster.run()
    asked = late.replicate(number)
    cluster.run()
    got = asked.has_ended() and asked.error is None
    late.worker.crash()
    cluster.advance(11)
    return got


# --------------------------------------------------------------------------------------------------
# unpublish, update


@pytest.mark.parametrize("room", [("trainer", "other"), ("other",)])
def test_unpublish_hands_over_to_the_workers_own_memory_first(room: tuple[str, ...]) -> None:
    cluster, trainer = cluster_of("reader", "-other", room=room)
    ends(cluster, trainer.unpublish())
    assert copies(cluster) == {room[0]: 1}
    assert still_there(cluster)
    cluster.check_agreement()


def test_without_room_it_is_refused_at_its_deadline() -> None:
    cluster, trainer = cluster_of("reader")
    asked = trainer.unpublish()
    cluster.advance(61)
    assert isinstance(asked.error, RetentionError)
    assert "give workers host_memory_bytes for a copy" in str(asked.error)
    assert trainer.member.version == 1


def test_the_nearest_worker_takes_it() -> None:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.handle("reader")
    cluster.host_bytes = 4 * ROOM
    cluster.worker("far", Location("elsewhere", "", "far"))
    cluster.host_bytes = ROOM
    cluster.worker("near")
    publish(cluster, trainer)
    ends(cluster, trainer.unpublish())
    assert copies(cluster) == {"near": 1}


def test_each_shard_is_handed_over() -> None:
    cluster = StepwiseCluster(host_bytes=ROOM)
    trainers = cluster.group("trainer", 2)
    cluster.group("reader", 2)
    publish(cluster, *trainers)
    assert copies(cluster) == {}
    ends(cluster, *[handle.unpublish() for handle in trainers])
    assert copies(cluster) == {"trainer0": 1, "trainer1": 1}
    assert {m.shard for m in model_of(cluster).copies.values()} == {0, 1}


@pytest.mark.parametrize("rank", [0, 1])
def test_for_one_rank_that_leaves_every_shard_is_handed_over_once(rank: int) -> None:
    """A copy of a shard whose rank stays is needed as well: it stops to serve with the first of its
    replica that leaves.
    """
    cluster = StepwiseCluster()
    trainers = cluster.group("trainer", 2)
    cluster.host_bytes = ROOM
    for name in ("one", "other"):
        cluster.worker(name)
    publish(cluster, *trainers)
    asked = trainers[rank].unpublish()
    ends(cluster, asked)
    assert copies(cluster) == {"one": 1, "other": 1}
    assert len(asked_for(cluster)) == 2
    cluster.check_agreement()


@pytest.mark.parametrize("alone", [True, False])
def test_a_copy_of_its_own_shard_lets_only_a_group_of_one_go_unasked(alone: bool) -> None:
    """With the first rank that leaves the others' shards stop to serve, and it does not know who
    holds those.
    """
    cluster = StepwiseCluster(host_bytes=ROOM)
    handles = [cluster.handle("first", "g", 0, 1 if alone else 2)]
    cluster.host_bytes = 0
    if not alone:
        handles.append(cluster.handle("second", "g", 1, 2))
    publish(cluster, *handles)
    assert copies(cluster) == {"first": 1}
    handles[0].worker.disconnect()
    asked = handles[0].unpublish(5.0)
    cluster.advance(6)
    assert (asked.has_ended() and asked.error is None) is alone
    assert (handles[0].member.version is None) is alone
    assert isinstance(asked.error, RetentionError | None)


def test_what_is_prefetched_and_has_to_stay_is_no_room_for_another_version() -> None:
    """Else each of the two is copied to where the other one is, which has to go from there first
    (seed 1002498).
    """
    cluster, trainer = cluster_of("one", "two", room=("one", "two"), latest=2)
    one, two = (cluster.workers[name].handles[0] for name in ("one", "two"))
    for number, reader in ((1, one), (2, two)):
        if number > 1:
            trainer.publish(number)
            cluster.run()
        reader.prefetch()
        cluster.run()
        ends(cluster, trainer.unpublish())
    (copy,) = (handle for handle in one.worker.handles if handle.shard.purpose is Purpose.PREFETCH)
    asked = copy.call(ReleaseCall())
    cluster.run()
    assert not model_of(cluster).handovers
    assert two.worker.handles[1].member.state is HandleState.READY, "it was not asked to go"
    cluster.advance(61)
    assert isinstance(asked.error, RetentionError)
    assert still_there(cluster)


def test_an_update_hands_over_before_its_first_byte() -> None:
    cluster, trainer = cluster_of("other", room=("trainer",), latest=2)
    other = cluster.workers["other"].handles[0]
    other.publish(2)
    cluster.run()
    asked = trainer.update("latest", hold=True)
    cluster.run()
    assert asked.number == 2
    assert copies(cluster) == {"trainer": 1}
    assert still_there(cluster)


def test_of_two_who_update_at_once_the_last_hands_over() -> None:
    cluster, trainer = cluster_of("one", "two", room=("one", "two"), latest=2)
    one, two = (cluster.workers[name].handles[0] for name in ("one", "two"))
    for handle in (one, two):
        handle.replicate()
        cluster.run()
    ends(cluster, trainer.unpublish())
    trainer.publish(2)
    cluster.run()
    calls = [handle.update("latest") for handle in (one, two)]
    cluster.run()
    assert [asked.number for asked in calls] == [2, 2]
    assert list(copies(cluster).values()) == [1]
    assert still_there(cluster)


# --------------------------------------------------------------------------------------------------
# close


def test_close_hands_over_to_another_process() -> None:
    cluster, trainer = cluster_of("reader", "-other", room=("trainer", "other"))
    ends(cluster, trainer.close())
    assert copies(cluster) == {"other": 1}
    trainer.worker.crash()
    cluster.advance(11)
    assert still_there(cluster)


def test_close_does_not_count_on_its_own_process() -> None:
    cluster, trainer = cluster_of(room=("trainer",))
    assert copies(cluster) == {"trainer": 1}  # made in the background: nobody else could take it
    asked = trainer.close()
    cluster.advance(61)
    assert isinstance(asked.error, RetentionError)
    ends(cluster, trainer.close(abandon=True))


def test_a_worker_with_a_byte_too_little_is_not_asked_for_a_copy() -> None:
    cluster = StepwiseCluster(host_bytes=ROOM - 1)
    trainer = cluster.handle("trainer")
    publish(cluster, trainer)
    assert asked_for(cluster) == []


def test_a_worker_that_may_end_or_has_the_copy_is_not_asked_for_it() -> None:
    cluster = StepwiseCluster(host_bytes=2 * ROOM)
    trainer = cluster.handle("trainer")
    publish(cluster, trainer)
    assert asked_for(cluster) == ["trainer"]
    trainer.close()
    cluster.run()
    assert asked_for(cluster) == ["trainer"]


def test_with_its_last_handle_a_worker_hands_its_copies_over_too() -> None:
    cluster = StepwiseCluster(host_bytes=2 * ROOM)
    trainer = cluster.handle("trainer")
    publish(cluster, trainer, latest=2)
    for number in (2, 3):
        republish(cluster, trainer, number)
    cluster.host_bytes = ROOM
    cluster.worker("other")
    # the one before last's memory was not given back when the last one was ordered first
    cluster.advance(2)
    assert sorted(m.worker.name for m in model_of(cluster).copies.values()) == [
        "trainer",
        "trainer",
    ]
    asked = trainer.close()
    cluster.advance(61)
    assert isinstance(asked.error, RetentionError)  # there is room for one of the two only
    cluster.worker("third")
    cluster.run()
    ends(cluster, trainer.close())
    assert sorted(number for name, number in copies(cluster).items() if name != "trainer") == [2, 3]
    cluster.host_bytes = 0  # of whoever looks: it takes nothing over
    trainer.worker.crash()
    cluster.advance(11)
    assert still_there(cluster, 2)
    assert still_there(cluster, 3)


def test_two_that_close_at_the_same_time_do_not_count_on_one_another() -> None:
    """One holds the version, the last handle of the other's process holds nothing, and its host
    memory has the version.
    """
    cluster, trainer = cluster_of("reader", room=("trainer",))
    (reader,) = cluster.workers["reader"].handles
    cluster.run()
    trainer.unpublish()
    cluster.run()
    assert copies(cluster) == {"trainer": 1}
    reader.replicate()
    cluster.run(until=lambda: reader.member.state is HandleState.READY)
    for handle in (trainer, reader):
        handle.close(60.0)
    cluster.advance(61)
    closed = [handle for handle in (trainer, reader) if handle.member.state is HandleState.CLOSED]
    assert len(closed) == 1
    closed[0].worker.crash()  # it is not missed
    cluster.advance(11)
    assert still_there(cluster)


def test_a_closing_holder_that_is_rolled_back_waits_for_nothing() -> None:
    """What it held is ordered out; the copies of its worker are not what it waits for any more
    (seed 10151).
    """
    cluster = StepwiseCluster(host_bytes=2 * ROOM)
    trainer = cluster.handle("trainer")
    publish(cluster, trainer, latest=2)
    republish(cluster, trainer, 2)
    asked = trainer.call(CloseCall())  # its shell did not set them aside
    cluster.run()
    assert not asked.has_ended()
    trainer.worker.asks.rollback(1)
    ends(cluster, asked)


def test_ranks_that_close_do_not_count_on_one_another() -> None:
    cluster = StepwiseCluster(host_bytes=ROOM)
    trainers = cluster.group("trainer", 2)
    for name in ("one", "two"):
        cluster.worker(name)
    publish(cluster, *trainers)
    ends(cluster, *[handle.close() for handle in trainers])
    assert {"one", "two"} <= set(copies(cluster))


# --------------------------------------------------------------------------------------------------
# what goes wrong


def test_a_successor_that_refuses_is_followed_by_another() -> None:
    cluster, trainer = cluster_of("reader", "-other", room=("trainer", "other"))
    trainer.worker.copies_refused = 1
    ends(cluster, trainer.unpublish())
    assert asked_for(cluster) == ["trainer", "other"]


def test_the_only_one_that_could_is_asked_again_after_a_while() -> None:
    cluster, trainer = cluster_of("reader", "-other", room=("other",))
    cluster.workers["other"].copies_refused = 3
    asked = trainer.unpublish()
    cluster.run()
    assert asked_for(cluster) == ["other"]
    cluster.advance(6)
    assert not asked.has_ended()  # after 1, 2 and 4 seconds
    cluster.advance(2)
    ends(cluster, asked)
    assert asked_for(cluster) == ["other"] * 4


def test_a_spot_worker_takes_nothing_over() -> None:
    cluster, trainer = cluster_of("reader", "-other", room=("other",))
    cluster.workers["other"].register("spot", spot=True)
    cluster.run()
    asked = trainer.unpublish()
    cluster.run()
    assert not asked.has_ended()
    assert asked_for(cluster) == []


def test_a_successor_that_dies_is_followed_by_another() -> None:
    cluster, trainer = cluster_of("reader", "-one", "-two", room=("one", "two"))
    asked = trainer.unpublish()
    cluster.run(until=lambda: asked_for(cluster))
    (first,) = asked_for(cluster)
    cluster.workers[first].crash()
    cluster.run()
    assert not asked.has_ended()
    cluster.advance(11)
    ends(cluster, asked)
    assert sorted(asked_for(cluster)) == ["one", "two"]
    assert copies(cluster) == {"two" if first == "one" else "one": 1}


@pytest.mark.parametrize("when", ["asked", "filling"])
def test_a_successor_that_was_away_goes_on(when: str) -> None:
    cluster, trainer = cluster_of("reader", "-other", room=("other",))
    other = cluster.workers["other"]
    asked = trainer.unpublish()
    cluster.run(
        until=lambda: (
            model_of(cluster).handovers
            and (when != "filling" or any(h.pull for h in other.handles))
        )
    )
    other.disconnect()
    cluster.run()
    other.connect()
    ends(cluster, asked)
    assert copies(cluster) == {"other": 1}


def test_one_that_makes_no_progress_is_given_up() -> None:
    cluster, trainer = cluster_of("reader", "-one", "-two", room=("one", "two"))
    asked = trainer.unpublish(timeout_s=200)
    cluster.run(
        until=lambda: any(
            w.handles and w.handles[0].pull
            for w in (cluster.workers["one"], cluster.workers["two"])
        )
    )
    (first,) = asked_for(cluster)
    slow = cluster.workers[first].handles[0]

    def run() -> None:
        cluster.run(("read", slow.name))

    for _ in range(70):
        cluster.advance(1, run=False)
        run()
    ends(cluster, asked)
    assert len(asked_for(cluster)) == 2


def test_a_copy_of_which_nothing_is_heard_has_the_time_of_two_calls() -> None:
    """For its registration, and then for its fill."""
    cluster, trainer = cluster_of("reader", "-one", "-two", room=("one", "two"))
    under_way = model_of(cluster).handovers
    asked = trainer.unpublish(timeout_s=300)
    cluster.run(until=lambda: under_way)
    (first,) = under_way.values()
    link = cluster.workers[first.worker.name].link
    assert link is not None
    link.down = type(link.down)(each for each in link.down if not isinstance(each, MakeCopy))
    cluster.advance(2 * cluster.options.op_timeout_s - 0.1)
    assert list(under_way.values()) == [first]
    cluster.advance(0.1)
    ends(cluster, asked)
    assert copies(cluster) == {"two" if first.worker.name == "one" else "one": 1}


def test_two_last_holders_with_one_place_for_a_copy() -> None:
    cluster, trainer = cluster_of("reader", "-other", room=("other",))
    reader = cluster.workers["reader"].handles[0]
    reader.replicate()
    cluster.run()
    ends(cluster, *[handle.close() for handle in (trainer, reader)])
    assert asked_for(cluster) == ["other"]
    assert still_there(cluster)


# --------------------------------------------------------------------------------------------------
# in the background


def test_a_copy_is_made_at_publish_where_nobody_else_could_take_the_version() -> None:
    cluster, trainer = cluster_of(room=("trainer",))
    assert copies(cluster) == {"trainer": 1}
    before = len(cluster.log)
    ends(cluster, trainer.unpublish())
    assert not any("MakeCopy" in line for line in cluster.log[before:])
    trainer.publish(2)
    cluster.advance(2)  # its first order comes before the other's memory is given back
    assert copies(cluster) == {"trainer": 2}  # in the place of the first
    cluster.check_agreement()


def test_what_spot_workers_hold_is_copied_to_one_that_is_not() -> None:
    cluster, trainer = cluster_of("-other", room=("trainer", "other"), spot=True)
    assert copies(cluster) == {"other": 1}
    trainer.worker.crash()
    cluster.advance(11)
    assert still_there(cluster)


def test_no_copy_is_made_where_others_can_take_it_or_nothing_is_retained() -> None:
    cluster, _ = cluster_of("reader", room=("trainer", "reader"))
    assert asked_for(cluster) == []
    cluster, trainer = cluster_of(room=("trainer",), latest=0)
    ends(cluster, trainer.unpublish())
    assert asked_for(cluster) == []


# --------------------------------------------------------------------------------------------------
# their end


@pytest.mark.parametrize("how", ["lower", "newer", "roll back"])
def test_a_copy_of_what_is_not_retained_any_more_is_dropped(how: str) -> None:
    cluster, trainer = cluster_of(room=("trainer",))
    ends(cluster, trainer.unpublish())
    if how == "lower":
        trainer.worker.asks.retain(0)
    elif how == "newer":
        trainer.publish(2)
    else:
        trainer.worker.asks.rollback(0)
    cluster.run()
    assert 1 not in copies(cluster).values()
    assert [
        h
        for h in trainer.worker.handles
        if h.shard.purpose is Purpose.RETENTION and h.member.version == 1
    ] == []
    cluster.check_agreement()


def test_a_copy_that_others_keep_is_dropped_and_its_readers_are_moved() -> None:
    cluster, trainer = cluster_of("keeper", "-other", room=("other",))
    ends(cluster, trainer.unpublish())
    assert copies(cluster) == {"other": 1}
    keeper = cluster.workers["keeper"].handles[0]
    keeper.replicate()
    cluster.run()
    assert keeper.member.version == 1
    assert copies(cluster) == {}
    assert cluster.workers["other"].handles == []
    cluster.check_agreement()


def test_a_copy_is_dropped_with_the_refusal_of_the_leave_that_it_was_made_for() -> None:
    """One of two shards was copied when the deadline came: who wanted to leave stays."""
    cluster = StepwiseCluster()
    trainers = cluster.group("trainer", 2)
    cluster.host_bytes = ROOM
    cluster.worker("one")
    publish(cluster, *trainers)
    asked = trainers[0].unpublish()
    cluster.run()
    assert copies(cluster) == {"one": 1}
    cluster.advance(61)
    assert isinstance(asked.error, RetentionError)
    # the other shard was copied
    assert "(group 'trainer', rank 1) is among its last" in str(asked.error)
    refused = next(number for number, line in enumerate(cluster.log) if "<- Refused" in line)
    # what one step says
    assert "one <- DropCopy" in "".join(cluster.log[refused - 1 : refused + 2])
    assert copies(cluster) == {}


def test_a_copy_that_was_told_over_a_lost_connection_that_it_is_not_needed_is_told_again() -> None:
    cluster, trainer = cluster_of("keeper", "-other", room=("other",))
    ends(cluster, trainer.unpublish())
    (copy,) = model_of(cluster).copies.values()
    cluster.workers["keeper"].handles[0].replicate()
    cluster.run(until=lambda: copy.dropped)
    cluster.workers["other"].disconnect()
    cluster.run()
    assert copies(cluster) == {"other": 1}
    cluster.workers["other"].connect()
    cluster.run()
    assert copies(cluster) == {}
    assert cluster.workers["other"].handles == []


def test_a_copy_that_is_needed_again_when_it_asks_for_its_leave_stays() -> None:
    cluster, trainer = cluster_of("keeper", "-other", room=("other",))
    ends(cluster, trainer.unpublish())
    keeper = cluster.workers["keeper"].handles[0]
    keeper.replicate()
    cluster.run(until=lambda: any("<- DropCopy" in line for line in cluster.log))
    keeper.worker.crash()
    cluster.run("up")
    cluster.run()
    assert copies(cluster) == {"other": 1}
    cluster.advance(61)
    assert copies(cluster) == {"other": 1}
    (copy,) = cluster.workers["other"].handles
    assert copy.member.state is HandleState.READY
    assert still_there(cluster)
    cluster.handle("late").replicate()
    cluster.run()
    assert copies(cluster) == {}  # as it was not told for good


def test_a_copy_is_kept_through_a_restart_of_the_coordinator() -> None:
    cluster, trainer = cluster_of(room=("trainer",))
    ends(cluster, trainer.unpublish())
    cluster.restart()
    cluster.workers["trainer"].connect()
    cluster.run()
    assert copies(cluster) == {"trainer": 1}
    assert still_there(cluster)


def test_a_copy_that_was_being_made_when_the_coordinator_died_is_made_anew() -> None:
    cluster, trainer = cluster_of("reader", "-other", room=("other",))
    asked = trainer.unpublish()
    other = cluster.workers["other"]
    cluster.run(until=lambda: other.handles and other.handles[0].pull is not None)
    cluster.restart()
    for worker in cluster.workers.values():
        worker.connect()
    cluster.advance(2)  # its first order comes before the other's memory is given back
    ends(cluster, asked)
    assert len(other.handles) == 1
    assert copies(cluster) == {"other": 1}
    cluster.check_agreement()


def test_who_becomes_the_last_handle_while_it_closes_hands_its_workers_copies_over_too() -> None:
    """The close did not begin with the copies: there was another handle then, which was given up
    meanwhile.
    """
    cluster = StepwiseCluster(host_bytes=2 * ROOM)
    trainer = cluster.handle("trainer")
    other = cluster.handle("trainer", "second")
    publish(cluster, trainer, latest=2)
    for number in (2, 3):
        republish(cluster, trainer, number)
    assert copies(cluster) == {"trainer": 2}
    asked = trainer.close(60.0)
    cluster.run()
    assert not asked.done  # version 3 has to stay
    other.close(60.0, abandon=True)
    cluster.run()
    assert other.member.state is HandleState.CLOSED
    cluster.host_bytes = ROOM
    cluster.worker("roomy")
    cluster.advance(61)
    assert trainer.member.state is HandleState.CLOSED
    assert isinstance(asked.error, RetentionError)  # there is room for one of the three only
    assert still_there(cluster, 2)
    assert still_there(cluster, 3)
