"""G10: whatever is done however often, the coordinator's and the members' books stay bounded.

A story of several modules: `decisions`, `operations`, `membership`, `cluster`, and the books of
`worker`.
"""

from __future__ import annotations

import gc

import pytest

from tensorhub.coordinator import Durable, limits
from tensorhub.coordinator.entities import (
    DECIDED_KEPT_MAX,
    Holding,
    Operation,
    RankPart,
    ReadLease,
    Replica,
    Version,
)
from tensorhub.messages import Leave, Watch
from tensorhub.testing import BrokenHook, StepwiseCluster
from tensorhub.types import Options

ROUNDS = DECIDED_KEPT_MAX + 8  # after which all that is kept is full
ENTITIES = (Version, Replica, Holding, ReadLease, Operation, RankPart)


def alive() -> dict[str, int]:
    gc.collect()
    objects = gc.get_objects()
    return {kind.__name__: sum(type(o) is kind for o in objects) for kind in ENTITIES}


def one_round(cluster: StepwiseCluster, number: int) -> None:
    """Publish, replicate, an aborted update, a timeout, a lost connection, an update, an
    unpublish.
    """
    trainer, *readers = cluster.all_handles()
    trainer.publish(number)
    cluster.run()
    for reader in readers:
        reader.update(hold=True)
    readers[0].hook_error = BrokenHook("no") if number % 2 else None
    cluster.run()
    trainer.update(at_least=number + 1, timeout_s=0.1)
    cluster.advance(0.2)
    readers[1].worker.disconnect()
    cluster.run()
    readers[1].worker.connect()
    cluster.run()
    trainer.unpublish()
    cluster.run()


@pytest.mark.heavy
def test_books_stay_bounded_over_many_operations() -> None:
    cluster = StepwiseCluster(Options(lease_s=5.0))
    for name in ("trainer", "r0", "r1"):
        cluster.handle(name)
    cluster.run()
    counts: list[dict[str, int]] = []
    for number in range(1, 3 * ROUNDS + 1):
        one_round(cluster, number)
        cluster.log.clear()
        if number in (ROUNDS, 3 * ROUNDS):
            cluster.guarantees.forget()
            counts.append(alive())
    assert counts[0] == counts[1]
    books = cluster.coordinator.cluster
    model = books.models["actor"]
    assert len(model.versions) <= 4
    assert all(len(group.decided) <= DECIDED_KEPT_MAX for group in model.groups.values())
    assert all(len(group.replicas) <= 2 for group in model.groups.values())
    assert books.leases == {}
    assert books.records == {}
    assert not [*model.waiting.unbound, *model.waiting.restless, *model.waiting.flexible]
    assert model.withdrawals == {}
    assert len(books.timers) <= 8
    assert len(books.timers._heap) <= 200  # what is cancelled is swept out
    assert len(books.sessions) == 3


def test_workers_and_groups_that_come_and_go_leave_nothing() -> None:
    cluster = StepwiseCluster()
    cluster.handle("trainer").publish(1)
    cluster.run()
    for number in range(50):
        spot = cluster.handle(f"spot{number}", spot=True)
        cluster.run()
        spot.replicate()
        cluster.run()
        if number % 2:
            spot.worker.crash()
            cluster.advance(11)
        else:
            spot.close()
            cluster.run()
            spot.worker.disconnect()
            spot.worker.alive = False
            cluster.advance(11)
        del cluster.workers[spot.worker.name]
    books = cluster.coordinator.cluster
    assert list(books.models["actor"].groups) == ["trainer"]
    assert len(books.workers) == len(books.members) == 1
    assert books.leases == {}


@pytest.mark.heavy
def test_a_name_that_is_only_asked_for_is_forgotten_with_who_asked() -> None:
    cluster = StepwiseCluster()
    worker = cluster.worker("curious")
    cluster.run()
    for number in range(50):
        worker.say(Watch(f"watched{number}"))
        fetcher = worker.fetcher(model=f"fetched{number}")
        fetcher.fetch(timeout_s=1)
        worker.register(f"g{number}", model=f"registered{number}")
        worker.asks.retain(number % 2, f"retained{number}")
    cluster.advance(2)
    models = cluster.coordinator.cluster.models
    assert not any(name.startswith("fetched") for name in models)
    assert not any(name.startswith("watched") for name in models)
    assert len(models) == 50 + 25
    worker.crash()
    cluster.advance(30)
    assert list(models) == [f"retained{number}" for number in range(1, 50, 2)]


def test_a_name_is_forgotten_with_the_publish_that_never_was() -> None:
    cluster = StepwiseCluster()
    worker = cluster.worker("trainer")
    first = worker.register("trainer", 0, 2)
    worker.register("trainer", 1, 2)
    cluster.run()
    first.publish(1)
    cluster.run()
    worker.say(Leave("enough"))
    cluster.run()
    assert cluster.coordinator.cluster.models == {}


def test_the_manifests_of_what_nobody_holds_are_not_kept_and_come_back_with_a_holder() -> None:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    trainer.publish(1)
    cluster.run()
    version = cluster.coordinator.cluster.models["actor"].versions[1]
    assert list(version.manifests) == [0]
    trainer.worker.disconnect()
    cluster.advance(20)
    reader.replicate(timeout_s=1000)
    cluster.run()
    assert (version.state, version.manifests) == ("unavailable", {})
    for _ in range(2):  # the first time it is dismissed
        if trainer.worker.link is None:
            trainer.worker.connect()
        cluster.run()
    assert reader.member.content is not None
    assert reader.member.content.version.version == 1
    assert list(version.manifests) == [0]


def test_decisions_of_groups_that_are_gone_are_forgotten_the_oldest_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the store, too; those of groups that are there stay, however old."""
    monkeypatch.setattr(limits, "DECISIONS_MAX", 4)
    cluster = StepwiseCluster()
    publishers = cluster.group("trainer", 2)
    for publisher in publishers:
        publisher.publish(1)
    cluster.run()
    for number in range(12):
        ranks = cluster.group(f"gang{number}", 2)
        for rank in ranks:
            rank.replicate()
        cluster.run()
        for rank in ranks:
            rank.worker.crash()
        cluster.advance(20)
        for rank in ranks:
            del cluster.workers[rank.worker.name]
    assert list(cluster.coordinator.cluster.models["actor"].groups) == ["trainer"]
    books = cluster.coordinator.cluster.decisions
    assert len(books) == 4
    assert set(books) == {
        ("actor", "trainer"),
        *(("actor", f"gang{number}") for number in (9, 10, 11)),
    }
    stored = {decision.key.group for decision in Durable.of(cluster.store).decisions}
    assert stored == {"trainer", "gang9", "gang10", "gang11"}
