"""A whole cluster without bytes, sockets, threads or a clock: the real coordinator, the real members, the real owners.

Responsible for carrying messages, in order on each connection and in any order across connections; for what a memory's
cells hold; and for checking the guarantees after each step (`check`). Every step that could happen now is a `Choice`;
who drives the cluster picks one: in turn (`run`), by a seed, or Hypothesis. Not responsible for choosing.

Memory is a list of cells, one per chunk; a cell holds a tag that names who wrote it. A read copies a cell when it *ends*,
as the slowest of readers would, so that memory which is written before its fence stands is caught.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from itertools import count
from typing import Any, NamedTuple, assert_never

from tensorhub.coordinator import (
    CloseSession,
    Connected,
    Coordinator,
    Disconnected,
    Durable,
    Entry,
    Event,
    Persist,
    Persisted,
    PersistFailed,
    Publication,
    Received,
    Rollback,
    Send,
    Tick,
)
from tensorhub.errors import LeaseLost, StateError, TensorHubError
from tensorhub.manifest import Manifest, TensorDescription, build_manifest
from tensorhub.messages import (
    Announce,
    CopyRefused,
    CutReader,
    Deregister,
    Description,
    Dismissed,
    Done,
    DropCopy,
    EpochChanged,
    ErrorInfo,
    FromCoordinator,
    FromWorker,
    Grant,
    Heartbeat,
    HeartbeatAck,
    Join,
    Keep,
    Kept,
    Leave,
    MakeCopy,
    Pin,
    Publish,
    ReaderCut,
    Refused,
    Register,
    Retain,
    Unpin,
    Welcome,
    Withdraw,
    Withdrawn,
)
from tensorhub.messages import Rollback as AskRollback
from tensorhub.types import (
    ContentId,
    Endpoint,
    HandleState,
    Location,
    Medium,
    OpKey,
    OpKind,
    Options,
    Purpose,
    RegistrationId,
    Selector,
    VersionInfo,
)
from tensorhub.worker.calls import (
    Action,
    AddPullSource,
    Call,
    CallHook,
    CloseCall,
    DropPullSource,
    Fence,
    FillCall,
    Finish,
    OpenMemory,
    PublishCall,
    RefuseCall,
    Registered,
    RegistrationFailed,
    ReopenMemory,
    Say,
    StartPull,
    StopPull,
    UnpublishCall,
)
from tensorhub.worker.enrolment import Shard
from tensorhub.worker.member import Member
from tensorhub.worker.owner import Access, Owner, Refusal, Wait

CHUNKS = 2
CHUNK_BYTES = 2**28  # so that links, not hops, decide who reads from whom; none of it is allocated
TENSOR = TensorDescription("w", "uint8", (CHUNKS, CHUNK_BYTES), 0, CHUNKS * CHUNK_BYTES)
DEVICE = (Medium.DEVICE, Purpose.USE)  # what a registration's memory is
MANIFEST = build_manifest([TENSOR], CHUNK_BYTES, "none")


class BrokenHook(Exception):
    """What a test's before_write raises."""


class GuaranteeBroken(AssertionError):
    """One of the design's guarantees does not hold."""


class Choice(NamedTuple):
    """Something that could happen now."""

    kind: str
    name: str


@dataclass(eq=False)
class Asked:
    """One call, and how it ended."""

    what: Call
    handle: Handle
    floor: int | None  # the newest number whose publish had returned when this call began, and not rolled back since
    retired: frozenset[str] = frozenset()  # content ids that were rolled back when this call began
    key: OpKey | None = None
    done: bool = False
    version: VersionInfo | None = None
    changed: bool = False
    error: Exception | None = None

    def has_ended(self) -> bool:
        return self.done

    @property
    def number(self) -> int:
        """The version that the call ended with; raises what the call raised."""
        assert self.done, f"{self.what} has not ended"
        if self.error is not None:
            raise self.error
        assert self.version is not None
        return self.version.version


@dataclass(eq=False)
class Link:
    """One connection between a worker and the coordinator."""

    session: int
    up: deque[FromWorker] = field(default_factory=deque)
    down: deque[FromCoordinator | None] = field(default_factory=deque)  # None: closed by the coordinator
    welcomed: bool = False


@dataclass(eq=False)
class Reading:
    """A read of one cell that has begun at its source and not ended."""

    lease: str
    source: Handle
    access: Access
    chunk: int


@dataclass(eq=False)
class Pull:
    """What a fill still lacks, and whom it may read from."""

    start: StartPull
    grants: dict[str, Grant]
    missing: set[int]
    reading: Reading | None = None
    ended: bool = False


