"""Virtual time: what happens when, in one order that a seed decides."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol


class Party(Protocol):
    """A process in which something happens."""

    name: str
    alive: bool  # what is to happen in a dead one does not
    stopped_until: float  # what is to happen in a stopped one happens later


class Process:
    """A party that is nothing else."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.stopped_until = 0.0


class Event:
    """Something that will happen."""

    __slots__ = ("act", "args", "party")

    def __init__(self, party: Party | None, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.party = party
        self.act = act
        self.args = args


class Clock:
    """Events by time; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Event]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._queue)

    def at(self, when: float, party: Party | None, act: Callable[..., None], *args: Any) -> None:
        """Have `act` called at `when`, in that party if it is alive then; as soon as it runs again if it is stopped."""
        heapq.heappush(self._queue, (when, next(self._numbers), Event(party, act, args)))

    def next_time(self) -> float:
        """When the next event will happen; infinity if there is none."""
        queue = self._queue
        while queue:
            when, _, event = queue[0]
            party = event.party
            if party is None or (party.alive and party.stopped_until <= when):
                return when
            heapq.heappop(queue)
            if party.alive:
                heapq.heappush(queue, (party.stopped_until, next(self._numbers), event))
        return float("inf")

    def next_event(self) -> Event | None:
        """Move on to the next event, and take it; None if there is none."""
        queue = self._queue
        while queue:
            when, _, event = heapq.heappop(queue)
            party = event.party
            if party is not None:
                if not party.alive:
                    continue
                if party.stopped_until > when:
                    heapq.heappush(queue, (party.stopped_until, next(self._numbers), event))
                    continue
            self.now = max(self.now, when)
            return event
        return None
