"""The things that a coordinator knows. `cluster` holds them, components change them.

    Worker ── Member ── Group ── Model           an incarnation, its registrations, their groups and models
                │         │        │
             Holding ── Replica ── Version       what a rank's memory holds, as a part of its group's copy
                │                  │
            ReadLease ── RankPart ── Operation   a read of it, for a rank's part in a group operation

Each line is a reference in both directions, so all of them stand in one module. Attempts are
entities, too: `Withdrawal`, `Handover`, `PendingWrite`, `Inquiry`. The digests of a shard are its
`Testimony`.

Each attribute's comment says what it always equals; `invariants` checks that. docs/glossary.md
defines the words. Other modules derive facts from several entities: `waiting` says what a reader
lacks and what an operation waits for.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from itertools import islice
from math import inf
from typing import Any, ClassVar, TypeVar

from tensorhub.coordinator import states
from tensorhub.coordinator.actions import Bounds, Decision, Pinned
from tensorhub.coordinator.layout_holdings import Counted, Holders, LayoutHoldings
from tensorhub.coordinator.states import (
    LeaseState,
    OperationState,
    PartState,
    ReplicaState,
    VersionState,
    WorkerState,
)
from tensorhub.machine import Stateful
from tensorhub.messages import (
    DIGESTS_BYTES_MAX,
    Abandon,
    Begun,
    Fill,
    Flow,
    Need,
    Outcome,
    Pin,
    Publish,
    Register,
    Resolve,
    Restore,
    Retain,
    Rollback,
    Unpin,
)
from tensorhub.model.manifest import ID_BYTES
from tensorhub.scheduler.choice import Load
from tensorhub.scheduler.sources import Standing
from tensorhub.types import (
    READ_ONLY,
    SAME_HOST_TRANSPORTS,
    Endpoint,
    Location,
    Medium,
    OpKey,
    OpKind,
    Purpose,
    VersionInfo,
)

SelectionKey = tuple[int, str]  # the shard that names the class, and its own id
FORGOTTEN_KEPT_MAX = 4096  # numbers of a model, should a rollback make one the newest again
# Names of their own, since Python 3.11 takes long to look up a member of an enum.
VISIBLE = (VersionState.AVAILABLE, VersionState.UNAVAILABLE)
SERVING = (ReplicaState.FILLING, ReplicaState.READY)
DECIDED = (OperationState.COMMITTED, OperationState.ABORTED)
_RUNNING = OperationState.RUNNING
_CALLED, _READING, _VOTED = PartState.CALLED, PartState.READING, PartState.VOTED
_LIVE, _LOST = WorkerState.LIVE, WorkerState.LOST
_HOST, _ARCHIVE = Medium.HOST, Purpose.ARCHIVE
# purposes of a copy of one shard, which is a group of its own
OF_ONE_SHARD = frozenset({Purpose.RETENTION, Purpose.SEED, Purpose.ARCHIVE})
DECIDED_KEPT_MAX = 32  # outcomes that a group remembers for ranks that ask late

S = TypeVar("S", bound=StrEnum)


class _Moving(Stateful[S]):
    """An entity that moves along a table, from its `first` state on."""

    first: ClassVar[Any]
    __slots__ = ()

    def __post_init__(self) -> None:
        super().__init__(self.first)


@dataclass(slots=True, eq=False)
class Worker(_Moving[WorkerState]):
    """One incarnation of one worker process."""

    machine: ClassVar = "worker lease"
    table: ClassVar = states.WORKER_TABLE
    first: ClassVar = WorkerState.LIVE
    incarnation: str
    name: str
    location: Location
    endpoints: tuple[Endpoint, ...]
    session: int | None  # the connection over which it can be told something
    heard_at: float  # when its newest message was heard, or the end of its connection
    # the newest time at which the coordinator said something that this worker has answered
    answers: float
    host_bytes: int  # what its copies in host memory may take; 0 if it is read-only
    read_only: bool = False  # it fetches and looks: it is never a source
    # it has registered as such: all that is in its memory may be gone at any time
    spot: bool = False
    # how many times slower its link is than most links, as a power of two, by what readers said
    # last
    slowness: int = 0
    members: dict[str, Member] = field(default_factory=dict)  # by registration id; empty once LOST
    release: str = ""  # of TensorHub, in its process
    is_shown: bool = False  # it has registered memory, so that events tell of it
    # of the endpoints; kept, since each reader looks at every source
    transports: frozenset[str] = field(init=False)
    strided: frozenset[str] = field(init=False)  # those of them that go across layouts

    def __post_init__(self) -> None:
        _Moving.__post_init__(self)
        self.connected_at(self.endpoints)

    def connected_at(self, endpoints: tuple[Endpoint, ...]) -> None:
        """Where its memory is reached from now on."""
        self.endpoints = endpoints
        self.transports = frozenset(endpoint.transport for endpoint in endpoints)
        self.strided = frozenset(endpoint.transport for endpoint in endpoints if endpoint.strides)

    def reaches(self, other: Worker, *, across: bool = False) -> frozenset[str]:
        """The transports of both workers that reach from the location of one to the location of the
        second. `across`: between layouts.
        """
        common = self.strided & other.strided if across else self.transports & other.transports
        return (
            common if self.location.host == other.location.host else common - SAME_HOST_TRANSPORTS
        )

    def __repr__(self) -> str:
        return (
            f"<Worker {self.name} {self.incarnation[:8]} {self.state} members={len(self.members)}>"
        )


@dataclass(slots=True, eq=False)
class Member:
    """One rank of one group: a registration."""

    registration: str
    worker: Worker
    group: Group
    rank: int
    # of a version, that this memory holds; the rank, but for a fetch and a copy of one shard
    shard: int
    # its manifest and its parts (none for whole and rank-local tensors) are kept in `Manifests`
    said: Register
    said_in: int | None  # the session in which it was registered or announced last
    dropped: bool = False  # it is a copy that its worker was told, in this session, to give up
    # what its memory holds or is filled with; None while the memory is its owner's to write
    holding: Holding | None = None
    retained_seq: int = 0  # the number of its newest retention notice
    # withdrawn holdings whose fence is not confirmed yet
    leaving: list[Holding] = field(default_factory=list)
    # the manifest of the fill that it had begun under a former coordinator, until that is bound
    # again
    begun: bytes = b""
    begun_id: str = ""  # the id of that manifest
    # As `said.parts`, of what it has read last from another layout, as it lies in its memory
    arranged: tuple[bytes, ...] = ()
    # its Register, if that announced a holding of a layout that could not be known yet; else 0
    unheard: int = 0
    # by id; the ACTIVE and FENCING leases of this reader
    reads: dict[str, ReadLease] = field(default_factory=dict)

    @property
    def keeps(self) -> bool:
        """Whether it holds a version of which its owner has acknowledged that it is retained."""
        is_told = self.holding is not None and self.holding.told
        return is_told and self.registration not in self.group.model.notices.unaware

    def drop(self, dropped: bool) -> None:
        """Its worker is told to give this copy up, or keeps it after all."""
        self.dropped = dropped

    def wait(self, request: int) -> None:
        """The layout of the holding that this Register announces is not known yet; 0: it need not
        be known.
        """
        self.unheard = request

    @property
    def fits_any_layout(self) -> bool:
        """Whether it takes a published shard of any version: a fetch that has no layout, or a copy
        of one shard.
        """
        return self.is_of_one_shard or not (self.said.layout_id or self.said.serves)

    @property
    def is_of_one_shard(self) -> bool:
        """Whether it is a copy of a shard, and a group of its own."""
        return self.said.purpose in OF_ONE_SHARD

    @property
    def part(self) -> RankPart | None:
        """What this rank does in its group's undecided operation, if it takes part in one."""
        operation = self.group.operation
        part = operation.parts.get(self.rank) if operation is not None else None
        return part if part is not None and part.member is self else None

    @property
    def holdings(self) -> list[Holding]:
        """The present holding, and withdrawn holdings without a confirmed fence."""
        return [*([] if self.holding is None else [self.holding]), *self.leaving]

    def __repr__(self) -> str:
        return (
            f"<Member {self.group.model.name}/{self.group.name}[{self.rank}] at {self.worker.name}>"
        )


