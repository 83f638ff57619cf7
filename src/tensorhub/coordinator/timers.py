"""Deadlines by name, for one pure machine. Not responsible for a clock."""

from __future__ import annotations

import heapq


class Timers:
    """A named deadline each; setting a name again replaces it. Lazy heap: O(log n) to set, O(1) to ask for the next."""

    __slots__ = ("_heap", "_when")

    def __init__(self) -> None:
        self._when: dict[tuple[str, str], float] = {}
        self._heap: list[tuple[float, tuple[str, str]]] = []

    def __len__(self) -> int:
        return len(self._when)

    def __contains__(self, name: tuple[str, str]) -> bool:
        return name in self._when

    def set(self, kind: str, key: str, when: float) -> None:
        """Let (kind, key) come due at `when`."""
        self._when[kind, key] = when
        heapq.heappush(self._heap, (when, (kind, key)))

    def cancel(self, kind: str, key: str) -> None:
        """Forget (kind, key), if it is set."""
        self._when.pop((kind, key), None)

    def next(self) -> float | None:
        """When the earliest deadline is, or None."""
        while self._heap and self._when.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now: float) -> tuple[str, str] | None:
        """Remove and return the name of one deadline at or before `now`, or None."""
        when = self.next()
        if when is None or when > now:
            return None
        _, name = heapq.heappop(self._heap)
        del self._when[name]
        return name
