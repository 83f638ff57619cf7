"""A reader has two kinds of source: holders of its own layout, and complete holders of the
published layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tensorhub.coordinator import Described, PersistFailed, Publication
from tensorhub.coordinator.states import VersionState
from tensorhub.layouts.published import Published, decoded
from tensorhub.messages import Begun, Fill, Outcome, Registered, Start
from tensorhub.types import OpKind
from tests.coordinator import layout_world
from tests.coordinator.layout_world import LEASE_S, Rank, World, root
from tests.coordinator.test_bridges import A, B, cut, filling, finish, published
from tests.coordinator.test_layouts_over_time import back, held_by


def held() -> tuple[World, list[Rank], Rank]:
    """A published version, and a group of another layout that has read it."""
    world, trainers = published()
    (reader,) = filling(world)
    finish(world, [reader], trainers)
    return world, trainers, reader


def leave(world: World, *ranks: Rank) -> None:
    for rank in ranks:
        world.leave(rank)
        world.fenced(rank)


@pytest.mark.parametrize(
    "layouts", [[("own/x", ())], [cut(0), cut(1)]], ids=["a third layout", "the published layout"]
)
@pytest.mark.parametrize("selector", [1, "latest", "available"])
def test_a_version_that_only_another_layout_holds_is_not_read(
    layouts: list[tuple[str, Sequence[bytes]]], selector: int | str
) -> None:
    """A call for a number and for "available" fails at once, any other selector at its deadline."""
    world, trainers, _ = held()
    leave(world, *trainers)
    assert world.version.state is VersionState.AVAILABLE
    ranks = world.group("x", layouts)
    world.fill(ranks, selector)
    if selector == "latest":
        assert not any(rank.take(Outcome) for rank in ranks)
        world.pass_time(1001.0)
    for rank in ranks:
        assert not rank.take(Start)
        (outcome,) = rank.take(Outcome)
        assert outcome.error is not None
        assert outcome.error.kind == "VersionUnavailable"
        text = outcome.error.message
        if selector == "available":
            assert text.endswith(
                "held now: version 1 by 1 replica of other layouts than the published one, which "
                "this call cannot read"
            )
        else:
            assert "is held in other layouts only (own/r0 of group 'r')" in text
            assert "tensorhub seed" in text


def test_a_group_of_the_layout_that_is_left_reads_it_chunk_by_chunk() -> None:
    world, trainers, _ = held()
    description = world.version.holdings.described_as
    leave(world, *trainers)
    (follower,) = filling(world, "f", selector=1)
    (start,) = follower.take(Start)
    assert start.publication == description
    assert world.sources(follower) == [("r0", "", 0)]
    finish(world, [follower])
    assert not world.version.has_live_source()


def test_a_reader_whose_source_is_gone_waits_for_the_published_layout() -> None:
    """It does not change to the layout that is left."""
    world, trainers, _ = held()
    (late,) = world.group("x", [("own/x", ())])
    world.fill([late], 1)
    world.ready(late, A, B)
    world.lose(*trainers)
    for lease in list(world.part(late).leases.values()):
        world.lose_source(late, lease)
    assert not late.take(Outcome)
    world.pass_time(1001.0)
    (outcome,) = late.take(Outcome)
    assert outcome.error is not None
    assert outcome.error.kind == "VersionUnavailable"


def test_what_is_still_filled_is_no_source_for_another_layout() -> None:
    world, trainers = published()
    filling(world)
    world.lose(*trainers)
    (late,) = world.group("x", [("own/x", ())])
    world.fill([late])
    assert not late.take(Start)
    assert world.version.state is VersionState.UNAVAILABLE


def restarted() -> tuple[World, Rank]:
    """After a restart a holder of another layout is back, and no holder of the published one."""
    world, _, reader = held()
    info = world.version.info
    world = world.restarted()
    reader = back(world, reader, held_by(reader, info))
    assert [answer.keep for answer in reader.take(Registered)] == [True]
    return world, reader


def test_after_a_restart_a_reader_goes_on_from_its_own_layout_though_no_holder_of_the_published_one_is_back() -> (
    None
):
    world, reader = restarted()
    info = world.version.info
    (late,) = world.group("s", [("own/r0", ())])
    late.generation, key = 5, world.key(late)
    resume = Begun(key, info.version, info.content_id, "", True, reader.publication)
    call = (OpKind.UPDATE, "latest", None, 5, False, False, 1000.0, (key,), resume)
    world.say(late, Fill(key, 0, late.name, *call))
    (start,) = late.take(Start)
    assert start.publication == reader.publication
    world.ready(late, A, B)
    assert world.sources(late) == [("r0", "", 0)]
    world.vote(late, root(A), root(B))
    assert [outcome.committed for outcome in late.take(Outcome)] == [True]


def test_after_a_restart_a_new_reader_plans_by_what_the_store_says_was_published() -> None:
    world, _ = restarted()
    (late,) = world.group("s", [("own/r0", ())])
    world.fill([late])
    (start,) = late.take(Start)
    published = Published.decode(world.core.cluster.manifests.find(start.publication) or b"")
    assert all(world.core.cluster.manifests.find(each) for each in published.part_ids)
    world.ready(late, A, B)
    assert world.sources(late) == [("r0", "", 0)]


def test_what_is_stored_stays_known_while_no_worker_holds_the_version() -> None:
    world, reader = restarted()
    world.lose(reader)
    assert world.version.state is VersionState.UNAVAILABLE
    assert world.version.holdings.described_as == reader.publication


def test_a_restart_decodes_a_layout_once_for_all_its_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, _, _ = held()
    of_kinds = (Publication, Described)
    (publication, described) = [each for each in world.stored if isinstance(each, of_kinds)]
    assert isinstance(publication, Publication)
    assert isinstance(described, Described)
    for number in range(2, 20):
        content = f"content {number}"
        world.stored.append(replace(publication, number=number, content_id=content))
        world.stored.append(replace(described, number=number, content_id=content))
    decode, calls = Published.decode, list[bytes]()

    def counted(blob: bytes, *more: int) -> Published:
        calls.append(blob)
        return decode(blob, *more)

    decoded.cache_clear()
    monkeypatch.setattr(Published, "decode", counted)
    versions = world.restarted().core.cluster.models["m"].versions
    assert len(versions) == 19
    assert all(version.holdings.is_described for version in versions.values())
    assert len(calls) == 1


@pytest.mark.parametrize("publishers_are_back", [True, False])
def test_a_copy_of_another_layout_counts_where_it_is_known_what_was_published(
    publishers_are_back: bool,
) -> None:
    """The store did not get the description: the publishers say it."""
    world, trainers, reader = held()
    info = world.version.info
    world.stored = [entry for entry in world.stored if not isinstance(entry, Described)]
    world = world.restarted()
    for trainer in trainers if publishers_are_back else ():
        back(world, trainer, held_by(trainer, info, is_publisher=True))
    reader = back(world, reader, held_by(reader, info))
    assert [answer.keep for answer in reader.take(Registered)] == [publishers_are_back]
    assert bool(world.version.others) == publishers_are_back


def test_after_a_restart_a_copy_that_names_another_publication_is_not_kept() -> None:
    world, _, reader = held()
    said = replace(held_by(reader, world.version.info), publication="another")
    world = world.restarted()
    reader = back(world, reader, said)
    assert [answer.keep for answer in reader.take(Registered)] == [False]
    assert not world.version.others
    world.pass_time(2 * LEASE_S)


def test_a_call_for_a_number_fails_once_the_last_published_shard_has_no_holder() -> None:
    """Until then the holders of the missing shards may come back."""
    world, trainers, _ = held()
    leave(world, trainers[0])
    (late,) = world.group("late", [("own/x", ())])
    world.fill([late], selector=1)
    assert not late.take(Outcome)
    leave(world, trainers[1])
    (outcome,) = late.take(Outcome)
    assert not outcome.committed


def test_a_description_that_the_store_could_not_take_is_stored_with_the_next_call_that_needs_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world, _ = published()

    def fails(record: int) -> PersistFailed:
        return PersistFailed(record, "disk full")

    with monkeypatch.context() as full:
        full.setattr(layout_world, "Persisted", fails)
        (reader,) = world.group("r", [("own/r0", ())])
        world.fill([reader])
    described = [each for each in world.stored if isinstance(each, Described)]
    assert len(described) == 1
    assert not world.version.holdings.stored
    filling(world, "s")
    assert [each for each in world.stored if isinstance(each, Described)] == described * 2
    assert world.version.holdings.stored
