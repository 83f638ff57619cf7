"""What a coordinator wants done: the closed union that `Coordinator.step` returns.

Order: actions are to be done in the order of the list. Each carries `cause`, the ordinal number of the event that led
to it. `Send` to a session that has ended is dropped by the shell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import assert_never

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


@dataclass(frozen=True, slots=True)
class Rollback:
    """A new lineage (R2): it inherits the publications up to `to`; those above it count no more.

    `ident` names the call, so that a retry of it is not a second one.
    """

    model: str
    lineage: int
    to: int
    ident: str


Entry = Publication | Decision | Rollback


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What the entries of a model come to. `mark`: the newest number of its lineage, published or rolled back to."""

    model: str
    lineage: int = 0
    mark: int | None = None
    rollback: str = ""  # the newest one's ident


@dataclass(frozen=True, slots=True)
class Durable:
    """What a store gave back at the start: everything that was ever made durable and still counts."""

    publications: tuple[Publication, ...] = ()
    decisions: tuple[Decision, ...] = ()
    models: tuple[ModelRecord, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Durable:
        """What these entries, in their order, come to. A store that keeps tables says the same."""
        publications: dict[tuple[str, int], Publication] = {}
        decisions: dict[tuple[str, str], Decision] = {}
        models: dict[str, ModelRecord] = {}
        for entry in entries:
            if isinstance(entry, Decision):
                decisions[entry.key.model, entry.key.group] = entry
                continue
            before = models.get(entry.model, ModelRecord(entry.model))
            match entry:
                case Publication():
                    publications[entry.model, entry.number] = entry
                    models[entry.model] = replace(before, mark=entry.number)
                case Rollback():
                    for key in [k for k in publications if k[0] == entry.model and k[1] > entry.to]:
                        del publications[key]
                    models[entry.model] = replace(before, lineage=entry.lineage, mark=entry.to, rollback=entry.ident)
                case _:
                    assert_never(entry)
        return cls(
            tuple(publications[key] for key in sorted(publications)),
            tuple(decisions[key] for key in sorted(decisions)),
            tuple(models[key] for key in sorted(models)),
        )


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
