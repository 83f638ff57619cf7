"""The one clock of the shells: monotonic seconds of the running loop (so that trio's mock clock
drives everything).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anyio
from anyio.lowlevel import current_token


def now() -> float:
    """Seconds; never goes back; comparable only within one loop."""
    return anyio.current_time()


def of_loop() -> Callable[[], float]:
    """A faster `now` for a caller that often asks the running loop."""
    native: Any = current_token().native_token
    time: Callable[[], float] = getattr(native, "time", now)
    return time
