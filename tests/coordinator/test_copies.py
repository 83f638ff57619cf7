"""Copies of one shard in a worker's host memory: an ordinary registration, an ordinary source, of
any layout (R5).

A story of several modules: `membership` (what may be registered), `fills` and `availability`.
"""

from __future__ import annotations

import pytest

from tensorhub.errors import GroupAborted, ManifestMismatch, RegistrationError, StateError
from tensorhub.testing import MANIFEST, SimHandle, StepwiseCluster
from tensorhub.types import Medium, Purpose
from tensorhub.worker.registration_session import Shard


def copy(
    cluster: StepwiseCluster,
    name: str,
    shard: int,
    world_size: int = 1,
    purpose: Purpose = Purpose.SEED,
    rank: int = 0,
) -> SimHandle:
    """Host memory of a worker, for one shard."""
    worker = cluster.workers.get(name) or cluster.worker(name)
    ident = f"copy{name}{shard}{rank}"
    group = f"copy/{name}{shard}"
    return worker.take(
        Shard(
            ident,
            "actor",
            group,
            rank,
            world_size,
            False,
            "",
            MANIFEST,
            shard,
            Medium.HOST,
            purpose,
        )
    )


def published() -> tuple[StepwiseCluster, list[SimHandle]]:
    """A group of two holds version 1."""
    cluster = StepwiseCluster(host_bytes=2 * MANIFEST.nbytes)
    trainers = cluster.group("trainer", 2)
    cluster.run()
    for handle in trainers:
        handle.publish(1)
    cluster.run()
    return cluster, trainers


def test_copies_of_every_shard_keep_a_version_available() -> None:
    cluster, trainers = published()
    copies = [copy(cluster, "keeper", shard) for shard in (0, 1)]
    cluster.run()
    fills = [handle.replicate() for handle in copies]
    cluster.run()
    assert [asked.number for asked in fills] == [1, 1]
    for handle in trainers:
        handle.unpublish()
    cluster.run()
    readers = cluster.group("reader", 2)
    cluster.run()
    fills = [handle.replicate() for handle in readers]
    cluster.run()
    assert [asked.number for asked in fills] == [1, 1]
    version = cluster.coordinator.cluster.models["actor"].versions[1]
    assert {shard: len(holdings) for shard, holdings in version.holdings.items()} == {0: 2, 1: 2}
    replicas = [h.replica for holdings in version.holdings.values() for h in holdings]
    assert {(r.medium, r.purpose) for r in replicas if r.group.name.startswith("copy")} == {
        (Medium.HOST, Purpose.SEED)
    }


def test_a_copy_is_announced_again() -> None:
    cluster, trainers = published()
    kept = copy(cluster, "keeper", 1)
    cluster.run()
    kept.replicate()
    cluster.run()
    cluster.restart()
    for name in ("trainer0", "keeper"):
        cluster.workers[name].connect()
    trainers[1].worker.crash()
    cluster.run()
    fetched = cluster.fetcher("reader", 1)
    cluster.run()
    asked = fetched.fetch(timeout_s=3)
    cluster.run()
    assert asked.number == 1


def test_what_a_copy_cannot_be() -> None:
    cluster, _ = published()
    for number, odd in enumerate(
        (
            copy(cluster, "a", 0, 2),
            copy(cluster, "b", 1, 1, Purpose.PREFETCH),
            copy(cluster, "c", 0, 1, Purpose.USE),
            copy(cluster, "f", 0, 2, Purpose.ARCHIVE),
        )
    ):
        cluster.run()
        assert isinstance(odd.registration_error, RegistrationError), number
    kept, beyond = copy(cluster, "d", 0), copy(cluster, "e", 2)
    cluster.run()
    asked = kept.publish(2)
    cluster.run()
    assert isinstance(asked.error, StateError)
    assert "never published" in str(asked.error)
    asked = beyond.replicate()
    cluster.run()
    with pytest.raises((ManifestMismatch, GroupAborted), match="has no rank 2"):
        _ = asked.number