@dataclass(slots=True, eq=False)
class Group:
    """One model-parallel group of one model."""

    model: Model
    name: str
    world_size: int
    # of its ranks together, when all were here last; None: not known before they have come
    layout_id: str | None
    epoch: int  # changes whenever a rank is replaced
    spot: bool = False  # any rank is
    sequence: int = 0  # of the next operation that is not decided
    members: dict[int, Member] = field(default_factory=dict)  # by rank; only registered ones
    operation: Operation | None = None  # the undecided one
    attempt_before: str = ""  # why the last one ended, if its ranks call again by themselves
    # newest DECIDED_KEPT_MAX, by rank
    decided: dict[OpKey, dict[int, Outcome]] = field(default_factory=dict)
    replicas: list[Replica] = field(default_factory=list)  # those that are not GONE

    def begin(self, operation: Operation) -> None:
        """From now on this operation is the undecided one."""
        self.operation, self.sequence = operation, operation.key.sequence

    def end(self, key: OpKey) -> None:
        """The group's operation is decided."""
        self.operation = None
        if key.epoch == self.epoch:
            self.sequence = key.sequence + 1

    def renumber(self, epoch: int) -> None:
        """Its ranks have changed."""
        self.epoch, self.sequence = epoch, 0

    @property
    def layout(self) -> str:
        """Once every rank has called."""
        assert self.layout_id is not None
        return self.layout_id

    @property
    def reads_as(self) -> str:
        """The layout in which the group reads a version that was published in another layout. The
        words of the first reader about such a layout hold for all its readers. So read-only workers
        have layouts of their own: full workers do not depend on the words of read-only workers.
        """
        layout_id = self.layout_id or ""
        return READ_ONLY + layout_id if self.name.startswith(READ_ONLY) else layout_id


@dataclass(slots=True, eq=False)
class Seen:
    """What `versions` saw when it looked at a version last."""

    # The layouts that have holders, once the version is visible; whether each shard has a source,
    # and whether each class of shards has one.
    readable_in: list[tuple[str, bool, bool]] = field(default_factory=list)
    # the version is old, and only read-only calls that are bound to it keep it
    outlived: bool = False
    # the incarnation that has restored the version, and is to bring a holder; "": one was there
    restorer: str = ""
    # `Shards.changes` of the published layout, if a look at the version changes nothing until then
    rests_at: int = -1