class Handle:
    """One registration: the real member, cells instead of tensors, and what its shell has still to do, in order."""

    def __init__(self, cluster: PureCluster, worker: SimWorker, shard: Shard) -> None:
        self.cluster = cluster
        self.worker = worker
        self.shard = shard
        self.name = f"{worker.name}:{shard.group}[{shard.rank}]"
        self.cells: list[str] = ["unset"] * CHUNKS
        self.todo: deque[Action] = deque()
        self.hooks: deque[CallHook] = deque()
        self.pull: Pull | None = None
        self.access: tuple[Access, str] | None = None  # one that no fence can end, and what it read in the cell at first
        self.asked: Asked | None = None
        self.history: list[Asked] = []
        self.hook_error: Exception | None = None
        self.hook_calls = 0
        self.registration_error: Exception | None = None
        self.registered = False
        self.member = Member(
            shard,
            requests=lambda: next(cluster.numbers),
            generations=lambda: next(cluster.numbers),
            manifests=worker.manifests,
        )
        if not shard.serves:
            self.name = f"{worker.name}:{shard.group}"

    def __repr__(self) -> str:
        return f"<Handle {self.name} {self.member.state} v={self.member.version}>"

    @property
    def id(self) -> RegistrationId:
        return RegistrationId(self.shard.registration)

    @property
    def idle(self) -> bool:
        return self.member.running is None and not self.todo

    # -- what a user does

    def write(self) -> None:
        """Fill the memory with something that nobody else ever wrote."""
        assert self.member.state in (HandleState.EMPTY, HandleState.TORN), self
        self.cells = [f"{self.name}#{next(self.cluster.numbers)}"] * CHUNKS

    def call(self, call: Call, timeout_s: float = 60.0) -> Asked:
        """Begin a call; raises StateError where the handle's state forbids it."""
        self.cluster.note(f"{self.name} calls {show(call)}")
        actions = self.member.begin(call, timeout_s, self.cluster.now)
        retired = frozenset(self.cluster.retired)
        asked = self.asked = Asked(call, self, self.cluster.returned.get(self.shard.model), retired)
        self.history.append(asked)
        self.apply(actions)
        return asked

    def publish(self, version: int, timeout_s: float = 60.0) -> Asked:
        if self.idle and self.member.state in (HandleState.EMPTY, HandleState.TORN):
            self.write()
        return self.call(PublishCall(version), timeout_s)

    def replicate(self, selector: Selector = "latest", timeout_s: float = 60.0, *, hold: bool = False) -> Asked:
        return self.call(FillCall(OpKind.REPLICATE, selector, hold=hold), timeout_s)

    def update(
        self, selector: Selector = "latest", timeout_s: float = 60.0, *, hold: bool = False, at_least: int | None = None
    ) -> Asked:
        return self.call(FillCall(OpKind.UPDATE, selector, at_least, hold), timeout_s)

    def fetch(self, selector: Selector = "latest", timeout_s: float = 60.0) -> Asked:
        return self.call(FillCall(OpKind.FETCH, selector), timeout_s)

    def unpublish(self, timeout_s: float = 60.0) -> Asked:
        return self.call(UnpublishCall(), timeout_s)

    def close(self, timeout_s: float = 60.0, *, abandon: bool = False) -> Asked:
        return self.call(CloseCall(abandon), timeout_s)

    def refuse(self, reason: str = "the body raised") -> Asked:
        return self.call(RefuseCall(reason), 60.0)

    def cancel(self, why: str = "cancelled") -> None:
        self.cluster.note(f"{self.name} cancels")
        self.apply(self.member.cancel(StateError(why), self.cluster.now))

    # -- accesses of its own

    def hold_access(self) -> None:
        """One of its own lanes begins to digest (or copy) a chunk, which nobody can end but itself."""
        content = self.member.content
        if self.access is None and content is not None:
            content_id = ContentId(content.version.content_id)
            access = self.worker.owner.begin(self.id, content.generation, content_id, [0], CHUNK_BYTES)
            if isinstance(access, Access):
                self.cluster.note(f"{self.name} begins an access")
                self.access = access, self.cells[0]

    def end_access(self) -> None:
        if self.access is not None:
            self.cluster.note(f"{self.name} ends an access")
            (access, was), self.access = self.access, None
            self.worker.owner.end(access)
            demand(self.cells[0] == was, f"G2: {self} was written while it was read: {was} is {self.cells[0]}")

    def fence_waits_until(self) -> float | None:
        """Until when its next action, a fence, has to wait for the access; None: there is no such wait."""
        fence = self.todo[0] if self.todo else None
        if not isinstance(fence, Fence) or self.access is None or self.cluster.readers_of(self):
            return None
        held = self.worker.owner._holdings[self.id]
        return None if held.is_open else self.given_up_at(fence)

    def given_up_at(self, fence: Fence) -> float:
        if fence.until is None:
            return float("inf")
        until = self.member.fence_until
        return fence.until if until is None else min(fence.until, until)

    def can_do_next(self) -> bool:
        until = self.fence_waits_until()
        return bool(self.todo) and (until is None or until <= self.cluster.now)

    # -- what its shell does

    def apply(self, actions: list[Action]) -> None:
        running = self.member.running
        if running is not None and self.asked is not None and running.key is not None:
            self.asked.key = running.key
        self.todo.extend(actions)

    def do_next(self) -> None:
        """Carry out the next action, or a part of it."""
        action = self.todo[0]
        now, owner = self.cluster.now, self.worker.owner
        if isinstance(action, Fence):
            owner.close(self.id)
            if not owner.is_quiet(self.id):
                for reader in self.cluster.readers_of(self):  # their sockets are shut down
                    reader.end_reading("lost")
                if self.given_up_at(action) <= now and self.access is not None:
                    self.todo.popleft()
                    self.apply(self.member.fence_failed(action.generation, now))
                return  # takes time
        if isinstance(action, StopPull) and self.pull is not None:
            self.end_reading(None)
            self.pull.ended = True
        self.todo.popleft()
        match action:
            case Say():
                if isinstance(action.message, Publish):
                    tags = self.cluster.promised.setdefault(action.message.key, {})
                    tags[self.shard.rank] = self.cells[0]
                self.worker.say(action.message)
            case OpenMemory():
                content = ContentId(action.content_id)
                sizes = [CHUNK_BYTES] * CHUNKS
                owner.open(self.id, action.generation, content, sizes, complete=action.complete)
            case ReopenMemory():
                owner.reopen(self.id, action.generation)
            case Fence():
                self.apply(self.member.fenced(action.generation, now))
            case CallHook():
                self.hooks.append(action)
            case StartPull():
                self.pull = Pull(action, {g.lease: g for g in action.grants}, set(range(CHUNKS)))
                self.cells = ["half-filled"] * CHUNKS
            case AddPullSource():
                if self.pull is not None and not self.pull.ended:
                    self.pull.grants[action.grant.lease] = action.grant
            case DropPullSource():
                self.source_ended(action.lease, "dropped")
            case StopPull():
                self.apply(self.member.pull_stopped(now))
            case Registered():
                self.registered = True
            case RegistrationFailed():
                self.registration_error = action.error
            case Finish():
                self.finish(action)
            case _:
                assert_never(action)

    def finish(self, action: Finish) -> None:
        asked = self.asked
        assert asked is not None
        assert not asked.done, f"{self.name}: {action} without a call"
        asked.done, asked.version, asked.changed, asked.error = True, action.version, action.changed, action.error
        self.cluster.ended(self, asked)
        if not self.shard.serves:  # it was made for this call
            self.worker.handles.remove(self)
            self.worker.say(Deregister(0, self.shard.registration, True))

    def hook_returns(self) -> None:
        self.hooks.popleft()
        self.hook_calls += 1
        self.apply(self.member.hook_returned(self.hook_error, self.cluster.now))

    def source_ended(self, lease: str, reason: str) -> None:
        """The pull lets go of a source, or is let go by it."""
        pull = self.pull
        if pull is None or pull.ended or pull.grants.pop(lease, None) is None:
            return
        if pull.reading is not None and pull.reading.lease == lease:
            self.end_reading(None)
        self.apply(self.member.source_failed(lease, reason, "", self.cluster.now))

    def end_reading(self, failure: str | None) -> None:
        """Break the read in progress off; `failure` says why its source is given up, None that it is not."""
        pull = self.pull
        if pull is None or pull.reading is None:
            return
        reading, pull.reading = pull.reading, None
        if reading.source.worker.alive:
            reading.source.worker.owner.end(reading.access)
        if failure is not None:
            self.source_ended(reading.lease, failure)

    def read(self) -> None:
        """One step of the pull: end the read in progress, begin one, or find out that a source is no more."""
        pull, cluster = self.pull, self.cluster
        assert pull is not None
        if pull.reading is not None:
            reading = pull.reading
            self.cells[reading.chunk] = reading.source.cells[reading.chunk]
            self.end_reading(None)
            pull.missing.discard(reading.chunk)
            self.worker.owner.mark_available(self.id, pull.start.generation, [(reading.chunk, None)])
            if not pull.missing:
                pull.ended = True
                self.apply(self.member.pull_done(cluster.now))
            return
        for lease, grant in list(pull.grants.items()):
            answer = self.ask(grant)
            if isinstance(answer, str):
                self.source_ended(lease, answer)
                return
            if isinstance(answer, Reading):
                pull.reading = answer
                return

    def ask(self, grant: Grant) -> Reading | str | None:
        """Begin a read at this source: why it cannot be had, or None while it has to be waited for."""
        pull = self.pull
        assert pull is not None
        source = self.cluster.find(grant)
        if source is None:
            return "unreachable"
        if grant.lease in source.worker.cut:
            return "lost"
        content = ContentId(pull.start.version.content_id)
        begun = source.worker.owner.begin(source.id, grant.generation, content, sorted(pull.missing), CHUNK_BYTES)
        if isinstance(begun, Refusal):
            return "refused"
        return None if isinstance(begun, Wait) else Reading(grant.lease, source, begun, begun.chunks[0])

    def can_read(self) -> bool:
        pull = self.pull
        if pull is None or pull.ended:
            return False
        if pull.reading is not None:
            return True
        for grant in pull.grants.values():
            answer = self.ask(grant)
            if isinstance(answer, Reading):
                answer.source.worker.owner.end(answer.access)
            if answer is not None:
                return True
        return False


