"""What this worker tells observers: how long its calls took, and its readers.

Responsible for telling it after those who wait have been answered, and for the most of it in a
second, whatever readers do. Not responsible for what it says (`runtime.reports`,
`runtime.data.served_times`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import anyio

from tensorhub.messages import Served, Took
from tensorhub.observed import ServedTiming
from tensorhub.runtime.wakeup import Wakeup
from tensorhub.runtime.worker.coordinator_client import MessageSink

WAITING_MAX = 256  # readers of which is told; of more in EVERY_S, of the newest
EVERY_S = 0.1


class TimingsTold:
    """Those of one worker."""

    def __init__(self, link: MessageSink) -> None:
        self._link = link
        self._calls: deque[Callable[[], Took | None]] = deque()  # one per handle at a time
        self._readers: deque[ServedTiming] = deque(maxlen=WAITING_MAX)
        self._wakeup: Wakeup | None = None

    def __repr__(self) -> str:
        return f"<TimingsTold: {len(self._calls)} calls, {len(self._readers)} readers to tell of>"

    def call_took(self, told: Callable[[], Took | None]) -> None:
        """A call has ended. From the loop's thread."""
        self._calls.append(told)
        self._wake()

    def reader_served(self, timing: ServedTiming) -> None:
        """A reader is done. From any thread."""
        self._readers.append(timing)
        self._wake()

    def _wake(self) -> None:
        if self._wakeup is not None:
            self._wakeup.set()

    async def run(self) -> None:
        """Tell, until cancelled."""
        self._wakeup = Wakeup()
        readers_from = 0.0
        while True:
            while self._calls:
                took = self._calls.popleft()()
                if took is not None:
                    self._link.say(took)
            now = anyio.current_time()
            if self._readers and now >= readers_from:
                readers_from = now + EVERY_S
                while self._readers:
                    self._link.say(Served(self._readers.popleft()))
            with anyio.move_on_after(readers_from - now if self._readers else None):
                await self._wakeup.wait()
