"""Wakes the handles of a worker at their deadlines. There may be thousands, of archived versions:
only those are looked at that have moved, or are due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import anyio

from tensorhub.errors import TensorHubError
from tensorhub.machine import Timers
from tensorhub.runtime import clock
from tensorhub.runtime.worker.handle import Handle


class Deadlines:
    """`handles`: those of the worker, by registration. `fault`: why it has no session, if it has
    none.
    """

    def __init__(
        self,
        handles: Mapping[str, Handle],
        fault: Callable[[], TensorHubError | None],
    ) -> None:
        self._handles, self._fault = handles, fault
        self._timers = Timers()  # by registration
        self._moved: dict[str, None] = {}  # registrations that may have another one now
        self._has_moved = anyio.Event()

    def __repr__(self) -> str:
        return f"<Deadlines: {len(self._timers)}>"

    def moved(self, registration: str) -> None:
        """The deadline of its member may be another one now."""
        self._moved[registration] = None
        self._has_moved.set()

    async def keep(self) -> None:
        """Tick each member when it is due, until cancelled."""
        while True:
            self._has_moved = anyio.Event()
            while self._moved:
                self._note(self._moved.popitem()[0])
            following = self._timers.next()
            left_s = None if following is None else max(0.0, following - clock.now())
            with anyio.move_on_after(left_s):
                await self._has_moved.wait()
            while (due := self._timers.pop_due(clock.now())) is not None:
                self._moved[due[1]] = None
                handle = self._handles.get(due[1])
                if handle is not None:
                    handle.apply(handle.member.tick(clock.now(), self._fault()))

    def _note(self, registration: str) -> None:
        handle = self._handles.get(registration)
        deadline = None if handle is None else handle.member.next_deadline()
        if deadline is None:
            self._timers.cancel("", registration)
        else:
            self._timers.set("", registration, deadline)
