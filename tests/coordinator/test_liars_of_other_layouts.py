"""Who holds a version in another layout and lies: to those who copy its chunks, and to those who read selections of it."""

from __future__ import annotations

import pytest

from tensorhub.testing import CHUNKS, SimHandle, StepwiseCluster
from tensorhub.testing.sim import misdeeds
from tensorhub.testing.sim.layouts import Layout, described
from tensorhub.types import HandleState

ROWS = CHUNKS + 3


def of_two_layouts(*names: str) -> tuple[StepwiseCluster, list[SimHandle], list[SimHandle]]:
    """Two ranks that have published version 1, and their twins, which have it too; and these, each of which is to read it
    all as one rank. The first of them has it.
    """
    cluster = StepwiseCluster()
    cluster.world.chunks = ROWS
    cluster.world.manifest = described(Layout(ROWS, 1), 0)[0]
    ranks = [
        cluster.worker(f"{name}{k}").register(name, k, 2, cut=Layout(ROWS, 2))
        for name in ("trainer", "twin")
        for k in (0, 1)
    ]
    readers = [cluster.worker(name).register(name, cut=Layout(ROWS, 1)) for name in names]
    cluster.run()
    for trainer in ranks[:2]:
        trainer.publish(1)
    cluster.run()
    for reader in (*ranks[2:], readers[0]):
        reader.replicate()
        cluster.run()
    assert readers[0].member.version == 1
    return cluster, ranks, readers


def test_who_copies_the_chunks_of_a_liar_finds_it_out() -> None:
    cluster, _, (liar, follower) = of_two_layouts("liar", "follower")
    truth = list(liar.cells)
    assert misdeeds.lie(liar)
    follower.replicate()
    cluster.run()
    cluster.advance(3.0)
    assert follower.cells == truth
    assert liar.member.state is HandleState.EMPTY


@pytest.mark.parametrize("is_known", [True, False])
def test_memory_that_has_changed_is_no_origin(is_known: bool) -> None:
    """Its digests are not those with which it was read. After a restart nobody knows these, and its own word would count, if
    it did not find out by itself.
    """
    cluster, ranks, (copy,) = of_two_layouts("copy")
    pair = [cluster.worker(f"p{k}").register("pair", k, 2, cut=Layout(ROWS, 2, by_columns=True)) for k in range(2)]
    cluster.run()
    for rank in ranks:
        rank.unpublish()
    cluster.run()
    if not is_known:
        cluster.restart()
        for worker in cluster.workers.values():
            worker.connect()
        cluster.run()
    assert misdeeds.lie(copy)
    calls = [rank.replicate(timeout_s=5.0) for rank in pair]
    cluster.run()
    cluster.advance(6.0)
    assert not any(call.committed for call in calls)
    assert copy.member.state is (HandleState.READY if is_known else HandleState.EMPTY)
