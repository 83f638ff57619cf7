"""Virtual time: events in one order that a seed decides, and the trace of them."""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, deque
from collections.abc import Callable
from itertools import count
from random import Random
from struct import Struct
from typing import Any, Protocol

from tensorhub.messages import FromCoordinator, FromWorker, Heartbeat, HeartbeatAck
from tensorhub.testing.sim.network import COORDINATOR, Partitions, Process
from tensorhub.testing.sim.recovery_paths import path_of
from tensorhub.testing.sim.rendering import show

TRACE_LINES = 60
THREAD_S = 0.002
_EIGHT_BYTES = Struct("<d").pack  # quicker than a text


class Party(Protocol):
    """A process in which something happens."""

    name: str
    alive: bool  # what is to happen in a dead one does not
    stopped_until: float  # what is to happen in a stopped one happens later


class Event:
    """Something that will happen."""

    __slots__ = ("act", "args", "party")

    def __init__(
        self, party: Party | None, act: Callable[..., None], args: tuple[Any, ...]
    ) -> None:
        self.party = party
        self.act = act
        self.args = args


class Timeline:
    """Events by time; those of one time in the order in which they were asked for. What decides,
    and remembers, one run.
    """

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)  # all chance comes from it
        self.now = 0.0
        self.coordinator = Process(COORDINATOR)  # its present process
        self.partitions = Partitions()
        self.events = 0  # that have happened
        self.paths: Counter[str] = Counter()  # of recovery, that were taken
        # called for each new event, with its time
        self.scheduled: Callable[[float], None] = lambda when: None
        self._trace: deque[tuple[float, str, str, object]] = deque(maxlen=TRACE_LINES)
        self._hash = hashlib.blake2b(digest_size=12)
        self._queue: list[tuple[float, int, Event]] = []
        self._numbers = count()

    def at(self, when: float, party: Party | None, act: Callable[..., None], *args: Any) -> None:
        """Have `act` called at `when`, in that party if it is alive then; as soon as it runs again
        if it is stopped.
        """
        heapq.heappush(self._queue, (when, next(self._numbers), Event(party, act, args)))
        self.scheduled(when)

    def after(
        self, seconds: float, party: Party | None, act: Callable[..., None], *args: Any
    ) -> None:
        """As `at`, so many seconds from now."""
        self.at(self.now + seconds, party, act, *args)

    def wake(self) -> float:
        """Until a thread that was woken runs."""
        return THREAD_S * self.random.random()

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
            self.events += 1
            name = party.name if party is not None else ""
            self._hash.update(_EIGHT_BYTES(self.now) + f"{event.act.__name__}{name}".encode())
            return event
        return None

    # -- telling

    def note(self, line: str) -> None:
        """Something happened that a trace shows."""
        self._hash.update(line.encode())
        self._trace.append((self.now, line, "", None))

    def trace(self, name: str, arrow: str, message: FromWorker | FromCoordinator) -> None:
        """A message arrives."""
        self._hash.update(type(message).__name__.encode())
        if isinstance(message, Heartbeat | HeartbeatAck):
            return
        self._trace.append((self.now, name, arrow, message))
        path = path_of(message)
        if path:
            self.paths[path] += 1

    def end_hash(self, *states: str) -> str:
        """Of all that has happened, in its order, and of what there is at the end."""
        end = self._hash.copy()
        for state in states:
            end.update(state.encode())
        return end.hexdigest()

    def trace_lines(self) -> list[str]:
        """The last things that happened."""
        shown = (
            (when, name + (f" {arrow} {show(message)}" if arrow else ""))
            for when, name, arrow, message in self._trace
        )
        return [f"{when:9.4f}  {what}" for when, what in shown]
