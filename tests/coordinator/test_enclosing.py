"""Selections of which nobody's digests count: who has read them with the chunks that enclose them is believed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.coordinator import bridges
from tensorhub.coordinator.testimonies import COMPARISONS_MAX
from tensorhub.digests import root_of, root_of_selections
from tensorhub.layouts.published import grid_id
from tensorhub.manifest import id_of
from tensorhub.messages import (
    AddSource,
    Compare,
    Compared,
    Deregister,
    DigestAgain,
    Digests,
    Fill,
    Grant,
    Need,
    Outcome,
    Start,
    TellDigests,
    Write,
)
from tensorhub.messages.values import Begun
from tensorhub.testing import CHUNKS
from tensorhub.types import OpKind, VersionInfo
from tests.coordinator.layout_world import MANIFEST, NO_DIGESTS, Rank, World, lies_of, list_of, root
from tests.coordinator.test_bridges import A, B, cut, filling, finish, published
from tests.coordinator.test_layouts_over_time import back, held_by

OWN = root_of(list_of(CHUNKS))


def copied(*, manifest: bytes = MANIFEST, site: str = "here") -> tuple[World, list[Rank], list[Rank]]:
    """A publisher, and a replica in its layout."""
    world, trainers = published()
    if manifest is not MANIFEST:
        world = World(manifest=manifest)
        trainers = world.group("t", [cut(0), cut(1)])
        world.publish(trainers, 1)
    copies = world.group("c", [cut(0), cut(1)], site=site)
    world.fill(copies)
    for rank in copies:
        world.ready(rank)
    for trainer in trainers if manifest is MANIFEST else ():
        world.tell(trainer)
    for rank in copies:
        world.vote(rank, root=OWN if manifest is MANIFEST else b"")
    assert [rank.take(Outcome)[0].committed for rank in copies] == [True, True]
    return world, trainers, copies


def granted(reader: Rank) -> tuple[Grant, ...]:
    (write,) = reader.take(Write)
    return write.grants


def test_the_publisher_comes_first_as_long_as_its_digests_are_wanted() -> None:
    world, trainers, _ = copied()
    (first,) = filling(world, "first")
    assert [(grant.source, grant.root) for grant in granted(first)] == [("t0", b""), ("t1", b"")]
    for trainer, need in zip(trainers, (A, B), strict=True):
        world.tell(trainer, need)
    (second,) = filling(world, "second", site="there")
    assert [(grant.source, grant.root) for grant in granted(second)] == [("c0", b""), ("c1", b"")]


@pytest.mark.parametrize("is_its", [False, True])
def test_a_near_replica_is_read_as_it_is_while_its_publisher_digests_the_same_selection(is_its: bool) -> None:
    """What the publisher digests for readers of other selections tells nothing of this one."""
    world, _, _ = copied(site="there")
    (other,) = world.group("o", [("own/o", ())])
    world.fill([other])
    world.ready(other, *((A, B) if is_its else (replace(A, selection="other"), replace(B, selection="other"))))
    assert [grant.source for grant in granted(other)] == ["t0", "t1"]
    (reader,) = filling(world, site="there")
    root_of_own = b"" if is_its else OWN
    assert [(grant.source, grant.root) for grant in granted(reader)] == [("c0", root_of_own), ("c1", root_of_own)]


def test_a_replica_is_read_with_what_encloses_and_its_first_reader_is_believed() -> None:
    world, trainers, _ = copied()
    world.lose(*trainers)
    (reader,) = filling(world)
    grants = granted(reader)
    assert [(grant.source, grant.root, grant.grid) for grant in grants] == [
        ("c0", OWN, id_of(MANIFEST)),
        ("c1", OWN, id_of(MANIFEST)),
    ]
    world.vote(reader, root(A), root(B))
    asked = reader.take(TellDigests)
    assert [(each.selection, each.shard, bool(each.origin)) for each in asked] == [
        (A.selection, 0, True),
        (B.selection, 1, True),
    ]
    world.tell(reader, A, shard=A.shard)
    world.tell(reader, B, shard=B.shard)
    assert reader.take(Outcome)[0].committed
    (later,) = filling(world, "later", site="there")
    assert [grant.root for grant in granted(later)] == [b"", b""]


def test_a_publisher_that_has_failed_it_is_not_read_again_because_its_digests_are_wanted() -> None:
    world, _, _ = copied()
    (reader,) = filling(world)
    world.lose_source(reader, world.lease(reader, "t0"), "unreachable")
    assert [(added.grant.source, added.grant.root) for added in reader.take(AddSource)] == [("c0", OWN)]


def test_who_is_still_filled_is_not_read_with_what_encloses() -> None:
    """It cannot say all its digests."""
    world, trainers = published()
    for trainer in trainers:
        world.tell(trainer)
    filled, mate = world.group("c", [cut(0), cut(1)])
    world.fill([filled, mate])
    (reader,) = filling(world, site="there")
    part, (holding,) = world.part(reader), world.member(filled).holdings
    for each in trainers:
        world.lose_source(reader, world.lease(reader, each.name), "unreachable")
    assert bridges.must_enclose(part, A)
    assert bridges.enclosing_root(part, A, holding) == b""


def test_a_publisher_that_leaves_digests_nothing_more_for_new_readers() -> None:
    world, (trainer, _), _ = copied()
    (first,) = filling(world)
    assert [grant.source for grant in granted(first)] == ["t0", "t1"]
    assert bridges.publishers_of(world.part(first), A) == [world.member(trainer).holding]
    world.lose(world.ranks["c0"])
    world.leave(trainer)
    assert bridges.publishers_of(world.part(first), A) == []


def test_without_digests_nothing_encloses() -> None:
    world, trainers, _ = copied(manifest=NO_DIGESTS)
    (first,) = filling(world, "first", site="there")
    assert [grant.source for grant in granted(first)] == ["c0", "c1"]  # nobody needs its publisher's word
    world.lose(*trainers)
    (reader,) = filling(world)
    assert [grant.root for grant in granted(reader)] == [b"", b""]


def test_what_was_read_as_it_was_is_read_again_once_nobody_can_vouch_for_it() -> None:
    world, trainers, _ = copied()
    (reader,) = filling(world)
    world.lose(*trainers)
    assert [added.grant.root for added in reader.take(AddSource)] == [OWN, OWN]
    world.vote(reader, root(A), root(B))
    for asked, need in zip(reader.take(TellDigests), (A, B), strict=True):
        some = list_of(need.chunks)[:8]  # the first chunk: the publisher has sent it, or it was enclosed
        world.say(
            reader,
            Digests(reader.name, reader.generation, need.chunks, ((0, 1),), some, True, asked.selection, asked.shard),
        )
    (compare,) = reader.take(Compare)
    assert (compare.enclose, compare.selection, compare.shard, compare.digests, compare.last) == (
        True,
        A.selection,
        0,
        b"",
        True,
    )
    (follower,) = filling(world, "follower")
    world.say(reader, Compared(world.operation(reader).key, 0, 2, (), True, A.selection, A.shard))
    assert {added.grant.root for added in reader.take(AddSource)} == {OWN}
    assert world.sources(follower) == [("r0", "", 0)]
    world.vote(reader, root(A), root(B))
    assert {asked.selection for asked in reader.take(TellDigests)} == {A.selection, B.selection}
    world.tell(reader, A, shard=A.shard)
    world.tell(reader, B, shard=B.shard)
    assert reader.take(Outcome)[0].committed


def test_nobody_waits_for_the_word_of_one_that_is_gone() -> None:
    """(Drive 248 of other layouts.)"""
    world, trainers, _ = copied()
    (reader,) = filling(world)
    (other,) = filling(world, "other", site="there")
    world.lose(*trainers)
    world.vote(reader, root(A), root(B))
    for asked in reader.take(TellDigests):
        world.say(reader, Digests(reader.name, reader.generation, 0, (), b"", True, asked.selection, asked.shard))
    assert other.take(TellDigests)
    assert not reader.take(Compare)
    world.say(other, Deregister(next(world.numbers), other.name, abandon=True))
    (compare,) = reader.take(Compare)
    assert compare.enclose


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_who_has_read_all_ends_once_the_last_who_could_vouch_for_it_has_left(is_elsewhere: bool) -> None:
    """It goes over to what is in another layout, if something is. (Seed 2135 without faults.)"""
    world, trainers, copies = copied()
    if is_elsewhere:
        (other,) = world.group("o", [("own/o", ())], site="there")
        world.fill([other])
        others = replace(A, selection="other"), replace(B, selection="other")
        world.ready(other, *others)
        finish(world, [other], trainers, others)
    (reader,) = filling(world, selector=1)
    world.lose(*trainers)
    for copy in copies:
        world.leave(copy)
    world.vote(reader, root(A), root(B))
    for copy in copies:
        world.fenced(copy)
    assert not reader.take(Outcome)  # it may have read all with what encloses it
    for asked in reader.take(TellDigests):
        none = Digests(reader.name, reader.generation, 0, (), b"", True, asked.selection, asked.shard)
        world.say(reader, none)
    (outcome,) = reader.take(Outcome)
    assert outcome.error is not None
    assert (outcome.error.kind, outcome.again) == (("GroupAborted", True) if is_elsewhere else ("VersionUnavailable", False))


def test_who_has_read_all_of_it_so_and_does_not_say_its_digests_ends() -> None:
    world, trainers, _ = copied()
    world.lose(*trainers)
    (reader,) = filling(world)
    world.vote(reader, root(A), root(B))
    for _ in range(COMPARISONS_MAX + 2):
        for need in (A, B):
            said = Digests(reader.name, reader.generation, need.chunks, (), b"", True, need.selection, need.shard)
            world.say(reader, said)
        for compare in reader.take(Compare):
            assert compare.enclose
            world.say(reader, Compared(world.operation(reader).key, 0, 2, (), False, compare.selection, compare.shard))
    (outcome,) = reader.take(Outcome)
    assert outcome.error is not None
    assert outcome.error.kind == "IntegrityError"


def test_a_chunk_that_does_not_enclose_is_the_sources_own() -> None:
    world, trainers, copies = copied()
    world.lose(*trainers)
    (reader,) = filling(world)
    world.lose_source(reader, world.lease(reader, "c1"), "corrupt", chunk=1)
    (question,) = copies[1].take(DigestAgain)
    assert (question.chunk, question.selection) == (1, "")


# --------------------------------------------------------------------------- of who has read a version in another layout

OF_R = Need(0, "of what r has", 4, 50)


def left_over() -> tuple[World, Rank]:
    """Only who has read it in another layout holds it."""
    world, trainers = published()
    readers = filling(world)
    finish(world, readers, trainers)
    world.lose(*trainers)
    return world, readers[0]


def reads(world: World, name: str = "c", *, site: str = "here") -> tuple[Rank, Start]:
    """A group of a third layout that has begun to."""
    reader = world.arrive(name, 0, 1, "own/c", (), site=site)
    world.answer_questions(reader)
    world.fill([reader])
    (start,) = reader.take(Start)
    world.ready(reader, OF_R)
    return reader, start


def test_what_somebody_has_read_encloses_selections_of_it() -> None:
    world, holder = left_over()
    reader, start = reads(world)
    assert start.origin == holder.publication != start.publication
    (grant,) = granted(reader)
    roots = [(need.shard, need.selection, root(need).root) for need in (A, B)]
    assert (grant.source, grant.root) == ("r0", root_of_selections(roots))
    assert grant.grid == grid_id(holder.publication, id_of(lies_of(holder)[-1]), 0)
    world.vote(reader, root(OF_R))
    assert not holder.take(TellDigests)  # it would say what it holds by now
    (asked,) = reader.take(TellDigests)
    assert (asked.selection, bool(asked.origin)) == (OF_R.selection, True)  # of what it has read with what encloses it
    world.tell(reader, OF_R)
    assert reader.take(Outcome)[0].committed
    late = world.arrive("late", 0, 1, "own/c", (), site="there")
    world.answer_questions(late)
    world.fill([late])
    world.ready(late, OF_R)
    assert [grant.root for grant in granted(late)] == [b""]
    world.vote(late, root(OF_R, b"b"))
    (compare,) = late.take(Compare)
    assert (compare.digests, compare.enclose) == (list_of(OF_R.chunks), False)


def test_a_publisher_that_is_left_is_no_source_of_what_another_layout_has() -> None:
    """Its shard has the same number as the one that is read."""
    world, trainers = published()
    finish(world, filling(world), trainers)
    world.lose(trainers[1])
    reader, _ = reads(world)
    assert [(grant.source, bool(grant.root)) for grant in granted(reader)] == [("r0", True)]


def test_what_was_read_of_a_copy_encloses_as_well() -> None:
    world, holder = left_over()
    reader, start = reads(world)
    world.vote(reader, root(OF_R))
    world.tell(reader, OF_R)
    world.lose(holder)
    fourth = world.arrive("d", 0, 1, "own/d", ())
    world.answer_questions(fourth)
    world.fill([fourth])
    (said,) = fourth.take(Start)
    assert said.origin == start.publication
    world.ready(fourth, Need(0, "of what c has", 5, 50))
    (grant,) = granted(fourth)
    assert (grant.source, grant.root) == ("c0", root_of_selections([(0, OF_R.selection, root(OF_R).root)]))
    assert grant.grid == grid_id(start.publication, id_of(lies_of(reader)[-1]), 0)


def test_a_selection_may_be_what_was_read_and_what_others_read() -> None:
    """Its name is that of what it is of, and a group may have the layout of its origin's origin."""
    world, holder = left_over()
    reader, start = reads(world)
    world.vote(reader, root(OF_R))
    world.tell(reader, OF_R)
    world.lose(holder)
    same = world.arrive("d", 0, 1, holder.layout_id, ())
    world.answer_questions(same)
    world.fill([same])
    world.ready(same, OF_R)
    late = world.arrive("late", 0, 1, "own/late", ())
    world.answer_questions(late)
    world.fill([late])  # it looks for origins, so that each is described
    layout = world.part(same).layout
    assert (layout.described_as, layout.origin_id != start.publication) == (start.publication, True)
    world.vote(same, root(OF_R))
    world.tell(same, OF_R)
    (outcome,) = same.take(Outcome)
    assert outcome.committed


