"""Readers of another layout: when they begin, what they read of whom, and what becomes of them when
a source goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from tensorhub.coordinator import Connected, limits, views
from tensorhub.errors import ManifestMismatch, StateError, TransportUnavailable
from tensorhub.layouts.published import Published
from tensorhub.messages import (
    AddSource,
    Compare,
    GetPart,
    GetPublication,
    Join,
    LeaveGranted,
    ManifestReply,
    Need,
    Outcome,
    PublicationReply,
    Refused,
    Register,
    Start,
    Write,
)
from tensorhub.model.manifest import id_of
from tensorhub.testing import CHUNKS
from tensorhub.types import Endpoint, LayoutSummary, Location, Medium, OpKind, Purpose
from tests.coordinator.layout_world import MANIFEST, PARTS, Rank, World, root

A, B = Need(0, "half of it", 2, 20), Need(1, "half of it", 3, 30)


def cut(rank: int) -> tuple[str, tuple[bytes, ...]]:
    """A publisher's rank that has its own part of the model."""
    return f"own/t{rank}", (*PARTS, f"coordinates {rank}".encode())


def wide(rank: int) -> tuple[str, tuple[bytes, ...]]:
    """A reader's rank of another layout."""
    return f"own/r{rank}", ()


def published(ranks: int = 2) -> tuple[World, list[Rank]]:
    world = World()
    trainers = world.group("t", [cut(rank) for rank in range(ranks)])
    world.publish(trainers, 1)
    return world, trainers


def filling(
    world: World,
    name: str = "r",
    *,
    ranks: int = 1,
    site: str = "here",
    needs: Sequence[Need] = (A, B),
    selector: int | str = "latest",
) -> list[Rank]:
    """A group of another layout that has begun to read."""
    readers = world.group(name, [wide(rank) for rank in range(ranks)], site=site)
    world.fill(readers, selector)
    for reader in readers:
        world.ready(reader, *needs)
    return readers


def finish(
    world: World,
    readers: Sequence[Rank],
    trainers: Sequence[Rank] = (),
    needs: Sequence[Need] = (A, B),
) -> None:
    """The publisher says its digests, and the readers have them."""
    for trainer, need in zip(trainers, needs, strict=False):
        world.tell(trainer, need)
    for reader in readers:
        world.vote(reader, *(root(need) for need in needs))
    for reader in readers:
        assert [outcome.committed for outcome in reader.take(Outcome)] == [True]


def test_it_is_told_what_was_published_and_overwrites_nothing_before_it_has_said_what_it_needs() -> (
    None
):
    world, _ = published()
    (reader,) = world.group("r", [wide(0)])
    world.fill([reader])
    (start,) = reader.take(Start)
    assert (start.write, start.grants, start.manifest_id, start.part_ids) == (
        False,
        (),
        id_of(MANIFEST),
        (),
    )
    world.say(reader, GetPart(7, start.publication))
    (reply,) = reader.take(ManifestReply)
    parts = [tuple(map(id_of, cut(rank)[1])) for rank in range(2)]
    assert Published.decode(reply.manifest) == Published("xxh3-64", 2**28, tuple(parts))
    world.ready(reader, A, B)
    (write,) = reader.take(Write)
    assert [(each.source, each.selection, each.shard) for each in write.grants] == [
        ("t0", "half of it", 0),
        ("t1", "half of it", 1),
    ]


def test_it_commits_and_its_own_layout_follows_it() -> None:
    world, trainers = published()
    readers = filling(world)
    finish(world, readers, trainers)
    (layout,) = world.version.others.values()
    assert not layout.sourceless
    followers = filling(world, "f")
    assert world.sources(followers[0]) == [("r0", "", 0)]
    finish(world, followers)


def test_who_finds_a_holder_of_its_layout_in_its_site_follows_it_while_it_is_filled() -> None:
    world, _ = published()
    filling(world, "first")
    assert world.sources(filling(world, "second")[0]) == [("first0", "", 0)]
    assert len(world.sources(filling(world, "far", site="there")[0])) == 2
    assert world.sources(filling(world, "next", site="there")[0]) == [("far0", "", 0)]


def test_where_the_published_layout_has_gone_it_follows_its_own_from_anywhere() -> None:
    world, trainers = published()
    finish(world, filling(world), trainers)
    world.lose(*trainers)
    assert not any(world.version.holdings.values())
    followers = filling(world, "f", site="there")
    assert world.sources(followers[0]) == [("r0", "", 0)]
    finish(world, followers)


