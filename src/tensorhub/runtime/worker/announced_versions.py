"""The archived versions that the coordinator knows, each by copies that are loaded on demand.

Responsible for what the coordinator is told of an archive: which versions exist (`Restore`), and
which shards this worker holds (`archived_copies`); and that copies leave before their objects are
deleted. Not responsible for writing versions (`archiver`). Lives in the worker runtime's loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Protocol, TypeVar

from tensorhub import deltas
from tensorhub.archives.catalogue import VERSIONS_MAX, Key, Version, VersionCatalogue
from tensorhub.archives.reading import Held, Readers
from tensorhub.archives.retention import Keep
from tensorhub.archives.writing import Archive
from tensorhub.errors import IntegrityError, RetentionError, StateError, TensorHubError
from tensorhub.logs import get_logger
from tensorhub.messages import Restored
from tensorhub.model.digests import WIDTHS, root_of, unpack
from tensorhub.model.manifest import ID_BYTES
from tensorhub.runtime.worker.archived_copies import ArchivedShard
from tensorhub.runtime.worker.copied_versions import CopyOfShard, copy_of
from tensorhub.runtime.worker.registering import CallersWorker
from tensorhub.transport.archive import ArchivedPlace
from tensorhub.types import RegistrationId

S = TypeVar("S")
T = TypeVar("T")

COPIES_MAX = 4096  # archived copies that the coordinator is told of, the newest
COPIED_CHUNKS_MAX = 2**20  # of all of them
ANNOUNCED_AT_ONCE = 64
LOSSES_MAX = 4  # of one version to one coordinator: then that is told of it no more
READS_AT_ONCE = 16  # of small objects

log = get_logger("tensorhub.archive")


class Blocking(Protocol):
    """Calls in a thread, one at a time."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


async def restore(
    worker: CallersWorker,
    cluster: str,
    catalogue: VersionCatalogue,
    versions: Sequence[Version],
    do: Blocking,
) -> None:
    """Tell the coordinator that these versions of that cluster exist, ascending, but for those of
    which an object was damaged.

    StateError: it is another cluster, and not empty. VersionConflict: other versions have their
    numbers.
    """
    if not versions:
        return
    newest = versions[-1].key

    def restored(version: Version) -> Restored:
        shards = catalogue.published(version).shards
        ids = [
            bytes.fromhex(its.manifest)
            + (bytes.fromhex(said[-1]) if len(said) > 1 else bytes(ID_BYTES))
            for its, said in zip(version.shards, shards, strict=True)
        ]
        roots = [root_of(digests) for digests, _ in catalogue.tables(version)]
        said_roots = b"".join(roots) if version.digest != "none" else b""
        return Restored(version.info, version.layout_id, b"".join(ids), said_roots)

    said = await do(partial(_of_whole, restored, versions))
    timeout_s = worker.options.op_timeout_s
    await worker.coordinator.restore(
        catalogue.model, cluster, newest.lineage, newest.number, said, timeout_s
    )


def newest_of(catalogue: VersionCatalogue) -> list[Version]:
    """The newest effective versions, ascending, as many as a coordinator is told of."""
    versions, copies, chunks = catalogue.effective, 0, 0
    for place, version in reversed([*enumerate(versions)]):
        copies += len(version.shards)
        chunks += sum(each.chunks for each in version.shards)
        if copies > COPIES_MAX or chunks > COPIED_CHUNKS_MAX:
            log.warning("versions_not_announced", up_to=version.key.number)
            return versions[place + 1 :]
    return versions


