"""What can happen to a coordinator (`Event`), and what it wants done (`Action`): the closed unions
of `Coordinator.step`.

The shell does actions in the order of the list, and drops a `Send` to a session that has ended.
Each action carries `cause`, the ordinal number of the event that led to it. A store validates what
it reads by the annotations of the entries' fields.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Any, assert_never

from tensorhub.layouts.published import PUBLISHED_BYTES_MAX, SHARDS_MAX
from tensorhub.messages import FromCoordinator, FromWorker, Number, WorldSize
from tensorhub.messages.values import ManifestBlob
from tensorhub.types import U64, Id, Length, Name, OpKey


@dataclass(frozen=True, slots=True)
class Publication:
    """R2's mark: this number was used for this content, by this operation."""

    model: Name
    lineage: Number
    number: Number
    content_id: Id
    nbytes: U64
    world_size: WorldSize
    layout_id: Name
    key: OpKey
    manifest_ids: Annotated[bytes, Length(2**25)] = b""  # as of `Version`

    def decision(self) -> Decision:
        """This publication as the commit record of its group."""
        return Decision(
            self.key, self.model, self.number, self.content_id, self.nbytes, self.world_size
        )


@dataclass(frozen=True, slots=True)
class Decision:
    """R6's commit record of a publish, or of a fill by several ranks. A group's newest one outlives
    its version.
    """

    key: OpKey
    model: Name
    number: Number
    content_id: Id
    nbytes: U64
    world_size: WorldSize


@dataclass(frozen=True, slots=True)
class Rollback:
    """A new lineage (R2): it inherits the publications up to `to`; those above it count no more.

    `ident` names the call, so that a retry of it is not a second one.
    """

    model: Name
    lineage: Number
    to: Number
    ident: Id


IDENTS_CHARS_MAX = 16_384  # some 650: each worker asks for one rollback at a time
Idents = Annotated[str, Length(IDENTS_CHARS_MAX)]


def rolled_back_by(ident: str, before: str) -> str:
    """The idents of the newest rollbacks, each followed by a newline. A retry is recognised by its
    ident.
    """
    return f"{ident}\n{before}"[:IDENTS_CHARS_MAX]


BOUNDS_MAX = 64
Bounds = Annotated[tuple[tuple[Number, Number], ...], Length(BOUNDS_MAX)]
"""Pairs (lineage, number), both ascending: of the versions of earlier lineages, those up to that
number count in that lineage.
"""


def bounded(bounds: Bounds, lineage: int, to: int) -> Bounds:
    """The bounds after a rollback to that number, which begins that lineage. If they are too many,
    the oldest two become one that is as strict as both.
    """
    found = (*(each for each in bounds if each[1] < to), (lineage, to))
    if len(found) > BOUNDS_MAX:
        found = ((found[1][0], found[0][1]), *found[2:])
    return found


def counts_in(bounds: Bounds, current: int, lineage: int, number: int) -> bool:
    """Whether no rollback up to the `current` lineage has ended that version. Of what is not
    recorded: no.
    """
    most = next((to for since, to in bounds if since > lineage), -1)
    return lineage == current or (lineage < current and number <= most)


@dataclass(frozen=True, slots=True)
class Restoration:
    """Versions of an archive, with `roots` as of `Digested`, each empty if it is not known. Those
    whose number is known stay as they are. `lineage` and `mark`: of the model, if it has none.
    `origin`: the cluster that has published them; empty: this one.
    """

    model: Name
    lineage: Number
    mark: Number
    origin: str
    publications: tuple[Publication, ...]
    roots: tuple[bytes, ...]


# of a publication that stands for one which is forgotten, and that a rollback made the newest
STAND_IN = "pruned-"


@dataclass(frozen=True, slots=True)
class Retention:
    """From now on the newest `retain` versions of the model are kept."""

    model: Name
    retain: Number


@dataclass(frozen=True, slots=True)
class Pinned:
    """One worker's wish that this version be kept. It ends with Unpinned, or with the worker."""

    pin: Id
    incarnation: Id
    model: Name
    number: Number
    content_id: Id


@dataclass(frozen=True, slots=True)
class Unpinned:
    pin: Id


@dataclass(frozen=True, slots=True)
class Digested:
    """The roots of all shards' digests, as published (R8): 32 bytes each, in the order of the
    shards.
    """

    model: Name
    number: Number
    content_id: Id
    roots: Annotated[bytes, Length(2**25)]


@dataclass(frozen=True, slots=True)
class Described:
    """What readers of another layout need to know of a publication. After a restart its publisher
    need not come back.

    `description` encodes a `layouts.Published`; `parts` are the parts and manifests that the
    description names.
    """

    model: Name
    number: Number
    content_id: Id
    description: Annotated[bytes, Length(PUBLISHED_BYTES_MAX)]
    parts: Annotated[tuple[ManifestBlob, ...], Length(3 * SHARDS_MAX)]


@dataclass(frozen=True, slots=True)
class Forgotten:
    """This group is gone, and its newest Decision is of no use any more."""

    model: str
    group: str


