"""What a coordinator knows of a connection. Not responsible for who is let in (`visitors`), or may say what (`access`)."""

from __future__ import annotations

from dataclasses import dataclass, field

from tensorhub.coordinator.entities import Worker


@dataclass(slots=True, eq=False)
class Session:
    """One authenticated connection."""

    number: int
    incarnation: str
    role: str
    read_only: bool  # it may say what `access` admits
    origin: str = ""
    worker: Worker | None = None  # set once it has joined
    watched: set[str] = field(default_factory=set)  # models that it has asked to hear of
    heard_at: float = 0.0  # when its newest message arrived
    called_at: float = 0.0  # the same, heartbeats apart
    welcomed_at: float = 0.0  # when its worker was welcomed: whatever it says after its Join answers that
    is_guest: bool = True  # it may change nothing, or has not joined; see `guests`
    pending_writes: int = 0  # those of its Retain, Pin and Unpin that are not answered
