"""Ranks of one group that have something in common: which of them is told to read it of which other one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from tensorhub.messages import Outcome, Write
from tensorhub.types import Endpoint
from tests.coordinator.layout_world import Rank, World, root
from tests.coordinator.test_bridges import A, B, cut, published
from tests.coordinator.test_enclosing import OWN, copied

NEEDS = [[A], [B], [A, B]]  # what the ranks read: each another part


def group(world: World, sites: Sequence[str], name: str = "x") -> list[Rank]:
    """Of another layout, in these sites."""
    ranks = []
    for rank, site in enumerate(sites):
        ranks.append(world.arrive(name, rank, len(sites), f"own/{name}{rank}", site=site))
        world.answer_questions(ranks[-1])
    return ranks


def begin(
    world: World, ranks: Sequence[Rank], bundles: Sequence[Sequence[str]], *, staged: bool = False
) -> list[Mapping[str, str]]:
    """They are ready to write. Of each: the mates that it is told of, by bundle."""
    world.fill(ranks, staged=staged)
    for rank, its in zip(ranks, bundles, strict=True):
        world.ready(rank, *NEEDS[rank.rank], bundles=its)
    return [told(rank) for rank in ranks]


def told(rank: Rank) -> Mapping[str, str]:
    (write,) = rank.take(Write)
    assert len({mate.lease for mate in write.mates}) == len(write.mates)
    return {mate.selection: mate.source for mate in write.mates}


def test_each_has_each_bundle_of_the_one_before_that_has_it() -> None:
    """The first one brings it there."""
    world, _ = published()
    ranks = group(world, ["there"] * 3)
    assert begin(world, ranks, [["norms", "kv 0"], ["norms"], ["norms", "kv 0"]]) == [
        {},
        {"norms": "x0"},
        {"norms": "x1", "kv 0": "x0"},
    ]


def test_what_a_mate_is_told_to_be_read_under() -> None:
    world, _ = published()
    first, second = group(world, ["there"] * 2)
    world.fill([first, second])
    for rank in (first, second):
        world.ready(rank, *NEEDS[rank.rank], bundles=["norms"])
    (write,) = second.take(Write)
    (mate,) = write.mates
    assert (mate.registration, mate.generation, mate.selection, mate.root) == ("x0", first.generation, "norms", b"")
    assert not mate.complete
    assert mate.lease not in {grant.lease for grant in write.grants}
    assert [source for source, _, _ in world.sources(second)] == ["t1"]  # nothing is lent


def test_within_the_publishers_site_nobody_has_mates() -> None:
    world, _ = published()
    assert begin(world, group(world, ["here"] * 2), [["norms"]] * 2) == [{}, {}]


def test_each_site_has_its_own_first_one() -> None:
    world, _ = published()
    ranks = group(world, ["there", "elsewhere", "there"])
    assert begin(world, ranks, [["norms"]] * 3) == [{}, {}, {"norms": "x0"}]


def test_who_is_beside_the_publisher_is_no_mate_of_those_elsewhere() -> None:
    world, _ = published()
    ranks = group(world, ["here", "there", "there"])
    assert begin(world, ranks, [["norms"]] * 3) == [{}, {}, {"norms": "x1"}]


def test_who_has_nothing_in_common_has_no_mates() -> None:
    world, _ = published()
    assert begin(world, group(world, ["there"] * 3), [["a"], [], ["b"]]) == [{}, {}, {}]


@pytest.mark.parametrize("endpoints", [(), (Endpoint("spool", "x"),), (Endpoint("tcp", "x", strides=False),)])
@pytest.mark.parametrize("which", [0, 1])
def test_who_cannot_be_read_by_tcp_or_cannot_read_by_it_is_passed_over(endpoints: tuple[Endpoint, ...], which: int) -> None:
    """They read from the trainers by another way."""
    world = World()
    world.endpoints = (Endpoint("tcp", "x"), Endpoint("other", "x"))
    world.publish(world.group("t", [cut(0), cut(1)]), 1)
    ranks = []
    for rank in range(3):
        world.endpoints = (*endpoints, Endpoint("other", "x")) if rank == which else (Endpoint("tcp", "x"),)
        ranks.append(world.arrive("x", rank, 3, f"own/x{rank}", site="there"))
        world.answer_questions(ranks[-1])
    expected = [{}, {}, {"norms": "x1"}] if which == 0 else [{}, {}, {"norms": "x0"}]
    assert begin(world, ranks, [["norms"]] * 3) == expected


def test_of_a_staged_update_nobody_can_be_read() -> None:
    world, _ = published()
    assert begin(world, group(world, ["there"] * 2), [["norms"]] * 2, staged=True) == [{}, {}]


def test_who_holds_the_version_already_is_no_mate() -> None:
    """It has nothing to fill, and its bundles are not known."""
    world, trainers = published()
    ranks = group(world, ["there"] * 3)
    assert begin(world, ranks, [["norms"]] * 3)[1] == {"norms": "x0"}
    finish(world, trainers, ranks)
    world.lose(ranks[1])
    anew = Rank(0, "x", 1, 3, "own/x1", (), "there")
    anew.name, anew.endpoints = "x1 anew", world.endpoints
    world.ranks[anew.name] = anew
    world.connect(anew)
    world.register(anew)
    world.answer_questions(anew)
    world.fill([ranks[0], anew, ranks[2]])
    assert [world.part(rank).needs_bytes for rank in (ranks[0], anew, ranks[2])] == [False, True, False]
    world.ready(anew, *NEEDS[1], bundles=["norms"])
    assert told(anew) == {}


def finish(world: World, trainers: Sequence[Rank], ranks: Sequence[Rank]) -> None:
    for trainer, need in zip(trainers, (A, B), strict=True):
        world.tell(trainer, need)
    for rank in ranks:
        world.vote(rank, *map(root, NEEDS[rank.rank]))
    assert [outcome.committed for rank in ranks for outcome in rank.take(Outcome)] == [True] * len(ranks)


def test_what_mates_have_brought_is_compared_with_what_was_published() -> None:
    world, trainers = published()
    ranks = group(world, ["there"] * 3)
    begin(world, ranks, [["norms"]] * 3)
    finish(world, trainers, ranks)


def test_a_mate_that_is_lost_ends_the_operation_of_all() -> None:
    world, _ = published()
    ranks = group(world, ["there"] * 3)
    begin(world, ranks, [["norms"]] * 3)
    world.lose(ranks[0])
    assert [outcome.committed for rank in ranks[1:] for outcome in rank.take(Outcome)] == [False, False]


def test_a_mate_is_nobodys_source_for_more_than_that() -> None:
    """Whose read of it fails is granted nothing else for it, and nobody is asked about it."""
    world, trainers = published()
    ranks = group(world, ["there"] * 2)
    begin(world, ranks, [["norms"]] * 2)
    before = world.sources(ranks[1])
    world.lose_source(ranks[1], world.lease(ranks[1], "t1"))
    assert [source for source, _, _ in world.sources(ranks[1])] in ([], ["t1"])
    world.pass_time(2.0)
    assert world.sources(ranks[1]) == before
    finish(world, trainers, ranks)


def test_who_reads_with_what_encloses_has_no_mates() -> None:
    """It has to have read there what it vouches for."""
    world, trainers, _ = copied()
    world.lose(*trainers)
    ranks = group(world, ["there"] * 2)
    world.fill(ranks)
    for rank in ranks:
        world.ready(rank, A, B, bundles=["norms"])
    for rank in ranks:
        (write,) = rank.take(Write)
        assert [grant.root for grant in write.grants] == [OWN, OWN]
        assert write.mates == ()


def test_who_names_a_bundle_twice_is_not_told_to_read_itself() -> None:
    world, _ = published()
    assert begin(world, group(world, ["there"] * 2), [["norms"] * 3] * 2) == [{}, {"norms": "x0"}]
