"""Calls from any loop into the library's own: results, errors, cancellation, requests back, and its
end.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from types import FrameType
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from tensorhub.errors import StateError
from tensorhub.runtime.ending import Parting
from tensorhub.runtime.loop_thread import (
    AsyncMode,
    BlockingMode,
    LoopThread,
    finish_blocking,
    running_backend,
)
from tests.rig import WAIT_S, nothing_left, until


class Inside(AsyncMode):
    """The library's loop is of this kind, or (None) of its owner's."""

    def __init__(self, kind: str | None) -> None:
        self._kind = kind

    def backend(self) -> str:
        return self._kind or super().backend()


async def idle(thread: LoopThread) -> None:
    thread.ready()
    await anyio.sleep_forever()


@contextlib.asynccontextmanager
async def running(
    main: Callable[[LoopThread], Awaitable[None]], mode: AsyncMode
) -> AsyncIterator[LoopThread]:
    thread = LoopThread("tensorhub-test", main, mode)
    await thread.start()
    try:
        yield thread
    finally:
        thread.end_soon(Parting(1.0))
        await thread.ended()


@pytest.fixture(params=[None, "asyncio", "trio"], ids=["own kind", "asyncio inside", "trio inside"])
def backend(request: pytest.FixtureRequest) -> str | None:
    found: str | None = request.param
    return found


async def test_results_and_errors_come_back(backend: str | None) -> None:
    async def who(what: str) -> tuple[str, str, int]:
        if what == "bad":
            raise LookupError(what)
        return what, running_backend(), threading.get_ident()

    async with nothing_left(), running(idle, Inside(backend)) as thread:
        what, kind, ident = await thread.call(who, "good")
        assert (what, kind) == ("good", backend or running_backend())
        assert ident != threading.get_ident()
        with pytest.raises(LookupError, match="bad"):
            await thread.call(who, "bad")
        assert (await thread.call(who, "again"))[0] == "again"


async def test_cancelling_ends_the_call_over_there_first(backend: str | None) -> None:
    events: list[str] = []

    async def work() -> None:
        events.append("begun")
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
            events.append("ended")

    async with nothing_left(), running(idle, Inside(backend)) as thread:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(thread.call, work)
            await until(lambda: events == ["begun"])
            tasks.cancel_scope.cancel()
        assert events == ["begun", "ended"]


async def test_a_call_may_ask_its_caller_back(backend: str | None) -> None:
    asked: list[int] = []

    async def ask() -> None:
        asked.append(threading.get_ident())
        thread.post(answered.append)

    async with nothing_left(), running(idle, Inside(backend)) as thread:
        answered = _Flag()

        async def work() -> str:
            for _ in range(3):
                job.ask_caller(ask)
            await until(lambda: answered.count == 3)
            return "done"

        job = thread.job(work)
        assert await thread.run_job(job) == "done"
        assert asked == [threading.get_ident()] * 3


class _Flag:
    def __init__(self) -> None:
        self.count = 0

    def append(self) -> None:
        self.count += 1


async def test_an_error_in_what_the_caller_was_asked_ends_the_call() -> None:
    ended = threading.Event()

    async def ask() -> None:
        raise LookupError("mine")

    async def work() -> None:
        job.ask_caller(ask)
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    async with nothing_left(), running(idle, AsyncMode()) as thread:
        job = thread.job(work)
        with pytest.raises(LookupError, match="mine"):
            await thread.run_job(job)
        assert ended.is_set()


async def test_what_cannot_start_raises_from_enter() -> None:
    async def fails(thread: LoopThread) -> None:
        async with anyio.create_task_group():
            raise StateError("the port is taken")

    async with nothing_left():
        with pytest.raises(StateError, match="the port is taken"):
            async with running(fails, AsyncMode()):
                raise AssertionError("not entered")


async def test_what_breaks_later_raises_from_exit_and_ends_calls() -> None:
    broken, called = threading.Event(), threading.Event()

    async def breaks(thread: LoopThread) -> None:
        thread.ready()
        await until(broken.is_set)
        raise LookupError("broken")

    async def wait() -> None:
        called.set()
        await anyio.sleep_forever()

    async with nothing_left():
        with pytest.raises(LookupError, match="broken"):  # noqa: PT012
            async with running(breaks, AsyncMode()) as thread:
                async with anyio.create_task_group() as tasks:

                    async def call() -> None:
                        with pytest.raises(StateError, match="the library's thread has ended"):
                            await thread.call(wait)

                    tasks.start_soon(call)
                    await until(called.is_set)
                    broken.set()
                with pytest.raises(StateError, match="tensorhub-test is closed"):
                    await thread.call(wait)


def test_a_signal_that_reaches_another_thread_is_handled_while_this_one_waits() -> None:
    """The system may hand it to any thread: Python's handler runs in the main one."""
    waiter, main = BlockingMode().waiter(), threading.get_ident()

    def signals_once_it_waits() -> None:
        while sys._current_frames()[main].f_code.co_name != "wait":
            time.sleep(0.001)
        time.sleep(0.05)  # or the handler would run before the wait, and prove nothing
        signal.raise_signal(signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: waiter.set())
    other = threading.Thread(target=signals_once_it_waits)
    try:
        other.start()
        finish_blocking(waiter.wait())
        other.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_of_a_signal_may_wake_the_thread_that_it_interrupts_anywhere() -> None:
    """Python runs it between two lines of any function, such as one that has a lock just then."""
    waiter = BlockingMode().waiter()

    def handles(frame: FrameType, event: str, arg: object) -> Any:
        waiter.set()
        return handles

    def waits() -> None:
        sys.settrace(handles)
        finish_blocking(waiter.wait())

    thread = threading.Thread(target=waits, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert not thread.is_alive()
