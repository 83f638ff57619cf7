"""Ranks of one group that read the same from another site: one of them does, and the others have it from that one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tensorhub.coordinator import replicas
from tensorhub.coordinator.readers import REFUSALS_MAX
from tensorhub.digests import root_of
from tensorhub.messages import AddSource, Outcome, Progress, TellDigests
from tensorhub.testing import CHUNKS
from tests.coordinator.layout_world import MANIFEST, NO_DIGESTS, Rank, World, list_of
from tests.coordinator.test_bridges import A, B, cut, finish, published
from tests.coordinator.test_layouts_over_time import back, held_by
from tests.coordinator.test_replicas import LARGER, bridging, hsdp, of_one_part


def replicating(
    world: World, name: str = "r", *, ranks: int = 4, site: str = "there", of: Sequence[int] = (0, 1, 0, 1)
) -> list[Rank]:
    """A group of the published layout that has begun to read."""
    readers = world.group(name, [cut(part) for part in of[:ranks]], site=site)
    world.fill(readers)
    for reader in readers:
        world.ready(reader)
    return readers


def sources(world: World, readers: Sequence[Rank]) -> list[list[str]]:
    return [[source for source, _, _ in world.sources(reader)] for reader in readers]


def refuse(world: World, reader: Rank, source: str, reason: str = "refused") -> None:
    """It could not read there."""
    world.lose_source(reader, world.lease(reader, source), reason)


def test_one_of_equal_ranks_reads_from_the_other_site_and_the_others_follow_it() -> None:
    world, _ = hsdp()
    assert sources(world, replicating(world)) == [["t0"], ["t1"], ["r0"], ["r1"]]


def test_of_very_many_one_enters_in_whichever_order_they_call() -> None:
    world, ranks = World(), replicas.TWINS_MAX + 8
    world.publish(world.group("t", [cut(0)] * ranks), 1)
    readers = world.group("r", [cut(0)] * ranks, site="there")
    world.fill(readers[::-1])
    for reader in readers:
        world.ready(reader)
    assert len(replicas.twins(world.version, world.version.holdings, ranks - 1)) == replicas.TWINS_MAX
    first, *others = sources(world, readers)
    assert first == ["t0"]
    assert all(source.startswith("r") for (source,) in others)


def test_within_the_publishers_site_each_reads_as_before() -> None:
    world, trainers = hsdp()
    assert sources(world, replicating(world, site="here")) == [["t0"], ["t1"], ["t2"], ["t3"]]
    assert not any(trainer.take(TellDigests) for trainer in trainers)


def test_so_it_is_with_ranks_of_another_layout_that_have_the_same() -> None:
    world, _ = published()
    assert sources(world, bridging(world)) == [["t0", "t1"], ["x0"]]


def test_of_another_layout_too_each_reads_as_before_within_the_publishers_site() -> None:
    world, _ = published()
    assert sources(world, bridging(world, site="here")) == [["t0", "t1"]] * 2


def test_what_each_has_is_compared_with_the_digests_of_its_own_publisher() -> None:
    """Who has published it is asked at once, though nobody reads there."""
    world, trainers = hsdp()
    readers = replicating(world)
    assert [bool(trainer.take(TellDigests)) for trainer in trainers] == [True] * 4
    for trainer in trainers:
        world.tell(trainer)
    for reader in readers:
        world.vote(reader, root=root_of(list_of(CHUNKS)))
    assert [outcome.committed for reader in readers for outcome in reader.take(Outcome)] == [True] * 4


def test_of_another_layout_they_are_compared_with_what_they_both_need() -> None:
    world, trainers = published()
    finish(world, bridging(world), trainers)


def test_of_another_layout_those_that_read_something_else_do_not_follow_each_other() -> None:
    world, _ = published()
    first, second = world.group("x", [(f"own/x{rank}", ()) for rank in range(2)], site="there")
    world.fill([first, second])
    second.layout_id = first.layout_id
    world.ready(first, A, B)
    world.ready(second, A)
    assert sources(world, [first, second]) == [["t0", "t1"], ["t0"]]


def test_of_another_layout_nobody_knows_after_a_restart_who_has_read_the_same() -> None:
    world, trainers = published()
    ranks = bridging(world)
    finish(world, ranks, trainers)
    ranks[1].layout_id, info = ranks[0].layout_id, world.version.info
    held = [held_by(rank, info) for rank in ranks]
    world = world.restarted()
    for rank, its in [(back(world, rank, its), its) for rank, its in zip(ranks, held, strict=True)]:
        world.answer_questions(rank, its)
    (layout,) = world.version.others.values()
    assert layout.classes == {0: (0, 1)}
    assert [replicas.twins(world.version, layout, shard) for shard in range(2)] == [[], []]


def test_one_that_has_part_of_it_in_its_own_site_enters_for_the_others_too() -> None:
    world = World()
    trainers = list[Rank]()
    for rank, site in enumerate(("there", "here")):
        trainers.append(world.arrive("t", rank, 2, *cut(rank), site=site))
        world.answer_questions(trainers[-1])
    world.publish(trainers, 1)
    assert sources(world, bridging(world)) == [["t0", "t1"], ["x0"]]


def test_those_that_are_cut_into_other_chunks_do_not_follow_each_other() -> None:
    world, _ = of_one_part(MANIFEST, LARGER)
    assert sources(world, replicating(world, ranks=2, of=(0, 0))) == [["t0"], ["t1"]]


@pytest.mark.parametrize("known", [0, 2])
def test_those_of_which_the_digests_of_one_are_known_follow_each_other(known: int) -> None:
    world, trainers = hsdp()
    world.tell(trainers[known])
    assert sources(world, replicating(world)) == [["t0"], ["t1"], ["r0"], ["r1"]]


def test_those_that_are_known_to_differ_do_not_follow_each_other() -> None:
    world, trainers = hsdp()
    for trainer, value in zip(trainers, (b"a", b"b", b"c", b"b"), strict=True):
        world.tell(trainer, value=value)
    assert sources(world, replicating(world)) == [["t0"], ["t1"], ["t2"], ["r1"]]


def test_without_digests_nobody_could_tell_so_each_reads_its_own() -> None:
    world, _ = hsdp(manifest=NO_DIGESTS)
    assert sources(world, replicating(world)) == [["t0"], ["t1"], ["t2"], ["t3"]]


@pytest.mark.parametrize("bridges", [False, True])
def test_who_comes_before_the_other_may_write_tries_again(bridges: bool) -> None:
    world, _ = published() if bridges else hsdp()
    first, *_, late = bridging(world) if bridges else [(r := replicating(world))[0], r[2]]
    before, name = world.sources(first), first.name
    for _ in range(3):
        refuse(world, late, name)
        assert not late.take(AddSource)
        world.pass_time(2.0)
        assert [each.grant.source for each in late.take(AddSource)] == [name]
        world.say(first, Progress(world.operation(first).key, first.rank, 1, 10))
    assert world.sources(first) == before


@pytest.mark.parametrize("bridges", [False, True])
def test_nobody_waits_for_one_that_refuses_again_and_again(bridges: bool) -> None:
    world, _ = published() if bridges else hsdp()
    first, *_, late = bridging(world) if bridges else [(r := replicating(world))[0], r[2]]
    for _ in range(REFUSALS_MAX):
        refuse(world, late, first.name)
        assert not world.sources(late)
        world.pass_time(2.0)
    refuse(world, late, first.name)
    assert sources(world, [late]) == [["t0", "t1"] if bridges else ["t2"]]


def test_nobody_waits_for_one_that_has_refused_it_and_is_gone() -> None:
    world, trainers = published()
    ranks = complete(world, trainers, "there", "r", of=(0, 1))
    reader = replicating(world, "s", of=(0, 1))[1]
    assert sources(world, [reader]) == [["r1"]]
    refuse(world, reader, "r1")
    world.leave(ranks[1])
    world.fenced(ranks[1])
    assert sources(world, [reader]) == [[]]
    world.pass_time(1.0)
    assert sources(world, [reader]) == [["t1"]]


def test_who_is_refused_by_one_in_its_own_site_reads_from_another_one_there_at_once() -> None:
    world, trainers = hsdp()
    for name in ("c", "d"):
        complete(world, trainers, "there", name)
    reader = replicating(world)[2]
    ((before,),) = sources(world, [reader])
    refuse(world, reader, before)
    assert [before, *sources(world, [reader])[0]] in (["c2", "d2"], ["d2", "c2"])


def test_whom_one_in_another_site_has_refused_reads_from_the_next_one_at_once() -> None:
    """It waits for nobody who is as far as that."""
    world, trainers = published()
    complete(world, trainers, "elsewhere", of=(0, 1))
    reader = replicating(world, of=(0, 1))[1]
    ((before,),) = sources(world, [reader])
    refuse(world, reader, before)
    assert sorted([before, *sources(world, [reader])[0]]) == ["c1", "t1"]


def test_one_that_could_not_be_read_is_not_tried_again_while_there_is_another_source() -> None:
    world, trainers = hsdp()
    complete(world, trainers, "elsewhere")
    first, _, late, _ = replicating(world)
    refuse(world, late, first.name, "unreachable")
    ((before,),) = sources(world, [late])
    world.pass_time(2.0)
    refuse(world, late, before, "lost")
    assert sorted([before, *sources(world, [late])[0]]) == ["c2", "t2"]


def test_who_cannot_read_its_own_one_reads_another_one_that_has_the_same_and_fails_over_between_the_two() -> None:
    world, _ = hsdp()
    reader = replicating(world, site="here")[2]
    refuse(world, reader, "t2", "unreachable")
    assert sources(world, [reader]) == [["t0"]]
    refuse(world, reader, "t0", "lost")
    assert sources(world, [reader]) == [["r0"]]
    refuse(world, reader, "r0", "lost")
    assert sources(world, [reader]) == [[]]
    world.pass_time(1.0)
    for tried in ("t2", "t0", "r0"):
        assert sources(world, [reader]) == [[tried]]
        refuse(world, reader, tried, "lost")


def test_of_several_that_have_the_same_the_one_that_is_least_read_is_read() -> None:
    world = World()
    trainers = world.group("t", [cut(0)] * 4)
    world.publish(trainers, 1)
    readers = complete(world, trainers, "there", "r", of=[0] * 4)
    world.lose(*readers[2:])
    assert sources(world, replicating(world, "s", of=[0] * 4)) == [["r0"], ["r1"], ["r0"], ["r1"]]


@pytest.mark.parametrize("bridges", [False, True])
def test_nobody_waits_for_one_that_cannot_be_read(bridges: bool) -> None:
    world, _ = published() if bridges else hsdp()
    first, *_, late = bridging(world) if bridges else [(r := replicating(world))[0], r[2]]
    refuse(world, late, first.name, "unreachable")
    assert sources(world, [late]) == [["t0", "t1"] if bridges else ["t2"]]


def complete(
    world: World, trainers: Sequence[Rank], site: str, name: str = "c", *, of: Sequence[int] = (0, 1, 0, 1)
) -> list[Rank]:
    """A group of the published layout that holds it there."""
    readers = replicating(world, name, site=site, of=of)
    for trainer in trainers:
        world.tell(trainer)
    for reader in readers:
        world.vote(reader, root=root_of(list_of(CHUNKS)))
    return readers


def test_who_is_followed_does_not_follow_back() -> None:
    """Its source is lost: it has the next one from another site again, and is followed as before."""
    world, trainers = hsdp()
    complete(world, trainers, "elsewhere")
    readers = replicating(world)
    ((first,), *_) = before = sources(world, readers)
    world.lose_source(readers[0], world.lease(readers[0], first))
    (following,) = sources(world, readers[:1])
    assert following != [first]
    assert following[0] in ("t0", "c0")
    assert sources(world, readers[1:]) == before[1:]


def test_a_group_that_comes_later_follows_the_first_one() -> None:
    world, _ = hsdp()
    replicating(world)
    assert sources(world, replicating(world, "s")) == [["r0"], ["r1"], ["r2"], ["r3"]]


def test_what_no_rank_of_a_site_has_as_its_own_is_read_of_one_that_has_the_same() -> None:
    """Of the first group there is only rank 0 left."""
    world, trainers = hsdp()
    readers = complete(world, trainers, "there", "r")
    world.lose(readers[2], readers[3])
    assert sources(world, replicating(world, "s")) == [["r0"], ["r1"], ["r0"], ["r1"]]
