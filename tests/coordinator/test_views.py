"""What `describe` shows: a page at a time, and what a page costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.coordinator import Connected, Received, limits, views
from tensorhub.messages import (
    Describe,
    Description,
    GetPart,
    Leave,
    Progress,
    Refused,
)
from tensorhub.runtime.worker.coordinator_client import joined
from tensorhub.testing import StepwiseCluster
from tensorhub.types import ModelInfo
from tests.coordinator.layout_world import World
from tests.coordinator.test_answers import ask as ask_one, observed
from tests.coordinator.test_availability import publish
from tests.coordinator.test_refused import give_up
from tests.coordinator.test_withdrawals import reading
from tests.runtime.control.test_describing import OBSERVER, many_models, pages


def test_describe_shows_versions_replicas_leases_and_workers() -> None:
    cluster, trainer = observed()
    reader = cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    reader.replicate()
    cluster.run(until=lambda: reader.pull is not None)
    answer = ask_one(cluster, Describe(1, "actor"))
    assert isinstance(answer, Description)
    (model,) = answer.models
    assert (model.model, model.mark, model.lineage) == ("actor", 1, 0)
    assert [(v.version, v.state) for v in model.versions] == [(1, "available")]
    assert [
        (r.group, r.state, r.shards[0].chunks_verified, r.shards[0].readers) for r in model.replicas
    ] == [
        ("reader", "filling", 0, 0),
        ("trainer", "ready", 2, 1),
    ]
    assert [(lease.reader, lease.source, lease.state) for lease in model.leases] == [
        ("reader", "trainer", "active")
    ]
    assert [(w.name, w.state) for w in model.workers] == [("reader", "live"), ("trainer", "live")]
    cluster.run()
    everything = ask_one(cluster, Describe(2, None))
    assert isinstance(everything, Description)
    assert [r.state for r in everything.models[0].replicas] == ["ready", "ready"]


def test_of_a_fill_that_was_broken_off_no_chunk_counts_while_the_rank_reads_again() -> None:
    world = World()
    trainer, reader = world.arrive("t"), world.arrive("r")
    world.publish([trainer], 1)

    def shown() -> tuple[str, int]:
        info, _ = views.describe(world.core.cluster.models["m"], world.now)
        (replica,) = [each for each in info.replicas if each.group == "r"]
        (shard,) = replica.shards
        return replica.state, shard.chunks_verified

    def reads(chunks: int) -> None:
        key = world.fill([reader])
        world.say(reader, Progress(key, 0, chunks, 0))

    reads(1)
    assert shown() == ("filling", 1)
    give_up(world, reader)
    world.lose(trainer)
    reads(2)
    assert shown() == ("torn", 0)


def test_a_part_that_is_not_known_is_refused() -> None:
    cluster, _ = observed()
    answer = ask_one(cluster, GetPart(7, "0" * 32))
    assert isinstance(answer, Refused)
    assert answer.request == 7
    assert "that part of a layout is not known" in str(answer.error.error())


def test_of_a_group_that_lost_a_rank_the_missing_shards_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(views, "MISSING_TOLD_MAX", 2)
    cluster = StepwiseCluster()
    trainer = cluster.group("trainer", 4)
    cluster.run()
    publish(cluster, *trainer, number=1)

    def shown() -> list[tuple[str, tuple[int, ...], int]]:
        model = cluster.coordinator.cluster.models["actor"]
        info, _ = views.describe(model, cluster.now)
        return [
            (view.state, view.missing, view.summary.missing)
            for view in info.versions
            if view.summary is not None
        ]

    assert shown() == [("available", (), 0)]
    for lost, (rank, missing) in enumerate([(2, (2,)), (0, (0, 2)), (3, (0, 2))]):
        trainer[rank].worker.crash()
        cluster.run()
        assert shown()[0][2] == lost  # its lease still runs
        cluster.advance(cluster.options.lease_s + 1)
        assert shown() == [("unavailable", missing, lost + 1)]


def test_pages_have_every_model_once_and_no_page_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "DESCRIBED_MAX", 7)
    cluster = StepwiseCluster()
    names = many_models(cluster.coordinator, 30)
    trainer, _ = cluster.handle("trainer"), cluster.handle("reader")
    cluster.run()
    trainer.publish(1)
    cluster.run()
    cluster.coordinator.step(Connected(OBSERVER, "observer.1", "observer"), 0.0)
    found = list(pages(cluster))
    assert [model.model for page in found for model in page.models] == ["actor", *names]
    # "actor" has two workers, a version, a replica and its shard: with it the page has room for one
    # more.
    assert [len(page.models) for page in found] == [2, 7, 7, 7, 7, 1]


# ----------------------------------------------------------------------------------------------
# parts of one model


def part(cluster: StepwiseCluster, question: Describe) -> Description:
    answer = ask_one(cluster, question)
    assert isinstance(answer, Description)
    return answer


def several() -> StepwiseCluster:
    """A trainer that holds version 2, readers of version 1, of which one reads version 2."""
    cluster, trainer = observed()
    readers = [cluster.handle(f"reader-{number}") for number in range(5)]
    cluster.run()
    trainer.publish(1)
    cluster.run()
    for handle in readers:
        handle.replicate()
    cluster.run()
    trainer.unpublish()
    cluster.run()
    trainer.publish(2)
    cluster.run()
    readers[3].update()
    cluster.run("read")
    return cluster


def test_pages_of_workers_are_what_describe_lists() -> None:
    cluster = several()
    (whole,) = part(cluster, Describe(1, "actor")).models
    pages: list[ModelInfo] = []
    after: str | None = None
    while not pages or pages[-1].workers:
        (page,) = part(cluster, Describe(2, "actor", after, workers_max=2)).models
        pages.append(page)
        after = page.workers[-1].name if page.workers else after
    assert [len(page.workers) for page in pages] == [2, 2, 2, 0]
    assert tuple(worker for page in pages for worker in page.workers) == whole.workers
    # each has one rank
    assert {replica for page in pages for replica in page.replicas} == set(whole.replicas)
    assert [lease for page in pages for lease in page.leases] == list(whole.leases)
    uncounted = tuple(replace(view, summary=None) for view in whole.versions)
    assert all((page.versions, page.summary) == (uncounted, None) for page in pages)


def test_one_version_has_its_replicas_its_reads_and_who_holds_or_reads_it() -> None:
    cluster = several()
    (two,) = part(cluster, Describe(1, "actor", version=2)).models
    assert [view.version for view in two.versions] == [2]
    assert [(view.group, view.version) for view in two.replicas] == [
        ("reader-3", 2),
        ("trainer", 2),
    ]
    assert [(view.reader, view.version) for view in two.leases] == [("reader-3", 2)]
    assert [view.name for view in two.workers] == ["reader-3", "trainer"]
    (page,) = part(cluster, Describe(1, "actor", "reader-3", version=2, workers_max=9)).models
    assert [view.group for view in page.replicas] == ["trainer"]
    refused = ask_one(cluster, Describe(1, "actor", version=3))
    assert isinstance(refused, Refused)
    assert refused.error.kind == "VersionUnavailable"
    assert (
        "version 3 of 'actor' is not known here; held now: version 2 by 1 replica"
        in refused.error.message
    )


def whole(cluster: StepwiseCluster) -> tuple[ModelInfo, int]:
    """What a client makes of the parts that it is told, and how many these are."""
    model, found, is_cut = cluster.coordinator.cluster.models["actor"], list[ModelInfo](), True
    while is_cut:
        last = found[-1].workers[-1] if found else None
        info, is_cut = views.describe(
            model, cluster.now, after=(last.name, last.incarnation) if last is not None else None
        )
        found.append(info)
    return joined(found), len(found)


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_a_large_model_is_told_in_parts_which_together_are_the_whole(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After each step of an interaction, with a loss in it."""
    cluster, trainer = observed()
    readers = [cluster.group(f"reader-{number}", 2) for number in range(2)]
    pair = cluster.group("pair", 2)
    cluster.run()
    (first, *_), _ = readers
    most = 0

    def compare() -> None:
        nonlocal most
        expected, count = whole(cluster)
        assert count == 1
        with monkeypatch.context() as patch:
            patch.setattr(limits, "DESCRIBED_ROWS_MAX", rows)
            found, count = whole(cluster)
        assert found == expected
        most = max(most, count)

    for number in (1, 2):
        for handle in pair:
            handle.publish(number)
        cluster.run()
        for handle in (handle for group in readers for handle in group):
            handle.update()
        while choices := cluster.choices():
            cluster.do(choices[0])
            compare()
        for handle in pair:
            handle.unpublish()
        cluster.run()
    first.worker.crash()
    cluster.advance(11, run=False)
    compare()
    cluster.run()
    compare()
    assert most > 2
    assert trainer.member.version is None


@pytest.mark.parametrize("rows", [1, 1024])
def test_what_no_worker_has_is_told_with_the_last_one(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease of a lost reader, until its source has cut it off; and that memory is torn."""
    monkeypatch.setattr(limits, "DESCRIBED_ROWS_MAX", rows)
    cluster, _, reader = reading()
    other = cluster.handle("other")
    cluster.run("read")
    other.replicate(timeout_s=1.0)
    cluster.run("read")
    cluster.advance(2.0, run=False)
    cluster.run("read")
    lost = cluster.coordinator.cluster.members[reader.id].worker
    assert lost.session is not None
    cluster.coordinator.step(Received(lost.session, Leave("")), cluster.now)
    info, _ = whole(cluster)
    assert [(lease.reader, lease.state) for lease in info.leases] == [("reader", "fencing")]
    assert [(view.group, view.state, len(view.shards)) for view in info.replicas] == [
        ("other", "torn", 0),
        ("trainer", "ready", 1),
    ]
    assert [worker.name for worker in info.workers] == ["other", "trainer"]