@dataclass(slots=True, eq=False)
class Version(_Moving[VersionState]):
    """One number of one lineage, with the content that was published under it."""

    machine: ClassVar = "version"
    table: ClassVar = states.VERSION_TABLE
    first: ClassVar = VersionState.STAGED
    info: VersionInfo
    laid_out_as: InitVar[str]
    publisher: OpKey  # the publish that minted it
    # Of each shard, as it was published: the id of its manifest, and the id of its last part, which
    # names all parts (zeros: it has no parts). Empty: the coordinator that has recorded the version
    # did not say.
    manifest_ids: bytes = b""
    retained: bool = False  # its holders were told so
    seen: Seen = field(default_factory=Seen)
    # by id: in which it is held or filled, too
    others: dict[str, LayoutHoldings[Holding]] = field(default_factory=dict)
    # By shard and incarnation: how often a copy could not be made there, and the earliest time to
    # ask for one again.
    refusals: dict[tuple[int, str], tuple[int, float]] = field(default_factory=dict)
    testimonies: dict[int, Testimony] = field(default_factory=dict)  # by shard; made at first use
    # By the first shard of a class, and by selection: the testimonies that readers of other layouts
    # need.
    selections: dict[SelectionKey, Testimony] = field(default_factory=dict)
    # By the first shard of a published class: two shards that differ, and where (`coverage`).
    drifted: dict[int, tuple[int, int, str]] = field(default_factory=dict)
    roots_stored: bool = False  # the roots of all shards are durable, or on their way to the store
    # incarnations that held other bytes as this; the newest
    condemned: dict[str, None] = field(default_factory=dict)
    # undecided operations on this version
    bound: dict[OpKey, Operation] = field(default_factory=dict)
    # bound ones that lack a source, or agreed digests
    starving: dict[OpKey, Operation] = field(default_factory=dict)
    holdings: LayoutHoldings[Holding] = field(init=False)  # as it was published

    def __post_init__(self, laid_out_as: str) -> None:
        _Moving.__post_init__(self)
        self.holdings = LayoutHoldings(laid_out_as)

    @property
    def layout_id(self) -> str:
        """Of the group that publishes, once every rank has called."""
        return self.holdings.layout_id

    @property
    def number(self) -> int:
        return self.info.version

    @property
    def lineage(self) -> int:
        return self.info.lineage

    @property
    def visible(self) -> bool:
        return self.state in VISIBLE

    @property
    def is_kept(self) -> bool:
        """Whether it may be, or become, visible."""
        return self.state not in (VersionState.DISCARDED, VersionState.RETIRED)

    @property
    def manifests(self) -> dict[int, bytes]:
        """The published manifests by shard; empty once no rank holds or fills the version."""
        return self.holdings.manifests

    @property
    def layouts(self) -> Iterator[LayoutHoldings[Holding]]:
        """All layouts in which a rank may hold the version."""
        yield self.holdings
        yield from self.others.values()

    def root(self, shard: int) -> bytes:
        """Of the digests of that published shard; empty: not known."""
        testimony = self.testimonies.get(shard)
        return testimony.root if testimony is not None else b""

    def is_laid_out_as(self, group: Group) -> bool:
        """Whether that group has the layout in which it was published."""
        return (self.layout_id, self.info.world_size) == (group.layout_id, group.world_size)

    def recorded(self, shard: int) -> tuple[str, str] | None:
        """The recorded ids of the manifest of that shard and of its last part ("": none). None: the
        record does not say.
        """
        first = ID_BYTES * 2 * shard
        second, end = first + ID_BYTES, first + 2 * ID_BYTES
        parts_id = self.manifest_ids[second:end]
        return (
            (self.manifest_ids[first:second].hex(), parts_id.hex() if any(parts_id) else "")
            if parts_id
            else None
        )

    def lay_out(self, layout_id: str) -> None:
        """Every rank has published: from now on its shards are held."""
        self.holdings.layout_id = layout_id
        self.holdings.lay_out(self.info.world_size)

    def has_live_source(self) -> bool:
        """Whether every shard is held, complete and committed, by a replica that takes readers."""
        return self.holdings.have_sources()

    def can_be_read(self) -> bool:
        """`has_live_source`, counting only workers that are heard now."""
        return self.holdings.copies() > 0

    @property
    def copies(self) -> int:
        """That can be read now, in all layouts: shards of different ones do not add up."""
        return sum(layout.copies() for layout in self.layouts)

    @property
    def is_held(self) -> bool:
        """Whether every shard has a source in some layout: the published one, or another one, which
        its readers can read.
        """
        return any(layout.have_sources() for layout in self.layouts)

    @property
    def abandoned(self) -> bool:
        """Whether the last holder of the published layout has left on purpose, and the version
        cannot be read.
        """
        return self.holdings.abandoned and not self.is_held

    def __repr__(self) -> str:
        holders = sum(len(h) for layout in self.layouts for h in layout.values())
        return f"<Version {self.info.model}:{self.number} {self.state} holdings={holders}>"


