"""A source that refuses a reader may not have heard yet that it may serve. A reader waits, if it is
near. So does a reader whose neighbour was refused.
"""

from __future__ import annotations

import pytest

from tensorhub.coordinator.readers import REFUSALS_MAX, RETRY_S_FIRST
from tensorhub.errors import StateError
from tensorhub.messages import Abandon, AddSource, ErrorInfo
from tensorhub.testing import CHUNKS, StepwiseCluster
from tensorhub.testing.sim.layouts import Layout, described
from tensorhub.types import Location
from tests.coordinator.layout_world import Rank, World
from tests.coordinator.test_bridges import A, B, cut, filling, published, wide

RETRY_S = 2.0  # at most, until it is tried again


def neighbours(layout: str = "other") -> tuple[World, list[Rank], Rank, str]:
    """A publisher, and two groups that fill in another site, of its layout or another one. Also a
    rank of the second group, which reads from the first one, and that one's name.
    """
    world, trainers = published()
    if layout == "other":
        first, second = (filling(world, name, site="there") for name in ("first", "second"))
    else:
        first, second = (
            world.group(name, [cut(0), cut(1)], site="there") for name in ("first", "second")
        )
        for group in (first, second):
            world.fill(group)
            for rank in group:
                world.ready(rank)
    assert [source for source, _, _ in world.sources(second[0])] == ["first0"]
    return world, trainers, second[0], "first0"


def granted(reader: Rank) -> set[str]:
    return {added.grant.source for added in reader.take(AddSource)}


@pytest.mark.parametrize("layout", ["other", "published"])
def test_who_is_refused_by_a_neighbour_tries_it_again_before_it_reads_from_another_site(
    layout: str,
) -> None:
    world, _, reader, near = neighbours(layout)
    for _ in range(REFUSALS_MAX):
        world.lose_source(reader, world.lease(reader, near), "refused")
        assert not granted(reader)
        world.pass_time(RETRY_S)
        assert granted(reader) == {near}
    world.lose_source(reader, world.lease(reader, near), "refused")
    assert granted(reader) == ({"t0", "t1"} if layout == "other" else {"t0"})


@pytest.mark.parametrize("reason", ["lost", "stalled", "starved", "corrupt"])
def test_a_neighbour_that_fails_in_another_way_is_not_waited_for(reason: str) -> None:
    world, _, reader, near = neighbours()
    world.lose_source(reader, world.lease(reader, near), reason)
    assert granted(reader) == {"t0", "t1"}


def test_nobody_waits_in_the_second_half_of_his_time() -> None:
    world, _, reader, near = neighbours()
    world.pass_time(501.0)
    world.lose_source(reader, world.lease(reader, near), "refused")
    assert granted(reader) == {"t0", "t1"}


def test_whoever_else_is_near_is_read_at_once() -> None:
    world, _, reader, near = neighbours()
    (third,) = filling(world, "third", site="there")
    (last,) = filling(world, "last", site="there")
    source = world.sources(last)[0][0]
    world.lose_source(last, world.lease(last, source), "refused")
    found = granted(last)
    assert len(found) == 1
    assert found <= {near, reader.name, third.name} - {source}


def two_in_another_site(layout: str = "published") -> tuple[World, list[Rank], list[Rank]]:
    world, _ = published()
    shapes = {"other": [wide(0)], "published": [cut(0), cut(1)]}[layout]
    first, second = (world.group(name, shapes, site="there") for name in ("first", "second"))
    return world, first, second


def begin(world: World, group: list[Rank], *, staged: bool = False) -> None:
    world.fill(group, staged=staged)
    for rank in group:
        world.ready(rank, *((A, B) if world.part(rank).bridges else ()))


def refuse_all(world: World, reader: Rank) -> None:
    for lease in [*world.part(reader).leases.values()]:
        world.lose_source(reader, lease, "refused")


def refuse(world: World, reader: Rank) -> None:
    refuse_all(world, reader)
    assert not granted(reader)


