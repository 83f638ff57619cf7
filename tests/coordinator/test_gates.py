"""No two groups bring a byte into a site: who waits for a group of another layout, for how long, and what wakes it."""

from __future__ import annotations

import pytest

from tensorhub.coordinator.entities import Gate
from tensorhub.digests import root_of
from tensorhub.manifest import id_of
from tensorhub.messages import Abandon, ErrorInfo, Fill, Outcome, Progress, Register, Start
from tensorhub.messages.values import Begun
from tensorhub.testing import CHUNKS
from tensorhub.types import Endpoint, Medium, OpKind, Purpose
from tests.coordinator.layout_world import LEASE_S, MANIFEST, Rank, World, list_of, root
from tests.coordinator.test_bridges import A, B, cut, filling, finish, guest_of, published, wide
from tests.coordinator.test_layouts_over_time import back, held_by
from tests.coordinator.test_origins import OF_R, begin, held, leave, reader_of


def entering() -> tuple[World, list[Rank], Rank]:
    """A published version, which a group of another layout brings into another site now."""
    world, trainers = published()
    (reader,) = filling(world, site="there")
    return world, trainers, reader


def waits(world: World, rank: Rank) -> bool:
    """Whether it has not been told to start, and is found at the gate."""
    operation = world.operation(rank)
    gates = world.version.gates
    is_filed = "there" in gates and gates["there"].waiting.get(operation.key) is operation
    assert is_filed == (operation.gate is not None and operation.version is None)
    return is_filed and not rank.take(Start)


def origin_of(world: World, rank: Rank) -> str:
    """The layout that its origin is in; "": it has none."""
    origin = world.part(rank).origin
    return "" if origin is None else origin.layout_id


def go_on(world: World, reader: Rank, chunks: int) -> None:
    """It has some more."""
    world.say(reader, Progress(world.operation(reader).key, reader.rank, chunks, chunks))


def test_who_begins_while_another_layout_enters_the_site_reads_it_there_once_it_is_complete() -> None:
    world, trainers, first = entering()
    late = begin(world, "x", "own/x", site="there")
    assert waits(world, late)
    finish(world, [first], trainers)
    (start,) = late.take(Start)
    assert start.publication == reader_of(world, "own/r0")
    world.ready(late, OF_R)
    assert world.sources(late) == [("r0", "all of it", 0)]
    assert [*world.version.gates["there"].entering.values()] == [world.operation(late)]


def test_the_published_layout_waits_too_and_reads_the_other_one_there() -> None:
    world, trainers, first = entering()
    twins = world.group("twin", [cut(0), cut(1)], site="there")
    world.fill(twins)
    assert waits(world, twins[0])
    finish(world, [first], trainers)
    for twin in twins:
        world.ready(twin, OF_R)
    assert [world.sources(twin) for twin in twins] == [[("r0", "all of it", 0)]] * 2


def test_who_is_filled_in_the_published_layout_is_waited_for() -> None:
    world, trainers = published()
    twins = world.group("twin", [cut(0), cut(1)], site="there")
    world.fill(twins)
    late = begin(world, "x", "own/x", site="there")
    assert waits(world, late)
    for trainer, twin in zip(trainers, twins, strict=True):
        world.tell(trainer)
        world.ready(twin)
        world.vote(twin, root=root_of(list_of(CHUNKS)))
    assert origin_of(world, late) == world.version.layout_id
    world.ready(late, A, B)
    assert world.sources(late) == [("twin0", "half of it", 0), ("twin1", "half of it", 1)]


def test_what_is_in_the_site_in_another_layout_is_read_before_what_was_published_elsewhere() -> None:
    world, _, _ = held(site="there")
    twins = world.group("twin", [cut(0), cut(1)], site="there")
    world.fill(twins)
    assert [origin_of(world, twin) for twin in twins] == ["own/r0"] * 2
    near = world.group("near", [cut(0), cut(1)])
    world.fill(near)
    assert [origin_of(world, each) for each in near] == [""] * 2


def test_a_twin_that_has_read_another_layout_is_followed_by_its_twins() -> None:
    world, _, _ = held(site="there")
    twins = world.group("twin", [cut(0), cut(1)], site="there")
    world.fill(twins)
    for twin in twins:
        world.ready(twin, OF_R)
    others = world.group("other", [cut(0), cut(1)], site="there")
    world.fill(others)
    for other in others:
        world.ready(other, OF_R)
    assert [world.sources(other) for other in others] == [[("twin0", "", 0)], [("twin1", "", 0)]]


