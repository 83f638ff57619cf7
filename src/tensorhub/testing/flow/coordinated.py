"""The real coordinator in simulated time, and the processes that talk to it.

A message arrives half a round trip later. The coordinator takes one message at a time, and as long
for each as was measured (docs/benchmarks.md), so that a thousand calls at once wait for one
another. Every worker is heard of in time: heartbeats are said at once, and cost nothing.

Responsible for delivering, and for the memory of each rank, which flows fill. Not responsible for
the conversation (`thin`), nor for the calls of workers (`hub_system`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Final

from tensorhub.coordinator.actions import (
    CloseSession,
    Connected,
    Disconnected,
    Event,
    LookFor,
    Persist,
    Persisted,
    Received,
    Send,
    Silent,
    Tick,
)
from tensorhub.coordinator.core import Coordinator
from tensorhub.machine import InvariantBroken
from tensorhub.messages import (
    Announce,
    EpochChanged,
    Fenced,
    Fill,
    Flow as Carried,
    FromCoordinator,
    FromWorker,
    Grant,
    Heartbeat,
    HeartbeatAck,
    Join,
    LeaveGranted,
    Outcome,
    Prepared,
    Progress,
    Publish,
    ReadyToWrite,
    Refused,
    Register,
    RegisterAgain,
    Registered,
    Watch,
    Welcome,
)
from tensorhub.runtime.worker.fill import PROGRESS_S
from tensorhub.scheduler.links import SECONDS_MIN
from tensorhub.testing.flow.thin import MODEL, Layout, Shard, ThinWorker
from tensorhub.testing.flow.topology import Place
from tensorhub.testing.flow.transfers import Flow, Memory, Transfers
from tensorhub.testing.flow.workload import World
from tensorhub.types import Endpoint, Medium, OpKey, OpKind, Options, Purpose, VersionInfo
from tensorhub.worker.heartbeats import BEATS_PER_LEASE

# Of the coordinator's CPU, as measured: of the core (`python -m benches scale --verbose`, 1,024
# workers), and of the shell, which reads, decodes and sends (`python -m benches.scale.server`: what
# is left, by message).
SHELL_S = 21e-6
CORE_S: Final[Mapping[type, float]] = {
    Fill: 67e-6,
    ReadyToWrite: 70e-6,
    Prepared: 70e-6,
    Register: 39e-6,
    Publish: 30e-6,
}
# in groups of 1
CORE_ALONE_S: Final[Mapping[type, float]] = {
    **CORE_S,
    Fill: 147e-6,
    ReadyToWrite: 113e-6,
    Prepared: 87e-6,
}
REPORT_S = 4e-6  # anything else
PERSIST_S = 0.002  # until an entry is durable
REPORTS_MAX = 32  # of one fill; real workers report every `PROGRESS_S`, however long it takes
BEATS_MAX = 100_000  # of all workers in a run: a longer run has longer leases


@dataclass(eq=False, slots=True)
class ThinRank(ThinWorker):
    """A worker of the flow model. `beside`: its rank's host copy, from which it is filled first."""

    shell: Peer = field(kw_only=True)
    report_s: float = field(kw_only=True)
    beside: ThinRank | None = None
    registered: Callable[[], None] | None = None
    # of the call that runs: what came of it
    done: Callable[[VersionInfo | None], None] | None = None
    left: Callable[[], None] | None = None
    memory: Memory | None = None
    lanes: dict[str, Flow | None] = field(default_factory=dict)  # by lease
    # Of the newest fill: when it was called, might write, had the first byte, and the last.
    times: list[float] = field(default_factory=list)

    def say(self, message: FromWorker) -> None:
        self.shell.say(message)

    # -- calls

    def begin_publish(self, version: int, done: Callable[[VersionInfo | None], None]) -> None:
        self._open()
        assert self.memory is not None
        self.shell.transfers.put(self.memory, self.memory.nbytes)
        self.done = done
        self.publish(version)

    def begin_leave(self, left: Callable[[], None]) -> None:
        self.left = left
        self.unpublish(self.shell.request(self))

    def begin_fill(self, kind: OpKind, done: Callable[[VersionInfo | None], None]) -> None:
        self.done, self.times = done, [self.shell.now]
        self.fill(kind)

    def die(self) -> None:
        """Its process is gone: whatever reads from it notices."""
        self.close()
        self.key = None

    def hear(self, message: FromCoordinator) -> None:
        ThinWorker.hear(self, message)
        if isinstance(message, Registered | EpochChanged) and self.registered is not None:
            registered, self.registered = self.registered, None
            registered()
        elif isinstance(message, LeaveGranted) and self.left is not None:
            left, self.left = self.left, None
            left()

    def ended(self, message: Outcome) -> None:
        if not message.committed and self.memory is not None and not self.memory.is_whole:
            self.close()  # torn
        done, self.done = self.done, None
        if done is not None:
            done(message.version if message.committed else None)

    # -- memory

    def _open(self) -> None:
        self.close()
        self.generation += 1
        self.memory = Memory(self.shell.place.name, float(self.shard.nbytes), self._full)
        self.shell.opened(self)

    def close(self) -> None:
        self.held = None
        self._end_lanes()
        if self.memory is not None:
            self.shell.closed(self)
            memory, self.memory = self.memory, None
            self.shell.transfers.end(memory)

    def write(self, grants: tuple[Grant, ...]) -> None:
        """Every rank may overwrite what it has: the old version is fenced, which takes no time
        here.
        """
        before = self.memory
        self._open()
        if before is not None:
            self.say(Fenced(self.registration, self.generation - 1))
        key, memory = self.key, self.memory
        assert memory is not None
        self.times.append(self.shell.now)
        self._report_later(key)
        beside = self.beside
        if (
            beside is not None
            and beside.memory is not None
            and self.bound in (beside.held, beside.bound)
        ):
            self._copy(beside.memory, grants)
            return
        for grant in grants:
            self.read(grant)

    def _copy(self, source: Memory, grants: tuple[Grant, ...]) -> None:
        """The part that is in host memory comes from there first, then the rest from further
        sources.
        """
        transfers, memory, key = self.shell.transfers, self.memory, self.key
        transfers.advance(source)
        there = source.have
        seconds = there / self.shell.copy_bytes_per_s
        assert memory is not None

        def copied() -> None:
            if self.key is not key or self.memory is not memory:
                return
            transfers.put(memory, there)
            if memory.is_whole:
                self._full()
            for grant in grants if not memory.is_whole else ():
                self.read(grant)

        self.shell.after(seconds, copied)

    def read(self, grant: Grant) -> None:
        memory = self.memory
        if self.key is None or memory is None or memory.is_whole or grant.lease in self.lanes:
            return
        lease = grant.lease

        def broken() -> None:
            if self.drop(lease):
                self.failed(lease, "lost")

        found = self.shell.find(grant)
        if found is None:
            self.lanes[lease] = None
            self.shell.after(0.0, broken)
        else:
            self.lanes[lease] = self.shell.read(found, memory, broken)

    def drop(self, lease: str) -> bool:
        if lease not in self.lanes:
            return False
        self._end_lane(lease)
        return True

    def _end_lane(self, lease: str) -> None:
        flow = self.lanes.pop(lease)
        if flow is not None:
            self.shell.transfers.close(flow)

    def _end_lanes(self) -> None:
        for lease in list(self.lanes):
            self._end_lane(lease)

    def _full(self) -> None:
        """All of it is there, and verified."""
        if self.key is None or self.publishes:
            return
        self._report()
        began = [flow.began for flow in self.lanes.values() if flow is not None]
        self.times += [min([*began, self.shell.now]), self.shell.now]
        self._end_lanes()
        self.prepared()

    def _report_later(self, key: OpKey | None) -> None:
        def report() -> None:
            if (
                self.key is key
                and key is not None
                and self.memory is not None
                and not self.memory.is_whole
            ):
                self._report()
                self._report_later(key)

        self.shell.after(self.report_s, report)

    def _report(self) -> None:
        memory = self.memory
        if memory is None or self.key is None:
            return
        self.shell.transfers.advance(memory)
        flows = tuple(
            Carried(lease, int(flow.carried), flow.last - flow.began)
            for lease, flow in self.lanes.items()
            if flow is not None and flow.last - flow.began >= SECONDS_MIN
        )
        chunks = int(self.shard.chunks * memory.have / memory.nbytes)
        self.say(Progress(self.key, self.rank, chunks, int(memory.have), flows))


