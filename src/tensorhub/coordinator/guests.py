"""What sessions that may change nothing take of a coordinator: those of the read-only token, and those that have not joined.

They are *guests*. Together they have a share (`Options.guest_share`) of the places, registrations and watches that there
are, so that workers find room however many guests come. Within it they are alone as long as nobody else wants it; once it is
used up, who has less than his part gets it from who has most: of another origin first, then of his own. So a thousand honest
guests behind one address have all of it, and give way only to others.

Responsible for who has how much, and at whose expense one may have more. Not responsible for ending anybody.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

from tensorhub.coordinator import limits
from tensorhub.coordinator.entities import Session, Worker
from tensorhub.types import Options

H = TypeVar("H", bound=Hashable)


class Share(Generic[H]):
    """Of one thing, how much each guest has. Each has an origin that never changes."""

    def __init__(self, most: int) -> None:
        self.most = max(1, most)
        self.total = 0
        self._by_origin: dict[str, dict[H, int]] = {}  # none has nothing, and no origin nobody
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
        """Whose place this guest may take; None: it, or its origin, has its part. Of equals, who came first. Costs next to
        nothing where it is None by far, so that asking in vain again and again keeps nobody busy.
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


class Guests:
    """What all guests have."""

    def __init__(self, options: Options) -> None:
        part = options.guest_share
        self.places = int(part * options.sessions_max)  # of sessions, readers and newcomers together
        self.readers: Share[Session] = Share(self.places)  # sessions of the read-only token
        self.newcomers: Share[Session] = Share(self.places)  # others that have not joined
        self.watches: Share[Session] = Share(int(part * limits.WATCHED_MAX))  # of both
        self.registrations: Share[Worker] = Share(  # of read-only workers
            min(int(part * limits.REGISTRATIONS_MAX), limits.GUEST_REGISTRATIONS_MAX)
        )
        self.away: dict[Worker, None] = {}  # read-only workers without a session; who has gone first is first

    def came(self, session: Session) -> None:
        """Count a session that has just begun."""
        (self.readers if session.read_only else self.newcomers).add(session.origin, session)

    def joined(self, session: Session) -> None:
        """It is a guest no more, unless it is read-only."""
        if not session.read_only:
            self.went(session)
            session.is_guest = False

    def went(self, session: Session) -> None:
        """Count it no more."""
        for share in (self.readers, self.newcomers, self.watches):
            share.drop(session.origin, session)