def test_in_the_publishers_site_nobody_waits() -> None:
    world, _ = published()
    filling(world)
    late = begin(world, "x", "own/x")
    assert late.take(Start)
    assert not world.version.gates["here"].waiting


def test_its_own_layout_follows_at_once() -> None:
    world, _, _ = entering()
    (follower,) = filling(world, "f", site="there")
    assert world.sources(follower) == [("r0", "", 0)]


def test_a_staged_update_is_followed_by_nobody_and_so_its_own_layout_waits() -> None:
    world, trainers = published()
    (first,) = world.group("r", [("own/r0", ())], site="there")
    world.fill([first], staged=True)
    world.ready(first, A, B)
    late = begin(world, "x", "own/r0", site="there")
    assert waits(world, late)
    finish(world, [first], trainers)
    world.ready(late, A, B)
    assert world.sources(late) == [("r0", "", 0)]


def test_a_staged_update_waits_until_it_can_follow_its_own_layout() -> None:
    """Nobody could follow it, if it began to read first."""
    world, _ = published()
    (first,) = world.group("r", [("own/r0", ())], site="there")
    world.fill([first])
    (late,) = world.group("x", [("own/r0", ())], site="there")
    world.fill([late], staged=True)
    assert waits(world, late)
    world.ready(first, A, B)
    assert late.take(Start), "it has come into the site, though it is still being filled"
    world.ready(late, A, B)
    assert world.sources(late) == [("r0", "", 0)]


def test_who_waits_to_follow_its_own_layout_is_woken_once_that_is_being_filled() -> None:
    """Also where nothing new is learned of that layout."""
    world, _, _ = held()
    (first,) = world.group("f", [("own/r0", ())], site="there")
    first.generation += 1
    call = (OpKind.UPDATE, "latest", None, first.generation, True, False, 1000.0)
    world.say(first, Fill(world.key(first), 0, first.name, *call))
    (late,) = world.group("x", [("own/r0", ())], site="there")
    world.fill([late], staged=True)
    assert waits(world, late)
    world.ready(first, A, B)
    assert late.take(Start)


def test_a_staged_update_is_waited_for_also_where_another_group_of_that_layout_does_not_read_yet() -> None:
    world, trainers = published()
    (first,) = world.group("r", [("own/r0", ())], site="there")
    world.fill([first])
    (staged,) = world.group("x", [("own/r0", ())], site="there")
    staged.generation += 1
    call = (OpKind.UPDATE, "latest", None, staged.generation, False, True, 2.0)
    world.say(staged, Fill(world.key(staged), 0, staged.name, *call))
    world.pass_time(1.5)
    world.ready(staged, A, B)  # half of its time is over
    late = begin(world, "y", "own/r0", site="there")
    assert waits(world, late)
    finish(world, [staged], trainers)
    world.ready(late, A, B)
    assert world.sources(late) == [("x0", "", 0)]


def test_another_layout_that_begins_elsewhere_does_not_wait() -> None:
    world, _, _ = entering()
    assert begin(world, "x", "own/x", site="elsewhere").take(Start)


def test_who_may_leave_some_unread_is_not_waited_for() -> None:
    world, _ = published()
    reader = world.arrive("r", 0, 1, "own/r0", registers=False, site="there")
    reader.partial = True
    world.register(reader)
    world.fill([reader])
    world.ready(reader, A)
    assert begin(world, "x", "own/x", site="there").take(Start)


def test_a_fetch_is_not_waited_for_and_waits() -> None:
    world, trainers = published()

    def fetching(name: str) -> Rank:
        rank = world.arrive(name, 0, 1, f"own/{name}", site="there", serves=False)
        world.fill([rank], kind=OpKind.FETCH)
        return rank

    assert fetching("a").take(Start)
    first = filling(world, site="there")
    late = fetching("b")
    assert waits(world, late)
    finish(world, first, trainers)
    assert origin_of(world, late) == "own/r0"


def test_a_guest_of_the_layout_that_enters_waits() -> None:
    """What guests say of a layout is of no use to workers, and so guests do not follow workers while these are filled."""
    world, trainers, first = entering()
    guest = guest_of(world, "own/r0", site="there")
    assert waits(world, guest)
    finish(world, [first], trainers)
    assert origin_of(world, guest) == "own/r0"