class Peer:
    """One worker process."""

    def __init__(self, hub: Coordinated, number: int, place: Place, host_bytes: int) -> None:
        self._hub = hub
        self.session = number
        self.place = place
        self.transfers: Transfers = hub.world.transfers
        self.copy_bytes_per_s = hub.world.topology.capacities[place.copy]
        self.is_there, self.has_joined = True, False
        self.newest: VersionInfo | None = None
        self.announced: Callable[[], None] = lambda: None
        self._ranks: dict[str, ThinRank] = {}  # by registration
        self._requests: dict[int, ThinRank] = {}
        self._beats = count(1)
        endpoints = [Endpoint("tcp", f"{place.name}:1")]
        if hub.world.scenario.gpus_per_host > 1:
            endpoints.append(Endpoint("cuda_ipc", place.location.host))
        self.say(Join(place.name, place.location, tuple(endpoints), number, host_bytes))
        self.say(Watch(MODEL))

    @property
    def now(self) -> float:
        return self._hub.world.timeline.now

    @property
    def incarnation(self) -> str:
        return f"{self.session:032x}"

    def register(
        self,
        group: str,
        rank: int,
        *,
        spot: bool = False,
        medium: Medium = Medium.DEVICE,
        purpose: Purpose = Purpose.USE,
        layout: Layout | None = None,
    ) -> ThinRank:
        """That rank's memory. A seed's is a group of its own."""
        hub = self._hub
        registration = f"{self.session:024x}{len(self._ranks):08x}"
        place = (0, rank, 1) if purpose is Purpose.SEED else (rank, rank, hub.world.scenario.ranks)
        made = ThinRank(hub.shard, registration, group, *place, shell=self, report_s=hub.report_s)
        made.spot, made.medium, made.purpose, made.layout = spot, medium, purpose, layout
        self._ranks[registration] = made
        self.say(made.register(self.request(made)))
        return made

    def beat(self, now: float) -> Heartbeat:
        return Heartbeat(next(self._beats), now)

    def end(self) -> None:
        """The process is gone, at once."""
        self.is_there = False
        for rank in self._ranks.values():
            rank.die()
        self._hub.ended(self)

    # -- what its ranks need

    def request(self, rank: ThinRank) -> int:
        number = len(self._requests) + 1
        self._requests[number] = rank
        return number

    def say(self, message: FromWorker) -> None:
        if self.is_there:
            self._hub.say(self, Received(self.session, message))

    def find(self, grant: Grant) -> tuple[Place, Memory] | None:
        return self._hub.memories.get((grant.registration, grant.generation))

    def opened(self, rank: ThinRank) -> None:
        assert rank.memory is not None
        self._hub.memories[rank.registration, rank.generation] = self.place, rank.memory

    def closed(self, rank: ThinRank) -> None:
        self._hub.memories.pop((rank.registration, rank.generation), None)

    def read(
        self, source: tuple[Place, Memory], reader: Memory, broken: Callable[[], None]
    ) -> Flow:
        topology = self._hub.world.topology
        place, memory = source
        path, lag = topology.path(place, self.place), topology.lag(place, self.place)
        return self.transfers.open(
            memory, reader, path, lag, topology.opening_s(place, self.place), broken
        )

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._hub.world.timeline.after(seconds, call)

    # -- what it hears

    def hear(self, message: FromCoordinator) -> None:
        if not self.is_there:
            return
        match message:
            case Welcome():
                self.has_joined = True
            case Announce():
                self.newest = message.newest
                self.announced()
            case LeaveGranted() | RegisterAgain():
                self._requests[message.request].hear(message)
            case Refused():
                raise InvariantBroken(f"{self.place.name} was refused: {message.error.message}")
            case _:
                for rank in self._concerned(message):
                    rank.hear(message)

    def _concerned(self, message: FromCoordinator) -> list[ThinRank]:
        registration, key = getattr(message, "registration", None), getattr(message, "key", None)
        if registration is not None:
            return [self._ranks[registration]] if registration in self._ranks else []
        group = key.group if key is not None else getattr(message, "group", None)
        number = getattr(message, "rank", None)
        return [r for r in self._ranks.values() if r.group == group and number in (None, r.rank)]


