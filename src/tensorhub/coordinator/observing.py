"""What observers are told: what has happened, and where the seconds of each update went.

Responsible for keeping that within bounds. No decision depends on it.
"""

from __future__ import annotations

from collections import deque

from tensorhub.errors import VersionUnavailable
from tensorhub.messages import Took
from tensorhub.observed import (
    EVENTS_PAGE_MAX,
    ClusterEvent,
    Explanation,
    ServedTiming,
    UpdateRow,
)

EVENTS_MAX = 1024
EVENT_CHARS_MAX = 300  # of an event's text


class Observations:
    """Of one coordinator. `wall_offset_s` is added to its times, for people."""

    def __init__(self, wall_offset_s: float) -> None:
        self.wall_offset_s = wall_offset_s
        self.last_event = 0  # the number of the newest event
        self._events: deque[ClusterEvent] = deque(maxlen=EVENTS_MAX)

    def __repr__(self) -> str:
        return f"<Observations: {self.last_event} events>"

    def happened(
        self, now: float, kind: str, model: str, version: int | None, worker: str, text: str
    ) -> None:
        """Keep an event."""
        self.last_event += 1
        at = now + self.wall_offset_s
        self._events.append(
            ClusterEvent(self.last_event, at, kind, model, version, worker, text[:EVENT_CHARS_MAX])
        )

    def events_after(self, number: int) -> tuple[tuple[ClusterEvent, ...], bool]:
        """The events that are kept with larger numbers, the oldest first, at most EVENTS_PAGE_MAX;
        and whether there are more.
        """
        kept = len(self._events)
        first = min(max(0, kept - (self.last_event - number)), kept)
        last = min(first + EVENTS_PAGE_MAX, kept)
        return tuple([self._events[place] for place in range(first, last)]), last < kept

    def took(self, worker: str, message: Took) -> None:
        """A rank says how long its call took."""

    def served(self, incarnation: str, timing: ServedTiming) -> None:
        """A source says what serving a reader cost it."""

    def updates(self, now: float, model: str | None) -> tuple[UpdateRow, ...]:
        """The newest first."""
        return ()

    def explanation(
        self, now: float, model: str, version: int | None, group: str | None
    ) -> Explanation:
        """Of the newest update. Raises VersionUnavailable if none is known."""
        raise VersionUnavailable(f"no update of {model!r} is known here")
