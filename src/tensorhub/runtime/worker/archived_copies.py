"""The archived versions of a worker: holdings whose memory is loaded from a bucket as readers ask
for it.

Each is a registration of its own, held from the beginning. A reader's lane names the chunks that it
asks for, and waits for those that are not there. A task of the worker takes room for the version
within the worker's host memory, reads the chunks in threads, and lets readers have them. Another
version that needs the room waits for this one's turn to end; any other use of host memory does not.

Responsible for those tasks, and for telling the owner of a copy that the copy was lost. Not
responsible for the order of chunks (`worker.loading`), for which copy makes room
(`worker.host_copies`), nor for how a chunk is read: `ArchivedShard.load` does that. All but
`_Copy.want` belongs to the worker runtime's loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import anyio
import anyio.abc
import anyio.to_thread

from tensorhub.errors import (
    CoordinatorUnavailable,
    IntegrityError,
    StateError,
    TensorHubError,
    text_of,
)
from tensorhub.logs import get_logger
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.on_demand import OnDemandMemory
from tensorhub.model.accesses import Refusal
from tensorhub.model.digests import WIDTHS
from tensorhub.model.manifest import Manifest
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.wakeup import Wakeup
from tensorhub.runtime.worker.handle import Handle
from tensorhub.runtime.worker.host_copies import HostCopyRunner, HostingWorker
from tensorhub.transport.archive import ArchivedPlace, ArchiveOwner
from tensorhub.types import Medium, Purpose, RegistrationId, VersionInfo
from tensorhub.worker.host_copy_actions import Unload
from tensorhub.worker.loading import Loading
from tensorhub.worker.member_memory import Content
from tensorhub.worker.registration_session import Shard

READS_OF_ONE = 2  # of one version at a time: the next is asked for while one is put together
READS_MAX = 8  # of all together
REASONS_TOLD_MAX = 64  # of one version, in the log

log = get_logger("tensorhub.archive")

Load = Callable[[Sequence[int], Sequence[memoryview]], None]


@dataclass(frozen=True, slots=True)
class ArchivedShard:
    """One shard of a version in a bucket. `digests`: the publisher's, of all chunks; none where the
    manifest wants none. `parts`: its catalogue, arrangement and coordinates by their ids, in that
    order; none where the manifest says all. `load` fills each target with that chunk, whose digest
    it has compared; it blocks, is called from any thread, and raises TensorHubError. `place`: where
    readers find it by themselves. `on_lost` hears the registration and why the copy is gone: the
    coordinator did not know that content or has ordered it out, or its bytes have changed. It
    raises nothing.
    """

    version: VersionInfo
    shard: int
    manifest: Manifest
    digests: Sequence[int]
    root: bytes
    load: Load
    parts: Mapping[str, bytes] = field(default_factory=dict)
    place: ArchivedPlace | None = None
    on_lost: Callable[[str, str], None] = lambda registration, reason: None


class _Copy:
    """One registration, as the loader of its memory."""

    def __init__(self, shard: ArchivedShard, wants: Callable[[_Copy], None]) -> None:
        self.shard = shard
        count, has_digests = shard.manifest.chunk_count, WIDTHS[shard.manifest.digest]
        self.digests = shard.digests if has_digests else [0] * count
        if len(self.digests) != count:
            raise StateError(f"{len(self.digests)} digests are not those of {count} chunks")
        self.handle: Handle  # set before any reader knows of it
        self.memory = OnDemandMemory(self.digests, self)
        self.chunks: ChunkMemory
        self.loading = Loading(shard.manifest.sizes)  # guarded by `lock`
        self.lock = threading.Lock()
        self.is_noted = False  # the task was told that it wants something; guarded by `lock`
        self.is_leaving = False  # its room is wanted: nothing is loaded until it is given back
        self.has_room = False
        self.room = anyio.Lock()  # held while it takes room
        self.reads = 0  # tasks that read for it
        self.all_read = anyio.Event()  # the last one of them has ended
        self.told: set[str] = set()  # the reasons that are in the log
        self._wants = wants

    def __repr__(self) -> str:
        return f"<_Copy of {self.shard.version} {self.loading!r}>"

    @property
    def ident(self) -> str:
        return self.handle.member.shard.registration

    def want(self, chunks: Sequence[tuple[int, int]]) -> Refusal | None:
        """See `Loader`."""
        with self.lock:
            now = time.monotonic()
            refusal = self.loading.want(chunks, now)
            is_news = not self.is_noted and self.loading.has_more(now)
            self.is_noted = self.is_noted or is_news
        if is_news:
            self._wants(self)
        return refusal

    def take(self) -> list[int]:
        with self.lock:
            return [] if self.is_leaving else self.loading.take(time.monotonic())

    def targets(self, batch: Sequence[int]) -> list[memoryview]:
        return [self.chunks.buffer(chunk) for chunk in batch]


class ArchivedCopies:
    """Those of one worker."""

    def __init__(self, worker: HostingWorker, copies: HostCopyRunner, owner: SharedOwner) -> None:
        self._worker = worker
        self._room = copies
        self._owner = owner
        self._copies: dict[str, _Copy] = {}  # by registration, those that have a handle
        self._removing: set[str] = set()  # registrations
        self._wanting: deque[_Copy] = deque()  # lanes' threads add, the task takes
        self._unloads: deque[Unload] = deque()
        self._wakeup: Wakeup | None = None
        self._threads = anyio.CapacityLimiter(READS_MAX)
        copies.on_unload = self._note_unload
        copies.budget.last_used = self._last_used

    def __repr__(self) -> str:
        return f"<ArchivedCopies: {len(self._copies)}>"

    # ----------------------------------------------------------------------------------------------
    # what is asked for

    async def add(self, shard: ArchivedShard) -> str:
        """Hold that shard from now on; returns its registration. `known` waits for the coordinator.
        StateError: there is no address space for it, or it has not a digest for each chunk.
        """
        version = shard.version
        ident = self._worker.new_registration()
        its = Shard(
            registration=ident,
            model=version.model,
            group=f"archive/{ident}",
            rank=0,
            world_size=1,
            spot=False,
            layout_id="",
            manifest=shard.manifest,
            number=shard.shard,
            medium=Medium.HOST,
            purpose=Purpose.ARCHIVE,
        )
        copy = _Copy(shard, self._note_wanting)
        copy.chunks = ChunkMemory(shard.manifest, copy.memory.map(shard.manifest).regions)
        content = Content(version, shard.manifest, 0, root=shard.root)
        content.parts, content.part_ids = shard.parts, tuple(shard.parts)
        for side in self._owner.sides:
            if isinstance(side, ArchiveOwner) and shard.place is not None:
                side.offer(ident, shard.place)
        self._room.machine.adopted(its)
        copy.handle = self._worker.start_handle(its, copy.memory, content)
        self._copies[ident] = copy
        return ident

    async def known(self, registration: str, timeout_s: float) -> None:
        """Return once the coordinator counts on this copy. StateError: it does not, and the copy is
        gone; RegistrationError: it has refused; CoordinatorUnavailable: it has not answered.
        """
        copy = self._copies.get(registration)
        if copy is not None:
            with anyio.move_on_after(timeout_s):
                await copy.handle.registered.wait()
            if not copy.handle.registered.is_set():
                raise CoordinatorUnavailable(
                    f"{copy.handle.member.shard.title}: the coordinator did not answer within "
                    f"{timeout_s:g} s"
                )
            if copy.handle.registration_error is not None:
                raise copy.handle.registration_error
        if copy is None or copy.handle.member.content is None:
            why = "" if copy is None else f": {copy.handle.member.why}"
            raise StateError(f"this copy of an archived version is gone{why}")

    async def remove(self, registration: str, timeout_s: float) -> None:
        """End this copy; its readers are moved, or fenced. RetentionError: no other worker holds
        the version, which is retained. A copy that is gone is fine.
        """
        self._removing.add(registration)
        try:
            await self._room.remove(registration, timeout_s)
        finally:
            self._removing.discard(registration)
        self._copies.pop(registration, None)  # nothing was lost

    # ----------------------------------------------------------------------------------------------
    # what is heard of

    def ended(self, handle: Handle) -> None:
        """A handle of the worker is no more, and its memory was given back."""
        shard = handle.member.shard
        copy = self._copies.pop(shard.registration, None)
        ends = self._wakeup is None or self._room.machine.is_stopped
        if copy is not None and not ends and shard.registration not in self._removing:
            error = handle.registration_error
            reason = handle.member.why if error is None else str(error)
            log.warning("archived_copy_lost", registration=shard.registration, reason=reason)
            copy.shard.on_lost(shard.registration, reason)

    def _last_used(self, ident: str) -> float:
        copy = self._copies.get(ident)
        return 0.0 if copy is None else copy.loading.used_at

    def _note_wanting(self, copy: _Copy) -> None:
        """That copy has something to load. Any thread."""
        self._wanting.append(copy)
        self._wake()

    def _note_unload(self, action: Unload) -> None:
        self._unloads.append(action)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()

    # ----------------------------------------------------------------------------------------------
    # loading

    async def run(self) -> None:
        """Load what is wanted, until cancelled; no thread is left then."""
        async with anyio.create_task_group() as tasks:
            self._wakeup = Wakeup()
            try:
                while True:
                    self._begin_wanted(tasks)
                    await self._wakeup.wait()
            finally:
                self._wakeup = None  # the worker ends, and no copy is lost by that

    def _begin_wanted(self, tasks: anyio.abc.TaskGroup) -> None:
        while self._unloads:
            tasks.start_soon(self._unload, self._unloads.popleft())
        while self._wanting:
            copy = self._wanting.popleft()
            with copy.lock:
                copy.is_noted = False
            if copy.reads < READS_OF_ONE and not copy.is_leaving:
                copy.reads += 1
                tasks.start_soon(self._read_all, copy)

    async def _read_all(self, copy: _Copy) -> None:
        """Read for that copy until it wants nothing more, or has to leave its room."""
        try:
            while await self._has_room(copy) and (batch := copy.take()):
                self._help(copy)
                await anyio.to_thread.run_sync(self._read, copy, batch, limiter=self._threads)
        finally:
            copy.reads -= 1
            if not copy.reads:
                copy.all_read.set()
                copy.all_read = anyio.Event()

    def _help(self, copy: _Copy) -> None:
        """Another task reads beside this one, if there is more to read."""
        with copy.lock:
            has_more = copy.loading.has_more(time.monotonic())
        if has_more and copy.reads < READS_OF_ONE:
            self._note_wanting(copy)

    async def _has_room(self, copy: _Copy) -> bool:
        """Take room for the whole shard. False: there is none, or it is being given back."""
        async with copy.room:
            if copy.is_leaving or copy.ident not in self._copies:
                return False
            if copy.has_room:
                return True
            nbytes = copy.shard.manifest.region_bytes
            try:
                await self._room.make_room(copy.ident, Purpose.ARCHIVE, nbytes)
            except TensorHubError as error:
                while batch := copy.take():
                    self._failed(copy, batch, Refusal(str(error)))
                return False
            copy.has_room = True
            return True

    def _read(self, copy: _Copy, batch: Sequence[int]) -> None:
        """Bring these chunks. In a thread."""
        with copy.memory.writing() as is_there:
            if is_there:
                self._read_in(copy, batch)

    def _read_in(self, copy: _Copy, batch: Sequence[int]) -> None:
        try:
            copy.shard.load(batch, copy.targets(batch))
        except IntegrityError as error:
            if len(batch) == 1:
                self._failed(copy, batch, Refusal(str(error), is_damaged=True))
            for chunk in batch if len(batch) > 1 else ():  # the others are as they should be
                self._read_in(copy, [chunk])
        except TensorHubError as error:
            self._failed(copy, batch, Refusal(str(error)))
        except Exception as error:
            log.exception("archive_not_read", registration=copy.ident)
            self._failed(copy, batch, Refusal(text_of(error)))
        else:
            self._arrived(copy, batch)

    def _arrived(self, copy: _Copy, batch: Sequence[int]) -> None:
        content = copy.handle.member.content
        named = [(chunk, copy.digests[chunk]) for chunk in batch]
        is_taken = content is not None and self._owner.mark_available(
            RegistrationId(copy.ident), content.generation, named
        )
        with copy.lock:
            if is_taken:
                copy.loading.arrived(batch, time.monotonic())
            else:
                copy.loading.returned(batch)

    def _failed(self, copy: _Copy, batch: Sequence[int], refusal: Refusal) -> None:
        """Tell the readers that wait for these chunks."""
        version, reason = copy.shard.version, refusal.reason
        said = f"version {version.version} of {version.model!r} in the archive: {reason}"
        with copy.lock:
            copy.loading.failed(batch, replace(refusal, reason=said), time.monotonic())
            is_news = reason not in copy.told and len(copy.told) < REASONS_TOLD_MAX
            copy.told.add(reason)
        self._owner.wake()
        if is_news:
            log.warning("archive_not_read", registration=copy.ident, reason=said)

    # ----------------------------------------------------------------------------------------------
    # giving room back

    async def _unload(self, action: Unload) -> None:
        """See `Unload`."""
        copy, asked_at = self._copies.get(action.registration), time.monotonic()
        if copy is None:
            return  # its room goes with its memory
        while action.in_turn and (left_s := self._turn_left_s(copy, asked_at)) > 0:
            with anyio.move_on_after(left_s):
                await copy.all_read.wait()  # it may have what it was asked for
        copy.is_leaving = True
        try:
            while copy.reads:
                await copy.all_read.wait()
            registration = RegistrationId(copy.ident)
            while copy.ident in self._copies:
                if await anyio.to_thread.run_sync(self._owner.unload, registration):
                    break
            await anyio.to_thread.run_sync(self._empty, copy)
        finally:
            copy.is_leaving = False
        self._room.unloaded(action.registration)
        with copy.lock:
            has_more = copy.loading.has_more(time.monotonic())
        if has_more:
            self._note_wanting(copy)

    def _turn_left_s(self, copy: _Copy, asked_at: float) -> float:
        is_read = not self._owner.is_quiet(RegistrationId(copy.ident))
        with copy.lock:
            return copy.loading.turn_left_s(asked_at, time.monotonic(), is_read=is_read)

    @staticmethod
    def _empty(copy: _Copy) -> None:
        copy.has_room = False
        with copy.memory.writing() as is_there:
            if is_there:
                copy.memory.empty()
        with copy.lock:
            copy.loading.emptied()