SPOOL, TCP = Endpoint("spool", "x", strides=False), Endpoint("tcp", "x")


def test_it_reads_of_those_who_can_be_read_across_layouts() -> None:
    """One of two replicas of each part, here (HSDP)."""
    world, trainers = World(), []
    for rank in range(4):
        world.endpoints = (SPOOL, TCP) if rank in (1, 2) else (SPOOL,)
        trainers.append(world.arrive("t", rank, 4, *cut(rank % 2)))
        world.answer_questions(trainers[-1])
    world.publish(trainers, 1)
    for trainer in trainers:
        world.tell(trainer)
    world.endpoints = (SPOOL, TCP)
    (reader,) = filling(world)
    assert [source for source, _, _ in world.sources(reader)] == ["t2", "t1"]


@pytest.mark.parametrize("theirs", [SPOOL, Endpoint("spool", "x")])
def test_who_can_read_nobody_across_layouts_is_told_so_at_once(theirs: Endpoint) -> None:
    """Also if the source could: both have to."""
    world = World()
    world.endpoints = (theirs,)
    world.publish(world.group("t", [cut(0), cut(1)]), 1)
    world.endpoints = (SPOOL,)
    (reader,) = world.group("r", [wide(0)])
    world.fill([reader])
    (outcome,) = reader.take(Outcome)
    assert outcome.error is not None
    assert isinstance(outcome.error.error(), TransportUnavailable)
    assert (
        "across layouts, which of its transports none can: let both sides have tcp"
        in outcome.error.message
    )
    equal = world.group("e", [cut(0), cut(1)])
    world.fill(equal)
    assert all(rank.take(Start) for rank in equal), (
        "who has the published layout reads it by anything"
    )


def test_the_ranks_of_a_group_share_the_replicas_of_a_class() -> None:
    """Each rank reads of both classes, and each class is there twice."""
    world = World()
    trainers = world.group("t", [cut(rank % 2) for rank in range(4)])
    world.publish(trainers, 1)
    for trainer in trainers:
        world.tell(trainer)
    readers = filling(world, ranks=2)
    found = [source for reader in readers for source, _, _ in world.sources(reader)]
    assert sorted(found) == ["t0", "t1", "t2", "t3"]


def test_a_lost_source_is_replaced_by_another_of_its_class() -> None:
    world = World()
    trainers = world.group("t", [cut(rank % 2) for rank in range(4)])
    world.publish(trainers, 1)
    (reader,) = filling(world)
    before = world.sources(reader)
    (gone,) = [source for source, _, shard in before if shard == 0]
    world.lose_source(reader, world.lease(reader, gone))
    (added,) = reader.take(AddSource)
    assert (added.grant.selection, added.grant.shard) == ("half of it", 0)
    assert {gone, added.grant.source} == {"t0", "t2"}
    assert len(world.sources(reader)) == 2


def test_nothing_is_overwritten_before_each_class_can_be_read() -> None:
    world, trainers = published()
    (reader,) = world.group("r", [wide(0)])
    world.fill([reader])
    world.cut_off(trainers[1])
    world.ready(reader, A, B)
    assert not reader.take(Write)
    world.connect(trainers[1])
    (write,) = reader.take(Write)
    assert [grant.shard for grant in write.grants] == [0, 1]


@pytest.mark.parametrize(
    ("needs", "text"),
    [
        ((A, Need(2, "x", 1, 1)), "no class of shards is named so"),
        ((A, A), "names a class of shards twice"),
    ],
)
def test_what_it_needs_is_checked(needs: tuple[Need, ...], text: str) -> None:
    world, _ = published()
    (reader,) = filling(world, needs=needs)
    (outcome,) = reader.take(Outcome)
    assert outcome.error is not None
    assert isinstance(outcome.error.error(), StateError)
    assert text in outcome.error.message
    assert not world.version.selections
    assert not world.version.others


def test_groups_of_one_layout_need_the_same() -> None:
    world, _ = published()
    filling(world)
    (other,) = filling(world, "o", needs=[A])
    (outcome,) = other.take(Outcome)
    assert outcome.error is not None
    assert "needs other chunks than others of the layout" in outcome.error.message


