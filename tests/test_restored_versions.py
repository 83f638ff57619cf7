"""Versions of an archive in a coordinator that does not know them, over real sockets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import tensorhub
from tensorhub.api.hub import Hub
from tensorhub.errors import StateError, VersionConflict
from tensorhub.messages import RESTORED_MAX, Restored
from tensorhub.model.manifest import ID_BYTES
from tensorhub.runtime.worker.archived_copies import ArchivedShard
from tensorhub.runtime.worker.coordinator_client import PAGE_BYTES_MAX, _paged
from tensorhub.types import VersionInfo
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    all_of,
    connect,
    holds,
    tensors,
    worker_of,
    write,
)
from tests.test_archived_copies import add, archived_of, read
from tests.test_resharding import is_held, rollout, world

pytestmark = pytest.mark.anyio
HOSTED = replace(OPTIONS, host_memory_bytes=CHUNKS * CHUNK_BYTES)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def ids(*shards: ArchivedShard) -> bytes:
    """Of their manifests and last parts."""
    found = [[each.manifest.manifest_id, *list(each.parts)[-1:]] for each in shards]
    joined = [bytes.fromhex("".join(each)).ljust(2 * ID_BYTES, b"\0") for each in found]
    return b"".join(joined)


async def restore(
    hub: Hub, cluster: str, *versions: Restored, lineage: int = 0, mark: int = 0
) -> None:
    mark = mark or max(each.version.version for each in versions)
    client = worker_of(hub).coordinator
    await hub._thread.call(client.restore, "m", cluster, lineage, mark, versions, 30)


async def known(hub: Hub) -> tuple[int, int | None, list[int]]:
    """Lineage, mark and versions."""
    info = await hub.describe("m")
    return info.lineage, info.mark, sorted(view.version for view in info.versions)


async def test_a_new_coordinator_serves_what_the_archive_has_under_the_same_numbers(
    tmp_path: Path,
) -> None:
    shards: list[ArchivedShard] = []
    async with (
        tensorhub.serve(token="", options=OPTIONS) as gone,
        connect(gone.address) as hub,
    ):
        memory = tensors(1)
        source = await hub.register("m", memory)
        for number in (1, 2, 3):
            async with source.mutate(number):
                write(memory, number)
            shards.append(archived_of(source)[0])
        layout_id = (await hub.describe("m")).versions[0].layout_id
        former = worker_of(hub).router.cluster
    versions = [Restored(each.version, layout_id, ids(each), each.root) for each in shards]
    async with (
        tensorhub.serve(token="", options=OPTIONS, state_dir=tmp_path) as coordinator,
        connect(coordinator.address, "archive", HOSTED) as hub,
        connect(coordinator.address, "reader") as reader,
    ):
        assert worker_of(hub).router.cluster not in ("", former)
        await restore(hub, former, *versions)
        assert (await reader.wait_for("m", at_least=1)).version == 3
        await add(hub, *shards)
        for number in (3, 1, 2):
            assert holds(await read(reader, number), number)
        weights = await reader.register("m", mine := tensors(), spot=True)
        await weights.replicate("latest")
        assert holds(mine, 3)
        trained = await hub.register("m", tensors(4))
        with pytest.raises(VersionConflict, match="the newest number so far is 3"):
            await trained.publish(3)
        assert (await trained.publish(4)).version == 4
        with pytest.raises(StateError, match="another one"):
            await restore(hub, "a third one", *versions)
    async with (
        tensorhub.serve(token="", options=OPTIONS, state_dir=tmp_path) as coordinator,
        connect(coordinator.address, "archive", HOSTED) as hub,
        connect(coordinator.address, "reader") as reader,
    ):
        assert await known(reader) == (0, 4, [1, 2, 3, 4])
        await restore(hub, former, *versions)
        await add(hub, *shards)
        assert holds(await read(reader, 2), 2)


async def test_readers_of_another_layout_read_restored_versions() -> None:
    options = replace(OPTIONS, host_memory_bytes=2**30)
    async with world("one", "two") as (c, trained, _):
        shards = [archived_of(each)[0] for each in trained]
        layout_id = (await c.hubs[0].describe("m")).versions[0].layout_id
    info = shards[0].version
    version = Restored(info, layout_id, ids(*shards), b"".join(each.root for each in shards))
    async with (
        tensorhub.serve(token="", options=OPTIONS) as coordinator,
        connect(coordinator.address, "archive", options) as hub,
        connect(coordinator.address, "reader") as reader,
    ):
        await restore(hub, "gone", version)
        await add(hub, *shards)
        weights, mine = await rollout([reader], "rollout")
        await all_of(*(each.replicate() for each in weights))
        assert is_held(mine, 1)


async def test_a_thousand_versions_come_back_in_pages(tmp_path: Path) -> None:
    versions = [
        Restored(
            VersionInfo("m", number, f"content {number}", 8, 1, number // 400), "", b"i" * 32, b""
        )
        for number in range(1, 1001)
    ]
    async with (
        tensorhub.serve(token="", options=OPTIONS, state_dir=tmp_path) as coordinator,
        connect(coordinator.address, "archive") as hub,
        connect(coordinator.address, "watcher") as watcher,
    ):
        heard = watcher.watch("m")
        await restore(hub, "gone", *versions, lineage=2, mark=1007)
        assert await known(watcher) == (2, 1007, [*range(1, 1001)])
        first = await anext(aiter(heard))
        assert first.version == 1000
    async with (
        tensorhub.serve(token="", options=OPTIONS, state_dir=tmp_path) as coordinator,
        connect(coordinator.address, "archive") as hub,
    ):
        assert await known(hub) == (2, 1007, [*range(937, 1001)])
        await restore(hub, "gone", *versions, lineage=2, mark=1007)
        assert await known(hub) == (2, 1007, [*range(1, 1001)])


def test_pages() -> None:
    info = VersionInfo("m", 1, "c", 8, 1)
    small, large = (Restored(info, "", b"i" * size, b"") for size in (32, PAGE_BYTES_MAX))
    assert [len(page) for page in _paged([small] * 130)] == [RESTORED_MAX, RESTORED_MAX, 2]
    assert [len(page) for page in _paged([large, large, small, small])] == [1, 1, 2]
    assert list(_paged([])) == []
