"""A thread with a loop of its own, and calls into it from any other loop or thread (R14).

A trainer that blocks its event loop or its main thread for minutes does not block what runs here.
Responsible for the crossing: results, exceptions, cancellation, and requests back to the caller's
own task. Not responsible for what runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import current_token

from tensorhub.errors import StateError, shortage
from tensorhub.machine import InvariantBroken
from tensorhub.runtime import ending
from tensorhub.runtime.ending import CLOSE_S, Parting
from tensorhub.runtime.wakeup import Wakeup

SIGNALS_S = 0.5  # a thread that waits looks so often for signals that did not wake it
T = TypeVar("T")
Upcall = Callable[[], Awaitable[None]]
Farewell = Callable[[Parting], Awaitable[None]]

# its loop, and what that runs in threads
_inside: ContextVar[bool] = ContextVar("inside a library thread", default=False)


def running_backend() -> str:
    """The name of the backend of the loop that this is called in: "asyncio" or "trio"."""
    native: Any = current_token().native_token
    return "asyncio" if hasattr(native, "call_soon_threadsafe") else "trio"


class Waiter(Protocol):
    """A flag that any thread sets, without blocking, and its owner waits for."""

    def set(self) -> None: ...

    async def wait(self) -> None: ...


class CallerMode(Protocol):
    """How the owner of a loop thread waits: as a task of a loop, or as a thread."""

    def waiter(self) -> Waiter: ...

    def shield(self) -> contextlib.AbstractContextManager[object]:
        """Within it, waiting is not ended by the cancellation of the caller's task."""
        ...

    def backend(self) -> str:
        """Which kind of loop the library's thread gets."""
        ...

    async def off_loop(self, call: Callable[[], object]) -> None:
        """Make a call that takes long, and keep no loop waiting."""
        ...


class AsyncMode:
    """The owner is a task, on asyncio or trio; the library's loop is of the same kind."""

    def waiter(self) -> Waiter:
        return Wakeup()

    def shield(self) -> anyio.CancelScope:
        return anyio.CancelScope(shield=True)

    def backend(self) -> str:
        return running_backend()

    async def off_loop(self, call: Callable[[], object]) -> None:
        await anyio.to_thread.run_sync(call)


