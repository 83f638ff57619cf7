"""One registration's shell: carries out what its `worker.Member` wants, one action after the other.

Responsible for the order of fences, openings and pulls of one memory (each is done before the next begins), for the
phases of a report, and for a call's future. Decides nothing. Lives in the worker runtime's loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, assert_never

import anyio
import anyio.abc
import anyio.from_thread
import anyio.to_thread

from tensorhub.errors import StateError, TensorHubError
from tensorhub.messages import FromWorker, Progress
from tensorhub.runtime import clock
from tensorhub.runtime.chunks import ChunkMemory
from tensorhub.runtime.lanes import AllVerified, ChannelOpener, PullReport, PullRunner, SourceFailed
from tensorhub.runtime.logs import get_logger
from tensorhub.runtime.serving import SharedOwner
from tensorhub.transport.memory import MappedRegions, Memory
from tensorhub.types import ContentId, FetchReport, HandleState, LeaseId, RegistrationId, VersionInfo
from tensorhub.worker.calls import (
    Action,
    AddPullSource,
    Call,
    CallHook,
    CloseCall,
    DropPullSource,
    Fence,
    FillCall,
    Finish,
    OpenMemory,
    PublishCall,
    RefuseCall,
    Registered,
    RegistrationFailed,
    Say,
    StartPull,
    StopPull,
    UnpublishCall,
)
from tensorhub.worker.member import Member

PROGRESS_S = 0.25  # how often a running fill tells the coordinator how far it is

log = get_logger("tensorhub.worker")

HookRequest = Callable[[VersionInfo], None]
ProgressListener = Callable[[int, int], None]  # (bytes verified so far, bytes wanted)


class Line(Protocol):
    """What a handle needs of its worker."""

    def say(self, message: FromWorker) -> None: ...

    def open_channel(self, content_id: ContentId) -> ChannelOpener: ...


@dataclass(slots=True)
class _Call:
    """The running call's future, and when what happened."""

    ended: anyio.Event
    started: float
    hook: HookRequest | None = None
    bound: float | None = None  # Start has come
    pulled_from: float = 0.0  # these three: where there is a report
    pulled: float = 0.0
    prepared: float = 0.0
    report: PullReport | None = None
    result: Finish | None = None


@dataclass(slots=True)
class _Pull:
    """The running fill."""

    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)
    runner: PullRunner | None = None
    early: list[AddPullSource | DropPullSource] = field(default_factory=list)  # before the runner was up


