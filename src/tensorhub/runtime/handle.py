"""One registration's shell: carries out what its `worker.Member` wants, one action after the other.

Responsible for the order of fences, openings and pulls of one memory (each is done before the next begins), and for a
call's future. Not responsible for how the memory is filled (`filler`). Decides nothing. Lives in the worker runtime's loop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, assert_never

import anyio
import anyio.abc
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from tensorhub.digests import WIDTHS
from tensorhub.errors import DrainTimeout, Memory as TensorState, StateError, TensorHubError
from tensorhub.logs import get_logger
from tensorhub.memory.tensors import Memory
from tensorhub.messages import DIGESTS_BYTES_MAX, DigestAgain, ErrorInfo, Outcome, Start, TellDigests, ToRank
from tensorhub.runtime import clock
from tensorhub.runtime.callers_work import CallersWork
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.filler import Filler, Line, ProgressListener
from tensorhub.runtime.places import HostRoom, Places
from tensorhub.runtime.ports import HookRequest
from tensorhub.runtime.promise import Promise
from tensorhub.runtime.reports import CallTimes
from tensorhub.runtime.threads import run_in_thread
from tensorhub.types import (
    ContentId,
    FetchReport,
    HandleState,
    OpKind,
    RegistrationId,
    VersionInfo,
)
from tensorhub.worker.calls import (
    Action,
    AddPullSource,
    Call,
    CallHook,
    CloseCall,
    CompareDigests,
    CopyLocally,
    DropPullSource,
    EndPrefetch,
    Fence,
    FillCall,
    Finish,
    FreeMemory,
    FreePrefetch,
    FreeStaging,
    OpenMemory,
    PublishCall,
    RefuseCall,
    Registered,
    RegistrationFailed,
    ReopenMemory,
    Say,
    StartPull,
    StopPull,
    UnpublishCall,
    staging_of,
)
from tensorhub.worker.member import Member
from tensorhub.worker.telling import tell

FENCE_TRY_S = 2.0  # of a fence, before it is looked whether it is still wanted; readers have half of it to take their bytes

log = get_logger("tensorhub.worker")


@dataclass(slots=True)
class _Call:
    """The running call's future, and its course."""

    ended: anyio.Event
    times: CallTimes = field(default_factory=CallTimes)
    hook: HookRequest | None = None
    result: Finish | None = None