def test_a_source_that_has_another_grid_or_other_digests_is_left_and_its_word_does_not_count() -> None:
    world, holder = left_over()
    reader, _ = reads(world)
    world.lose_source(reader, world.lease(reader, "r0"), "corrupt")
    world.tell(holder, OF_R, b"b")
    world.vote(reader, root(OF_R, b"b"))
    world.pass_time(30.0)
    assert not holder.take(TellDigests)
    assert not reader.take(Outcome)


@pytest.mark.parametrize("others", [0, 1])
def test_after_a_restart_nobody_can_vouch_for_it_and_holders_are_believed(others: int) -> None:
    """Nobody knows its digests any more, nor those of who reads from it."""
    world, holder = left_over()
    info = world.version.info
    world = world.restarted()
    holder = back(world, holder, held_by(holder, info))
    for number in range(others):
        part_of_it = replace(OF_R, selection="for those who lie as it does")
        (follower,) = filling(world, f"follower{number}", needs=[part_of_it])
        world.vote(follower, root(part_of_it))
        world.tell(follower, part_of_it)
        world.tell(holder, part_of_it)
        assert follower.take(Outcome)[0].committed
    reader, start = reads(world)
    assert start.origin == ""
    (grant,) = granted(reader)
    assert grant.root == b""
    world.vote(reader, root(OF_R))
    assert reader.take(TellDigests) or holder.take(TellDigests)


