"""Archived versions as holdings that are loaded on demand, over real sockets, in one process.

But for one test, the bucket is a dictionary.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import anyio
import pytest

from tensorhub.api.hub import Hub
from tensorhub.api.tools import seed_shard
from tensorhub.api.weights import Weights
from tensorhub.archives.catalogue import Key, VersionCatalogue
from tensorhub.archives.reading import Reader
from tensorhub.archives.store import Store
from tensorhub.archives.writing import Archive, Content
from tensorhub.errors import (
    IntegrityError,
    RetentionError,
    StateError,
    TensorHubError,
)
from tensorhub.layouts import Published
from tensorhub.messages import DigestAgain
from tensorhub.model.digests import WIDTHS, pack, root_of
from tensorhub.runtime.worker import archived_copies, writes
from tensorhub.runtime.worker.archived_copies import ArchivedCopies, ArchivedShard
from tensorhub.types import FetchReport, Options, RegistrationId
from tensorhub.worker import loading
from tests.archives.models import apply, encode
from tests.rig import (
    CHUNK_BYTES,
    CHUNKS,
    OPTIONS,
    Restartable,
    Tensors,
    all_of,
    cluster,
    connect,
    equal,
    gated,
    handle_of,
    holds,
    nothing_left,
    published,
    tensors,
    until,
    worker_of,
    write,
)
from tests.test_coordinator_restart import cluster as restartable
from tests.test_resharding import TRAINERS, is_held, read_from, rollout, trainer, world

pytestmark = pytest.mark.anyio
NBYTES = CHUNKS * CHUNK_BYTES
HOSTED = replace(OPTIONS, host_memory_bytes=NBYTES)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@dataclass
class Bucket:
    """One shard of a version, as the archive has it."""

    chunks: list[bytes]
    reads: list[list[int]] = field(default_factory=list)
    error: TensorHubError | None = None
    lost: list[tuple[str, str]] = field(default_factory=list)
    may_go_on: threading.Event = field(default_factory=threading.Event)

    def load(self, chunks: Sequence[int], targets: Sequence[memoryview]) -> None:
        assert self.may_go_on.wait(60)
        self.reads.append(list(chunks))
        if self.error is not None:
            raise self.error
        for chunk, target in zip(chunks, targets, strict=True):
            target[:] = self.chunks[chunk]


def archived_of(weights: Weights) -> tuple[ArchivedShard, Bucket]:
    """What this rank has published, as the archive has it."""
    handle = handle_of(weights)
    content = handle.member.content
    assert content is not None
    memory = handle._mapped._map(content.manifest)[1]
    chunks, shard = range(len(memory.sizes)), handle.member.shard
    digests = memory.digests(chunks)
    bucket = Bucket([bytes(memory.buffer(chunk)) for chunk in chunks])
    bucket.may_go_on.set()
    root = root_of(pack(digests, memory.width)) if memory.width else b""
    digests = digests if memory.width else []
    parts = shard.parts(content.manifest)
    of = content.version, shard.number, content.manifest, digests, root, bucket.load, parts
    return ArchivedShard(*of, on_lost=lambda *what: bucket.lost.append(what)), bucket


def archive_of(hub: Hub) -> ArchivedCopies:
    return worker_of(hub).archived


async def add(hub: Hub, *shards: ArchivedShard) -> list[str]:
    """Registrations that the coordinator counts on."""

    async def register() -> list[str]:
        found = [await archive_of(hub).add(shard) for shard in shards]
        for each in found:
            await archive_of(hub).known(each, 30)
        return found

    return await hub._thread.call(register)


def loaded(hub: Hub) -> int:
    """Bytes of host memory that are in use."""
    return worker_of(hub).copies.budget.reserved_bytes


async def read(hub: Hub, version: int, source: str = "archive") -> Tensors:
    mine = tensors()
    weights = await hub.register("m", mine, spot=True)
    report = await weights.replicate(version)
    assert read_from([report]) == {source}
    await weights.close(abandon=True)
    return mine


@asynccontextmanager
async def archived(
    *contents: int, options: Options = HOSTED
) -> AsyncIterator[tuple[Hub, Hub, list[str], list[Bucket]]]:
    """A reader, and an archive that alone holds versions 1, 2, ..., with its registrations and
    buckets.
    """
    async with cluster("trainer", "reader") as c, connect(c.address, "archive", options) as hub:
        names, buckets = list[str](), list[Bucket]()
        memory = tensors(contents[0])
        source = await c.hubs[0].register("m", memory)
        for number, content in enumerate(contents, 1):
            async with source.mutate(number):
                write(memory, content)
            shard, bucket = archived_of(source)
            names += await add(hub, shard)
            buckets.append(bucket)
        await source.close(abandon=True)
        yield c.hubs[1], hub, names, buckets


async def test_a_version_is_read_from_its_archive_when_its_publisher_is_gone() -> None:
    async with archived(7) as (reader, hub, _, (bucket,)):
        assert (bucket.reads, loaded(hub)) == ([], 0)
        weights = await reader.register("m", mine := tensors(), spot=True)
        report = await weights.replicate()
        assert [(each.name, each.transport) for each in report.sources] == [("archive", "tcp")]
        assert holds(mine, 7)
        assert sorted(chunk for batch in bucket.reads for chunk in batch) == [*range(CHUNKS)]
        assert loaded(hub) == NBYTES


async def test_a_version_without_digests_is_read_too() -> None:
    options = replace(HOSTED, integrity=False)
    async with (
        cluster("trainer", "reader", options=options) as c,
        connect(c.address, "archive", options) as hub,
    ):
        source = await published(c.hubs[0])
        shard, _ = archived_of(source)
        await add(hub, shard)
        await source.close(abandon=True)
        assert holds(await read(c.hubs[1], 1), 1)


async def test_a_shard_needs_a_digest_for_each_chunk() -> None:
    async with cluster("trainer") as c:
        shard, _ = archived_of(await published(c.hubs[0]))
        with pytest.raises(StateError, match=f"1 digests are not those of {CHUNKS} chunks"):
            await add(c.hubs[0], replace(shard, digests=shard.digests[:1]))


async def test_two_versions_are_read_in_turns_with_room_for_one() -> None:
    async with archived(7, 8) as (reader, hub, _, buckets):
        for number in (1, 2, 1, 1, 2):
            assert holds(await read(reader, number), 6 + number)
            assert loaded(hub) == NBYTES
        reads = [sum(map(len, bucket.reads)) for bucket in buckets]
        assert reads == [2 * CHUNKS, 2 * CHUNKS]  # the third of version 1 found it loaded


async def test_two_versions_are_read_at_once_with_room_for_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each has the room in turn, and both readers get on."""
    monkeypatch.setattr(loading, "TURN_S", 0.05)
    monkeypatch.setattr(loading, "BATCH_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(loading, "AHEAD_BYTES", 0)
    async with archived(7, 8) as (reader, hub, _, _):
        for _ in range(3):
            one, other = await all_of(read(reader, 1), read(reader, 2))
            assert holds(one, 7)
            assert holds(other, 8)
            assert loaded(hub) <= NBYTES


async def test_readers_of_another_layout_have_what_lies_under_their_chunks() -> None:
    options = replace(OPTIONS, host_memory_bytes=2**30)
    async with (
        world("one", "two") as (c, trained, _),
        connect(c.address, "archive", options) as hub,
    ):
        shards = [archived_of(each)[0] for each in trained]
        await add(hub, *shards)
        await all_of(*(each.close(abandon=True) for each in trained))
        weights, mine = await rollout(c.hubs[2:], "rollout")
        reports = await all_of(*(each.replicate() for each in weights))
        assert is_held(mine, 1)
        assert read_from(reports) == {"archive"}
        assert len(shards) == TRAINERS


async def test_a_damaged_object_is_named_to_readers_and_told_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loading, "RETRY_S", 0.01)
    told = list[str]()
    monkeypatch.setattr(
        archived_copies.log, "warning", lambda event, **fields: told.append(fields["reason"])
    )
    async with archived(7) as (reader, _, _, (bucket,)):
        bucket.error = IntegrityError("file:///a/frames-0 was damaged")
        weights = await reader.register("m", tensors(), spot=True)
        with pytest.raises(IntegrityError, match="frames-0 was damaged"):
            await weights.replicate(timeout=3600)  # it is over at once
        assert told == ["version 1 of 'm' in the archive: file:///a/frames-0 was damaged"]
        bucket.error, is_told = None, True
        while is_told:  # for RETRY_S
            try:
                await weights.replicate()
                is_told = False
            except IntegrityError:
                pass
        await weights.close(abandon=True)


