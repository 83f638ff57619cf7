"""The one clock of the shells: monotonic seconds of the running loop (so that trio's mock clock
drives everything). Leases that must end while the machine sleeps have another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import anyio
from anyio.lowlevel import current_token


def now() -> float:
    """Seconds; never goes back; comparable only within one loop."""
    return anyio.current_time()


def boot_time() -> float:
    """Seconds; they pass while the process is stopped, and while the machine sleeps, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def of_loop() -> Callable[[], float]:
    """A faster `now` for a caller that often asks the running loop."""
    native: Any = current_token().native_token
    clock: Callable[[], float] = getattr(native, "time", now)
    return clock
