"""Whether a group reads every byte: who is asked that, when, and what becomes of its call."""

from __future__ import annotations

import pytest

from tensorhub.coordinator import coverage
from tensorhub.errors import GroupAborted, IntegrityError, ManifestMismatch, VersionConflict
from tensorhub.layouts.published import Published
from tensorhub.messages import (
    Abandon,
    CheckCoverage,
    Covered,
    ErrorInfo,
    GetPart,
    ManifestReply,
    Outcome,
    Refused,
    Resolve,
    Shared,
    Start,
    Write,
)
from tensorhub.model.manifest import id_of
from tests.coordinator.layout_world import MANIFEST, NO_DIGESTS, Rank, World, lies_of
from tests.coordinator.test_bridges import A, B, cut, published, wide

UNREAD = ManifestMismatch("2 difference(s)", differences=("of 'w' ...", "'v' ..."))


def reading(
    name: str = "r", *, ranks: int = 2, partial: int = 0, world: World | None = None
) -> tuple[World, list[Rank]]:
    """A group that has said where it reads to, and of which so many ranks are partial. Who is asked
    does not answer.
    """
    if world is None:
        world, _ = published()
    world.covers = False
    readers = []
    for rank in range(ranks):
        readers.append(world.arrive(name, rank, ranks, *wide(rank), registers=False))
        readers[-1].partial = rank < partial
        world.register(readers[-1])
    world.fill(readers)
    for reader in readers:
        world.ready(reader, A, B)
    return world, readers


def covered(world: World, rank: Rank, asked: CheckCoverage) -> None:
    world.say(rank, Covered(asked.key, asked.rank, asked.readers))


def test_the_lowest_rank_is_asked_once_all_have_said_it_and_nothing_is_overwritten_before() -> None:
    world, _ = published()
    world.covers = False
    readers = world.group("r", [wide(rank) for rank in range(3)])
    world.fill(readers)
    for reader in reversed(readers[1:]):
        world.ready(reader, A, B)
    assert not any(reader.take(CheckCoverage) for reader in readers)
    world.ready(readers[0], A, B)
    (asked,) = readers[0].take(CheckCoverage)
    assert not any(reader.take(CheckCoverage) or reader.take(Write) for reader in readers)
    world.say(readers[0], GetPart(9, asked.readers))
    (reply,) = readers[0].take(ManifestReply)
    described = Published.decode(reply.manifest)
    assert described.shards == tuple([tuple(map(id_of, lies_of(reader))) for reader in readers])
    covered(world, readers[0], asked)
    assert all(reader.take(Write) for reader in readers)


def test_the_parts_of_which_it_consists_can_be_had() -> None:
    world, (first, second) = reading()
    for number, blob in enumerate((*lies_of(first), *lies_of(second))):
        world.say(first, GetPart(number, id_of(blob)))
    assert [reply.manifest for reply in first.take(ManifestReply)] == [
        *lies_of(first),
        *lies_of(second),
    ]
    assert not first.take(Refused)


def test_what_is_unread_ends_the_call_of_all_ranks_with_the_same_error() -> None:
    world, readers = reading()
    (asked,) = readers[0].take(CheckCoverage)
    world.say(readers[0], Abandon(asked.key, 0, ErrorInfo.of(UNREAD)))
    for reader in readers:
        (outcome,) = reader.take(Outcome)
        assert outcome.error is not None
        error = outcome.error.error()
        assert isinstance(error, ManifestMismatch)
        assert error.differences == UNREAD.differences
        assert not reader.take(Write)


def test_another_error_of_who_checks_is_its_own() -> None:
    world, readers = reading()
    (asked,) = readers[0].take(CheckCoverage)
    world.say(readers[0], Abandon(asked.key, 0, ErrorInfo.of(GroupAborted("cancelled"))))
    (outcome,) = readers[1].take(Outcome)
    assert outcome.error is not None
    assert outcome.error.error().causes == {0: "cancelled"}  # type: ignore[attr-defined]


def test_the_mismatch_of_one_rank_that_was_not_asked_is_its_own() -> None:
    world, readers = reading()
    world.say(readers[1], Abandon(world.operation(readers[1]).key, 1, ErrorInfo.of(UNREAD)))
    (outcome,) = readers[0].take(Outcome)
    assert outcome.error is not None
    assert isinstance(outcome.error.error(), GroupAborted)


