"""Groups of several layouts over restarts, leaves, rollbacks and retention: none of them breaks or
loses a version.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.errors import RetentionError
from tensorhub.messages import (
    Describe,
    Description,
    Fill,
    Held,
    LeaveGranted,
    LeaveRequest,
    Outcome,
    Prepared,
    Refused,
    RegisterAgain,
    Registered,
    Retain,
    RetainedAck,
    Revoked,
    Rollback,
    SetRetained,
    Start,
    Write,
)
from tensorhub.messages.values import Begun
from tensorhub.model.digests import root_of
from tensorhub.model.manifest import id_of
from tensorhub.testing import CHUNKS
from tensorhub.types import OpKind, VersionInfo
from tests.coordinator.layout_world import LEASE_S, MANIFEST, Rank, World, lies_of, list_of, root
from tests.coordinator.test_bridges import A, B, cut, filling, finish, published


def held_by(rank: Rank, info: VersionInfo, *, is_publisher: bool = False) -> Held:
    """What it says after a restart."""
    part_ids = tuple(map(id_of, rank.parts if is_publisher else lies_of(rank)))
    what = (info.version, info.content_id, rank.generation, info.world_size, info.nbytes, b"")
    of = "" if is_publisher else rank.publication
    return Held(
        *what,
        published=is_publisher,
        manifest_id=id_of(MANIFEST),
        part_ids=part_ids,
        publication=of,
    )


def back(world: World, rank: Rank, held: Held | None) -> Rank:
    """The same rank at the next coordinator."""
    same = world.arrive(
        rank.group,
        rank.rank,
        rank.world_size,
        rank.layout_id,
        rank.parts,
        site=rank.site,
        registers=False,
    )
    same.generation, same.description = rank.generation, rank.description
    world.register(same, held, parts=(*rank.parts, *lies_of(rank)))
    return same


def test_after_a_restart_holders_of_each_layout_count_again() -> None:
    world, trainers = published()
    (reader,) = filling(world)
    finish(world, [reader], trainers)
    info = world.version.info
    world = world.restarted()
    reader = back(world, reader, held_by(reader, info))
    assert [answer.keep for answer in reader.take(Registered)] == [True]
    (layout,) = world.version.others.values()
    assert layout.have_sources()
    (late,) = world.group("late", [("own/r0", ())])
    world.fill([late])
    (start,) = late.take(Start)
    assert start.publication == world.version.holdings.described_as == reader.publication
    for trainer in trainers:
        back(world, trainer, held_by(trainer, info, is_publisher=True))
    world.ready(late, A, B)
    assert world.sources(late) == [("r0", "", 0)]
    (later,) = world.group("later", [("own/r0", ())])
    world.fill([later])
    world.ready(later, A, B)
    assert world.sources(later) == [("r0", "", 0)]


def test_a_rank_is_registered_without_its_mates_once_nobody_is_expected_back() -> None:
    world, trainers = published()
    readers = filling(world, ranks=2)
    finish(world, readers, trainers)
    info = world.version.info
    world = world.restarted()
    first = back(world, readers[0], held_by(readers[0], info))
    world.pass_time(LEASE_S / 2)
    assert not first.take(Registered)
    world.pass_time(LEASE_S)
    assert [answer.keep for answer in first.take(Registered)] == [True]
    back(world, readers[1], held_by(readers[1], info))
    assert first.take(RegisterAgain)


def test_who_names_the_root_of_what_was_published_counts_without_its_mates() -> None:
    """They may never come back, and it may have the last copy of its shard. (Seed 79.)"""
    world, trainers = published()
    copies = world.group("c", [cut(0), cut(1)])
    world.fill(copies)
    for trainer, copy, value in zip(trainers, copies, (b"a", b"b"), strict=True):
        world.tell(trainer, value=value)
        world.vote(copy, root=root_of(list_of(CHUNKS, value)))
    roots = [root_of(list_of(CHUNKS, value)) for value in (b"a", b"b")]
    as_read = [
        replace(held_by(copy, world.version.info, is_publisher=True), published=False)
        for copy in copies
    ]
    world = world.restarted()
    first = back(world, copies[0], replace(as_read[0], root=roots[0]))
    assert [answer.keep for answer in first.take(Registered)] == [True]
    assert world.version.holdings.of(0).sources
    second = back(world, copies[1], replace(as_read[1], root=roots[0]))  # not the root of its shard
    assert [answer.keep for answer in second.take(Registered)] == [False]
    world.register(second, replace(as_read[1], root=roots[1]))
    assert [answer.keep for answer in second.take(Registered)] == [True]
    assert not first.take(RegisterAgain)
    assert world.version.holdings.have_sources()


def test_a_rank_that_holds_nothing_any_more_need_not_wait_for_its_mates() -> None:
    world, trainers = published()
    readers = filling(world, ranks=2)
    finish(world, readers, trainers)
    info = world.version.info
    world = world.restarted()
    first = back(world, readers[0], held_by(readers[0], info))
    world.register(first)
    assert [answer.keep for answer in first.take(Registered)] == [True]


@pytest.mark.parametrize("first", ["publishers", "reader"])
def test_what_was_begun_under_a_former_coordinator_is_gone_on_with(first: str) -> None:
    """Publishers and readers may come back in either order."""
    world, trainers = published()
    (reader,) = filling(world)
    key, info = world.operation(reader).key, world.version.info
    world = world.restarted()

    def publishers_are_back() -> list[Rank]:
        return [back(world, each, held_by(each, info, is_publisher=True)) for each in trainers]

    if first == "publishers":
        trainers = publishers_are_back()
    reader = back(world, reader, None)
    begun = Begun(key, info.version, info.content_id, id_of(MANIFEST), True, reader.publication)
    call = (OpKind.UPDATE, "latest", None, reader.generation, False, False, 1000.0, (key,), begun)
    world.say(reader, Fill(world.key(reader), 0, reader.name, *call))
    if first == "reader":
        trainers = publishers_are_back()
    (start,) = reader.take(Start)
    assert (start.write, bool(start.publication)) == (False, True)
    world.ready(reader, A, B)
    (write,) = reader.take(Write)
    assert [grant.shard for grant in write.grants] == [0, 1]
    finish(world, [reader], trainers)


def retained(count: int) -> tuple[World, Rank, list[Rank]]:
    """A retained version of one trainer, and a group of another layout that has read it."""
    world, trainers = published(1)
    readers = [world.arrive("r", rank, count, f"own/r{rank}") for rank in range(count)]
    world.fill(readers)
    for reader in readers:
        world.ready(reader, A)
    finish(world, readers, trainers, [A])
    world.say(trainers[0], Retain(1, "m", 1))
    return world, trainers[0], readers


def acknowledge(world: World, rank: Rank) -> None:
    (told,) = rank.take(SetRetained)
    world.say(rank, RetainedAck(rank.name, told.content_id, True, told.seq))


def asks_to_leave(world: World, rank: Rank) -> bool:
    """Whether it may at once."""
    world.say(rank, LeaveRequest(7, rank.name, rank.generation, 3.0, False, False))
    return bool(rank.take(LeaveGranted))


def is_refused(world: World, rank: Rank) -> bool:
    world.pass_time(4.0)
    return [type(refused.error.error()) for refused in rank.take(Refused)] == [RetentionError]


@pytest.mark.parametrize("count", [1, 2])
def test_replicas_of_another_layout_keep_no_version(count: int) -> None:
    """Readers of every layout can read the published layout, and no reader of a third layout can
    read theirs.
    """
    world, trainer, readers = retained(count)
    assert not any(reader.take(SetRetained) for reader in readers)
    acknowledge(world, trainer)
    assert all(asks_to_leave(world, reader) for reader in readers)
    assert not asks_to_leave(world, trainer)
    assert is_refused(world, trainer)


def test_a_rollback_orders_out_holders_and_ends_readers_of_every_layout() -> None:
    world, trainers = published()
    (reader,) = filling(world)
    finish(world, [reader], trainers)
    (other,) = filling(world, "o")
    world.say(trainers[0], Rollback(1, "back", "m", 0))
    assert reader.take(Revoked)
    (outcome,) = other.take(Outcome)
    assert not outcome.committed
    assert not world.core.cluster.models["m"].versions
    assert world.core.cluster.selections == 0


def test_if_the_last_source_leaves_on_purpose_its_readers_end_unless_their_own_layout_has_it() -> (
    None
):
    world, trainers = published()
    (first,) = filling(world)
    finish(world, [first], trainers)
    (follower,) = filling(world, "f")
    (late,) = world.group("s", [("own/s", ())])
    world.fill([late], 1)
    world.ready(late, A, B)
    for trainer in trainers:
        world.leave(trainer)
    world.pass_time(10.0)
    for trainer in trainers:
        assert trainer.take(LeaveGranted)
        world.fenced(trainer)
    (outcome,) = late.take(Outcome)
    assert outcome.error is not None
    assert (outcome.error.kind, outcome.again) == ("VersionUnavailable", False)
    assert not follower.take(Outcome)
    finish(world, [follower])


def test_available_is_what_its_own_layout_has() -> None:
    world, trainers = published()
    (first,) = filling(world)
    finish(world, [first], trainers)
    world.lose(*trainers)
    (late,) = world.group("late", [("own/r0", ())])
    world.fill([late], "available")
    assert late.take(Start)
    world.lose(first)
    (strange,) = world.group("s", [("own/s", ())])
    world.fill([strange], "available")
    (outcome,) = strange.take(Outcome)
    assert outcome.error is not None
    assert "no complete copy" in outcome.error.message


@pytest.mark.parametrize("silent", [0, 1])
def test_available_is_what_has_each_class_with_somebody_who_is_heard_of(silent: int) -> None:
    world, trainers = published()
    world.cut_off(trainers[silent])
    (strange,) = world.group("s", [("own/s", ())])
    world.fill([strange], "available")
    assert not strange.take(Start)


def test_who_waits_is_woken_when_its_own_layout_has_it_again() -> None:
    world, trainers = published()
    holders = filling(world, ranks=2)
    finish(world, holders, trainers)
    others = filling(world, "y", ranks=2)
    world.lose(*trainers, holders[1])
    late = world.group("late", [("own/r0", ()), ("own/r1", ())])
    world.fill(late)
    assert not late[0].take(Start)
    finish(world, others)
    assert late[0].take(Start)


def test_the_views_show_the_layout_of_each_replica() -> None:
    world, trainers = published()
    (reader,) = filling(world)
    world.say(reader, Describe(7, "m"))
    (description,) = reader.take(Description)
    (model,) = description.models
    layouts = {replica.group: replica.layout_id for replica in model.replicas}
    assert layouts == {"t": world.version.layout_id, "r": "own/r0"}
    (shards,) = [replica.shards for replica in model.replicas if replica.group == "r"]
    assert [shard.chunks for shard in shards] == [5]
    assert trainers


def test_a_vote_of_an_operation_that_is_over_changes_nothing() -> None:
    world, trainers = published()
    (reader,) = filling(world)
    key = world.operation(reader).key
    finish(world, [reader], trainers)
    world.say(reader, Prepared(key, 0, b"", (root(A), root(B))))
    (layout,) = world.version.others.values()
    assert layout.have_sources()


def test_after_a_restart_equal_shards_stand_for_one_another_whichever_is_back_first() -> None:
    world = World()
    trainers = world.group("t", [(f"own/t{rank}", cut(0)[1]) for rank in range(2)])
    world.publish(trainers, 1)
    assert world.version.visible
    info, first = world.version.info, trainers[0]
    world = world.restarted()
    first = back(world, first, held_by(first, info, is_publisher=True))
    world.tell(first)
    second = back(world, trainers[1], held_by(trainers[1], info, is_publisher=True))
    world.pass_time(2 * LEASE_S)
    world.lose(second)
    (reader,) = filling(world, needs=(A,))
    assert world.sources(reader) == [("t0", A.selection, 0)]
