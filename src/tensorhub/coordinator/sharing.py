"""Fair shares of one thing: whoever has less than an equal part gets more from whoever has the most.

Responsible for choosing who gives way. Not responsible for taking anything away.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)


class Share(Generic[H]):
    """How much each guest has of one thing. A guest's origin never changes."""

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self.total = 0
        self._by_origin: dict[str, dict[H, int]] = {}  # only guests that have something, and origins that have guests
        self._sums: dict[str, int] = {}  # of each origin

    def __repr__(self) -> str:
        return f"<Share: {self.total} of {self.most}, of {len(self._sums)} origins>"

    @property
    def is_used_up(self) -> bool:
        return self.total >= self.most

    def of(self, origin: str, guest: H) -> int:
        return self._by_origin.get(origin, {}).get(guest, 0)

    def add(self, origin: str, guest: H, more: int = 1) -> None:
        """It has so many more, or fewer."""
        if not more:
            return
        guests = self._by_origin.setdefault(origin, {})
        guests[guest] = guests.get(guest, 0) + more
        self._sums[origin] = self._sums.get(origin, 0) + more
        self.total += more
        if not guests[guest]:
            del guests[guest]
        if not guests:
            del self._by_origin[origin], self._sums[origin]

    def drop(self, origin: str, guest: H) -> None:
        """It has nothing any more."""
        self.add(origin, guest, -self.of(origin, guest))

    def at_whose_expense(self, origin: str, guest: H) -> H | None:
        """Whose place this guest may take: of equals, the one that came first. None: the guest, or its origin, has its part.
        A None that is far from doubtful costs next to nothing, so that asking again and again keeps nobody busy.
        """
        mine, here = self._sums.get(origin, 0), self._by_origin.get(origin, {})
        has = here.get(guest, 0)
        if mine * (len(self._sums) + (origin not in self._sums)) < self.total:
            crowd = max(self._sums, key=self._sums.__getitem__)
            return self._heaviest(crowd) if self._sums[crowd] > mine + 1 else None
        if has * len(here) >= mine:
            return None
        heaviest = self._heaviest(origin)
        return heaviest if here[heaviest] > has + 1 else None

    def _heaviest(self, origin: str) -> H:
        guests = self._by_origin[origin]
        return max(guests, key=guests.__getitem__)

    def of_the_crowd(self) -> H | None:
        """One of the origin that has most."""
        return self._heaviest(max(self._sums, key=self._sums.__getitem__)) if self._sums else None
