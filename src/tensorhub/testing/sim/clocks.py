"""The clock of a simulated process: it may be fast or slow, jump ahead, and stand still."""

from __future__ import annotations

from math import inf, nextafter


class Clock:
    """Shows `rate` seconds in one second of the world."""

    def __init__(self, rate: float = 1.0) -> None:
        self.rate = rate
        self._ahead = 0.0
        self._still_until = 0.0

    def __repr__(self) -> str:
        return f"<Clock of {self.rate:.3f} s per s, {self._ahead:.3f} s ahead>"

    def at(self, now: float) -> float:
        """What it shows then; `now` is not before its last change."""
        return max(now, self._still_until) * self.rate + self._ahead

    def when(self, shown: float) -> float:
        """When it shows that."""
        found = (shown - self._ahead) / self.rate
        while self.at(found) < shown:
            found = nextafter(found, inf)
        return found

    def jump(self, seconds: float) -> None:
        """It shows so much more from now on."""
        self._ahead += seconds

    def stand_still(self, now: float, until: float) -> None:
        """It shows the same until then."""
        self._ahead -= (until - max(now, self._still_until)) * self.rate
        self._still_until = until