async def test_what_has_no_room_at_all_says_how_much_it_takes() -> None:
    async with archived(7, options=replace(HOSTED, host_memory_bytes=NBYTES - 1)) as (
        reader,
        _,
        _,
        (bucket,),
    ):
        weights = await reader.register("m", tensors(), spot=True)
        with pytest.raises(TensorHubError, match=rf"an archived version needs {NBYTES} bytes"):
            await weights.replicate(timeout=2)
        assert bucket.reads == []


async def test_a_copy_of_a_version_that_is_rolled_back_is_lost() -> None:
    async with archived(7, 8) as (reader, hub, names, (_, bucket)):
        lost = bucket.lost
        assert holds(await read(reader, 2), 8)
        await reader.rollback("m", to=1)
        await until(lambda: bool(lost))
        ((name, reason),) = lost
        assert name == names[1]
        assert "rolled back" in reason
        await until(lambda: loaded(hub) == 0)
        assert holds(await read(reader, 1), 7)
    assert len(lost) == 1  # the end of the archive's worker loses nothing


async def test_the_last_holder_of_a_retained_version_stays_until_it_is_not() -> None:
    async with archived(7) as (reader, hub, (name,), _):
        remove = archive_of(hub).remove
        await reader.retain("m", latest=1)
        with pytest.raises(RetentionError):
            await hub._thread.call(remove, name, 0.5)
        assert holds(await read(reader, 1), 7)
        await reader.retain("m", latest=0)
        await hub._thread.call(remove, name, 30)
        await until(lambda: loaded(hub) == 0)
        await until(lambda: not worker_of(hub).router.handles)
        await hub._thread.call(remove, name, 30)


