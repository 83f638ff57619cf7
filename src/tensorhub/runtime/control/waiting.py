"""Connections that may have to make room for a new one, by the address that each comes from.

Responsible for which one goes first: of the address that has most of them, the one that has waited
longest. So an address with one connection keeps it, unless a flood comes from as many addresses as
there are places.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class Waiting(Generic[C]):
    """Each step takes about the same time, however many wait."""

    def __init__(self) -> None:
        self._addresses = dict[C, str]()
        self._of = dict[str, dict[C, None]]()  # oldest first; none is empty
        self._by_count = dict[int, dict[str, None]]()  # addresses that have so many; none is empty

    def __len__(self) -> int:
        return len(self._addresses)

    def __iter__(self) -> Iterator[C]:
        return iter(self._addresses)

    @property
    def addresses(self) -> frozenset[str]:
        return frozenset(self._of)

    def add(self, connection: C, address: str) -> None:
        """It waits from now on, and does not yet."""
        self._addresses[connection] = address
        self._of.setdefault(address, {})[connection] = None
        self._count(address, -1)

    def discard(self, connection: C) -> None:
        """It waits no more, if it did."""
        if (address := self._addresses.pop(connection, None)) is not None:
            del self._of[address][connection]
            self._count(address, 1)
            if not self._of[address]:
                del self._of[address]

    def first(self) -> C | None:
        """The one to go first; None if none waits."""
        if not self._by_count:
            return None
        address = next(iter(self._by_count[max(self._by_count)]))
        return next(iter(self._of[address]))

    def _count(self, address: str, more_before: int) -> None:
        """The address has so many connections more, or less, than it has now."""
        now = len(self._of[address])
        if before := now + more_before:
            del self._by_count[before][address]
            if not self._by_count[before]:
                del self._by_count[before]
        if now:
            self._by_count.setdefault(now, {})[address] = None
