"""Answers to what anybody may ask: check, manifests, and a model that is not known."""

from __future__ import annotations

from tensorhub.coordinator import Connected, Disconnected, Received, Send
from tensorhub.messages import (
    Announce,
    Check,
    Describe,
    Done,
    FromCoordinator,
    FromWorker,
    GetManifest,
    ManifestReply,
    Refused,
    Watch,
)
from tensorhub.testing import MANIFEST, SimHandle, StepwiseCluster

OBSERVER = 1000


def observed() -> tuple[StepwiseCluster, SimHandle]:
    cluster = StepwiseCluster()
    trainer = cluster.handle("trainer")
    cluster.run()
    cluster.coordinator.step(Connected(OBSERVER, "observer.1", "observer"), 0.0)
    return cluster, trainer


def ask(cluster: StepwiseCluster, message: FromWorker) -> FromCoordinator:
    (answer,) = cluster.coordinator.step(Received(OBSERVER, message), cluster.now)
    assert isinstance(answer, Send)
    assert answer.session == OBSERVER
    return answer.message


def test_check_says_whether_a_number_could_be_published() -> None:
    cluster, trainer = observed()
    assert ask(cluster, Check(1, "actor", 1)) == Done(1)
    trainer.publish(1)
    cluster.run()
    refused = ask(cluster, Check(2, "actor", 1))
    assert isinstance(refused, Refused)
    assert refused.error.kind == "VersionConflict"
    assert ask(cluster, Check(3, "unheard", 1)) == Done(3)
    assert "unheard" not in cluster.coordinator.cluster.models


def test_manifests_are_found_by_content_and_rank() -> None:
    cluster, trainer = observed()
    published = trainer.publish(1)
    cluster.run()
    assert published.version is not None
    content = published.version.content_id
    assert ask(cluster, GetManifest(1, "actor", content, 0)) == ManifestReply(1, MANIFEST.encode())
    for wrong in (
        GetManifest(2, "actor", content, 1),
        GetManifest(2, "actor", "?", 0),
        GetManifest(2, "?", content, 0),
    ):
        refused = ask(cluster, wrong)
        assert isinstance(refused, Refused)
        assert refused.error.kind == "VersionUnavailable"


def test_describing_an_unknown_model_names_the_known_ones() -> None:
    cluster, _ = observed()
    refused = ask(cluster, Describe(1, "criti"))
    assert isinstance(refused, Refused)
    assert "no model 'criti' is known here; known models: actor" in refused.error.message


def test_watchers_hear_the_newest_version_now_and_whenever_it_changes() -> None:
    cluster, trainer = observed()
    assert ask(cluster, Watch("actor")) == Announce("actor", None, 0)
    heard: list[Announce] = []
    step = cluster.coordinator.step

    def listen(event: object, now: float) -> list[object]:
        actions = step(event, now)  # type: ignore[arg-type]
        heard.extend(
            a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Announce)
        )
        return list(actions)

    cluster.coordinator.step = listen  # type: ignore[assignment, method-assign]
    for number in (1, 2):
        trainer.publish(number)
        cluster.run()
        trainer.unpublish()
        cluster.run()
    assert [a.newest.version for a in heard if a.newest is not None] == [1, 2]
    step(Disconnected(OBSERVER), cluster.now)
    trainer.publish(3)
    cluster.run()
    assert len(heard) == 2
    assert cluster.coordinator.cluster.watchers == {}
