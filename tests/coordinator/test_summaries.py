"""What `describe` counts: counts that agree with `describe`, what calls wait for and for how long,
and what bounds it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tensorhub.coordinator import limits
from tensorhub.coordinator.views import describe, summarize
from tensorhub.messages import Describe, Description, Refused
from tensorhub.testing import Choice, StepwiseCluster
from tensorhub.types import ModelSummary, VersionSummary
from tests.coordinator.test_answers import ask, observed
from tests.coordinator.test_retention import fill, retained
from tests.coordinator.test_testimonies import published as published_by_digests
from tests.coordinator.test_withdrawals import reading
from tests.runtime.control.test_describing import many_models


def summary(cluster: StepwiseCluster) -> ModelSummary:
    return summarize(cluster.coordinator.cluster.models["actor"], cluster.now)[0]


def versions(cluster: StepwiseCluster) -> dict[int, VersionSummary]:
    return summarize(cluster.coordinator.cluster.models["actor"], cluster.now)[1]


def waits(cluster: StepwiseCluster) -> list[tuple[str, str, int, str]]:
    return [(view.call, view.waits_for, view.count, view.who) for view in summary(cluster).calls]


def stands(cluster: StepwiseCluster) -> tuple[str, float]:
    """What its only kind of call waits for, and for how many seconds nothing has come of it."""
    (view,) = summary(cluster).calls
    return view.waits_for, round(view.longest_s, 3)


def step(cluster: StepwiseCluster) -> Iterator[None]:
    """After each thing that happens, until nothing is left."""
    while choices := cluster.choices():
        cluster.do(choices[0])
        yield


def check_agreement(cluster: StepwiseCluster) -> None:
    """The summary counts what `describe` lists."""
    model = cluster.coordinator.cluster.models["actor"]
    info, is_cut = describe(model, cluster.now)
    found = info.summary
    assert found is not None
    assert not is_cut
    shards = [(replica, shard) for replica in info.replicas for shard in replica.shards]
    assert found.workers == len(info.workers)
    assert found.suspect == sum(worker.state == "suspect" for worker in info.workers)
    assert (found.shards, found.reads, found.versions_known) == (
        len(shards),
        len(info.leases),
        len(info.versions),
    )
    assert found.rows == len(info.versions) + len(shards) + len(info.leases) + len(info.workers)
    for view in info.versions:
        mine = view.summary
        assert mine is not None
        assert mine.missing == len(view.missing)
        replicas = [replica for replica in info.replicas if replica.version == view.version]
        states = [replica.state for replica in replicas]
        counts = {
            "ready": mine.ready,
            "filling": mine.filling,
            "draining": mine.draining,
            "torn": mine.torn,
        }
        assert counts == {state: states.count(state) for state in counts}
        held = [shard.state for replica in replicas for shard in replica.shards]
        assert (mine.doubtful, mine.quarantined) == (
            held.count("doubtful"),
            held.count("quarantined"),
        )
        assert mine.readers == sum(
            shard.readers for replica in replicas for shard in replica.shards
        )


def test_the_counts_agree_with_what_describe_lists_after_every_step() -> None:
    cluster = StepwiseCluster()
    trainers, readers = (
        cluster.group("trainer", 2),
        [cluster.group(f"reader-{n}", 2) for n in range(3)],
    )
    cluster.run()
    for number in (1, 2):
        for handle in trainers:
            handle.publish(number)
        for _ in step(cluster):
            check_agreement(cluster)
        for group in readers:
            for handle in group:
                handle.update()
        for _ in step(cluster):
            check_agreement(cluster)
        for handle in trainers:
            handle.unpublish()
        for _ in step(cluster):
            check_agreement(cluster)
    readers[0][0].worker.crash()
    for _ in step(cluster):
        check_agreement(cluster)
    newest, older = versions(cluster)[2], versions(cluster)[1]
    assert (newest.copies, newest.ready, newest.doubtful) == (2, 3, 1)
    assert (older.copies, older.ready) == (0, 0)


# ------------------------------------------------------------------------------------------- what
# calls wait for


def test_a_group_waits_for_its_other_ranks() -> None:
    cluster = StepwiseCluster()
    first, _ = cluster.group("trainer", 2)
    cluster.run()
    first.publish(1)
    cluster.run()
    cluster.advance(3)
    assert waits(cluster) == [("publish", "ranks", 1, "trainer")]
    assert summary(cluster).calls[0].longest_s == pytest.approx(3)


def test_who_asks_for_what_nobody_holds_waits_for_a_version() -> None:
    cluster, trainer = observed()
    reader, other = cluster.handle("reader"), cluster.handle("other")
    cluster.run()
    reader.replicate()
    cluster.run()
    cluster.advance(2)
    other.replicate()
    cluster.run()
    cluster.advance(1)
    assert waits(cluster) == [("replicate", "version", 2, "reader")]
    assert summary(cluster).calls[0].longest_s == pytest.approx(3)
    trainer.publish(1)
    cluster.run()
    assert waits(cluster) == []


def test_an_update_waits_for_its_callers_before_write() -> None:
    cluster, _, reader = reading()
    cluster.run()
    other = cluster.handle("other")
    cluster.run()
    other.replicate(hold=True)
    cluster.run(until=lambda: other.hooks)
    assert waits(cluster) == [("replicate", "before_write", 1, "other")]
    assert reader.member.version == 1


def test_who_may_not_give_up_the_last_copy_waits_for_a_successor() -> None:
    cluster, trainer, (reader,) = retained(1, "reader")
    trainer.unpublish()
    cluster.run()
    cluster.advance(2)
    assert waits(cluster) == [("leave", "successor", 1, "trainer")]
    assert summary(cluster).calls[0].longest_s == pytest.approx(2)
    fill(cluster, reader)
    assert waits(cluster) == []


def test_retain_waits_for_a_holder_that_is_not_heard() -> None:
    cluster, trainer, (reader,) = retained(0, "reader")
    fill(cluster, reader)
    reader.worker.disconnect()
    cluster.run()
    trainer.worker.asks.retain(1)
    cluster.run()
    cluster.advance(1)
    assert waits(cluster) == [("retain", "holders", 1, "")]


def test_a_vote_waits_for_agreement_with_the_publishers_digests() -> None:
    cluster, (_, reader) = published_by_digests("reader")
    reader.replicate()
    cluster.run(Choice("up", "trainer"), Choice("down", "trainer"))  # so it says no digests
    assert waits(cluster) == [("replicate", "digests", 1, "reader")]


def test_what_has_stood_still_longest_comes_first() -> None:
    cluster = StepwiseCluster()
    (first, _), reader = cluster.group("trainer", 2), cluster.handle("reader")
    cluster.run()
    reader.replicate()
    cluster.run()
    cluster.advance(1)
    first.publish(1)
    cluster.run()
    assert [view[:2] for view in waits(cluster)] == [("replicate", "version"), ("publish", "ranks")]


def test_workers_that_are_not_heard_are_named_the_longest_silent_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SUMMARIZED_SILENT_MAX", 2)
    cluster, _ = observed()
    others = [cluster.handle(f"reader-{number}") for number in range(3)]
    cluster.run()
    for handle in others:
        handle.worker.disconnect()
        cluster.advance(1)
    found = summary(cluster)
    assert (found.workers, found.suspect) == (4, 3)
    assert [(view.name, round(view.silent_s)) for view in found.silent] == [
        ("reader-0", 3),
        ("reader-1", 2),
    ]


# --------------------------------------------------------------------------------------------------
# its bounds


def test_of_many_versions_the_newest_are_listed_and_all_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SUMMARIZED_VERSIONS_MAX", 2)
    cluster, _, others = retained(5, "b", "c")
    for number, handle in enumerate(others, 2):
        handle.publish(number)
        cluster.run()
    assert summary(cluster).versions_known == 3
    model = cluster.coordinator.cluster.models["actor"]
    for workers_max, listed in (
        (None, [(1, False), (2, True), (3, True)]),
        (0, [(2, True), (3, True)]),
    ):
        info, _ = describe(model, cluster.now, workers_max=workers_max)
        assert [(view.version, view.summary is not None) for view in info.versions] == listed


def test_a_page_has_room_for_so_many_groups_and_shards_and_one_model_is_never_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "SUMMARIZED_MAX", 30)
    monkeypatch.setattr(limits, "DESCRIBED_MAX", 3)
    cluster, _ = observed()
    for number in range(40):
        cluster.handle(f"reader-{number}")
    cluster.run()
    names = many_models(cluster.coordinator, 7)
    found, after = [], None
    while True:
        answer = ask(cluster, Describe(1, None, after, workers_max=0))
        assert isinstance(answer, Description)
        found.append([model.model for model in answer.models])
        if not answer.more:
            break
        after = found[-1][-1]
    assert found == [["actor"], names[:3], names[3:6], names[6:]]


def test_a_model_that_is_not_known_is_an_error_that_names_the_known_ones() -> None:
    cluster, _ = observed()
    refused = ask(cluster, Describe(1, "criti", workers_max=0))
    assert isinstance(refused, Refused)
    assert "no model 'criti' is known here; known models: actor" in refused.error.message
