"""What others say of a selection while its publisher is out of touch holds until the publisher says otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tensorhub.coordinator.tellers import ANSWER_S
from tensorhub.coordinator.testimonies import COMPARISONS_MAX
from tensorhub.messages import (
    AddSource,
    Compare,
    Compared,
    DigestAgain,
    DigestedAgain,
    Digests,
    Need,
    Origin,
    Outcome,
    Revoked,
    Stray,
    TellDigests,
)
from tests.coordinator.layout_world import LEASE_S, Rank, World, list_of, root
from tests.coordinator.test_bridges import A, B, filling, guest_of, published
from tests.coordinator.test_enclosing import OF_R, OWN, copied, granted, left_over, reads
from tests.coordinator.test_layouts_over_time import held_by

LIE = b"lie"


def comes_back(world: World, *ranks: Rank) -> None:
    """Over new connections, within their leases."""
    for rank in ranks:
        rank.take(TellDigests)
        world.connect(rank)
        world.register(rank, held_by(rank, world.version.info, is_publisher=True), parts=rank.parts)


def tell_one(world: World, rank: Rank, need: Need, chunk: int, value: bytes = b"a", *, last: bool = False) -> None:
    """Of that chunk alone."""
    of = need.selection, need.shard
    world.say(rank, Digests(rank.name, rank.generation, need.chunks, ((chunk, 1),), list_of(1, value), last, *of))


def lied(world: World, trainers: Sequence[Rank], name: str = "liar", *, ranks: int = 1, site: str = "here") -> list[Rank]:
    """Of readers that have read of the publishers, the first says another digest than the first of them, whose connection
    has ended.
    """
    liars = filling(world, name, ranks=ranks, site=site)
    world.tell(trainers[1], B)
    world.cut_off(trainers[0])
    world.vote(liars[0], root(A, LIE), root(B))
    (asked,) = liars[0].take(TellDigests)
    assert (asked.selection, asked.origin) == (A.selection, "t0")
    world.tell(liars[0], A, LIE, shard=A.shard)
    return liars


def test_a_publisher_that_is_back_is_heard_before_a_vote_counts_and_its_word_stands() -> None:
    world, trainers, _ = copied()
    (liar,) = lied(world, trainers)
    assert liar.take(Outcome)[0].committed
    comes_back(world, trainers[0])
    (honest,) = filling(world, "honest", site="there")
    world.vote(honest, root(A), root(B))
    (asked,) = trainers[0].take(TellDigests)
    assert (asked.selection, asked.origin) == (A.selection, "")
    assert not honest.take(Compare)
    world.tell(trainers[0], A)
    assert honest.take(Outcome)[0].committed


def test_who_has_copied_the_lie_reads_it_again_and_the_liar_is_found_out() -> None:
    world, trainers, _ = copied()
    (liar,) = lied(world, trainers)
    (follower,) = filling(world, "follower")
    assert [source for source, _, _ in world.sources(follower)] == [liar.name]
    comes_back(world, trainers[0])
    world.vote(follower, root(A, LIE), root(B))
    world.tell(trainers[0], A)
    (compare,) = follower.take(Compare)
    assert (compare.digests, compare.shard) == (list_of(A.chunks), A.shard)
    stray = Stray(1, Origin(liar.name, liar.generation))
    world.say(follower, Compared(world.operation(follower).key, 0, A.chunks, (stray,), True, A.selection, A.shard))
    (question,) = liar.take(DigestAgain)
    world.say(liar, DigestedAgain(question.inquiry, liar.name, False, list_of(1, LIE), Origin("t0", trainers[0].generation)))
    assert liar.take(Revoked)
    world.vote(follower, root(A), root(B))
    assert follower.take(Outcome)[0].committed


@pytest.mark.parametrize("has_voted", [True, False])
def test_who_has_agreed_with_what_others_had_said_begins_anew(has_voted: bool) -> None:
    world, trainers, _ = copied()
    first, second = lied(world, trainers, ranks=2)
    if has_voted:
        assert world.part(first).voted
    else:
        world.vote(second, root(A, LIE), root(B, b"wrong"))
        assert list(world.part(second).claim or ()) == [B]
    comes_back(world, trainers[0])
    (honest,) = filling(world, "honest", site="there")
    world.vote(honest, root(A), root(B))
    world.tell(trainers[0], A)
    assert honest.take(Outcome)[0].committed
    for rank in (first, second):
        (outcome,) = rank.take(Outcome)
        assert (outcome.committed, outcome.again) == (False, True)


def test_who_has_not_voted_yet_goes_on() -> None:
    world, trainers, _ = copied()
    lied(world, trainers)
    comes_back(world, trainers[0])
    honest, slow = (filling(world, name, site=name)[0] for name in ("honest", "slow"))
    world.vote(honest, root(A), root(B))
    world.tell(trainers[0], A)
    world.vote(slow, root(A), root(B))
    assert [rank.take(Outcome)[0].committed for rank in (honest, slow)] == [True, True]


def test_a_publisher_that_agrees_is_not_asked_again() -> None:
    world, trainers, _ = copied()
    (reader,) = filling(world)
    world.tell(trainers[1], B)
    world.cut_off(trainers[0])
    world.vote(reader, root(A), root(B))
    world.tell(reader, A, shard=A.shard)
    assert reader.take(Outcome)[0].committed  # while the publisher is out of touch
    comes_back(world, trainers[0])
    for name in ("second", "third"):
        (other,) = filling(world, name)
        world.vote(other, root(A), root(B))
        for _ in trainers[0].take(TellDigests):
            assert name == "second"
            world.tell(trainers[0], A)
        assert other.take(Outcome)[0].committed
    (testimony,) = [each for each in world.version.selections.values() if each.need == A]
    assert not testimony.hearsay


def test_a_publisher_that_does_not_know_the_selection_says_nothing_against_it() -> None:
    world, trainers, _ = copied()
    (reader,) = filling(world)
    world.tell(trainers[1], B)
    world.cut_off(trainers[0])
    world.vote(reader, root(A), root(B))
    world.tell(reader, A, shard=A.shard)
    comes_back(world, trainers[0])
    (other,) = filling(world, "other")
    world.vote(other, root(A), root(B))
    (asked,) = trainers[0].take(TellDigests)
    world.say(trainers[0], Digests("t0", asked.generation, 0, (), b"", True, A.selection, A.shard))
    assert other.take(Outcome)[0].committed


def test_a_publisher_of_whom_that_is_read_later_overrules_what_others_had_said() -> None:
    """Nobody had read it there before, and so it could say nothing."""
    world, trainers, _ = copied()
    (liar,) = filling(world, "liar")
    world.tell(trainers[1], B)
    world.vote(liar, root(A, LIE), root(B))
    world.say(trainers[0], Digests("t0", trainers[0].generation, 0, (), b"", True, A.selection, A.shard))
    world.tell(liar, A, LIE, shard=A.shard)
    assert liar.take(Outcome)[0].committed
    trainers[0].take(TellDigests)
    (honest,) = filling(world, "honest", site="there")
    tell_one(world, trainers[0], A, 1)  # which it has made since, unasked
    assert trainers[0].take(TellDigests)
    world.vote(honest, root(A), root(B))
    assert not honest.take(Compare)
    world.tell(trainers[0], A)
    assert honest.take(Outcome)[0].committed


def test_what_a_publisher_says_overrules_what_others_have_said_before_all_is_known() -> None:
    world, trainers, _ = copied()
    (liar,) = filling(world, "liar")
    world.tell(trainers[1], B)
    world.cut_off(trainers[0])
    world.vote(liar, root(A, LIE), root(B))
    tell_one(world, liar, A, 0, LIE)
    comes_back(world, trainers[0])
    (honest,) = filling(world, "honest", site="there")
    world.vote(honest, root(A), root(B))
    assert trainers[0].take(TellDigests)
    world.tell(trainers[0], A)
    assert honest.take(Outcome)[0].committed
    (testimony,) = [each for each in world.version.selections.values() if each.need == A]
    assert not testimony.hearsay


def test_a_publisher_that_goes_again_before_it_has_answered_is_asked_once_it_is_back() -> None:
    world, trainers, _ = copied()
    lied(world, trainers)
    comes_back(world, trainers[0])
    first, second = (filling(world, name, site=name)[0] for name in ("first", "second"))
    world.vote(first, root(A), root(B))
    assert trainers[0].take(TellDigests)
    world.cut_off(trainers[0])
    assert first.take(Compare)  # what others have said holds meanwhile
    comes_back(world, trainers[0])
    world.vote(second, root(A), root(B))
    trainers[0].take(TellDigests)
    assert not second.take(Compare)
    world.tell(trainers[0], A)
    assert second.take(Outcome)[0].committed


def test_where_nobody_else_holds_what_was_published_a_publisher_that_is_out_of_touch_is_waited_for() -> None:
    """Else nobody could verify what others say of it. Once it is lost, they are asked all the same."""
    world, trainers = published()
    (reader,) = filling(world)
    world.tell(trainers[1], B)
    world.cut_off(trainers[0])
    world.vote(reader, root(A), root(B))
    assert not reader.take(TellDigests)
    world.pass_time(2.5 * LEASE_S, silent=trainers[:1])
    (asked,) = reader.take(TellDigests)
    assert (asked.selection, asked.origin) == (A.selection, "t0")


def test_who_holds_what_was_published_is_not_condemned_by_what_others_than_its_publisher_have_said() -> None:
    world, trainers, (copy, _) = copied(site="there")
    lied(world, trainers)
    world.pass_time(2.5 * LEASE_S, silent=trainers[:1])
    (honest,) = filling(world, "honest", site="there")
    world.lose_source(honest, world.lease(honest, copy.name), "corrupt", chunk=1)
    (question,) = copy.take(DigestAgain)
    assert question.selection == A.selection
    world.say(copy, DigestedAgain(question.inquiry, copy.name, False, list_of(1)))
    assert not copy.take(Revoked)


def compared(world: World, rank: Rank, need: Need, *strays: Stray, rereads: bool = False) -> None:
    """It has compared what it has of that."""
    key = world.operation(rank).key
    world.say(rank, Compared(key, rank.rank, need.chunks, strays, rereads, need.selection, need.shard))


def disputing(world: World, trainers: Sequence[Rank], copies: Sequence[Rank]) -> Rank:
    """The publisher is lost, a liar has spoken for it, and this one has read otherwise of a copy of what was published. It
    begins anew, and is asked what it has not read with what encloses it.
    """
    lied(world, trainers)
    world.pass_time(2.5 * LEASE_S, silent=trainers[:1])
    (honest,) = filling(world, "honest", site="there")
    assert [grant.root for grant in granted(honest)] == [b"", b""]
    world.vote(honest, root(A), root(B))
    assert honest.take(Compare)[0].digests == list_of(A.chunks, LIE)
    compared(world, honest, A, Stray(1, Origin("c0", copies[0].generation)), rereads=True)
    (outcome,) = honest.take(Outcome)
    assert (outcome.committed, outcome.again) == (False, True)
    assert not copies[0].take(DigestAgain)
    world.fill([honest])
    world.ready(honest, A, B)
    assert [(grant.source, grant.root) for grant in granted(honest)] == [("c0", OWN), ("c1", b"")]
    world.vote(honest, root(A), root(B))
    (compare,) = honest.take(Compare)
    assert (compare.enclose, compare.selection, compare.shard) == (True, A.selection, A.shard)
    return honest


def test_who_finds_otherwise_in_what_was_published_needs_nobodys_word() -> None:
    """As long as a copy of that is there. Then nobody else agrees with that word either, before it has looked there."""
    world, trainers, copies = copied(site="there")
    honest = disputing(world, trainers, copies)
    compared(world, honest, A, rereads=True)
    assert [(added.grant.source, added.grant.root) for added in honest.take(AddSource)] == [("c0", OWN)]
    world.vote(honest, root(A), root(B))
    assert honest.take(Compare)[0].enclose
    compared(world, honest, A)
    assert honest.take(Outcome)[0].committed
    (follower,) = filling(world, "follower")
    assert [source for source, _, _ in world.sources(follower)] == ["liar0"]
    world.vote(follower, root(A, LIE), root(B))
    assert follower.take(Compare)[0].enclose
    compared(world, follower, A, rereads=True)
    assert ("c0", OWN) in [(added.grant.source, added.grant.root) for added in follower.take(AddSource)]


def test_where_no_copy_of_what_was_published_is_left_the_first_word_stands() -> None:
    world, trainers, copies = copied()
    honest = disputing(world, trainers, copies)
    compared(world, honest, A, rereads=True)
    (follower,) = filling(world, "follower")
    world.lose(*copies)
    world.vote(follower, root(A, LIE), root(B))
    assert follower.take(Outcome)[0].committed


def test_a_reader_that_never_has_all_with_what_encloses_it_ends() -> None:
    world, trainers, copies = copied()
    honest = disputing(world, trainers, copies)
    for _ in range(COMPARISONS_MAX + len((A, B))):
        compared(world, honest, A, rereads=True)
        world.vote(honest, root(A), root(B))
    (outcome,) = honest.take(Outcome)
    assert outcome.error is not None
    assert outcome.error.kind == "IntegrityError"


def test_a_publisher_that_is_back_ends_a_dispute() -> None:
    world, trainers, copies = copied(site="there")
    lied(world, trainers)
    (first,) = filling(world, "first", site="there")
    world.vote(first, root(A), root(B))
    compared(world, first, A, Stray(1, Origin("c0", copies[0].generation)), rereads=True)
    world.fill([first])
    world.ready(first, A, B)
    world.vote(first, root(A), root(B))
    assert [compare.enclose for compare in first.take(Compare)] == [False, True]
    comes_back(world, trainers[0])
    (second,) = filling(world, "second", site="second")
    world.vote(second, root(A), root(B))
    assert trainers[0].take(TellDigests)
    world.tell(trainers[0], A)
    compared(world, first, A)
    assert [rank.take(Outcome)[-1].committed for rank in (first, second)] == [True, True]
    (follower,) = filling(world, "follower")
    world.vote(follower, root(A, LIE), root(B))
    assert [compare.digests for compare in follower.take(Compare)] == [list_of(A.chunks)]


def test_what_is_said_of_a_selection_of_another_layout_is_disputed_by_who_holds_that() -> None:
    world, holder = left_over()
    liar, _ = reads(world, "liar")
    world.vote(liar, root(OF_R, LIE))
    world.tell(liar, OF_R, LIE)
    assert liar.take(Outcome)[0].committed
    honest, _ = reads(world, "honest", site="there")
    assert [(grant.source, grant.root) for grant in granted(honest)] == [(holder.name, b"")]
    world.vote(honest, root(OF_R))
    assert not honest.take(Compare)[0].enclose
    compared(world, honest, OF_R, Stray(1, Origin(holder.name, holder.generation)), rereads=True)
    assert honest.take(Outcome)[0].again
    assert not holder.take(DigestAgain)
    world.fill([honest])
    world.ready(honest, OF_R)
    assert [bool(grant.root) for grant in granted(honest)] == [True]
    world.vote(honest, root(OF_R))
    assert honest.take(Compare)[0].enclose
    compared(world, honest, OF_R)
    assert honest.take(Outcome)[0].committed


def test_a_publisher_that_is_back_before_the_vote_counts_as_a_whole_is_heard_first() -> None:
    world, trainers, _ = copied()
    (follower,) = filling(world)
    for trainer in trainers:
        world.cut_off(trainer)
    world.vote(follower, root(A), root(B))
    follower.take(TellDigests)
    world.tell(follower, A, shard=A.shard)
    comes_back(world, trainers[0])
    world.tell(follower, B, shard=B.shard)
    assert not follower.take(Outcome)
    (asked,) = trainers[0].take(TellDigests)
    assert asked.selection == A.selection
    world.tell(trainers[0], A)
    assert follower.take(Outcome)[0].committed


def test_who_reads_again_what_others_had_said_begins_anew() -> None:
    """It would take nothing but the lie."""
    world, trainers, _ = copied()
    (liar,) = lied(world, trainers)
    honest, other = (filling(world, name, site=name)[0] for name in ("honest", "other"))
    world.vote(honest, root(A), root(B))
    assert honest.take(Compare)[0].digests == list_of(A.chunks, LIE)
    compared(world, honest, A, Stray(1, Origin(liar.name, liar.generation)), rereads=True)
    comes_back(world, trainers[0])
    world.vote(other, root(A), root(B))
    world.tell(trainers[0], A)
    assert other.take(Outcome)[0].committed
    assert honest.take(Outcome)[0].again


def test_what_was_read_of_a_publisher_that_is_lost_disputes_what_others_have_said() -> None:
    world, trainers, _ = copied(site="there")
    (honest,) = filling(world, "honest", site="honest")
    lied(world, trainers)
    world.pass_time(2.5 * LEASE_S, silent=trainers[:1])
    world.vote(honest, root(A), root(B))
    assert honest.take(Compare)
    compared(world, honest, A, Stray(1, Origin("t0", trainers[0].generation)), rereads=True)
    assert honest.take(Outcome)[0].again
    (testimony,) = [each for each in world.version.selections.values() if each.need == A]
    assert testimony.disputed


def test_workers_do_not_depend_on_what_a_guest_has_found() -> None:
    world, trainers, copies = copied(site="there")
    lied(world, trainers)
    guest = guest_of(world, "own/r0", site="there")
    world.ready(guest, A, B)
    world.vote(guest, root(A), root(B))
    assert guest.take(Compare)
    compared(world, guest, A, Stray(1, Origin("c0", copies[0].generation)), rereads=True)
    (testimony,) = [each for each in world.version.selections.values() if each.need == A]
    assert not testimony.disputed
    assert not guest.take(Outcome)


def test_a_publisher_that_is_back_and_says_nothing_is_not_waited_for_but_overrules_what_others_had_said_later() -> None:
    world, trainers, _ = copied()
    lied(world, trainers)
    comes_back(world, trainers[0])
    (follower,) = filling(world, "follower")
    world.vote(follower, root(A, LIE), root(B))
    assert trainers[0].take(TellDigests)
    assert not follower.take(Outcome)
    world.pass_time(3 * ANSWER_S)
    assert follower.take(Outcome)[0].committed
    world.tell(trainers[0], A)
    (other,) = filling(world, "other")
    world.vote(other, root(A), root(B))
    assert other.take(Outcome)[0].committed
