"""What somebody who comes back says that he holds: when that counts, as what, and when it is
ordered out.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.messages import Held, Register, Registered
from tensorhub.model.digests import root_of
from tensorhub.model.manifest import id_of
from tensorhub.testing import CHUNKS
from tensorhub.types import Medium, Purpose
from tests.coordinator.layout_world import MANIFEST, NO_DIGESTS, Rank, World, list_of, root
from tests.coordinator.test_bridges import A, B, cut, filling, published
from tests.coordinator.test_layouts_over_time import back, held_by
from tests.coordinator.test_one_origin import held

ROOT = root_of(list_of(CHUNKS))


def is_kept(rank: Rank) -> bool | None:
    """What it was told last; None: nothing."""
    answers = rank.take(Registered)
    return answers[-1].keep if answers else None


def copied(*, manifest: bytes = MANIFEST) -> tuple[World, list[Rank], list[Held]]:
    """The coordinator after one under which a group of the published layout has read a version; and
    what its ranks hold.
    """
    world = World(manifest=manifest)
    trainers = world.group("t", [cut(0), cut(1)])
    world.publish(trainers, 1)
    copies = world.group("c", [cut(0), cut(1)])
    world.fill(copies)
    for trainer, copy in zip(trainers, copies, strict=True):
        if manifest is MANIFEST:
            world.tell(trainer)
        world.vote(copy, root=ROOT if manifest is MANIFEST else b"")
    info, what = world.version.info, id_of(manifest)
    said = [
        replace(held_by(copy, info, is_publisher=True), published=False, manifest_id=what)
        for copy in copies
    ]
    return world.restarted(), copies, said


def test_what_a_rank_has_only_voted_for_is_not_held() -> None:
    world, _ = published()
    (reader,) = filling(world)
    world.vote(reader, root(A), root(B))
    info = world.version.info
    world = world.restarted()
    reader = back(world, reader, replace(held_by(reader, info), voted=True))
    assert is_kept(reader)
    assert world.member(reader).holding is None


def test_other_content_of_that_number_is_ordered_out() -> None:
    """Whatever bytes it has: it is another publication (R1, R2)."""
    world, _, reader = held()
    info = world.version.info
    world = world.restarted()
    assert (
        is_kept(back(world, reader, replace(held_by(reader, info), content_id="another one")))
        is False
    )
    assert not world.version.others


def test_a_fetch_holds_nothing_for_others() -> None:
    world, copies, said = copied()
    rank = world.arrive("f", 0, 1, "", registers=False, serves=False)
    world.register(rank, replace(said[0], root=ROOT), parts=copies[0].parts)
    assert is_kept(rank) is False
    assert world.member(rank).holding is None


@pytest.mark.parametrize("is_said_to_be_published", [False, True])
def test_without_a_root_nobody_counts_before_its_mates_are_here(
    is_said_to_be_published: bool,
) -> None:
    """Also who says that he has published it, and belongs to another group."""
    world, copies, said = copied(manifest=NO_DIGESTS)
    said = [replace(each, published=is_said_to_be_published) for each in said]
    first = back(world, copies[0], said[0])
    assert is_kept(first) is None
    second = back(world, copies[1], said[1])
    world.answer_questions(first, said[0])
    assert [is_kept(each) for each in (first, second)] == [True, True]
    assert world.version.holdings.have_sources()


def test_who_names_no_root_counts_where_one_is_known() -> None:
    world, copies, said = copied()
    assert all(each.root == b"" for each in said)
    first, second = (back(world, copy, each) for copy, each in zip(copies, said, strict=True))
    world.answer_questions(first, said[0])
    assert [is_kept(each) for each in (first, second)] == [True, True]


def test_a_group_of_another_size_does_not_hold_a_published_shard() -> None:
    """Its layout is another one, whatever its bytes are."""
    world, _, said = copied()
    rank = world.arrive("alone", 0, 1, *cut(0), registers=False)
    world.register(rank, replace(said[0], root=ROOT), parts=rank.parts)
    assert is_kept(rank) is False


@pytest.mark.parametrize(("shard", "counts"), [(1, True), (2, False)])
def test_a_copy_of_a_shard_counts_if_there_is_that_shard(shard: int, counts: bool) -> None:
    world, _, said = copied()
    rank = world.arrive("copy", 0, 1, "", registers=False)
    where = ("m", rank.group, 0, shard, 1, True, False, Medium.HOST, Purpose.RETENTION)
    what = replace(said[0], manifest=MANIFEST, part_ids=())
    world.say(rank, Register(3, rank.name, *where, "", 1, CHUNKS, MANIFEST, what, id_of(MANIFEST)))
    assert is_kept(rank) is counts
