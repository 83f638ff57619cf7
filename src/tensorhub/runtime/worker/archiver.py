"""Keeps the versions of one model in object storage, and serves them from there.

Theory of operation. An archiver holds the newest version as a seed does: in a host copy of each
shard. From these copies it writes the version to the archive, as an anchor or as its difference to
an archived version. Once the manifest is there, each shard becomes an archived copy
(`archived_copies`): an ordinary holder, whose memory is loaded when a reader asks for it. The next
difference is made against such a copy, which is filled from the host copy before that takes the
next version.

At the start, and after a coordinator has lost its state, the coordinator is told of all versions
in the archive (`Restore`), then of their copies.

A version that goes away before it was read is not archived; the next one is. A bucket that cannot
be reached is asked again, with growing pauses. Every other fault ends the archiver, and the next
call raises it.

Responsible for which version is archived, announced and removed, and when. Not responsible for the
objects in the bucket (`tensorhub.archives`), nor for the readers of a copy. Lives in the worker
runtime's loop; what blocks runs in threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

import anyio
import anyio.abc
import anyio.to_thread

from tensorhub import deltas
from tensorhub.archives.catalogue import Key, Version, VersionCatalogue
from tensorhub.archives.chains import base_for
from tensorhub.archives.claim import Writer, newest_writer
from tensorhub.archives.reading import Readers, Views
from tensorhub.archives.store import Buffer, Store
from tensorhub.archives.writing import Archive, Content, View
from tensorhub.errors import (
    InvalidValue,
    LeaseLost,
    OperationTimeout,
    StateError,
    TensorHubError,
    VersionUnavailable,
)
from tensorhub.layouts.published import Published
from tensorhub.logs import get_logger
from tensorhub.model.manifest import Manifest
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.ending import CLOSE_S
from tensorhub.runtime.worker.announced_versions import AnnouncedVersions, newest_of, restore
from tensorhub.runtime.worker.copied_versions import CopiedVersion, CopyOfShard, copy_of, frames
from tensorhub.runtime.worker.ports import ArchiveSettings, CallersArchiver
from tensorhub.runtime.worker.registering import CallersWorker
from tensorhub.types import VersionInfo

T = TypeVar("T")

RETRY_S, RETRY_S_MAX = 1.0, 30.0  # before the bucket, or a version, is asked for again

log = get_logger("tensorhub.archive")


class Archiver(CallersArchiver):
    """`tasks`: the worker's."""

    def __init__(
        self,
        worker: CallersWorker,
        owner: SharedOwner,
        tasks: anyio.abc.TaskGroup,
        settings: ArchiveSettings,
    ) -> None:
        self._worker, self._owner, self._tasks = worker, owner, tasks
        self.settings = settings
        self._newest: VersionInfo | None = None
        self._done: VersionInfo | None = None  # the newest that was looked at
        self._moved = anyio.Event()  # there is something to do, or something was done
        self._state_lost: LeaseLost | None = None
        self._scope = anyio.CancelScope()
        self._is_ending = threading.Event()
        self._ended = anyio.Event()
        self._error: Exception | None = None
        self._calls = threading.Lock()  # calls of the archive come one after another
        # the newest publication, what it encodes, and its parts
        self._known: tuple[bytes, Published, Mapping[str, bytes]] | None = None
        self._archive: Archive
        self._announced: AnnouncedVersions

    def __repr__(self) -> str:
        return f"<Archiver of {self.settings.model!r} at {self.settings.url}>"

    # ----------------------------------------------------------------------------------------------
    # life

    async def begin(self) -> None:
        """Claim the archive, announce what it has, and follow the model from now on.

        StateError, ArchiveUnavailable, IntegrityError, VersionConflict, AuthenticationFailed.
        """
        settings, watches = self.settings, self._worker.version_watches
        if not self._worker.options.host_memory_bytes:
            raise InvalidValue(
                "an archive holds the newest version in host memory: set "
                "Options.host_memory_bytes, to the bytes of two versions or more"
            )
        await self._claim(await self._do(partial(Store, settings.url, writable=True)))
        try:
            await self._announced.announce_all()
        except BaseException:
            with anyio.CancelScope(shield=True), suppress(TensorHubError):
                await self._do(self._archive.close)
            raise
        watches.listen(settings.model, self._heard, self._lost_state, on_purpose=True)
        self._tasks.start_soon(self._run)

    async def _claim(self, store: Store) -> None:
        """Take the right to write. Versions of a former cluster are restored first, so that a
        coordinator that refuses them leaves the archive as it is.
        """
        settings, worker = self.settings, self._worker
        catalogue = VersionCatalogue(store, settings.model)
        _, former = await self._do(partial(newest_writer, catalogue))
        restored, takes_over = "", settings.takes_over
        if former is not None and former.cluster != worker.router.cluster and settings.restores:
            await self._do(catalogue.load)
            restored = former.cluster
            await restore(worker, restored, catalogue, newest_of(catalogue), self._do)
        elif former is not None and former.cluster == worker.router.cluster:
            takes_over = takes_over or not await self._is_connected(former)
        claim = partial(
            Archive,
            store,
            settings.model,
            worker.router.cluster,
            f"{worker.name[:400]}/{worker.incarnation}",
            take_over=takes_over,
            former=restored,
        )
        self._archive = await self._do(claim)
        self._announced = AnnouncedVersions(worker, self._archive, self._do, self._wake)
        for fault in self._archive.catalogue.faults:
            log.warning("archive_fault", model=settings.model, reason=fault)

    async def _is_connected(self, writer: Writer) -> bool:
        """Whether the coordinator counts on the worker that wrote there last."""
        try:
            (model,) = await self._worker.coordinator.describe(self.settings.model, self._timeout_s)
        except VersionUnavailable:
            return False
        incarnation = writer.owner.rpartition("/")[2]
        return any(
            each.incarnation == incarnation and each.state == "live" for each in model.workers
        )

    def end(self) -> None:
        self._is_ending.set()
        self._scope.cancel()

    async def close(self, timeout_s: float) -> None:
        self.end()
        with anyio.move_on_after(timeout_s):
            await self._ended.wait()
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        try:
            with self._scope:
                await self._follow()
        except TensorHubError as error:
            self._error = error
            log.error("archiver_ended", model=self.settings.model, reason=str(error))
        except Exception as error:  # a defect here ends no worker
            self._error = error
            log.exception("archiver_ended", model=self.settings.model)
        finally:
            with anyio.CancelScope(shield=True):
                self._worker.version_watches.unlisten(
                    self.settings.model, self._heard, self._lost_state
                )
                self._is_ending.set()
                with anyio.move_on_after(CLOSE_S):
                    await self._announced.leave()
                    with suppress(TensorHubError):
                        await self._do(self._archive.close)
                self._ended.set()
                self._wake()

    # ----------------------------------------------------------------------------------------------
    # what is heard of

    def _heard(self, info: VersionInfo | None) -> None:
        self._newest = info
        self._wake()

    def _lost_state(self, error: LeaseLost) -> None:
        self._state_lost = error
        self._wake()

    def _wake(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()

    # ----------------------------------------------------------------------------------------------
    # following

    async def _follow(self) -> None:
        pause_s = RETRY_S
        while True:
            moved = self._moved
            try:
                if await self._step():
                    await moved.wait()
            except TensorHubError as error:
                if not error.retryable or isinstance(error, LeaseLost):
                    raise
                log.warning("archive_waits", model=self.settings.model, reason=str(error))
                with anyio.move_on_after(pause_s):
                    await moved.wait()  # perhaps another version can be had
                pause_s = min(2 * pause_s, RETRY_S_MAX)
            else:
                pause_s = RETRY_S

    async def _step(self) -> bool:
        """Do what there is to do. True: nothing."""
        if self._state_lost is not None:
            await self._begin_anew(self._state_lost)
        elif self._announced.lost:
            await self._announced.announce_lost()
        elif (info := self._newest) is None or info == self._done:
            return True
        else:
            try:
                await self._keep(info)
            except VersionUnavailable as error:
                if self._newest == info:
                    raise
                log.warning("version_not_archived", version=info.version, reason=str(error))
            self._done = info
        self._wake()
        return False

    async def _begin_anew(self, lost: LeaseLost) -> None:
        if not self.settings.restores:
            raise lost
        self._done = None
        await self._do(self._announced.readers.close_idle)
        await self._claim(self._archive.catalogue.store)
        await self._announced.announce_all()
        self._state_lost = None

    async def _keep(self, info: VersionInfo) -> None:
        """Archive it, unless it is there or not wanted."""
        if info.version % self.settings.every:
            return
        key = await self._key_of(info)
        there = self._archive.catalogue.versions.get(key)
        if there is None or there.content_id != info.content_id:
            await self._archive_it(info, key)
        elif not self._announced.has(there):  # an earlier try came as far as the bucket
            await self._announced.announce([there])
        if self.settings.keep is not None:
            await self._announced.retain(self.settings.keep)

    async def _key_of(self, info: VersionInfo) -> Key:
        """Its place in the archive. VersionUnavailable: it is no more."""
        (model,) = await self._worker.coordinator.describe(
            info.model, self._timeout_s, version=info.version
        )
        for each in model.versions:
            if each.content_id == info.content_id:
                return Key(each.lineage, each.version)
        raise VersionUnavailable(f"version {info.version} of {info.model!r} is no more")

    async def _archive_it(self, info: VersionInfo, key: Key) -> None:
        held = CopiedVersion(self._owner, await self._seeded(info), self._is_ending.is_set)
        room = self._worker.options.host_memory_bytes
        if (needed := 2 * sum(each.manifest.region_bytes for each in held.shards)) > room:
            hint = "readers of archived versions wait for room: give more host memory"
            log.warning("archive_memory_short", host_memory_bytes=room, needed=needed, hint=hint)
        publication = await self._worker.coordinator.publication(
            info.model, info.version, self._timeout_s
        )
        if publication.version.content_id != info.content_id:
            raise VersionUnavailable(f"version {info.version} of {info.model!r} is another one now")
        if self._known is None or self._known[0] != publication.publication:
            deadline = anyio.current_time() + self._timeout_s
            found = await self._worker.parts_of(publication.publication, deadline)
            self._known = publication.publication, *found
        _, published, parts = self._known
        shards = range(info.world_size)
        before = max(
            (each for each in self._archive.catalogue.versions if each < key), default=None
        )
        content = Content(
            key,
            info.content_id,
            info.nbytes,
            publication.layout_id,
            published,
            parts,
            [held.manifest(shard) for shard in shards],
            [held.digests(shard) for shard in shards],
            before,
        )
        version = await self._do(partial(self._write, content, held))
        await self._announced.announce([version], held)
        following = key._replace(number=key.number + self.settings.every)
        base = base_for(self._archive.catalogue, following)
        if base is not None and deltas.fault_here() is None:
            await self._do(partial(self._warm, base))
        log.info("version_archived", version=info.version, base=version.base and str(version.base))

    async def _seeded(self, info: VersionInfo) -> list[CopyOfShard]:
        """The host copies of all shards, which stay as they are until the next version is asked
        for.
        """
        copies, errors = self._worker.copies, list[TensorHubError]()

        async def seed(shard: int) -> None:
            try:
                await copies.seed(info, shard, self._timeout_s, info.version)
            except TensorHubError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for shard in range(info.world_size):
                tasks.start_soon(seed, shard)
        if errors:
            raise min(errors, key=lambda each: each.retryable)
        found = [copies.machine.seeded(info, shard) for shard in range(info.world_size)]
        held = [copy_of(*each) for each in found if each is not None]
        if len(held) < len(found):
            raise VersionUnavailable(f"version {info.version} of {info.model!r} is no more")
        return held

    def _write(self, content: Content, held: CopiedVersion) -> Version:
        """In a thread."""
        catalogue, manifests = self._archive.catalogue, content.manifests
        base = None if deltas.fault_here() else base_for(catalogue, content.key)
        if base is not None and base not in self._announced.withdrawn:
            there = catalogue.versions[base]
        else:
            there = None
        named = [each.manifest_id for each in manifests]
        written = _Written(content, self.on_writing or (lambda version, done, nbytes: None))
        if there is None or [each.manifest for each in there.shards] != named:
            view = partial(written.pieces, Views(held, len(manifests)))
            return self._archive.add_anchor(content, view)
        key, tables = there.key, catalogue.tables(there)
        before = _Base(key, self._copied(key), self._announced.readers)
        made = [
            written.chunks(manifests[shard], frames(shard, held, digests, before, tables[shard][0]))
            for shard, digests in enumerate(content.digests)
        ]
        return self._archive.add_delta(content, key, made)

    def _warm(self, key: Key) -> None:
        """Load the copies of the version that the next one is compared with: the host copies may
        have its bytes now. Without room, they are read from the bucket then. In a thread.
        """
        copied = self._copied(key)
        with suppress(StateError):
            for shard, its in enumerate(copied.shards):
                for chunk, nbytes in enumerate(its.manifest.sizes):
                    copied.read(shard, [chunk], [memoryview(bytearray(nbytes))])

    def _copied(self, key: Key) -> CopiedVersion:
        return CopiedVersion(self._owner, self._announced.copies_of(key), self._is_ending.is_set)

    # ----------------------------------------------------------------------------------------------

    @property
    def _timeout_s(self) -> float:
        return self._worker.options.op_timeout_s

    async def _do(self, function: Callable[[], T]) -> T:
        """Call what blocks, one after another: also after a call that was cancelled, whose thread
        goes on.
        """

        def call() -> T:
            with self._calls:
                return function()

        return await anyio.to_thread.run_sync(call, abandon_on_cancel=True)

    # ----------------------------------------------------------------------------------------------
    # callers

    @property
    def versions(self) -> list[Version]:
        return self._archive.catalogue.effective

    async def wait_for(self, at_least: int, timeout_s: float) -> None:
        with anyio.move_on_after(timeout_s):
            while True:
                moved = self._moved
                if (found := self.versions) and found[-1].key.number >= at_least:
                    return
                if self._error is not None:
                    raise self._error
                if self._ended.is_set():
                    raise StateError(f"the archive of {self.settings.model!r} was closed")
                await moved.wait()
        newest = found[-1].key.number if (found := self.versions) else "none"
        raise OperationTimeout(
            f"version {at_least} of {self.settings.model!r} was not archived within "
            f"{timeout_s:g} s; the newest that is archived: {newest}"
        )


class _Written:
    """Tells how much of a version has been written."""

    def __init__(self, content: Content, tell: Callable[[int, int, int], None]) -> None:
        self._version, self._nbytes, self._tell = content.key.number, content.nbytes, tell
        self._done = 0

    def pieces(
        self, view: View, rank: int, region: int, offset: int, nbytes: int
    ) -> Iterator[Buffer]:
        for piece in view(rank, region, offset, nbytes):
            yield piece
            self._add(len(piece))

    def chunks(
        self, manifest: Manifest, frames: Iterable[Buffer | None]
    ) -> Iterator[Buffer | None]:
        for frame, nbytes in zip(frames, manifest.sizes, strict=True):
            yield frame
            self._add(nbytes)

    def _add(self, nbytes: int) -> None:
        self._done = min(self._done + nbytes, self._nbytes)
        self._tell(self._version, self._done, self._nbytes)


class _Base:
    """An archived version that a difference is made against: its copy, or what is in the bucket."""

    def __init__(self, key: Key, copied: CopiedVersion, readers: Readers) -> None:
        self._key, self._copied, self._readers = key, copied, readers

    def manifest(self, shard: int) -> Manifest:
        catalogue = self._readers.catalogue
        return catalogue.manifest(catalogue.versions[self._key], shard)

    def read(self, shard: int, chunks: Sequence[int], targets: Sequence[memoryview]) -> None:
        if self._copied.shards:
            with suppress(StateError):
                self._copied.read(shard, chunks, targets)
                return
        with self._readers.reading(self._key) as reader:
            reader.read(shard, chunks, targets)
