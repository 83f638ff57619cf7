"""A thin worker: it says to the coordinator what a real one says, in the real messages, and has flows instead of lanes.

One `ThinRank` is one registration. Its conversation is a worker's: Register, Publish, LeaveRequest, Fenced, Fill,
ReadyToWrite, Progress with what its links have carried, ReadFailed, Prepared, and answers to what it is asked.

Left out, since it costs no time that counts here: manifests that differ, votes that differ, digests of other chunks than the
publisher's, and a worker's own deadlines. Not responsible for when messages arrive (`coordinated`).
"""

from __future__ import annotations

from collections.abc import Callable
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

MODEL = "actor"
TIMEOUT_S = 1e8
DIGEST_BYTES = 8


@dataclass(frozen=True, slots=True)
class Layout:
    """How groups have the model."""

    name: str

    def parts(self, rank: int) -> tuple[bytes, ...]:
        """What describes a rank's: catalogue, arrangement, coordinates. Nobody here looks into them."""
        return b"a catalogue", f"by {self.name}".encode(), self.id_of(rank).encode()

    def id_of(self, rank: int) -> str:
        return f"{self.name} {rank}"


ROWS, COLUMNS = Layout("rows"), Layout("columns")


class Shard:
    """What each rank of the model is, in the real manifest."""

    def __init__(self, nbytes: int, chunk_bytes: int) -> None:
        self.nbytes = nbytes
        tensor = TensorDescription("weight", "uint8", (nbytes,), 0, nbytes)
        manifest = build_manifest([tensor], chunk_bytes, "xxh3-64", "rows")
        self.manifest = manifest.encode()
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
class ThinRank:
    """One rank of one group. `number`: of the shard that it has. `beside`: the same rank in host memory, from which it
    is filled first.
    """

    shell: Shell
    shard: Shard
    registration: str
    group: str
    rank: int
    number: int
    world_size: int
    report_s: float
    spot: bool = False
    medium: Medium = Medium.DEVICE
    purpose: Purpose = Purpose.USE
    beside: ThinRank | None = None
    layout: Layout | None = None  # None: whole tensors, or a copy of whatever there is
    needs: tuple[Need, ...] = ()  # of another layout, while it is filled with that
    registered: Callable[[], None] | None = None
    ended: Callable[[VersionInfo | None], None] | None = None  # of the call that runs: what came of it
    left: Callable[[], None] | None = None
    generation: int = 0
    epoch: int = -1
    sequence: int = 0
    key: OpKey | None = None
    memory: Memory | None = None
    held: VersionInfo | None = None  # what the memory has, all of it
    bound: VersionInfo | None = None  # what it is being filled with
    publishes: bool = False
    lanes: dict[str, Flow | None] = field(default_factory=dict)  # by lease
    # Of the newest fill: when it was called, might write, had the first byte, and the last.
    times: list[float] = field(default_factory=list)

    # -- calls

    def register(self, request: int, part_ids: tuple[str, ...] = ()) -> Register:
        layout = self.layout
        return Register(
            request=request,
            registration=self.registration,
            model=MODEL,
            group=self.group,
            rank=self.rank,
            shard=self.number,
            world_size=self.world_size,
            serves=True,
            spot=self.spot,
            medium=self.medium,
            purpose=self.purpose,
            layout_id=""
            if self.purpose is Purpose.SEED
            else self.shard.layout_id
            if layout is None
            else layout.id_of(self.rank),
            nbytes=self.shard.nbytes,
            chunks=self.shard.chunks,
            manifest=self.shard.manifest,
            held=None,
            part_ids=tuple(map(id_of, self.parts)),
            parts=self._asked(part_ids),
        )

    def publish(self, version: int, ended: Callable[[VersionInfo | None], None]) -> None:
        self._open()
        assert self.memory is not None
        self.shell.transfers.put(self.memory, self.memory.nbytes)
        self.publishes, self.ended = True, ended
        self.shell.say(Publish(self._next_key(), self.rank, self.registration, version, self.generation, TIMEOUT_S))

    def unpublish(self, left: Callable[[], None]) -> None:
        self.left = left
        request = (self.shell.request(self), self.registration, self.generation, TIMEOUT_S)
        self.shell.say(LeaveRequest(*request, abandon=False, closes=False))

    def fill(self, kind: OpKind, ended: Callable[[VersionInfo | None], None]) -> None:
        self.ended = ended
        self.times = [self.shell.now]
        call = (self._next_key(), self.rank, self.registration, kind, "latest", None, self.generation + 1)
        # No hook: a rollout updates between two generations, so there is no engine to pause.
        self.shell.say(Fill(*call, hold=False, staged=False, timeout_s=TIMEOUT_S))

    def _next_key(self) -> OpKey:
        self.key = OpKey(MODEL, self.group, self.epoch, self.sequence)
        return self.key

    def die(self) -> None:
        """Its process is gone: whoever reads from it notices."""
        self._close()
        self.key = None

    # -- what the coordinator says

    def hear(self, message: FromCoordinator) -> None:
        match message:
            case RegisterAgain():
                self.shell.say(self.register(message.request, message.part_ids))
            case Registered() | EpochChanged():
                self.epoch, self.sequence = message.epoch, message.sequence
                if self.registered is not None:
                    registered, self.registered = self.registered, None
                    registered()
            case Start():
                self.bound = message.version
                self.needs = self.shard.needs(self.rank, self.world_size) if message.publication else ()
                if message.write:
                    self._write(message.grants)
                else:
                    self._ready(message.key)
            case ReadyAgain():
                self._ready(message.key, message.part_ids)
            case CheckCoverage():
                self.shell.say(Covered(message.key, self.rank, message.readers))
            case Write():
                self._write(message.grants)
            case AddSource():
                self._read(message.grant)
            case DropSource():
                self._drop(message.lease)
            case Outcome():
                self._outcome(message)
            case SetRetained():
                self.shell.say(RetainedAck(self.registration, message.content_id, message.keep, message.seq))
            case LeaveGranted():
                self._close()
                self.shell.say(Fenced(self.registration, self.generation))
                if self.left is not None:
                    left, self.left = self.left, None
                    left()
            case TellDigests():
                self._tell_digests(message.generation, message.selection, message.shard)
            case CutReader():
                self.shell.say(ReaderCut(message.lease))
            case _:
                pass

    def _ready(self, key: OpKey, part_ids: tuple[str, ...] = ()) -> None:
        """With what it reads of another layout, and where that lies."""
        lies = tuple(map(id_of, self.parts)) if self.needs else ()
        self.shell.say(ReadyToWrite(key, self.rank, self.needs, lies, self._asked(part_ids)))

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
                self.shell.say(RetainedAck(self.registration, message.version.content_id, True, message.retained))
        elif self.memory is not None and not self.memory.is_whole:
            self._close()  # torn
        ended, self.ended = self.ended, None
        if ended is not None:
            ended(message.version if message.committed else None)

    # -- memory

    def _open(self) -> None:
        self._close()
        self.generation += 1
        self.memory = Memory(self.shell.place.name, float(self.shard.nbytes), self._full)
        self.shell.opened(self)

    def _close(self) -> None:
        self.held = None
        self._end_lanes()
        if self.memory is not None:
            self.shell.closed(self)
            memory, self.memory = self.memory, None
            self.shell.transfers.end(memory)

    def _write(self, grants: tuple[Grant, ...]) -> None:
        """Every rank may overwrite what it has: the old version is fenced, which takes no time here."""
        before = self.memory
        self._open()
        if before is not None:
            self.shell.say(Fenced(self.registration, self.generation - 1))
        key, memory = self.key, self.memory
        assert memory is not None
        self.times.append(self.shell.now)
        self._report_later(key)
        beside = self.beside
        if beside is not None and beside.memory is not None and self.bound in (beside.held, beside.bound):
            self._copy(beside.memory, grants)
            return
        for grant in grants:
            self._read(grant)

    def _copy(self, source: Memory, grants: tuple[Grant, ...]) -> None:
        """What is in host memory comes from there first, then the rest from others."""
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
                self._read(grant)

        self.shell.after(seconds, copied)

    def _read(self, grant: Grant) -> None:
        memory = self.memory
        if self.key is None or memory is None or memory.is_whole or grant.lease in self.lanes:
            return
        lease = grant.lease

        def broken() -> None:
            if lease in self.lanes:
                self._end_lane(lease)
                self._failed(lease, "lost")

        found = self.shell.find(grant)
        if found is None:
            self.lanes[lease] = None
            self.shell.after(0.0, broken)
        else:
            self.lanes[lease] = self.shell.read(found, memory, broken)

    def _drop(self, lease: str) -> None:
        if lease in self.lanes:
            self._end_lane(lease)
            self._failed(lease, "dropped")

    def _failed(self, lease: str, reason: str) -> None:
        if self.key is not None:
            self.shell.say(ReadFailed(self.key, self.rank, lease, reason, ""))

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
        roots = tuple(SelectionRoot(need.selection, _root(need.chunks), need.shard) for need in self.needs)
        self.shell.say(Prepared(self.key, self.rank, b"" if roots else self.shard.root, roots))

    # -- what it tells

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
        self.shell.say(Progress(self.key, self.rank, chunks, int(memory.have), flows))

    def _tell_digests(self, generation: int, selection: str = "", shard: int = 0) -> None:
        whole, at_once = self.shard.chunks, DIGESTS_BYTES_MAX // DIGEST_BYTES
        chunks = -(-whole // self.world_size) if selection else whole
        for first in range(0, chunks, at_once):
            count = min(at_once, chunks - first)
            what = (chunks, ((first, count),), bytes(DIGEST_BYTES * count))
            last = first + count == chunks
            self.shell.say(Digests(self.registration, generation, *what, last=last, selection=selection, shard=shard))