class SimWorker:
    """One worker process: its connection, its owner, its handles."""

    def __init__(self, cluster: PureCluster, name: str, location: Location, transports: tuple[str, ...]) -> None:
        self.cluster = cluster
        self.name = name
        self.location = location
        self.endpoints = tuple(Endpoint(transport, name) for transport in transports)
        self.lives = 1
        self.alive = True
        self.owner = Owner()
        self.manifests: dict[str, Manifest] = {}
        self.handles: list[Handle] = []
        self.link: Link | None = None
        self.cut: set[str] = set()  # leases whose readers are served no more
        self.dismissals: list[str] = []
        self.answers: dict[int, TensorHubError | None] = {}  # to what the worker itself asked, by request
        self.host_bytes = 0
        self.knew = ""  # the cluster of its newest session
        self.pins: dict[str, tuple[str, int]] = {}  # that it wants: model and version, by id

    def __repr__(self) -> str:
        return f"<SimWorker {self.incarnation} link={self.link is not None}>"

    @property
    def incarnation(self) -> str:
        return f"{self.name}.{self.lives}"

    def register(
        self, group: str, rank: int = 0, world_size: int = 1, *, model: str = "actor", spot: bool = False, layout: str = ""
    ) -> Handle:
        number = next(self.cluster.registrations)
        return self.take(Shard(f"r{number}", model, group, rank, world_size, spot, layout, MANIFEST, rank))

    def fetcher(self, shard: int = 0, *, model: str = "actor") -> Handle:
        """What can fetch once."""
        number = next(self.cluster.registrations)
        return self.take(Shard(f"r{number}", model, f"fetch{number}", 0, 1, True, "", None, shard))

    def take(self, shard: Shard) -> Handle:
        handle = Handle(self.cluster, self, shard)
        self.handles.append(handle)
        if self.link is not None and self.link.welcomed:
            handle.apply(handle.member.connected(self.cluster.now))
        return handle

    def connect(self) -> None:
        assert self.alive
        assert self.link is None
        self.link = self.cluster.new_link(self)
        self.say(Join(self.name, self.location, self.endpoints, 1, self.host_bytes))

    def disconnect(self) -> None:
        """The connection breaks; what was on its way is lost, and the coordinator will notice some time."""
        link = self.link
        if link is None:
            return
        self.cluster.note(f"{self.name} loses its connection")
        self.link = None
        self.cluster.ending.append(link.session)
        for handle in self.handles:
            handle.apply(handle.member.disconnected(self.cluster.now))

    def crash(self) -> None:
        """The process and its memory are no more."""
        self.cluster.note(f"{self.name} crashes")
        for handle in self.handles:
            handle.end_reading(None)
            handle.access = None
            if handle.pull is not None:
                handle.pull.ended = True
            handle.todo.clear()
            handle.hooks.clear()
        for reader in self.cluster.all_handles():
            reading = reader.pull.reading if reader.pull is not None else None
            if reading is not None and reading.source.worker is self:
                reader.end_reading("lost")
        if self.link is not None:
            self.cluster.ending.append(self.link.session)
            self.link = None
        self.alive = False

    def rollback(self, to: int, model: str = "actor", ident: str = "") -> int:
        """Ask for it; its answer will be in `answers`."""
        request = next(self.cluster.numbers)
        self.say(AskRollback(request, ident or f"rollback{request}", model, to))
        return request

    def retain(self, latest: int, model: str = "actor") -> int:
        request = next(self.cluster.numbers)
        self.say(Retain(request, model, latest))
        return request

    def pin(self, version: int, model: str = "actor", pin: str = "") -> tuple[str, int]:
        """A new pin (or `pin` again), and the request that asked for it."""
        request = next(self.cluster.numbers)
        pin = pin or f"pin{request}"
        self.pins[pin] = (model, version)
        self.say(Pin(request, pin, model, version))
        return pin, request

    def unpin(self, pin: str) -> int:
        request = next(self.cluster.numbers)
        self.say(Unpin(request, pin, self.pins.pop(pin)[0]))
        return request

    def heard_soon(self) -> list[FromCoordinator | None]:
        """What is on its way here."""
        return list(self.link.down) if self.link is not None else []

    def say(self, message: FromWorker) -> None:
        if self.link is not None:
            self.link.up.append(message)

    def hear(self, message: FromCoordinator) -> None:
        now = self.cluster.now
        match message:
            case Welcome():
                assert self.link is not None
                self.link.welcomed = True
                if self.knew not in ("", message.cluster):
                    for handle in self.handles:
                        handle.apply(handle.member.state_lost(now))
                self.knew = message.cluster
                for handle in self.handles:
                    handle.apply(handle.member.connected(now))
                for pin, (model, version) in list(self.pins.items()):
                    self.pin(version, model, pin)
            case Dismissed():
                self.dismissals.append(message.reason)
                self.lives += 1
            case HeartbeatAck() | Announce() | Description():
                pass
            case CutReader():
                self.cut.add(message.lease)
                for reader in self.cluster.all_handles():
                    reading = reader.pull.reading if reader.pull is not None else None
                    if reading is not None and reading.lease == message.lease:
                        reader.end_reading("lost")
                self.say(ReaderCut(message.lease))
            case MakeCopy():
                self.say(CopyRefused(message.copy, "not here"))
            case DropCopy():
                pass
            case Keep():
                self.say(Kept(message.registration, message.content_id, message.keep))
            case EpochChanged():
                for handle in self.handles:
                    if (handle.shard.model, handle.shard.group) == (message.model, message.group):
                        handle.apply(handle.member.receive(message, now))
            case _:
                if isinstance(message, Done | Refused):
                    self.answers[message.request] = message.error.error() if isinstance(message, Refused) else None
                key = getattr(message, "key", None)
                registration = getattr(message, "registration", None)
                for handle in self.handles:
                    shard = handle.shard
                    about = (shard.model, shard.group, shard.rank)
                    ours = key is None or (key.model, key.group, getattr(message, "rank", shard.rank)) == about
                    if ours and registration in (None, shard.registration):
                        handle.apply(handle.member.receive(message, now))


