"""The one clock of the shells: monotonic seconds of the running loop (so that trio's mock clock drives everything)."""

from __future__ import annotations

import anyio


def now() -> float:
    """Seconds; never goes back; comparable only within one loop."""
    return anyio.current_time()