@dataclass(slots=True, eq=False)
class Replica(_Moving[ReplicaState]):
    """One group's copy of one version, or what a broken fill left of it (TORN)."""

    machine: ClassVar = "replica"
    table: ClassVar = states.REPLICA_TABLE
    first: ClassVar = ReplicaState.FILLING
    id: str
    version: Version
    group: Group
    medium: Medium  # that of every rank's memory; so below
    purpose: Purpose
    # by rank; while the memory still belongs to this replica
    holdings: dict[int, Holding] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every rank holds it, and none leaves."""
        return (
            sum(h.committed and not h.leaving for h in self.holdings.values())
            == self.group.world_size
        )

    def __repr__(self) -> str:
        return (
            f"<Replica {self.group.name} of {self.version.info.model}:{self.version.number} "
            f"{self.state}>"
        )


@dataclass(slots=True, eq=False)
class Traffic:
    """The readers of a holding, and how far it is from a complete holding. `readers` changes it."""

    active_readers: int = 0  # ACTIVE leases on it
    yielding: int = 0  # how many of these yield (`waiting.yields`)
    readers_most: int = 0  # the most active readers at a time, since there were none
    # fills between it and a complete holding when its sources last changed; 0 once complete
    depth: int = 0
    behind: int = 0  # the slowness of its slowest source at that time; 0 once complete


@dataclass(slots=True, eq=False)
class Trust:
    """Evidence against the bytes of a holding."""

    by_source: bool = False  # no publisher has confirmed all of it: see `Proof`
    # its bytes are not the published ones: no source, and counted nowhere, until it is fenced
    quarantined: bool = False
    # it is quarantined, and a worker that does not own it has found that out
    condemned: bool = False
    # by the reader's incarnation: its newest one
    inquiries: dict[str, Inquiry] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Holding:
    """One rank's memory as a part of a replica, under one generation."""

    replica: Replica
    member: Member
    generation: int
    complete: bool  # every chunk is there and verified
    committed: bool  # complete, and its group's operation committed: counts for availability
    # in which it is held: it is one of the holders of its shard there, until it leaves
    layout: LayoutHoldings[Holding]
    number: int = 0  # in the order in which its shard's holdings came
    verified: bool = field(init=False)  # every chunk is there; the digests may not be agreed yet
    is_fed: bool = field(init=False)  # complete, or its chain of sources ends at a complete holding
    told: bool = False  # its owner's newest retention notice says that its version is retained
    # takes no readers any more: withdrawn, overwritten, torn, quarantined or lost
    leaving: bool = False
    readers: dict[str, ReadLease] = field(default_factory=dict)  # ACTIVE and FENCING leases on it
    traffic: Traffic = field(default_factory=Traffic)
    trust: Trust = field(default_factory=Trust)
    # the version that it serves, also while its torn replica is filled anew
    version: Version = field(init=False)

    def __post_init__(self) -> None:
        self.version, self.verified, self.is_fed = (
            self.replica.version,
            self.complete,
            self.complete,
        )

    @property
    def rank(self) -> int:
        return self.member.rank

    @property
    def shard(self) -> int:
        """Of its layout."""
        return self.member.shard

    @property
    def chunks_verified(self) -> int:
        """For scheduling and display only."""
        part = self.member.part
        if self.verified or part is None or part.holding is not self:
            return self.chunks if self.verified else 0
        return min(part.attempts.progress[0], self.chunks)

    @property
    def peers(self) -> Holders[Holding]:
        """All holders of this shard in this layout, by the last count."""
        return self.layout[self.shard]

    @property
    def chunks(self) -> int:
        """Of all that it holds, or will."""
        needs = self.layout.needs.get(self.shard)
        return self.member.said.chunks if needs is None else sum(need.chunks for need in needs)

    @property
    def slowness(self) -> int:
        """How many times slower than the median everything comes from there, as a power of two."""
        return max(self.traffic.behind, self.member.worker.slowness)

    @property
    def load(self) -> Load:
        return self.load_without(None)

    def load_without(self, lease: ReadLease | None) -> Load:
        """The load without that lease. Every reader shares the uplink of a slow source."""
        yielding = (
            0
            if self.member.worker.slowness
            else self.traffic.yielding - (lease is not None and lease.yields)
        )
        return Load(
            self.traffic.active_readers - (lease is not None) - yielding,
            self.slowness,
            yielding,
            self.member.said.purpose is _ARCHIVE,
        )

    @property
    def takes_readers(self) -> bool:
        return (
            not self.leaving
            and self.replica.state in SERVING
            and self.member.worker.state is not _LOST
        )

    @property
    def is_source(self) -> bool:
        return self.committed and self.takes_readers

    @property
    def is_read_alone(self) -> bool:
        """Whether workers that may write read it now, and its shard has no other source in its
        layout.
        """
        active = (lease for lease in self.readers.values() if lease.state is LeaseState.ACTIVE)
        is_last = self.is_source and self.peers.sources == 1
        return is_last and any(not lease.part.member.worker.read_only for lease in active)

    @property
    def is_spot(self) -> bool:
        """Whether it may be gone at any time. A copy in host memory is as spot as its worker."""
        member = self.member
        return member.worker.spot if member.said.medium is _HOST else member.group.spot

    @property
    def is_steady(self) -> bool:
        """Whether it is a source that is not spot."""
        return self.is_source and not self.is_spot

    @property
    def withdrawal(self) -> Withdrawal | None:
        """Its owner's wish to have the memory back, if that is not granted yet."""
        found = self.member.group.model.withdrawals.get(self.member.registration)
        return found if found is not None and found.holding is self else None

    @property
    def fillers(self) -> Iterable[ReadLease]:
        """The ACTIVE leases through which it is being filled."""
        part = self.member.part
        return (
            part.leases.values()
            if part is not None and part.holding is self and not self.complete
            else ()
        )

    @property
    def bridges(self) -> bool:
        """Whether it is not as it was published."""
        return self.layout is not self.version.holdings

    @property
    def is_published(self) -> bool:
        """Whether its owner has published it."""
        testimony = self.version.testimonies.get(self.shard)
        return not self.bridges and testimony is not None and testimony.publisher is self

    @property
    def is_stranded(self) -> bool:
        """Whether the holding lacks chunks, and a source for them. A verified holding lacks
        nothing, agreed or not.
        """
        return not self.verified and not self.fillers

    @property
    def counted(self) -> Counted:
        """What the holding counts as, and where it stands."""
        worker, takes_readers = self.member.worker, self.takes_readers
        is_live, is_source = worker.state is _LIVE, self.committed and takes_readers
        standing = None
        if takes_readers and is_live:
            standing = Standing(
                worker.location,
                worker.transports,
                self.load_without(None),
                self.traffic.depth,
                self.number,
            )
        counts = (self.complete, is_source, is_source and is_live)
        return Counted(counts, standing, self.is_stranded, is_source and not self.is_spot)