@pytest.mark.parametrize(
    ("ranks", "partial", "is_asked"), [(1, 0, False), (2, 2, False), (2, 1, True), (2, 0, True)]
)
def test_who_is_alone_is_not_asked_nor_a_group_all_of_whose_ranks_may_leave_bytes(
    ranks: int, partial: int, is_asked: bool
) -> None:
    _, readers = reading(ranks=ranks, partial=partial)
    assert bool(readers[0].take(CheckCoverage)) is is_asked
    assert bool(readers[0].take(Write)) is not is_asked


def test_who_was_asked_is_lost_and_the_others_hear_it() -> None:
    world, readers = reading()
    world.lose(readers[0])
    (outcome,) = readers[1].take(Outcome)
    assert outcome.error is not None
    assert isinstance(outcome.error.error(), GroupAborted)
    assert not readers[1].take(Write)


@pytest.mark.heavy
def test_nobody_waits_longer_than_for_its_deadline() -> None:
    world, readers = reading()
    world.pass_time(1001.0)
    for reader in readers:
        (outcome,) = reader.take(Outcome)
        assert outcome.error is not None


def test_a_published_layout_is_not_asked_about() -> None:
    world, trainers = published()
    world.covers = False
    copies = world.group("c", [(rank.layout_id, rank.parts) for rank in trainers])
    world.fill(copies)
    for copy in copies:
        assert copy.take(Start)
        assert not copy.take(CheckCoverage)
        assert world.part(copy).reads


# ----------------------------------------------------------------------------------------------
# what is published


HOLE = ManifestMismatch("1 fault(s)", differences=("of 'w' ...",))


def publishing(*, is_whole: bool = False) -> tuple[World, list[Rank]]:
    world = World()
    trainers = world.group(
        "t", [(f"own/t{rank}", (b"names", b"where", b"of %d" % rank)) for rank in range(2)]
    )
    world.publish(trainers, 1, is_whole=is_whole)
    return world, trainers


def is_visible(world: World) -> bool:
    return world.version.visible


def outcomes(rank: Rank) -> list[ErrorInfo | None]:
    return [each.error for each in rank.take(Outcome)]


def test_the_lowest_rank_is_asked_what_is_published_and_nobody_reads_it_before() -> None:
    world, trainers = publishing()
    (asked,) = trainers[0].take(CheckCoverage)
    assert not trainers[1].take(CheckCoverage)
    # so that it can be asked for
    assert world.core.cluster.manifests.find(asked.readers) is not None
    assert not outcomes(trainers[0])
    assert not is_visible(world)
    covered(world, trainers[0], asked)
    assert is_visible(world)
    assert [outcomes(each) for each in trainers] == [[None], [None]]


def test_a_hole_ends_the_publish_on_all_ranks_and_leaves_the_number_unused() -> None:
    world, trainers = publishing()
    (asked,) = trainers[0].take(CheckCoverage)
    world.say(trainers[0], Abandon(asked.key, 0, ErrorInfo.of(HOLE)))
    for each in trainers:
        (error,) = outcomes(each)
        assert error is not None
        assert isinstance(error.error(), ManifestMismatch)
    assert world.core.cluster.manifests.find(asked.readers) is None
    world.publish(trainers, 1)
    assert world.version.visible


@pytest.mark.parametrize("order", [1, -1])
def test_ranks_that_make_other_digests_do_not_publish_together(order: int) -> None:
    """Their bytes would seem to have drifted, or a machine to damage them."""
    world, trainers = World(), []
    for rank, manifest in enumerate((MANIFEST, NO_DIGESTS)[::order]):
        world.manifest = manifest
        trainers.append(world.arrive("t", rank, 2, *cut(rank)))
        world.answer_questions(trainers[-1])
    world.publish(trainers, 1)
    for each in trainers:
        (error,) = outcomes(each)
        assert error is not None
        assert isinstance(error.error(), ManifestMismatch)
        assert "Options(digest=, integrity=)" in error.message
    assert not world.core.cluster.models["m"].versions


def test_equal_parts_are_checked_once_and_plain_ones_never() -> None:
    world, trainers = publishing(is_whole=True)
    for each in trainers:
        world.leave(each)
        world.fenced(each)
    world.publish(trainers, 2, is_whole=False)
    assert not trainers[0].take(CheckCoverage)
    assert world.version.number == 2
    assert world.version.visible
    plain = world.group("p", [("world/2", ()), ("world/2", ())])
    world.publish(plain, 3, is_whole=False)
    assert not plain[0].take(CheckCoverage)
    assert world.version.number == 3
    assert world.version.visible