class Handle:
    """One registered memory and its calls. `run` must be running for anything to happen."""

    def __init__(self, member: Member, memory: Memory, owner: SharedOwner, line: Line) -> None:
        self.member = member
        self.memory = memory
        self.registered = anyio.Event()
        self.registration_error: Exception | None = None
        self._registration = RegistrationId(member.shard.registration)
        self._owner = owner
        self._line = line
        self._todo: deque[Action] = deque()
        self._todo_wanted = anyio.Event()
        self._call: _Call | None = None
        self._pull: _Pull | None = None
        self._digests: Sequence[int] | None = None  # of memory whose own they must be, made before a publish
        self._tasks: anyio.abc.TaskGroup
        self._scope = anyio.CancelScope()
        self.deadline_moved: Callable[[], None] = lambda: None
        self.progress: ProgressListener | None = None

    def __repr__(self) -> str:
        return f"<Handle of {self.member!r}>"

    # ------------------------------------------------------------------------------------------------- calls

    async def publish(self, version: int, timeout_s: float) -> VersionInfo:
        """`timeout_s` does not count the digests that this memory needs beforehand: their time grows with its bytes."""
        self.memory.check_unreplaced()
        manifest = self.member.shard.manifest
        if manifest is not None and self.memory.digests_first:
            make = partial(self.memory.digests, manifest, anyio.from_thread.check_cancelled)
            self._digests = await anyio.to_thread.run_sync(make)
        _, finish = await self._run(PublishCall(version), timeout_s)
        assert finish.version is not None
        return finish.version

    async def unpublish(self, timeout_s: float) -> None:
        await self._run(UnpublishCall(), timeout_s)

    async def refuse(self, reason: str, timeout_s: float) -> None:
        """This rank will not make its next group call."""
        await self._run(RefuseCall(reason), timeout_s)

    async def close(self, timeout_s: float, *, abandon: bool = False) -> None:
        if self.member.state is not HandleState.CLOSED:
            await self._run(CloseCall(abandon), timeout_s)

    async def fill(self, call: FillCall, timeout_s: float, hook: HookRequest | None = None) -> FetchReport:
        _, report = await self.fetch(call, timeout_s, hook)
        return report

    async def fetch(
        self, call: FillCall, timeout_s: float, hook: HookRequest | None = None
    ) -> tuple[VersionInfo, FetchReport]:
        """As `fill`; says which version it was, too."""
        self.memory.check_unreplaced()
        started = clock.now()
        ran, finish = await self._run(call, timeout_s, hook)
        assert finish.version is not None
        return finish.version, _report(ran, finish, started, clock.now())

    async def _run(self, call: Call, timeout_s: float, hook: HookRequest | None = None) -> tuple[_Call, Finish]:
        """Begin a call and wait for its end; cancelling ends it as soon as may be, and leaves nothing running."""
        self._check_last_ended()
        actions = self.member.begin(call, timeout_s, clock.now())
        running = self._call = _Call(anyio.Event(), clock.now(), hook)
        self.apply(actions)
        try:
            await running.ended.wait()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                error = StateError("the call was cancelled by its caller", retryable=True)  # as other ranks see it
                self.apply(self.member.cancel(error, clock.now()))
                await running.ended.wait()
            raise
        finish = running.result
        assert finish is not None
        if finish.error is not None:
            raise finish.error
        return running, finish

    async def check_idle(self) -> None:
        """Raise StateError if the memory is not the caller's to write: a call runs on it, or it is closed."""
        self._check_last_ended()
        if self.member.state is HandleState.CLOSED:
            raise StateError(f"{self.member!r} is closed; register again")

    def _check_last_ended(self) -> None:
        """A call is over when its fences are: the member is done with it earlier."""
        if self._call is not None and self._call.result is None:
            raise StateError(f"{self.member!r}: a call is still running on this handle; one call at a time")

    async def end_call(self, error: Exception) -> None:
        """End the running call, if there is one, with `error`; returns when nothing of it runs any more."""
        if self._call is not None and self._call.result is None:
            self.apply(self.member.cancel(error, clock.now()))
            await self._call.ended.wait()

    def hook_returned(self, error: Exception | None) -> None:
        self.apply(self.member.hook_returned(error, clock.now()))

    # ------------------------------------------------------------------------------------------------- actions

    def apply(self, actions: list[Action]) -> None:
        """Queue what the member wants done. `Say` and `Finish` keep their place behind fences and openings."""
        self._todo.extend(actions)
        if actions:
            self._todo_wanted.set()
        self.deadline_moved()

    async def run(self) -> None:
        """Carry out actions until cancelled; then no read of this memory runs any more."""
        try:
            async with anyio.create_task_group() as self._tasks:
                self._scope = self._tasks.cancel_scope
                while True:
                    await self._todo_wanted.wait()
                    self._todo_wanted = anyio.Event()
                    while self._todo:
                        await self._do(self._todo.popleft())
                    if self.member.state is HandleState.CLOSED and self.member.running is None:
                        self.stop()
        finally:
            with anyio.CancelScope(shield=True):
                await self._owner.fence_async(self._registration)
                self._owner.forget(self._registration)
            self._end_call(Finish(error=StateError("the hub was closed while the call was running")))

    def stop(self) -> None:
        """Let `run` end: the handle is closed, or was never registered."""
        self._scope.cancel()

    async def _do(self, action: Action) -> None:
        match action:
            case Say():
                self._line.say(action.message)
            case OpenMemory():
                self._open(action)
            case Fence():
                await self._owner.fence_async(self._registration)
                self.apply(self.member.fenced(action.generation, clock.now()))
            case CallHook():
                assert self._call is not None
                assert self._call.hook is not None
                self._call.hook(action.version)
            case StartPull():
                self._pull = _Pull()
                if self._call is not None:
                    self._call.pulled_from = clock.now()
                self._tasks.start_soon(self._fill, action, self._pull)
            case AddPullSource() | DropPullSource():
                self._change_source(action)
            case StopPull():
                if self._pull is not None:
                    self._pull.scope.cancel()
                    await self._pull.ended.wait()
                self.apply(self.member.pull_stopped(clock.now()))
            case Registered():
                self.registered.set()
            case RegistrationFailed():
                self.registration_error = action.error
                self.registered.set()
            case Finish():
                self._end_call(action)
            case _:
                assert_never(action)

    def _end_call(self, finish: Finish) -> None:
        if self._call is not None and self._call.result is None:
            self._call.result = finish
            self._call.ended.set()

    def note_bound(self) -> None:
        """The coordinator has bound the running call to a version."""
        if self._call is not None and self._call.bound is None:
            self._call.bound = clock.now()

    def _open(self, action: OpenMemory) -> None:
        chunks = ChunkMemory(action.manifest, self.memory.map(action.manifest).regions)
        content_id, digests = ContentId(action.content_id), self._digests if action.complete else None
        self._owner.open(
            self._registration, action.generation, content_id, chunks, complete=action.complete, digests=digests
        )

    def _change_source(self, action: AddPullSource | DropPullSource) -> None:
        pull = self._pull
        if pull is None or pull.ended.is_set():
            return
        if pull.runner is None:
            pull.early.append(action)
        elif isinstance(action, AddPullSource):
            pull.runner.add_source(action.grant)
        else:
            pull.runner.drop_source(LeaseId(action.lease))
            self.apply(self.member.source_failed(action.lease, "dropped", "", clock.now()))

    # ------------------------------------------------------------------------------------------------- filling

    async def _fill(self, action: StartPull, pull: _Pull) -> None:
        """Pull every chunk into the caller's tensors, with whatever sources there are and come."""
        try:
            with pull.scope:
                self.memory.check_unreplaced()  # before_write may have moved them
                # In a thread, for memory that is made only now: a file of its size.
                mapped = await anyio.to_thread.run_sync(self.memory.map, action.manifest)
                async with anyio.create_task_group() as tasks:
                    await self._pull_chunks(action, pull, mapped, tasks)
                    tasks.cancel_scope.cancel()
                await self._unpack(mapped)
        except* TensorHubError as group:
            error = _first_of(group)
            log.warning("fill_failed", registration=self._registration, reason=str(error))
            self.apply(self.member.pull_failed(error, clock.now()))
        else:
            if not pull.scope.cancelled_caught:
                if self._call is not None:
                    self._call.prepared = clock.now()
                self.apply(self.member.pull_done(clock.now()))
        finally:
            pull.ended.set()

    async def _pull_chunks(self, action: StartPull, pull: _Pull, mapped: MappedRegions, tasks: anyio.abc.TaskGroup) -> None:
        chunks = ChunkMemory(action.manifest, mapped.regions, mapped.unwanted)
        opener = self._line.open_channel(ContentId(action.version.content_id))
        runner = PullRunner(chunks, self._owner, self._registration, action.generation, opener, verified=chunks.unwanted)
        try:
            async with runner:
                pull.runner = runner
                for grant in action.grants:
                    runner.add_source(grant)
                while pull.early:
                    self._change_source(pull.early.pop(0))
                tasks.start_soon(self._tell_progress, runner)
                async for event in runner.events():
                    match event:
                        case SourceFailed():
                            log.info("source_failed", lease=event.lease, reason=event.reason, detail=event.detail)
                            failed = self.member.source_failed(event.lease, event.reason, event.detail, clock.now())
                            self.apply(failed)
                        case AllVerified():
                            self._show_progress(runner.report())
                            break
        finally:
            if self._call is not None:
                self._call.report, self._call.pulled = runner.report(), clock.now()

    async def _unpack(self, mapped: MappedRegions) -> None:
        if mapped.copies or mapped.then is not None:
            await anyio.to_thread.run_sync(mapped.unpack)

    async def _tell_progress(self, runner: PullRunner) -> None:
        while True:
            await anyio.sleep(PROGRESS_S)
            running = self.member.running
            if running is not None and running.key is not None:
                report = runner.report()
                rank = self.member.shard.rank
                self._line.say(Progress(running.key, rank, report.chunks_verified, report.bytes_read))
                self._show_progress(report)

    def _show_progress(self, report: PullReport) -> None:
        if self.progress is None:
            return
        try:
            self.progress(report.bytes_verified, report.bytes_wanted)
        except Exception as error:
            self.progress = None
            log.warning("progress_failed", registration=self._registration, reason=f"{type(error).__name__}: {error}")


