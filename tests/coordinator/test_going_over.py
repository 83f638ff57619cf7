"""What a running call has read of its version is gone, and the version can be read in another way: its ranks call again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tensorhub.messages import Begun, Fill, Outcome, Start, Write
from tensorhub.types import Endpoint, OpKey, OpKind
from tests.coordinator.layout_world import LEASE_S, Rank, World, root
from tests.coordinator.test_bridges import A, B, cut, finish, published
from tests.coordinator.test_layouts_over_time import back, held_by
from tests.coordinator.test_origins import OF_R, held, leave, reader_of


def readers(world: World, name: str = "s", ranks: int = 1, *, ready: int | None = None, number: int = 1) -> list[Rank]:
    """A group of a third layout that reads what was published; so many of its ranks are ready."""
    found = world.group(name, [(f"own/{name}{rank}", ()) for rank in range(ranks)])
    world.fill(found, number)
    for rank in found[:ready]:
        world.ready(rank, A, B)
    return found


def call_again(world: World, ranks: Sequence[Rank]) -> OpKey:
    """All of them, each under the next key, as they are told to."""
    info, key = world.version.info, world.key(ranks[0])
    for rank in ranks:
        (outcome,) = rank.take(Outcome)
        assert (outcome.committed, outcome.again) == (False, True)
        assert outcome.key.sequence + 1 == key.sequence
        rank.generation += 1
        begun = Begun(outcome.key, info.version, info.content_id, "", False, anew=True)
        call = (OpKind.UPDATE, info.version, None, rank.generation, False, False, 1000.0, (outcome.key,), begun)
        world.say(rank, Fill(key, rank.rank, rank.name, *call))
    return key


def is_told_to_go_over(ranks: Sequence[Rank]) -> bool:
    found = [rank.take(Outcome) for rank in ranks]
    assert len({len(each) for each in found}) == 1
    return [outcome.again for each in found for outcome in each] == [True] * len(ranks)


@pytest.mark.parametrize("ready", [0, 1, 2], ids=["nobody is ready", "one is ready", "all write"])
def test_the_publisher_leaves_on_purpose_and_all_ranks_go_over(ready: int) -> None:
    world, trainers, _ = held()
    ranks = readers(world, ranks=2, ready=ready)
    assert all(bool(rank.take(Write)) is (ready == 2) for rank in ranks)
    leave(world, *trainers)
    call_again(world, ranks)
    for rank in ranks:
        start = rank.take(Start)[-1]
        assert start.publication == reader_of(world, "own/r0")
        world.ready(rank, OF_R)
    for rank in ranks:
        (write,) = rank.take(Write)
        assert [(grant.source, grant.selection) for grant in write.grants] == [("r0", "all of it")]
        world.vote(rank, root(OF_R))
    world.tell(ranks[0], OF_R)
    assert [[outcome.committed for outcome in rank.take(Outcome)] for rank in ranks] == [[True]] * 2


def lose_in_mid_read(world: World, trainers: Sequence[Rank], ranks: Sequence[Rank]) -> None:
    """The publisher is lost, and its memory cannot be read any more."""
    world.lose(*trainers)
    assert not any(rank.take(Outcome) for rank in ranks)  # what a lost worker still serves is read on
    for rank in ranks:
        part = world.member(rank).part
        for lease in [] if part is None else list(part.leases.values()):
            if world.member(rank).part is part:  # else it has ended for all ranks
                world.lose_source(rank, lease)


def test_the_publisher_is_lost_and_its_readers_go_over_once_it_serves_no_more() -> None:
    world, trainers, _ = held()
    ranks = readers(world, ranks=2)
    lose_in_mid_read(world, trainers, ranks)
    call_again(world, ranks)
    world.ready(ranks[0], OF_R)
    world.ready(ranks[1], OF_R)
    assert [world.sources(rank) for rank in ranks] == [[("r0", "all of it", 0)]] * 2


def test_without_another_way_all_stays_as_it_is() -> None:
    world, trainers = published()
    (lost,) = readers(world, "l")
    lose_in_mid_read(world, trainers, [lost])
    assert not lost.take(Outcome)  # it waits for who may come back
    world, trainers = published()
    (left,) = readers(world, "l")
    leave(world, *trainers)
    (outcome,) = left.take(Outcome)
    assert outcome.error is not None
    assert (outcome.error.kind, outcome.again) == ("VersionUnavailable", False)
    assert "left on purpose" in outcome.error.message


def test_another_way_that_this_reader_cannot_read_is_none() -> None:
    world = World()
    world.endpoints = (Endpoint("tcp", "x"), Endpoint("nixl", "x"))
    trainers = world.group("t", [cut(0), cut(1)])
    world.publish(trainers, 1)
    world.endpoints = (Endpoint("nixl", "x"),)
    (has_all,) = world.group("r", [("own/r0", ())])
    world.fill([has_all])
    world.ready(has_all, A, B)
    finish(world, [has_all], trainers)
    world.endpoints = (Endpoint("tcp", "x"),)
    (reader,) = readers(world)
    leave(world, *trainers)
    (outcome,) = reader.take(Outcome)
    assert not outcome.again
    assert outcome.error is not None
    assert outcome.error.kind == "VersionUnavailable"


def test_the_published_layout_is_left_and_come_back_to() -> None:
    """Who has it reads selections where nobody holds it any more. Each change is the end of what was read."""
    world, trainers, (reader,) = held()
    copies = world.group("c", [cut(0), cut(1)])
    world.fill(copies, 1)
    assert all(not rank.take(Start)[-1].publication for rank in copies)
    leave(world, *trainers)
    call_again(world, copies)
    assert all(rank.take(Start)[-1].publication for rank in copies)
    for rank in copies:
        world.ready(rank, OF_R)
    world.publish(trainers, 2)
    assert not copies[0].take(Outcome)
    leave(world, reader)
    (outcome,) = copies[0].take(Outcome)
    assert not outcome.again  # of version 1 nothing is left


def test_in_its_first_lease_a_coordinator_waits_for_those_who_may_come_back() -> None:
    world, _, (reader,) = held()
    (other,) = readers(world)
    begun = world.operation(other)
    info, key, described = world.version.info, begun.key, world.version.holdings.described_as
    world = world.restarted()
    back(world, reader, held_by(reader, info))
    (late,) = world.group("s", [("own/s0", ())])
    late.generation = 5
    resume = Begun(key, info.version, info.content_id, "", True, described)
    call = (OpKind.UPDATE, "latest", None, 5, False, False, 1000.0, (key,), resume)
    world.say(late, Fill(world.key(late), 0, late.name, *call))
    assert not late.take(Outcome)
    world.pass_time(LEASE_S / 2)
    assert not late.take(Outcome)
    world.pass_time(2 * LEASE_S)
    assert is_told_to_go_over([late])


def test_who_is_not_ready_plans_on_until_it_is() -> None:
    """It is woken by its own word, and by nothing else: nobody looks for another way before."""
    world, trainers, _ = held()
    first, second = readers(world, ranks=2, ready=1)
    world.lose(*trainers)
    assert not first.take(Outcome)
    world.ready(second, A, B)
    assert is_told_to_go_over([first, second])


def test_available_goes_over_too() -> None:
    world, trainers, _ = held()
    (reader,) = world.group("s", [("own/s0", ())])
    world.fill([reader], "available")
    world.ready(reader, A, B)
    lose_in_mid_read(world, trainers, [reader])
    assert is_told_to_go_over([reader])