def test_who_does_not_check_what_is_published_is_named() -> None:
    world, trainers = publishing()
    world.pass_time(1001.0)
    for each in trainers:
        (error,) = outcomes(each)
        assert error is not None
        assert "rank(s) [0] did not check in time" in str(error.error())


def test_a_number_that_is_overtaken_while_its_ranks_are_checked_is_not_published() -> None:
    """The number that is stored last is the mark of the next coordinator: it must not be the lower
    one.
    """
    world, trainers = publishing()
    plain = world.group("p", [("world/2", ()), ("world/2", ())])
    world.publish(plain, 2)
    covered(world, trainers[0], *trainers[0].take(CheckCoverage))
    for each in trainers:
        (error,) = outcomes(each)
        assert error is not None
        raised = error.error()
        assert isinstance(raised, VersionConflict)
        assert "the newest number so far is 2" in str(raised)
    assert world.restarted().core.cluster.models["m"].mark == 2


def test_a_publisher_that_may_have_missed_the_question_is_asked_again() -> None:
    world, trainers = publishing()
    (asked,) = trainers[0].take(CheckCoverage)
    for each in trainers:
        world.say(each, Resolve(asked.key, each.rank))
    assert trainers[0].take(CheckCoverage) == [asked]
    assert not trainers[1].take(CheckCoverage)
    covered(world, trainers[0], asked)
    assert world.version.visible


# ------------------------------------------------------------------------------------------ what
# several ranks publish


def same(world: World, rank: Rank, value: bytes = b"norm", *, number: int = 3) -> None:
    """It checks what it was asked to, and says which digest its part of the norm has."""
    (asked,) = rank.take(CheckCoverage)
    world.say(
        rank,
        Covered(asked.key, asked.rank, asked.readers, True, (Shared(number, "'norm'", value),)),
    )


def test_where_several_have_the_same_each_is_asked_at_each_publication() -> None:
    world, trainers = publishing()
    same(world, trainers[0])
    assert not is_visible(world)
    same(world, trainers[1])
    assert is_visible(world)
    for each in trainers:
        world.leave(each)
        world.fenced(each)
    world.publish(trainers, 2, is_whole=False)
    same(world, trainers[1], b"another")
    assert world.version.number == 2
    assert not is_visible(world)
    same(world, trainers[0], b"another")
    assert is_visible(world)


def test_what_has_drifted_apart_is_not_published_and_the_error_names_ranks_and_tensors() -> None:
    world, trainers = publishing()
    same(world, trainers[0])
    same(world, trainers[1], b"drifted")
    for each in trainers:
        (error,) = outcomes(each)
        assert error is not None
        raised = error.error()
        assert isinstance(raised, IntegrityError)
        assert not raised.retryable
        assert "ranks 0 and 1 of group 't' both have 'norm', and their bytes differ" in str(raised)
    world.publish(trainers, 1, is_whole=False)
    for each in trainers:
        same(world, each, b"mended")
    assert is_visible(world)


def test_each_part_is_compared_of_several_that_two_ranks_share() -> None:
    world, trainers = publishing()
    for each, values in zip(trainers, ("abc", "aBC"), strict=True):
        (asked,) = each.take(CheckCoverage)
        shared = tuple(
            Shared(number, f"'n{number}'", value.encode()) for number, value in enumerate(values)
        )
        world.say(each, Covered(asked.key, asked.rank, asked.readers, True, shared))
    (error,) = outcomes(trainers[0])
    assert error is not None
    assert "both have 'n1', 'n2', and their bytes differ" in str(error.error())


def test_what_has_different_numbers_is_not_compared() -> None:
    world, trainers = publishing()
    same(world, trainers[0])
    same(world, trainers[1], b"another", number=4)
    assert is_visible(world)


def test_of_more_results_than_are_kept_the_one_that_was_used_longest_ago_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(coverage, "COVERED_KEPT_MAX", 2)
    world, _ = published()
    world.covers = False

    def questions(group: str, layout: str) -> int:
        readers = world.group(group, [(f"own/{layout}{rank}", ()) for rank in range(2)])
        world.fill(readers)
        for reader in readers:
            world.ready(reader, A, B)
        asked = readers[0].take(CheckCoverage)
        for each in asked:
            covered(world, readers[0], each)
        return len(asked)

    layouts = enumerate("abacab")
    assert [questions(f"g{number}", layout) for number, layout in layouts] == [1, 1, 0, 1, 0, 1]
