"""What the library's own tools are told: what a version is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tensorhub import sync
from tensorhub.errors import VersionUnavailable
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.loop_thread import finish_blocking
from tensorhub.tools import PublishedTensors, published_tensors
from tensorhub.types import RegistrationId
from tests.rig import CHUNKS, OPTIONS, cluster, handle_of, holds, tensors, until, worker_of


@pytest.fixture
def hub() -> Iterator[sync.Hub]:
    with sync.serve(token="", options=OPTIONS) as serving, sync.connect(serving.address, token="", options=OPTIONS) as hub:
        yield hub


def test_versions_that_are_published_alike_are_described_once(hub: sync.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    coordinator: Any = hub._hub._worker.coordinator
    part = coordinator.part

    def asked_for(part_id: str, timeout_s: float) -> Any:
        asked.append(part_id)
        return part(part_id, timeout_s)

    def found(version: int, before: PublishedTensors | None) -> PublishedTensors:
        made = finish_blocking(published_tensors(hub._hub, "m", version, 30.0, before))
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


@pytest.mark.anyio
async def test_digests_are_made_right_after_a_publication(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()
    digest = ChunkMemory.guarded_digest

    def noted(memory: ChunkMemory, chunk: int) -> int:
        made.append(chunk)
        return digest(memory, chunk)

    async with cluster("trainer", "reader") as c:
        weights = await c.hubs[0].register("m", tensors(1))
        monkeypatch.setattr(ChunkMemory, "guarded_digest", noted)
        await weights.publish(1)
        member, owner = handle_of(weights).member, worker_of(c.hubs[0])._owner
        assert member.content is not None
        where = RegistrationId(member.shard.registration), member.content.generation
        await until(lambda: None not in (owner.digests(*where) or (None,)))
        assert made == list(reversed(range(CHUNKS)))  # a reader begins with the others
        fetched = await c.hubs[1].fetch("m", 1)
        assert holds({name: tensor.numpy() for name, tensor in fetched.items()}, 1)


@pytest.mark.anyio
async def test_without_digests_none_are_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedOwner, "make_digests", None)
    async with cluster("trainer", options=replace(OPTIONS, integrity=False)) as c:
        weights = await c.hubs[0].register("m", tensors(1))
        await weights.publish(1)
        await weights.unpublish()
