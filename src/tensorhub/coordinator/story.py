"""Bounded history: what recently happened to an entity, for errors and for people.

Not responsible for logs: a story is kept in memory, with its entity, and forgotten with it.
"""

from __future__ import annotations

from collections import deque

STORY_LINES_MAX = 24


class Story:
    """The last few things that happened to one entity, oldest first."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        self._lines: deque[tuple[int, float, str]] = deque(maxlen=STORY_LINES_MAX)

    def note(self, cause: int, now: float, text: str) -> None:
        """Remember that `text` happened at `now`, because of event `cause`."""
        self._lines.append((cause, now, text))

    def __str__(self) -> str:
        return "\n".join(f"  {now:.3f} (event {cause}) {text}" for cause, now, text in self._lines) or "  (nothing yet)"