class AnnouncedVersions:
    """Of one archive. `on_lost`: the coordinator has given up a copy of that version."""

    def __init__(
        self,
        worker: CallersWorker,
        archive: Archive,
        do: Blocking,
        on_lost: Callable[[], None],
    ) -> None:
        self._worker, self._archive, self._do, self._on_lost = worker, archive, do, on_lost
        self.catalogue = archive.catalogue
        self.readers = Readers(archive.catalogue, deltas.apply)
        self._copies: dict[Key, dict[int, str]] = {}  # registrations of shards
        self.lost: set[Key] = set()  # of which the coordinator gave a copy up
        self._losses = Counter[tuple[int, Key]]()  # to each coordinator, by its epoch
        self.withdrawn: set[Key] = set()  # a rollback has ended these

    def __repr__(self) -> str:
        return f"<AnnouncedVersions: {len(self._copies)} of {self.catalogue!r}>"

    async def leave(self) -> None:
        """No copy is served any more, but those that the coordinator needs."""
        for copies in [*self._copies.values()]:
            for registration in [*copies.values()]:
                with suppress(TensorHubError):
                    await self._worker.archived.remove(registration, 0.0)
        await self._do(self.readers.close_idle)

    async def announce_all(self) -> None:
        versions = newest_of(self.catalogue)
        await self._restore(versions)
        await self.announce(versions)

    async def _restore(self, versions: Sequence[Version]) -> None:
        await restore(self._worker, self._worker.router.cluster, self.catalogue, versions, self._do)

    async def announce(self, versions: Sequence[Version], held: Held | None = None) -> None:
        """Tell the coordinator of the copies of these versions, but for those of which an object
        was damaged. `held`: where their bytes are for now, too.
        """
        catalogue = self.catalogue

        def described(version: Version) -> tuple[Key, list[ArchivedShard]]:
            published, width = catalogue.published(version), WIDTHS[version.digest]
            found = []
            for shard, (digests, _) in enumerate(catalogue.tables(version)):
                ids = published.shards[shard]
                parts = {each: catalogue.part(each) for each in ids if len(ids) > 1}
                found.append(
                    ArchivedShard(
                        version.info,
                        shard,
                        catalogue.manifest(version, shard),
                        unpack(digests, width) if width else (),
                        root_of(digests) if width else b"",
                        partial(self._load, version.key, shard, held),
                        parts,
                        ArchivedPlace(catalogue.store.url, catalogue.model, *version.key, shard),
                        self._copy_lost,
                    )
                )
            return version.key, found

        for first in range(0, len(versions), ANNOUNCED_AT_ONCE):
            some = versions[first : first + ANNOUNCED_AT_ONCE]
            for key, shards in await self._do(partial(_of_whole, described, some)):
                copies = self._copies.setdefault(key, {})
                try:
                    for its in shards:
                        if its.shard not in copies:  # else that copy is there still
                            copies[its.shard] = await self._worker.archived.add(its)
                except StateError as error:  # it takes more address space than there is
                    if held is not None:
                        raise
                    log.warning("version_not_announced", version=key.number, reason=str(error))

    def has(self, version: Version) -> bool:
        """Whether all copies of that version were announced, and none was lost."""
        return len(self._copies.get(version.key, ())) == len(version.shards)

    def _load(
        self,
        key: Key,
        shard: int,
        held: Held | None,
        chunks: Sequence[int],
        targets: Sequence[memoryview],
    ) -> None:
        """Fill an archived copy. In any thread."""
        if held is not None:
            with suppress(StateError):  # it has the next version by now
                held.read(shard, chunks, targets)
                return
        with self.readers.reading(key) as reader:
            reader.read(shard, chunks, targets)

    def copies_of(self, key: Key) -> list[CopyOfShard]:
        """The archived copies of a version; empty: one of them is missing. For any thread."""
        found = list[CopyOfShard]()
        for _, registration in sorted(self._copies.get(key, {}).items()):
            handle = self._worker.router.handles.get(RegistrationId(registration))
            content = None if handle is None else handle.member.content  # the loop may end it
            if content is not None:
                found.append(copy_of(registration, content))
        return found if len(found) == len(self.catalogue.versions[key].shards) else []

    def _copy_lost(self, registration: str, reason: str) -> None:
        for key, copies in self._copies.items():
            for shard in [shard for shard, each in copies.items() if each == registration]:
                log.info("archived_copy_lost", version=key.number, reason=reason)
                del copies[shard]
                self.lost.add(key)
                self._on_lost()

    async def announce_lost(self) -> None:
        """The coordinator has given copies up: their versions were rolled back, or it has forgotten
        them.
        """
        catalogue, lost = self.catalogue, frozenset(self.lost)
        epoch, losses = self._worker.router.epoch, self._losses
        versions = [catalogue.versions[key] for key in sorted(lost & catalogue.versions.keys())]
        versions = [each for each in versions if losses[epoch, each.key] < LOSSES_MAX]
        await self._restore(versions)  # a version that is unknown after that was rolled back
        (model,) = await self._worker.coordinator.describe(
            catalogue.model, self._worker.options.op_timeout_s, workers_max=1
        )
        known = {each.content_id for each in model.versions}
        gone = {
            each.key
            for each in versions
            if each.content_id not in known and each.key.lineage < model.lineage
        }
        if gone:
            log.info("rolled_back_versions_removed", versions=[each.number for each in gone])
            self.withdrawn |= gone
            await self._remove(Keep(VERSIONS_MAX))
        stay = [each for each in versions if each.key not in gone]
        losses.update([(epoch, each.key) for each in stay])
        for each in stay:
            if losses[epoch, each.key] == LOSSES_MAX:
                log.warning("version_not_announced", version=each.key.number)
        await self.announce([each for each in stay if losses[epoch, each.key] < LOSSES_MAX])
        self.lost -= lost

    # ----------------------------------------------------------------------------------------------
    # removing

    async def retain(self, keep: Keep) -> None:
        """Apply the rules of retention. What the cluster retains or pins stays."""
        catalogue = self.catalogue
        decided = await self._do(partial(self._archive.decide, keep, self.readers.uses))
        if not decided.manifests and not decided.anchor_first:
            return
        (model,) = await self._worker.coordinator.describe(
            self.catalogue.model, self._worker.options.op_timeout_s, workers_max=1
        )
        retained = {each.content_id for each in model.versions if each.retained}
        versions = catalogue.versions.values()
        pinned = {each.key for each in versions if each.content_id in retained}
        await self._remove(replace(keep, pinned=keep.pinned | pinned))

    async def _remove(self, keep: Keep) -> None:
        """Have the copies of versions leave that nothing needs, then their objects deleted. What a
        reader uses, or must stay for the coordinator, stays until the next time.
        """
        versions, timeout_s = self.catalogue.versions, self._worker.options.op_timeout_s
        valid = {each.key for each in self.catalogue.effective} - self.withdrawn
        keep = replace(keep, without=frozenset(versions.keys() - valid))
        self.readers.close_idle()
        staying = set[Key]()
        shorten = partial(self._archive.shorten, keep, deltas.apply, lambda: self.readers.uses)
        decided = await self._do(shorten)
        going = {key for key, each in versions.items() if each.path in decided.manifests}
        for key in going | keep.without:
            try:
                for shard, registration in [*self._copies.get(key, {}).items()]:
                    await self._worker.archived.remove(registration, timeout_s)
                    self._copies[key].pop(shard, None)
            except RetentionError:
                staying.add(key)
            else:
                self._copies.pop(key, None)
        self.readers.close_idle()
        keep = replace(keep, pinned=keep.pinned | staying, without=keep.without - staying)
        await self._do(partial(self._archive.retain, keep, deltas.apply, lambda: self.readers.uses))


def _of_whole(function: Callable[[Version], T], versions: Sequence[Version]) -> list[T]:
    """The results for these versions, in order, but for those of which an object was damaged. Small
    objects are read at the same time.
    """

    def called(version: Version) -> Iterator[T]:
        try:
            yield function(version)
        except IntegrityError as error:
            log.warning("version_damaged", version=version.key.number, reason=str(error))

    with ThreadPoolExecutor(READS_AT_ONCE, "tensorhub-archive") as pool:
        return [*chain.from_iterable(pool.map(lambda each: [*called(each)], versions))]
