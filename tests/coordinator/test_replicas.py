"""Ranks that have published the same part of the model: when each is read, and what becomes of
readers if they differ.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.coordinator import limits
from tensorhub.errors import IntegrityError
from tensorhub.messages import Digests, Outcome, Register, Retain, Revoked, Start, TellDigests
from tensorhub.model.manifest import Manifest, id_of
from tensorhub.testing import CHUNKS
from tensorhub.types import Medium, Purpose
from tests.coordinator.layout_world import MANIFEST, NO_DIGESTS, Rank, World, root
from tests.coordinator.test_bridges import A, B, cut, filling
from tests.coordinator.test_layouts_over_time import (
    acknowledge,
    asks_to_leave,
    back,
    held_by,
    is_refused,
)

LARGER = replace(Manifest.decode(MANIFEST), chunk_bytes=2**30).encode()  # chunks


def hsdp(manifest: bytes = MANIFEST) -> tuple[World, list[Rank]]:
    """Each of two parts is on two ranks."""
    world = World(manifest=manifest)
    trainers = world.group("t", [cut(rank % 2) for rank in range(4)])
    world.publish(trainers, 1)
    return world, trainers


def of_one_part(*manifests: bytes) -> tuple[World, list[Rank]]:
    """All ranks have the same part, each in memory of its own manifest."""
    world, trainers = World(), []
    for rank, manifest in enumerate(manifests):
        world.manifest = manifest
        trainers.append(world.arrive("t", rank, len(manifests), *cut(0)))
        world.answer_questions(trainers[-1])
    world.manifest = manifests[0]
    world.publish(trainers, 1)
    return world, trainers


def bridging(world: World, name: str = "x", *, site: str = "there") -> list[Rank]:
    """A group of another layout, each rank of which has all."""
    readers = world.group(name, [(f"own/x{rank}", ()) for rank in range(2)], site=site)
    world.fill(readers)
    for reader in readers:
        reader.layout_id, own = "own/x0", reader.layout_id
        world.ready(reader, A, B)
        reader.layout_id = own
    return readers


def sources(world: World, readers: list[Rank]) -> list[str]:
    return sorted(source for reader in readers for source, _, _ in world.sources(reader))


def error_of(rank: Rank) -> str:
    (outcome,) = rank.take(Outcome)
    assert outcome.error is not None
    assert isinstance(outcome.error.error(), IntegrityError)
    return outcome.error.message


def is_unaware(world: World, trainer: Rank) -> None:
    """It was asked about B, and nobody has read that there."""
    assert B.selection in [each.selection for each in trainer.take(TellDigests)]
    world.say(
        trainer, Digests(trainer.name, trainer.generation, 0, (), b"", True, B.selection, B.shard)
    )


def test_all_of_a_class_are_read_from_the_beginning_and_asked_for_their_digests_when_they_are_published() -> (
    None
):
    world, trainers = hsdp()
    assert [[each.selection for each in trainer.take(TellDigests)] for trainer in trainers] == [
        [""]
    ] * 4
    assert sources(world, filling(world, ranks=2)) == ["t0", "t1", "t2", "t3"]


def test_memory_without_digests_is_what_its_publisher_says() -> None:
    world, trainers = hsdp(manifest=NO_DIGESTS)
    assert sources(world, filling(world, ranks=2)) == ["t0", "t1", "t2", "t3"]
    assert not any(trainer.take(TellDigests) for trainer in trainers)


def test_ranks_that_cut_the_same_part_into_other_chunks_have_other_digests_and_do_not_differ() -> (
    None
):
    world, trainers = of_one_part(MANIFEST, LARGER)
    (reader,) = filling(world, needs=[A])
    for trainer, value in zip(trainers, (b"a", b"b"), strict=True):
        world.tell(trainer, value=value)
    world.tell(trainers[0], A)
    world.vote(reader, root(A))
    assert reader.take(Outcome)[0].committed


@pytest.mark.parametrize("lost", [(0,), (0, 1), (0, 2)])
def test_what_another_rank_has_of_a_lost_one_is_kept(lost: tuple[int, ...]) -> None:
    """A retained version can be read as long as somebody has each part. If a part is gone, nothing
    is kept of the others.
    """
    world, trainers = hsdp()
    world.say(trainers[0], Retain(1, "m", 1))
    for trainer in trainers:
        acknowledge(world, trainer)
    world.lose(*(trainers[rank] for rank in lost))
    staying = [trainer for rank, trainer in enumerate(trainers) if rank not in lost]
    is_gone = lost == (0, 2)
    assert [asks_to_leave(world, trainer) for trainer in staying] == [is_gone] * len(staying)
    assert is_gone or all(is_refused(world, trainer) for trainer in staying[:1])


def copy_of(world: World, shard: int) -> Rank:
    """A copy in host memory that is to keep that shard, and has called."""
    copy = world.arrive(f"copy of {shard}", registers=False)
    where = (
        "m",
        copy.group,
        0,
        shard,
        1,
        True,
        False,
        Medium.HOST,
        Purpose.RETENTION,
        "",
        1,
        CHUNKS,
    )
    world.say(copy, Register(3, copy.name, *where, MANIFEST, None, id_of(MANIFEST)))
    world.fill([copy], 1)
    return copy


def test_a_copy_of_a_shard_begins_once_that_one_is_there() -> None:
    """After a restart, of which the rank that has another shard does not come back."""
    world, trainers = hsdp()
    world.say(trainers[0], Retain(1, "m", 1))
    info = world.version.info
    world = world.restarted()
    for trainer in (trainers[1], trainers[3]):
        back(world, trainer, held_by(trainer, info, is_publisher=True))
    copy = copy_of(world, 2)
    assert not copy.take(Start)
    back(world, trainers[2], held_by(trainers[2], info, is_publisher=True))
    (start,) = copy.take(Start)
    assert [grant.source for grant in start.grants] == ["t2"]


def test_those_that_differ_are_named_with_their_tensors_and_nobody_is_quarantined() -> None:
    world, trainers = hsdp()
    (reader,) = filling(world)
    for trainer in trainers[:3]:
        world.tell(trainer)
    assert not reader.take(Outcome)
    world.tell(trainers[3], value=b"other")
    text = error_of(reader)
    assert "ranks 1 and 3 of group 't'" in text
    assert "('w')" in text
    (late,) = filling(world, "late")
    assert error_of(late) == text
    assert not any(trainer.take(Revoked) for trainer in trainers)
    assert not any(
        holding.trust.quarantined for there in world.version.holdings.values() for holding in there
    )


def test_of_three_that_have_the_same_part_the_last_may_differ() -> None:
    world = World()
    trainers = world.group("t", [cut(0)] * 3)
    world.publish(trainers, 1)
    (reader,) = filling(world, needs=[A])
    for trainer in trainers[:2]:
        world.tell(trainer)
    assert not reader.take(Outcome)
    world.tell(trainers[2], value=b"other")
    assert "ranks 0 and 2 of group 't'" in error_of(reader)


@pytest.mark.parametrize("differs", [False, True])
def test_a_vote_waits_until_all_of_a_class_have_told_their_digests(differs: bool) -> None:
    world, trainers = hsdp()
    (reader,) = filling(world)
    world.tell(trainers[0], A)
    world.tell(trainers[1], B)
    world.vote(reader, root(A), root(B))
    for trainer in trainers[:3]:
        world.tell(trainer)
    assert not reader.take(Outcome)
    world.tell(trainers[3], value=b"other" if differs else b"a")
    if differs:
        assert "ranks 1 and 3" in error_of(reader)
    else:
        assert reader.take(Outcome)[0].committed


def test_a_publisher_where_nobody_has_read_a_selection_leaves_it_to_its_equal() -> None:
    world, trainers = hsdp()
    for trainer in trainers:
        world.tell(trainer)
    (reader,) = filling(world)
    world.tell(trainers[0], A)
    world.vote(reader, root(A), root(B))
    is_unaware(world, trainers[1])
    (asked,) = [each for each in trainers[3].take(TellDigests) if each.selection]
    assert (asked.selection, asked.shard) == (B.selection, B.shard)
    world.tell(trainers[3], B)
    assert reader.take(Outcome)[0].committed


@pytest.mark.parametrize("forgotten", [0, 1])
def test_of_digests_that_are_forgotten_nobody_can_say_in_what_they_differ(
    forgotten: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DIGEST_BYTES_MAX", 9 * CHUNKS)  # one list at a time
    world, trainers = of_one_part(MANIFEST, MANIFEST)
    (reader,) = filling(world, needs=[A])
    world.tell(trainers[forgotten])
    world.tell(trainers[1 - forgotten], value=b"b")
    assert "in which tensors is not known any more" in error_of(reader)