def test_a_copy_of_a_shard_does_not_wait() -> None:
    """It cannot be made of what another layout brings."""
    world, _, _ = held()
    first = begin(world, "x", "own/x", site="there")
    world.ready(first, A, B)
    copy = world.arrive("copy", 0, 1, "own/r0", site="there", registers=False)
    where = ("m", copy.group, 0, 0, 1, True, False, Medium.HOST, Purpose.RETENTION)
    world.say(copy, Register(3, copy.name, *where, "own/r0", 1, CHUNKS, MANIFEST, None, id_of(MANIFEST)))
    world.fill([copy])
    assert copy.take(Start)


def test_what_was_begun_before_a_restart_is_gone_on_with_at_once() -> None:
    world, trainers, reader = entering()
    key, info = world.operation(reader).key, world.version.info
    world = world.restarted()
    for trainer in trainers:
        back(world, trainer, held_by(trainer, info, is_publisher=True))
    twins = world.group("twin", [cut(0), cut(1)], site="there")
    world.fill(twins)
    assert [*world.version.gates["there"].entering] == [world.operation(twins[0]).key]
    reader = back(world, reader, None)
    begun = Begun(key, info.version, info.content_id, id_of(MANIFEST), True, reader.publication)
    call = (OpKind.UPDATE, "latest", None, reader.generation, False, False, 1000.0, (key,), begun)
    world.say(reader, Fill(world.key(reader), 0, reader.name, *call))
    assert reader.take(Start)


def test_whose_ranks_are_in_several_sites_neither_waits_nor_is_waited_for() -> None:
    world, _, _ = entering()
    ranks = [world.arrive("x", rank, 2, f"own/x{rank}", site=("there", "elsewhere")[rank]) for rank in range(2)]
    world.fill(ranks)
    assert all(rank.take(Start) for rank in ranks)
    assert [len(gate.entering) for gate in world.version.gates.values()] == [1]


@pytest.mark.parametrize("how", ["cancelled", "lost"])
def test_if_it_ends_in_vain_who_has_waited_goes_on(how: str) -> None:
    world, _, first = entering()
    late = begin(world, "x", "own/x", site="there")
    assert waits(world, late)
    if how == "cancelled":
        error = ErrorInfo("StateError", "enough of it", False)
        world.say(first, Abandon(world.operation(first).key, 0, error))
    else:
        world.lose(first)
    assert origin_of(world, late) == world.version.layout_id
    assert [*world.version.gates["there"].entering] == [world.operation(late).key]


def test_who_takes_the_lead_is_waited_for_next() -> None:
    """The first one is gone; one that had followed it reads what it lacks from the other site."""
    world, trainers, first = entering()
    (follower,) = filling(world, "f", site="there")
    late = begin(world, "x", "own/x", site="there")
    world.say(first, Abandon(world.operation(first).key, 0, ErrorInfo("StateError", "enough of it", False)))
    assert len(world.sources(follower)) == 2
    later = begin(world, "y", "own/y", site="there")
    assert waits(world, late)
    assert waits(world, later)
    finish(world, [follower], trainers)
    assert [origin_of(world, each) for each in (late, later)] == ["own/r0"] * 2


def test_it_waits_as_long_as_that_one_moves_and_not_longer() -> None:
    world, _, first = entering()
    late = begin(world, "x", "own/x", site="there")
    for chunks in range(1, 5):
        world.pass_time(LEASE_S * 0.9)
        go_on(world, first, chunks)
    assert waits(world, late)
    world.pass_time(LEASE_S * 1.1)
    assert not waits(world, late)
    assert origin_of(world, late) == world.version.layout_id


def test_it_waits_as_long_as_each_rank_moves() -> None:
    """One that does not move holds up the others, and whoever waits for them; but not one that has voted."""
    world, trainers = published()
    readers = filling(world, ranks=2, site="there")
    late = begin(world, "x", "own/x", site="there")
    for chunks in range(1, 3):
        world.pass_time(LEASE_S * 0.6)
        go_on(world, readers[1], chunks)
    assert late.take(Start)
    for trainer, need in zip(trainers, (A, B), strict=True):
        world.tell(trainer, need)
    world.vote(readers[0], root(A), root(B))
    assert world.part(readers[0]).voted
    later = begin(world, "y", "own/y", site="there")
    for chunks in range(3, 5):
        world.pass_time(LEASE_S * 0.6)
        go_on(world, readers[1], chunks)
    assert waits(world, later)


def test_all_ranks_move_when_they_may_write() -> None:
    """Also one that was ready long before the others."""
    world, _ = published()
    readers = world.group("r", [wide(0), wide(1)], site="there")
    world.fill(readers)
    world.ready(readers[0], A, B)
    world.pass_time(LEASE_S * 0.8)
    world.ready(readers[1], A, B)
    late = begin(world, "x", "own/x", site="there")
    world.pass_time(LEASE_S * 0.5)
    assert waits(world, late)
    world.pass_time(LEASE_S * 0.7)
    assert late.take(Start)


