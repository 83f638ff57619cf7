"""What a step notes, for the settling at its end, and who is woken."""

from __future__ import annotations

from itertools import count

import pytest

from tensorhub.coordinator import Tick, limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Operation
from tensorhub.testing import StepwiseCluster
from tensorhub.types import Options


@pytest.mark.parametrize("wakes", [(True,), (False,), (True, False), (False, True)])
def test_who_waits_for_a_model_is_looked_at_if_anything_of_the_step_may_concern_it(wakes: tuple[bool, ...]) -> None:
    """A read-only worker that goes concerns nobody; a worker that goes in the same step does."""
    idents = count()
    cluster = Cluster("c", 1, Options(), lambda: f"id{next(idents)}")
    for each in wakes:
        cluster.touch(cluster.model("m"), wakes=each)
    assert cluster.changed_models == {"m": any(wakes)}


def test_who_is_woken_leaves_where_it_waited_and_is_looked_at_once() -> None:
    """However often the same is said meanwhile: a thousand that wait, and a thousand events, are no million looks."""
    cluster = StepwiseCluster()
    readers = [cluster.handle(f"r{number}") for number in range(3)]
    cluster.run()
    for reader in readers:
        reader.replicate()
    cluster.run()
    books = cluster.coordinator.cluster
    waiting = books.models["actor"].waiting.unbound
    operations = list(waiting.values())
    assert len(operations) == len(readers)
    books.wake_all(waiting)
    assert not waiting
    assert list(books.woken.values()) == operations
    books.wake_all(waiting)
    assert len(books.woken) == len(readers)


def test_who_asks_for_what_is_available_is_woken_once_until_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much happens to the model meanwhile."""
    cluster = StepwiseCluster()
    readers = [cluster.handle(f"r{number}") for number in range(3)]
    cluster.run()
    for reader in readers:
        reader.replicate("available")
    cluster.run()
    books, woken = cluster.coordinator.cluster, list[Operation]()
    model = books.models["actor"]
    assert len(model.waiting.flexible) == len(readers)
    monkeypatch.setattr(books, "wake", woken.append)
    for _ in range(3):
        books.touch(model)
        cluster.coordinator._settle()
    assert len(woken) == len(readers)


def test_a_call_that_is_over_is_found_nowhere() -> None:
    """Else each call would be kept for ever by what it once waited for."""
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    asked = reader.replicate()
    cluster.run()
    model = cluster.coordinator.cluster.models["actor"]
    (operation,) = model.waiting.unbound.values()
    assert operation.filed_in == [model.waiting.unbound]
    reader.cancel("enough")
    cluster.run()
    assert asked.has_ended()
    assert not model.waiting.unbound
    trainer.publish(1)  # other publishes may overtake it, so anything of the model wakes it
    cluster.run()
    assert list(model.versions) == [1]
    assert not model.waiting.restless


def test_a_step_settles_so_many_ranks_of_those_that_were_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group of many ranks takes as long as so many groups of one."""
    monkeypatch.setattr(limits, "WOKEN_PER_STEP", 4)
    cluster = StepwiseCluster()
    ranks = [rank for name in "abc" for rank in cluster.group(name, 2)]
    cluster.run()
    for rank in ranks:
        rank.replicate()
    cluster.run()
    books = cluster.coordinator.cluster
    books.wake_all(books.models["actor"].waiting.unbound)
    left = []
    while books.woken:
        cluster.step(Tick())
        left.append(len(books.woken))
    assert left == [1, 0]
