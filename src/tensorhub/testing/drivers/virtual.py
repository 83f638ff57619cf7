"""Virtual time for a caller's own code: nothing waits really, and the clock moves on when every
task waits.

On trio that is `trio.testing.MockClock(autojump_threshold=0)`. asyncio has no such clock:
`VirtualLoop` is a loop with one. `asyncio.sleep`, timeouts and `loop.time()` mean virtual seconds
there. A task that waits for a thread, or for another process, waits in real time, and virtual time
runs away meanwhile: leave such waits out of simulated code.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import selectors
from collections.abc import Iterator
from typing import Any

from tensorhub.errors import StateError
from tensorhub.runtime.loop_thread import running_backend

NO_CLOCK = (
    "a simulation needs virtual time: on trio run with "
    "clock=trio.testing.MockClock(autojump_threshold=0), on asyncio with "
    "asyncio.Runner(loop_factory=tensorhub.testing.VirtualLoop), or leave it to "
    "tensorhub.testing.run_seeds"
)


class _Selector(selectors.DefaultSelector):
    """Never waits for time to pass: lets it have passed."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.idlers: list[asyncio.Future[None]] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if self.idlers:  # every task waits
            idlers, self.idlers = self.idlers, []
            for idler in idlers:
                if not idler.done():
                    idler.set_result(None)
            return events
        if timeout is None:
            return super().select(None)
        self.now += max(0.0, timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop in virtual time, which begins at 0:
    `asyncio.Runner(loop_factory=VirtualLoop)`.
    """

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual.now

    async def idle(self) -> None:
        """Wait until every other task waits."""
        idler = self.create_future()
        self._virtual.idlers.append(idler)
        await idler


def check_virtual() -> None:
    """Raise StateError unless the running loop has virtual time."""
    if running_backend() == "asyncio":
        is_virtual = isinstance(asyncio.get_running_loop(), VirtualLoop)
    else:
        trio: Any = importlib.import_module("trio")
        clock = trio.lowlevel.current_clock()
        is_virtual = getattr(clock, "autojump_threshold", None) == 0 and clock.rate == 0
    if not is_virtual:
        raise StateError(NO_CLOCK)


async def idle() -> None:
    """Wait until every other task of this loop waits."""
    if running_backend() == "asyncio":
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        await loop.idle()
    else:
        testing: Any = importlib.import_module("trio.testing")
        await testing.wait_all_tasks_blocked()


@contextlib.contextmanager
def ordered_tasks(seed: int) -> Iterator[None]:
    """Have tasks that become ready together run in an order that the seed decides; asyncio's order
    is a fixed one.

    trio's order is random on purpose. This sets the variables with which its Hypothesis plugin
    fixes the order.
    """
    if running_backend() == "asyncio":
        yield
        return
    run: Any = importlib.import_module("trio._core._run")
    was, state = run._ALLOW_DETERMINISTIC_SCHEDULING, run._r.getstate()
    run._ALLOW_DETERMINISTIC_SCHEDULING = True
    run._r.seed(seed)
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING = was
        run._r.setstate(state)
