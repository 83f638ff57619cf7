"""The newest events of a coordinator or a worker, for all clients that follow them.

Its loop is asked for them while at least one client follows, equally often for one
as for all. A client that is too slow misses the oldest ones: their numbers are missing. Lives in
the endpoint's loop.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import asdict
from itertools import islice

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tensorhub.coordinator.observing import EVENTS_MAX
from tensorhub.observed import ClusterEvent
from tensorhub.web.asking import Unanswered
from tensorhub.web.pages import STREAMS_MAX, Stream, text_of

LOOK_S = 0.25  # between two looks for new events
QUIET_S = 15.0  # of a stream; then it says that it is there
PIECE_BYTES = 32_768

# of a number: what the ids of events begin with, some events after it, and whether there are more
EventsAfter = Callable[[int], Awaitable[tuple[str, tuple[ClusterEvent, ...], bool]]]


class News:
    def __init__(self, events_after: EventsAfter) -> None:
        self._events_after = events_after
        self._life = ""
        self._kept: deque[bytes] = deque(maxlen=EVENTS_MAX)
        self._last = 0  # the number of the newest of them
        self._looked = asyncio.Event()  # replaced when there are new ones
        self._looking: asyncio.Task[None] | None = None
        self.followers = 0

    async def answer(self, request: Request) -> Response:
        """What happens, as server-sent events. A client that comes back goes on after
        `Last-Event-ID`; a new one begins with the oldest event that is kept.
        """
        last = request.headers.get("last-event-id") or text_of(request, "after") or ""
        if self.followers >= STREAMS_MAX:
            raise HTTPException(503, f"{STREAMS_MAX} clients follow already", {"Retry-After": "5"})
        return Stream(self.follow(last))

    async def follow(self, last: str) -> AsyncGenerator[bytes, None]:
        """Events in the form of a stream, after the event with that id; comments while there are
        none. After an id of another coordinator, or none, all that are kept.
        """
        self.followers += 1
        if self._looking is None:
            self._looking = asyncio.create_task(self._look())
        try:
            yield b"retry: 1000\n\n"
            if not self._life:
                await self._looked.wait()
            life, number = self._life, self._number_of(last)
            while True:
                if life != self._life:
                    life, number = self._life, 0
                looked, pieces, number = self._looked, self._pieces(number), self._last
                for piece in pieces:
                    yield piece
                if looked is not self._looked:  # while the client took the pieces
                    continue
                try:
                    async with asyncio.timeout(QUIET_S):
                        await looked.wait()
                except TimeoutError:
                    yield b": nothing new\n\n"
        finally:
            self.followers -= 1
            if not self.followers and self._looking is not None:
                self._looking.cancel()
                self._looking = None

    def _number_of(self, last: str) -> int:
        life, _, number = last.rpartition(".")
        found = int(number) if number.isascii() and number.isdecimal() and len(number) < 20 else 0
        return found if life in ("", self._life) and found <= self._last else 0

    def _pieces(self, number: int) -> list[bytes]:
        """The events after that number, several in a piece."""
        pieces = [b""]
        for event in islice(self._kept, max(0, len(self._kept) - (self._last - number)), None):
            if len(pieces[-1]) > PIECE_BYTES:
                pieces.append(b"")
            pieces[-1] += event
        return [piece for piece in pieces if piece]

    async def _look(self) -> None:
        while True:
            try:
                life, events, more = await self._events_after(self._last)
            except Unanswered:
                more, events = False, ()
            else:
                if life != self._life and self._life:  # another term: its numbers begin anew
                    self._kept.clear()
                    self._last, more, events = 0, True, ()
                    self._life = life
                elif not self._life or events:
                    self._life = life
                    self._kept.extend(self._form(event) for event in events)
                    self._last = events[-1].number if events else self._last
                    looked, self._looked = self._looked, asyncio.Event()
                    looked.set()
            if not more:
                await asyncio.sleep(LOOK_S)

    def _form(self, event: ClusterEvent) -> bytes:
        return f"id: {self._life}.{event.number}\ndata: {json.dumps(asdict(event))}\n\n".encode()
