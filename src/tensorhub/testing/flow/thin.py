"""A thin worker: it says to the coordinator what a real one says, in the real messages, and moves
no byte.

`ThinWorker` is the conversation of one registration: Register, Publish, LeaveRequest, Fenced, Fill,
ReadyToWrite, ReadFailed, and the answers to what the coordinator asks. `coordinated.ThinRank` adds
memory that flows fill, for the flow model: Progress with the bytes that its links have carried, and
Prepared. The load generator (`benches.scale`) adds progress without bytes.

Left out, since it costs no time that counts here: manifests that differ, votes that differ, digests
of other chunks than the publisher's, and a worker's own deadlines. Not responsible for when
messages arrive (`coordinated`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

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
    FromCoordinator,
    FromWorker,
    Grant,
    Held,
    LeaveGranted,
    LeaveRequest,
    Need,
    Outcome,
    Prepared,
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
        """Parts that describe a rank's memory: catalogue, arrangement, coordinates. The coordinator
        only compares them.
        """
        return b"a catalogue", f"by {self.name}".encode(), self.id_of(rank).encode()

    def id_of(self, rank: int) -> str:
        return f"{self.name} {rank}"


ROWS, COLUMNS = Layout("rows"), Layout("columns")


class Shard:
    """The bytes that each rank of the model has, in the real manifest. `tensors`: one tensor of all
    bytes, if not given.
    """

    def __init__(
        self, nbytes: int, chunk_bytes: int, tensors: Iterable[TensorDescription] = ()
    ) -> None:
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
            Need(shard, id_of(f"{rank} of {shard}".encode()), chunks, self.nbytes // ranks)
            for shard in range(ranks)
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

    def register(
        self, request: int, part_ids: tuple[str, ...] = (), *, whole: bool = False
    ) -> Register:
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
        self.say(
            Publish(
                self.next_key(), self.rank, self.registration, version, self.generation, TIMEOUT_S
            )
        )

    def unpublish(self, request: int) -> None:
        self.say(
            LeaveRequest(
                request, self.registration, self.generation, TIMEOUT_S, abandon=False, closes=False
            )
        )

    def fill(self, kind: OpKind, at_least: int | None = None) -> Fill:
        """Call for the newest version, without a hook: a rollout updates between two generations,
        when no engine runs.
        """
        call = (
            self.next_key(),
            self.rank,
            self.registration,
            kind,
            "latest",
            at_least,
            self.generation + 1,
        )
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
                self.needs = (
                    self.shard.needs(self.rank, self.world_size) if message.publication else ()
                )
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
                self.say(
                    RetainedAck(self.registration, message.content_id, message.keep, message.seq)
                )
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
                self.say(
                    RetainedAck(
                        self.registration, message.version.content_id, True, message.retained
                    )
                )
        self.ended(message)

    def failed(self, lease: str, reason: str) -> None:
        if self.key is not None:
            self.say(ReadFailed(self.key, self.rank, lease, reason, ""))

    def prepared(self) -> None:
        """All of it is there, and verified."""
        assert self.key is not None
        roots = tuple(
            SelectionRoot(need.selection, _root(need.chunks), need.shard) for need in self.needs
        )
        self.say(Prepared(self.key, self.rank, b"" if roots else self.shard.root, roots))

    def _tell_digests(self, generation: int, selection: str = "", shard: int = 0) -> None:
        whole, at_once = self.shard.chunks, DIGESTS_BYTES_MAX // DIGEST_BYTES
        chunks = -(-whole // self.world_size) if selection else whole
        for first in range(0, chunks, at_once):
            count = min(at_once, chunks - first)
            what = (chunks, ((first, count),), bytes(DIGEST_BYTES * count))
            last = first + count == chunks
            self.say(
                Digests(
                    self.registration,
                    generation,
                    *what,
                    last=last,
                    selection=selection,
                    shard=shard,
                )
            )
