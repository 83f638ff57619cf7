"""What an entity went through lately, and the error that tells it.

Responsible for a bounded history that costs nothing to keep, and for the exception that a pure machine raises
when it is asked for a step that its tables forbid: a fault of this library, never of its user. Not
responsible for logs.
"""

from __future__ import annotations

from collections import deque

EVENTS_MAX = 32


class Story:
    """The last few things that happened to one entity, oldest first."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: deque[tuple[object, ...]] = deque(maxlen=EVENTS_MAX)

    def tell(self, *event: object) -> None:
        """Append one event: a word, then its values. Values are formatted only if the story is read."""
        self._events.append(event)

    def __str__(self) -> str:
        return "; ".join(" ".join(str(word) for word in event) for event in self._events) or "nothing happened yet"


class IllegalStep(RuntimeError):
    """A machine was asked for what its tables forbid; carries the entity's recent story."""

    def __init__(self, what: str, story: Story) -> None:
        super().__init__(f"{what} (before: {story})")
