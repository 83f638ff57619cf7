"""Room for unfinished frames: a number of bytes that several connections share. Single loop; no
I/O.

A connection takes the bytes of a large frame here before it receives the frame. Until they are
free, nothing is received from that peer. Requests are served in order. Not responsible for how long
a frame may take: the receiver has a deadline.
"""

from __future__ import annotations

from collections import deque

import anyio


class Pot:
    """At most `nbytes` are taken at a time; no caller may ask for more."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free = nbytes
        self._waiting: deque[tuple[int, anyio.Event]] = deque()

    def __repr__(self) -> str:
        return f"<Pot: {self.free} of {self.nbytes} bytes free, {len(self._waiting)} waiting>"

    async def take(self, nbytes: int) -> None:
        """Wait until so many are free for this caller, and take them. Cancelled: nothing is
        taken.
        """
        if not self._waiting and nbytes <= self.free:
            self.free -= nbytes
            return
        turn = nbytes, anyio.Event()
        self._waiting.append(turn)
        try:
            await turn[1].wait()
        except BaseException:
            if turn[1].is_set():
                self.give_back(nbytes)
            else:
                self._waiting.remove(turn)
                self._serve()
            raise

    def give_back(self, nbytes: int) -> None:
        """They are free again."""
        self.free += nbytes
        self._serve()

    def _serve(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.free:
            nbytes, turn = self._waiting.popleft()
            self.free -= nbytes
            turn.set()
