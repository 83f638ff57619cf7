"""Runs what blocks in a thread, or in the loop where no thread can be had; and what can wait,
aside.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")
# Of 19, which gives way most. A thread that has hardly any time keeps the GIL, or a fence, for long
# when it is interrupted.
NICENESS_ASIDE = 10


def run_aside(function: Callable[[], object]) -> None:
    """Call it in a thread of low priority, and wait for it. It must raise nothing. RuntimeError:
    there is no thread.

    The thread is a new one each time: without privileges no priority can be raised again.
    """

    def run() -> None:
        with suppress(OSError):  # a system may forbid it
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS_ASIDE)
        function()

    thread = threading.Thread(target=run, name="tensorhub-aside", daemon=True)
    thread.start()
    thread.join()


def begin(name: str, function: Callable[..., T], *given: object, **named: object) -> Future[T]:
    """Call it in a thread for which a process does not wait at its end, as it would for one of a
    ThreadPoolExecutor.
    """
    answer = Future[T]()

    def run() -> None:
        try:
            answer.set_result(function(*given, **named))
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return answer


async def run_in_thread(
    function: Callable[..., T], *arguments: object, limiter: anyio.CapacityLimiter | None = None
) -> T:
    """As `anyio.to_thread.run_sync`, for what a handle's end cannot do without.

    Python 3.12 starts no threads once its main thread has ended, and a process may be at its limit
    of them.
    """
    has_begun = False

    def run() -> T:
        nonlocal has_begun
        has_begun = True
        return function(*arguments)

    try:
        return await anyio.to_thread.run_sync(run, limiter=limiter)
    except RuntimeError:
        if has_begun:
            raise
        return function(*arguments)
