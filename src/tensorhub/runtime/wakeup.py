"""Waking a task from any thread, on asyncio and on trio, without blocking the thread.

`anyio.from_thread` waits for the loop, which a busy Python thread can delay by a switch interval
per hop; lanes must not wait. Responsible for the wake-up only: what happened lies in a queue of the
caller's.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import anyio
from anyio.lowlevel import current_token


class Wakeup:
    """A flag that any thread sets and one task of the loop that made it waits for."""

    __slots__ = ("_call_soon", "_event", "_lock", "_pending")

    def __init__(self) -> None:
        """To be made in a task of the loop that will wait."""
        self._call_soon = _call_soon()
        self._event = anyio.Event()
        self._lock = threading.RLock()  # a finalizer may call `set` within `set`
        self._pending = False  # True from `set` until the loop has run `_fire`

    def set(self) -> None:
        """Wake the task, now or at its next `wait`. Never blocks; after the loop's end it does
        nothing.
        """
        with self._lock:
            if self._pending:
                return
            self._pending = True
        # asyncio: the loop is closed; trio.RunFinishedError is one, too
        with contextlib.suppress(RuntimeError):
            self._call_soon(self._fire)

    def _fire(self) -> None:
        with self._lock:
            self._pending = False
        self._event.set()

    async def wait(self) -> None:
        """Return once `set` was called after the last `wait` had returned."""
        await self._event.wait()
        self._event = anyio.Event()


def _call_soon() -> Callable[[Callable[[], None]], object]:
    native: Any = current_token().native_token
    call_soon: Callable[[Callable[[], None]], object] = (
        native.call_soon_threadsafe
        if hasattr(native, "call_soon_threadsafe")
        else native.run_sync_soon
    )
    return call_soon
