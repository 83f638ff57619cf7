"""Things that a transport keeps for its next reads, and drops when they were not used for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

KEPT_S = 60.0  # without use


class Kept(Generic[K, V]):
    """Values by key, each with when it was used last. For all threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._kept: dict[K, tuple[float, V]] = {}

    def __repr__(self) -> str:
        return f"<Kept: {len(self)}>"

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: K, is_good: Callable[[V], bool]) -> V | None:
        """The value there, if it is good; else it goes."""
        with self._lock:
            _, value = self._kept.pop(key, (0.0, None))
            if value is None or not is_good(value):
                return None
            self.put(key, value)
        return value

    def put(self, key: K, value: V) -> None:
        with self._lock:
            self._kept[key] = time.monotonic(), value

    def find_or_make(self, key: K, is_good: Callable[[V], bool], make: Callable[[], V]) -> V:
        """The kept value, or a new one. One thread at a time makes one."""
        with self._lock:
            value = self.find(key, is_good)
            if value is None:
                value = make()
                self.put(key, value)
        return value

    def sweep(self, kept_s: float) -> None:
        """Drop values that were not used for so long."""
        before = time.monotonic() - kept_s
        with self._lock:
            self._kept = {key: each for key, each in self._kept.items() if each[0] > before}
