"""One registration's shell: carries out what its `worker.Member` wants, one action after the other.

Responsible for carrying out the actions of `worker.interpreter`, of which each ends before the next
begins, and for waking the caller when the call is over. Not responsible for filling the memory
(`fill`). Decides nothing. Lives in the worker runtime's loop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, assert_never

import anyio
import anyio.abc
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread

from tensorhub.errors import DrainTimeout, StateError, TensorHubError, text_of
from tensorhub.layouts.reading import ReshardedManifest
from tensorhub.logs import get_logger
from tensorhub.memory.on_demand import OnDemandMemory
from tensorhub.memory.regions import Memory
from tensorhub.messages import (
    DIGESTS_BYTES_MAX,
    DigestAgain,
    Fill,
    Outcome,
    Start,
    TellDigests,
    Took,
    ToRank,
)
from tensorhub.runtime import clock
from tensorhub.runtime.data.channels import Channels
from tensorhub.runtime.data.delta_making import begin_deltas, make_deltas
from tensorhub.runtime.data.serving import SharedOwner
from tensorhub.runtime.reports import CallTimes
from tensorhub.runtime.threads import run_aside, run_in_thread
from tensorhub.runtime.worker.calling import CallersHandle, HookRequest, ProgressListener, Report
from tensorhub.runtime.worker.coordinator_client import MessageSink
from tensorhub.runtime.worker.fill import Filler
from tensorhub.runtime.worker.mapped_memory import HostRoom, MappedMemory
from tensorhub.runtime.worker.stream_sync import StreamSync
from tensorhub.runtime.worker.writes import Writes
from tensorhub.types import (
    ContentId,
    FetchReport,
    HandleState,
    OpKind,
    Purpose,
    RegistrationId,
    VersionInfo,
)
from tensorhub.worker import calls
from tensorhub.worker.coverage import Found, check
from tensorhub.worker.interpreter import Interpreter
from tensorhub.worker.member import Member
from tensorhub.worker.planning import Planned, plan

# of a fence, before it is looked whether it is still wanted; readers have half of it to take their
# bytes
FENCE_TRY_S = 2.0

log = get_logger("tensorhub.worker")


@dataclass(slots=True)
class _Call:
    """The running call's future, and its course."""

    ended: anyio.Event
    started: float
    times: CallTimes = field(default_factory=CallTimes)
    hook: HookRequest | None = None
    result: calls.Finish | None = None