@pytest.mark.parametrize("other", [replace(B, chunks=4), replace(B, nbytes=31)])
def test_what_a_reader_says_of_a_selection_counts_for_no_other_reader(other: Need) -> None:
    """The publisher says how many chunks the selection has."""
    world, trainers = published()
    (liar,) = world.group("o", [("own/o", wide(0)[1])])
    world.fill([liar])
    world.ready(liar, A, other)
    (reader,) = filling(world)
    for trainer, need in zip(trainers, (A, B), strict=True):
        world.tell(trainer, need)
    world.vote(reader, root(A), root(B))
    (outcome,) = reader.take(Outcome)
    assert (outcome.committed, outcome.by_source) == (True, False)
    world.vote(liar, root(A), root(other))
    assert bool(liar.take(Compare)) == (other.chunks != B.chunks)


def test_there_are_only_so_many_selections(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = published()
    monkeypatch.setattr(limits, "SELECTIONS_MAX", 1)
    (reader,) = filling(world)
    (outcome,) = reader.take(Outcome)
    assert outcome.error is not None
    assert "SELECTIONS_MAX" in outcome.error.message


def test_as_many_selections_as_there_may_be_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = published()
    monkeypatch.setattr(limits, "SELECTIONS_MAX", 2)
    readers = filling(world), filling(world, "of the same layout")
    assert all(reader.take(Write) for (reader,) in readers)


def test_who_needs_nothing_has_everything() -> None:
    world, _ = published()
    (reader,) = filling(world, needs=())
    (write,) = reader.take(Write)
    assert write.grants == ()
    finish(world, [reader], needs=())


@pytest.mark.parametrize("ranks", [2, 10])
@pytest.mark.parametrize("is_reader_plain", [False, True])
def test_plain_tensors_of_several_ranks_are_refused(is_reader_plain: bool, ranks: int) -> None:
    world = World()
    plain: list[tuple[str, Sequence[bytes]]] = [(f"world/{ranks}", ())] * ranks
    trainers = world.group("t", plain if not is_reader_plain else [cut(0)])
    world.publish(trainers, 1)
    readers = world.group("r", plain if is_reader_plain else [wide(0)])
    world.fill(readers)
    (outcome,) = readers[0].take(Outcome)
    assert outcome.error is not None
    assert isinstance(outcome.error.error(), ManifestMismatch)
    assert "sources=" in outcome.error.message


def test_a_group_of_several_ranks_bridges_and_commits_together() -> None:
    world, trainers = published()
    readers = filling(world, ranks=2)
    for trainer, need in zip(trainers, (A, B), strict=True):
        world.tell(trainer, need)
    world.vote(readers[0], root(A), root(B))
    assert not readers[0].take(Outcome)
    world.vote(readers[1], root(A), root(B))
    assert [rank.take(Outcome)[0].committed for rank in readers] == [True, True]
    (layout,) = world.version.others.values()
    assert layout.layout_id.startswith("ranks/")


def test_a_fetch_of_another_layout() -> None:
    world, trainers = published()
    reader = world.arrive("f", 0, 1, "own/f", serves=False)
    world.fill([reader], kind=OpKind.FETCH)
    (start,) = reader.take(Start)
    assert start.publication
    world.ready(reader, A, B)
    assert len(world.sources(reader)) == 2
    finish(world, [reader], trainers)
    world.step_to_rest()
    assert not world.version.others
    assert not world.version.selections


def test_a_fetch_of_another_layout_has_its_only_shard() -> None:
    world, _ = published()
    reader = world.arrive("f", 0, 1, "own/f", serves=False, registers=False)
    use = (False, False, Medium.DEVICE, Purpose.USE, "own/f", 1, CHUNKS, b"", None)
    world.say(reader, Register(1, reader.name, "m", "f", 0, 1, 1, *use))
    assert "holds its own rank's shard" in reader.take(Refused)[0].error.message


def test_what_only_others_needed_is_forgotten_with_the_last_of_them() -> None:
    world, trainers = published()
    (reader,) = filling(world)
    finish(world, [reader], trainers)
    assert set(world.version.selections) == {(0, "half of it"), (1, "half of it")}
    world.leave(reader)
    assert reader.take(LeaveGranted)
    world.fenced(reader)
    assert not world.version.others
    assert not world.version.selections
    assert world.core.cluster.selections == 0


# -- what is shown of it


def test_what_is_described_says_which_layouts_there_are_and_who_bridges() -> None:
    world, _ = published()
    filling(world)
    filling(world, "follower")
    (info,), _, _ = views.page(world.core.cluster, None)
    layouts = {replica.group: (replica.layout_id, replica.bridging) for replica in info.replicas}
    assert layouts["t"] == (info.versions[0].layout_id, 0)
    assert layouts["r"] == (layouts["follower"][0], 1) == ("own/r0", 1)
    assert layouts["follower"][1] == 0
    reads = sorted((lease.reader, lease.source, lease.rank, lease.across) for lease in info.leases)
    assert reads == [("follower0", "r0", 0, False), ("r0", "t0", 0, True), ("r0", "t1", 1, True)]


def test_a_summary_counts_replicas_by_layout_if_there_are_several() -> None:
    world, trainers = published()
    model = world.core.cluster.models["m"]
    assert views.summarize(model, world.now)[1][1].layouts == ()
    readers = filling(world)
    filling(world, "follower")
    (counted,) = views.summarize(model, world.now)[1].values()
    trained = LayoutSummary(world.version.layout_id, True, 1, 1, 0, 2, 2 * CHUNKS, 2 * CHUNKS)
    assert counted.layouts == (trained, LayoutSummary("own/r0", False, 2, 0, 1, 2, 10, 0))
    finish(world, readers, trainers)
    (counted,) = views.summarize(model, world.now)[1].values()
    assert (counted.layouts_known, counted.layouts[1]) == (
        2,
        LayoutSummary("own/r0", False, 2, 1, 0, 2, 10, 5),
    )


def test_what_was_published_where_is_told_to_who_asks_by_selector() -> None:
    world, trainers = published()
    (reader,) = world.group("r", [wide(0)])
    world.fill([reader])
    (start,) = reader.take(Start)
    for selector in (1, "latest", "available"):
        world.say(reader, GetPublication(7, "m", selector))
        (reply,) = reader.take(PublicationReply)
        assert (reply.version, reply.layout_id) == (world.version.info, world.version.layout_id)
        assert id_of(reply.publication) == start.publication
    for model, selector in (("m", 2), ("m", "latest-1"), ("?", 1)):
        world.say(reader, GetPublication(8, model, selector))
        (refused,) = reader.take(Refused)
        assert refused.error.kind == "VersionUnavailable"
    world.lose(*trainers)
    world.say(reader, GetPublication(9, "m", "available"))
    (refused,) = reader.take(Refused)
    assert (refused.error.kind, refused.error.retryable) == ("VersionUnavailable", True)


def test_a_version_of_which_nobody_has_said_anything_cannot_be_described() -> None:
    world, _ = published()
    after = world.restarted()
    (reader,) = after.group("r", [wide(0)])
    after.say(reader, GetPublication(9, "m", "latest"))
    (refused,) = reader.take(Refused)
    assert (refused.error.kind, refused.error.retryable) == ("VersionUnavailable", True)
    assert "no worker that is here now has said what is in version 1" in refused.error.message


def guest_of(world: World, layout_id: str, *, site: str = "here") -> Rank:
    """Whoever has the read-only token, and says that he has that layout. He fetches."""
    guest = Rank(next(world.numbers), "read-only-g", 0, 1, layout_id, (), site)
    guest.serves = False
    world.ranks[guest.name] = world.sessions[guest.session] = guest
    world.step(Connected(guest.session, "read-only-w", "worker", read_only=True))
    world.say(guest, Join(guest.name, Location(site=site, host="g"), (Endpoint("tcp", "g"),), 1, 0))
    own = (layout_id, 1, 0, b"", None, "", (), (), True)
    where = ("m", guest.group, 0, 0, 1, False, False, Medium.DEVICE, Purpose.USE)
    world.say(guest, Register(next(world.numbers), guest.name, *where, *own))
    world.fill([guest], kind=OpKind.FETCH)
    return guest


@pytest.mark.parametrize(
    "lies",
    [(Need(0, "of another plan", 7, 20),), (replace(A, chunks=7), B)],
)
def test_what_a_guest_says_of_a_layout_holds_for_no_worker(lies: Sequence[Need]) -> None:
    world, trainers = published()
    guest = guest_of(world, "own/r0")
    world.ready(guest, *lies)
    assert world.part(guest).needs == tuple(lies)
    readers = filling(world)
    assert world.sources(readers[0]) == [("t0", A.selection, 0), ("t1", B.selection, 1)]
    finish(world, readers, trainers)
    (layout,) = [each for each in world.version.others.values() if each.layout_id == "own/r0"]
    assert not layout.sourceless
