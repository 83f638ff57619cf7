"""What a coordinator knows of its connections.

Not responsible for which session is admitted, nor for what a session may say (`access`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tensorhub.coordinator.entities import Worker


@dataclass(slots=True, eq=False)
class Session:
    """One authenticated connection."""

    number: int
    incarnation: str
    role: str
    read_only: bool  # it may say what `access` admits
    worker: Worker | None = None  # set once it has joined
    watched: set[str] = field(default_factory=set)  # models that it has asked to hear of
    heard_at: float = 0.0  # when its newest message arrived
    called_at: float = 0.0  # the same, heartbeats apart
    welcomed_at: float = 0.0  # when its worker was welcomed: whatever it says after its Join answers that
    pending_writes: int = 0  # those of its Retain, Pin and Unpin that are not answered


class ReadOnlySessions:
    """What all read-only sessions have together."""

    def __init__(self, sessions_max: int) -> None:
        self.sessions_max = max(1, sessions_max // 2)
        self.sessions: dict[Session, None] = {}  # the session that was idle longest is first
        self.away: dict[Worker, None] = {}  # workers without a session; the worker that left first is first
        self.watches = 0
        self.registrations = 0

    def __repr__(self) -> str:
        return f"<ReadOnlySessions: {len(self.sessions)} of {self.sessions_max}>"

    def called(self, session: Session) -> None:
        """The session is new, or has said something."""
        self.sessions.pop(session, None)
        self.sessions[session] = None

    def idle_workers(self) -> Iterator[Worker]:
        """All their workers; the worker that was idle longest is first."""
        yield from self.away
        yield from (session.worker for session in self.sessions if session.worker is not None)
