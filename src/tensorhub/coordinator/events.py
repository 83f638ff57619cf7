"""What can happen to a coordinator: the closed union that `Coordinator.step` takes."""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.messages import FromWorker


@dataclass(frozen=True, slots=True)
class Connected:
    """A peer has proved itself. `session` numbers connections and is never used twice by one coordinator."""

    session: int
    incarnation: str
    role: str  # "worker" or "observer"
    read_only: bool = False  # it has proved that it knows the read-only token; its incarnation is none of a full worker's


@dataclass(frozen=True, slots=True)
class Received:
    """A peer said something."""

    session: int
    message: FromWorker


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A connection has ended, for whatever reason."""

    session: int


@dataclass(frozen=True, slots=True)
class Persisted:
    """The entry of `actions.Persist` with this number is durable."""

    record: int


@dataclass(frozen=True, slots=True)
class PersistFailed:
    """That entry is not durable and never will be."""

    record: int
    reason: str


@dataclass(frozen=True, slots=True)
class Silent:
    """Of these sessions, about which `actions.LookFor` asked, all that had arrived when it asked has been passed on."""

    sessions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Connected | Received | Disconnected | Persisted | PersistFailed | Silent | Tick