def test_who_was_believed_vouches_for_nobody() -> None:
    """It may have said itself what decided about what it has read: that makes it no better than any other source."""
    world, holder = left_over()
    info = world.version.info
    world = world.restarted()
    holder = back(world, holder, held_by(holder, info))
    its = replace(OF_R, selection="for those who lie as it does")
    (follower,) = filling(world, "follower", needs=[its])
    world.vote(follower, root(its))
    world.tell(follower, its)
    world.tell(holder, its)
    assert follower.take(Outcome)[0].committed
    world.lose(holder)
    reader, start = reads(world)
    (grant,) = granted(reader)
    assert (grant.source, grant.root, start.origin) == (follower.name, b"", follower.publication)


def test_who_was_believed_is_no_origin_beside_one_that_lies_alike_and_is_vouched_for() -> None:
    """Nobody would be believed who has read there, however near it is."""
    world, trainers = published()
    readers = filling(world)
    finish(world, readers, trainers)
    info = world.version.info
    world = world.restarted()
    holder = back(world, readers[0], held_by(readers[0], info))
    (follower,) = filling(world, "follower", needs=[OF_R], site="there")
    world.vote(follower, root(OF_R))
    world.tell(follower, OF_R)
    world.tell(holder, OF_R)
    assert follower.take(Outcome)[0].committed
    trainers = [back(world, each, held_by(each, info, is_publisher=True)) for each in trainers]
    for each in trainers:
        world.answer_questions(each, held_by(each, info, is_publisher=True))
    (again,) = filling(world, "again")
    finish(world, [again], trainers)
    world.lose(*trainers)
    reader, start = reads(world, site="there")
    assert start.origin == again.publication != follower.publication
    assert granted(reader)[0].source in (holder.name, again.name)


