"""A version that only partial copies are left of: they complete one another, if together they hold
all of it (G6, R9).

Covers `readers` (partial leases) and `availability`.
"""

from __future__ import annotations

import pytest

from tensorhub.coordinator.entities import Version
from tensorhub.coordinator.source_choice import PATCHES_MAX
from tensorhub.coordinator.states import LeaseState, VersionState
from tensorhub.errors import VersionUnavailable
from tensorhub.testing import CallRecord, Choice, SimHandle, StepwiseCluster
from tensorhub.types import Location


def version_of(cluster: StepwiseCluster, number: int = 1) -> Version:
    return cluster.coordinator.cluster.models["actor"].versions[number]


def sources_of(cluster: StepwiseCluster, reader: SimHandle) -> list[str]:
    leases = [
        lease
        for lease in cluster.coordinator.cluster.leases.values()
        if lease.part.member.registration == reader.id
    ]
    return sorted(
        lease.holding.member.worker.name for lease in leases if lease.state is LeaseState.ACTIVE
    )


def readers_of_a_trainer(
    *backwards: bool,
    fetch: bool = False,
    far: str = "",
    keeper: bool = False,
    selector: int | str = "latest",
) -> tuple[StepwiseCluster, SimHandle, list[SimHandle], list[CallRecord]]:
    """Readers on the trainer's host, all bound, each with one chunk: the first one, or the last one
    of `backwards`.

    `keeper`: somebody holds version 0.
    """
    cluster = StepwiseCluster()
    here, there = Location(host="here"), Location(site="there")
    names = [f"r{number}" for number in range(len(backwards))]
    for name in ("trainer", *names):
        cluster.worker(name, there if name == far else here)
    trainer, readers = cluster.handle("trainer"), [cluster.handle(name) for name in names]
    if fetch:
        readers[-1] = cluster.fetcher(names[-1])
    cluster.run()
    if keeper:
        cluster.handle("keeper").publish(0)
        cluster.run()
    trainer.publish(1)
    cluster.run()
    asked = []
    for reader, backward in zip(readers, backwards, strict=True):
        reader.reads_backwards = backward
        asked.append(
            reader.fetch() if reader is readers[-1] and fetch else reader.replicate(selector)
        )
        cluster.run("read")
        while sources_of(cluster, reader) != ["trainer"]:
            let_go(reader)
            cluster.run("read")
    for reader in readers:
        assert reader.pull is not None
        while len(reader.pull.missing) == 2:
            cluster.do(Choice("read", reader.name))
        assert len(reader.pull.missing) == 1
    return cluster, trainer, readers, asked


def let_go(reader: SimHandle) -> None:
    """Its reads break off."""
    assert reader.pull is not None
    for lease in list(reader.pull.grants):
        reader.source_ended(lease, "lost")


def lose(
    cluster: StepwiseCluster, trainer: SimHandle, readers: list[SimHandle], *, crash: bool = True
) -> None:
    """The source is lost, and its reads by these readers break off; no chunk comes meanwhile."""
    if crash:
        trainer.worker.crash()
    else:
        trainer.worker.disconnect()
    for reader in readers:
        let_go(reader)
    for _ in range(24):
        cluster.advance(cluster.options.lease_s / 16, run=False)
        cluster.run("read")


def test_two_halves_complete_each_other_when_the_only_source_is_lost() -> None:
    cluster, trainer, readers, asked = readers_of_a_trainer(False, True)
    truth = list(trainer.cells)
    lose(cluster, trainer, readers)
    assert version_of(cluster).state is VersionState.UNAVAILABLE  # partial copies do not count (G6)
    assert [sources_of(cluster, reader) for reader in readers] == [["r1"], ["r0"]]
    cluster.run()
    assert [each.number for each in asked] == [1, 1]
    assert [reader.cells for reader in readers] == [truth, truth]
    assert version_of(cluster).state is VersionState.AVAILABLE
    late = cluster.handle("late")
    cluster.run()
    assert late.replicate().handle is late
    cluster.run()
    assert late.member.version == 1


def test_they_complete_each_other_although_their_lost_source_may_still_serve_them() -> None:
    """It may have lost its connection only."""
    cluster, trainer, readers, asked = readers_of_a_trainer(False, True)
    lose(cluster, trainer, [], crash=False)
    assert "r1" in sources_of(cluster, readers[0])
    assert "r0" in sources_of(cluster, readers[1])
    trainer.worker.crash()
    cluster.run()
    assert [each.number for each in asked] == [1, 1]


@pytest.mark.heavy
def test_a_chunk_that_one_of_many_has_comes_to_all_of_them() -> None:
    """Nobody reads from more than a few; what each has goes round, also what the one has that is
    nobody's best source.
    """
    count = 3 * PATCHES_MAX
    cluster, trainer, readers, asked = readers_of_a_trainer(
        *[number == 5 for number in range(count)], far="r5"
    )
    truth = list(trainer.cells)
    lose(cluster, trainer, readers)
    found = [sources_of(cluster, reader) for reader in readers]
    assert all(1 <= len(each) <= PATCHES_MAX for each in found)
    assert all(f"r{(number + 1) % count}" in each for number, each in enumerate(found))
    cluster.run()
    assert [each.number for each in asked] == [1] * count
    assert all(reader.cells == truth for reader in readers)


def test_what_nobody_has_is_waited_for_until_the_deadline() -> None:
    cluster, trainer, _, asked = readers_of_a_trainer(False, False)
    trainer.worker.crash()
    cluster.advance(100)
    for each in asked:
        with pytest.raises(VersionUnavailable, match="has lost its last source") as caught:
            _ = each.number
        assert caught.value.memory == "torn"


def test_whoever_leaves_on_purpose_is_not_waited_for() -> None:
    """R12: by a call for a number, at once."""
    cluster, trainer, _, asked = readers_of_a_trainer(False, True, selector=1)
    left = trainer.unpublish()
    cluster.run("read")
    cluster.advance(cluster.options.drain_grace_s, run=False)
    cluster.run("read")
    assert left.done
    for each in asked:
        with pytest.raises(VersionUnavailable, match="its last holder has left on purpose"):
            _ = each.number