@dataclass(slots=True, eq=False)
class Inquiry:
    """The owner of a holding is asked to digest a chunk again, which a reader got without its
    digest: one attempt.
    """

    ident: str  # empty once it is answered
    part: RankPart | None  # the reader; None: it reads no more
    asked_at: float
    chunk: int  # of the selection that is needed, if one is
    need: Need | None = None


@dataclass(slots=True)
class Question:
    """A worker is asked for a list of digests."""

    session: int
    heard_at: float  # when it was asked, or last told some of the list


@dataclass(slots=True, eq=False, kw_only=True)
class DigestList:
    """The digests of one shard's chunks, or of one selection's: entered run by run, and sent in
    pages once it is complete. It may be absent: not begun yet, or dropped again.
    """

    width: int = 0  # bytes of one digest; 0: chunks have none, or the manifest is not known yet
    root: bytes = b""  # of the whole list, once that was complete
    chunks: int = -1  # in the list; -1: there is none
    values: bytearray = field(default_factory=bytearray)  # the list, while some of it is missing
    # meanwhile: 1 for each chunk with a digest in `values`
    known: bytearray = field(default_factory=bytearray)
    missing: int = 0  # always known.count(0)
    pages: tuple[bytes, ...] = ()  # the whole list, as it is sent to each rank that compares
    page_bytes: int = DIGESTS_BYTES_MAX  # of one page, at most

    @property
    def is_there(self) -> bool:
        """Whether the whole list is known here."""
        return self.chunks >= 0 and not self.missing

    def begin(self, chunks: int) -> None:
        """An empty list; a negative number: none."""
        self.chunks, self.missing, self.pages = chunks, max(chunks, 0), ()
        self.values, self.known = bytearray(self.missing * self.width), bytearray(self.missing)

    def enter(self, runs: Sequence[tuple[int, int]], digests: bytes) -> None:
        """Enter digests for these (first, count) runs of chunks. The first digest of a chunk
        counts.
        """
        at = 0
        for first, count in runs:
            for chunk, end in _unknown(self.known, first, first + count):
                told = at + (chunk - first) * self.width
                self.values[chunk * self.width : end * self.width] = digests[
                    told : told + (end - chunk) * self.width
                ]
                self.missing -= self.known.count(0, chunk, end)
                self.known[chunk:end] = b"\1" * (end - chunk)
            at += count * self.width

    def finish(self) -> None:
        """The list is complete and right: cut it into pages."""
        most, values = self.page_chunks * self.width, bytes(self.values)
        self.pages = tuple([values[at : at + most] for at in range(0, len(values), most)]) or (b"",)
        self.values, self.known = bytearray(), bytearray()

    @property
    def page_chunks(self) -> int:
        """How many chunks' digests each page has, but for the last one."""
        return self.page_bytes // self.width

    @property
    def nbytes(self) -> int:
        """The bytes that the list takes."""
        return max(self.chunks, 0) * (self.width + 1)

    def digest(self, chunk: int) -> bytes:
        """The digest that this chunk must have; empty where that is not certain."""
        if not self.pages or chunk >= self.chunks:
            return b""
        page, at = divmod(chunk, self.page_chunks)
        return self.pages[page][at * self.width : (at + 1) * self.width]


