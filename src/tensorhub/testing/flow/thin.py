"""A thin worker: it says to the coordinator what a real one says, in the real messages, and moves no byte.

`ThinWorker` is the conversation of one registration: Register, Publish, LeaveRequest, Fenced, Fill, ReadyToWrite,
ReadFailed, and the answers to what the coordinator asks. `ThinRank` adds memory that flows fill, for the flow model:
Progress with the bytes that its links have carried, and Prepared. The load generator (`benches.scale`) adds progress
without bytes.

Left out, since it costs no time that counts here: manifests that differ, votes that differ, digests of other chunks than the
publisher's, and a worker's own deadlines. Not responsible for when messages arrive (`coordinated`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tensorhub.messages import (
    DIGESTS_BYTES_MAX,
    AddSource,
    CheckCoverage,
    Covered,
    CutReader,
    Digests,
    DropSource,
    EpochChanged,
    Fenced,
    Fill,
    Flow as Carried,
    FromCoordinator,
    FromWorker,
    Grant,
    Held,
    LeaveGranted,
    LeaveRequest,
    Need,
    Outcome,
    Prepared,
    Progress,
    Publish,
    ReaderCut,
    ReadFailed,
    ReadyAgain,
    ReadyToWrite,
    Register,
    RegisterAgain,
    Registered,
    RetainedAck,
    SelectionRoot,
    SetRetained,
    Start,
    TellDigests,
    Write,
)
from tensorhub.model.digests import root_of
from tensorhub.model.manifest import TensorDescription, build_manifest, id_of
from tensorhub.scheduler.links import SECONDS_MIN
from tensorhub.testing.flow.topology import Place
from tensorhub.testing.flow.transfers import Flow, Memory, Transfers
from tensorhub.types import Medium, OpKey, OpKind, Purpose, VersionInfo
from tensorhub.worker.registration_session import TOLD_UNASKED_BYTES

MODEL = "actor"
TIMEOUT_S = 1e8
DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """How groups have the model."""

    name: str

    def parts(self, rank: int) -> tuple[bytes, ...]:
        """Parts that describe a rank's memory: catalogue, arrangement, coordinates. The coordinator only compares them."""
        return b"a catalogue", f"by {self.name}".encode(), self.id_of(rank).encode()

    def id_of(self, rank: int) -> str:
        return f"{self.name} {rank}"


ROWS, COLUMNS = Layout("rows"), Layout("columns")