def vouched_for_again(world: World, trainers: list[Rank], info: VersionInfo) -> Rank:
    """After a restart the publishers are back, and are read in the same layout. By whom."""
    trainers = [back(world, each, held_by(each, info, is_publisher=True)) for each in trainers]
    for each in trainers:
        world.answer_questions(each, held_by(each, info, is_publisher=True))
    (again,) = filling(world, "again")
    finish(world, [again], trainers)
    world.lose(*trainers)
    return again


def test_after_a_restart_it_is_vouched_for_again_once_its_layout_was_read_of_its_publisher() -> None:
    world, trainers = published()
    finish(world, filling(world), trainers)
    info = world.version.info
    world = world.restarted()
    again = vouched_for_again(world, trainers, info)
    _, start = reads(world)
    assert start.origin == again.publication


def test_who_has_planned_before_its_source_was_vouched_for_cannot_enclose_and_goes_over() -> None:
    world, trainers = published()
    readers = filling(world)
    finish(world, readers, trainers)
    info = world.version.info
    world = world.restarted()
    back(world, readers[0], held_by(readers[0], info))
    reader, start = reads(world)
    assert start.origin == ""
    again = vouched_for_again(world, trainers, info)
    world.lose_source(reader, world.lease(reader, "r0"))
    assert [(added.grant.source, added.grant.root) for added in reader.take(AddSource)] == [("again0", b"")]
    world.vote(reader, root(OF_R))
    world.say(reader, Digests(reader.name, reader.generation, 0, (), b"", True, OF_R.selection, OF_R.shard))
    assert not reader.take(Compare)
    (outcome,) = reader.take(Outcome)
    assert outcome.error is not None
    assert (outcome.error.kind, outcome.again) == ("StateError", True)
    world.fill([reader])
    assert [said.origin for said in reader.take(Start)] == [again.publication]


@pytest.mark.parametrize("is_told", [False, True])
def test_who_goes_on_after_a_restart_encloses_if_it_has_planned_so(is_told: bool) -> None:
    world, trainers = published()
    finish(world, filling(world), trainers)
    info = world.version.info
    world = world.restarted()
    vouched_for_again(world, trainers, info)
    _, start = reads(world)
    late = world.arrive("late", 0, 1, "own/c", (), site="there")
    world.answer_questions(late)
    key, origin = world.key(late), start.origin if is_told else ""
    begun = Begun(key, info.version, info.content_id, id_of(MANIFEST), True, start.publication, origin)
    call = (OpKind.UPDATE, "latest", None, 1, False, False, 1000.0, (key,), begun)
    world.say(late, Fill(key, 0, late.name, *call))
    assert [said.origin for said in late.take(Start)] == [origin]
    world.ready(late, OF_R)
    assert [bool(grant.root) for grant in granted(late)] == [is_told]
