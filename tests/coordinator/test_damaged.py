"""An archived copy whose object was damaged: its reader goes on from another holder. Where none is
left that could have the rest, the call is over at once, and names the object.
"""

from __future__ import annotations

from tensorhub.coordinator.states import WorkerState
from tensorhub.errors import IntegrityError
from tensorhub.messages import AddSource, Outcome, ReadFailed
from tests.coordinator.layout_world import LEASE_S, Rank, World
from tests.coordinator.test_bridges import cut, filling, published

NAMED = "s3://b/frames-0 was damaged"


def damaged(world: World, reader: Rank, source: str) -> None:
    """The reader cannot have what it lacks from there."""
    lease, key = world.lease(reader, source).id, world.operation(reader).key
    world.say(reader, ReadFailed(key, reader.rank, lease, "damaged", f"{source}: {NAMED}", None))


def granted(reader: Rank) -> set[str]:
    return {added.grant.source for added in reader.take(AddSource)}


def error_of(reader: Rank) -> Exception:
    (outcome,) = reader.take(Outcome)
    assert outcome.error is not None
    return outcome.error.error()


def reading(world: World, name: str, site: str = "here") -> Rank:
    """A group that fills one shard each, of the published layout; its first rank."""
    group = world.group(name, [cut(0), cut(1)], site=site)
    world.fill(group)
    for rank in group:
        world.ready(rank)
    return group[0]


def test_the_call_is_over_at_once_where_no_other_worker_has_it() -> None:
    world, _ = published()
    reader = reading(world, "r")
    damaged(world, reader, "t0")
    error = error_of(reader)
    assert isinstance(error, IntegrityError)
    assert not error.retryable
    for said in ("version 1 cannot be read by rank 0", "no other worker has it", f"t0: {NAMED}"):
        assert said in str(error)


def test_a_reader_across_layouts_hears_it_too() -> None:
    world, _ = published()
    reader = filling(world, "r")[0]
    damaged(world, reader, next(iter(world.sources(reader)))[0])
    assert isinstance(error_of(reader), IntegrityError)


def test_it_goes_on_from_another_holder_and_never_comes_back() -> None:
    world, _ = published()
    near = reading(world, "near", site="there")  # which is fed by the publisher
    reader = reading(world, "r", site="there")
    world.lose_source(reader, world.lease(reader, "near0"))
    assert granted(reader) == {"t0"}
    damaged(world, reader, "t0")
    for _ in range(3):
        assert not granted(reader)  # it is not tried again yet
        world.pass_time(2)
        assert granted(reader) == {"near0"}
        world.lose_source(reader, world.lease(reader, "near0"))
    world.pass_time(2)
    assert not reader.take(Outcome)
    damaged(world, near, "t0")
    for rank in (near, reader):
        error = error_of(rank)
        assert isinstance(error, IntegrityError)
        assert NAMED in str(error)


def test_a_holder_that_is_silent_for_now_is_waited_for_until_it_is_lost() -> None:
    world, _ = published()
    reading(world, "other")
    silent = [world.ranks["other0"], world.ranks["other1"]]
    for rank in silent:
        world.vote(rank)
    world.pass_time(0.75 * LEASE_S, silent=silent)
    assert world.member(silent[0]).worker.state is WorkerState.SUSPECT
    reader = reading(world, "r")
    damaged(world, reader, "t0")
    assert not reader.take(Outcome)
    world.lose(*silent)
    assert isinstance(error_of(reader), IntegrityError)
