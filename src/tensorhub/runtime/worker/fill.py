"""How one handle's memory is filled: from other memory of its worker, and from other workers.

Responsible for the pull or the copy that runs, for its sources and its progress, and for the call's
times. Not responsible for where the bytes go (`mapped_memory`), for reading them
(`runtime.data.lanes`), or for the actions' order (`handle`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import anyio
import anyio.abc
import anyio.from_thread
import anyio.to_thread

from tensorhub.errors import RegistrationError, StateError, TensorHubError
from tensorhub.layouts.reading import counts_of, parts_of
from tensorhub.logs import get_logger
from tensorhub.memory.base import Base
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.regions import FilledMemory, MappedRegions, Memory
from tensorhub.messages import SelectionRoot
from tensorhub.model.manifest import Manifest
from tensorhub.runtime import clock
from tensorhub.runtime.data.channels import Channels
from tensorhub.runtime.data.copying import copy_chunks
from tensorhub.runtime.data.lanes import PullEvent, PullReport, PullRunner
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.data.source_lane import SourceFailed
from tensorhub.runtime.reports import CallTimes
from tensorhub.runtime.worker.calling import ProgressListener
from tensorhub.runtime.worker.coordinator_client import MessageSink
from tensorhub.runtime.worker.mapped_memory import MappedMemory
from tensorhub.runtime.worker.stream_sync import StreamSync
from tensorhub.runtime.worker.writes import Writes
from tensorhub.types import ContentId, LeaseId, RegistrationId
from tensorhub.worker.calls import (
    Action,
    AddPullSource,
    CompareDigests,
    CopyLocally,
    DropPullSource,
    StartPull,
    staging_of,
)
from tensorhub.worker.chunk_reports import compare, roots
from tensorhub.worker.member import Member

LONG_LIST = 2**14  # of digests: their root is made in a thread
PROGRESS_S = 0.25  # how often a running fill tells the coordinator how far it is
TENSORS_NAMED_MAX = 5  # in an error

log = get_logger("tensorhub.worker")


@dataclass(slots=True)
class _Pull:
    """The pull or copy that runs, or ran last."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    runner: PullRunner | None = None
    # before the runner was up
    early: list[AddPullSource | DropPullSource] = field(default_factory=list)