async def test_a_coordinator_without_that_content_loses_the_copy(tmp_path: Path) -> None:
    coordinator = Restartable()
    async with nothing_left():
        await coordinator.start()
        async with connect(coordinator.address, "archive", HOSTED) as hub:
            async with connect(coordinator.address, "trainer") as trainer:
                source = await published(trainer)
                shard, bucket = archived_of(source)
                lost = bucket.lost
                await add(hub, shard)
                await source.close(abandon=True)
            await coordinator.restart(hub)
            await until(lambda: bool(lost))
            assert "lost its state" in lost[0][1]
            with pytest.raises(StateError, match="does not know that content"):
                await add(hub, shard)
        await coordinator.stop()


async def test_the_end_of_the_worker_waits_for_a_read_and_leaves_nothing() -> None:
    async with archived(7) as (reader, _, _, (bucket,)):
        bucket.may_go_on.clear()
        weights = await reader.register("m", tensors(), spot=True)
        with pytest.raises(TensorHubError):
            await weights.replicate(timeout=0.5)
        threading.Timer(0.5, bucket.may_go_on.set).start()


async def test_after_a_restart_the_copies_say_the_parts_that_readers_of_another_layout_need(
    tmp_path: Path,
) -> None:
    options = replace(OPTIONS, host_memory_bytes=2**30)
    names = ("trainer", "second", "archive", "reader")
    async with restartable(*names, state_dir=tmp_path, options=options) as (coordinator, hubs):
        trained, _ = await trainer(hubs[:2], 1)
        await all_of(*(each.publish(1) for each in trained))
        await add(hubs[2], *(archived_of(each)[0] for each in trained))
        for hub in hubs[:2]:
            await hub.close()
        await coordinator.restart(*hubs[2:])
        weights, mine = await rollout(hubs[3:], "rollout")
        reports = await all_of(*(each.replicate(1) for each in weights))
        assert is_held(mine, 1)
        assert read_from(reports) == {"archive"}


