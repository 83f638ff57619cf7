"""Who is asked for digests while their publisher is out of touch, and who waits for it all the same."""

from __future__ import annotations

import pytest

from tensorhub.messages import AddSource, Compare, DigestedAgain, Digests, Outcome, TellDigests
from tests.coordinator.layout_world import LEASE_S, World, root
from tests.coordinator.test_bridges import A, B, cut, filling, published
from tests.coordinator.test_enclosing import OWN, copied, granted


def test_nobody_reads_again_as_long_as_a_publisher_that_is_out_of_touch_may_come_back() -> None:
    """Its word would decide about what was read of others as it was."""
    world, trainers, _ = copied()
    (reader,) = filling(world)
    for trainer in trainers:
        world.cut_off(trainer)
    world.vote(reader, root(A), root(B))
    asked = reader.take(TellDigests)
    assert [(each.selection, each.origin) for each in asked] == [(A.selection, "t0"), (B.selection, "t1")]
    world.say(reader, Digests(reader.name, reader.generation, 0, (), b"", True, A.selection, A.shard))
    assert not reader.take(Compare)
    world.pass_time(2.5 * LEASE_S, silent=trainers)
    assert not reader.take(Compare)
    world.say(reader, Digests(reader.name, reader.generation, 0, (), b"", True, A.selection, A.shard))
    (compare,) = reader.take(Compare)
    assert (compare.enclose, compare.selection, compare.shard) == (True, A.selection, 0)


@pytest.mark.parametrize("when", ["before", "in mid-read", "after its vote"])
def test_who_can_vouch_for_all_that_it_has_waits_for_no_publisher_that_is_out_of_touch(when: str) -> None:
    """It has read from the publisher directly, or with what encloses it: it says what the publisher would say."""
    world, trainers, _ = copied()
    for trainer in trainers if when == "before" else ():
        world.cut_off(trainer)
    (reader,) = filling(world)
    assert [grant.root for grant in granted(reader)] == [OWN if when == "before" else b""] * 2
    if when == "in mid-read":
        for trainer in trainers:
            world.cut_off(trainer)
            world.lose_source(reader, world.lease(reader, trainer.name))
        assert [(added.grant.source, added.grant.root) for added in reader.take(AddSource)] == [("c0", OWN), ("c1", OWN)]
    world.vote(reader, root(A), root(B))
    if when == "after its vote":
        assert not reader.take(TellDigests)
        for trainer in trainers:
            world.cut_off(trainer)
    asked = reader.take(TellDigests)
    assert [(each.selection, each.shard, each.origin) for each in asked] == [(A.selection, 0, "t0"), (B.selection, 1, "t1")]
    for need in (A, B):
        world.tell(reader, need, shard=need.shard)
    assert reader.take(Outcome)[0].committed


def test_a_selection_is_read_with_what_encloses_it_although_others_still_read_of_a_publisher_that_is_out_of_touch() -> None:
    """They may have all of it; and the publisher may digest no more."""
    world, trainers, _ = copied(site="there")
    (first,) = filling(world, "first")
    for trainer in trainers:
        world.cut_off(trainer)
    assert world.sources(first) == [("t0", A.selection, 0), ("t1", B.selection, 1)]
    (other,) = world.group("o", [("own/o", ())], site="there")
    world.fill([other])
    world.ready(other, A, B)
    assert [(grant.source, grant.root) for grant in granted(other)] == [("c0", OWN), ("c1", OWN)]


def test_of_its_own_chunks_only_the_publisher_says_the_digests_until_it_is_lost() -> None:
    """By these all that encloses is verified."""
    world, trainers = published()
    copies = world.group("c", [cut(0), cut(1)])
    world.fill(copies)
    for rank in copies:
        world.ready(rank)
    for trainer in trainers:
        world.cut_off(trainer)
    for rank in copies:
        world.vote(rank, root=OWN)
    assert not [asked for rank in copies for asked in rank.take(TellDigests)]
    world.pass_time(2.5 * LEASE_S, silent=trainers)
    assert [asked.origin for rank in copies for asked in rank.take(TellDigests)] == ["t0", "t1"]


def test_the_equal_of_a_publisher_that_is_out_of_touch_tells_it_at_once_and_nobody_reads_again() -> None:
    world = World()
    trainers = world.group("t", [cut(rank % 2) for rank in range(4)])
    world.publish(trainers, 1)
    (reader,) = filling(world)
    for trainer in trainers:
        world.tell(trainer)
    world.tell(trainers[1], B)
    world.cut_off(trainers[0])
    world.lose_source(reader, world.lease(reader, "t0"))
    assert [added.grant.source for added in reader.take(AddSource)] == ["t2"]
    trainers[2].take(TellDigests)
    world.vote(reader, root(A), root(B))
    assert [asked.selection for asked in trainers[2].take(TellDigests)] == [A.selection]
    assert not reader.take(Compare)
    world.tell(trainers[2], A)
    assert reader.take(Outcome)[0].committed


def test_a_publisher_that_leaves_is_asked_as_long_as_it_is_read() -> None:
    world, (trainer, _) = published()
    (reader,) = filling(world)
    filling(world, "late")  # reads there still
    world.leave(trainer)
    world.vote(reader, root(A), root(B))
    assert [asked.selection for asked in trainer.take(TellDigests)] == [A.selection]
    world.tell(trainer, A)
    assert root(A).root in [testimony.root for testimony in world.version.selections.values()]


def test_a_publisher_whose_bytes_have_changed_is_not_asked() -> None:
    world, (trainer, _) = published()
    (reader,) = filling(world)
    world.say(trainer, DigestedAgain("", trainer.name, True, generation=trainer.generation))
    world.vote(reader, root(A), root(B))
    assert not trainer.take(TellDigests)
    assert [asked.selection for asked in reader.take(TellDigests)] == [A.selection]


def test_who_was_asked_about_what_it_fills_has_not_answered_with_a_word_about_something_else() -> None:
    world, trainers, _ = copied()
    (reader,) = filling(world)
    world.lose(*trainers)
    world.vote(reader, root(A), root(B))
    asked = reader.take(TellDigests)[0]
    (testimony,) = [each for each in world.version.selections.values() if each.need == A]
    for generation in (asked.generation - 1, asked.generation):
        assert reader.name in testimony.asked
        world.say(reader, Digests(reader.name, generation, 0, (), b"", True, A.selection, A.shard))
    assert reader.name not in testimony.asked
