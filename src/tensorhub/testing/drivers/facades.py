"""What `tensorhub.Hub` and `tensorhub.Weights` stand on, in a simulation: the worker's shell, its
handles', and no thread.

The public classes themselves are used, so signatures, checks of arguments and the order of what
`mutate` does cannot differ. So are the runtime's `CoordinatorClient`, `Pins`, `VersionWatches` and
`Prefetcher`, which only wait and send. This module is what `runtime.worker.worker`,
`runtime.worker.handle` and `runtime.loop_thread` are to them, on simulated machines in virtual
time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from itertools import count
from typing import Any, Self, TypeVar

import anyio

from tensorhub.errors import StateError
from tensorhub.memory.regions import Memory
from tensorhub.messages import Leave
from tensorhub.runtime.ending import CLOSE_S, Parting
from tensorhub.runtime.loop_thread import AsyncMode, Job, Watching
from tensorhub.runtime.worker.calling import CallersHandle, HookRequest, Report
from tensorhub.runtime.worker.ports import CallersCopies
from tensorhub.runtime.worker.registering import CallersWorker
from tensorhub.runtime.worker.stream_sync import StreamSync
from tensorhub.testing.drivers.hosted import HostedCluster, HostedUser
from tensorhub.testing.drivers.tensor_handle import TensorHandle
from tensorhub.testing.sim.handle import CallRecord
from tensorhub.testing.sim.host_copies import CopyRequest
from tensorhub.testing.sim.worker import SimWorker
from tensorhub.types import FetchReport, Location, Options, VersionInfo
from tensorhub.worker.calls import Action, Call, Finish
from tensorhub.worker.procedures import Steps
from tensorhub.worker.registration_session import Shard
from tensorhub.worker.router import Router

T = TypeVar("T")


class Flag:
    """See `loop_thread.Waiter`; all in one loop."""

    def __init__(self) -> None:
        self._event = anyio.Event()

    def set(self) -> None:
        self._event.set()

    async def wait(self) -> None:
        await self._event.wait()
        self._event = anyio.Event()


class _Mode(AsyncMode):
    def waiter(self) -> Flag:
        return Flag()


class CallersLoop:
    """See `loop_thread.LoopThread`: calls run in the caller's own loop, which the simulation
    shares.
    """

    def __init__(
        self, cluster: HostedCluster, worker: SimWorker, close: Callable[[], Awaitable[None]]
    ) -> None:
        self.mode = _Mode()
        self._cluster = cluster
        self._worker = worker
        self._close = close
        self.has_ended = False
        self._watching: weakref.WeakSet[Watching] = weakref.WeakSet()

    def end_soon(self, parting: Parting) -> None:
        for each in list(self._watching):
            each.end()

    def dropped(self) -> None:
        """Garbage collection decides nothing here: a process without a reference goes on."""

    def tell_end(self, watching: Watching) -> None:
        self._watching.add(watching)

    async def ended(self) -> None:
        if not self.has_ended:
            with contextlib.suppress(StateError):
                await self.call(self._close)

    async def call(
        self, function: Callable[..., Awaitable[T]], *arguments: Any, undo: object = None
    ) -> T:
        await self._enter()
        return await function(*arguments)

    async def _enter(self) -> None:
        """Nothing is called while the process is stopped."""
        self.check_usable()
        self._cluster.sync()
        while self._worker.stopped_until > self._cluster.world.now:
            await anyio.sleep(self._worker.stopped_until - self._cluster.world.now)
            self.check_usable()
            self._cluster.sync()
        await anyio.lowlevel.checkpoint()
        self._cluster.sync()

    def job(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> Job[T]:
        return Job(function, arguments, self.mode.waiter())

    async def run_job(self, job: Job[T]) -> T:
        await self._enter()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(job.run)
            await job.wait()
        return job.outcome()

    def post(self, callback: Callable[[], object]) -> bool:
        if self.has_ended or self._cluster.is_over:
            return False
        self._cluster.sync()
        callback()
        return True

    def check_usable(self) -> None:
        if self.has_ended:
            raise StateError(f"tensorhub-{self._worker.name} is closed")
        self._cluster.check_running(self._worker)


class Waiting:
    """For what one worker was asked for, until it ends or the worker does."""

    def __init__(self, cluster: HostedCluster, worker: SimWorker) -> None:
        self._cluster = cluster
        self._worker = worker

    async def end_of(self, asked: CallRecord | CopyRequest, cancel: Callable[[], None]) -> None:
        """Cancelling ends it by `cancel` as soon as may be, and leaves nothing running."""
        try:
            await self._wait(asked)
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                await self.end(asked, cancel)
            raise

    async def end(self, asked: CallRecord | CopyRequest, cancel: Callable[[], None]) -> None:
        if not asked.done and self._worker.alive and not self._cluster.is_over:
            self._cluster.sync()
            cancel()
            with contextlib.suppress(StateError):  # it has crashed meanwhile
                await self._wait(asked)

    async def _wait(self, asked: CallRecord | CopyRequest) -> None:
        while not asked.done:
            self._cluster.check_running(self._worker)
            event = anyio.Event()
            asked.on_end.append(event.set)
            await event.wait()


class HandleFacade(CallersHandle):
    """What carries the calls of `Weights` out, and lets them wait for their ends: on a simulated
    handle.
    """

    def __init__(self, cluster: HostedCluster, simulated: TensorHandle, user: HostedUser) -> None:
        super().__init__(simulated.interpreter, StreamSync(None))  # the simulator has no GPUs
        self.simulated = simulated
        self._cluster = cluster
        self._tasks = user.tasks
        self._waiting = Waiting(cluster, user.worker)
        self._hook: HookRequest | None = None
        simulated.on_answer, simulated.on_hook = self._answered, self._hook_begins
        simulated.on_end = lambda: self.call_ended()

    # -- what it is told

    def _answered(self) -> None:
        self.registration_error = self.simulated.registration_error
        self.registered.set()

    def _hook_begins(self, version: VersionInfo) -> None:
        if self._hook is not None:
            self._hook(version)

    # -- its calls

    def follow(self, task: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._tasks.start_soon(task)

    async def _before_publish(self, timeout_s: float) -> None:
        """Its cells need nothing."""

    async def _carry_out(
        self, call: Call, timeout_s: float, hook: HookRequest | None
    ) -> tuple[Finish, Report]:
        handle, self._hook = self.simulated, hook
        record = handle.call(call, timeout_s)
        await self._waiting.end_of(
            record, lambda: self._apply(self.interpreter.cancelled(handle.worker.now))
        )
        return Finish(record.version, record.changed, record.error), lambda: handle.report_of(
            record
        )

    async def end_call(self, error: Exception) -> None:
        """End the running call, if there is one, with `error`."""
        last = self.simulated.last_call
        if last is not None:
            await self._waiting.end(
                last, lambda: self._apply(self.member.cancel(error, self.simulated.worker.now))
            )

    def _apply(self, actions: list[Action]) -> None:
        self.simulated.apply(actions)

    def hook_returned(self, error: Exception | None) -> None:
        handle = self.simulated
        if handle.hooks and handle.worker.alive:
            if error is not None:
                self._cluster.expect_error(error)
            self._cluster.sync()
            handle.hook_error = error
            handle.hook_returns()
            handle.hook_error = None


class HostCopiesFacade(CallersCopies):
    """Those of a simulated worker."""

    def __init__(self, cluster: HostedCluster, worker: SimWorker) -> None:
        self.machine = worker.copies.machine
        self._cluster = cluster
        self._copies = worker.copies
        self._waiting = Waiting(cluster, worker)

    async def _ask(self, steps: Steps[Any]) -> FetchReport | None:
        wanted = self._copies.want(steps)
        await self._waiting.end_of(wanted, lambda: self._copies.cancel(wanted))
        if wanted.error is not None:
            raise wanted.error
        return wanted.report


class WorkerFacade(CallersWorker):
    """What `Hub` stands on: a simulated worker. Its cells are tensors in place, and have one sort
    of digest.
    """

    copies: HostCopiesFacade

    @classmethod
    def join(
        cls,
        cluster: HostedCluster,
        name: str,
        location: Location,
        options: Options,
        *,
        prefetch: bool,
    ) -> Self:
        """That of a new process, which connects."""
        user = cluster.new_user(name, location, options)
        facade = cls(cluster, user, options, prefetch=prefetch)
        cluster.world.control.connect(user.worker)
        return facade

    def __init__(
        self, cluster: HostedCluster, user: HostedUser, options: Options, *, prefetch: bool
    ) -> None:
        self.cluster = cluster
        self.user = user
        self.worker = worker = user.worker
        self.thread = CallersLoop(cluster, worker, self.close)
        self.name = worker.name
        self.options = replace(options, digest="xxh3-64", pack_bytes=0)
        self.prefetches = prefetch
        self._groups = count(1)
        self._handles: list[HandleFacade] = []
        self.version_watches, self.coordinator, self.pins = (
            user.version_watches,
            user.coordinator,
            user.pins,
        )
        self.copies = HostCopiesFacade(cluster, worker)
        self.router: Router[Any] = worker.router

    def __repr__(self) -> str:
        return f"<simulated {self.worker!r} handles={len(self.worker.handles)}>"

    # -- registering

    def new_registration(self) -> str:
        return f"r{next(self.cluster.world.registrations)}"

    def fresh_group(self) -> str:
        return f"{self.worker.incarnation[:400]}-{next(self._groups)}"

    def start_handle(self, shard: Shard, memory: Memory) -> HandleFacade:
        handle = HandleFacade(self.cluster, self.user.register(shard, memory), self.user)
        self._handles.append(handle)
        return handle

    def drop_handle(self, handle: CallersHandle) -> None:
        if self.worker.alive and not self.cluster.is_over:
            assert isinstance(handle, HandleFacade)
            if handle.simulated in self.worker.handles:
                handle.simulated.give_up()

    # -- its end

    async def close(self) -> None:
        """Close every handle and say goodbye. Bounded in time."""
        self.copies.machine.stop()
        if self.worker.alive and not self.cluster.is_over:
            serving = [
                handle for handle in self._handles if handle.simulated in self.worker.handles
            ]
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self.close_handles(
                    [each for each in serving if each.simulated.shard.serves], Parting(CLOSE_S)
                )
            self.cluster.sync()
        if self.worker.alive and not self.cluster.is_over:
            self.worker.say(Leave("closed"))
            self.user.leave()
        self.thread.has_ended = True
        self.user.tasks.cancel()
