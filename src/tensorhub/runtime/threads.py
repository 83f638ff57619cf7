"""Runs what blocks in a thread, or in the loop where no thread can be had."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

T = TypeVar("T")


async def run_in_thread(function: Callable[..., T], *arguments: object, limiter: anyio.CapacityLimiter | None = None) -> T:
    """As `anyio.to_thread.run_sync`, for what a handle's end cannot do without.

    Python 3.12 starts no threads once its main thread has ended, and a process may be at its limit of them.
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
