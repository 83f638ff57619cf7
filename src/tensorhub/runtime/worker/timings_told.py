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

WAITING_MAX = 64  # readers of which is told; of more in EVERY_S, of the newest
EVERY_S = 0.25


class TimingsTold:
    """Those of one worker."""

    def __init__(self, link: MessageSink) -> None:
        self._link = link
        # one per handle at a time
        self._calls: deque[tuple[Callable[[], Took | None], int]] = deque()
        self._readers: deque[ServedTiming] = deque(maxlen=WAITING_MAX)
        self._wakeup: Wakeup | None = None
        # also hears what is told, in the loop's thread: of a call with how many chunks it had to
        # ask for again
        self.on_call: Callable[[Took, int], None] = lambda took, retries: None
        self.on_reader: Callable[[ServedTiming], None] = lambda timing: None

    def __repr__(self) -> str:
        return f"<TimingsTold: {len(self._calls)} calls, {len(self._readers)} readers to tell of>"

    def call_took(self, told: Callable[[], Took | None], retries: int) -> None:
        """A call has ended. From the loop's thread."""
        self._calls.append((told, retries))
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
                told, retries = self._calls.popleft()
                took = told()
                if took is not None:
                    self._link.say(took)
                    self.on_call(took, retries)
            now = anyio.current_time()
            if self._readers and now >= readers_from:
                readers_from = now + EVERY_S
                while self._readers:
                    timing = self._readers.popleft()
                    self._link.say(Served(timing))
                    self.on_reader(timing)
            with anyio.move_on_after(readers_from - now if self._readers else None):
                await self._wakeup.wait()