class PureCluster:
    """The coordinator, its store, its workers, and the guarantees."""

    def __init__(self, options: Options | None = None) -> None:
        self.options = options or Options()
        self.now = 0.0
        self.log: list[str] = []
        self.numbers = count(1)
        self.registrations = count()
        self.ids = count(1)
        self.sessions = count(1)
        self.workers: dict[str, SimWorker] = {}
        self.links: dict[int, tuple[SimWorker, Link]] = {}  # that the coordinator has not seen end
        self.ending: list[int] = []  # sessions whose end the coordinator has not noticed
        self.store: list[Entry] = []
        self.unstored: dict[int, Persist] = {}
        self.epoch = 0
        self.cluster_id = "c"
        self.heartbeat_at = 0.0
        self.promised: dict[OpKey, dict[int, str]] = {}  # tags of each publish, by rank
        self.truth: dict[str, dict[int, str]] = {}  # tags of each content, by rank
        self.outcomes: dict[OpKey, dict[int, tuple[bool, str]]] = {}  # by rank: committed, and how it was learnt
        self.returned: dict[str, int] = {}  # by model: the newest number of its lineage whose publish has returned
        self.retired: set[str] = set()  # content ids that were rolled back
        self.restart(note=False)

    # -- making things

    def worker(self, name: str, location: Location | None = None, transports: tuple[str, ...] = ("tcp",)) -> SimWorker:
        worker = self.workers[name] = SimWorker(self, name, location or Location(host=name), transports)
        worker.connect()
        return worker

    def handle(self, name: str, group: str | None = None, rank: int = 0, world_size: int = 1, **more: Any) -> Handle:
        """A worker of this name, if there is none yet, with one registration."""
        worker = self.workers.get(name) or self.worker(name)
        return worker.register(group or name, rank, world_size, **more)

    def fetcher(self, name: str, shard: int = 0) -> Handle:
        """A worker of this name, if there is none yet, that fetches."""
        return (self.workers.get(name) or self.worker(name)).fetcher(shard)

    def group(self, name: str, world_size: int, *, spot: bool = False) -> list[Handle]:
        """A worker per rank."""
        return [self.handle(f"{name}{rank}", name, rank, world_size, spot=spot) for rank in range(world_size)]

    def new_link(self, worker: SimWorker) -> Link:
        link = Link(next(self.sessions))
        self.links[link.session] = (worker, link)
        self.step(Connected(link.session, worker.incarnation, "worker"))
        return link

    def restart(self, *, note: bool = True, kept: bool = False, lost: bool = False) -> None:
        """The coordinator dies and comes back on what is durable; `kept`: what was being written has made it, too.

        `lost`: without its state, as a new cluster. Then what was published before must not come back (R2, G3).
        """
        if note:
            self.note("the coordinator restarts")
        if kept:
            for persist in self.unstored.values():
                self.stored(persist.entry)
        self.unstored.clear()
        self.epoch += 1
        if lost:
            self.retired.update(e.content_id for e in self.store if isinstance(e, Publication))
            for past in (self.store, self.returned, self.outcomes):
                past.clear()
            self.cluster_id += "'"
        self.coordinator = Coordinator(
            cluster=self.cluster_id,
            epoch=self.epoch,
            options=self.options,
            ids=lambda: f"id{next(self.ids)}",
            now=self.now,
            durable=Durable.of(self.store) if self.epoch > 1 else None,
        )
        self.links.clear()
        self.ending.clear()
        for worker in self.workers.values():
            if worker.link is not None:
                worker.disconnect()
        self.ending.clear()

    # -- looking

    def all_handles(self) -> Iterator[Handle]:
        for worker in self.workers.values():
            yield from worker.handles

    def live_handles(self) -> Iterator[Handle]:
        return (handle for handle in self.all_handles() if handle.worker.alive)

    def find(self, grant: Grant) -> Handle | None:
        """The memory that a grant names."""
        for handle in self.live_handles():
            if handle.shard.registration == grant.registration:
                return handle
        return None

    def readers_of(self, source: Handle) -> list[Handle]:
        reading = [(h, h.pull.reading) for h in self.all_handles() if h.pull is not None and h.pull.reading is not None]
        return [handle for handle, running in reading if running.source is source]

    def note(self, line: str) -> None:
        self.log.append(f"{self.now:7.2f}  {line}")

    def note_message(self, worker: str, arrow: str, message: FromWorker | FromCoordinator) -> None:
        if not isinstance(message, Heartbeat | HeartbeatAck):
            self.note(f"{worker} {arrow} {show(message)}")

    # -- what can happen now

    def choices(self) -> list[Choice]:
        found: list[Choice] = []
        for name, worker in self.workers.items():
            if worker.link is not None:
                if worker.link.up:
                    found.append(Choice("up", name))
                if worker.link.down:
                    found.append(Choice("down", name))
        for handle in self.live_handles():
            if handle.can_do_next():
                found.append(Choice("do", handle.name))
            if handle.hooks:
                found.append(Choice("hook", handle.name))
            if handle.can_read():
                found.append(Choice("read", handle.name))
        found.extend(Choice("notice", str(session)) for session in self.ending)
        if self.unstored:
            found.append(Choice("store", str(min(self.unstored))))
        return found

    def do(self, choice: Choice) -> None:
        """Let it happen, and check everything."""
        kind, name = choice
        if kind == "up":
            worker = self.workers[name]
            assert worker.link is not None
            message = worker.link.up.popleft()
            self.note_message(name, "->", message)
            self.step(Received(worker.link.session, message))
        elif kind == "down":
            worker = self.workers[name]
            assert worker.link is not None
            answer = worker.link.down.popleft()
            if answer is None:
                worker.disconnect()
            else:
                self.note_message(name, "<-", answer)
                worker.hear(answer)
        elif kind == "notice":
            session = int(name)
            self.ending.remove(session)
            self.links.pop(session, None)
            self.step(Disconnected(session))
        elif kind == "store":
            persist = self.unstored.pop(int(name))
            self.note(f"stored {show(persist.entry)}")
            self.stored(persist.entry)
            self.step(Persisted(persist.record))
        else:
            handle = next(h for h in self.live_handles() if h.name == name)
            {"do": handle.do_next, "hook": handle.hook_returns, "read": handle.read}[kind]()
        self.check()

    def fail_store(self) -> None:
        """The oldest entry that is being written cannot be."""
        record = min(self.unstored)
        del self.unstored[record]
        self.note("the store fails")
        self.step(PersistFailed(record, "disk full"))
        self.check()

    def run(self, steps_max: int = 10_000) -> None:
        """Let everything happen that can, each in its turn, until nothing is left."""
        for _ in range(steps_max):
            choices = self.choices()
            if not choices:
                return
            self.do(choices[0])
        raise AssertionError("the cluster does not come to rest")

    def advance(self, seconds: float, *, run: bool = True) -> None:
        """Let time pass; with `run`, everything else happens as well."""
        end = self.now + seconds
        while True:
            if run:
                self.run()
            due = [self.heartbeat_at, self.coordinator.next_deadline()]
            due += [handle.member.next_deadline() for handle in self.live_handles()]
            due += [until for handle in self.live_handles() if (until := handle.fence_waits_until() or 0.0) > self.now]
            when = max(self.now, min(d for d in due if d is not None))
            if when > end:
                break
            self.now = when
            self.time_passes()
        self.now = end
        self.time_passes()
        if run:
            self.run()

    def time_passes(self) -> None:
        if self.now >= self.heartbeat_at:
            self.heartbeat_at = self.now + self.options.lease_s / 4
            for worker in self.workers.values():
                if worker.link is not None:
                    worker.say(Heartbeat(0))
        due = self.coordinator.next_deadline()
        if due is not None and due <= self.now:
            self.step(Tick())
        for handle in self.live_handles():
            deadline = handle.member.next_deadline()
            if deadline is not None and deadline <= self.now:
                handle.apply(handle.member.tick(self.now))
        self.check()

    def heal(self, seconds: float = 200.0) -> None:
        """Faults are over: everybody connects, everything is delivered, deadlines pass; every call must have ended."""
        start, end = self.now, self.now + seconds
        for handle in self.live_handles():
            handle.end_access()
        while self.now < end:
            for worker in self.workers.values():
                if worker.alive and worker.link is None:
                    worker.connect()
            self.advance(2.0)
            connected = all(worker.link is not None for worker in self.workers.values() if worker.alive)
            quiet = all(handle.idle for handle in self.live_handles()) and not self.choices()
            if connected and quiet and self.now > start + 2 * self.options.lease_s:
                break
        for handle in self.live_handles():
            if handle.asked is not None and not handle.asked.done:
                raise GuaranteeBroken(f"{handle}: {handle.asked.what} never ended: {handle.member.running}")
        self.check_agreement()

    def check_agreement(self) -> None:
        """At rest, the coordinator knows exactly what is held, and under which generation."""
        for handle in self.live_handles():
            member = self.coordinator.cluster.members.get(handle.id)
            content, state = handle.member.content, handle.member.state
            if member is None:
                refused = handle.registration_error is not None or state is HandleState.CLOSED
                demand(refused or not handle.registered, f"the coordinator has forgotten {handle}")
                continue
            known = member.holding.generation if member.holding is not None else None
            held = content.generation if content is not None and state is HandleState.READY else None
            if state is not HandleState.IN_DOUBT:
                demand(known == held, f"{handle} holds generation {held}, the coordinator thinks {known}")
            demand(not member.leaving, f"{handle} is thought to leave, for ever: {member.leaving}")
        for lease in self.coordinator.cluster.leases.values():
            raise GuaranteeBroken(f"a lease is left: {lease}. Story:\n{lease.story}")

    def step(self, event: Event) -> None:
        before = self.kept(), self.standing()
        actions = self.coordinator.step(event, self.now)
        if before[1] == self.standing() and not involuntary(event):
            lost = before[0] - self.kept() & self.retained()
            demand(not lost, f"G5: {lost} were retained, and lost with {event}")
        for action in actions:
            match action:
                case Send():
                    if action.session in self.links:
                        self.links[action.session][1].down.append(action.message)
                case CloseSession():
                    if action.session in self.links:
                        self.links[action.session][1].down.append(None)
                case Persist():
                    self.unstored[action.record] = action
                    if isinstance(action.entry, Publication):
                        self.truth[action.entry.content_id] = self.promised[action.entry.key]
                case _:
                    assert_never(action)

    def retained(self) -> set[str]:
        """Content ids that the coordinator is to keep."""
        models = self.coordinator.cluster.models.values()
        return {m.versions[number].info.content_id for m in models for number in m.retained() if number in m.versions}

    def kept(self) -> set[str]:
        """Those of them of which every shard has a reliable holder."""
        found = set()
        for model in self.coordinator.cluster.models.values():
            for number in model.retained() & set(model.versions):
                version = model.versions[number]
                reliable = [
                    [h for h in holdings if h.is_source and not h.member.group.spot and h.member.worker.state == "live"]
                    for holdings in version.holdings.values()
                ]
                if all(reliable):
                    found.add(version.info.content_id)
        return found

    def standing(self) -> dict[str, str]:
        return {w.incarnation: w.state.value for w in self.coordinator.cluster.workers.values()}

    def stored(self, entry: Entry) -> None:
        """It is durable now. After a rollback nobody may see what it retires any more."""
        self.store.append(entry)
        if isinstance(entry, Rollback):
            published = [e for e in self.store if isinstance(e, Publication) and e.model == entry.model]
            self.retired.update(e.content_id for e in published if e.number > entry.to)
            newest = max((e.number for e in published if e.content_id not in self.retired), default=-1)
            if entry.model in self.returned:
                self.returned[entry.model] = min(self.returned[entry.model], newest)
            for handle in self.all_handles():
                asked = handle.asked
                if asked is not None and asked.floor is not None and handle.shard.model == entry.model:
                    asked.floor = min(asked.floor, newest)

    # -- what must hold

    def ended(self, handle: Handle, asked: Asked) -> None:
        """A call has returned, or raised."""
        error, key = asked.error, asked.key
        what = f"v{asked.version.version} changed={asked.changed}" if asked.version else show_error(error)
        self.note(f"{handle.name} {type(asked.what).__name__.removesuffix('Call').lower()} ends: {what}")
        if error is not None:
            demand(isinstance(error, TensorHubError | BrokenHook), f"every refusal is a typed error (G10): {error!r}")
            if key is not None and getattr(error, "memory", "") != "in_doubt" and not isinstance(error, LeaseLost):
                self.learn(key, handle.shard.rank, False, f"{handle.name} raised {show_error(error)}")
            return
        if key is not None and asked.version is not None:
            self.learn(key, handle.shard.rank, True, f"{handle.name} returned {asked.version.version}")
        if isinstance(asked.what, PublishCall) and asked.version is not None and not self.is_retired(asked.version):
            newest = self.returned.get(handle.shard.model)
            self.returned[handle.shard.model] = max(asked.what.version, -1 if newest is None else newest)
        if isinstance(asked.what, FillCall):
            assert asked.version is not None
            number = asked.version.version
            demand(asked.version.content_id not in asked.retired, f"G3: {handle.name} got {number}, which was rolled back")
            if asked.what.selector == "latest" and asked.floor is not None:
                demand(number >= asked.floor, f"G3: {handle.name} got {number} after publish({asked.floor}) returned")
            if isinstance(asked.what.selector, int):
                demand(number == asked.what.selector, f"{handle.name} asked for {asked.what.selector}, got {number}")
            self.check_content(handle)
            if asked.what.kind is OpKind.FETCH:
                self.check_cells(handle, asked.version)
        if isinstance(asked.what, UnpublishCall | CloseCall):
            demand(handle.worker.owner.is_quiet(handle.id), f"G2: {handle.name} is read after {asked.what}")
            self.check_closed(handle)

    def learn(self, key: OpKey, rank: int, committed: bool, how: str) -> None:
        """G4: no two ranks hear different outcomes."""
        if any(isinstance(e, Publication) and e.key == key and e.content_id in self.retired for e in self.store):
            return  # after a restart nobody remembers that it was published: it was rolled back
        heard = self.outcomes.setdefault(key, {})
        heard[rank] = (committed, how)
        demand(len({outcome for outcome, _ in heard.values()}) == 1, f"G4: {key}: {heard}")

    def check(self) -> None:
        """Everything that holds between two steps."""
        self.coordinator.check_invariants()
        for worker in self.workers.values():
            if not worker.alive:
                continue
            worker.owner.check_invariants()
            for handle in worker.handles:
                handle.member.check_invariants()
                self.check_content(handle)
                if handle.idle and handle.member.state in (HandleState.EMPTY, HandleState.TORN, HandleState.CLOSED):
                    self.check_closed(handle)
        self.check_store()

    def check_content(self, handle: Handle) -> None:
        """G1: who holds a version holds its publisher's bytes."""
        content = handle.member.content
        if handle.member.state not in (HandleState.READY, HandleState.DRAINING) or content is None:
            return
        self.check_cells(handle, content.version)

    def check_cells(self, handle: Handle, version: VersionInfo) -> None:
        tag = self.truth[version.content_id][handle.shard.number]
        demand(handle.cells == [tag] * CHUNKS, f"G1: {handle} holds {handle.cells}, published was {tag}")

    def is_retired(self, version: VersionInfo) -> bool:
        return version.content_id in self.retired

    def check_closed(self, handle: Handle) -> None:
        """G2: nobody can begin to read memory that is its owner's to write."""
        held = handle.worker.owner._holdings.get(handle.id)
        demand(held is None or not held.is_open, f"G2: {handle} can still be read under {held}")

    def check_store(self) -> None:
        numbers = [(e.model, e.lineage, e.number) for e in self.store if isinstance(e, Publication)]
        demand(len(set(numbers)) == len(numbers), f"R1: a number was published twice: {numbers}")


