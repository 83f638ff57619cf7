"""A holder of another layout that lies to a reader that copies its chunks."""

from __future__ import annotations

from tensorhub.testing import CHUNKS, SimHandle, StepwiseCluster
from tensorhub.testing.sim import misdeeds
from tensorhub.testing.sim.layouts import Layout, described
from tensorhub.types import HandleState, Location

ROWS = CHUNKS + 3


def of_two_layouts(
    *names: str, read: int = 1
) -> tuple[StepwiseCluster, list[SimHandle], list[SimHandle]]:
    """Two ranks that have published version 1, and their twins, which have it too; and these, each
    of which is to read it all as one rank. So many of them have it.
    """
    cluster = StepwiseCluster()
    cluster.chunks = ROWS
    cluster.manifest = described(Layout(ROWS, 1), 0)[0]
    ranks = [
        cluster.worker(f"{name}{k}").register(name, k, 2, cut=Layout(ROWS, 2))
        for name in ("trainer", "twin")
        for k in (0, 1)
    ]
    readers = list[SimHandle]()
    for name in names:
        worker = cluster.worker(name, Location(site="far" if name == "honest" else "", host=name))
        readers.append(worker.register(name, cut=Layout(ROWS, 1)))
    cluster.run()
    for trainer in ranks[:2]:
        trainer.publish(1)
    cluster.run()
    for reader in (*readers[:read], *ranks[2:]):
        reader.replicate()
        cluster.run()
    assert all(reader.member.version == 1 for reader in (*ranks, *readers[:read]))
    return cluster, ranks, readers


def test_a_reader_that_copies_the_chunks_of_a_liar_finds_it_out() -> None:
    """The liar has read from the publisher, which knows its selection."""
    cluster, _, (liar, follower) = of_two_layouts("liar", "follower")
    truth = list(liar.cells)
    assert misdeeds.lie(liar)
    follower.replicate()
    cluster.run()
    cluster.advance(3.0)
    assert follower.cells == truth
    assert liar.member.state is HandleState.EMPTY


def test_without_a_publisher_the_digests_of_the_sources_count() -> None:
    cluster, ranks, (first, second) = of_two_layouts("first", "second")
    truth = list(first.cells)
    for rank in (*ranks[:2], first):
        rank.unpublish()
        cluster.run()
    assert misdeeds.lie(ranks[2])
    call = second.replicate()
    cluster.run()
    assert call.number == 1
    assert second.cells != truth
    assert any("by_source=True" in line for line in cluster.log)
