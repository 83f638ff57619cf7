"""Bugs in what wakes those who wait: each call that nobody wakes costs its caller the whole
deadline.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Model, Operation
from tensorhub.coordinator.versions import Versions
from tensorhub.types import OpKey
from tests.testing.bugs import bug, replaced


@bug("G7: a source comes, and nobody who lacks one is woken")
def source_wakes_nobody() -> Iterator[None]:
    def count(self: Cluster) -> None:
        while self.uncounted:
            version, _ = self.uncounted.popitem()
            version.holdings.count()
            version.holdings.has_grown = False

    with replaced(Cluster, "count", count):
        yield


@bug(
    "G7: the newest version is held again, and nobody who waits for it is woken, since its number "
    "is the same"
)
def version_held_again_wakes_nobody() -> Iterator[None]:
    refresh_ = Versions.refresh

    def refresh(self: Any, model: Model) -> None:
        announced, unbound, model.waiting.unbound = (
            model.history.announced,
            model.waiting.unbound,
            {},
        )
        refresh_(self, model)
        model.waiting.unbound = unbound
        if model.history.announced != announced:
            self._cluster.wake_all(unbound)

    with replaced(Versions, "refresh", refresh):
        yield


@bug(
    "G7: one shard comes back, and a copy that needs no other waits on",
    seeds_max=300,
    SEEDERS_DRAWN=1.0,
    PARTED_DRAWN=1.0,
)
def shard_that_comes_back_wakes_no_copy() -> Iterator[None]:
    wake_all_ = Cluster.wake_all

    def wake_all(self: Cluster, waiting: dict[OpKey, Operation]) -> None:
        if not any(waiting is model.waiting.unbound_copies for model in self.models.values()):
            wake_all_(self, waiting)

    with replaced(Cluster, "wake_all", wake_all):
        yield