Entry = (
    Publication
    | Decision
    | Rollback
    | Retention
    | Pinned
    | Unpinned
    | Forgotten
    | Digested
    | Described
    | Restoration
)


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What the entries of a model come to. `mark`: the newest number of its lineage, published or
    rolled back to. `origin`: another cluster, whose versions up to `origin_mark` it has taken over.
    """

    model: Name
    lineage: Number = 0
    mark: Number | None = None
    rollback: Idents = ""  # the idents of the newest ones, newest first; see `rolled_back_by`
    retain: Number = 0
    bounds: Bounds = ()
    origin: Annotated[str, Length(64)] = ""
    origin_mark: Number = 0


@dataclass(frozen=True, slots=True)
class Durable:
    """What a store gave back at the start: everything that was ever made durable and still
    counts.
    """

    publications: tuple[Publication, ...] = ()
    decisions: tuple[Decision, ...] = ()
    models: tuple[ModelRecord, ...] = ()
    pins: tuple[Pinned, ...] = ()
    digested: tuple[Digested, ...] = ()
    described: tuple[Described, ...] = ()

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Durable:
        """The sum of these entries, in their order. A store that keeps tables gives an equal
        result.
        """
        publications: dict[tuple[str, int], Publication] = {}
        decisions: dict[tuple[str, str], Decision] = {}
        models: dict[str, ModelRecord] = {}
        pins: dict[str, Pinned] = {}
        digested: dict[tuple[str, int], Digested] = {}
        described: dict[tuple[str, int], Described] = {}

        def change(model: str, **fields: Any) -> None:
            models[model] = replace(models.get(model, ModelRecord(model)), **fields)

        for entry in entries:
            match entry:
                case Publication():
                    publications[entry.model, entry.number] = entry
                    decisions[entry.key.model, entry.key.group] = entry.decision()
                    change(entry.model, mark=entry.number)
                case Decision():
                    decisions[entry.key.model, entry.key.group] = entry
                case Rollback():
                    for key in [k for k in publications if k[0] == entry.model and k[1] > entry.to]:
                        del publications[key]
                        digested.pop(key, None)
                        described.pop(key, None)
                    before = models.get(entry.model, ModelRecord(entry.model))
                    change(
                        entry.model,
                        lineage=entry.lineage,
                        mark=entry.to,
                        rollback=rolled_back_by(entry.ident, before.rollback),
                        bounds=bounded(before.bounds, entry.lineage, entry.to),
                    )
                case Restoration():
                    if entry.model not in models or models[entry.model].mark is None:
                        change(
                            entry.model,
                            lineage=entry.lineage,
                            mark=entry.mark,
                            bounds=bounded((), entry.lineage, entry.mark),
                            origin=entry.origin,
                            origin_mark=entry.mark,
                        )
                    for each, roots in zip(entry.publications, entry.roots, strict=True):
                        key = each.model, each.number
                        known = publications.get(key)
                        if known is None or known.content_id.startswith(STAND_IN):
                            publications[key] = each
                            if roots:
                                digested[key] = Digested(*key, each.content_id, roots)
                case Retention():
                    change(entry.model, retain=entry.retain)
                case Pinned():
                    pins[entry.pin] = entry
                case Unpinned():
                    pins.pop(entry.pin, None)
                case Forgotten():
                    decisions.pop((entry.model, entry.group), None)
                case Digested() | Described():
                    publication = publications.get((entry.model, entry.number))
                    if publication is None or publication.content_id != entry.content_id:
                        continue
                    if isinstance(entry, Digested):
                        digested[entry.model, entry.number] = entry
                    else:
                        described[entry.model, entry.number] = entry
                case _:
                    assert_never(entry)
        return cls(
            tuple(publications[key] for key in sorted(publications)),
            tuple(decisions[key] for key in sorted(decisions)),
            tuple(models[key] for key in sorted(models)),
            tuple(pins[key] for key in sorted(pins)),
            tuple(digested[key] for key in sorted(digested)),
            tuple(described[key] for key in sorted(described)),
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


DOOR = -1  # in the place of a session: connections that have not come to their Join


@dataclass(frozen=True, slots=True)
class LookFor:
    """Nothing was heard over this session for too long: say `events.Silent` if no message of the
    session lies unread. `DOOR`: say so if no connection waits to be let in: it may be a worker that
    comes back.

    If a message lies unread, the shell need not answer: it passes the message on in its turn, and
    the core asks again.
    """

    cause: int
    session: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker is taken for dead. Operators want to know which worker, and why."""

    cause: int
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Outlived:
    """A worker remembers more than the store does: the store has come back from an older copy, or
    this coordinator is deposed and does not know it. Nothing more may be said to any worker. If the
    store can still be written, the cluster begins anew under another id, so that each worker is
    told that numbers may go back (G3).
    """

    cause: int
    reason: str


Action = Send | Persist | CloseSession | LookFor | WorkerLost | Outlived


@dataclass(frozen=True, slots=True)
class Connected:
    """A peer has proved itself. `session` numbers connections and is never used twice by one
    coordinator.
    """

    session: int
    incarnation: str
    role: str  # "worker" or "observer"
    # it has proved that it knows the read-only token; its incarnation is none of a full worker's
    read_only: bool = False


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
    """Of these sessions, about which `actions.LookFor` asked, all that had arrived when it asked
    has been passed on.
    """

    sessions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = Connected | Received | Disconnected | Persisted | PersistFailed | Silent | Tick
