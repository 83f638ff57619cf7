"""Which sessions are admitted, what each may watch, and what a session with the read-only token may
say (G11).

A read-only session fetches and looks, and changes nothing for other sessions. What else it says is
refused, with an answer if the sender waits for one, and the session goes on. What it fetches into
has a name of its own (`READ_ONLY`), and so has its incarnation (the handshake sees to that). So no
name of it is ever in the way of a full worker.

Caps protect full workers from the holders of the read-only token: on read-only sessions, on their
registrations and on their watches. At a cap the read-only session that was idle longest makes room.

Not responsible for workers (`membership`). Other modules treat a read-only worker differently where
its word, or its number, would count for full workers: all read-only workers share one corruption
check a second (`corruption_checks`); they name a manifest by its id only and are believed for
themselves only (`fills`, `ways`, `testimonies`); their calls keep no version (`versions`), and get
another source in their turn (`readers`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import assert_never

from tensorhub import messages
from tensorhub.coordinator import limits
from tensorhub.coordinator.actions import Connected
from tensorhub.coordinator.cluster import Cluster, Session
from tensorhub.coordinator.membership import Membership
from tensorhub.coordinator.versions import beyond_record
from tensorhub.errors import CoordinatorUnavailable, StateError, TensorHubError, read_only_refusal
from tensorhub.types import READ_ONLY, OpKind, Purpose


@dataclass(eq=False, repr=False)
class Access:
    """Begins sessions. `Membership` makes workers of them, and ends them."""

    _cluster: Cluster
    _membership: Membership

    def connect(self, event: Connected) -> None:
        """Begin a session, or refuse it."""
        cluster, most = self._cluster, self._cluster.options.sessions_max
        if len(cluster.sessions) >= most:
            text = (
                f"the coordinator has {most} connections already (Options.sessions_max, or its "
                f"`ulimit -n`)"
            )
            cluster.refuse_session(
                event.session, CoordinatorUnavailable(f"{text}: try again later")
            )
            return
        session = Session(event.session, event.incarnation, event.role, event.read_only)
        session.heard_at = session.called_at = cluster.now
        if session.read_only:
            others = cluster.read_only
            if len(others.sessions) >= others.sessions_max:
                text = (
                    f"it makes room: {others.sessions_max} read-only sessions are the most "
                    f"(half of Options.sessions_max)"
                )
                self._end(next(iter(others.sessions)), CoordinatorUnavailable(text))
            others.called(session)
        cluster.sessions[event.session] = session
        # the shell sees to it that other sessions join soon
        if session.read_only or session.role != "worker":
            cluster.timers.set("idle", str(session.number), self._deadline(session))

    def heard(self, session: Session, message: messages.FromWorker) -> None:
        """The session has said something."""
        session.heard_at = self._cluster.now
        if not isinstance(message, (messages.Heartbeat, messages.Join)):
            session.called_at = self._cluster.now
            if session.read_only:
                self._cluster.read_only.called(session)

    def due(self, number: int) -> None:
        """End a session that is idle: it waits for nothing, and says nothing but heartbeats, or not
        even those.
        """
        cluster, session = self._cluster, self._cluster.sessions.get(number)
        if session is None:
            return
        deadline = self._deadline(session)
        if cluster.now < deadline:
            cluster.timers.set("idle", str(number), deadline)
            return
        self._membership.disconnected(session)
        what = (
            "no heartbeat, watch or call came"
            if session.worker is None
            else "no registration, watch or call came"
        )
        cluster.close_session(number, f"{what} for {cluster.now - session.called_at:.0f} s")

    def _deadline(self, session: Session) -> float:
        """When it will be idle unless it says something. (A worker that sends no heartbeats loses
        its lease.)
        """
        idle_at = session.called_at + limits.IDLE_S
        if session.watched or (session.worker is not None and session.worker.members):
            idle_at = self._cluster.now + limits.IDLE_S
        if session.worker is not None:
            return idle_at
        return min(
            idle_at,
            max(session.heard_at, self._cluster.listens_since) + self._cluster.options.lease_s,
        )

    def watch(self, session: Session, message: messages.Watch) -> None:
        """A session wants to hear of this model's newest version, now and whenever another one is
        the newest.
        """
        name = message.model
        if self._may_watch(session, name):
            self._cluster.watch(session, name)
            watched = self._cluster.models.get(name)
            if session.remembers:
                told = message.lineage, message.version
                self._cluster.outlived(beyond_record(name, watched, *told))
            newest = watched.newest_visible() if watched is not None else None
            lineage = watched.history.lineage if watched is not None else 0
            news = messages.Announce(name, newest.info if newest is not None else None, lineage)
            self._cluster.send(session.number, news)

    def _may_watch(self, session: Session, name: str) -> bool:
        """Whether it may watch one more model. If not, a session ends: a Watch has no answer that
        could refuse it.
        """
        cluster = self._cluster
        if name in session.watched:
            return True
        if len(session.watched) >= 2 * messages.WATCHES_MAX:
            self._end(
                session,
                StateError(
                    f"this worker follows {2 * messages.WATCHES_MAX} models already (WATCHES_MAX)"
                ),
            )
            return False
        if session.read_only and cluster.read_only.watches >= limits.READ_ONLY_WATCHES_MAX:
            idle = (
                each for each in cluster.read_only.sessions if each.watched and each is not session
            )
            victim = next(idle, session)
            text = "it makes room: read-only sessions follow {} models (READ_ONLY_WATCHES_MAX)"
            self._end(victim, CoordinatorUnavailable(text.format(cluster.read_only.watches)))
            return victim is not session
        if cluster.watched >= limits.WATCHED_MAX:
            text = (
                f"all workers together follow {cluster.watched} models already (WATCHED_MAX): "
                f"try again later"
            )
            self._end(session, CoordinatorUnavailable(text))
            return False
        return True

    def _end(self, session: Session, error: TensorHubError) -> None:
        """Give its place to another session. Its connection ends once it has heard why."""
        self._membership.disconnected(session)
        self._cluster.refuse_session(session.number, error)


def admitted(
    cluster: Cluster, session: Session, message: messages.FromWorker
) -> messages.FromWorker | None:
    """The message of a read-only session, as much of it as counts. None: it is refused, and a
    sender that waits hears so.

    The host memory of a read-only worker counts as none, and its reports about its sources are not
    believed.
    """
    match message:
        case messages.Join():
            return replace(message, host_bytes=0)
        case messages.Progress():
            return replace(message, flows=())
        case messages.Register():
            if not _fetches(cluster, session, message):
                _refuse(cluster, session, message.request, "register")
                return None
        case messages.Fill() | messages.Publish():
            kind = OpKind.PUBLISH if isinstance(message, messages.Publish) else message.kind
            if kind is not OpKind.FETCH:
                error = messages.ErrorInfo.of(read_only_refusal(kind.value))
                cluster.send(
                    session.number,
                    messages.Outcome(message.key, message.rank, False, False, None, error),
                )
                return None
        case messages.Retain() | messages.Pin() | messages.Rollback() | messages.Restore():
            _refuse(cluster, session, message.request, type(message).__name__.lower())
            return None
        case messages.LeaveRequest():
            _refuse(cluster, session, message.request, "unpublish")
            return None
        case (
            messages.BegunWith()
            | messages.Fenced()
            | messages.CopyRefused()
            | messages.RetainedAck()
        ):
            # about memory that other workers read: no sender waits for an answer; so below
            return None
        case messages.ReaderCut() | messages.DigestedAgain() | messages.Digests():
            return None
        case (
            messages.Heartbeat()
            | messages.Watch()
            | messages.Unwatch()
            | messages.Describe()
            | messages.GetManifest()
            | messages.CheckStamp()
        ):
            pass
        case messages.GetPart() | messages.GetPublication() | messages.Check():
            pass
        case messages.GetEvents() | messages.Explain() | messages.GetUpdates():
            pass
        case (
            messages.Leave()
            | messages.Deregister()
            | messages.Unpin()
            | messages.ReadyToWrite()
            | messages.Prepared()
            | messages.Took()
            | messages.Served()
        ):
            pass  # about registrations and operations of its own, or about nothing; so below
        case (
            messages.Covered()
            | messages.Compared()
            | messages.Abandon()
            | messages.Resolve()
            | messages.ReadFailed()
        ):
            pass
        case _:
            assert_never(message)
    return message


def _refuse(cluster: Cluster, session: Session, request: int, call: str) -> None:
    cluster.answer(session.number, request, read_only_refusal(call))


def _fetches(cluster: Cluster, session: Session, message: messages.Register) -> bool:
    """Whether this registers memory to fetch into, under names of the session's own."""
    model = cluster.models.get(message.model)
    group = model.groups.get(message.group) if model is not None else None
    others = group is not None and any(
        member.worker is not session.worker for member in group.members.values()
    )
    named_apart = message.group.startswith(READ_ONLY) and message.registration.startswith(READ_ONLY)
    bare = (
        not (message.manifest or message.manifest_id or message.part_ids) and message.held is None
    )
    return (
        not message.serves
        and message.purpose is Purpose.USE
        and bare
        and named_apart
        and not others
    )