def test_it_waits_for_half_of_its_time_at_most() -> None:
    world, _, first = entering()
    (late,) = world.group("x", [("own/x", ())], site="there")
    late.generation += 1
    world.say(late, Fill(world.key(late), 0, late.name, OpKind.UPDATE, "latest", None, late.generation, False, False, 20.0))
    for chunks in range(1, 3):
        world.pass_time(4.0)
        go_on(world, first, chunks)
    assert waits(world, late)
    world.pass_time(2.5)
    assert late.take(Start)


def test_who_has_the_least_time_decides_how_long_its_group_waits() -> None:
    world, _, first = entering()
    ranks = world.group("x", [("own/x0", ()), ("own/x1", ())], site="there")
    key = world.key(ranks[0])
    for rank, timeout_s in zip(ranks, (1000.0, 20.0), strict=True):
        rank.generation += 1
        call = (OpKind.UPDATE, "latest", None, rank.generation, False, False, timeout_s)
        world.say(rank, Fill(key, rank.rank, rank.name, *call))
    for chunks in range(1, 3):
        world.pass_time(4.0)
        go_on(world, first, chunks)
    assert waits(world, ranks[0])
    world.pass_time(2.5)
    assert all(rank.take(Start) for rank in ranks)


def test_who_cannot_be_read_across_layouts_is_not_waited_for() -> None:
    spool, plain, tcp = Endpoint("spool", "x"), Endpoint("spool", "x", strides=False), Endpoint("tcp", "x")
    world = World()
    world.endpoints = (spool, tcp)
    world.publish(world.group("t", [cut(0), cut(1)]), 1)
    world.endpoints = (plain, tcp)
    filling(world, site="there")
    world.endpoints = (spool,)
    assert begin(world, "x", "own/x", site="there").take(Start)


def test_if_the_second_one_ends_in_vain_who_has_waited_for_it_goes_on() -> None:
    """The first one does not move: nobody waits for it any more."""
    world, _, _ = entering()
    world.pass_time(LEASE_S * 1.1)
    second = begin(world, "s", "own/s", site="there")
    world.ready(second, A, B)
    late = begin(world, "x", "own/x", site="there")
    assert waits(world, late)
    world.say(second, Abandon(world.operation(second).key, 0, ErrorInfo("StateError", "enough of it", False)))
    assert late.take(Start)


def test_many_who_wait_cost_nothing_until_it_is_there() -> None:
    """What happens to the one that enters is no matter for them."""
    world, _, first = entering()
    late = [begin(world, f"x{number}", f"own/x{number}", site="there") for number in range(8)]
    gate: Gate = world.version.gates["there"]
    go_on(world, first, 1)
    assert len(gate.waiting) == len(late)
    assert not any(world.core.cluster.is_woken(world.operation(each)) for each in late)


def test_a_source_that_comes_into_the_site_ends_the_wait() -> None:
    """It is not the group that is waited for. (Its worker was silent for a while.)"""
    world, trainers = published()
    (old,) = filling(world, "old", site="there")
    finish(world, [old], trainers)
    world.cut_off(old)
    filling(world, site="there")
    late = begin(world, "x", "own/x", site="there")
    assert waits(world, late)
    world.connect(old)
    assert origin_of(world, late) == "own/r0"


def test_of_those_who_have_waited_one_of_each_layout_reads_across_and_the_others_follow() -> None:
    world, trainers, first = entering()
    late = [begin(world, f"x{number}", "own/x", site="there") for number in range(3)]
    assert all(waits(world, each) for each in late)
    finish(world, [first], trainers)
    for each in late:
        world.ready(each, OF_R)
    found = sorted(world.sources(each)[0][1] for each in late)
    assert found == ["", "", "all of it"]


def test_a_rank_that_comes_back_to_a_group_that_holds_it_does_not_wait() -> None:
    """Another layout that has entered since would bring it what its mates hold in their own way."""
    world, trainers = published()
    readers = filling(world, "r", ranks=2, site="there")
    finish(world, readers, trainers)
    leave(world, readers[1])
    assert readers[1].take(Start), "of the first time"
    (other,) = filling(world, "s", site="there")
    world.fill(readers)
    assert [*world.version.gates["there"].entering][:1] == [world.operation(other).key]
    assert readers[1].take(Start)
    for reader in readers:
        assert not reader.take(Outcome)
