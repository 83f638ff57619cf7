"""Readers of another layout and digests: each selection's root must be its publisher's (R8)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tensorhub.coordinator import limits
from tensorhub.coordinator.testimonies import ANSWER_S
from tensorhub.errors import IntegrityError
from tensorhub.messages import (
    AddSource,
    Compare,
    Compared,
    DigestAgain,
    DigestedAgain,
    Digests,
    Origin,
    Outcome,
    Revoked,
    Stray,
    TellDigests,
)
from tensorhub.model.digests import root_of
from tensorhub.testing import CHUNKS
from tensorhub.types import OpKind
from tests.coordinator.layout_world import NO_DIGESTS, Rank, World, list_of, root
from tests.coordinator.test_bridges import A, B, cut, filling, finish, published

OWN = root_of(list_of(CHUNKS))


def copied() -> tuple[World, list[Rank], list[Rank]]:
    """A publisher, and a replica in its layout."""
    world, trainers = published()
    copies = world.group("c", [cut(0), cut(1)])
    world.fill(copies)
    for rank in copies:
        world.ready(rank)
    for trainer in trainers:
        world.tell(trainer)
    for rank in copies:
        world.vote(rank, root=OWN)
    assert [rank.take(Outcome)[0].committed for rank in copies] == [True, True]
    return world, trainers, copies


def compared(
    world: World, rank: Rank, following: int, strays: Sequence[Stray] = (), *, rereads: bool = False
) -> None:
    """It has compared a page of B."""
    key = world.operation(rank).key
    world.say(
        rank, Compared(key, rank.rank, following, tuple(strays), rereads, B.selection, B.shard)
    )


def test_the_publisher_of_each_class_is_asked_and_a_vote_counts_once_all_roots_agree() -> None:
    world, trainers = published()
    (reader,) = filling(world)
    world.vote(reader, root(A), root(B))
    asked = [
        [(each.selection, each.shard) for each in trainer.take(TellDigests)] for trainer in trainers
    ]
    assert asked == [[("half of it", 0)], [("half of it", 1)]]
    world.tell(trainers[0], A)
    assert not reader.take(Outcome)
    world.tell(trainers[1], B)
    (outcome,) = reader.take(Outcome)
    assert outcome.committed


def test_what_a_publisher_says_unasked_counts() -> None:
    world, trainers = published()
    (reader,) = filling(world)
    for trainer, need in zip(trainers, (A, B), strict=True):
        world.tell(trainer, need)
    world.vote(reader, root(B), root(A))
    assert reader.take(Outcome)[0].committed
    assert not trainers[0].take(TellDigests)


def test_without_digests_there_is_nothing_to_agree_on() -> None:
    world = World(manifest=NO_DIGESTS)
    world.publish(world.group("t", [cut(0), cut(1)]), 1)
    (reader,) = filling(world)
    world.vote(reader)
    assert reader.take(Outcome)[0].committed


def test_a_wrong_root_is_compared_page_by_page_and_read_again() -> None:
    world, trainers = published()
    (reader,) = filling(world)
    for trainer, need in zip(trainers, (A, B), strict=True):
        world.tell(trainer, need)
    world.vote(reader, root(A), root(B, b"wrong"))
    (compare,) = reader.take(Compare)
    assert (compare.selection, compare.shard, compare.digests, compare.last) == (
        B.selection,
        1,
        list_of(3),
        True,
    )
    stray = Stray(2, Origin("t1", trainers[1].generation))
    compared(world, reader, 3, [stray], rereads=True)
    (question,) = trainers[1].take(DigestAgain)
    assert (question.chunk, question.selection, question.shard) == (2, B.selection, 1)
    # it has just failed; and of the other class nothing is read again
    assert not reader.take(AddSource)
    world.pass_time(1.0)
    assert [added.grant.shard for added in reader.take(AddSource)] == [1]
    world.vote(reader, root(A), root(B))
    assert reader.take(Outcome)[0].committed


def test_a_list_that_is_right_counts_whatever_root_was_named() -> None:
    world, trainers = published()
    (reader,) = filling(world)
    for trainer, need in zip(trainers, (A, B), strict=True):
        world.tell(trainer, need)
    world.vote(reader, root(A))
    assert reader.take(Compare)
    compared(world, reader, 3)
    assert reader.take(Outcome)[0].committed


def test_a_publisher_where_nobody_has_read_that_selection_does_not_say_that_it_is_empty() -> None:
    """It does not know the selection: it was read from replicas of what it has published. Their
    digests count.
    """
    world, trainers = published()
    (reader,) = filling(world)
    world.tell(trainers[0], A)
    world.vote(reader, root(A), root(B))
    assert trainers[1].take(TellDigests)
    world.say(
        trainers[1],
        Digests(trainers[1].name, trainers[1].generation, 0, (), b"", True, B.selection, B.shard),
    )
    assert not reader.take(Compare)
    (outcome,) = reader.take(Outcome)
    assert (outcome.committed, outcome.by_source) == (True, True)


@pytest.mark.parametrize("how", ["lost", "cut off", "silent"])
def test_a_publisher_that_does_not_answer_leaves_it_to_the_sources(how: str) -> None:
    world, trainers = published()
    (reader,) = filling(world)
    world.tell(trainers[0], A)
    if how == "lost":
        world.lose(trainers[1])
    elif how == "cut off":
        world.cut_off(trainers[1])
    world.vote(reader, root(A), root(B))
    if how == "silent":
        assert not reader.take(Outcome)
        world.pass_time(3 * ANSWER_S)
    (outcome,) = reader.take(Outcome)
    assert (outcome.committed, outcome.by_source) == (True, True)


def test_what_a_publisher_has_confirmed_is_verified_by_the_publisher_also_for_a_call_that_finds_it_there() -> (
    None
):
    world, trainers = published()
    (reader,) = filling(world)
    for trainer, need in zip(trainers, (A, B), strict=True):
        world.tell(trainer, need)
    world.vote(reader, root(A), root(B))
    assert not reader.take(Outcome)[0].by_source
    world.fill([reader], kind=OpKind.UPDATE)
    (again,) = reader.take(Outcome)
    assert (again.changed, again.by_source) == (False, False)


def test_of_a_class_the_first_rank_that_is_left_decides() -> None:
    world = World()
    trainers = world.group("t", [cut(rank % 2) for rank in range(4)])
    world.publish(trainers, 1)
    for trainer in trainers:
        world.tell(trainer)
    (reader,) = filling(world)
    world.lose(trainers[0])
    world.tell(trainers[3], B, b"other")  # it is not the first, and nobody has asked it
    world.vote(reader, root(A), root(B))
    asked = [
        [(each.selection, each.shard) for each in rank.take(TellDigests) if each.selection]
        for rank in trainers[1:]
    ]
    assert asked == [
        [(B.selection, 1)],
        [(A.selection, 0)],
        [],
    ]
    world.tell(trainers[1], B)
    world.tell(trainers[2], A)
    assert reader.take(Outcome)[0].committed


def test_ranks_of_one_class_that_differ_are_named_and_nobody_is_quarantined() -> None:
    world = World()
    trainers = world.group("t", [cut(rank % 2) for rank in range(4)])
    world.publish(trainers, 1)
    for trainer in trainers:
        world.tell(trainer)
    (reader,) = filling(world)
    world.tell(trainers[0], A)
    world.tell(trainers[1], B)
    world.vote(reader, root(A), root(B, b"other"))
    assert reader.take(Compare)
    compared(world, reader, 3, [Stray(0, Origin("t3", trainers[3].generation))], rereads=True)
    (question,) = trainers[3].take(DigestAgain)
    world.say(trainers[3], DigestedAgain(question.inquiry, "t3", False, list_of(1, b"other")))
    (outcome,) = reader.take(Outcome)
    assert outcome.error is not None
    assert isinstance(outcome.error.error(), IntegrityError)
    assert "ranks 1 and 3 of group 't'" in outcome.error.message
    assert not trainers[3].take(Revoked)
    assert not any(
        holding.trust.quarantined for there in world.version.holdings.values() for holding in there
    )
    assert all(len(there) == 1 for there in world.version.holdings.values())


def test_a_copy_whose_bytes_differ_is_quarantined() -> None:
    """A replica in the published layout serves a selection, and its bytes are not what was
    published.
    """
    world, trainers, copies = copied()
    (reader,) = filling(world)
    for trainer, need in zip(trainers, (A, B), strict=True):
        world.tell(trainer, need)
    world.vote(reader, root(A), root(B, b"other"))
    compared(world, reader, 3, [Stray(1, Origin("c1", copies[1].generation))], rereads=True)
    (question,) = copies[1].take(DigestAgain)
    world.say(copies[1], DigestedAgain(question.inquiry, "c1", False, list_of(1, b"other")))
    assert copies[1].take(Revoked)


def test_a_chunk_without_its_digest_is_asked_for_in_the_selection_s_numbers() -> None:
    world, trainers = published()
    (reader,) = filling(world)
    world.lose_source(reader, world.lease(reader, "t1"), "corrupt", 1)
    (question,) = trainers[1].take(DigestAgain)
    assert (question.chunk, question.selection, question.shard) == (1, B.selection, 1)
    world.say(trainers[1], DigestedAgain(question.inquiry, "t1", True))
    assert [there.sources for there in world.version.holdings.values()] == [1, 0]


def test_once_a_root_is_known_the_publisher_is_not_needed() -> None:
    world, trainers = published()
    finish(world, filling(world), trainers)
    world.lose(*trainers)
    finish(world, filling(world, "late"))


def test_a_list_that_has_made_room_for_another_is_asked_for_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, trainers = published()
    (reader,) = filling(world)
    monkeypatch.setattr(limits, "DIGEST_BYTES_MAX", 9 * B.chunks)
    world.tell(trainers[0], A)
    world.tell(trainers[1], B)
    assert [each.selection for each in world.core.cluster.testimonies] == [B.selection]
    for trainer in trainers:
        trainer.take(TellDigests)
    world.vote(reader, root(A, b"wrong"), root(B))
    assert [each.selection for each in trainers[0].take(TellDigests)] == [A.selection]


def test_with_a_selection_no_reader_is_kept_whose_call_is_over() -> None:
    world, trainers = published()
    for name in ("r", "s"):
        finish(world, filling(world, name), trainers)
    (reader,) = filling(world, "last")
    for testimony in world.version.selections.values():
        assert list(testimony.needed_by) == [world.part(reader)]
