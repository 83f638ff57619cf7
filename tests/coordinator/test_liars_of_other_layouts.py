"""Who holds a version in another layout and lies: to those who copy its chunks, and to those who read selections of it."""

from __future__ import annotations

import pytest

from tensorhub.coordinator.tellers import Tellers
from tensorhub.testing import CHUNKS, SimHandle, StepwiseCluster
from tensorhub.testing.sim import misdeeds
from tensorhub.testing.sim.assertion import GuaranteeBroken
from tensorhub.testing.sim.layouts import Layout, described
from tensorhub.types import HandleState, Location

ROWS = CHUNKS + 3


def of_two_layouts(*names: str, read: int = 1) -> tuple[StepwiseCluster, list[SimHandle], list[SimHandle]]:
    """Two ranks that have published version 1, and their twins, which have it too; and these, each of which is to read it
    all as one rank. So many of them have it.
    """
    cluster = StepwiseCluster()
    cluster.world.chunks = ROWS
    cluster.world.manifest = described(Layout(ROWS, 1), 0)[0]
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
    for reader in (*ranks[2:], *readers[:read]):
        reader.replicate()
        cluster.run()
    assert all(reader.member.version == 1 for reader in (*ranks, *readers[:read]))
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


def lied_while_publishers_were_silent(*names: str) -> tuple[StepwiseCluster, list[SimHandle], list[SimHandle]]:
    """The first reader has lied before it has voted, and could be the first to say digests. Then the publishers are back."""
    cluster, ranks, (liar, *others) = of_two_layouts("liar", *names, read=0)
    liar.replicate()
    while not misdeeds.plot(liar):
        cluster.do(cluster.choices()[0])
    for trainer in ranks[:2]:
        trainer.worker.disconnect()
    cluster.run()
    cluster.advance(1.0)
    assert (liar.member.version, liar.lied) == (1, liar.last_held)
    for trainer in ranks[:2]:
        trainer.worker.connect()
    cluster.run()
    return cluster, ranks, [liar, *others]


def test_the_lie_of_who_was_the_first_to_say_is_believed_until_the_publisher_is_back() -> None:
    cluster, _, (liar, follower) = lied_while_publishers_were_silent("follower")
    follower.replicate()
    cluster.run()
    cluster.advance(3.0)
    assert follower.member.version == 1
    assert not cluster.world.guarantees.contents.is_spoilt(follower, follower.last_held)
    assert liar.member.state is HandleState.EMPTY


def test_the_judge_notices_a_lie_that_is_believed_although_its_publisher_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tellers, "may_say_otherwise", lambda self, testimony: False)
    cluster, _, (_, follower) = lied_while_publishers_were_silent("follower")
    follower.replicate()
    with pytest.raises(GuaranteeBroken, match=r"liar\[0\]\?"):
        cluster.run()


def test_who_reads_what_was_published_is_not_turned_away_by_a_lie_although_its_publisher_is_lost() -> None:
    """It finds otherwise, and everybody sees for himself from then on, also who would have followed the liar."""
    cluster, ranks, (liar, honest, follower) = lied_while_publishers_were_silent("honest", "follower")
    for trainer in ranks[:2]:
        trainer.worker.crash()
    cluster.advance(2.5 * cluster.options.lease_s)
    for reader in (honest, follower):
        reader.replicate()
        cluster.run()
        cluster.advance(10.0)
        assert reader.member.version == 1
        assert not cluster.world.guarantees.contents.is_spoilt(reader, reader.last_held)
    assert liar.member.state is HandleState.READY  # nobody can know that it lies
