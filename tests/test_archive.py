"""Versions in an archive: what callers of a cluster see. Every byte is compared."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import pytest

import tensorhub
from tensorhub import sync
from tensorhub.api.archiving import Archive
from tensorhub.api.embedded import Coordinator
from tensorhub.api.hub import Hub
from tensorhub.api.weights import Weights
from tensorhub.archives.catalogue import Key, Version, VersionCatalogue
from tensorhub.archives.store import Store
from tensorhub.errors import (
    ArchiveUnavailable,
    IntegrityError,
    InvalidValue,
    LeaseLost,
    OperationTimeout,
    StateError,
    VersionConflict,
    VersionUnavailable,
)
from tensorhub.messages import DigestAgain
from tensorhub.model.manifest import Manifest, id_of
from tensorhub.runtime.worker import announced_versions
from tensorhub.runtime.worker.announced_versions import AnnouncedVersions
from tensorhub.runtime.worker.archived_copies import ArchivedCopies, ArchivedShard
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    Restartable,
    Tensors,
    all_of,
    begin_store,
    equal,
    holds,
    nothing_left,
    ranks_of,
    tensors,
    until,
    worker_of,
    write,
)

pytestmark = pytest.mark.anyio
pytest.importorskip("obstore", reason="the extra archive is not installed")
pytest.importorskip("zstandard", reason="the extra delta is not installed")

NBYTES = CHUNKS * CHUNK_BYTES
HOSTED = replace(OPTIONS, host_memory_bytes=3 * NBYTES)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


BOTH = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


@pytest.fixture
def url(tmp_path: Path) -> str:
    begin_store()
    return f"file://{tmp_path}/archive"


@dataclass
class Cluster:
    coordinator: Coordinator
    archiver: Hub
    trainer: Hub
    weights: Weights
    memory: Tensors

    async def publish(self, version: int) -> None:
        """One word of each tensor differs from the version before."""
        async with self.weights.mutate(version):
            for tensor in self.memory.values():
                tensor[version] += 1


@contextlib.asynccontextmanager
async def cluster(memory: Tensors | None = None) -> AsyncIterator[Cluster]:
    held = tensors(0) if memory is None else memory
    async with (
        tensorhub.serve(options=OPTIONS) as coordinator,
        tensorhub.connect(coordinator.address, options=HOSTED) as archiver,
        tensorhub.connect(coordinator.address, options=OPTIONS) as trainer,
    ):
        weights = await trainer.register("actor", held)
        yield Cluster(coordinator, archiver, trainer, weights, held)


async def fetched(hub: Hub, version: int | str = "latest") -> Tensors:
    found = await hub.fetch("actor", version)
    return {name: tensor.numpy() for name, tensor in found.items()}


def at(version: int) -> Tensors:
    """What `Cluster.publish` has made by then."""
    held = tensors(0)
    for tensor in held.values():
        tensor[1 : version + 1] += 1
    return held


def in_bucket(url: str) -> Mapping[Key, Version]:
    return VersionCatalogue(Store(url), "actor").load().versions


async def archived(url: str, newest: int) -> None:
    """A cluster has archived versions 1 to `newest`, and is gone."""
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url) as there,
    ):
        for version in range(1, newest + 1):
            await its.publish(version)
            await there.wait_for(at_least=version)


@BOTH
async def test_a_version_outlives_all_workers_that_held_it(url: str) -> None:
    async with (
        nothing_left(),
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url) as there,
    ):
        for version in (1, 2, 3):
            await its.publish(version)
            await there.wait_for(at_least=version)
        assert [each.version for each in there.versions] == [1, 2, 3]
        assert [each.base for each in there.versions] == [None, 1, 2]
        assert there.versions[1].stored_bytes < NBYTES / 100 < there.versions[0].stored_bytes
        await its.weights.close(abandon=True)
        await its.trainer.close()
        async with tensorhub.connect(its.coordinator.address, options=OPTIONS) as reader:
            for version in (2, 1, 3):
                assert equal(await fetched(reader, version), at(version))
            report = (await reader.fetch("actor", 1)).report
            assert report.verified_by == "publisher"
            assert report.reread_bytes == 0


async def test_a_reader_with_access_reads_the_bucket_itself(url: str) -> None:
    direct = replace(OPTIONS, direct=(url,))
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url) as there,
        tensorhub.connect(its.coordinator.address, options=direct) as reader,
    ):
        for version in (1, 2):
            await its.publish(version)
            await there.wait_for(at_least=version)
        await its.weights.close(abandon=True)
        found = await reader.fetch("actor", 1)
        assert {each.transport for each in found.report.sources} == {"archive"}
        assert equal({name: each.numpy() for name, each in found.items()}, at(1))


@BOTH
async def test_a_cluster_starts_again_from_the_bucket(url: str) -> None:
    await archived(url, 3)
    async with (
        nothing_left(),
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url, serve=True) as there,
    ):
        assert [each.version for each in there.versions] == [1, 2, 3]
        for version in (1, 2, 3):
            assert equal(await fetched(its.trainer, version), at(version))
        assert equal(await fetched(its.trainer), at(3))
        with pytest.raises(VersionConflict):
            await its.weights.publish(3)
        await its.weights.publish(4)
        await there.wait_for(at_least=4)
        (model,) = [await its.trainer.describe("actor")]
        assert [each.version for each in model.versions] == [1, 2, 3, 4]


@pytest.mark.parametrize("damage", ["index", "manifest", "no address space"])
async def test_a_version_that_was_damaged_is_named_and_the_others_are_served(
    url: str, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await archived(url, 3)
    told = list[str]()
    monkeypatch.setattr(
        announced_versions.log, "warning", lambda event, **fields: told.append(fields["reason"])
    )
    store, version = Store(url), in_bucket(url)[Key(0, 2)]
    objects = {
        "index": f"actor/{version.index}",
        "manifest": f"actor/parts/{version.shards[0].manifest}",
    }
    named = objects.get(damage, "bytes of address space for an archived version cannot be had")
    if damage == "index":
        store.put(named, [b"?"])
    elif damage == "manifest":  # another one, of its own
        other = Manifest((), (), CHUNK_BYTES, version.digest, "").encode()
        store.put(f"actor/parts/{id_of(other)}", [other])
        shard = replace(version.shards[0], manifest=id_of(other))
        named = f"actor/{version.path}"
        store.put(named, [replace(version, shards=(shard,)).encode()])
    else:
        add = ArchivedCopies.add

        async def full(copies: ArchivedCopies, shard: ArchivedShard) -> str:
            if shard.version.version == 2:
                raise StateError(named)
            return await add(copies, shard)

        monkeypatch.setattr(ArchivedCopies, "add", full)
    async with (
        nothing_left(),
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url, serve=True),
    ):
        for number in (1, 3) if damage == "no address space" else (1,):
            assert equal(await fetched(its.trainer, number), at(number))
        assert told
        assert all(named in reason for reason in told)


def damage(url: str, version: Version) -> str:
    """Every byte of what the version is made of; returns the name of one object."""
    objects = [path for path in version.own_objects if path != version.index]
    for path in objects:
        place = Path(url.removeprefix("file://"), "actor", path)
        if place.suffix != ".json":
            place.write_bytes(bytes(each ^ 1 for each in place.read_bytes()))
    return next(path for path in objects if "frames" in path)


async def test_a_damaged_object_ends_a_call_at_once_unless_another_worker_has_the_version(
    url: str,
) -> None:
    await archived(url, 2)
    named = damage(url, in_bucket(url)[Key(0, 2)])
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url, serve=True),
        tensorhub.connect(its.coordinator.address, options=OPTIONS) as reader,
    ):
        for _ in range(2):
            with pytest.raises(
                IntegrityError, match=f"no other worker has it.*{url}/actor/{named}"
            ):
                await reader.fetch("actor", 2, timeout=3600)
        assert equal(await fetched(reader, 1), at(1))


async def test_the_archive_of_another_cluster_is_left_alone_unless_it_is_to_be_served(
    url: str,
) -> None:
    await archived(url, 1)
    async with cluster() as its:
        with pytest.raises(StateError, match="is of another cluster"):
            await tensorhub.archive(its.archiver, "actor", url)
        await its.publish(1)
        with pytest.raises(StateError, match="cluster"):
            await tensorhub.archive(its.archiver, "actor", url, serve=True)
    await archived_again(url)


async def archived_again(url: str) -> None:
    """Nothing was changed there."""
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url, serve=True) as there,
    ):
        assert [each.version for each in there.versions] == [1]
        assert equal(await fetched(its.trainer), at(1))


async def test_one_archiver_writes_at_a_time(url: str) -> None:
    async with cluster() as its:
        first = await tensorhub.archive(its.archiver, "actor", url)
        await its.publish(1)
        await first.wait_for(at_least=1)
        async with tensorhub.connect(its.coordinator.address, options=HOSTED) as other:
            with pytest.raises(StateError, match="is being written by"):
                await tensorhub.archive(other, "actor", url)
            async with tensorhub.archive(other, "actor", url, take_over=True) as second:
                await its.publish(2)
                await second.wait_for(at_least=2)
                with pytest.raises(LeaseLost, match="taken over"):
                    await first.wait_for(at_least=3)
                with pytest.raises(LeaseLost, match="taken over"):
                    await first.close()


async def test_an_archiver_that_cannot_begin_leaves_the_archive_to_others(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(_: AnnouncedVersions) -> None:
        raise ArchiveUnavailable("503", retryable=True)

    async with cluster() as its:
        await its.archiver.register("actor", tensors())  # its worker is known
        with monkeypatch.context() as patched:
            patched.setattr(AnnouncedVersions, "announce_all", fail)
            with pytest.raises(ArchiveUnavailable, match="503"):
                await tensorhub.archive(its.archiver, "actor", url)
        async with (
            tensorhub.connect(its.coordinator.address, options=HOSTED) as other,
            tensorhub.archive(other, "actor", url) as there,
        ):
            await its.publish(1)
            await there.wait_for(at_least=1)


async def test_an_archiver_that_is_gone_is_replaced(url: str) -> None:
    async with cluster() as its:
        await tensorhub.archive(its.archiver, "actor", url)
        await its.publish(1)
        await its.archiver.close()
        async with (
            tensorhub.connect(its.coordinator.address, options=HOSTED) as other,
            tensorhub.archive(other, "actor", url) as there,
        ):
            await there.wait_for(at_least=1)


async def test_only_wanted_versions_stay(url: str) -> None:
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url, every=2, keep=2, keep_every=8) as there,
    ):
        for version in range(1, 13):
            await its.publish(version)
            if version % 2 == 0:
                await there.wait_for(at_least=version)
        for version in (13, 14):
            await its.publish(version)
        await there.wait_for(at_least=14)
        numbers = [each.version for each in there.versions]
        assert {8, 12, 14} <= {*numbers}
        assert all(each % 2 == 0 for each in numbers)
        await its.weights.close(abandon=True)
        for version in (8, 12, 14):
            found = await fetched(its.trainer, version)
            assert equal(found, at(version))


async def test_a_version_that_others_are_differences_to_stays_and_is_served(url: str) -> None:
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url, keep=2) as there,
    ):
        for version in range(1, 8):
            await its.publish(version)
            await there.wait_for(at_least=version)
        bases = {each.version: each.base for each in there.versions}
        assert bases == {1: None, 5: 1, 6: 5, 7: 6}  # since 6 was archived
        await its.weights.close(abandon=True)
        for version in bases:
            assert equal(await fetched(its.trainer, version), at(version))


async def test_what_the_cluster_retains_stays(url: str) -> None:
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url, keep=1) as there,
    ):
        await its.publish(1)
        await there.wait_for(at_least=1)
        async with its.trainer.pin("actor", 1):
            for version in (2, 3):
                await its.publish(version)
                await there.wait_for(at_least=version)
            assert equal(await fetched(its.trainer, 1), at(1))


async def test_only_what_the_cluster_retains_stays_beside_what_is_kept(url: str) -> None:
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url, keep=1) as there,
    ):
        for version in (1, 2):
            await its.publish(version)
            await there.wait_for(at_least=version)
        async with its.trainer.pin("actor", 2):
            for version in range(3, 8):
                await its.publish(version)
                await there.wait_for(at_least=version)
            bases = {each.version: each.base for each in there.versions}
            assert bases == {1: None, 2: 1, 5: 1, 6: 5, 7: 6}  # since 6 was archived
            assert equal(await fetched(its.trainer, 2), at(2))


async def test_a_retained_version_may_be_overwritten_once_it_is_archived(url: str) -> None:
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url) as there,
    ):
        await its.trainer.retain("actor", latest=2)
        await its.publish(1)
        await there.wait_for(at_least=1)
        await its.publish(2)
        assert equal(await fetched(its.trainer, 1), at(1))


@BOTH
async def test_versions_that_were_rolled_back_do_not_come_back(url: str) -> None:
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url) as there,
    ):
        for version in (1, 2, 3):
            await its.publish(version)
            await there.wait_for(at_least=version)
        await its.weights.unpublish()
        await its.trainer.rollback("actor", to=1)
        write(its.memory, 7)
        await its.weights.publish(2)
        await until(lambda: [*in_bucket(url)] == [Key(0, 1), Key(1, 2)])
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url, serve=True),
    ):
        assert equal(await fetched(its.trainer), tensors(7))
        assert equal(await fetched(its.trainer, 1), at(1))
        with pytest.raises(VersionUnavailable):
            await its.trainer.fetch("actor", 3)


async def test_a_new_archiver_serves_what_only_the_archive_has(url: str) -> None:
    """The one before leaves the archive to it when it ends, and need not be gone."""
    async with cluster() as its:
        async with tensorhub.archive(its.archiver, "actor", url) as there:
            for version in (1, 2):
                await its.publish(version)
                await there.wait_for(at_least=version)
        async with (
            tensorhub.connect(its.coordinator.address, options=HOSTED) as other,
            tensorhub.archive(other, "actor", url),
        ):
            assert equal(await fetched(its.trainer, 1), at(1))


async def test_ranks_that_exchange_their_contents_are_archived_as_they_are(url: str) -> None:
    """The difference of each rank is made against what the same rank had. (The second archiver has
    nothing in memory.)
    """
    memory = [tensors(1), tensors(2)]
    hosted = replace(HOSTED, host_memory_bytes=6 * NBYTES)
    async with (
        tensorhub.serve(options=OPTIONS) as coordinator,
        tensorhub.connect(coordinator.address, options=hosted) as archiver,
        tensorhub.connect(coordinator.address, options=OPTIONS) as trainer,
    ):
        ranks = await ranks_of([trainer], memory, "trainers")
        async with tensorhub.archive(archiver, "m", url) as there:
            await all_of(*(each.publish(1) for each in ranks))
            await there.wait_for(at_least=1)
            await all_of(*(each.unpublish() for each in ranks))
            write(memory[0], 2)
            write(memory[1], 1)
            await all_of(*(each.publish(2) for each in ranks))
            assert (await there.wait_for(at_least=2)).base == 1
        await archiver.close()
        async with (
            tensorhub.connect(coordinator.address, options=hosted) as second,
            tensorhub.archive(second, "m", url),
        ):
            await all_of(*(each.close(abandon=True) for each in ranks))
            mine = [tensors(), tensors()]
            readers = await ranks_of([trainer], mine, "readers", spot=True)
            await all_of(*(each.replicate(2) for each in readers))
            assert all(map(holds, mine, (2, 1)))


async def test_versions_without_digests_are_archived_by_their_bytes(url: str) -> None:
    plain = replace(HOSTED, integrity=False)
    async with (
        tensorhub.serve(options=plain) as coordinator,
        tensorhub.connect(coordinator.address, options=plain) as archiver,
        tensorhub.connect(coordinator.address, options=plain) as trainer,
    ):
        weights = await trainer.register("actor", held := tensors(0))
        its = Cluster(coordinator, archiver, trainer, weights, held)
        async with tensorhub.archive(archiver, "actor", url) as there:
            for version in (1, 2):
                await its.publish(version)
                assert (await there.wait_for(at_least=version)).base == (version - 1 or None)
        await archiver.close()
        async with (
            tensorhub.connect(coordinator.address, options=plain) as second,
            tensorhub.archive(second, "actor", url),
        ):
            await weights.close(abandon=True)
            for version in (2, 1):
                assert equal(await fetched(trainer, version), at(version))


async def test_a_version_that_a_rollback_leaves_stays_when_its_copy_is_lost(url: str) -> None:
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url) as there,
    ):
        for version in (1, 2):
            await its.publish(version)
            await there.wait_for(at_least=version)
        await its.weights.unpublish()
        await its.trainer.rollback("actor", to=1)
        await until(lambda: [*in_bucket(url)] == [Key(0, 1)])
        copies = worker_of(its.archiver).archived._copies
        await until(lambda: len(copies) == 1)
        assert equal(await fetched(its.trainer), at(1))
        ((name, copy),) = copies.items()
        content = copy.handle.member.content
        assert content is not None
        copy.chunks.buffer(2)[0] ^= 1  # so it is given up
        question = DigestAgain("inquiry", name, content.generation, 2)

        async def ask() -> None:
            await copy.handle.look(question, anyio.CapacityLimiter(1))

        await its.archiver._thread.call(ask)
        await until(lambda: len(copies) == 1 and name not in copies)
        assert equal(await fetched(its.trainer), at(1))
        assert [*in_bucket(url)] == [Key(0, 1)]
        await its.weights.publish(2)
        await there.wait_for(at_least=2)
        assert [*in_bucket(url)] == [Key(0, 1), Key(1, 2)]


async def test_arguments_are_checked(url: str) -> None:
    async with cluster() as its:
        with pytest.raises(InvalidValue, match="every=0"):
            await tensorhub.archive(its.archiver, "actor", url, every=0)
        with pytest.raises(InvalidValue, match="keep=0"):
            await tensorhub.archive(its.archiver, "actor", url, keep=0)
        with pytest.raises(InvalidValue, match="https"):
            await tensorhub.archive(its.archiver, "actor", "https://example.org/x")
        with pytest.raises(InvalidValue, match="host_memory_bytes"):
            await tensorhub.archive(its.trainer, "actor", url)


async def test_too_little_memory_ends_the_archive_with_the_reason(url: str) -> None:
    small = replace(OPTIONS, host_memory_bytes=NBYTES // 2)
    async with (
        cluster() as its,
        tensorhub.connect(its.coordinator.address, options=small) as hub,
    ):
        there: Archive = await tensorhub.archive(hub, "actor", url)
        await its.publish(1)
        with pytest.raises(StateError, match="host_memory_bytes"):
            await there.wait_for(at_least=1)
        with pytest.raises(StateError, match="host_memory_bytes"):
            await there.close()


async def test_a_bucket_that_comes_back_is_written_again(url: str, tmp_path: Path) -> None:
    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url) as there,
    ):
        await its.publish(1)
        await there.wait_for(at_least=1)
        there_at, away = tmp_path / "archive", tmp_path / "away"
        shutil.move(there_at, away)
        await its.publish(2)
        with pytest.raises(OperationTimeout):
            await there.wait_for(at_least=2, timeout=0.5)
        shutil.move(away, there_at)
        await there.wait_for(at_least=2)


def test_without_an_event_loop(url: str) -> None:
    with (
        sync.serve(options=OPTIONS) as coordinator,
        sync.connect(coordinator.address, options=HOSTED) as hub,
        sync.archive(hub, "actor", url) as there,
    ):
        weights = hub.register("actor", tensors(5))
        weights.publish(1)
        assert there.wait_for(at_least=1).version == 1
        weights.close(abandon=True)
        assert equal(
            {name: each.numpy() for name, each in hub.fetch("actor", 1).items()}, tensors(5)
        )


@pytest.mark.parametrize("is_durable", [True, False])
async def test_a_coordinator_that_starts_again_is_told_of_the_archive(
    url: str, tmp_path: Path, is_durable: bool
) -> None:
    coordinator = Restartable(tmp_path / "state" if is_durable else None)
    await coordinator.start()
    async with (
        tensorhub.connect(coordinator.address, options=HOSTED) as hub,
        tensorhub.connect(coordinator.address, options=OPTIONS) as reader,
        tensorhub.archive(hub, "actor", url, serve=not is_durable) as there,
    ):
        weights = await hub.register("actor", tensors(5))
        await weights.publish(1)
        await there.wait_for(at_least=1)
        await weights.close(abandon=True)
        await coordinator.restart(hub, reader)
        with contextlib.suppress(LeaseLost):  # said once, where the state was lost
            await reader.wait_for("actor", at_least=1)
        assert (await reader.wait_for("actor", at_least=1)).version == 1
        assert equal(await fetched(reader, 1), tensors(5))
    await coordinator.stop()


async def test_an_archiver_whose_coordinator_has_lost_its_state_ends_and_says_so(url: str) -> None:
    coordinator = Restartable()
    await coordinator.start()
    async with tensorhub.connect(coordinator.address, options=HOSTED) as hub:
        there = await tensorhub.archive(hub, "actor", url)
        weights = await hub.register("actor", tensors(5))
        await weights.publish(1)
        await there.wait_for(at_least=1)
        await coordinator.restart(hub)
        with pytest.raises(LeaseLost, match="without its state"):
            await there.wait_for(at_least=2)
        with pytest.raises(LeaseLost):
            await there.close()
    await coordinator.stop()


async def test_a_version_whose_announcement_fails_is_announced_later(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce, fails = AnnouncedVersions.announce, [True]

    async def announce_at_last(*given: Any) -> None:
        if given[1] and fails:
            raise ArchiveUnavailable("503", retryable=fails.pop())
        await announce(*given)

    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url) as there,
    ):
        monkeypatch.setattr(AnnouncedVersions, "announce", announce_at_last)
        await its.publish(1)
        await there.wait_for(at_least=1)
        await its.publish(2)
        await there.wait_for(at_least=2)
        await its.weights.close(abandon=True)
        assert equal(await fetched(its.trainer, 1), at(1))


async def test_a_version_that_is_published_while_another_is_archived_is_archived_next(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    announce, written = AnnouncedVersions.announce, list[int]()

    async def announce_late(*given: Any) -> None:
        """The archiver has heard of the next version by then."""
        watches = worker_of(its.archiver).version_watches
        written.extend(each.key.number for each in given[1])
        await until(lambda: (newest := watches.newest("actor")) is not None and newest.version == 2)
        await announce(*given)

    async with (
        cluster() as its,
        tensorhub.archive(its.archiver, "actor", url) as there,
    ):
        monkeypatch.setattr(AnnouncedVersions, "announce", announce_late)
        await its.publish(1)
        await until(lambda: written == [1])
        await its.publish(2)
        await there.wait_for(at_least=2)
    assert written == [1, 2]