class Coordinated:
    """The coordinator, in the trainer's site, and all processes."""

    def __init__(self, world: World) -> None:
        scenario = world.scenario
        self.world = world
        self.shard = Shard(scenario.rank_bytes, scenario.chunk_bytes)
        self.report_s = max(PROGRESS_S, scenario.copy_s / REPORTS_MAX)
        # by registration and generation
        self.memories: dict[tuple[str, int], tuple[Place, Memory]] = {}
        self.steps = 0
        workers = len(world.topology.places)
        options = Options()
        self.lease_s = max(options.lease_s, workers * scenario.ends_s * BEATS_PER_LEASE / BEATS_MAX)
        ids = count(1)
        self.coordinator = Coordinator(
            cluster="c" * 32,
            epoch=1,
            options=Options(
                sessions_max=max(options.sessions_max, 4 * workers), lease_s=self.lease_s
            ),
            ids=lambda: f"{next(ids):032x}",
            now=0.0,
        )
        self._site = scenario.sites[0]
        self._peers: dict[int, Peer] = {}
        self._sessions = count(1)
        self._busy_until = 0.0
        self._tick_at = float("inf")
        self._beat()

    def peer(self, place: Place, host_bytes: int = 0) -> Peer:
        number = next(self._sessions)
        connected = Connected(number, f"{number:032x}", "worker")
        self._later(place, connected)
        made = self._peers[number] = Peer(self, number, place, host_bytes)
        return made

    def ended(self, peer: Peer) -> None:
        del self._peers[peer.session]
        self._later(peer.place, Disconnected(peer.session))

    def say(self, peer: Peer, event: Event) -> None:
        self._later(peer.place, event)

    def way_s(self, place: Place) -> float:
        return self.world.topology.round_trip_s(place.location.site, self._site) / 2

    def _later(self, place: Place, event: Event) -> None:
        self.world.timeline.after(self.way_s(place), lambda: self._hear(event))

    def _hear(self, event: Event) -> None:
        """It has arrived, and is heard in its turn."""
        timeline = self.world.timeline
        self._busy_until = max(self._busy_until, timeline.now) + self.takes_s(event)
        timeline.at(self._busy_until, lambda: self._step(event))

    def takes_s(self, event: Event) -> float:
        """How long the coordinator is busy with it."""
        of = CORE_S if self.world.scenario.ranks > 1 else CORE_ALONE_S
        core_s = of.get(type(event.message), REPORT_S) if isinstance(event, Received) else REPORT_S
        return core_s + SHELL_S

    def _step(self, event: Event) -> None:
        timeline = self.world.timeline
        self.steps += 1
        for action in self.coordinator.step(event, timeline.now):
            match action:
                case Send():
                    peer = self._peers.get(action.session)
                    if peer is not None and not isinstance(action.message, HeartbeatAck):
                        self._deliver(peer, action.message)
                case Persist():
                    record = action.record
                    timeline.after(PERSIST_S, lambda record=record: self._step(Persisted(record)))  # type: ignore[misc]
                case LookFor():
                    if action.session not in self._peers:
                        number = action.session
                        timeline.after(0.0, lambda number=number: self._step(Silent((number,))))  # type: ignore[misc]
                case CloseSession():
                    raise InvariantBroken(
                        f"the coordinator has closed session {action.session}: {action.reason}"
                    )
                case _:
                    pass
        due = self.coordinator.next_deadline()
        if due is not None and due < self._tick_at:
            self._tick_at = due
            timeline.at(due, self._tick)

    def _tick(self) -> None:
        if self.world.timeline.now >= self._tick_at:
            self._tick_at = float("inf")
            self._step(Tick())

    def _deliver(self, peer: Peer, message: FromCoordinator) -> None:
        self.world.timeline.after(self.way_s(peer.place), lambda: peer.hear(message))

    def _beat(self) -> None:
        """All are heard of."""
        now = self.world.timeline.now
        for peer in list(self._peers.values()):
            if peer.has_joined:
                self._step(Received(peer.session, peer.beat(now)))
        self.world.timeline.after(self.lease_s / BEATS_PER_LEASE, self._beat)