@pytest.mark.parametrize("arrivals", [1, CHUNKS // 2, CHUNKS - 1])
async def test_a_read_goes_on_from_the_archive_when_its_source_dies(arrivals: int) -> None:
    with gated(arrivals) as gate:
        async with (
            cluster("trainer", "reader", transports=["tcp"]) as c,
            connect(c.address, "archive", HOSTED) as hub,
        ):
            source = await published(c.hubs[0])
            shard, bucket = archived_of(source)
            await add(hub, shard)
            weights = await c.hubs[1].register("m", mine := tensors(), spot=True)
            reports = list[FetchReport]()

            async def replicate() -> None:
                reports.append(await weights.replicate())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(replicate)
                await until(lambda: gate.holds)
                await source.close(abandon=True)
                gate.open()
            (report,) = reports
            assert holds(mine, 1)
            assert read_from(reports) == {"trainer", "archive"}
            assert (report.bytes_read, report.reread_bytes) == (NBYTES, 0)
            assert sum(map(len, bucket.reads)) <= CHUNKS - arrivals + 1


async def test_a_seed_of_the_same_worker_is_filled_from_the_archive_beside_it() -> None:
    options = replace(HOSTED, host_memory_bytes=2 * NBYTES)
    async with archived(7, options=options) as (reader, hub, (name,), _):
        info = archive_of(hub)._copies[name].shard.version
        report = await seed_shard(hub, info, 0)
        assert read_from([report]) == {"archive"}
        assert loaded(hub) == 2 * NBYTES
        await hub._thread.call(archive_of(hub).remove, name, 30)
        assert holds(await read(reader, 1), 7)
        assert loaded(hub) == NBYTES


async def test_a_question_about_a_chunk_loads_it_and_what_is_not_there_has_not_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages that are not loaded are zeros, and no digest is made of them (R8)."""
    monkeypatch.setattr(writes, "LOADED_WITHIN_S", 0.2)
    async with archived(7) as (reader, hub, (name,), (bucket,)):
        handle, copy = worker_of(hub).router.handles[name], archive_of(hub)._copies[name]
        content = handle.member.content
        assert content is not None

        async def changed(chunk: int) -> bool | None:
            limiter = anyio.CapacityLimiter(1)
            looked = handle._writes.look_again(content.generation, chunk, "", limiter)
            return (await looked)[0]

        async def ask(chunk: int) -> None:
            question = DigestAgain("inquiry", name, content.generation, chunk)
            await handle.look(question, anyio.CapacityLimiter(1))

        bucket.may_go_on.clear()
        assert await hub._thread.call(changed, 2) is None
        await hub._thread.call(ask, 2)
        bucket.may_go_on.set()
        monkeypatch.setattr(writes, "LOADED_WITHIN_S", 30)
        assert await hub._thread.call(changed, 0) is False
        assert holds(await read(reader, 1), 7)
        assert bucket.lost == []
        copy.chunks.buffer(2)[0] ^= 1
        await hub._thread.call(ask, 2)
        await until(lambda: bucket.lost == [(name, "its bytes have changed")])


async def test_what_was_read_while_the_memory_was_closed_is_read_again() -> None:
    """A leave that was given up behind its fence opens the memory again, under another
    generation.
    """
    async with archived(7) as (reader, hub, (name,), (bucket,)):
        handle, copy = worker_of(hub).router.handles[name], archive_of(hub)._copies[name]
        bucket.may_go_on.clear()
        copy.want([(0, CHUNKS)])
        await until(lambda: copy.reads > 0)

        async def close_and_open() -> None:
            await worker_of(hub)._owner.fence_async(RegistrationId(name))
            bucket.may_go_on.set()
            await until(lambda: not copy.reads)
            handle.member._memory.reopen()
            handle.apply(handle.member._context.take_actions())

        await hub._thread.call(close_and_open)
        assert bucket.reads
        assert holds(await read(reader, 1), 7)


def content_of(shard: ArchivedShard, after: Key | None) -> Content:
    """What is written of a version of one plain rank."""
    manifest, version = shard.manifest, shard.version
    published = Published(manifest.digest, manifest.chunk_bytes, ((manifest.manifest_id,),))
    parts = {manifest.manifest_id: manifest.encode()}
    digests = pack(shard.digests, WIDTHS[manifest.digest])
    about = version.content_id, version.nbytes, "world/1", published, parts
    return Content(Key(0, version.version), *about, [manifest], [digests], after)


async def test_chunks_come_from_a_real_archive_through_anchor_and_delta(tmp_path: Path) -> None:
    pytest.importorskip("obstore", reason="obstore is not installed")
    store = Store(f"file://{tmp_path}/archive", writable=True)
    writer, first = Archive(store, "m", "cluster", "host"), list[bytes]()
    async with (
        cluster("trainer", "reader") as c,
        connect(c.address, "archive", HOSTED) as hub,
    ):
        with ExitStack() as stack:
            memory = tensors(7)
            source = await c.hubs[0].register("m", memory)

            def view(rank: int, region: int, offset: int, nbytes: int) -> Iterator[memoryview]:
                tensor = [*memory.values()][region]
                yield tensor.data[offset : offset + nbytes]

            for number in (1, 2):
                async with source.mutate(number):
                    memory["b"][5] += number
                shard, bucket = archived_of(source)
                content = content_of(shard, Key(0, 1) if number == 2 else None)
                if number == 1:
                    first = bucket.chunks
                    writer.add_anchor(content, view)
                else:
                    writer.add_delta(content, Key(0, 1), [map(encode, first, bucket.chunks)])
                catalogue = VersionCatalogue(store, "m").load()
                opened = stack.enter_context(Reader(catalogue, Key(0, number), apply))
                await add(hub, replace(shard, load=partial(opened.read, 0)))
            await source.close(abandon=True)
            for number, added in ((2, 3), (1, 1), (2, 3)):
                found, right = await read(c.hubs[1], number), tensors(7)
                right["b"][5] += added
                assert equal(found, right)
