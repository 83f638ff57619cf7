"""What nobody vouches for is read again with what encloses it: of whom, how often, and what may happen meanwhile."""

from __future__ import annotations

import pytest

from tensorhub.coordinator.testimonies import COMPARISONS_MAX
from tensorhub.messages import AddSource, Compare, Compared, Digests, Need, Outcome, TellDigests
from tensorhub.testing import CHUNKS, StepwiseCluster
from tensorhub.testing.sim.layouts import Layout, described
from tensorhub.testing.sim.memory import CHUNK_BYTES
from tests.coordinator.layout_world import list_of, root
from tests.coordinator.test_bridges import A, B, cut, filling, guest_of, published
from tests.coordinator.test_enclosing import OWN, copied


def test_what_is_read_again_to_be_vouched_for_is_not_read_of_who_vouches_for_nothing() -> None:
    """Two groups of a layout had all of it before, and nobody knows its selections any more. Who followed the other one
    would read it again and again, and be told in the end that its machine damages bytes.
    """
    world, trainers, _ = copied()
    world.lose(*trainers)
    (first,) = filling(world, "first")
    (follower,) = filling(world, "follower")
    assert world.sources(follower) == [("first0", "", 0)]
    world.vote(follower, root(A), root(B))
    for each in (first, follower):
        for asked, need in zip(each.take(TellDigests), (A, B), strict=True):
            what = (need.chunks, (), b"", True, asked.selection, asked.shard)
            world.say(each, Digests(each.name, each.generation, *what))
    (compare,) = follower.take(Compare)
    assert compare.enclose
    compared = Compared(world.operation(follower).key, 0, A.chunks, (), True, compare.selection, compare.shard)
    world.say(follower, compared)
    assert [(added.grant.source, added.grant.root) for added in follower.take(AddSource)] == [("c0", OWN)]


@pytest.mark.parametrize("rereads", [True, False])
def test_a_vote_does_not_count_while_its_rank_may_read_again_to_be_vouched_for(rereads: bool) -> None:
    """Somebody else vouches for the same selection just then. Who is told of a commit has nothing left to read."""
    world, trainers, _ = copied()
    (reader,) = filling(world)
    world.lose(*trainers)
    world.vote(reader, root(A), root(B))
    for asked, need in zip(reader.take(TellDigests), (A, B), strict=True):
        what = (need.chunks, (), b"", True, asked.selection, asked.shard)
        world.say(reader, Digests(reader.name, reader.generation, *what))
    (compare,) = reader.take(Compare)
    assert (compare.enclose, compare.shard) == (True, A.shard)
    (other,) = world.group("o", [("own/o", ())], site="there")
    world.fill([other])
    world.ready(other, A, B)
    world.vote(other, root(A), root(B))
    for need in (A, B):
        world.tell(other, need, shard=need.shard)
    assert other.take(Outcome)[0].committed
    assert not reader.take(Outcome)
    reader.take(AddSource)
    compared = Compared(world.operation(reader).key, 0, A.chunks, (), rereads, compare.selection, compare.shard)
    world.say(reader, compared)
    if rereads:
        assert reader.take(AddSource)
        world.vote(reader, root(A), root(B))
    assert reader.take(Outcome)[0].committed


@pytest.mark.parametrize("rereads", [True, False])
def test_a_guest_that_has_read_all_with_what_encloses_it_need_not_tell_its_digests(rereads: bool) -> None:
    """Nobody asks him: others do not depend on his word. He would be told in the end that his machine damages bytes."""
    world, trainers, _ = copied()
    world.lose(*trainers)
    guest = guest_of(world, "own/r0")
    world.ready(guest, A, B)
    world.vote(guest, root(A), root(B))
    assert not guest.take(TellDigests)
    for need in (A, B):
        (compare,) = guest.take(Compare)
        assert (compare.enclose, compare.selection, compare.shard) == (True, need.selection, need.shard)
        assert not guest.take(Outcome)
        if rereads and need is A:
            world.say(guest, Compared(world.operation(guest).key, 0, A.chunks, (), True, A.selection, A.shard))
            world.vote(guest, root(A), root(B))
            (again,) = guest.take(Compare)
            assert again == compare
        world.say(guest, Compared(world.operation(guest).key, 0, need.chunks, (), False, need.selection, need.shard))
    assert guest.take(Outcome)[0].committed
    (reader,) = filling(world)
    assert world.sources(reader) == [("c0", A.selection, 0), ("c1", B.selection, 1)]
    assert not any(known.root for known in world.version.selections.values())


def test_each_of_many_selections_may_be_read_again_to_be_vouched_for() -> None:
    ranks = COMPARISONS_MAX + 2
    world, trainers = published(ranks)
    copies = world.group("c", [cut(rank) for rank in range(ranks)])
    world.fill(copies)
    for trainer, copy in zip(trainers, copies, strict=True):
        world.ready(copy)
        world.tell(trainer)
        world.vote(copy, root=OWN)
    needs = [Need(shard, "half of it", 2, 20) for shard in range(ranks)]
    (reader,) = filling(world, needs=needs)
    world.lose(*trainers)
    said = [root(need) for need in needs]
    world.vote(reader, *said)
    for asked in reader.take(TellDigests):
        world.say(reader, Digests(reader.name, reader.generation, 2, (), b"", True, asked.selection, asked.shard))
    for _ in needs:
        (compare,) = reader.take(Compare)
        compared = Compared(world.operation(reader).key, 0, 2, (), True, compare.selection, compare.shard)
        world.say(reader, compared)
        world.vote(reader, *said)
        for asked in reader.take(TellDigests):
            is_enclosed = asked.shard <= compare.shard
            runs, listed = (((0, 2),), list_of(2)) if is_enclosed else ((), b"")
            what = (2, runs, listed, True, asked.selection, asked.shard)
            world.say(reader, Digests(reader.name, reader.generation, *what))
    (outcome,) = reader.take(Outcome)
    assert outcome.committed, outcome.error


def test_what_was_prefetched_with_what_encloses_it_is_not_read_again() -> None:
    """The publisher has gone, and the update takes what its prefetch has so far."""
    rows = CHUNKS + 3
    cluster = StepwiseCluster(host_bytes=rows * CHUNK_BYTES)
    cluster.world.chunks, cluster.world.manifest = rows, described(Layout(rows, 1), 0)[0]
    trainers, twins = (
        [cluster.worker(f"{name}{rank}").register(name, rank, 2, cut=Layout(rows, 2)) for rank in range(2)]
        for name in ("trainer", "twin")
    )
    reader = cluster.worker("reader").register("reader", cut=Layout(rows, 1))
    cluster.run()
    for trainer in trainers:
        trainer.publish(1)
    cluster.run()
    for twin in twins:
        twin.replicate()
    cluster.run()
    for trainer in trainers:
        trainer.worker.crash()
    cluster.advance(3 * cluster.options.lease_s)
    reader.prefetch()
    reads = 0
    while reads < rows and (choices := cluster.choices()):
        choice = next((each for each in choices if each.kind != "read"), choices[0])
        reads += choice.kind == "read"
        cluster.do(choice)
    call = reader.replicate()
    cluster.advance(1.0)
    assert (call.number, reads) == (1, rows)
    log = [line.split()[1:4] for line in cluster.log]
    assert ["reader", "<-", "TellDigests"] in log
    assert ["reader", "<-", "Compare"] not in log
