"""A coordinator and ranks of any layouts, whose words a test makes up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import TypeVar

from tensorhub.coordinator import (
    Connected,
    Coordinator,
    Disconnected,
    Durable,
    Entry,
    Event,
    LookFor,
    Persist,
    Persisted,
    Received,
    Send,
    Silent,
    Tick,
    invariants,
)
from tensorhub.coordinator.entities import Member, Operation, RankPart, ReadLease, Version
from tensorhub.coordinator.readers import Readers
from tensorhub.messages import (
    CheckCoverage,
    Covered,
    Digests,
    Fenced,
    Fill,
    FromCoordinator,
    FromWorker,
    Heartbeat,
    Held,
    Join,
    LeaveRequest,
    Need,
    Prepared,
    Publish,
    ReadFailed,
    ReadyAgain,
    ReadyToWrite,
    Register,
    RegisterAgain,
    SelectionRoot,
    Start,
)
from tensorhub.model.digests import root_of
from tensorhub.model.manifest import id_of
from tensorhub.testing import CHUNKS
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import Endpoint, Location, Medium, OpKey, OpKind, Options, Purpose

LEASE_S = 8.0
MANIFEST = make_manifest(CHUNKS, "xxh3-64").encode()
NO_DIGESTS = make_manifest(CHUNKS, "none").encode()
PARTS = (b"catalogue", b"arrangement")

M = TypeVar("M", bound=FromCoordinator)


class Rank:
    """One registration, at a worker of its own whose name and session are its own."""

    def __init__(
        self,
        session: int,
        group: str,
        rank: int,
        world_size: int,
        layout_id: str,
        parts: Sequence[bytes],
        site: str,
    ) -> None:
        self.serves, self.partial = True, False
        self.endpoints: tuple[Endpoint, ...] = ()
        self.session = session
        self.group, self.rank, self.world_size, self.layout_id, self.parts = (
            group,
            rank,
            world_size,
            layout_id,
            parts,
        )
        self.site = site
        self.name = f"{group}{rank}"
        self.generation = 0
        self.description = b""  # of that from which the grid of what it filled last follows
        self.heard: list[FromCoordinator] = []

    @property
    def publication(self) -> str:
        """The id of that."""
        return id_of(self.description) if self.description else ""

    def take(self, kind: type[M]) -> list[M]:
        """What it has heard of that kind since the last time."""
        found: list[M] = [message for message in self.heard if isinstance(message, kind)]
        self.heard = [message for message in self.heard if not isinstance(message, kind)]
        return found


class World:
    """Ranks by name. Everything is checked after each step."""

    def __init__(
        self,
        *,
        manifest: bytes = MANIFEST,
        stored: Iterable[Entry] = (),
        epoch: int = 1,
        now: float = 0.0,
    ) -> None:
        self.now, self.manifest = now, manifest
        self.covers = True  # whoever is asked whether his group reads everything says so at once
        self.numbers = count(epoch * 1000)
        self.stored = list(stored)
        self.endpoints: tuple[Endpoint, ...] = (Endpoint("tcp", "x"),)  # of who arrives from now on
        self.ranks: dict[str, Rank] = {}
        self.sessions: dict[int, Rank] = {}
        durable = Durable.of(self.stored) if self.stored else None
        self.core = Coordinator(
            cluster="c",
            epoch=epoch,
            options=Options(lease_s=LEASE_S),
            ids=lambda: f"id{next(self.numbers)}",
            now=now,
            durable=durable,
        )

    def restarted(self) -> World:
        """The next coordinator, on what this one has stored."""
        return World(
            manifest=self.manifest,
            stored=self.stored,
            epoch=self.core.cluster.epoch + 1,
            now=self.now,
        )

    # -- steps

    def step(self, event: Event) -> None:
        for action in self.core.step(event, self.now):
            match action:
                case Send():
                    if action.session in self.sessions:
                        self._hear(self.sessions[action.session], action.message)
                case Persist():
                    self.stored.append(action.entry)
                    self.core.check_touched()
                    self.step(Persisted(action.record))
                case LookFor():
                    pass
        self.core.check_touched()
        self.core.check_invariants()
        invariants.check_counts(self.core.cluster)
        self.core.check_waits()

    def _hear(self, rank: Rank, message: FromCoordinator) -> None:
        rank.heard.append(message)
        if isinstance(message, Start):
            rank.description = self.core.cluster.manifests.find(message.publication) or b""

    def say(self, rank: Rank, message: FromWorker) -> None:
        self.step(Received(rank.session, message))

    def pass_time(self, seconds: float, *, silent: Iterable[Rank] = ()) -> None:
        """With heartbeats of all others."""
        until, quiet = self.now + seconds, {rank.name for rank in silent}
        while self.now < until:
            self.now = min(until, self.now + LEASE_S / 8)
            for rank in self.ranks.values():
                if rank.name not in quiet and rank.session in self.sessions:
                    self.say(rank, Heartbeat(1, self.now))
            while (due := self.core.next_deadline()) is not None and due <= self.now:
                self.step(Tick())
            self.step(Silent(tuple(self.core.cluster.sessions)))

    def step_to_rest(self) -> None:
        """A step in which nothing happens."""
        self.step(Tick())

    # -- ranks

    def arrive(
        self,
        group: str,
        rank: int = 0,
        world_size: int = 1,
        layout_id: str = "world/1",
        parts: Sequence[bytes] = (),
        *,
        site: str = "here",
        registers: bool = True,
        serves: bool = True,
    ) -> Rank:
        """A worker of one rank joins and registers it."""
        made = Rank(next(self.numbers), group, rank, world_size, layout_id, parts, site)
        made.serves, made.endpoints = serves, self.endpoints
        self.ranks[made.name] = made
        self.connect(made)
        if registers:
            self.register(made)
        return made

    def connect(self, rank: Rank) -> None:
        """Over a new session."""
        rank.session = next(self.numbers)
        self.sessions[rank.session] = rank
        self.step(Connected(rank.session, f"worker of {rank.name}", "worker"))
        where = Location(site=rank.site, host=rank.name)
        self.say(rank, Join(rank.name, where, rank.endpoints, 1, 0))

    def cut_off(self, rank: Rank) -> None:
        session = rank.session
        del self.sessions[session]
        self.step(Disconnected(session))

    def lose(self, *ranks: Rank) -> None:
        """Their leases run out."""
        for rank in ranks:
            self.cut_off(rank)
        self.pass_time(2.5 * LEASE_S, silent=ranks)

    def register(
        self,
        rank: Rank,
        held: Held | None = None,
        *,
        whole: bool = True,
        parts: Sequence[bytes] = (),
    ) -> None:
        """Until it is taken: what it is asked for, it says."""
        if held is not None and whole:
            held = replace(held, manifest=self.manifest)
        own = (id_of(self.manifest), tuple(map(id_of, rank.parts)))
        use = (rank.layout_id, 1, CHUNKS, self.manifest if whole else b"", held, *own, tuple(parts))
        where = (
            "m",
            rank.group,
            rank.rank,
            rank.rank,
            rank.world_size,
            rank.serves,
            False,
            Medium.DEVICE,
            Purpose.USE,
        )
        self.say(rank, Register(next(self.numbers), rank.name, *where, *use, rank.partial))

    def answer_questions(self, rank: Rank, held: Held | None = None) -> None:
        """Say again what it was told to say again."""
        for again in rank.take(RegisterAgain):
            blobs = {id_of(blob): blob for blob in (*rank.parts, *lies_of(rank))}
            self.register(
                rank, held, whole=again.whole, parts=[blobs[ident] for ident in again.part_ids]
            )

    def group(
        self, name: str, layouts: Sequence[tuple[str, Sequence[bytes]]], *, site: str = "here"
    ) -> list[Rank]:
        """All ranks of a group: of each the layout id and the parts."""
        ranks = []
        for rank, (layout_id, parts) in enumerate(layouts):
            ranks.append(self.arrive(name, rank, len(layouts), layout_id, parts, site=site))
            self.answer_questions(ranks[-1])
        return ranks

    # -- looking

    @property
    def version(self) -> Version:
        """The newest."""
        return max(
            self.core.cluster.models["m"].versions.values(), key=lambda version: version.number
        )

    def member(self, rank: Rank) -> Member:
        return self.core.cluster.members[rank.name]

    def part(self, rank: Rank) -> RankPart:
        part = self.member(rank).part
        assert part is not None
        return part

    def operation(self, rank: Rank) -> Operation:
        return self.part(rank).operation

    # -- calls

    def key(self, rank: Rank) -> OpKey:
        group = self.core.cluster.models["m"].groups[rank.group]
        return OpKey("m", rank.group, group.epoch, group.sequence)

    def publish(self, ranks: Sequence[Rank], version: int, *, is_whole: bool = True) -> None:
        """`is_whole`: who is asked says so."""
        key = self.key(ranks[0])
        for rank in ranks:
            rank.generation += 1
            self.say(rank, Publish(key, rank.rank, rank.name, version, rank.generation, 1000.0))
        if is_whole:
            self.answer_checks(ranks)

    def answer_checks(self, ranks: Iterable[Rank]) -> None:
        """Who is asked whether a group reads, or publishes, everything says so."""
        for each in ranks:
            for asked in each.take(CheckCoverage):
                self.say(each, Covered(asked.key, asked.rank, asked.readers))

    def fill(
        self,
        ranks: Sequence[Rank],
        selector: int | str = "latest",
        kind: OpKind = OpKind.UPDATE,
        *,
        staged: bool = False,
    ) -> OpKey:
        key = self.key(ranks[0])
        for rank in ranks:
            rank.generation += 1
            call = (kind, selector, None, rank.generation, False, staged, 1000.0)
            self.say(rank, Fill(key, rank.rank, rank.name, *call))
        return key

    def ready(self, rank: Rank, *needs: Need) -> None:
        """And where that lies, if others may read it there."""
        lies = lies_of(rank) if rank.serves and self.part(rank).bridges else ()
        self.say_ready(rank, needs, lies)
        for again in rank.take(ReadyAgain):
            blobs = {id_of(blob): blob for blob in lies}
            self.say_ready(rank, needs, lies, [blobs[ident] for ident in again.part_ids])
        self.answer_checks(self.ranks.values() if self.covers else ())

    def say_ready(
        self,
        rank: Rank,
        needs: Sequence[Need],
        lies: Sequence[bytes] = (),
        parts: Sequence[bytes] = (),
    ) -> None:
        ids = tuple(map(id_of, lies))
        self.say(
            rank, ReadyToWrite(self.operation(rank).key, rank.rank, tuple(needs), ids, tuple(parts))
        )

    def vote(self, rank: Rank, *roots: SelectionRoot, root: bytes = b"") -> None:
        """It has everything; with these roots."""
        self.say(rank, Prepared(self.operation(rank).key, rank.rank, root, roots))

    def lose_source(
        self, rank: Rank, lease: ReadLease, reason: str = "lost", chunk: int | None = None
    ) -> None:
        """It could not read there."""
        self.say(rank, ReadFailed(self.operation(rank).key, rank.rank, lease.id, reason, "", chunk))

    def tell(self, rank: Rank, need: Need | None = None, value: bytes = b"a") -> None:
        """What digests all its chunks have, of its own grid or of a selection; it begins with
        `value`.
        """
        chunks, of = (
            (CHUNKS, ("", 0)) if need is None else (need.chunks, (need.selection, need.shard))
        )
        runs = ((0, chunks),)
        self.say(
            rank,
            Digests(rank.name, rank.generation, chunks, runs, list_of(chunks, value), True, *of),
        )

    def leave(self, rank: Rank) -> None:
        self.say(
            rank, LeaveRequest(next(self.numbers), rank.name, rank.generation, 1000.0, False, False)
        )

    def fenced(self, rank: Rank) -> None:
        self.say(rank, Fenced(rank.name, rank.generation))

    def sources(self, rank: Rank) -> list[tuple[str, str, int]]:
        """(source, selection, shard) of all its leases that it was not told to drop."""
        grants = [
            Readers.to_grant(lease)
            for lease in self.part(rank).leases.values()
            if not lease.dropping
        ]
        return [(grant.source, grant.selection, grant.shard) for grant in grants]

    def is_fed(self, rank: Rank) -> bool:
        """Whether it has everything, or is filled by those who have."""
        holding = self.member(rank).holding
        return holding is not None and holding.is_fed

    def lease(self, rank: Rank, source: str) -> ReadLease:
        """That on this source."""
        (lease,) = [
            each
            for each in self.part(rank).leases.values()
            if each.holding.member.registration == source
        ]
        return lease


def lies_of(rank: Rank) -> tuple[bytes, ...]:
    """Where it has what it reads of another layout, as it says."""
    return b"published catalogue", b"arranged", f"of {rank.layout_id}".encode()


def list_of(chunks: int, value: bytes = b"a") -> bytes:
    """Digests of so many chunks."""
    return value.ljust(8, b"-") * chunks


def root(need: Need, value: bytes = b"a") -> SelectionRoot:
    """Of a list that was told so."""
    return SelectionRoot(need.selection, root_of(list_of(need.chunks, value)), need.shard)
