"""What a coordinator wants done: the closed union that `Coordinator.step` returns.

Order: actions are to be done in the order of the list. Each carries `cause`, the ordinal number of the event that led
to it. `Send` to a session that has ended is dropped by the shell.
"""

from __future__ import annotations

from dataclasses import dataclass

from tensorhub.messages import FromCoordinator
from tensorhub.types import OpKey


@dataclass(frozen=True, slots=True)
class Publication:
    """R2's mark: this number was used for this content, by this operation."""

    model: str
    lineage: int
    number: int
    content_id: str
    nbytes: int
    world_size: int
    layout_id: str
    key: OpKey


@dataclass(frozen=True, slots=True)
class Decision:
    """R6's commit record of a fill by a group of several ranks; the newest per group is kept."""

    key: OpKey
    model: str
    number: int
    content_id: str


Entry = Publication | Decision


@dataclass(frozen=True, slots=True)
class Durable:
    """What a store gave back at the start: everything that was ever made durable and still counts."""

    publications: tuple[Publication, ...] = ()
    decisions: tuple[Decision, ...] = ()


@dataclass(frozen=True, slots=True)
class Send:
    cause: int
    session: int
    message: FromCoordinator


@dataclass(frozen=True, slots=True)
class Persist:
    """Make `entry` durable, then say so with `events.Persisted(record)`."""

    cause: int
    record: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class CloseSession:
    cause: int
    session: int
    reason: str


Action = Send | Persist | CloseSession