class BlockingMode:
    """The owner is a thread. What it awaits blocks it and never suspends: see `finish_blocking`."""

    def waiter(self) -> Waiter:
        return _ThreadWaiter()

    def shield(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()

    def backend(self) -> str:
        return "asyncio"

    async def off_loop(self, call: Callable[[], object]) -> None:
        call()


class _ThreadWaiter:
    """Blocks the thread that waits. A signal (Ctrl-C) interrupts it, and its handler may call
    `set`.
    """

    def __init__(self) -> None:
        # of the kind that a handler may put something into, also while this thread waits
        self._flag: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        if self._flag.empty():
            self._flag.put(None)

    async def wait(self) -> None:
        if sys.is_finalizing():
            raise StateError(
                "the interpreter is being taken apart: nothing can be waited for any more"
            )
        # Python runs its handlers in the main thread, which a signal to another thread, or just
        # before this, does not wake.
        while True:
            with contextlib.suppress(queue.Empty):
                return self._flag.get(timeout=SIGNALS_S)


def finish_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of the public API, made on a `BlockingMode`, to its end in this thread; it
    never suspends.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise InvariantBroken("a call of the blocking facade has suspended")


class Job(Generic[T]):
    """One call on its way: run in the library's loop, awaited in the caller's.

    `undo`: gives a result back, in the library's loop, that its caller never sees, because it was
    cancelled too late.
    """

    def __init__(
        self,
        function: Callable[..., Awaitable[T]],
        arguments: tuple[Any, ...],
        waiter: Waiter,
        undo: Callable[[T], object] | None = None,
    ) -> None:
        self.function = function
        self.arguments = arguments
        self.undo = undo
        self.upcalls: deque[Upcall] = deque()  # to be awaited in the caller's task
        self.finished = False
        self.succeeded = False  # there is a result
        self._result: T
        self._error: BaseException | None = None
        self._scope: anyio.CancelScope | None = None
        self._cancelled = False
        self._waiter = waiter

    # -- in the library's loop

    async def run(self) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                if self._cancelled:
                    self._scope.cancel()
                self._result = await self.function(*self.arguments)
                self.succeeded = True
            if self._scope.cancelled_caught:
                self._error = StateError("the call was cancelled")
        except Exception as error:
            self._error = error
        except BaseException:
            self._error = StateError(
                "the library's thread has ended: its hub or coordinator was closed"
            )
            raise
        finally:
            self._scope = None
            self._undo_unseen()
            self.finish()

    def finish(self) -> None:
        self.finished = True
        self._waiter.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self.finish()

    def cancel(self) -> None:
        self._cancelled = True
        if self._scope is not None:
            self._scope.cancel()
        else:
            self._undo_unseen()

    def _undo_unseen(self) -> None:
        if self._cancelled and self.succeeded and self.undo is not None:
            self.undo(self._result)

    def ask_caller(self, upcall: Upcall) -> None:
        """Have `upcall` awaited by the caller's own task, in its own loop."""
        self.upcalls.append(upcall)
        self._waiter.set()

    # -- in the caller's loop

    async def wait(self) -> None:
        while not self.finished:
            await self._waiter.wait()
            while self.upcalls:
                await self.upcalls.popleft()()

    def outcome(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result


class Watching(Protocol):
    """A caller that waits for values from a library thread."""

    def end(self) -> None:
        """Nothing comes any more. From any thread; returns at once."""


class LoopThread:
    """Runs `main(thread)` in a loop of its own kind, in a thread of its own, until it is ended;
    then cancels the remaining tasks.

    `main` is awaited first; it calls `ready()` once calls may come. `farewell(parting)` is awaited
    there, beside it, before it is ended. `start` and `ended` are awaited in any loop, or, on a
    `BlockingMode`, in a thread without one. A thread that is still open when the process ends is
    ended then, within `exit_s`; with `ends_last` after all other library threads.
    """

    def __init__(
        self,
        name: str,
        main: Callable[[LoopThread], Awaitable[None]],
        mode: CallerMode,
        *,
        farewell: Farewell | None = None,
        exit_s: float = CLOSE_S,
        ends_last: bool = False,
    ) -> None:
        self.mode = mode  # how its owner waits
        self.exit_s = exit_s
        self.ends_last = ends_last
        self.ends_until = 0.0
        self._name = name
        self._main = main
        self._farewell = farewell
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a finalizer may call `post` within `post`
        self._posted: deque[Callable[[], None]] = deque()
        # on their way or running; written by the owner's side under the lock
        self._jobs: set[Job[Any]] = set()
        self._wakeup: Wakeup | None = None  # of the library's loop, while it runs
        self._parting: Parting | None = None  # how it ends, once that has begun
        self._ended = False
        self._given_up = False
        self._waiters: list[Waiter] = []  # for its end
        self._watching: weakref.WeakSet[Watching] = weakref.WeakSet()
        self._started: Waiter  # of the side that starts it
        self._error: BaseException | None = None
        self._ready = False
        self._backend: str
        self._tasks: anyio.abc.TaskGroup
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    # -- the owner's side

    async def start(self) -> None:
        """Returns when `main` is ready; raises what it raises before."""
        self._backend = self.mode.backend()
        self._started = self.mode.waiter()
        try:
            if sys.is_finalizing():
                # no thread would ever run
                raise RuntimeError("the interpreter is being taken apart")
            self._thread.start()
        except RuntimeError as error:
            raise StateError(f"{self._name} cannot be opened: {error}") from error
        ending.opened(self)
        try:
            await self._started.wait()
        except BaseException:
            self.end_soon(Parting(0.0))
            await self._wait_ended()
            raise
        if not self._ready:
            await self.ended()
            raise StateError(f"{self._name} was closed before it was open")

    def end_soon(self, parting: Parting) -> None:
        """Begin to end it: from now on no call comes through. The first parting counts. From any
        thread, also in a finalizer; returns at once.
        """
        if os.getpid() != self._pid:  # forked; perhaps while another thread held the lock
            return
        with self._lock:
            if self._parting is not None or self._ended:
                return
            self._parting, self.ends_until = parting, time.monotonic() + parting.within_s
            watching = list(self._watching)
        for each in watching:
            each.end()
        self.post(partial(self._part, parting))

    def dropped(self) -> None:
        """End the thread, since its hub is garbage: no caller can call or end it any more."""
        self.end_soon(Parting(CLOSE_S, "nobody held the hub any more"))

    async def ended(self) -> None:
        """Wait until nothing of it runs any more. Raises, once, what it has died of.

        Returns at once where that cannot be waited for: in a library thread (a finalizer may run
        anywhere), in a forked child, and while the interpreter is being taken apart.
        """
        if not (_inside.get() or sys.is_finalizing() or os.getpid() != self._pid):
            await self._wait_ended()
            error, self._error = self._error, None
            if error is not None:
                raise error

    async def _wait_ended(self) -> None:
        waiter = self.mode.waiter()
        with self._lock:
            self._waiters.append(waiter)
        with self.mode.shield():
            while not self._ended:
                await waiter.wait()
            if not self._given_up:
                self._thread.join()

    def join(self, timeout_s: float) -> bool:
        """See `Ending`."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def give_up(self) -> None:
        """See `Ending`."""
        self._given_up = True
        self._tell_ended()

    def tell_end(self, watching: Watching) -> None:
        """Call the caller's `end` when this thread ends, if the caller still exists then."""
        with self._lock:
            self._watching.add(watching)
            has_ended = self._parting is not None or self._ended
        if has_ended:
            watching.end()

    async def call(
        self,
        function: Callable[..., Awaitable[T]],
        *arguments: Any,
        undo: Callable[[T], object] | None = None,
    ) -> T:
        """Await `function(*arguments)` over there; cancelling here cancels it there, and waits
        until it has ended.

        `undo(result)` is called over there if it had ended already when it was to be cancelled.
        """
        return await self.run_job(Job(function, arguments, self.mode.waiter(), undo))

    def job(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> Job[T]:
        """A call that is not made yet."""
        return Job(function, arguments, self.mode.waiter())

    async def run_job(self, job: Job[T]) -> T:
        """As `call`, for a job that may ask its caller back."""
        self.check_usable()
        try:
            with self._lock:
                if not self.post(partial(self._start, job)):
                    job.fail(StateError(f"{self._name} is closed"))
                self._jobs.add(job)
            await job.wait()
        except BaseException:
            self.post(job.cancel)
            with self.mode.shield():
                while not job.finished and job in self._jobs:
                    job.upcalls.clear()
                    await job.wait()
            raise
        finally:
            with self._lock:
                self._jobs.discard(job)
        return job.outcome()

    def check_usable(self) -> None:
        """Raise StateError if no call can come through any more."""
        if os.getpid() != self._pid:
            raise StateError(
                f"{self._name} was opened before this process was "
                "forked: connect in the child instead"
            )
        if self._parting is not None:
            raise StateError(f"{self._name} is closed: {self._parting.reason}")
        if self._ended:
            raise StateError(f"{self._name} is closed")
        if _inside.get():
            raise StateError(
                "a thread of the library cannot wait for the library: "
                "call from a thread of your own"
            )

    def post(self, callback: Callable[[], None]) -> bool:
        """Have `callback` run over there, soon. From any thread; never blocks. False: the loop has
        ended, or is not ours.
        """
        if os.getpid() != self._pid:  # forked; perhaps while another thread held the lock
            return False
        with self._lock:
            if self._ended:
                return False
            self._posted.append(callback)
            if self._wakeup is not None:
                self._wakeup.set()
        return True

    # -- the library's side

    def _start(self, job: Job[Any]) -> None:
        self._tasks.start_soon(job.run)

    def ready(self) -> None:
        """`main` is set up: let the owner go on."""
        self._ready = True
        self._started.set()

    def _part(self, parting: Parting) -> None:
        self._tasks.start_soon(self._leave, parting)

    async def _leave(self, parting: Parting) -> None:
        if self._farewell is not None:
            await self._farewell(parting)
        self._tasks.cancel_scope.cancel()

    def _run(self) -> None:
        _inside.set(True)
        options = {"loop_factory": _Loop} if self._backend == "asyncio" else {}
        try:
            anyio.run(self._loop, backend=self._backend, backend_options=options)
        except BaseException as error:
            self._error = _lack(error) or _only(error)
        finally:
            ending.ended(self)
            self._tell_ended()

    def _tell_ended(self) -> None:
        with self._lock:
            self._ended = True
            jobs, watching, waiters = (
                list(self._jobs),
                list(self._watching),
                [self._started, *self._waiters],
            )
        for job in jobs:
            if not job.finished:  # it was posted too late to be started, or the thread was given up
                job.fail(StateError(f"{self._name} is closed"))
        for each in watching:
            each.end()
        for waiter in waiters:
            waiter.set()

    async def _loop(self) -> None:
        async with anyio.create_task_group() as self._tasks:
            with self._lock:
                self._wakeup = Wakeup()
                self._wakeup.set()
            self._tasks.start_soon(self._run_posted)
            await self._main(self)
            self._tasks.cancel_scope.cancel()

    async def _run_posted(self) -> None:
        assert self._wakeup is not None
        while True:
            await self._wakeup.wait()
            while self._posted:
                self._posted.popleft()()


class _Loop(asyncio.SelectorEventLoop):
    """Looks names up in threads that a cancelled caller abandons: a resolver may take longer than
    the end of a process may.
    """

    async def getaddrinfo(
        self,
        host: Any,
        port: Any,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> Any:
        look = partial(socket.getaddrinfo, host, port, family, type, proto, flags)
        return await anyio.to_thread.run_sync(look, abandon_on_cancel=True)


def _lack(error: BaseException) -> StateError | None:
    """What this process or machine lacks, if that is what one of these errors is about."""
    if isinstance(error, BaseExceptionGroup):
        return next((lack for each in error.exceptions if (lack := _lack(each)) is not None), None)
    lack = shortage(error) if isinstance(error, OSError) else None
    if lack is not None:
        lack.__cause__ = error
    return lack


def _only(error: BaseException) -> BaseException:
    """What a group of one exception is about."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