class Handle:
    """One registered memory and its calls. `run` must be running for anything to happen."""

    def __init__(
        self,
        member: Member,
        memory: Memory,
        owner: SharedOwner,
        line: Line,
        room: HostRoom,
        page_bytes: int = DIGESTS_BYTES_MAX,  # of digests in one message
    ) -> None:
        self.member = member
        self.memory = memory
        self.registered = anyio.Event()
        self.registration_error: Exception | None = None
        self._registration = RegistrationId(member.shard.registration)
        self._owner = owner
        self._line = line
        self._room = room
        self._page_bytes = page_bytes
        self._places = Places(memory, self._registration, owner, room)
        self.callers_work = CallersWork(memory.device)
        self._promise = Promise(member, memory, owner)
        self._filler = Filler(member, memory, owner, self._places, line, self.apply, self.callers_work, self._promise)
        self._todo: deque[Action] = deque()
        self._todo_wanted = anyio.Event()
        self._call: _Call | None = None
        self._digests: Sequence[int] | None = None  # of memory whose own they must be, made before a publish
        self._tasks: anyio.abc.TaskGroup
        self._scope = anyio.CancelScope()  # of `run`
        self._has_ended = False  # nobody carries out what a call would want
        self.deadline_moved: Callable[[], None] = lambda: None
        self.call_ended: Callable[[], None] = lambda: None
        self.first_fill_begins: Callable[[OpKind, float], None] = lambda kind, timeout_s: None
        self.was_filled = False  # what the memory got last came from others, not from its publisher

    def __repr__(self) -> str:
        return f"<Handle of {self.member!r}>"

    # ------------------------------------------------------------------------------------------------- calls

    async def publish(self, version: int, timeout_s: float) -> VersionInfo:
        """`timeout_s` does not count the digests that this memory needs beforehand: their time grows with its bytes."""
        if self.member.state is HandleState.READY:
            self._promise.raise_spoiled()
        await self.callers_work.done(timeout_s)
        manifest = self.member.shard.manifest
        holds_nothing = self.member.running is None and self.member.state in (HandleState.EMPTY, HandleState.TORN)
        if manifest is not None and holds_nothing:
            self._places.map_to_publish(manifest)
        if manifest is not None and self.memory.digests_first:
            make = partial(self.memory.digests, manifest, anyio.from_thread.check_cancelled)
            self._digests = await anyio.to_thread.run_sync(make)
        _, finish = await self._run(PublishCall(version), timeout_s)
        assert finish.version is not None
        self.was_filled = False
        self._owner.on_made(self._registration)  # they may all have been made beforehand
        return finish.version

    async def unpublish(self, timeout_s: float) -> None:
        if self.member.state is HandleState.EMPTY:
            self._promise.raise_spoiled()
        await self._run(UnpublishCall(), timeout_s)
        self._promise.raise_violation()

    async def unpublish_if_published(self, timeout_s: float) -> None:
        if self.member.state in (HandleState.READY, HandleState.IN_DOUBT):
            await self.unpublish(timeout_s)
        else:
            self._promise.raise_spoiled()

    async def refuse(self, error: TensorHubError, timeout_s: float) -> None:
        """This rank will not make its next group call, because of that."""
        await self._run(RefuseCall(ErrorInfo.of(error)), timeout_s)

    async def close(self, timeout_s: float, *, abandon: bool = False) -> None:
        if self.member.state is not HandleState.CLOSED:
            await self._run(CloseCall(abandon), timeout_s)
            self._promise.raise_violation()

    async def run_call(self, call: Call, timeout_s: float) -> None:
        """One that only `worker.host_copies` makes."""
        await self._run(call, timeout_s)

    async def fill(self, call: FillCall, timeout_s: float, hook: HookRequest | None = None) -> FetchReport:
        _, report = await self.fetch(call, timeout_s, hook)
        return report

    async def fetch(
        self,
        call: FillCall,
        timeout_s: float,
        hook: HookRequest | None = None,
        progress: ProgressListener | None = None,
    ) -> tuple[VersionInfo, FetchReport]:
        """As `fill`; says which version it was, too."""
        self._promise.raise_spoiled()
        if call.kind is OpKind.UPDATE:
            self._promise.check_kept()
        self._filler.progress = progress
        started = clock.now()
        if not self.was_filled and self.member.version is None and not isinstance(call.selector, int):
            self.first_fill_begins(call.kind, timeout_s)
        ran, finish = await self._run(call, timeout_s, hook)
        assert finish.version is not None
        self.was_filled = self.was_filled or finish.changed
        if not finish.changed:
            self._promise.check_kept()
        return finish.version, ran.times.report_of(finish, started, clock.now())

    async def _run(self, call: Call, timeout_s: float, hook: HookRequest | None = None) -> tuple[_Call, Finish]:
        """Begin a call and wait for its end; cancelling ends it as soon as may be, and leaves nothing running."""
        self._check_last_ended()
        if self._has_ended and self.member.state is not HandleState.CLOSED:  # that one says so itself
            raise StateError(f"{self.member.shard.title} was given up; register again")
        actions = self.member.begin(call, timeout_s, clock.now())
        self._promise.call_begins()
        running = self._call = _Call(anyio.Event(), hook=hook)
        self._filler.times = running.times
        self.apply(actions)
        try:
            await running.ended.wait()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                error = StateError("the call was cancelled by its caller")  # other ranks and the log see it
                self.apply(self.member.cancel(error, clock.now()))
                await running.ended.wait()
            raise
        finish = running.result
        assert finish is not None
        if finish.error is not None:
            raise finish.error
        return running, finish

    @property
    def is_busy(self) -> bool:
        """Whether a call runs."""
        return self._call is not None and self._call.result is None

    async def check_idle(self) -> None:
        """Raise StateError if the memory is not the caller's to write: a call runs on it, or it is closed."""
        self._check_last_ended()
        if self.member.state is HandleState.CLOSED:
            raise StateError(f"{self.member.shard.title} is closed; register again")
        if self.member.is_letting_go:
            text = f"{self.member.shard.title}: what it held was ordered out, and is still being read; try again"
            raise StateError(text, retryable=True)

    async def tell_loss(self) -> None:
        """Raise LeaseLost, once, if the coordinator has lost its state; StateError while the memory is still read."""
        await self.check_idle()
        self.member.tell_loss()

    def _check_last_ended(self) -> None:
        """A call is over when its fences are: the member is done with it earlier."""
        if self.is_busy:
            text = f"{self.member.shard.title}: a call is still running on this handle; one call at a time"
            raise StateError(text, retryable=True)

    async def end_call(self, error: Exception) -> None:
        """End the running call, if there is one, with `error`; returns when nothing of it runs any more."""
        if self._call is not None and self._call.result is None:
            self.cancel(error)
            await self._call.ended.wait()

    def cancel(self, error: Exception) -> None:
        """End the running call, if there is one, with `error`, as soon as may be."""
        self.apply(self.member.cancel(error, clock.now()))

    def end_prefetch(self) -> None:
        """Of a host copy: an update has taken what it has got so far."""
        self.apply(self.member.end_prefetch(clock.now()))

    def hook_returned(self, error: Exception | None) -> None:
        if self._call is not None and self._call.times.hooked is not None:
            self._call.times.hook_s = clock.now() - self._call.times.hooked
        self.apply(self.member.hook_returned(error, clock.now()))

    async def look(self, question: DigestAgain | TellDigests, limiter: anyio.CapacityLimiter) -> None:
        """Answer what can be told by looking at the memory."""
        if isinstance(question, DigestAgain):
            await self._digest_again(question, limiter)
        else:
            await self._tell_digests(question, limiter)

    async def _digest_again(self, question: DigestAgain, limiter: anyio.CapacityLimiter) -> None:
        """Has this chunk changed since its digest was made (R8)? The answer goes to the coordinator."""
        changed, digest, error = await self._promise.look_again(question, limiter)
        origin = self._owner.origin(self._registration, question.generation, question.chunk)
        self.apply(
            self.member.digested_again(
                question.inquiry, question.generation, changed, error, clock.now(), digest=digest, origin=origin
            )
        )

    def tell_made(self, *, if_all: bool) -> bool:
        """Say which digests were made of what is published (`if_all`: once it is all). Whether nothing is left to say."""
        content = self.member.content
        if content is None or not content.published or self.member.state not in (HandleState.READY, HandleState.DRAINING):
            return True
        known, are_all = self._owner.take_made(self._registration, if_all=if_all)
        if known:
            self._tell(
                content.generation, content.manifest.chunk_count, WIDTHS[content.manifest.digest], known, last=are_all
            )
        return are_all

    async def _tell_digests(self, question: TellDigests, limiter: anyio.CapacityLimiter) -> None:
        """Say which digests the chunks of this memory have, or of what is staged for it (R8)."""
        content, generation = self.member.content, question.generation
        if content is not None and content.published and content.generation == generation and not question.origin:
            make = partial(self._owner.make_digests, self._registration, generation, ContentId(content.version.content_id))
            await anyio.to_thread.run_sync(make, limiter=limiter)
        for target in (self._registration, RegistrationId(staging_of(self._registration))):
            listed = self._owner.listed(target, generation)
            if listed is not None and listed[0]:
                width, digests = listed
                chunks = (
                    self._owner.read_from(target, generation, question.origin) if question.origin else range(len(digests))
                )
                known = [(chunk, digest) for chunk in chunks if (digest := digests[chunk]) is not None]
                self._tell(generation, len(digests), width, known, last=True)
                return
        self._tell(generation, 0, 0, [], last=True)

    def _tell(self, generation: int, chunks: int, width: int, known: list[tuple[int, int]], *, last: bool) -> None:
        page_bytes = self._page_bytes
        for message in tell(self._registration, generation, chunks, width, known, last=last, page_bytes=page_bytes):
            self._line.say(message)

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
            with self._scope:
                async with anyio.create_task_group() as self._tasks:
                    await self._obey()
        finally:
            self._has_ended = True
            with anyio.CancelScope(shield=True):
                await self._let_go()
            memory: TensorState = "torn" if self.member.state is HandleState.FILLING else "intact"
            self._end_call(Finish(error=StateError("the hub was closed while the call was running", memory=memory)))

    async def _obey(self) -> None:
        while True:
            await self._todo_wanted.wait()
            self._todo_wanted = anyio.Event()
            while self._todo:
                await self._do(self._todo.popleft())
            if self.member.state is HandleState.CLOSED and self.member.running is None:
                self.stop()

    def stop(self) -> None:
        """Let `run` end, also before it has begun: the handle is closed, or was never registered."""
        self._scope.cancel()

    def follow(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something beside this handle, as long as it runs."""
        self._tasks.start_soon(task)

    async def _do(self, action: Action) -> None:
        match action:
            case Say():
                self._line.say(action.message)
            case OpenMemory():
                await self._open(action)
            case ReopenMemory():
                if self._places.unopened is None:
                    self._owner.reopen(self._registration, action.generation)
            case Fence():
                await self._fence(action)
            case CallHook():
                assert self._call is not None
                assert self._call.hook is not None
                self._call.times.hooked = clock.now() if self._call.times.prepared else None
                self._call.hook(action.version)
            case CompareDigests():
                await self._filler.compare(action)
            case StartPull() | CopyLocally():
                self._filler.begin(action, self._tasks)
            case AddPullSource() | DropPullSource():
                self._filler.change_source(action)
            case EndPrefetch():
                self._room.end_prefetch(self._registration)
            case FreePrefetch():
                self._room.free_prefetch(self._registration)
            case FreeStaging():
                await self._places.free_staging()
            case FreeMemory():
                await self._places.free()
            case StopPull():
                await self._filler.stop()
                self.apply(self.member.pull_stopped(clock.now()))
            case Registered():
                self._answered(None)
            case RegistrationFailed():
                self._answered(action.error)
            case Finish():
                self._end_call(action)
            case _:
                assert_never(action)

    def _answered(self, refusal: Exception | None) -> None:
        self.registration_error = refusal or self.registration_error
        self.registered.set()
        self._room.answered(self._registration, refusal)

    def _end_call(self, finish: Finish) -> None:
        if self._call is not None and self._call.result is None:
            self._call.result = finish
            self._call.ended.set()
            self.call_ended()

    def receive(self, message: ToRank) -> None:
        """The coordinator has said this of it."""
        bound = isinstance(message, Start | Outcome)  # the running call, to a version
        if bound and self._call is not None and self._call.times.bound is None:
            self._call.times.bound = clock.now()
        self.apply(self.member.receive(message, clock.now()))

    async def _open(self, action: OpenMemory) -> None:
        chunks = await self._places.prepare(action.manifest)
        if chunks is None:
            return
        content_id, digests = ContentId(action.content_id), self._digests if action.complete else None
        if not action.complete:
            self.memory.count_write()  # before the first byte, for what autograd has kept of those that go
        self._promise.made()
        if action.complete:  # behind `made`: what is written while it is packed breaks the promise, too
            await self._places.pack(action.manifest)
        self._owner.open(
            self._registration,
            action.generation,
            content_id,
            chunks,
            complete=action.complete,
            digests=digests,
            tells=action.complete and bool(chunks.width),
        )

    async def _fence(self, action: Fence) -> None:
        """Fence the memory, or give up at the deadline; without one, try until it stands."""
        while True:
            try:
                await self._owner.fence_async(self._registration, min(FENCE_TRY_S, self._fence_left_s(action)))
                break
            except DrainTimeout as error:
                log.warning("fence_failed", registration=self._registration, reason=str(error))
                if not self._fence_left_s(action):
                    self.apply(self.member.fence_failed(action.generation, clock.now()))
                    return
            await anyio.lowlevel.checkpoint()
        if self.member.state is HandleState.DRAINING:  # else it is overwritten next, or was never published
            self._promise.taken_back()
        self.tell_made(if_all=False)  # what nobody can ask for any more
        self.apply(self.member.fenced(action.generation, clock.now()))

    def _fence_left_s(self, action: Fence) -> float:
        """Until it is given up, by the action or because its call was cancelled since."""
        if action.until is None:
            return math.inf
        until = self.member.fence_until
        return max(0.0, (action.until if until is None else min(action.until, until)) - clock.now())

    async def _let_go(self) -> None:
        """The handle ends. What is still being read then stays closed, and is kept until its lanes have ended."""
        try:
            await self._owner.fence_async(self._registration, FENCE_TRY_S)
        except DrainTimeout as error:
            log.error("memory_still_read", registration=self._registration, reason=str(error))
        else:
            # Of many gigabytes, what RDMA devices have registered takes long to be given back.
            await run_in_thread(self._owner.forget, self._registration)
            await self._places.free()
        await self._places.free_staging()
