"""How late a coordinator's loop runs its tasks: it has more work than it can do, or the process was
stopped.

Responsible for measuring the lateness, for logging it, and for telling the two causes apart: an
overloaded process has used the processor meanwhile. Late work waits in order, so no message is
lost, but every call waits longer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable

import anyio

from tensorhub.logs import get_logger
from tensorhub.runtime import clock

PULSE_S = 0.1  # between two looks: what is shorter is not seen
LATE = 1 / 8  # of a lease: a coordinator that is so late says so
BUSY = 1 / 2  # of a core: a process that has used so much of it since the last look was not stopped
TOO_MUCH = "it has more to do than it comes to"
STOPPED = "it was stopped, or others had the processor"
# of the loop: in fewer, bytes that it has taken from the kernel have come to the core, or to a wait
TURNS_TO_CORE = 4

log = get_logger("tensorhub.coordinator")


class Pulse:
    """Of one server, while `keep` runs."""

    def __init__(self) -> None:
        self._late_s = 0.0  # how much later than it should the last look came
        self._due = math.inf  # when the next one should

    def __repr__(self) -> str:
        return f"<Pulse {self._late_s:.3f} s late>"

    @property
    def behind_s(self) -> float:
        """How long what comes waits for its turn now."""
        return max(self._late_s, clock.now() - self._due)

    async def keep(
        self,
        lease_s: float,
        sessions: Callable[[], int],
        catch_up: Callable[[], Awaitable[None]],
        late: Callable[[float, bool], None] = lambda late_s, is_behind: None,
    ) -> None:
        """Look, until cancelled. `sessions`: how many there are, for the log. `catch_up` waits for
        all that waits now. `late` is told how late each look came, and whether that is logged.
        """
        worst_s = 0.0
        while True:
            since, used_s = clock.now(), time.thread_time()
            self._due = since + PULSE_S
            await anyio.sleep(PULSE_S)
            await catch_up()
            self._late_s = max(0.0, clock.now() - self._due)
            late(self._late_s, self._late_s > lease_s * LATE)
            if self._late_s > lease_s * LATE:
                worst_s = max(worst_s, self._late_s)
                busy = (time.thread_time() - used_s) / (clock.now() - since)
                reason = TOO_MUCH if busy > BUSY else STOPPED
                late_s = round(self._late_s, 1)
                log.warning(
                    "coordinator_behind",
                    seconds=late_s,
                    sessions=sessions(),
                    busy=round(busy, 2),
                    reason=reason,
                )
            elif worst_s:
                log.info("coordinator_caught_up", seconds=round(worst_s, 1), sessions=sessions())
                worst_s = 0.0
