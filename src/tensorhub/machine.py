"""What every pure state machine is made of: a table that is the only writer of state, a story, and
named deadlines.

A test can count the transitions that machines take (`counting_transitions`). Not responsible for a
clock, I/O or any particular machine.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from typing import Any, ClassVar, Generic, TypeVar

STORY_EVENTS_MAX = 32
SWEEP_AT = 64  # entries of a heap that need no sweeping
SWEPT_AT_ONCE = 4

S = TypeVar("S", bound=StrEnum)


class Story:
    """Bounded history: the last few things that happened to one entity, oldest first. Kept and
    forgotten with it.
    """

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: deque[tuple[tuple[float, int] | None, tuple[object, ...]]] = deque(
            maxlen=STORY_EVENTS_MAX
        )

    def tell(self, *event: object) -> None:
        """Append one event: a word, then its values. They are formatted only if the story is
        read.
        """
        self._events.append((None, event))

    def note(self, cause: int, now: float, *event: object) -> None:
        """Add `event`, which happened at `now` because of event number `cause`."""
        self._events.append(((now, cause), event))

    @property
    def newest(self) -> str:
        """The last word of the newest event: of a transition, why it was made."""
        return str(self._events[-1][1][-1]) if self._events else ""

    def __str__(self) -> str:
        return "\n".join(map(_line, self._events)) or "  (nothing yet)"


def _line(event: tuple[tuple[float, int] | None, tuple[object, ...]]) -> str:
    when, words = event
    told = " ".join(map(str, words))
    return f"  {told}" if when is None else f"  {when[0]:.3f} (event {when[1]}) {told}"


class IllegalStep(Exception):
    """A machine was asked for what its rules forbid: a defect of TensorHub. Carries the entity's
    story.
    """

    def __init__(self, what: str, story: Story) -> None:
        super().__init__(f"{what}. Story:\n{story}")


class IllegalTransition(IllegalStep):
    """A transition that the entity's table does not have."""


class InvariantBroken(Exception):
    """Something that always holds does not hold: a defect of TensorHub."""


judged: defaultdict[str, int] = defaultdict(int)  # how often, by what was demanded


def demand(holds: bool, what: str, about: object) -> None:
    """Count that `what`, a text of this call alone, was judged. Raise InvariantBroken, with the
    story of what it is about, unless it holds.
    """
    judged[what] += 1
    if not holds:
        raise InvariantBroken(f"{what}: {about!r}. Story:\n{getattr(about, 'story', '')}")


_counted: ContextVar[Counter[str] | None] = ContextVar("counted", default=None)


@contextmanager
def counting_transitions() -> Iterator[Counter[str]]:
    """Count each transition of each machine that this block takes, in this thread and task:
    `"replica: filling -> ready"`.

    A block within a block counts for itself only.
    """
    counted: Counter[str] = Counter()
    token = _counted.set(counted)
    try:
        yield counted
    finally:
        _counted.reset(token)


def transition(machine: str, old: StrEnum, new: StrEnum) -> str:
    """The name under which a transition is counted."""
    return f"{machine}: {old} -> {new}"


def count_transition(machine: str, old: StrEnum, new: StrEnum) -> None:
    """Count one transition, if a test counts transitions; else it costs next to nothing."""
    counted = _counted.get()
    if counted is not None:
        counted[transition(machine, old, new)] += 1


class Stateful(Generic[S]):
    """An entity with a state, a transition table and a story."""

    machine: ClassVar[str]  # what this kind of entity is called, where its transitions are counted
    table: ClassVar[Mapping[Any, frozenset[Any]]]
    __slots__ = ("state", "story")

    def __init__(self, state: S) -> None:
        self.state: S = state
        self.story = Story()

    def become(self, new: S, cause: int, now: float, why: str) -> None:
        """Move to `new`; raise IllegalTransition with the story where the table has no such
        move.
        """
        if new not in self.table[self.state]:
            raise IllegalTransition(
                f"{self}: {self.state} -> {new} ({why}) is not in the table", self.story
            )
        self.story.note(cause, now, self.state, "->", f"{new}:", why)
        count_transition(self.machine, self.state, new)
        self.state = new


class Timers:
    """Deadlines by (kind, key); setting one again replaces it. O(log n) to set, amortised O(1) to
    ask for the next.

    A cancelled or replaced deadline stays in its heap until it reaches the top. If such entries are
    most of a heap, the heap is swept: each call that sets a deadline moves a few live entries into
    a new heap.
    """

    __slots__ = ("_heap", "_swept", "_when")

    def __init__(self) -> None:
        self._when: dict[tuple[str, str], float] = {}
        self._heap: list[tuple[float, tuple[str, str]]] = []
        # the heap that is being swept, if one is
        self._swept: list[tuple[float, tuple[str, str]]] = []

    def __len__(self) -> int:
        return len(self._when)

    def __contains__(self, name: tuple[str, str]) -> bool:
        return name in self._when

    def set(self, kind: str, key: str, when: float) -> None:
        """Let (kind, key) come due at `when`."""
        if self._when.get((kind, key)) != when:
            self._when[kind, key] = when
            heapq.heappush(self._heap, (when, (kind, key)))
            if self._swept:
                self._sweep()
            elif len(self._heap) > 2 * len(self._when) + SWEEP_AT:
                self._heap, self._swept = [], self._heap

    def hasten(self, kind: str, key: str, when: float) -> None:
        """Let (kind, key) come due at `when`, if it would not come sooner."""
        if when < self._when.get((kind, key), math.inf):
            self.set(kind, key, when)

    def cancel(self, kind: str, key: str) -> None:
        """Forget (kind, key), if it is set."""
        self._when.pop((kind, key), None)

    def _sweep(self) -> None:
        """Look at a few entries; from the end, so that the rest of them remains a heap."""
        for _ in range(min(len(self._swept), SWEPT_AT_ONCE)):
            when, name = self._swept.pop()
            if self._when.get(name) == when:
                heapq.heappush(self._heap, (when, name))

    def _first(self) -> list[tuple[float, tuple[str, str]]]:
        """The heap that has the earliest deadline, if there is one, at its top."""
        first, swept = self._heap, self._swept
        for heap in (first, swept) if swept else (first,):
            while heap and self._when.get(heap[0][1]) != heap[0][0]:
                heapq.heappop(heap)
        return swept if swept and (not first or swept[0] < first[0]) else first

    def next(self) -> float | None:
        """When the earliest deadline is, or None."""
        first = self._first()
        return first[0][0] if first else None

    def pop_due(self, now: float) -> tuple[str, str] | None:
        """Remove and return the name of one deadline at or before `now`, or None."""
        first = self._first()
        if not first or first[0][0] > now:
            return None
        _, name = heapq.heappop(first)
        del self._when[name]
        return name