def involuntary(event: Event) -> bool:
    """Whether a holder may be lost with it: its owner has not asked for leave, or will not be refused."""
    match event:
        case Received(message=Withdraw() as message):
            return message.abandon
        case Received(message=Withdrawn() | Register() | Deregister() | Leave() | Join()) | Disconnected():
            return True
        case _:
            return False


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise GuaranteeBroken(what)


# ------------------------------------------------------------------------------------------------------- rendering

UNTOLD = {"manifest", "manifest_id", "endpoints", "location", "layout_id", "pid", "request", "nbytes", "chunks", "spot"}
UNTOLD |= {"medium", "purpose", "registration", "incarnation", "cluster", "retryable", "world_size", "known", "staged"}
UNTOLD |= {"shard", "serves", "host_bytes"}
TRIVIAL: tuple[object, ...] = (None, False, ())


def show(value: object) -> str:
    """A message, call or value, as short as a reviewer of a trace wants it."""
    match value:
        case OpKey():
            return f"{value.group}@{show_epoch(value.epoch)}#{value.sequence}"
        case VersionInfo():
            return f"v{value.version}/{value.content_id}"
        case Grant():
            return f"{value.lease}:{value.source}({value.generation}{'' if value.complete else ', filling'})"
        case ErrorInfo():
            return f"{value.kind}({value.message!r})"
        case Enum():
            return str(value.value)
        case tuple():
            return f"[{', '.join(map(show, value))}]"
        case float():
            return f"{value:g}"
        case int() if value >= 1 << 32:
            return show_epoch(value)
        case _ if is_dataclass(value) and not isinstance(value, type):
            told = [(f.name, getattr(value, f.name)) for f in fields(value) if f.name not in UNTOLD]
            words = [f"{name}={show(item)}" for name, item in told if not any(item is t for t in TRIVIAL)]
            return " ".join([type(value).__name__, *words])
        case _:
            return str(value)


def show_epoch(epoch: int) -> str:
    """A group's epoch: which coordinator minted it, and as which of its own."""
    return f"{epoch >> 32}.{epoch & 0xFFFFFFFF}"


def show_error(error: BaseException | None) -> str:
    return "ok" if error is None else f"{type(error).__name__}({error}) memory={getattr(error, 'memory', '?')}"