def _unknown(known: bytearray, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The runs from `start` to `stop` without known digests."""
    at = known.find(0, start, stop)
    while at >= 0:
        end = known.find(1, at, stop)
        end = stop if end < 0 else end
        yield at, end
        at = known.find(0, end, stop)


@dataclass(slots=True, eq=False)
class Testimony(DigestList):
    """The digests of the chunks of one shard, as their publisher has made them (R8), and the
    workers that can tell them; or the digests of a selection of the shards of one class.
    """

    version: Version
    shard: int  # of a class the first one
    selection: str = ""  # its id; "": the chunks are the shard's own
    publisher: Holding | None = None  # the published holding; it may have been unpublished since
    asked: dict[str, Question] = field(default_factory=dict)  # by registration
    answered: set[str] = field(default_factory=set)  # registrations that have told all they could
    # of a selection: ranks, some of them decided
    needed_by: dict[RankPart, None] = field(default_factory=dict)
    turned_away: bool = False  # there was no room for the list

    @property
    def of(self) -> tuple[str, int]:
        """As messages name it."""
        return (self.selection, self.shard) if self.selection else ("", 0)


@dataclass(slots=True, eq=False)
class ReadLease(_Moving[LeaseState]):
    """One reader's right to read one holding: one attempt, never used again."""

    machine: ClassVar = "read lease"
    table: ClassVar = states.LEASE_TABLE
    first: ClassVar = LeaseState.ACTIVE
    id: str
    part: RankPart  # the reader
    holding: Holding  # the source
    # granted while no rank held the whole shard: the source may itself be filled from this reader
    partial: bool
    # the source was complete when it was granted: the reader has never waited for what it lacked
    is_of_whole: bool
    flow: Flow  # the last report of its reader that counted
    yields: bool  # as of `waiting.yields`, while it is ACTIVE
    source_had: int = 0  # so many chunks, as the coordinator knew at that report
    # which one it is for: the reader's layout is another one; None: the two have one layout
    need: Need | None = None
    dropping: bool = False  # the reader was told to leave this source for another one

    @property
    def is_only(self) -> bool:
        """Whether everything comes through it, and nothing through another one."""
        return (
            len(self.part.leases) == 1 and self.need is None and not (self.partial or self.dropping)
        )

    def __repr__(self) -> str:
        reader, source = self.part.member.worker.name, self.holding.member.worker.name
        return f"<ReadLease {self.id[:8]} {reader} <- {source} {self.state}>"


@dataclass(slots=True, eq=False)
class Proof:
    """What a rank has named and compared to show that its bytes are the published ones.
    `testimonies` changes it.
    """

    # The roots that its Prepared names, while CLAIMING, until they are agreed; across layouts by
    # what it needs.
    claim: dict[Need | None, bytes] = field(default_factory=dict)
    compares: Need | None = None  # the root with the list that it compares, while there is a page
    page: int | None = None  # the page of the publisher's list that it compares now
    page_session: int | None = None  # over which it was sent that page
    rereads: Need | None = None  # what it reads again, after a comparison; the rest is there
    # no publisher has said digests of some of what it has voted for: its sources' digests count
    by_source: bool = False
    comparisons: int = 0  # that have found other digests than were published
    # sources whose bytes are unchanged (R8), by name, in any incarnation
    exonerated: set[str] = field(default_factory=set)
    drifted: tuple[int, int, str] | None = None  # as of `Version`, found in what it has read


@dataclass(slots=True, eq=False)
class Attempts:
    """What a rank has read so far, and how its sources have failed it. `readers` changes it."""

    # chunks that it has verified and bytes that it has read, as it has reported
    progress: tuple[int, int] = (0, 0)
    failures: dict[str, int] = field(default_factory=dict)  # failed reads by source incarnation
    # of these, neighbours that may not have heard yet that they may serve
    spared: set[str] = field(default_factory=set)
    # newest reasons, and their texts in errors
    faults: dict[str, tuple[str, str]] = field(default_factory=dict)
    # by registration: holdings that cannot bring what it lacks, with the texts in errors
    damaged: dict[str, str] = field(default_factory=dict)
    # by source incarnation: not tried again before
    retry_at: dict[str, float] = field(default_factory=dict)
    # when a source that has refused it, and may not have heard yet, is expected to serve it
    served_by: float = -inf
    # before that it reads from no other site: a neighbour does, and it follows
    follows_at: float = -inf
    compared_at: float = -inf  # when a faster source was sought last
    moved_with: int = -1  # chunks that it had verified when it was moved last in mid-read


@dataclass(slots=True, eq=False)
class RankPart(_Moving[PartState]):
    """One rank's part in one group operation."""

    machine: ClassVar = "rank's part"
    table: ClassVar = states.PART_TABLE
    first: ClassVar = PartState.CALLED
    operation: Operation
    member: Member
    call: Publish | Fill
    deadline: float
    # when something came of it last: its call, a version, its turn to write, new bytes, its vote
    moved_at: float
    needs_bytes: bool = True  # False: it held the bound content when the operation was bound
    in_layout: LayoutHoldings[Holding] | None = None  # in which it reads; set once it is bound
    # what it reads of published shards, if it bridges; None: not said yet
    needs: tuple[Need, ...] | None = None
    # the id of what describes its group, if it was asked whether that reads everything
    checks: str = ""
    holding: Holding | None = None  # what it fills, from Write on; None for a fetch
    leases: dict[str, ReadLease] = field(default_factory=dict)  # its ACTIVE leases
    attempts: Attempts = field(default_factory=Attempts)
    proof: Proof = field(default_factory=Proof)
    rank: int = field(init=False)  # its member's; so below
    shard: int = field(init=False)

    def __post_init__(self) -> None:
        _Moving.__post_init__(self)
        self.rank, self.shard = self.member.rank, self.member.shard

    def become(self, new: PartState, cause: int, now: float, why: str) -> None:
        _Moving.become(self, new, cause, now, why)
        self.moved_at = now

    def move(self, now: float) -> None:
        """Something comes of it, and its state stays."""
        self.moved_at = now

    @property
    def chunks(self) -> int:
        """Of its own grid."""
        return (
            self.member.said.chunks
            if self.needs is None
            else sum(need.chunks for need in self.needs)
        )

    @property
    def layout(self) -> LayoutHoldings[Holding]:
        """In which it reads; once it is bound."""
        assert self.in_layout is not None
        return self.in_layout

    @property
    def bridges(self) -> bool:
        """Whether the layout in which it reads is not the published one."""
        return self.in_layout is not None and self.in_layout is not self.operation.bound.holdings

    @property
    def is_abandoned(self) -> bool:
        """Whether the holders of the published layout have left on purpose, once it is bound."""
        return self.operation.bound.holdings.abandoned

    @property
    def begun(self) -> Begun | None:
        """The fill that the rank has begun under a former coordinator."""
        return self.call.resume if isinstance(self.call, Fill) else None

    @property
    def is_by_source(self) -> bool:
        """Whether no publisher has confirmed all that it holds, once it has voted."""
        held = None if self.needs_bytes else self.member.holding
        return self.proof.by_source if held is None else held.trust.by_source

    @property
    def has_written(self) -> bool:
        """Whether its memory is overwritten already, under a former coordinator."""
        return self.begun is not None and self.begun.written

    @property
    def reads(self) -> bool:
        """Whether it lacks chunks."""
        return self.state is _READING

    @property
    def ready(self) -> bool:
        """Whether nothing that it does first keeps it from writing."""
        return self.state is not _CALLED

    @property
    def voted(self) -> bool:
        """Whether it agrees to the commit."""
        return self.state is _VOTED

    def __repr__(self) -> str:
        return f"<RankPart {self.rank} {self.state} of {self.operation!r}>"


@dataclass(slots=True, eq=False)
class Agreed:
    """What the ranks of a publish have said: of the bytes that they share (`coverage` changes it),
    and of former coordinators (`operations` changes it).
    """

    ranks: set[int] = field(default_factory=set)  # that have said their digests of these
    # by number; and the rank that said it first
    digests: dict[int, tuple[bytes, int]] = field(default_factory=dict)
    former: frozenset[OpKey] = frozenset()  # that all calls name
    is_repeated: bool = False  # one of the calls is


@dataclass(slots=True, eq=False)
class Operation(_Moving[OperationState]):
    """One group operation: a publish, replicate, update, prefetch or fetch of all ranks of a
    group.
    """

    machine: ClassVar = "group operation"
    table: ClassVar = states.OPERATION_TABLE
    first: ClassVar = OperationState.GATHERING
    key: OpKey
    kind: OpKind
    group: Group
    parts: dict[int, RankPart] = field(default_factory=dict)  # by rank; those that have called
    # set while RUNNING or later, and for a publish once it is staged
    version: Version | None = None
    writing: bool = False  # every rank was told to overwrite
    # its ranks, which read another layout or publish, are known to have every byte, where they must
    covers: bool = False
    agreed: Agreed = field(default_factory=Agreed)
    # what its ranks hold and must not overwrite yet (G5)
    staying: list[Holding] = field(default_factory=list)
    # until when it waits for readers of what its ranks hold; None: it had not to, so far
    grace_until: float | None = None
    # Ranks with sources that may have changed since the ranks were looked at; None: all ranks.
    news: dict[RankPart, None] | None = None
    is_starving: bool = False  # `starves`, when it was settled last
    # `waits_in`, when it was settled last
    filed_in: list[dict[OpKey, Operation]] = field(default_factory=list)
    record: int | None = None  # of the entry that is being made durable, while PREPARED
    name: str = field(init=False)  # its key as a text, as timers name it
    # While PREPARED: what ranks have said of later operations.
    later: list[tuple[Member, Publish | Fill | Abandon | Resolve]] = field(default_factory=list)

    def __post_init__(self) -> None:
        _Moving.__post_init__(self)
        self.name = str(self.key)

    @property
    def bound(self) -> Version:
        """The version that it is bound to; once it is."""
        assert self.version is not None
        return self.version

    @property
    def decided(self) -> bool:
        return self.state in DECIDED

    @property
    def is_read_only(self) -> bool:
        """Whether only a read-only worker has called. A group of such a worker has no other
        worker's ranks.
        """
        return all(part.member.worker.read_only for part in self.parts.values())

    @property
    def calls_number(self) -> bool:
        """Whether its ranks ask for a number, and not for what a selector names (R12)."""
        call = next(iter(self.parts.values())).call
        return isinstance(call, Fill) and isinstance(call.selector, int)

    @property
    def is_forsaken(self) -> bool:
        """Whether the ranks ask for a number, and its last holder left on purpose: then they wait
        for no source.
        """
        return self.calls_number and any(part.is_abandoned for part in self.parts.values())

    @property
    def is_staged(self) -> bool:
        """Whether it fills memory that other workers do not read, and its ranks overwrite nothing
        before the commit.
        """
        call = next(iter(self.parts.values())).call
        return isinstance(call, Fill) and call.staged

    @property
    def running(self) -> bool:
        return self.state is _RUNNING

    @property
    def unchanged(self) -> bool:
        """Whether every rank held the bound content already, or publishes."""
        return not any(part.needs_bytes for part in self.parts.values())

    @property
    def gathered(self) -> bool:
        return len(self.parts) == self.group.world_size

    @property
    def all_voted(self) -> bool:
        """Whether it can be prepared."""
        return self.state is _RUNNING and all(part.state is _VOTED for part in self.parts.values())

    @property
    def resumes(self) -> Begun | None:
        """The fill with which it goes on that began under a former coordinator: equal content for
        all ranks.
        """
        for part in self.parts.values():
            if (begun := part.begun) is not None:
                return begun
        return None

    def decision(self) -> Decision:
        """The group's commit record; once it is bound."""
        info = self.bound.info
        return Decision(
            self.key, info.model, info.version, info.content_id, info.nbytes, info.world_size
        )

    def __repr__(self) -> str:
        return (
            f"<Operation {self.kind} {self.key} {self.state} "
            f"ranks={len(self.parts)}/{self.group.world_size}>"
        )


@dataclass(slots=True, eq=False)
class Withdrawal:
    """A rank's wish to have its published memory back (an attempt; the holding's state is its
    replica's).
    """

    request: int
    holding: Holding
    session: int | None  # over which it was said
    deadline: float  # when it is refused; once begun, when its readers are cut
    abandon: bool  # although a retained version may be lost
    closes: bool  # its worker may end with it: the worker's own copies are no other holders
    asked_at: float
    begun: bool = False  # the holding takes no readers any more


@dataclass(slots=True, eq=False)
class Handover:
    """An attempt to have one shard copied into a worker's host memory (R4)."""

    copy: str  # names the attempt, and is the registration of what comes of it
    version: Version
    shard: int
    worker: Worker
    nbytes: int


@dataclass(slots=True, eq=False)
class PendingWrite:
    """What one worker asked to have recorded. It is answered (Done or Refused) once that is
    decided.
    """

    model: Model
    message: Rollback | Retain | Pin | Unpin | Restore
    session: int | None  # over which it is answered
    asked_at: float
    record: int | None = None  # of its entry, while that is being made durable

    def repeat(self, message: Rollback | Pin, session: int | None) -> None:
        """The worker asks again, perhaps over another connection."""
        self.message, self.session = message, session


@dataclass(slots=True, eq=False)
class History:
    """The present lineage of a model, and what rollbacks need. `publishes` changes it."""

    lineage: int = 0
    announced: VersionInfo | None = None  # what the watchers were told last
    shown_at: float | None = None  # when a version was published last; None: not since the start
    # not decided; the first may be on its way to the store
    rollbacks: deque[PendingWrite] = field(default_factory=deque)
    # retired as old, by number, oldest first; None: of a number that may have been published
    forgotten: dict[int, VersionInfo | None] = field(default_factory=dict)
    lost: tuple[int, ...] = ()  # those of them that a rollback has made the newest, two at most
    rolled_back_by: str = ""  # the idents of the newest decided ones; see `actions.rolled_back_by`
    bounds: Bounds = ()  # of earlier lineages
    # the cluster whose versions, up to a number, were restored into it when it was new
    origin: tuple[str, int] = "", 0

    def forget(self, info: VersionInfo) -> None:
        """It is old, and no worker holds it."""
        self.forgotten[info.version] = info
        if len(self.forgotten) > FORGOTTEN_KEPT_MAX:
            del self.forgotten[next(iter(self.forgotten))]

    def remember(self, number: int) -> None:
        """A forgotten version is known again."""
        self.forgotten.pop(number, None)
        self.lost = tuple([lost for lost in self.lost if lost != number])


@dataclass(slots=True, eq=False)
class Waiting:
    """The operations of a model that wait, by what they wait for. `cluster` changes it."""

    unbound: dict[OpKey, Operation] = field(default_factory=dict)  # that wait for a version
    # of `unbound`, those that may lack one shard only
    unbound_copies: dict[OpKey, Operation] = field(default_factory=dict)
    # that have a reader who knows of a damaged holding: one holding less may leave none to it
    forlorn: dict[OpKey, Operation] = field(default_factory=dict)
    # that wait for what anything of the model may bring
    restless: dict[OpKey, Operation] = field(default_factory=dict)
    # as `restless`, for "available": there may be very many
    flexible: dict[OpKey, Operation] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Notices:
    """What holders still have to be told, or to acknowledge, about retention. `retention` changes
    it.
    """

    # the next steps tell their owners which versions are retained
    queue: deque[Holding] = field(default_factory=deque)
    # by registration; the owner of its holding has not acknowledged yet that it was `told`
    unaware: dict[str, Member] = field(default_factory=dict)
    # Retain and Pin, durable; not every holder knows yet
    unanswered: list[PendingWrite] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Model:
    """One name, its current lineage and its versions."""

    name: str
    # the newest number of the current lineage: ever visible, or rolled back to
    mark: int | None = None
    retain: int = 0
    history: History = field(default_factory=History)
    waiting: Waiting = field(default_factory=Waiting)
    notices: Notices = field(default_factory=Notices)
    # by number; STAGED, AVAILABLE and UNAVAILABLE ones
    versions: dict[int, Version] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    # groups that have, or had, memory that serves other workers
    serving: dict[str, Group] = field(default_factory=dict)
    steady: dict[str, Group] = field(default_factory=dict)  # those of these that are not spot
    # by registration; those not granted
    withdrawals: dict[str, Withdrawal] = field(default_factory=dict)
    # those of them that do not just wait for their readers
    pressing: dict[str, Withdrawal] = field(default_factory=dict)
    # by the copy's id; those under way
    handovers: dict[str, Handover] = field(default_factory=dict)
    # by registration; those in host memory that retain a version
    copies: dict[str, Member] = field(default_factory=dict)
    # by id; the ACTIVE and FENCING ones on its holdings
    leases: dict[str, ReadLease] = field(default_factory=dict)
    # by id; of workers that are not lost, and visible versions
    pins: dict[str, Pinned] = field(default_factory=dict)

    @property
    def is_used(self) -> bool:
        """Whether anything is known of it, or a worker has memory for it."""
        known = (
            self.groups
            or self.versions
            or self.pins
            or self.copies
            or self.retain
            or self.mark is not None
        )
        return bool(known or self.history.rollbacks or self.notices.unanswered)

    @property
    def visible(self) -> list[Version]:
        """Its visible versions, the newest first."""
        return list(self.newest())

    def newest(self) -> Iterator[Version]:
        """As `visible`, one after the other: there may be thousands."""
        for number in sorted(self.versions, reverse=True):
            if (version := self.versions[number]).visible:
                yield version

    def newest_visible(self, skip: int = 0) -> Version | None:
        """The newest visible version, or the version `skip` places before it. None, too, if that
        version is lost for good: after a rollback it may be a forgotten version, and no older
        version may stand for it (G3).
        """
        if not self.history.lost:
            return next(islice(self.newest(), skip, None), None)
        found = islice(self.newest(), skip + 1)
        numbers = sorted([*(v.number for v in found), *self.history.lost], reverse=True)
        return self.versions.get(numbers[skip]) if len(numbers) > skip else None

    def retained(self) -> set[int]:
        """The numbers that must stay fetchable: the newest `retain` visible ones, lost ones
        included, and pinned ones.
        """
        pinned = {pin.number for pin in self.pins.values()}
        newest = zip(range(self.retain), self.newest(), strict=False)
        return pinned.union(version.number for _, version in newest)


Entity = Worker | Operation | RankPart | Version | Replica | ReadLease  # what has a state
Noted = Worker | Operation | Version | Replica | ReadLease | Member | Group | Model
