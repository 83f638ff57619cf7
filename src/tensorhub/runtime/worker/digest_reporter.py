"""When a publisher reports its digests: all at once when they are complete, else every `REPORT_S`
the new digests.

Responsible for the time. Not responsible for the content of a report (`handle`), nor for its
effect.
"""

from __future__ import annotations

from collections.abc import Callable

import anyio

from tensorhub.runtime import clock
from tensorhub.runtime.wakeup import Wakeup
from tensorhub.types import RegistrationId

REPORT_S = 0.25  # what was made in that time is told together


class DigestReporter:
    """Reports the digests of one worker. `say(registration, if_all)` sends the new digests of a
    registration; with `if_all`, only if they complete its digests. It returns whether nothing is
    left to send.
    """

    def __init__(self, say: Callable[[RegistrationId, bool], bool]) -> None:
        self._say = say
        self._news: dict[RegistrationId, None] = {}  # threads add, the task takes
        self._wakeup: Wakeup | None = None

    def __repr__(self) -> str:
        return f"<DigestReporter: {len(self._news)} registrations have news>"

    def made(self, registration: RegistrationId) -> None:
        """Digests were made there. Any thread may say so."""
        self._news[registration] = None
        if self._wakeup is not None:
            self._wakeup.set()

    async def run(self) -> None:
        """Tell, until cancelled."""
        self._wakeup = Wakeup()
        while True:
            if not self._news:
                await self._wakeup.wait()
            until = clock.now() + REPORT_S
            while self._tell(if_all=True) and clock.now() < until:
                with anyio.move_on_after(until - clock.now()):
                    await self._wakeup.wait()
            self._tell(if_all=False)
            self._news.clear()

    def _tell(self, *, if_all: bool) -> bool:
        """Whether something is left to be told."""
        for registration in list(self._news):
            if self._say(registration, if_all):
                self._news.pop(registration, None)
        return bool(self._news)
