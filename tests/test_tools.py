"""What the library's own tools are told: what a version is made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.api.tools import PublishedTensors, published_tensors
from tensorhub.errors import VersionUnavailable
from tensorhub.runtime.loop_thread import finish_blocking
from tests.rig import OPTIONS


@pytest.fixture
def hub() -> Iterator[sync.Hub]:
    with sync.serve(token="", options=OPTIONS) as serving, sync.connect(serving.address, token="", options=OPTIONS) as hub:
        yield hub


def test_versions_that_are_published_alike_are_described_once(hub: sync.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    coordinator: Any = hub._async._worker.coordinator
    part = coordinator.part

    def asked_for(part_id: str, timeout_s: float) -> Any:
        asked.append(part_id)
        return part(part_id, timeout_s)

    def found(version: int, before: PublishedTensors | None) -> PublishedTensors:
        made = finish_blocking(published_tensors(hub._async, "m", version, 30.0, before))
        assert made.version.version == version
        return made

    monkeypatch.setattr(coordinator, "part", asked_for)
    weights = hub.register("m", {"a": torch.zeros(3), "b": torch.zeros(2, 2, dtype=torch.int8)})
    weights.publish(1)
    first = found(1, None)
    assert first.kinds == {"a": ("float32", (3,)), "b": ("int8", (2, 2))}
    assert len(asked) == 1
    weights.unpublish()
    weights.publish(2)
    second = found(2, first)
    assert (second.kinds, second.publication, len(asked)) == (first.kinds, first.publication, 1)
    weights.close()
    hub.register("m", {"a": torch.zeros(4)}).publish(3)
    other = found(3, second)
    assert (other.kinds, len(asked)) == ({"a": ("float32", (4,))}, 2)
    with pytest.raises(VersionUnavailable):
        found(4, other)
