"""Thin workers: they say what workers say and move no byte, so that what is measured is the coordinator.

A thin worker has one registration of one rank. It publishes, or replicates and then updates to whatever is newest. A fill
says Progress `REPORTS` times, then that it is prepared. Nothing here has a clock or a socket: `hear` takes what the
coordinator says and gives the answers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tensorhub.messages import (
    AddSource,
    Digests,
    DropSource,
    EpochChanged,
    Fenced,
    Fill,
    FromCoordinator,
    FromWorker,
    Held,
    Join,
    LeaveGranted,
    LeaveRequest,
    Outcome,
    Prepared,
    Progress,
    Publish,
    ReadFailed,
    ReadyToWrite,
    Register,
    RegisterAgain,
    Registered,
    RetainedAck,
    SetRetained,
    Start,
    TellDigests,
    Write,
)
from tensorhub.model.digests import root_of
from tensorhub.model.manifest import TensorDescription, build_manifest, id_of
from tensorhub.types import Endpoint, Location, Medium, OpKey, OpKind, Purpose, VersionInfo
from tensorhub.worker.registration_session import TOLD_UNASKED_BYTES

MODEL = "actor"
LAYOUT = "rows"
TIMEOUT_S = 600.0
CHUNKS = 256
CHUNK_BYTES = 4 * 2**20
REPORTS = 14  # of one fill: with its call, ReadyToWrite and Prepared some 17 messages a worker and version
RANKS_PER_HOST = 8
HOSTS_PER_RACK = 32
DIGESTS = bytes(8 * CHUNKS)
ROOT = root_of(DIGESTS)

_id_of = functools.cache(id_of)


def make_manifest(nbytes: int = 100_000) -> bytes:
    """A manifest of about that many bytes, as a model of many tensors has it."""
    tensors = max(1, nbytes // 62)
    size = CHUNKS * CHUNK_BYTES // tensors // 2 * 2
    described = (
        TensorDescription(f"model.layers.{n // 9}.block.{n % 9}.weight", "bfloat16", (size // 2,), n * size, size)
        for n in range(tensors)
    )
    return build_manifest(described, CHUNK_BYTES, "xxh3-64", LAYOUT).encode()


@dataclass(slots=True, eq=False)
class ThinWorker:
    """One rank. `number` counts all workers; its group has `world_size` of them."""

    number: int
    group: str
    rank: int
    world_size: int
    manifest: bytes
    generation: int = 0
    epoch: int = -1  # of its group; -1 until it is registered
    sequence: int = 0
    key: OpKey | None = None  # of the call that is under way
    leases: dict[str, None] = field(default_factory=dict)
    reports: int = -1  # of the fill that is under way; -1: it may not write yet
    publishes: bool = False
    held: int | None = None  # the newest version that it has
    content: VersionInfo | None = None  # the same, as long as it is published
    call: Fill | None = None  # that is under way

    @property
    def incarnation(self) -> str:
        return f"{self.number:032x}"

    @property
    def registration(self) -> str:
        return f"{self.number:031x}r"

    def join(self) -> Join:
        host = self.number // RANKS_PER_HOST
        location = Location(rack=f"r{host // HOSTS_PER_RACK}", host=f"h{host}")
        endpoint = Endpoint("tcp", f"10.{host >> 16 & 255}.{host >> 8 & 255}.{host & 255}:{7000 + self.rank}")
        return Join(f"w{self.number}", location, (endpoint,), self.number + 1, 0)

    def register(self, *, told: bool = False) -> Register:
        return Register(
            request=1,
            registration=self.registration,
            model=MODEL,
            group=self.group,
            rank=self.rank,
            shard=self.rank,
            world_size=self.world_size,
            serves=True,
            spot=False,
            medium=Medium.DEVICE,
            purpose=Purpose.USE,
            layout_id=LAYOUT,
            nbytes=CHUNKS * CHUNK_BYTES,
            chunks=CHUNKS,
            manifest=self.manifest if told or len(self.manifest) <= TOLD_UNASKED_BYTES else b"",
            held=self._held(told=told),
            manifest_id=_id_of(self.manifest),
        )

    def _held(self, *, told: bool) -> Held | None:
        """What a coordinator that has restarted is told."""
        content, manifest = self.content, b""
        if content is None:
            return None
        if told or len(self.manifest) <= TOLD_UNASKED_BYTES:
            manifest = self.manifest
        root = b"" if self.publishes else ROOT
        return Held(
            content.version,
            content.content_id,
            self.generation,
            self.world_size,
            content.nbytes,
            manifest,
            published=self.publishes,
            root=root,
            manifest_id=_id_of(self.manifest),
        )

    def call_again(self) -> Fill | None:
        """A call that was under way when the connection ended, and had not begun to write."""
        if self.call is None or self.key is None:
            return None
        former = self.key
        self.call = replace(self.call, key=self._next_key(), former=(former,))
        return self.call

    def publish(self, version: int) -> Iterator[FromWorker]:
        self.generation += 1
        self.publishes = True
        yield Publish(self._next_key(), self.rank, self.registration, version, self.generation, TIMEOUT_S)

    def unpublish(self) -> LeaveRequest:
        return LeaveRequest(2, self.registration, self.generation, TIMEOUT_S, abandon=False, closes=False)

    def fill(self, at_least: int | None = None) -> Fill:
        """Replicate, or update."""
        kind = OpKind.REPLICATE if self.held is None else OpKind.UPDATE
        key, generation = self._next_key(), self.generation + 1
        self.call = Fill(
            key,
            self.rank,
            self.registration,
            kind,
            "latest",
            at_least,
            generation,
            hold=False,
            staged=False,
            timeout_s=TIMEOUT_S,
        )
        return self.call

    def _next_key(self) -> OpKey:
        self.key = OpKey(MODEL, self.group, self.epoch, self.sequence)
        return self.key

    def report(self) -> FromWorker | None:
        """The next word of a fill that is under way, if it has a source: how far it is, in the end that it is prepared."""
        if self.key is None or self.reports < 0 or not self.leases:
            return None
        self.reports += 1
        if self.reports > REPORTS:
            self.reports, key = -1, self.key
            self.leases.clear()
            return Prepared(key, self.rank, ROOT)
        done = CHUNKS * self.reports // (REPORTS + 1)
        return Progress(self.key, self.rank, done, done * CHUNK_BYTES)

    def hear(self, message: FromCoordinator) -> Iterator[FromWorker]:
        """Take what the coordinator says; what is said in answer."""
        match message:
            case RegisterAgain():
                yield self.register(told=message.whole)
            case Registered():
                self.epoch, self.sequence = message.epoch, message.sequence
            case EpochChanged():
                self.epoch, self.sequence = message.epoch, message.sequence
            case Start(write=False):
                yield ReadyToWrite(message.key, self.rank)
            case Start() | Write():
                self.generation += 1
                self.reports = 0
                self.leases.update((grant.lease, None) for grant in message.grants)
            case AddSource():
                self.leases[message.grant.lease] = None
            case DropSource():
                self.leases.pop(message.lease, None)
                yield ReadFailed(message.key, self.rank, message.lease, "dropped", "")
            case Outcome():
                if not message.committed or message.version is None:
                    raise AssertionError(f"{self.group}/{self.rank}: {message.error}")
                self.key, self.call, self.held = None, None, message.version.version
                self.content = message.version
                self.sequence = message.key.sequence + 1
                if self.publishes:
                    yield Digests(self.registration, self.generation, CHUNKS, ((0, CHUNKS),), DIGESTS, True)
                if message.retained is not None:
                    yield RetainedAck(self.registration, message.version.content_id, True, message.retained)
            case SetRetained():
                yield RetainedAck(self.registration, message.content_id, message.keep, message.seq)
            case LeaveGranted():
                self.held = self.content = None
                yield Fenced(self.registration, self.generation)
            case TellDigests():
                yield Digests(self.registration, message.generation, CHUNKS, ((0, CHUNKS),), DIGESTS, True)
            case _:
                pass
