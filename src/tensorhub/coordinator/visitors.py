"""Sessions: who is let in, what each may watch, and how long a guest may be idle.

Responsible for guests that give way to one another once their share is used up, and for ending guests that are idle. Not
responsible for workers (`membership`), nor for what a session may say (`access`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.coordinator import limits
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.events import Connected
from tensorhub.coordinator.membership import Membership
from tensorhub.coordinator.sessions import Session
from tensorhub.errors import CoordinatorUnavailable, StateError, TensorHubError
from tensorhub.messages import WATCHES_MAX, Announce, FromWorker, Heartbeat, Join


@dataclass(eq=False, repr=False)
class Visitors:
    """Begins sessions; `membership` makes workers of them, and ends them."""

    _cluster: Cluster
    _membership: Membership

    def connect(self, event: Connected) -> None:
        """A session begins, if need be in the place of a guest; or it is refused."""
        cluster, guests, most = self._cluster, self._cluster.guests, self._cluster.options.sessions_max
        session = Session(event.session, event.incarnation, event.role, event.read_only, event.origin)
        session.heard_at = session.called_at = cluster.now
        if event.read_only and guests.readers.is_used_up:
            text = f"{guests.readers.total} read-only sessions are there (Options.guest_share): try again later"
            victim = guests.readers.at_whose_expense(event.origin, session)
        elif len(cluster.sessions) >= most:
            text = (
                f"the coordinator has {most} connections already (Options.sessions_max, or its `ulimit -n`): try again later"
            )
            are_many = guests.readers.total + guests.newcomers.total > guests.places
            victim = guests.newcomers.of_the_crowd() if are_many else None
        else:
            text, victim = "", None
        if text and victim is None:
            cluster.refuse_session(event.session, CoordinatorUnavailable(text))
            return
        if victim is not None:
            self._end(victim, CoordinatorUnavailable("another one needs this session's place (Options.guest_share)"))
        cluster.sessions[event.session] = session
        guests.came(session)
        if session.read_only or session.role != "worker":  # the shell sees to it that others join soon
            cluster.timers.set("guest", str(session.number), self._deadline(session))

    def heard(self, session: Session, message: FromWorker) -> None:
        """It has said something."""
        session.heard_at = self._cluster.now
        if not isinstance(message, (Heartbeat, Join)):
            session.called_at = self._cluster.now

    def due(self, number: int) -> None:
        """A guest may be idle: it waits for nothing, and nothing is heard of it but heartbeats, or not even those."""
        cluster, session = self._cluster, self._cluster.sessions.get(number)
        if session is None:
            return
        deadline = self._deadline(session)
        if cluster.now < deadline:
            cluster.timers.set("guest", str(number), deadline)
            return
        self._membership.disconnected(session)
        what = "no heartbeat, watch or call came" if session.worker is None else "no registration, watch or call came"
        cluster.close_session(number, f"{what} for {cluster.now - session.called_at:.0f} s")

    def _deadline(self, session: Session) -> float:
        """When it will be idle unless something is heard of it. (A worker that sends no heartbeats loses its lease.)"""
        idle_at = session.called_at + limits.GUEST_IDLE_S
        if session.watched or (session.worker is not None and session.worker.members):
            idle_at = self._cluster.now + limits.GUEST_IDLE_S
        return (
            idle_at
            if session.worker is not None
            else min(idle_at, max(session.heard_at, self._cluster.listens_since) + self._cluster.options.lease_s)
        )

    def watch(self, session: Session, name: str) -> None:
        """A session wants to hear of this model's newest version, now and whenever another one is the newest."""
        if self._may_watch(session, name):
            self._cluster.watch(session, name)
            watched = self._cluster.models.get(name)
            newest = watched.newest_visible() if watched is not None else None
            self._cluster.send(session.number, Announce(name, newest.info if newest is not None else None))

    def _may_watch(self, session: Session, name: str) -> bool:
        """Whether it may watch one more model. If not, a session ends: a Watch has no answer that could refuse it."""
        cluster, share = self._cluster, self._cluster.guests.watches
        if name in session.watched:
            return True
        if len(session.watched) >= 2 * WATCHES_MAX:
            self._end(session, StateError(f"this worker follows {2 * WATCHES_MAX} models already (WATCHES_MAX)"))
            return False
        if session.is_guest and share.is_used_up:
            text = "who is read-only, or has not joined, follows {} models (Options.guest_share): try again later"
            victim = share.at_whose_expense(session.origin, session) or session
            self._end(victim, CoordinatorUnavailable(text.format(len(victim.watched))))
            return victim is not session
        if cluster.watched >= limits.WATCHED_MAX:
            text = f"all workers together follow {cluster.watched} models already (WATCHED_MAX): try again later"
            self._end(session, CoordinatorUnavailable(text))
            return False
        return True

    def _end(self, session: Session, error: TensorHubError) -> None:
        """Give its place to others. Its connection ends once it has heard why."""
        self._membership.disconnected(session)
        self._cluster.refuse_session(session.number, error)