def _first_of(group: BaseExceptionGroup[TensorHubError]) -> TensorHubError:
    error: TensorHubError | BaseExceptionGroup[TensorHubError] = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _report(call: _Call, finish: Finish, started: float, ended: float) -> FetchReport:
    assert finish.version is not None
    pull, number = call.report, finish.version.version
    if pull is None or call.bound is None:
        return FetchReport(number, finish.changed, seconds=ended - started, phases={"resolve": ended - started})
    phases = _pull_phases(pull, call.pulled - call.pulled_from)
    phases["resolve"] = call.bound - started
    phases["wait"] += call.pulled_from - call.bound
    phases["unpack"] = call.prepared - call.pulled
    phases["commit"] = ended - call.prepared
    return FetchReport(
        version=number,
        changed=finish.changed,
        bytes_read=pull.bytes_read,
        seconds=ended - started,
        phases=phases,
        sources=pull.sources,
        retries=pull.retries,
        reread_bytes=pull.reread_bytes,
    )


def _pull_phases(pull: PullReport, seconds: float) -> dict[str, float]:
    """A pull's wall time: shared out as its lanes spent theirs, if they ran side by side; without a lane it waited."""
    lanes_s = max(sum(pull.phases.values()), seconds)
    transfer_s, verify_s = (pull.phases[name] * seconds / lanes_s if lanes_s else 0.0 for name in ("transfer", "verify"))
    return {"wait": max(0.0, seconds - transfer_s - verify_s), "transfer": transfer_s, "verify": verify_s}
