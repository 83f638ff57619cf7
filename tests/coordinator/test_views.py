"""What `describe` shows: a page at a time, and what a page costs."""

from __future__ import annotations

import pytest

from tensorhub.coordinator import Connected, Received, limits
from tensorhub.messages import (
    Describe,
    Description,
    Leave,
)
from tensorhub.testing import StepwiseCluster
from tests.coordinator.test_answers import ask as ask_one, observed
from tests.runtime.control.test_describing import OBSERVER, Unlooked, ask, crowd, pages


def test_describe_shows_versions_replicas_leases_and_workers() -> None:
    cluster, trainer = observed()
    reader = cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate()
    while reader.pull is None:
        cluster.do(cluster.choices()[0])
    answer = ask_one(cluster, Describe(1, "actor"))
    assert isinstance(answer, Description)
    (model,) = answer.models
    assert (model.model, model.mark, model.lineage) == ("actor", 1, 0)
    assert [(v.version, v.state) for v in model.versions] == [(1, "available")]
    assert [(r.group, r.state, r.shards[0].chunks_verified, r.shards[0].readers) for r in model.replicas] == [
        ("reader", "filling", 0, 0),
        ("trainer", "ready", 2, 1),
    ]
    assert [(lease.reader, lease.source, lease.state) for lease in model.leases] == [("reader", "trainer", "active")]
    assert [(w.name, w.state) for w in model.workers] == [("reader", "live"), ("trainer", "live")]
    cluster.run()
    everything = ask_one(cluster, Describe(2, None))
    assert isinstance(everything, Description)
    assert [r.state for r in everything.models[0].replicas] == ["ready", "ready"]


def test_pages_have_every_model_once_and_no_page_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DESCRIBED_MAX", 7)
    cluster = StepwiseCluster()
    names = crowd(cluster.coordinator, 30)
    trainer, _ = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    cluster.coordinator.step(Connected(OBSERVER, "observer.1", "observer"), 0.0)
    found = list(pages(cluster))
    assert [model.model for page in found for model in page.models] == ["actor", *names]
    # "actor" has two workers, a version, a replica and its shard: with it the page has room for one more.
    assert [len(page.models) for page in found] == [2, 7, 7, 7, 7, 1]


def test_a_name_that_is_forgotten_leaves_no_gap() -> None:
    """Between two pages the last model of the first one goes, and others come."""
    cluster = StepwiseCluster()
    names = crowd(cluster.coordinator, 600)
    cluster.coordinator.step(Connected(OBSERVER, "observer.1", "observer"), 0.0)
    first = ask(cluster, Describe(1, None))
    last = first.models[-1].model
    core = cluster.coordinator.cluster
    core.models[last].retain = 0
    core.forget_if_unused(core.models[last])
    core.model("a-new-one")
    second = ask(cluster, Describe(2, None, last))
    place = names.index(last) + 1
    assert [model.model for model in second.models] == names[place : place + limits.DESCRIBED_MAX]


def test_one_models_leases_are_found_without_looking_at_the_others() -> None:
    cluster = StepwiseCluster()
    trainer, reader = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate()
    while reader.pull is None:
        cluster.do(cluster.choices()[0])
    core = cluster.coordinator.cluster
    core.leases = Unlooked(core.leases)
    cluster.coordinator.step(Connected(OBSERVER, "observer.1", "observer"), 0.0)
    (model,) = ask(cluster, Describe(1, "actor")).models
    assert [(lease.reader, lease.source) for lease in model.leases] == [("reader", "trainer")]
    lost = core.members[reader.shard.registration].worker  # also what a lost reader reads is found without
    cluster.coordinator.step(Received(lost.session or 0, Leave("")), cluster.now)
    assert {lease.state.value for lease in dict.values(core.leases)} <= {"fencing"}
