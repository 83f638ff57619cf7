"""Target: workers that mostly say what is their turn to say, with some of it wrong; by the full
token and the read-only one.

What is said at random seldom gets beyond a registration. So a message is made that fits what the
coordinator knows, and then some of its fields are drawn anew, or another session says it.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from tensorhub.coordinator import Connected, Received, invariants
from tensorhub.coordinator.cluster import Session
from tensorhub.coordinator.entities import Holding, Member, RankPart, Worker
from tensorhub.messages import (
    Abandon,
    BegunWith,
    Compared,
    Covered,
    Deregister,
    DigestedAgain,
    Digests,
    ErrorInfo,
    Fenced,
    Fill,
    FromWorker,
    Heartbeat,
    Held,
    Join,
    LeaveRequest,
    Origin,
    Pin,
    Prepared,
    Progress,
    Publish,
    ReaderCut,
    ReadFailed,
    ReadyToWrite,
    Register,
    Resolve,
    Retain,
    RetainedAck,
    Rollback,
    Stray,
    Unpin,
)
from tensorhub.model.digests import root_of
from tensorhub.model.manifest import id_of
from tensorhub.testing import CHUNKS, DEVICE
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import READ_ONLY, Endpoint, Location, Medium, OpKey, OpKind, Purpose
from tests.fuzz.conversations import KINDS, STEPS_MAX, Shell, pools_of
from tests.fuzz.source import Source

SESSIONS = 8
DIGESTED = make_manifest(CHUNKS, "xxh3-64").encode()
DIGESTS = b"\1" * 8 * CHUNKS
ROOTS = (root_of(DIGESTS), root_of(DIGESTS), b"", root_of(b"others"))
FILLS = (OpKind.REPLICATE, OpKind.UPDATE, OpKind.UPDATE, OpKind.PREFETCH)
SELECTORS = ("latest", "latest", "available", "latest-1")
FIELDS = {kind: list(typing.get_type_hints(kind, include_extras=True).items()) for kind in KINDS}
USE = (True, False, *DEVICE, "", 1, CHUNKS, DIGESTED, None)  # memory of a caller's own
COPY = (True, False, Medium.HOST, Purpose.RETENTION, "", 1, CHUNKS, DIGESTED, None)
FETCH = (False, False, *DEVICE, "", 1, CHUNKS, b"", None)
ENOUGH = ErrorInfo("StateError", "enough", False)

T = TypeVar("T")


class _Peers(Shell):
    """What drives the coordinator, and makes up what is said."""

    dice = 0

    def any_step(self) -> None:
        source, kind = self.source, self.source.byte()
        if kind < 8 or len(self.sessions) < 4:
            self.arrive()
        elif kind < 10:
            self.disconnect(source.choice(self.sessions))
        elif kind < 22:
            self.pass_time(source.choice((0.1, 0.5, 4.0, 6.0, 20.0)))
        elif kind < 56 and self.unstored:
            self.stored(source.byte() > 240)
        else:
            session = self.coordinator.cluster.sessions.get(source.choice(self.sessions))
            if session is not None:
                self.say(session)

    def arrive(self) -> None:
        """As somebody new, or as one who is or was there."""
        if len(self.sessions) == SESSIONS:
            self.disconnect(self.sessions[0])
        source, self.minted = self.source, self.minted + 1
        read_only = source.byte() < 80
        incarnation = f"{READ_ONLY * read_only}{source.below(4)}"
        self.sessions.append(self.minted)
        self.step(
            Connected(
                self.minted, incarnation, "observer" if source.byte() > 248 else "worker", read_only
            )
        )
        endpoints = tuple(
            [Endpoint(each, "x") for each in source.choice((("tcp",), ("tcp", "cma")))]
        )
        where = Location(host=source.choice(("h", "i")))
        self.step(
            Received(self.minted, Join(incarnation, where, endpoints, 1, source.choice((0, 2**40))))
        )

    def pass_time(self, seconds: float) -> None:
        """Most say heartbeats."""
        self.now += seconds
        for session in list(self.sessions):
            if self.source.byte() < 200:
                self.step(Received(session, Heartbeat(1, self.now)))

    def say(self, session: Session) -> None:
        source = self.source
        self.dice, kind = source.byte(), source.byte()
        words = self.words(session, kind) if kind < 236 else []
        if words:
            message = source.choice(words)
            for _ in range((0, 0, 0, 0, 1, 2)[source.below(6)]):
                message = self.twisted(message)
        else:
            message = source.value(source.choice(KINDS), self.pools())
        number = session.number if source.byte() < 240 else source.choice(self.sessions)
        self.step(Received(number, message))

    def pools(self) -> dict[str, list[Any]]:
        return pools_of(self.coordinator, ("r1", "r2", f"{READ_ONLY}x"))

    def twisted(self, message: FromWorker) -> FromWorker:
        """The same with another value of one field, which is true of something else, or of
        nothing.
        """
        name, annotation = self.source.choice(FIELDS[type(message)])
        return dataclasses.replace(
            message, **{name: self.source.value(annotation, self.pools(), name)}
        )

    # -- what is somebody's turn to say

    def below(self, count: int) -> int:
        """Chance within one message costs no more than one byte of the input."""
        self.dice = (self.dice * 109 + 89) % 65_537
        return (self.dice >> 3) % count

    def choice(self, values: Sequence[T]) -> T:
        return values[self.below(len(values))]

    def flag(self) -> bool:
        return self.below(2) == 1

    def rarely(self) -> bool:
        return self.below(8) == 0

    def words(self, session: Session, kind: int) -> list[FromWorker]:
        """Mostly about what goes on."""
        worker = session.worker
        members = list(worker.members.values()) if worker is not None else []
        parts = [
            word
            for member in members
            if member.part is not None
            for word in self.parts(member.part)
        ]
        calls = [word for member in members if member.part is None for word in self.calls(member)]
        owners = [
            word
            for member in members
            for holding in member.holdings
            for word in self.owners(holding)
        ]
        others = (
            list(self.policies(worker))
            if worker is not None and (kind > 228 or not members)
            else []
        )
        if kind < 90 and parts:
            return parts
        if kind < 150 and calls:
            return calls
        return others or (owners if kind < 210 and owners else calls or parts)

    def policies(self, worker: Worker) -> Iterator[FromWorker]:
        """What a worker registers, and what it may wish for."""
        for number in range(3):
            name = f"{READ_ONLY * worker.read_only}{worker.incarnation}{number}"
            if worker.read_only:
                yield Register(1, name, "actor", name, 0, 0, 1, *FETCH)
            else:
                group, rank, ranks = (
                    (self.choice("gh"), 0, 1) if number < 2 else ("two", self.below(2), 2)
                )
                yield Register(1, name, "actor", group, rank, rank, ranks, *USE)
        for model in (
            self.coordinator.cluster.models.values()
            if worker.members and not worker.read_only
            else ()
        ):
            for handover in model.handovers.values():
                yield Register(
                    1, handover.copy, model.name, handover.copy, 0, handover.shard, 1, *COPY
                )
            yield Retain(1, model.name, self.below(3))
            for number in model.versions:
                yield Pin(1, f"pin{number}", model.name, number)
                yield Rollback(1, f"back{self.minted}", model.name, number)
            for pin in model.pins:
                yield Unpin(1, pin, model.name)

    def calls(self, member: Member) -> Iterator[FromWorker]:
        group = member.group
        key = OpKey(group.model.name, group.name, group.epoch, group.sequence)
        generation, timeout_s = self.below(250), self.choice((60.0, 600.0))
        me = (key, member.rank, member.registration)
        kind = self.choice(FILLS) if member.said.serves else OpKind.FETCH
        if member.said.serves and member.holding is None:
            yield Publish(*me, (group.model.mark or 0) + 1, generation, timeout_s)
        yield Fill(
            *me,
            kind,
            self.choice(SELECTORS),
            None,
            generation,
            self.flag(),
            self.rarely(),
            timeout_s,
        )
        if self.rarely():
            yield Deregister(1, member.registration, self.flag())
            yield BegunWith(member.registration, DIGESTED)
        held, holding = None, member.holding
        if holding is not None:
            info = holding.version.info
            content = (
                info.version,
                info.content_id,
                holding.generation,
                info.world_size,
                1,
                DIGESTED,
            )
            held = Held(*content, self.rarely(), self.flag(), self.choice(ROOTS))
        again = Register(
            1,
            member.registration,
            group.model.name,
            group.name,
            member.rank,
            member.shard,
            group.world_size,
            *USE,
        )
        yield dataclasses.replace(
            again, serves=member.said.serves, manifest=member.said.manifest, held=held
        )

    def parts(self, part: RankPart) -> Iterator[FromWorker]:
        """What a rank says of the operation in which it takes part."""
        key, rank = part.operation.key, part.rank
        yield ReadyToWrite(key, rank)
        if self.rarely():  # nobody here reads another layout
            yield ReadyToWrite(key, rank, (), (id_of(DIGESTED), "x", "y"), (DIGESTED, b"x"))
            yield Covered(key, rank, self.choice(("", "x")))
        yield Prepared(key, rank, self.choice(ROOTS))
        yield Progress(key, rank, self.below(CHUNKS + 1), 1)
        yield Resolve(key, rank)
        if self.rarely():
            yield Abandon(key, rank, ENOUGH)
        for lease in part.leases.values():
            origin = Origin(lease.holding.member.registration, lease.holding.generation)
            yield Compared(key, rank, CHUNKS, (Stray(0, origin),), rereads=self.flag())
            yield ReadFailed(
                key, rank, lease.id, self.choice(("lost", "corrupt", "dropped")), "", 0
            )
        if part.proof.page is not None:
            yield Compared(key, rank, CHUNKS, (), rereads=self.flag())

    def owners(self, holding: Holding) -> Iterator[FromWorker]:
        """What a rank says of what it holds, or has held."""
        member, generation = holding.member, holding.generation
        name = member.registration
        if self.below(3) == 0:
            yield LeaveRequest(
                self.below(9), name, generation, self.choice((9.0, 60.0)), self.flag(), self.flag()
            )
        yield RetainedAck(name, holding.version.info.content_id, holding.told, member.retained_seq)
        yield Digests(name, generation, CHUNKS, ((0, CHUNKS),), DIGESTS, last=True)
        if holding.leaving or self.rarely():
            yield Fenced(name, generation)
        for lease in holding.readers:
            yield ReaderCut(lease)
        for inquiry in holding.trust.inquiries.values():
            yield DigestedAgain(inquiry.ident, name, self.choice((True, False, None)), DIGESTS[:8])


def liars(data: bytes) -> None:
    """Each step keeps the invariants and the counts, and leaves nobody waiting who can go on; in
    the end nothing is left.
    """
    peers = _Peers(Source(data))
    for _ in range(STEPS_MAX):
        if not peers.source:
            break
        peers.any_step()
        peers.coordinator.check_waits()
        invariants.check_counts(peers.coordinator.cluster)
    peers.end()
    cluster, read_only = peers.coordinator.cluster, peers.coordinator.cluster.read_only
    assert not any(
        (read_only.sessions, read_only.away, read_only.watches, read_only.registrations)
    ), read_only
    assert not any((cluster.watchers, cluster.undecided))
