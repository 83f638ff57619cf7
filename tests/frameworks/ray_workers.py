"""What runs in Ray actors in the tests: workers of a cluster, each with one small model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import ray

from tensorhub import Location, sync
from tensorhub.integrations import ray as tensorhub_ray

MODEL = "actor"
SIZE = 100_000


class Trainer:
    """Publishes tensors of which every element is the version."""

    def __init__(self, address: str) -> None:
        self._hub = sync.connect(address, name="trainer", location=tensorhub_ray.location())
        self._tensors = {"w": np.zeros(SIZE, np.float32)}
        self._weights = self._hub.register(MODEL, self._tensors)

    def publish(self, version: int) -> None:
        with self._weights.mutate(version):
            self._tensors["w"][:] = version


class Rollout:
    """Follows the trainer."""

    def __init__(self, address: str, racks: Mapping[int, str] | None = None) -> None:
        self.location = tensorhub_ray.location(racks)
        self._hub = sync.connect(address, location=self.location)
        self._tensors = {"w": np.zeros(SIZE, np.float32)}
        self._weights = self._hub.register(MODEL, self._tensors, spot=True)

    def update(self, at_least: int, timeout: float = 150) -> tuple[int, list[float]]:
        """The version, and what its elements are."""
        report = self._weights.update("latest", at_least=at_least, timeout=timeout)
        return report.version, _elements(self._tensors["w"])

    def where(self) -> Location:
        return self.location


def _elements(array: npt.NDArray[np.float32]) -> list[float]:
    return [float(each) for each in np.unique(array)]


def started(actor: Any, within_s: float = 200) -> Any:
    """The actor, which is then up."""
    ray.get(actor.__ray_ready__.remote(), timeout=within_s)
    return actor
