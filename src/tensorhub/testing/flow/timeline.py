"""Simulated time: due calls, in an order that never varies."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count


class Timeline:
    """`settled` is called after all that is due at one moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self.settled: Callable[[], None] = lambda: None
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, when: float, call: Callable[[], None]) -> None:
        heappush(self._due, (max(when, self.now), next(self._numbers), call))

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self.at(self.now + seconds, call)

    def run(self, until: float, is_over: Callable[[], bool] = lambda: False) -> None:
        """Make the due calls, until none is left, or that time has come, or it `is_over`."""
        while self._due and self._due[0][0] <= until and not is_over():
            self.now = self._due[0][0]
            while self._due and self._due[0][0] <= self.now:
                heappop(self._due)[2]()
            self.settled()
