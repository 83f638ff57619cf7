"""What guests take of a coordinator: sessions with the read-only token, and sessions that have not joined.

Guests together have a share (`Options.guest_share`) of the sessions, registrations and watches, so that workers find room
however many guests come. While nobody else wants a place, a guest may have as many as there are. Once the share is used up,
a guest with fewer places than others gets one from the guest with the most: of another origin first, then of its own. So a
thousand honest guests behind one address may have all of the share, and give way only to other origins.

Responsible for counting what each guest has, and for choosing who gives way. Not responsible for ending any session.
"""

from __future__ import annotations

from tensorhub.coordinator import limits
from tensorhub.coordinator.entities import Worker
from tensorhub.coordinator.sessions import Session
from tensorhub.coordinator.sharing import Share
from tensorhub.types import Options


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
