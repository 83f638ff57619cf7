"""A random drive of the coordinator by workers whose words this drive makes up: any time, any order, over any connection.

The machines of honest workers say each thing in its time, and in the simulator all of them have the same transports. Here a
worker has any transports and comes back with others; it says what is its turn to say now, later or never, and is cut off
between any two words. After each step nothing may be left to do (`check_rest`): who can go on then was not woken (G7).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from random import Random
from typing import TypeVar

from tensorhub.coordinator import (
    CloseSession,
    Connected,
    Coordinator,
    Disconnected,
    Durable,
    Entry,
    Event,
    LookFor,
    Persist,
    Persisted,
    PersistFailed,
    Received,
    Send,
    Silent,
    Tick,
    ways,
)
from tensorhub.coordinator.entities import Member, Model, Operation, RankPart, Version
from tensorhub.coordinator.states import LeaseState
from tensorhub.messages import (
    Abandon,
    Compared,
    Deregister,
    Digests,
    DropCopy,
    ErrorInfo,
    Fenced,
    Fill,
    FromCoordinator,
    FromWorker,
    Heartbeat,
    HeartbeatAck,
    Held,
    Join,
    Leave,
    LeaveRequest,
    MakeCopy,
    Pin,
    Prepared,
    Progress,
    Publish,
    ReaderCut,
    ReadFailed,
    ReadyToWrite,
    Register,
    Retain,
    RetainedAck,
    Rollback,
    TellDigests,
    Unpin,
    Welcome,
)
from tensorhub.model.digests import root_of
from tensorhub.testing import CHUNKS
from tensorhub.testing.sim.memory import make_manifest
from tensorhub.types import Endpoint, Location, Medium, OpKey, OpKind, Options, Purpose

SMALL = {"WOKEN_PER_STEP": 3, "TIMERS_PER_STEP": 3, "NOTED_PER_STEP": 6}
LEASE_S = 10.0
PEERS_MAX = 9
GROUPS = "abcde"
TRANSPORTS = ("tcp", "rdma", "cma")
HOSTS = ("h1", "h2")
SELECTORS = (*("latest",) * 6, "available", "available", "latest-1", 1)
PLAIN, DIGESTED = (make_manifest(CHUNKS, digest).encode() for digest in ("none", "xxh3-64"))
DIGESTS = b"\1" * 8 * CHUNKS  # of each version
ROOTS = (*(root_of(DIGESTS),) * 6, b"", root_of(b"others"))

T = TypeVar("T")


class Forgotten(AssertionError):
    """Something can go on, and was not woken."""


class Peer:
    """One process."""

    def __init__(self, incarnation: str, *, read_only: bool) -> None:
        self.incarnation = incarnation
        self.read_only = read_only
        self.session: int | None = None
        self.said_at = 0.0  # the newest time that it was told over this session
        self.asked: list[FromCoordinator] = []  # what it has not answered
        self.to_announce: list[Member] = []  # since it was cut off
        self.former: list[Member] = []  # what it had registered at a former coordinator


class WaitDrive:
    """One seed's drive."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, Random(seed)
        self.idents = count()
        self.now, self.epoch = 0.0, 0
        self.stored: list[Entry] = []
        self.begin()
        self.numbers = count(1)
        self.peers: list[Peer] = []
        self.sessions: dict[int, Peer] = {}
        self.unstored: list[Persist] = []
        self.looked_for: list[int] = []
        self.read_only_share = self.random.choice((0.0, 0.3, 0.6))
        self.manifest = self.random.choice((PLAIN, DIGESTED))
        self.world_size = self.random.choice((1, 1, 2))
        self.actions: list[tuple[float, Callable[[], None]]] = [
            (6, self.peer_comes),
            (4, self.peer_is_cut_off),
            (10, self.peer_is_back),
            (1, self.peer_leaves),
            (30, self.rank_calls),
            (100, self.rank_goes_on),
            (1, self.rank_gives_up),
            (6, self.rank_takes_back),
            (1, self.rank_closes),
            (40, self.owner_answers),
            (1, self.policy_changes),
            (24, self.store_answers),
            (20, self.time_passes),
            (0.3, self.coordinator_restarts),
        ]

    def begin(self) -> None:
        """A coordinator begins, on what is stored."""
        self.epoch += 1
        options = Options(lease_s=LEASE_S, sessions_max=4 * PEERS_MAX)
        ids, durable = lambda: f"id{next(self.idents)}", Durable.of(self.stored)
        self.core = Coordinator(
            cluster="c", epoch=self.epoch, options=options, ids=ids, now=self.now, durable=durable if self.stored else None
        )

    # -------------------------------------------------------------------------------------------------------- steps

    def run(self, steps: int) -> None:
        """Raise Forgotten, or InvariantBroken."""
        weights = [weight * self.random.choice((0.3, 1, 1, 3)) for weight, _ in self.actions]
        for act in self.random.choices([act for _, act in self.actions], weights, k=steps):
            act()

    def step(self, event: Event) -> None:
        todo = self.core.step(event, self.now)
        for action in todo:
            match action:
                case Send():
                    self.told(action.session, action.message)
                case Persist():
                    self.unstored.append(action)
                case LookFor():
                    self.looked_for.append(action.session)
                case CloseSession():
                    pass
        self.core.check_invariants()
        self.check_rest()
        for action in todo:
            if isinstance(action, CloseSession):
                self.end(action.session)

    def check_rest(self) -> None:
        """Nothing comes of settling everything once more; what has come due and waits for its step is no matter."""
        core, cluster = self.core, self.core.cluster
        due = core.next_deadline()
        if due is not None and due <= self.now:
            return
        for operation in cluster.operations():
            if operation.gathered and not self._fails_anyway(operation):
                operation.news = None
                core._operations.settle(operation)
                self._demand_rest(operation)
        for model in list(cluster.models.values()):
            core._settle_model(model)
            self._demand_rest(model)

    def _fails_anyway(self, operation: Operation) -> bool:
        """Whether it waits, unbound, and has no transport of the sources that are left: it hears that at its deadline."""
        parts = operation.parts.values()
        found = [(version, way) for version in operation.group.model.visible for way in self._ways(version, operation)]
        offered = (ways.offered_in_vain(part, version, way) for part in parts for version, way in found)
        return operation.version is None and any(offered)

    def _ways(self, version: Version, operation: Operation) -> Iterator[ways.Way]:
        """The one that is looked at: the best, or the first if none serves."""
        cluster = self.core.cluster
        found = ways.find(cluster, version, operation) or next(ways.of(cluster, version, operation), None)
        if found is not None:
            yield found

    def _demand_rest(self, settled: Operation | Model) -> None:
        """Owners may be asked for digests each few seconds."""
        cluster = self.core.cluster
        asks = ("digests", "m") in cluster.timers
        news = [a for a in cluster._actions if not (asks and isinstance(a, Send) and isinstance(a.message, TellDigests))]
        if news or cluster.changed_models or cluster.changed_operations or cluster.woken:
            raise Forgotten(f"{settled!r} was not woken: {news}. Story:\n{getattr(settled, 'story', '')}")

    def say(self, peer: Peer, message: FromWorker) -> None:
        if peer.session is not None:
            self.step(Received(peer.session, message))

    def told(self, session: int, message: FromCoordinator) -> None:
        peer = self.sessions.get(session)
        match message:
            case _ if peer is None or peer.session != session:
                pass
            case Welcome() | HeartbeatAck():
                peer.said_at = message.said_at
            case TellDigests() | MakeCopy() | DropCopy():
                peer.asked.append(message)
            case _:
                pass

    def end(self, session: int) -> None:
        """A connection ends."""
        peer = self.sessions.pop(session, None)
        if peer is None:
            return
        if peer.session == session:
            peer.session = None
        self.step(Disconnected(session))

    # ------------------------------------------------------------------------------------------------------ looking

    def pick(self, of: Sequence[T]) -> T | None:
        return self.random.choice(of) if of else None

    def often(self, share: float) -> bool:
        return self.random.random() < share

    @property
    def model(self) -> Model | None:
        return self.core.cluster.models.get("m")

    def online(self) -> list[Peer]:
        return [peer for peer in self.peers if peer.session is not None]

    def owner(self, member: Member) -> Peer | None:
        """Its process, if that is connected."""
        return next((peer for peer in self.online() if peer.incarnation == member.worker.incarnation), None)

    def members(self) -> list[tuple[Peer, Member]]:
        """Ranks whose process is connected."""
        found = [(self.owner(member), member) for member in self.core.cluster.members.values()]
        return [(peer, member) for peer, member in found if peer is not None]

    def parts(self) -> list[tuple[Peer, RankPart]]:
        return [(peer, member.part) for peer, member in self.members() if member.part is not None]

    # -------------------------------------------------------------------------------------------------------- peers

    def peer_comes(self) -> None:
        if len(self.peers) < PEERS_MAX:
            read_only, number = self.often(self.read_only_share), next(self.numbers)
            peer = Peer(f"read-only-{number}" if read_only else f"p{number}", read_only=read_only)
            self.peers.append(peer)
            self.connect(peer)
            self.registers(peer)

    def connect(self, peer: Peer) -> None:
        """From any host, with any transports. An older connection of its may be there."""
        worker = self.core.cluster.workers.get(peer.incarnation)
        peer.session = next(self.numbers)
        peer.asked, peer.to_announce = [], list(worker.members.values()) if worker is not None else peer.former
        peer.former = []
        self.sessions[peer.session] = peer
        transports = self.random.sample(TRANSPORTS, self.random.choice((1, 2, 2, 3, 3, 3)))
        where = Location(host=self.random.choice(HOSTS))
        host_bytes = 0 if self.often(0.5) else 2**40
        self.step(Connected(peer.session, peer.incarnation, "worker", peer.read_only))
        endpoints = tuple(Endpoint(transport, "x") for transport in transports)
        self.say(peer, Join(peer.incarnation, where, endpoints, 1, host_bytes))

    def registers(self, peer: Peer) -> None:
        """It has memory for a rank of some group, or to fetch into."""
        if peer.read_only or self.often(0.1):
            name = f"read-only-f{next(self.numbers)}"
            self.register(peer, name, name, 0, serves=False)
        else:
            rank = self.random.randrange(self.world_size)
            self.register(peer, f"r{next(self.numbers)}", self.random.choice(GROUPS), rank, serves=True)

    def register(self, peer: Peer, name: str, group: str, rank: int, *, serves: bool) -> None:
        shard, world_size = (rank, self.world_size) if serves else (self.random.randrange(self.world_size), 1)
        use = (serves, False, Medium.DEVICE, Purpose.USE, "", 1, CHUNKS, self.manifest if serves else b"", None)
        self.say(peer, Register(next(self.numbers), name, "m", group, rank, shard, world_size, *use))

    def peer_is_cut_off(self) -> None:
        peer = self.pick(self.online())
        if peer is not None and peer.session is not None:
            self.end(peer.session)

    def peer_is_back(self) -> None:
        """As a new one, if it was lost."""
        away = [peer for peer in self.peers if peer.session is None]
        peer = self.pick(away or (self.online() if self.often(0.2) else []))
        if peer is None:
            return
        if peer.incarnation in self.core.cluster.lost:
            self.peers.remove(peer)
            self.peer_comes()
        else:
            self.connect(peer)
            while peer.to_announce and self.often(0.7):
                self.announces(peer)

    def announces(self, peer: Peer) -> None:
        """What it holds, or that it holds nothing."""
        member = peer.to_announce.pop()
        holding, held = member.holding, None
        if holding is not None and holding.committed and self.often(0.8):
            info = holding.version.info
            published = info.version % 2 == 0
            what = (info.version, info.content_id, holding.generation, info.world_size, 1, self.manifest)
            held = Held(*what, published=published)
        group, world_size, shard = member.group.name, member.group.world_size, member.shard
        use = (member.serves, member.spot, member.medium, member.purpose, "", 1, CHUNKS, member.manifest, held)
        ident = member.registration
        self.say(peer, Register(next(self.numbers), ident, "m", group, member.rank, shard, world_size, *use))

    def peer_leaves(self) -> None:
        peer = self.pick(self.online())
        if peer is not None:
            self.say(peer, Leave("done"))

    # -------------------------------------------------------------------------------------------------------- calls

    def rank_calls(self) -> None:
        idle = [(peer, member) for peer, member in self.members() if member.part is None]
        if not idle or self.often(0.1):
            if (peer := self.pick(self.online())) is not None:
                self.registers(peer)
            return
        peer, member = self.random.choice(idle)
        group = member.group
        key = OpKey("m", group.name, group.epoch, group.sequence)
        others = list(group.operation.parts.values()) if group.operation is not None else []
        generation = next(self.numbers)
        timeout_s = 1000.0 if self.often(0.9) else self.random.choice((0.5, 8.0))
        if others and self.often(0.95):
            call = others[0].call
            kind = call.kind if isinstance(call, Fill) else OpKind.PUBLISH
            selector, version = (call.selector, 0) if isinstance(call, Fill) else (0, call.version)
            staged = isinstance(call, Fill) and call.staged
        else:
            kind = OpKind.PUBLISH if member.holding is None and self.often(0.3) else OpKind.UPDATE
            kind, selector = kind if member.serves else OpKind.FETCH, self.random.choice(SELECTORS)
            mark = self.model.mark if self.model is not None else None
            version, staged = (mark or 0) + 1, member.serves and self.often(0.1)
        if kind is OpKind.PUBLISH:
            self.say(peer, Publish(key, member.rank, member.registration, version, generation, timeout_s))
        else:
            fill = (kind, selector, None, generation, self.often(0.3), staged, timeout_s)
            self.say(peer, Fill(key, member.rank, member.registration, *fill))

    def rank_goes_on(self) -> None:
        """One of the ranks that take part in something says what is its turn to say."""
        picked = self.pick(self.parts())
        if picked is None:
            return
        peer, part = picked
        key, rank = part.operation.key, part.rank
        root = self.random.choice(ROOTS) if self.manifest == DIGESTED else b""
        words: list[FromWorker] = []
        if part.operation.running and not part.ready:
            words.append(ReadyToWrite(key, rank))
        if part.reads:
            words.append(Progress(key, rank, 1, 1))
            words += [Prepared(key, rank, root)] * (2 if part.leases else 0)
        for lease in part.leases.values():
            reason = "dropped" if lease.dropping else self.random.choice(("lost", "dropped", "corrupt"))
            words.append(ReadFailed(key, rank, lease.id, reason, "", 0 if reason == "corrupt" else None))
        if part.claim is not None:
            words += [Prepared(key, rank, root), Compared(key, rank, CHUNKS, (), self.often(0.4))]
        if (word := self.pick(words)) is not None:
            self.say(peer, word)

    def rank_gives_up(self) -> None:
        picked = self.pick(self.parts())
        if picked is not None:
            peer, part = picked
            self.say(peer, Abandon(part.operation.key, part.rank, ErrorInfo("StateError", "enough", False)))

    def rank_takes_back(self) -> None:
        picked = self.pick([(p, m, m.holding) for p, m in self.members() if m.holding is not None and m.holding.committed])
        if picked is not None:
            peer, member, holding = picked
            how = (self.random.choice((9.0, 1000.0)), self.often(0.3), self.often(0.2))
            self.say(peer, LeaveRequest(next(self.numbers), member.registration, holding.generation, *how))

    def rank_closes(self) -> None:
        picked = self.pick(self.members())
        if picked is not None:
            peer, member = picked
            self.say(peer, Deregister(next(self.numbers), member.registration, False))

    # ------------------------------------------------------------------------------------------------------- owners

    def owner_answers(self) -> None:
        words: list[Callable[[], None]] = []

        def later(peer: Peer, message: FromWorker) -> None:
            words.append(partial(self.say, peer, message))

        for peer, member in self.members():
            for holding in member.holdings:
                for lease in holding.readers.values():
                    if lease.state is LeaseState.FENCING:
                        later(peer, ReaderCut(lease.id))
                if holding.leaving and member.registration not in member.group.model.withdrawals:
                    later(peer, Fenced(member.registration, holding.generation))
            held = member.holding
            if held is not None and held.committed:
                content = held.version.info.content_id
                later(peer, RetainedAck(member.registration, content, held.told, member.retained_seq))
                if self.manifest == DIGESTED and self.often(0.2):
                    told = (CHUNKS, ((0, CHUNKS),), DIGESTS, True)
                    later(peer, Digests(member.registration, held.generation, *told))
        for peer in self.online():
            if peer.asked:
                words += [partial(self.answers, peer)] * 3
            if peer.to_announce:
                words += [partial(self.announces, peer)] * 3
        if (word := self.pick(words)) is not None:
            word()

    def answers(self, peer: Peer) -> None:
        """What it was asked first."""
        asked = peer.asked.pop(0)
        match asked:
            case TellDigests():
                told = (CHUNKS, ((0, CHUNKS),), DIGESTS, True) if self.often(0.7) else (CHUNKS, (), b"", True)
                self.say(peer, Digests(asked.registration, asked.generation, *told))
            case MakeCopy():
                use = (True, False, Medium.HOST, Purpose.RETENTION, "", 1, CHUNKS, self.manifest, None)
                self.say(peer, Register(next(self.numbers), asked.copy, "m", asked.copy, 0, asked.shard, 1, *use))
                member = self.core.cluster.members.get(asked.copy)
                if member is not None:
                    key = OpKey("m", asked.copy, member.group.epoch, 0)
                    fill = (OpKind.REPLICATE, asked.version.version, None, next(self.numbers), False, False, 60.0)
                    self.say(peer, Fill(key, 0, asked.copy, *fill))
            case DropCopy():
                self.say(peer, Deregister(next(self.numbers), asked.copy, True))
            case _:
                pass

    def policy_changes(self) -> None:
        peer = self.pick([peer for peer in self.online() if not peer.read_only])
        model, request = self.model, next(self.numbers)
        if peer is None or model is None:
            return
        numbers = list(model.versions)
        wishes: list[FromWorker] = [Retain(request, "m", self.random.randrange(3))]
        wishes += [Pin(request, f"pin{request}", "m", self.random.choice(numbers))] if numbers else []
        wishes += [Unpin(request, pin, "m") for pin in model.pins]
        wishes += [Rollback(request, f"back{request}", "m", self.random.randint(0, model.mark))] if model.mark else []
        self.say(peer, self.random.choice(wishes))

    # ------------------------------------------------------------------------------------------- the store, and time

    def store_answers(self) -> None:
        if self.unstored:
            asked = self.unstored.pop(0)
            if self.often(0.95):
                self.stored.append(asked.entry)
                self.step(Persisted(asked.record))
            else:
                self.step(PersistFailed(asked.record, "full"))

    def coordinator_restarts(self) -> None:
        """What it has not stored is forgotten. Whoever was there comes back, and says what he held, or does not."""
        workers = self.core.cluster.workers
        for peer in self.peers:
            peer.session, worker = None, workers.get(peer.incarnation)
            peer.former = list(worker.members.values()) if worker is not None else peer.former
        self.sessions, self.unstored, self.looked_for = {}, [], []
        self.begin()

    def time_passes(self) -> None:
        """With heartbeats of some; and the coordinator may come late."""
        self.now += self.random.choice((0.1, 1.0, 3.0))
        for peer in self.online():
            if self.often(0.95):
                self.say(peer, Heartbeat(1, peer.said_at))
        if self.often(0.05):
            self.now += LEASE_S / 2
        while (due := self.core.next_deadline()) is not None and due <= self.now:
            self.step(Tick())
        if self.looked_for:
            asked, self.looked_for = self.looked_for, []
            self.step(Silent(tuple(session for session in asked if self.often(0.5))))
