"""What a session with the read-only token may say (G11): it fetches and looks, and changes nothing for anybody else.

Everything else is refused, with an answer if the sender waits for one, and the session goes on. What such a session fetches
into has a name of its own (`READ_ONLY`), and so has its incarnation (the handshake sees to that). So no name of it is ever
in the way of a full worker.

Three other modules treat such a session differently. Its host memory counts as none (`membership`). All read-only sessions
share one corruption check a second (`corruption_checks`). Of a version's manifest such a session names only the id, and is
believed for itself only (`fills`).
"""

from __future__ import annotations

from typing import assert_never

from tensorhub import messages
from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.sessions import Session
from tensorhub.errors import read_only_refusal
from tensorhub.types import READ_ONLY, OpKind, Purpose


def admits(cluster: Cluster, session: Session, message: messages.FromWorker) -> bool:
    """Whether this read-only session may say that; if not, whoever waits for an answer gets one here."""
    if isinstance(message, messages.FromAnybody):
        return True
    match message:
        case messages.Leave() | messages.Deregister() | messages.Unpin() | messages.ReadyToWrite() | messages.Prepared():
            return True  # about registrations and operations of its own, or about nothing; so below
        case (
            messages.Covered()
            | messages.Compared()
            | messages.Abandon()
            | messages.Resolve()
            | messages.ReadFailed()
            | messages.Progress()
        ):
            return True
        case messages.Register():
            return _fetches(cluster, session, message) or _refuse(cluster, session, message.request, "register")
        case messages.Fill() | messages.Publish():
            kind = OpKind.PUBLISH if isinstance(message, messages.Publish) else message.kind
            if kind is not OpKind.FETCH:
                error = messages.ErrorInfo.of(read_only_refusal(kind.value))
                cluster.send(session.number, messages.Outcome(message.key, message.rank, False, False, None, error))
            return kind is OpKind.FETCH
        case messages.Retain() | messages.Pin() | messages.Rollback():
            return _refuse(cluster, session, message.request, type(message).__name__.lower())
        case messages.LeaveRequest():
            return _refuse(cluster, session, message.request, "unpublish")
        case messages.BegunWith() | messages.Fenced() | messages.CopyRefused() | messages.RetainedAck():
            return False  # about memory that others read: nobody waits for an answer; so below
        case messages.ReaderCut() | messages.DigestedAgain() | messages.Digests():
            return False
        case _:
            assert_never(message)


def _refuse(cluster: Cluster, session: Session, request: int, call: str) -> bool:
    cluster.answer(session.number, request, read_only_refusal(call))
    return False


def _fetches(cluster: Cluster, session: Session, message: messages.Register) -> bool:
    """Whether this registers memory to fetch into, under names of the session's own."""
    model = cluster.models.get(message.model)
    group = model.groups.get(message.group) if model is not None else None
    others = group is not None and any(member.worker is not session.worker for member in group.members.values())
    named_apart = message.group.startswith(READ_ONLY) and message.registration.startswith(READ_ONLY)
    bare = not (message.manifest or message.manifest_id or message.part_ids) and message.held is None
    return not message.serves and message.purpose is Purpose.USE and bare and named_apart and not others