class Filler:
    """That of one handle. `apply`: carries out what the member says to what it is told."""

    def __init__(
        self,
        member: Member,
        memory: Memory,
        owner: SharedOwner,
        mapped: MappedMemory,
        link: MessageSink,
        channels: Channels,
        apply: Callable[[list[Action]], None],
        stream_sync: StreamSync,
        writes: Writes,
    ) -> None:
        self.times = CallTimes()  # of the running call
        self.progress: ProgressListener | None = None
        self._member = member
        self._memory = memory
        self._owner = owner
        self._mapped = mapped
        self._link = link
        self._channels = channels
        self._apply = apply
        self.stream_sync = stream_sync
        self._writes = writes
        self._registration = RegistrationId(member.shard.registration)
        self._pull: _Pull | None = None

    def let_go(self) -> None:
        """Of the handle, which has ended: so the memory of both is free as soon as its caller has
        let go of it.
        """
        self._apply = lambda actions: None

    def __repr__(self) -> str:
        return f"<Filler of {self._member!r}>"

    def begin(self, action: StartPull | CopyLocally, tasks: anyio.abc.TaskGroup) -> None:
        """Begin to pull, or to copy, in a task of its own. The member hears of its end."""
        self._pull = _Pull()
        if isinstance(action, StartPull):
            self.times.begin_pull(clock.now(), again=action.again)
            tasks.start_soon(self._fill, action, self._pull)
        else:
            tasks.start_soon(self._copy, action, self._pull)

    async def stop(self) -> None:
        """End what runs; returns when nothing of it does any more."""
        if self._pull is not None:
            self._pull.scope.cancel()
            await self._pull.ended.wait()

    def change_source(self, action: AddPullSource | DropPullSource) -> None:
        """Another source for the running pull, or one less."""
        pull = self._pull
        if pull is None or pull.ended.is_set():
            return
        if pull.runner is None:
            pull.early.append(action)
        elif isinstance(action, AddPullSource):
            pull.runner.add_source(action.grant)
        else:
            pull.runner.drop_source(LeaseId(action.lease))
            self._apply(self._member.source_failed(action.lease, "dropped", "", clock.now()))

    async def _fill(self, action: StartPull, pull: _Pull) -> None:
        """Pull every chunk into the caller's tensors, with whatever sources there are and come."""
        root, its_roots = b"", tuple[SelectionRoot, ...]()
        try:
            with pull.scope:
                self._memory.check_unreplaced()  # its bytes may have been freed meanwhile
                await self.stream_sync.done()
                target, mapped, chunks = await self._mapped.destination(action)
                if not self._member.shard.serves:
                    content_id, recalled = ContentId(action.version.content_id), None
                    if isinstance(self._memory, FilledMemory):
                        recalled = self._memory.recall(content_id, chunks.manifest)
                    self._owner.keep_books(target, action.generation, content_id, chunks, recalled)
                base = self._owner.base(target)
                kept = await self._verify_kept(target, action.generation, base)
                with self._writing(staged=action.staged):
                    try:
                        await self._pull_chunks(action, pull, target, chunks, kept, base)
                    finally:
                        if base is not None:
                            base.is_certain = False
                    await self._unpack(mapped)
                root, its_roots = await self._roots(action.manifest, target, action.generation)
        except* TensorHubError as group:
            error = self._named(_first_of(group))
            log.warning("fill_failed", registration=self._registration, reason=str(error))
            self._apply(self._member.pull_failed(error, clock.now()))
        else:
            if not pull.scope.cancelled_caught:
                self.times.prepared = clock.now()
                self._apply(self._member.pull_done(clock.now(), root, its_roots))
        finally:
            pull.runner = None  # it keeps the memory alive
            pull.ended.set()

    def _named(self, error: TensorHubError) -> TensorHubError:
        """The error itself, or an error that names the tensors that cannot be written (any more)
        and so caused it.
        """
        if isinstance(error, StateError):
            try:
                self._memory.check_writable(again=True)
            except RegistrationError as found:
                return found
        return error

    async def _roots(
        self, manifest: Manifest, target: RegistrationId, generation: int
    ) -> tuple[bytes, tuple[SelectionRoot, ...]]:
        """See `worker.chunk_reports.roots`."""
        listed = self._owner.listed(target, generation)
        if listed is None:
            return b"", ()
        if len(listed[1]) < LONG_LIST:
            return roots(manifest, *listed)
        return await anyio.to_thread.run_sync(roots, manifest, *listed)

    async def compare(self, action: CompareDigests) -> None:
        """See `CompareDigests`."""
        target = (
            RegistrationId(staging_of(self._registration)) if action.staged else self._registration
        )
        listed = self._owner.listed(target, action.generation)
        if listed is None or not listed[0]:
            return
        origin_of = partial(self._owner.origin, target, action.generation)
        wrong, following = compare(action, *listed, origin_of)
        if wrong:
            log.warning(
                "not_as_published",
                registration=self._registration,
                chunks=len(wrong),
                first=wrong[0][0],
            )
            revoke = partial(
                self._owner.revoke, target, action.generation, [chunk for chunk, _, _ in wrong]
            )
            await anyio.to_thread.run_sync(revoke)
        self._apply(self._member.compared(action.generation, following, wrong, clock.now()))

    async def _verify_kept(
        self, target: RegistrationId, generation: int, base: Base | None
    ) -> list[int]:
        """Chunks of this content that a broken-off fill has left and that are unchanged since (R9).
        What it has left of the content before is looked at, too.
        """
        started, owner, check = clock.now(), self._owner, anyio.from_thread.check_cancelled
        if base is not None:
            await anyio.to_thread.run_sync(base.verify, check)
        kept, found = owner.kept(target, generation), list[int]()
        if kept:
            found = await anyio.to_thread.run_sync(owner.verify, target, generation, kept, check)
        self.times.verified_s = clock.now() - started if found else 0.0
        return found

    async def _copy(self, action: CopyLocally, pull: _Pull) -> None:
        """Take over what other memory of this worker has; see `CopyLocally`."""
        started, copied = clock.now(), frozenset[int]()
        try:
            with pull.scope:
                self._memory.check_unreplaced()
                await self.stream_sync.done()
                target, mapped, chunks = await self._mapped.destination(action)
                arrived = partial(self._owner.mark_available, target, action.generation)
                content_id, check = (
                    ContentId(action.version.content_id),
                    anyio.from_thread.check_cancelled,
                )
                work = partial(
                    copy_chunks,
                    self._owner,
                    action.sources,
                    content_id,
                    chunks,
                    action.copied,
                    arrived,
                    check,
                )
                with self._writing(staged=action.staged):
                    copied = await anyio.to_thread.run_sync(work)
                    if action.last:
                        await self._unpack(mapped)
        except TensorHubError as error:
            log.warning("copy_failed", registration=self._registration, reason=str(error))
            self._apply(self._member.pull_failed(error, clock.now()))
        else:
            self._note_copying(clock.now() - started)
            if not pull.scope.cancelled_caught:
                self._apply(self._member.copied(copied, clock.now()))
        finally:
            pull.ended.set()

    @contextlib.contextmanager
    def _writing(self, *, staged: bool) -> Iterator[None]:
        """The block writes the caller's tensors, unless the update is staged; autograd may have
        read the tensors meanwhile. StateError: another registration has promised their bytes.
        """
        if staged:
            yield
            return
        with self._memory.claim.filling():
            try:
                yield
            finally:
                self._writes.library_wrote()

    def _note_copying(self, seconds: float) -> None:
        if self.times.prepared:
            self.times.applied_s += seconds
        else:
            self.times.copied_s += seconds

    async def _pull_chunks(
        self,
        action: StartPull,
        pull: _Pull,
        target: RegistrationId,
        chunks: ChunkMemory,
        kept: list[int],
        base: Base | None,
    ) -> None:
        selections = {part.selection.selection_id: part for part in parts_of(action.manifest)}
        opener = self._channels.opener(ContentId(action.version.content_id), selections, base)
        there = {*chunks.unwanted, *action.copied, *kept}
        runner = PullRunner(
            chunks,
            self._owner,
            target,
            action.generation,
            opener,
            verified=there,
            published=action.published,
            selections=selections,
            counts=counts_of(action.manifest),
            patience_s=self._channels.patience_s,
            base=base,
        )
        try:
            async with runner:
                pull.runner = runner
                for grant in action.grants:
                    runner.add_source(grant)
                while pull.early:
                    self.change_source(pull.early.pop(0))
                note = partial(self._note_arrived, target, action.generation)
                while isinstance(event := await self._next_event(runner, note), SourceFailed):
                    self._source_failed(event, action.manifest)
                report = runner.report()
                if report.flows:
                    self._say_progress(report)
                self._show_progress(report)
        finally:
            self._note_arrived(target, action.generation)
            self.times.add_pull(runner.report(), clock.now(), again=action.again)
            self.times.add_links(
                replace(each, site="") if each.site == self._channels.site else each
                for each in runner.timings()
            )

    async def _unpack(self, mapped: MappedRegions) -> None:
        if not mapped.is_in_place:
            await anyio.to_thread.run_sync(mapped.unpack)

    def _note_arrived(self, target: RegistrationId, generation: int) -> None:
        """Note the arrived chunks of memory that outlives this process, for the next process."""
        listed = (
            self._owner.listed(target, generation)
            if isinstance(self._memory, FilledMemory)
            else None
        )
        if listed is not None and isinstance(self._memory, FilledMemory):
            self._memory.note(listed[1])

    async def _next_event(self, runner: PullRunner, note_arrived: Callable[[], None]) -> PullEvent:
        """What happens next; until then progress is told."""
        told = clock.now()
        while True:
            with anyio.move_on_after(told + PROGRESS_S - clock.now()):
                return await runner.next_event()
            told = clock.now()
            report = runner.report()
            self._say_progress(report)
            self._show_progress(report)
            await anyio.to_thread.run_sync(note_arrived)

    def _source_failed(self, event: SourceFailed, manifest: Manifest) -> None:
        detail = event.detail
        if event.chunk is not None:
            names = manifest.tensors_in(event.chunk)[:TENSORS_NAMED_MAX]
            detail += f" (tensor {', '.join(map(repr, names))})"
        log.info("source_failed", lease=event.lease, reason=event.reason, detail=detail)
        self._apply(
            self._member.source_failed(
                event.lease, event.reason, detail, clock.now(), chunk=event.at_source
            )
        )

    def _say_progress(self, report: PullReport) -> None:
        progress = self._member.progress(report.chunks_verified, report.bytes_read, report.flows)
        if progress is not None:
            self._link.say(progress)

    def _show_progress(self, report: PullReport) -> None:
        if self.progress is None:
            return
        try:
            self.progress(report.bytes_verified, report.bytes_wanted)
        except Exception as error:
            self.progress = None
            log.warning(
                "progress_failed",
                registration=self._registration,
                reason=f"{type(error).__name__}: {error}",
            )


def _first_of(group: BaseExceptionGroup[TensorHubError]) -> TensorHubError:
    error: TensorHubError | BaseExceptionGroup[TensorHubError] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
