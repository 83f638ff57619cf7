"""Windows of versions in memory: filled when they are read, or a little before, and given back when
others need the room.

Responsible for when a window is filled and how long it stays. Not responsible for how it is filled
(`versions`), nor for where its bytes are (`memory.windows`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

from tensorhub.errors import OperationTimeout, StateError
from tensorhub.memory.windows import Windows

WINDOWS = 8  # that have room at once, at least
WINDOW_BYTES_MAX = 64 * 2**20  # the first byte comes when so many are there
CLOSED = "this filesystem was closed: open another one"
AHEAD = 2  # windows that are filled before they are read, where a file is read in order


class Section(Protocol):
    """Tensors of a version that are filled together, or window by window."""

    @property
    def windows(self) -> Windows: ...

    def fill(self, number: int) -> None:
        """Fetch a window, verified. TensorHubErrors."""


@dataclass(frozen=True, slots=True)
class Key:
    """One window."""

    section: Section
    number: int

    @property
    def nbytes(self) -> int:
        window = self.section.windows.windows[self.number]
        return window.stop - window.start

    def __hash__(self) -> int:
        return hash((id(self.section), self.number))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Key) and self.section is other.section and self.number == other.number
        )


class Cache:
    """At most `cache_bytes` of windows, or one window if that is larger. Any thread may call."""

    def __init__(self, cache_bytes: int) -> None:
        self.cache_bytes = cache_bytes
        self.window_bytes = max(1, min(WINDOW_BYTES_MAX, cache_bytes // WINDOWS))
        self._lock = threading.Lock()
        self._fills: OrderedDict[Key, Future[None]] = OrderedDict()  # the last used one last
        self._is_closed = False
        self._filler = ThreadPoolExecutor(1 + AHEAD, "tensorhub-fs")

    def __repr__(self) -> str:
        return f"<Cache of {len(self._fills)} windows, {self.nbytes} of {self.cache_bytes} bytes>"

    @property
    def nbytes(self) -> int:
        """What the windows have that are filled, or are being filled."""
        return sum([key.nbytes for key in list(self._fills)])

    def close(self) -> None:
        """Wait for the fills that run, and fill nothing any more."""
        with self._lock:
            self._is_closed = True
        self._filler.shutdown(cancel_futures=True)

    def read(
        self,
        key: Key,
        start: int,
        stop: int,
        put: Callable[[memoryview], object],
        following: Sequence[Key],
        deadline: float,
    ) -> None:
        """`put` these bytes of a window, once it is filled. `following`: windows that will be read
        next. Raises as `Section.fill`; OperationTimeout at the deadline, of `time.monotonic`.
        """
        while True:
            with self._lock:
                fill = self._fill(key)
            _wait(fill, deadline)
            with self._lock:
                if self._fills.get(key) is fill:  # else it has made room already
                    self._fills.move_to_end(key)
                    for each in following:
                        if each in self._fills or self._make_room(each.nbytes, key):
                            self._fill(each)
                    put(key.section.windows.view(start, stop))
                    return

    def holds(self, key: Key) -> bool:
        """Whether it is filled, or is being filled."""
        return key in self._fills

    def _fill(self, key: Key) -> Future[None]:
        """The fill of a window, which is begun if there is none."""
        fill = self._fills.get(key)
        if fill is None:
            if self._is_closed:
                raise StateError(CLOSED)
            self._make_room(key.nbytes, key)
            fill = self._fills[key] = self._filler.submit(self._run, key)
        return fill

    def _run(self, key: Key) -> None:
        """Fill a window. If that fails, the next read tries again."""
        try:
            key.section.fill(key.number)
        except BaseException:
            with self._lock:
                key.section.windows.give_back(key.number)
                self._fills.pop(key, None)
            raise

    def _make_room(self, nbytes: int, but: Key) -> bool:
        """Give back windows, the least used first, until so many bytes have room. False: the rest
        is being filled or read.
        """
        used = self.nbytes
        for key, fill in list(self._fills.items()):
            if used + nbytes <= self.cache_bytes:
                break
            if key != but and fill.done():
                del self._fills[key]
                key.section.windows.give_back(key.number)
                used -= key.nbytes
        return used + nbytes <= self.cache_bytes


def _wait(fill: Future[None], deadline: float) -> None:
    wait([fill], max(0.0, deadline - time.monotonic()))
    if not fill.done():
        raise OperationTimeout(
            "these bytes did not arrive in time: see in `tensorhub status` whether the version has "
            "a holder; then read again, perhaps with a longer timeout"
        )
    if fill.cancelled():
        raise StateError(CLOSED)
    fill.result()