class Handle(CallersHandle):
    """One registered memory and its calls. `run` must be running for anything to happen."""

    def __init__(
        self,
        member: Member,
        memory: Memory,
        owner: SharedOwner,
        link: MessageSink,
        channels: Channels,
        room: HostRoom,
        page_bytes: int = DIGESTS_BYTES_MAX,  # of digests in one message
    ) -> None:
        self._writes = Writes(member, memory, owner)
        super().__init__(
            Interpreter(member, self._writes.written, page_bytes), StreamSync(memory.device)
        )
        self.memory = memory
        self._registration = RegistrationId(member.shard.registration)
        self._owner = owner
        self._link = link
        self._room = room
        self._mapped = MappedMemory(memory, self._registration, owner, room)
        self._filler = Filler(
            member,
            memory,
            owner,
            self._mapped,
            link,
            channels,
            self.apply,
            self.stream_sync,
            self._writes,
        )
        self._todo_wanted = anyio.Event()
        self._making_room = anyio.CancelScope()
        self._call: _Call | None = None
        # of memory whose bytes must have these digests, made before a publish
        self._digests: Sequence[int] | None = None
        self._tasks: anyio.abc.TaskGroup
        self._scope = anyio.CancelScope()  # of `run`
        self.beside = anyio.CapacityLimiter(1)  # of early digests, which may all wait
        self.deadline_moved: Callable[[], None] = lambda: None
        # a call has ended; what makes the message about its time is called once that hurries less
        self.call_took: Callable[[Callable[[], Took | None], int], None] = lambda told, retries: (
            None
        )
        self.first_fill_begins: Callable[[Handle, OpKind, float], None] = (
            lambda handle, kind, timeout_s: None
        )

    def __repr__(self) -> str:
        return f"<Handle of {self.member!r}>"

    # ----------------------------------------------------------------------------------------------
    # calls

    async def publish(self, version: int, timeout_s: float) -> VersionInfo:
        info = await super().publish(version, timeout_s)
        content = self.member.content
        if content is not None and content.version == info:
            name = ContentId(info.content_id)
            self._owner.deltas.named(self._registration, content.generation, name)
        self._owner.on_made(self._registration)  # they may all have been made beforehand
        self._digest_early()
        return info

    def _digest_early(self) -> None:
        """Have the digests of the new publication made in the background: bytes that are written
        later have other digests.
        """
        if not self.interpreter.is_given_up:
            self._tasks.start_soon(self._make_digests_beside)

    async def _make_digests_beside(self) -> None:
        make = self._making(bytes_max=1, is_over=lambda: self.interpreter.is_given_up)
        content = self.member.content
        if make is None or content is None:
            return
        of = self._registration, content.generation, ContentId(content.version.content_id)

        def makes() -> None:
            try:
                make()
                make_deltas(self._owner, *of, is_over=lambda: self.interpreter.is_given_up)
            except StateError as error:  # a GPU's
                log.warning(
                    "digests_not_made_early", registration=self._registration, reason=str(error)
                )

        # no thread can be had: each is made when its chunk is sent
        with contextlib.suppress(RuntimeError):
            await anyio.to_thread.run_sync(run_aside, makes, limiter=self.beside)

    def begin_deltas(self, lend: Callable[[str, int], bool]) -> None:
        """A reader wants deltas: keep them from now on, if there is room."""
        content = self.member.content
        if content is None:  # it is being written already
            self._owner.deltas.ask_again(self._registration)
            return
        try:
            nbytes = begin_deltas(
                self._owner, self._registration, lend, is_publisher=content.published
            )
        except (StateError, OSError) as error:
            log.warning("deltas_not_kept", registration=self._registration, reason=str(error))
            return
        if nbytes:
            log.warning(
                "deltas_not_kept",
                registration=self._registration,
                reason=f"they need {nbytes} bytes of Options.host_memory_bytes: readers over slow "
                "links read whole versions",
            )
        elif content.published:
            self._digest_early()

    async def _before_publish(self, timeout_s: float) -> None:
        await self.stream_sync.done(timeout_s)
        manifest = self.member.shard.manifest
        holds_nothing = self.member.running is None and self.member.state is HandleState.EMPTY
        if manifest is not None and holds_nothing:
            self._mapped.map_to_publish(manifest)
        if manifest is not None and self.memory.digests_first:
            make = partial(self.memory.digests, manifest, anyio.from_thread.check_cancelled)
            self._digests = await anyio.to_thread.run_sync(make)

    def show_progress(self, listener: ProgressListener | None) -> None:
        self._filler.progress = listener

    async def run_call(self, call: calls.Call, timeout_s: float) -> FetchReport | None:
        """A call that `worker.host_copies` makes; the report of a fill."""
        if isinstance(call, calls.CloseCall):
            await self.close(timeout_s, abandon=call.abandon)
            return None
        _, report = await self._run(call, timeout_s)
        return report() if isinstance(call, calls.FillCall) else None

    async def _carry_out(
        self, call: calls.Call, timeout_s: float, hook: HookRequest | None
    ) -> tuple[calls.Finish, Report]:
        started, is_first = clock.now(), not self.was_filled and self.member.version is None
        actions = self.interpreter.begin(call, timeout_s, started)
        if isinstance(call, calls.FillCall) and is_first and not isinstance(call.selector, int):
            self.first_fill_begins(self, call.kind, timeout_s)
        running = self._call = _Call(anyio.Event(), started, hook=hook)
        self._filler.times = running.times
        self.apply(actions)
        try:
            await running.ended.wait()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                self.apply(self.interpreter.cancelled(clock.now()))
                await running.ended.wait()
            raise
        finish = running.result
        assert finish is not None
        return finish, lambda: running.times.report_of(finish, started, clock.now())

    async def end_call(self, error: Exception) -> None:
        """End the running call, if there is one, with `error`; returns when nothing of it runs any
        more.
        """
        if self._call is not None and self.interpreter.is_busy:
            self.cancel(error)
            await self._call.ended.wait()

    def cancel(self, error: Exception) -> None:
        """End the running call, if there is one, with `error`, as soon as may be."""
        self.apply(self.member.cancel(error, clock.now()))

    async def changed_tensors(self) -> tuple[str, ...]:
        return await self._writes.changed()

    def hook_returned(self, error: Exception | None) -> None:
        if self._call is not None and self._call.times.hooked is not None:
            self._note("hook", self._call.times.hooked)
        self.apply(self.member.hook_returned(error, clock.now()))

    async def look(
        self, question: DigestAgain | TellDigests, limiter: anyio.CapacityLimiter
    ) -> None:
        """Answer what can be told by looking at the memory."""
        if isinstance(question, DigestAgain):
            await self._digest_again(question, limiter)
        else:
            await self._tell_digests(question, limiter)

    async def _digest_again(self, question: DigestAgain, limiter: anyio.CapacityLimiter) -> None:
        """Has this chunk changed since its digest was made (R8)? The answer goes to the
        coordinator.
        """
        asked_about = self.interpreter.asked_about(question)
        changed, digest = await self._writes.look_again(question.generation, *asked_about, limiter)
        broken = self._writes.broken() if changed else ""
        actions, error = self.interpreter.digested_again(
            question, changed, digest, self._owner, clock.now(), broken
        )
        if changed:
            log.warning("held_memory_changed", registration=self._registration, reason=str(error))
        self.apply(actions)

    def tell_made(self, *, if_all: bool) -> bool:
        """Report the digests of the publication that were made (`if_all`: once all are made).
        Returns whether nothing is left to report.

        Nothing is reported of memory that was written: torch counts a write once it is done, so a
        digest may include it.
        """
        if self._suspects_itself():
            return True
        said, is_all = self.interpreter.tell_made(self._owner, if_all=if_all)
        for message in said:
            self._link.say(message)
        return is_all

    def _suspects_itself(self) -> bool:
        """Whether the published memory was seen to be written, replaced or freed. Then its chunks
        are examined.
        """
        content = self.member.content
        return (
            content is not None
            and content.published
            and not self._owner.look(self._registration, content.generation)
        )

    async def make_digests(self, limiter: anyio.CapacityLimiter, selection: str = "") -> None:
        """Make the missing digests of the publication."""
        make = self._making(selection=selection)
        if make is not None:
            await anyio.to_thread.run_sync(make, limiter=limiter)

    def _making(self, **how: Any) -> Callable[[], None] | None:
        """A function that makes the digests of the publication; None if nothing is published, or
        without digests.
        """
        content = self.member.content
        if content is None or not content.published or content.manifest.digest == "none":
            return None
        content_id = ContentId(content.version.content_id)
        return partial(
            self._owner.make_digests, self._registration, content.generation, content_id, **how
        )

    async def _tell_digests(self, question: TellDigests, limiter: anyio.CapacityLimiter) -> None:
        """Report the digests of this memory's chunks, or of the memory of a staged update (R8). A
        publisher reports none of a selection once the budget of votes is used up.
        """
        generation, voted = question.generation, ""
        if self.interpreter.must_make(question):
            voted = question.selection
            await self.make_digests(limiter, voted)
            # see `tell_made`; the coordinator hears that it has changed
            if self._suspects_itself():
                return

        def listed(
            target: RegistrationId, selection: str
        ) -> tuple[int, Sequence[int | None]] | None:
            return self._owner.listed(target, generation, selection) if may else None

        with self._owner.vote(self._registration, voted) as may:
            for message in self.interpreter.tell_digests(question, listed):
                self._link.say(message)

    # ----------------------------------------------------------------------------------------------
    # actions

    def apply(self, actions: list[calls.Action]) -> None:
        """Queue what the member wants done. `Say` and `Finish` keep their place behind fences and
        openings.
        """
        self.interpreter.add(actions)
        if actions:
            self._todo_wanted.set()
        self.deadline_moved()

    async def run(self) -> None:
        """Carry out actions until the registration is no more; then no read of this memory runs any
        more.
        """
        interpreter = self.interpreter
        try:
            with self._scope:
                async with anyio.create_task_group() as self._tasks:
                    await self._obey(lambda: interpreter.is_given_up)
                    self._tasks.cancel_scope.cancel()
        except BaseException:
            self.end()
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self._obey(lambda: interpreter.is_gone)
            self._filler.let_go()

    async def _obey(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            action = self.interpreter.next(clock.now())
            if action is not None:
                await self._do(action)
                self.deadline_moved()
            else:
                await self._todo_wanted.wait()
                self._todo_wanted = anyio.Event()

    def give_up(self, gives_up_at: float = inf) -> None:
        """Let `run` end, also before it has begun; see `Interpreter.give_up`."""
        for said in self.interpreter.give_up(clock.now(), gives_up_at):
            self._link.say(said.message)
        self._todo_wanted.set()
        self._scope.cancel()

    def end(self) -> None:
        """End with the worker: as `give_up`, but soon, also if reads still run."""
        self.give_up(clock.now() + FENCE_TRY_S)

    def follow(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run something beside this handle, as long as it runs."""
        self._tasks.start_soon(task)

    async def _do(self, action: calls.Action) -> None:
        match action:
            case calls.Say():
                if isinstance(action.message, Fill) and self._call is not None:
                    self._call.times.key = action.message.key
                self._link.say(action.message)
            case calls.OpenGeneration():
                await self._open(action)
            case calls.ReopenGeneration():
                self._owner.reopen(self._registration, action.generation)
            case calls.Fence():
                began = clock.now()
                await self._fence(action)
                self._note("fence", began)
            case calls.CallHook():
                assert self._call is not None
                assert self._call.hook is not None
                self._call.times.hooked = clock.now()
                self._call.hook(action.version)
            case calls.PlanReading():
                self._tasks.start_soon(self._plan, action)
            case calls.CheckRanks():
                self._tasks.start_soon(self._check_ranks, action)
            case calls.CompareDigests():
                await self._filler.compare(action)
            case calls.StartPull() | calls.CopyLocally():
                self._filler.begin(action, self._tasks)
            case calls.AddPullSource() | calls.DropPullSource():
                self._filler.change_source(action)
            case calls.EndPrefetch():
                self._room.end_prefetch(self._registration, frees=action.frees)
            case calls.MakeRoom():
                self._making_room = anyio.CancelScope()
                self._tasks.start_soon(self._make_room, action.nbytes, self._making_room)
            case calls.CancelRoom():
                self._making_room.cancel()
            case calls.FreeStaging():
                await self._mapped.free_staging()
            case calls.FreeMemory():
                # Of many gigabytes, what RDMA devices have registered takes long to be given back.
                await run_in_thread(self._owner.forget, self._registration)
                await self._mapped.free()
            case calls.StopPull():
                await self._filler.stop()
                self.apply(self.member.pull_stopped(clock.now()))
            case calls.RegistrationConfirmed():
                self._answered(None)
            case calls.RegistrationFailed():
                self._answered(action.error)
            case calls.Finish():
                self._end_call(action)
            case _:
                assert_never(action)

    async def _plan(self, action: calls.PlanReading) -> None:
        """In a thread: of a large model it takes seconds."""
        made: Planned | TensorHubError
        try:
            made = await anyio.to_thread.run_sync(self._planned, action)
        except Exception as error:
            log.exception("reading_not_planned", registration=self._registration)
            made = StateError(
                f"{self.member.shard.title}: what to read could not be planned: {text_of(error)}"
            )
        self.apply(self.member.planned(action.number, made, clock.now()))

    async def _check_ranks(self, action: calls.CheckRanks) -> None:
        """As `_plan`."""
        found: Found | TensorHubError
        digest = partial(self._owner.digests_of_shares, self._registration, action.generation)
        try:
            found = await anyio.to_thread.run_sync(check, action, digest)
        except Exception as failure:
            log.exception("ranks_not_checked", registration=self._registration)
            found = StateError(
                f"{self.member.shard.title}: what its ranks read or publish could not be checked: "
                f"{text_of(failure)}"
            )
        self.apply(self.member.ranks_checked(action.number, found, clock.now()))

    def _planned(self, action: calls.PlanReading) -> Planned | TensorHubError:
        started, made = time.perf_counter(), plan(action)
        if isinstance(made, Planned):
            reading, seconds = made.reading, round(time.perf_counter() - started, 3)
            counts = {
                "shards": len(reading.parts),
                "nbytes": reading.nbytes,
                "chunks": reading.chunk_count,
            }
            counts["cells"], counts["runs"] = (
                sum([each[at] for each in reading.reading.counts]) for at in (0, 1)
            )
            log.info("reading_planned", registration=self._registration, seconds=seconds, **counts)
        return made

    def _answered(self, refusal: Exception | None) -> None:
        self.registration_error = refusal or self.registration_error
        self.registered.set()

    def _end_call(self, finish: calls.Finish) -> None:
        if self._call is not None and self.interpreter.is_busy:
            self.interpreter.finished(finish)
            self._call.result = finish
            self._call.ended.set()
            self.call_ended()
            rank, times = self.member.shard.rank, self._call.times
            told = partial(times.told, rank, self._call.started, clock.now())
            self.call_took(told, times.pull.retries if times.pull is not None else 0)

    def receive(self, message: ToRank) -> None:
        """The coordinator has said this of it."""
        bound = isinstance(message, Start | Outcome)  # the running call, to a version
        if bound and self._call is not None and self._call.times.bound is None:
            self._call.times.bound = clock.now()
        self.apply(self.member.receive(message, clock.now()))

    def _note(self, name: str, began: float) -> None:
        """Something of the running call has ended; see `CallTimes.note`."""
        if self._call is not None:
            self._call.times.note(name, began, clock.now())

    async def _make_room(self, nbytes: int, scope: anyio.CancelScope) -> None:
        refusal, began = None, clock.now()
        try:
            with scope:
                await self._room.make_room(
                    calls.staging_of(self._registration), Purpose.USE, nbytes
                )
        except TensorHubError as error:
            refusal = error
        finally:
            self._note("room", began)
            self.apply(self.member.room_ended(refusal, clock.now()))

    async def _open(self, action: calls.OpenGeneration) -> None:
        try:
            if not action.complete:
                # another registration may have promised it since the call began
                self.memory.claim.check_write()
            chunks = await self._mapped.prepare(action.manifest)
        except TensorHubError as error:
            self.interpreter.not_opened(error)
            return
        content_id, digests = (
            ContentId(action.content_id),
            self._digests if action.complete else None,
        )
        loader = None
        if isinstance(self.memory, OnDemandMemory):
            loader = self.memory.loader
            digests = self.memory.recall(action.content_id, action.manifest)
        if not action.complete:
            # before the first byte, for what autograd has kept of those that go
            self.memory.count_write()
        self._writes.made(action.manifest)
        self.interpreter.guard.made()
        # Behind `made`: what is written while it is packed breaks the promise, too. In another
        # layout some bytes may be nobody's, and stay as they are.
        if action.complete or isinstance(action.manifest, ReshardedManifest):
            await self._mapped.pack(action.manifest)
        self._owner.open(
            self._registration,
            action.generation,
            content_id,
            chunks,
            complete=action.complete,
            digests=digests,
            tells=action.complete and bool(chunks.width),
            promise=self._writes,
            keeps_base=action.keeps_base,
            loader=loader,
        )

    async def _fence(self, action: calls.Fence) -> None:
        """Fence the memory, or give up at the deadline; without one, try until it stands."""
        while True:
            try:
                await self._owner.fence_async(
                    self._registration, min(FENCE_TRY_S, self._left_s(action))
                )
                break
            except DrainTimeout as error:
                if not self._left_s(action):
                    log.warning("fence_failed", registration=self._registration, reason=str(error))
                    self.interpreter.fence_failed(action, clock.now())
                    return
                log.debug("fence_repeated", registration=self._registration, reason=str(error))
            await anyio.lowlevel.checkpoint()
        known = self.interpreter.guard.violation
        self.interpreter.fenced(action, self._owner, clock.now())
        violation = self.interpreter.guard.violation
        if violation is not None and violation is not known:
            log.warning(
                "published_memory_written", registration=self._registration, reason=str(violation)
            )

    def _left_s(self, fence: calls.Fence) -> float:
        """Until it is given up."""
        return max(0.0, self.interpreter.fence_until(fence) - clock.now())
