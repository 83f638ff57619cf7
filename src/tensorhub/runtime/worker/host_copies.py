"""The shell of a worker's host copies: does what `worker.host_copies` wants, and wakes callers when
their request is over.

Responsible for the copies' handles and their memory, and for waking the machine at its deadlines.
Decides nothing. Lives in the worker runtime's loop.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Protocol, assert_never

import anyio
import anyio.abc

from tensorhub.errors import StateError, TensorHubError
from tensorhub.logs import get_logger
from tensorhub.memory.host import HostMemory
from tensorhub.memory.regions import Memory
from tensorhub.messages import DropCopy, MakeCopy
from tensorhub.runtime import clock
from tensorhub.runtime.worker.calling import CallersHandle
from tensorhub.runtime.worker.coordinator_client import CoordinatorClient, MessageSink
from tensorhub.runtime.worker.handle import Handle
from tensorhub.runtime.worker.mapped_memory import pinning
from tensorhub.runtime.worker.ports import CallersCopies
from tensorhub.types import FetchReport, Options, Purpose
from tensorhub.worker.budget import Budget
from tensorhub.worker.calls import Say
from tensorhub.worker.host_copies import HostCopies
from tensorhub.worker.host_copy_actions import (
    AskManifest,
    BeginCall,
    CancelCall,
    CopyAction,
    DropHandle,
    FinishRequest,
    LogEvent,
    StartHandle,
    Unload,
)
from tensorhub.worker.member_memory import Content
from tensorhub.worker.procedures import Steps
from tensorhub.worker.registration_session import Shard
from tensorhub.worker.router import Router

log = get_logger("tensorhub.worker")


class HostingWorker(Protocol):
    """What the copies need of their worker."""

    options: Options
    coordinator: CoordinatorClient

    @property
    def link(self) -> MessageSink: ...

    @property
    def router(self) -> Router[Handle]: ...

    def callers(self) -> Iterable[Handle]:
        """The handles of its callers that are not closed."""

    def new_registration(self) -> str: ...

    def start_handle(
        self, shard: Shard, memory: Memory, adopted: Content | None = None
    ) -> Handle: ...

    def drop_handle(self, handle: CallersHandle) -> None: ...


@dataclass(slots=True)
class _Request:
    """What a caller waits for."""

    ended: anyio.Event = field(default_factory=anyio.Event)
    report: FetchReport | None = None
    error: Exception | None = None


class HostCopyRunner(CallersCopies):
    """`tasks`: the worker's, while it runs. Its handles have this as their room, see `HostRoom`."""

    def __init__(self, worker: HostingWorker) -> None:
        self._worker = worker
        options = worker.options
        self.machine = HostCopies(
            options.host_memory_bytes, options.op_timeout_s, lambda: secrets.token_hex(12)
        )
        self.tasks: anyio.abc.TaskGroup | None = None
        self.on_unload: Callable[[Unload], None] = lambda action: None  # of an archived version
        # calls whose tasks have not begun, by number: the errors with which they are to end
        self._unbegun: dict[int, Exception | None] = {}
        self._asked: dict[int, _Request] = {}  # by request
        self._requests = itertools.count(1)
        self._todo: deque[CopyAction] = deque()
        self._is_busy = False
        self._moved = anyio.Event()  # its deadline may be another

    def __repr__(self) -> str:
        return f"<HostCopyRunner of {self.machine!r}>"

    @property
    def budget(self) -> Budget:
        return self.machine.budget

    # ----------------------------------------------------------------------------------------------
    # what is asked for

    async def make_room(self, ident: str, purpose: Purpose, nbytes: int) -> None:
        await self._ask(self.machine.make_room(ident, purpose, nbytes))

    async def _ask(self, steps: Steps[Any]) -> FetchReport | None:
        request, asked = next(self._requests), _Request()
        self._asked[request] = asked
        self._apply(self.machine.begin(steps, clock.now(), request))
        try:
            await asked.ended.wait()
        except anyio.get_cancelled_exc_class():
            with anyio.CancelScope(shield=True):
                self._apply(self.machine.cancel(request, clock.now()))
                await asked.ended.wait()
            raise
        finally:
            del self._asked[request]
        if asked.error is not None:
            raise asked.error
        return asked.report

    # ----------------------------------------------------------------------------------------------
    # what is heard of

    def began(self, handle: Handle) -> None:
        """The worker has a new handle."""
        self.machine.began(handle.member)

    def ended(self, registration: str) -> None:
        """A handle is no more."""
        self._apply(self.machine.ended(registration, clock.now()))

    async def remove(self, ident: str, timeout_s: float) -> None:
        """End the copy of an archived version."""
        await self._ask(self.machine.remove(ident, timeout_s))

    def unloaded(self, ident: str) -> None:
        """What was loaded of an archived version was given back."""
        self._apply(self.machine.unloaded(ident, clock.now()))

    def freed(self, ident: str) -> None:
        self._apply(self.machine.freed(ident, clock.now()))

    def end_prefetch(self, registration: str, *, frees: bool) -> None:
        self._apply(self.machine.end_prefetch(registration, clock.now(), frees=frees))

    def ordered(self, order: MakeCopy) -> None:
        """The coordinator wants a copy."""
        self._apply(self.machine.ordered(order, clock.now()))

    def dropped(self, order: DropCopy) -> None:
        """The coordinator needs it no more."""
        self._apply(self.machine.dropped(order, clock.now()))

    async def keep_time(self) -> None:
        """Wake the machine at its deadlines."""
        while True:
            self._moved = anyio.Event()
            due = self.machine.next_deadline()
            with anyio.move_on_after(inf if due is None else max(0.0, due - clock.now())):
                await self._moved.wait()
            if due is not None and due <= clock.now():
                self._apply(self.machine.tick(clock.now()))

    def end(self) -> None:
        """The worker's tasks have ended: fail the requests that are still waited for."""
        self.tasks = None
        for asked in self._asked.values():
            asked.error = asked.error or StateError("the hub was closed while the call was running")
            asked.ended.set()

    # ----------------------------------------------------------------------------------------------
    # actions

    def _apply(self, actions: list[CopyAction]) -> None:
        """Carry them out, in order; what follows of one comes behind those that are there
        already.
        """
        self._todo.extend(actions)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._todo:
                self._do(self._todo.popleft())
        finally:
            self._is_busy = False
        self._moved.set()

    def _do(self, action: CopyAction) -> None:
        handles = self._worker.router.handles
        match action:
            case Say():
                self._worker.link.say(action.message)
            case StartHandle():
                self._start(action.shard)
            case DropHandle():
                if action.registration in handles:
                    self._worker.drop_handle(handles[action.registration])
            case BeginCall():
                self._begin(action)
            case CancelCall():
                if action.number in self._unbegun:
                    self._unbegun[action.number] = action.error
                elif action.registration in handles:
                    handles[action.registration].cancel(action.error)
            case AskManifest():
                if self.tasks is not None:
                    self.tasks.start_soon(self._ask_manifest, action)
            case Unload():
                self.on_unload(action)
            case LogEvent():
                tell = log.warning if action.is_warning else log.info
                tell(action.event, registration=action.registration, reason=action.reason)
            case FinishRequest():
                asked = self._asked.get(action.request)
                if asked is not None:
                    asked.report, asked.error = action.report, action.error
                    asked.ended.set()
            case _:
                assert_never(action)

    def _start(self, shard: Shard) -> None:
        devices = [
            handle.memory.device
            for handle in self._worker.callers()
            if handle.memory.device is not None
        ]
        reserve = partial(self.machine.take, shard.registration, shard.purpose)
        handle = self._worker.start_handle(
            shard, HostMemory(reserve, pinning(devices[0] if devices else None))
        )
        if shard.purpose is Purpose.SEED and self.on_seeding is not None:
            handle.show_progress(partial(self.on_seeding, shard.model, shard.number))

    def _begin(self, action: BeginCall) -> None:
        handle = self._worker.router.handles.get(action.registration)
        if self.tasks is None or handle is None:
            error = StateError("the hub was closed while the call was running")
            self._apply(self.machine.call_ended(action.number, clock.now(), error=error))
            return
        self._unbegun[action.number] = None
        self.tasks.start_soon(self._run_call, action, handle)

    async def _run_call(self, action: BeginCall, handle: Handle) -> None:
        report, error = None, self._unbegun.pop(action.number)
        try:
            if error is None:
                report = await handle.run_call(action.call, action.timeout_s)
        except Exception as raised:
            error = raised
        except BaseException:
            error = StateError("the hub was closed while the call was running")
            raise
        finally:
            self._apply(
                self.machine.call_ended(action.number, clock.now(), result=report, error=error)
            )

    async def _ask_manifest(self, ask: AskManifest) -> None:
        encoded, error = None, None
        try:
            encoded = await self._worker.coordinator.manifest(ask.version, ask.shard, ask.timeout_s)
        except TensorHubError as raised:
            error = raised
        self._apply(self.machine.call_ended(ask.number, clock.now(), result=encoded, error=error))
