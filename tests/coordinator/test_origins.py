"""Versions that are read out of another layout than the published one: when, by whom, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.coordinator import ways
from tensorhub.coordinator.states import VersionState
from tensorhub.layouts.published import Published
from tensorhub.messages import GetPart, ManifestReply, Need, Outcome, Register, Registered, Start, Write
from tensorhub.model.manifest import id_of
from tensorhub.testing import CHUNKS
from tensorhub.types import Medium, Purpose
from tests.coordinator.layout_world import MANIFEST, NO_DIGESTS, Rank, World, lies_of, root
from tests.coordinator.test_bridges import A, B, cut, filling, finish, published
from tests.coordinator.test_layouts_over_time import back, held_by

OF_R = Need(0, "all of it", 4, 50)


def held(site: str = "here") -> tuple[World, list[Rank], list[Rank]]:
    """A published version, and a group of another layout that has read it."""
    world, trainers = published()
    readers = filling(world, site=site)
    finish(world, readers, trainers)
    return world, trainers, readers


def leave(world: World, *ranks: Rank) -> None:
    for rank in ranks:
        world.leave(rank)
        world.fenced(rank)


@pytest.mark.parametrize("group", ["a third one", "the published one"])
def test_who_has_read_it_is_read_when_its_publisher_has_left(group: str) -> None:
    world, trainers, (reader,) = held()
    leave(world, *trainers)
    assert world.version.state is VersionState.AVAILABLE
    ranks = world.group("x", [("own/x", ())] if group == "a third one" else [cut(0), cut(1)])
    world.fill(ranks)
    for rank in ranks:
        (start,) = rank.take(Start)
        world.say(rank, GetPart(7, start.publication))
        (reply,) = rank.take(ManifestReply)
        shards = (tuple(map(id_of, lies_of(reader))),)
        assert Published.decode(reply.manifest) == Published("xxh3-64", 2**28, shards, is_copy=True)
    for rank in ranks:
        world.ready(rank, OF_R)
    for rank in ranks:
        (write,) = rank.take(Write)
        assert [(each.source, each.selection, each.shard) for each in write.grants] == [("r0", "all of it", 0)]
    for rank in ranks:
        world.vote(rank, root(OF_R))
    world.tell(ranks[0], OF_R)
    assert all([outcome.committed for outcome in rank.take(Outcome)] == [True] for rank in ranks)
    assert not world.version.has_live_source()


def test_the_publisher_who_comes_back_to_its_own_layout_reads_it_from_others() -> None:
    world, trainers, _ = held()
    leave(world, *trainers)
    world.fill(trainers)
    for trainer in trainers:
        world.ready(trainer, OF_R)
    assert [world.sources(trainer) for trainer in trainers] == [[("r0", "all of it", 0)]] * 2


def test_what_was_published_is_read_while_it_is_there() -> None:
    world, trainers, _ = held()
    (start,) = begin(world, "x", "own/x").take(Start)
    assert start.publication == world.version.holdings.described_as
    (copies,) = [world.group("c", [cut(0), cut(1)])]
    world.fill(copies)
    (start,) = copies[0].take(Start)
    assert not start.publication
    assert trainers


def begin(world: World, group: str, layout_id: str, *, site: str = "here") -> Rank:
    (rank,) = world.group(group, [(layout_id, ())], site=site)
    world.fill([rank])
    return rank


def test_who_is_still_filled_is_no_origin() -> None:
    world, trainers = published()
    readers = filling(world)
    world.lose(*trainers)
    late = begin(world, "x", "own/x")
    assert not late.take(Start)
    assert readers
    assert world.version.state is VersionState.UNAVAILABLE


def test_beside_one_that_has_everything_nobody_who_is_still_filled_is_read_across_layouts() -> None:
    world = World(manifest=NO_DIGESTS)  # with digests nobody would read of it anyway: it vouches for nothing
    trainers = world.group("t", [cut(rank) for rank in range(2)])
    world.publish(trainers, 1)
    (reader,) = filling(world)
    world.vote(reader)
    leave(world, *trainers)
    (filled,) = world.group("f", [("own/r0", ())])
    world.fill([filled])
    world.ready(filled, A, B)
    assert world.sources(filled) == [("r0", "", 0)]
    for name in ("x", "y", "z"):
        late = begin(world, name, f"own/{name}")
        world.ready(late, replace(OF_R, selection=name, nbytes=2**40))
        assert world.sources(late) == [("r0", name, 0)]


def test_who_may_leave_some_unread_is_no_origin() -> None:
    world, trainers = published()
    reader = world.arrive("r", 0, 1, "own/r0", registers=False)
    reader.partial = True
    world.register(reader)
    world.fill([reader])
    world.ready(reader, A)
    finish(world, [reader], trainers[:1], [A])
    leave(world, *trainers)
    assert not begin(world, "x", "own/x").take(Start)
    assert world.version.state is VersionState.UNAVAILABLE


def reader_of(world: World, layout_id: str) -> str:
    (found,) = [layout.described_as for (of, _), layout in world.version.others.items() if of == layout_id]
    return found


def test_what_describes_an_origin_stays_as_long_as_somebody_has_read_from_it() -> None:
    world, trainers, (reader,) = held()
    leave(world, *trainers)
    late = begin(world, "x", "own/x")
    world.ready(late, OF_R)
    world.vote(late, root(OF_R))
    world.tell(late, OF_R)
    origin_id = reader_of(world, "own/r0")
    world.lose(reader)
    assert [layout.described_as for layout in world.version.described_as(origin_id)] == [origin_id]
    follower = begin(world, "y", "own/x")
    (start,) = follower.take(Start)
    assert start.publication == origin_id
    world.ready(follower, OF_R)
    assert world.sources(follower) == [("x0", "", 0)]
    world.lose(late, follower)
    assert not world.version.others
    assert not world.version.selections


def test_a_reader_whose_origin_leaves_on_purpose_takes_another_way() -> None:
    world, trainers, _ = held()
    filling(world, "x", site="there")
    (other,) = world.group("s", [("own/s", ())])
    world.fill([other])
    world.ready(other, A, B)
    leave(world, *trainers)
    (outcome,) = other.take(Outcome)
    assert outcome.again
    world.fill([other])
    (start,) = other.take(Start)[-1:]
    assert start.publication == reader_of(world, "own/r0")


def test_after_a_restart_an_origin_is_one_again_though_nobody_else_comes_back() -> None:
    world, _, (reader,) = held()
    info = world.version.info
    world = world.restarted()
    reader = back(world, reader, held_by(reader, info))
    assert [answer.keep for answer in reader.take(Registered)] == [True]
    assert world.version.state is VersionState.AVAILABLE
    trainers = world.group("t", [cut(0), cut(1)])
    world.fill(trainers)
    for trainer in trainers:
        world.ready(trainer, OF_R)
    assert [world.sources(trainer) for trainer in trainers] == [[("r0", "all of it", 0)]] * 2


def test_after_a_restart_what_describes_no_origin_is_not_believed() -> None:
    world, _, (reader,) = held()
    info = world.version.info
    world = world.restarted()
    same = world.arrive("r", 0, 1, "own/r0", registers=False)
    same.description = b"anything"
    said = replace(held_by(reader, info), publication=same.publication)
    world.register(same, said, parts=(*lies_of(reader), same.description))
    assert [answer.keep for answer in same.take(Registered)] == [False]


def test_who_reads_what_was_published_looks_at_no_other_way() -> None:
    world, _, _ = held()
    (copies,) = [world.group("c", [cut(0), cut(1)])]
    world.fill(copies)
    operation = world.operation(copies[0])
    assert ways.find(world.core.cluster, world.version, operation) == ways.Way(world.version.holdings, None)


def several(site: str = "here") -> tuple[World, list[Rank]]:
    """A group that lacks one of its two shards. The published layout has gone. "r" has it in another layout here, and "u" in
    the group's own, in that site.
    """
    world, trainers, _ = held()
    mine = filling(world, "s", ranks=2)
    finish(world, mine, trainers)
    finish(world, filling(world, "u", ranks=2, site=site))
    leave(world, *trainers, mine[1])
    return world, mine


def test_what_some_rank_of_a_group_has_is_no_origin_for_the_group() -> None:
    """It would be overwritten while others read it."""
    world, mine = several()
    world.fill(mine[:1])
    found = [way.origin for way in ways.of(world.core.cluster, world.version, world.operation(mine[0]))]
    holding = world.member(mine[0]).holding
    assert holding is not None
    assert holding.layout.is_described
    assert holding.layout not in found
    assert len(found) == 2


@pytest.mark.parametrize("site", ["here", "there"])
def test_a_copy_of_a_shard_reads_the_layout_that_the_shard_is_of(site: str) -> None:
    """Another layout has a shard of that number, too, and lies nearer."""
    world, trainers, _ = held()
    other = begin(world, "x", "own/x", site="there")
    world.ready(other, A, B)
    finish(world, [other], trainers)
    leave(world, *trainers)
    its = reader_of(world, "own/r0")
    rank = world.arrive("copy", 0, 1, "own/r0", registers=False, site=site)
    where = ("m", rank.group, 0, 0, 1, True, False, Medium.HOST, Purpose.RETENTION, "own/r0", 1, CHUNKS)
    world.say(rank, Register(3, rank.name, *where, MANIFEST, None, id_of(MANIFEST)))
    world.fill([rank])
    (start,) = rank.take(Start)
    assert start.publication == its
