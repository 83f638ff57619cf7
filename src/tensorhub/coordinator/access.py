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

from tensorhub.coordinator.cluster import Cluster
from tensorhub.coordinator.entities import Session
from tensorhub.errors import read_only_refusal
from tensorhub.messages import (
    Abandon,
    BegunWith,
    Check,
    ChunksThere,
    Compared,
    CopyRefused,
    Deregister,
    Describe,
    DigestedAgain,
    Digests,
    ErrorInfo,
    Fenced,
    Fill,
    FromWorker,
    GetManifest,
    Heartbeat,
    Join,
    Leave,
    LeaveRequest,
    Outcome,
    Pin,
    Prepared,
    Progress,
    Publish,
    ReaderCut,
    ReadFailed,
    ReadyToWrite,
    Refused,
    Register,
    Resolve,
    Retain,
    RetainedAck,
    Rollback,
    Unpin,
    Unwatch,
    Watch,
)
from tensorhub.types import READ_ONLY, OpKind, Purpose


def admits(cluster: Cluster, session: Session, message: FromWorker) -> bool:
    """Whether this read-only session may say that; else it is answered here."""
    match message:
        case Join() | Heartbeat() | Leave() | Watch() | Unwatch() | Describe() | GetManifest() | Check():
            return True
        case Compared():
            return True
        case Deregister() | ReadyToWrite() | Prepared() | Abandon() | Resolve() | ReadFailed() | Progress() | Unpin():
            return True  # about registrations and operations of its own, or about nothing
        case Register():
            return _fetches(cluster, session, message) or _refuse(cluster, session, message.request, "register")
        case Fill() | Publish():
            kind = OpKind.PUBLISH if isinstance(message, Publish) else message.kind
            if kind is not OpKind.FETCH:
                error = ErrorInfo.of(read_only_refusal(kind.value))
                cluster.send(session.number, Outcome(message.key, message.rank, False, False, None, error))
            return kind is OpKind.FETCH
        case Retain() | Pin() | Rollback():
            return _refuse(cluster, session, message.request, type(message).__name__.lower())
        case LeaveRequest():
            return _refuse(cluster, session, message.request, "unpublish")
        case (
            BegunWith()
            | Fenced()
            | CopyRefused()
            | RetainedAck()
            | ReaderCut()
            | DigestedAgain()
            | ChunksThere()
            | Digests()
        ):
            return False  # those are about memory that others read; nobody waits for an answer
        case _:
            assert_never(message)


def _refuse(cluster: Cluster, session: Session, request: int, call: str) -> bool:
    cluster.send(session.number, Refused(request, ErrorInfo.of(read_only_refusal(call))))
    return False


def _fetches(cluster: Cluster, session: Session, message: Register) -> bool:
    """Whether that is memory to fetch into, under names that are its own."""
    model = cluster.models.get(message.model)
    group = model.groups.get(message.group) if model is not None else None
    others = group is not None and any(member.worker is not session.worker for member in group.members.values())
    named_apart = message.group.startswith(READ_ONLY) and message.registration.startswith(READ_ONLY)
    bare = not message.manifest and message.held is None
    return not message.serves and message.purpose is Purpose.USE and bare and named_apart and not others
