"""Archived copies that the coordinator has given up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tensorhub.archives.catalogue import Key
from tensorhub.runtime.worker import announced_versions
from tensorhub.runtime.worker.announced_versions import AnnouncedVersions, newest_of


@pytest.mark.parametrize("is_rolled_back", [False, True])
async def test_only_what_a_rollback_has_ended_is_removed(is_rolled_back: bool) -> None:
    """The coordinator has forgotten a version from before a rollback, and knows it again once that
    is restored, unless the rollback has ended it.
    """
    version = SimpleNamespace(key=Key(0, 1), content_id="one")
    model, done = SimpleNamespace(lineage=1, versions=list[Any]()), list[str]()

    async def describe(*_: object, **__: object) -> list[Any]:
        return [model]

    worker: Any = SimpleNamespace(
        coordinator=SimpleNamespace(describe=describe),
        options=SimpleNamespace(op_timeout_s=1.0),
        router=SimpleNamespace(epoch=1),
    )
    catalogue = SimpleNamespace(model="actor", versions={version.key: version})
    archive: Any = SimpleNamespace(catalogue=catalogue)
    announced = AnnouncedVersions(worker, archive, None, lambda: None)  # type: ignore[arg-type]
    announced.lost.add(version.key)

    async def restore(versions: list[Any]) -> None:
        model.versions += [] if is_rolled_back else versions

    async def remove(*_: object) -> None:
        done.append("removed")

    async def announce(versions: list[Any], *_: object) -> None:
        done.extend("announced" for _ in versions)

    with patch.multiple(announced, _restore=restore, _remove=remove, announce=announce):
        await announced.announce_lost()
    assert done == (["removed"] if is_rolled_back else ["announced"])
    assert announced.withdrawn == ({version.key} if is_rolled_back else set())


def test_the_newest_versions_are_announced_as_far_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shard = SimpleNamespace(chunks=3)
    versions = [SimpleNamespace(key=Key(0, number), shards=[shard, shard]) for number in range(9)]
    catalogue: Any = SimpleNamespace(effective=versions)
    assert newest_of(catalogue) == versions
    monkeypatch.setattr(announced_versions, "COPIES_MAX", 5)
    assert newest_of(catalogue) == versions[7:]
    monkeypatch.setattr(announced_versions, "COPIED_CHUNKS_MAX", 6)
    assert newest_of(catalogue) == versions[8:]