class Shard:
    """The bytes that each rank of the model has, in the real manifest. `tensors`: one tensor of all bytes, if not given."""

    def __init__(self, nbytes: int, chunk_bytes: int, tensors: Iterable[TensorDescription] = ()) -> None:
        self.nbytes = nbytes
        described = tuple(tensors) or (TensorDescription("weight", "uint8", (nbytes,), 0, nbytes),)
        manifest = build_manifest(described, chunk_bytes, "xxh3-64", "rows")
        self.manifest = manifest.encode()
        self.manifest_id = id_of(self.manifest)
        self.layout_id = manifest.layout_id
        self.chunks = manifest.chunk_count
        self.root = _root(self.chunks)

    def needs(self, rank: int, ranks: int) -> tuple[Need, ...]:
        """What a rank reads of a group of another layout: of each rank an equal part."""
        chunks = -(-self.chunks // ranks)
        return tuple(
            Need(shard, id_of(f"{rank} of {shard}".encode()), chunks, self.nbytes // ranks) for shard in range(ranks)
        )


def _root(chunks: int) -> bytes:
    return root_of(bytes(DIGEST_BYTES * chunks))


@dataclass(eq=False, slots=True)
class ThinWorker(ABC):
    """One rank of one group, and its conversation. `index`: of the shard that it has."""

    shard: Shard
    registration: str
    group: str
    rank: int
    index: int
    world_size: int
    spot: bool = False
    medium: Medium = Medium.DEVICE
    purpose: Purpose = Purpose.USE
    layout: Layout | None = None  # None: whole tensors, or a copy of whatever there is
    needs: tuple[Need, ...] = ()  # of another layout, while it is filled with that
    generation: int = 0
    epoch: int = -1  # of its group; -1 until it is registered
    sequence: int = 0
    key: OpKey | None = None  # of the call that runs
    held: VersionInfo | None = None  # the version that its memory has, all of it
    bound: VersionInfo | None = None  # the version that it is being filled with
    publishes: bool = False

    # -- what the shell does

    @abstractmethod
    def say(self, message: FromWorker) -> None:
        """To the coordinator."""

    @abstractmethod
    def write(self, grants: tuple[Grant, ...]) -> None:
        """Every rank may overwrite its memory: begin to fill it from these sources."""

    @abstractmethod
    def read(self, grant: Grant) -> None:
        """From one more source."""

    @abstractmethod
    def drop(self, lease: str) -> bool:
        """Read from this source no more; whether it was read from."""

    @abstractmethod
    def ended(self, message: Outcome) -> None:
        """The call that ran has this outcome."""

    def close(self) -> None:
        """The memory serves no version any more."""
        self.held = None

    # -- calls

    def register(self, request: int, part_ids: tuple[str, ...] = (), *, whole: bool = False) -> Register:
        layout, shard, held = self.layout, self.shard, self.held
        manifest = shard.manifest if whole or len(shard.manifest) <= TOLD_UNASKED_BYTES else b""
        layout_id = shard.layout_id if layout is None else layout.id_of(self.rank)
        return Register(
            request=request,
            registration=self.registration,
            model=MODEL,
            group=self.group,
            rank=self.rank,
            shard=self.index,
            world_size=self.world_size,
            serves=True,
            spot=self.spot,
            medium=self.medium,
            purpose=self.purpose,
            layout_id="" if self.purpose is Purpose.SEED else layout_id,
            nbytes=shard.nbytes,
            chunks=shard.chunks,
            manifest=manifest,
            held=None
            if held is None
            else Held(
                held.version,
                held.content_id,
                self.generation,
                self.world_size,
                held.nbytes,
                manifest,
                published=self.publishes,
                root=b"" if self.publishes else shard.root,
                manifest_id=shard.manifest_id,
            ),
            manifest_id=shard.manifest_id,
            part_ids=tuple(map(id_of, self.parts)),
            parts=self._asked(part_ids),
        )

    def publish(self, version: int) -> None:
        self.publishes = True
        self.say(Publish(self.next_key(), self.rank, self.registration, version, self.generation, TIMEOUT_S))

    def unpublish(self, request: int) -> None:
        self.say(LeaveRequest(request, self.registration, self.generation, TIMEOUT_S, abandon=False, closes=False))

    def fill(self, kind: OpKind, at_least: int | None = None) -> Fill:
        """Call for the newest version, without a hook: a rollout updates between two generations, when no engine runs."""
        call = (self.next_key(), self.rank, self.registration, kind, "latest", at_least, self.generation + 1)
        made = Fill(*call, hold=False, staged=False, timeout_s=TIMEOUT_S)
        self.say(made)
        return made

    def next_key(self) -> OpKey:
        self.key = OpKey(MODEL, self.group, self.epoch, self.sequence)
        return self.key

    # -- what the coordinator says

    def hear(self, message: FromCoordinator) -> None:
        match message:
            case RegisterAgain():
                self.say(self.register(message.request, message.part_ids, whole=message.whole))
            case Registered() | EpochChanged():
                self.epoch, self.sequence = message.epoch, message.sequence
            case Start():
                self.bound = message.version
                self.needs = self.shard.needs(self.rank, self.world_size) if message.publication else ()
                if message.write:
                    self.write(message.grants)
                else:
                    self._ready(message.key)
            case ReadyAgain():
                self._ready(message.key, message.part_ids)
            case CheckCoverage():
                self.say(Covered(message.key, self.rank, message.readers))
            case Write():
                self.write(message.grants)
            case AddSource():
                self.read(message.grant)
            case DropSource():
                if self.drop(message.lease):
                    self.failed(message.lease, "dropped")
            case Outcome():
                self._outcome(message)
            case SetRetained():
                self.say(RetainedAck(self.registration, message.content_id, message.keep, message.seq))
            case LeaveGranted():
                self.close()
                self.say(Fenced(self.registration, self.generation))
            case TellDigests():
                self._tell_digests(message.generation, message.selection, message.shard)
            case CutReader():
                self.say(ReaderCut(message.lease))
            case _:
                pass

    def _ready(self, key: OpKey, part_ids: tuple[str, ...] = ()) -> None:
        """With what it reads of another layout, and where that lies."""
        lies = tuple(map(id_of, self.parts)) if self.needs else ()
        self.say(ReadyToWrite(key, self.rank, self.needs, lies, self._asked(part_ids)))

    @property
    def parts(self) -> tuple[bytes, ...]:
        return () if self.layout is None else self.layout.parts(self.rank)

    def _asked(self, part_ids: tuple[str, ...]) -> tuple[bytes, ...]:
        return tuple(part for part in self.parts if id_of(part) in part_ids)

    def _outcome(self, message: Outcome) -> None:
        self.sequence = message.key.sequence + 1
        self.key = None
        if message.committed:
            self.held = message.version
            if self.publishes:
                self._tell_digests(self.generation)
            if message.retained is not None and message.version is not None:
                self.say(RetainedAck(self.registration, message.version.content_id, True, message.retained))
        self.ended(message)

    def failed(self, lease: str, reason: str) -> None:
        if self.key is not None:
            self.say(ReadFailed(self.key, self.rank, lease, reason, ""))

    def prepared(self) -> None:
        """All of it is there, and verified."""
        assert self.key is not None
        roots = tuple(SelectionRoot(need.selection, _root(need.chunks), need.shard) for need in self.needs)
        self.say(Prepared(self.key, self.rank, b"" if roots else self.shard.root, roots))

    def _tell_digests(self, generation: int, selection: str = "", shard: int = 0) -> None:
        whole, at_once = self.shard.chunks, DIGESTS_BYTES_MAX // DIGEST_BYTES
        chunks = -(-whole // self.world_size) if selection else whole
        for first in range(0, chunks, at_once):
            count = min(at_once, chunks - first)
            what = (chunks, ((first, count),), bytes(DIGEST_BYTES * count))
            last = first + count == chunks
            self.say(Digests(self.registration, generation, *what, last=last, selection=selection, shard=shard))


class Shell(Protocol):
    """What a rank needs of its worker."""

    place: Place
    transfers: Transfers
    copy_bytes_per_s: float  # out of its host memory

    @property
    def now(self) -> float: ...

    def request(self, rank: ThinRank) -> int:
        """A number for what this rank asks for next."""

    def say(self, message: FromWorker) -> None: ...

    def find(self, grant: Grant) -> tuple[Place, Memory] | None:
        """The memory that it names, and where that is; None: it is gone."""

    def opened(self, rank: ThinRank) -> None:
        """It has memory under a new generation."""

    def closed(self, rank: ThinRank) -> None:
        """It has none any more."""

    def read(self, source: tuple[Place, Memory], reader: Memory, broken: Callable[[], None]) -> Flow: ...

    def after(self, seconds: float, call: Callable[[], None]) -> None: ...


@dataclass(eq=False, slots=True)
class ThinRank(ThinWorker):
    """A worker of the flow model. `beside`: its rank's host copy, from which it is filled first."""

    shell: Shell = field(kw_only=True)
    report_s: float = field(kw_only=True)
    beside: ThinRank | None = None
    registered: Callable[[], None] | None = None
    done: Callable[[VersionInfo | None], None] | None = None  # of the call that runs: what came of it
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
        """Every rank may overwrite what it has: the old version is fenced, which takes no time here."""
        before = self.memory
        self._open()
        if before is not None:
            self.say(Fenced(self.registration, self.generation - 1))
        key, memory = self.key, self.memory
        assert memory is not None
        self.times.append(self.shell.now)
        self._report_later(key)
        beside = self.beside
        if beside is not None and beside.memory is not None and self.bound in (beside.held, beside.bound):
            self._copy(beside.memory, grants)
            return
        for grant in grants:
            self.read(grant)

    def _copy(self, source: Memory, grants: tuple[Grant, ...]) -> None:
        """The part that is in host memory comes from there first, then the rest from further sources."""
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
            if self.key is key and key is not None and self.memory is not None and not self.memory.is_whole:
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
