"""What sessions that may change nothing take of a coordinator: those of the read-only token, and those that have not joined.

They are *guests*. Together they have a share (`Options.guest_share`) of the places, registrations and watches that there
are, so that workers find room however many guests come. Within it they are alone as long as nobody else wants it; once it is
used up, who has less than his part gets it from who has most: of another origin first, then of his own. So a thousand honest
guests behind one address have all of it, and give way only to others.

Responsible for who has how much, and at whose expense one may have more. Not responsible for ending anybody.
"""

from __future__ import annotations

from tensorhub.coordinator import limits
from tensorhub.coordinator.entities import Session, Worker
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