def read_by(world: World, reader: Rank) -> list[str]:
    return [source for source, _, _ in world.sources(reader)]


@pytest.mark.parametrize("layout", ["other", "published"])
def test_a_staged_update_follows_a_neighbour_that_is_refused(layout: str) -> None:
    world, first, second = two_in_another_site(layout)
    begin(world, first)
    refuse(world, first[0])
    begin(world, second, staged=True)
    assert not read_by(world, second[0])
    world.pass_time(RETRY_S)
    assert granted(first[0]) == ({"t0", "t1"} if layout == "other" else {"t0"})
    assert read_by(world, second[0]) == ["first0"]


def test_what_a_neighbour_that_is_refused_can_follow_begins_at_once() -> None:
    world, first, second = two_in_another_site()
    begin(world, first)
    refuse(world, first[0])
    begin(world, second)
    assert read_by(world, second[0]) == ["t0"]
    assert granted(first[0]) == {"second0"}


def give_up(world: World, rank: Rank) -> None:
    key, error = world.operation(rank).key, ErrorInfo.of(StateError("enough"))
    world.say(rank, Abandon(key, rank.rank, error))


def test_a_staged_update_does_not_wait_for_a_neighbour_that_gives_up() -> None:
    world, first, second = two_in_another_site()
    begin(world, first)
    refuse(world, first[0])
    begin(world, second, staged=True)
    give_up(world, first[0])
    world.pass_time(RETRY_S)
    assert read_by(world, second[0]) == ["t0"]


def test_nor_where_a_source_that_has_failed_it_comes_back_meanwhile() -> None:
    world, first, second = two_in_another_site()
    begin(world, second, staged=True)
    begin(world, world.group("third", [cut(0), cut(1)]))
    begin(world, first)
    while world.part(first[0]).leases:
        refuse_all(world, first[0])
    world.lose_source(second[0], world.lease(second[0], "t0"))
    give_up(world, first[0])
    world.pass_time(RETRY_S_FIRST)
    assert not granted(second[0])
    world.pass_time(RETRY_S_FIRST)
    assert granted(second[0]) == {"third0"}


def test_a_staged_update_does_not_wait_for_a_neighbour_that_is_refused_all_the_time() -> None:
    world, first, second = two_in_another_site()
    begin(world, first)
    for _ in range(REFUSALS_MAX + 1):
        refuse(world, first[0])
        world.pass_time(RETRY_S)
        first[0].take(AddSource)
    refuse(world, first[0])
    begin(world, second, staged=True)
    assert read_by(world, second[0]) == ["t0"]


def test_a_staged_update_does_not_wait_in_the_second_half_of_its_time() -> None:
    world, first, second = two_in_another_site("other")
    world.fill(second, staged=True)
    world.pass_time(501.0)
    begin(world, first)
    refuse(world, first[0])
    world.ready(second[0], A, B)
    assert read_by(world, second[0]) == ["t0", "t1"]


@pytest.mark.parametrize("retries", [0, 3])
def test_bytes_enter_a_site_once_although_the_word_to_serve_is_late(retries: int) -> None:
    """The judge of crossings looks on."""
    cluster, whole = StepwiseCluster(), Layout(CHUNKS, 1)
    cluster.is_unharmed = lambda: True
    cluster.manifest = described(whole, 0)[0]
    trainer, near, late = (
        cluster.worker(name, Location(site=site, host=name)).register(name, cut=whole)
        for name, site in (("trainer", "there"), ("near", "here"), ("late", "here"))
    )
    cluster.run()
    trainer.publish(1)
    cluster.run()
    calls = [near.replicate(), late.replicate()]

    def all_but_the_word() -> None:
        cluster.run(("down", "near"))

    all_but_the_word()
    for _ in range(retries):
        cluster.now += 0.5
        cluster.time_passes()
        all_but_the_word()
    cluster.advance(1.0)
    assert [call.number for call in calls] == [1, 1]
