"""What workers, the coordinator and one another's readers say: the one vocabulary of the control plane.

The coordinator and the worker machines take and emit these values directly; `tensorhub.protocol` turns them into
frames and back, and checks every bound on the way in. A message is a frozen dataclass; its fields' annotations are its
validation. Not responsible for bytes, sockets or order.

Ids: a `request` is minted by the asking worker and comes back on the answer; an `OpKey` names a group operation, and a
message about an operation that is decided is answered with its outcome (a retry is not a second call).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub import errors
from tensorhub.types import (
    U64,
    VERSION_MAX,
    Endpoint,
    Id,
    Length,
    Location,
    Medium,
    ModelInfo,
    Name,
    OpKey,
    OpKind,
    Purpose,
    Range,
    Seconds,
    Text,
    VersionInfo,
)

PROTOCOL_VERSION = 1

Rank = Annotated[int, Range(0, 2**20)]
Number = Annotated[int, Range(0, VERSION_MAX)]
WorldSize = Annotated[int, Range(1, 2**20)]
ManifestBlob = Annotated[bytes, Length(48 * 2**20)]
Nonce = Annotated[bytes, Length(32)]
HAS_RUNS_MAX = 1024  # of one StillWaiting
SEGMENTS_MAX = 64  # of one registration; the kernel passes 253 descriptors at a time
WATCHES_MAX = 4096  # models that one session follows
NO_REQUEST = 0  # of a Refused that is about the whole session, which ends; requests count from 1

# -------------------------------------------------------------------------------- handshake, on every kind of socket


@dataclass(frozen=True, slots=True)
class ClientHello:
    """First frame of whoever connects. `role`: "worker" (to a coordinator), "observer", "reader" (to a worker)."""

    protocol: U64
    role: Name
    incarnation: Id
    nonce: Nonce


@dataclass(frozen=True, slots=True)
class ServerHello:
    """First answer; `incarnation` names the answering process' life."""

    protocol: U64
    role: Name
    incarnation: Id
    nonce: Nonce


@dataclass(frozen=True, slots=True)
class Proof:
    """Shows knowledge of the secret for this handshake, without sending it."""

    mac: Nonce


# ---------------------------------------------------------------------------------------------------- small values


@dataclass(frozen=True, slots=True)
class ErrorInfo:
    """An error on its way to another process. `causes`: (rank, reason) pairs of GroupAborted."""

    kind: Name
    message: Text
    retryable: bool
    causes: Annotated[tuple[tuple[int, Text], ...], Length(4096)] = ()
    differences: Annotated[tuple[Text, ...], Length(1024)] = ()

    @classmethod
    def of(cls, error: errors.TensorHubError) -> ErrorInfo:
        causes = tuple(sorted(error.causes.items())) if isinstance(error, errors.GroupAborted) else ()
        differences = error.differences if isinstance(error, errors.ManifestMismatch) else ()
        # An error may tell of anything, also of text that UTF-8 cannot say: of a file's name, for example.
        text = str(error).encode(errors="backslashreplace").decode()
        return cls(type(error).__name__, text[:16_000], error.retryable, causes[:4096], differences[:1024])

    def brief(self, chars_max: int) -> ErrorInfo:
        """The same with so many characters of text, and of whatever belongs to ranks or tensors the first few."""
        causes = tuple((rank, text[: chars_max // 8]) for rank, text in self.causes[:8])
        return ErrorInfo(self.kind, self.message[:chars_max], self.retryable, causes)

    def error(self, memory: errors.Memory = "intact") -> errors.TensorHubError:
        """The exception that this describes; an unknown kind becomes a ProtocolError."""
        kind = errors.BY_NAME.get(self.kind, errors.ProtocolError)
        if issubclass(kind, errors.GroupAborted):
            return kind(self.message, causes=dict(self.causes), retryable=self.retryable, memory=memory)
        if issubclass(kind, errors.ManifestMismatch):
            return kind(self.message, differences=self.differences, retryable=self.retryable, memory=memory)
        return kind(self.message, retryable=self.retryable, memory=memory)


@dataclass(frozen=True, slots=True)
class Grant:
    """A read lease as its reader sees it: whom to read from, and under which generation (R3)."""

    lease: Id
    source: Name  # the source worker's name, for people
    incarnation: Id
    registration: Id
    generation: U64
    endpoints: Annotated[tuple[Endpoint, ...], Length(16)]
    location: Location
    complete: bool  # False: the source is still filling; the reader waits there for what it lacks


@dataclass(frozen=True, slots=True)
class Held:
    """What a registration holds, as it is announced again after a lost connection.

    `voted`: it has voted for that, and does not know the outcome: whoever does not know it either must not count on it.
    """

    version: U64
    content_id: Id
    generation: U64
    world_size: WorldSize
    nbytes: U64
    manifest: ManifestBlob
    voted: bool = False


FORMER_KEYS_MAX = 16


@dataclass(frozen=True, slots=True)
class Begun:
    """How far a rank came with a fill whose operation its coordinator has no record of (it is a new one).

    `key`: the operation in which all ranks were bound to `content`. `written`: its memory is being filled with that, or is
    complete, under the content's generation; else not a byte of it has changed yet.
    """

    key: OpKey
    content: Held
    written: bool


# ---------------------------------------------------------------------------------------- worker -> coordinator


@dataclass(frozen=True, slots=True)
class Join:
    """A worker's first message after the handshake."""

    name: Name
    location: Location
    endpoints: Annotated[tuple[Endpoint, ...], Length(16)]
    pid: U64
    host_bytes: U64  # for copies in host memory (MakeCopy, prefetch); 0: it makes none


@dataclass(frozen=True, slots=True)
class Heartbeat:
    sequence: U64


@dataclass(frozen=True, slots=True)
class Leave:
    """The worker closes: all that it registered goes at once."""

    reason: Text


@dataclass(frozen=True, slots=True)
class Register:
    """One rank's memory. `manifest` is encoded under the worker's own options, used when this rank publishes.

    `shard`: which shard of a version this memory holds. `serves` False: a fetch. Nobody reads this memory; it is a group
    of its own, has no manifest, reads any `shard`, and is deregistered when that is done. `medium` HOST: a copy in the
    library's own memory, never published; for `purpose` RETENTION or SEED it is a group of its own, of any `shard`.
    """

    request: U64
    registration: Id
    model: Name
    group: Name
    rank: Rank
    shard: Rank
    world_size: WorldSize
    serves: bool
    spot: bool
    medium: Medium
    purpose: Purpose
    layout_id: Name
    nbytes: U64
    chunks: U64
    manifest: ManifestBlob
    held: Held | None


@dataclass(frozen=True, slots=True)
class Deregister:
    request: U64
    registration: Id
    abandon: bool


@dataclass(frozen=True, slots=True)
class Publish:
    """This rank's call of publish, and its vote: the memory is immutable under `generation` from now on."""

    key: OpKey
    rank: Rank
    registration: Id
    version: U64
    generation: U64
    timeout_s: Seconds


@dataclass(frozen=True, slots=True)
class Fill:
    """This rank's call of replicate, update, prefetch or fetch.

    `generation` is the one under which the memory will be filled. `hold`: this rank wants to hear of the bound version
    before the first byte changes (it has a `before_write`). `at_least`: wait for that number. `former`: the keys under
    which the same call was said before. `resume`: what it has begun under one of them.
    """

    key: OpKey
    rank: Rank
    registration: Id
    kind: OpKind
    selector: int | Name
    at_least: int | None
    generation: U64
    hold: bool
    staged: bool
    timeout_s: Seconds
    former: Annotated[tuple[OpKey, ...], Length(FORMER_KEYS_MAX)] = ()
    resume: Begun | None = None


@dataclass(frozen=True, slots=True)
class ReadyToWrite:
    """This rank's manifest fits and its before_write has returned."""

    key: OpKey
    rank: Rank


@dataclass(frozen=True, slots=True)
class Prepared:
    """This rank's vote: every chunk is there and verified."""

    key: OpKey
    rank: Rank


@dataclass(frozen=True, slots=True)
class Abandon:
    """This rank ends the operation, if it is not decided yet. Answered by an Outcome."""

    key: OpKey
    rank: Rank
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class Resolve:
    """This rank has voted and asks for the outcome."""

    key: OpKey
    rank: Rank


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The read under this lease ended without all its bytes; the reader wants another source."""

    key: OpKey
    rank: Rank
    lease: Id
    reason: Name  # "lost" | "stalled" | "refused" | "corrupt" | "unreachable" | "dropped"
    detail: Text
    chunk: U64 | None = None  # that came without its digest, if that is the reason


@dataclass(frozen=True, slots=True)
class DigestedAgain:
    """Answer to DigestAgain. `changed`: whether the chunk's bytes have another digest now than the one that is sent with
    them (R8); None: that cannot be said, the memory is not held under that generation any more, or has no digests.
    """

    inquiry: Id
    registration: Id
    changed: bool | None


@dataclass(frozen=True, slots=True)
class Progress:
    """For scheduling and display only; correctness never depends on it."""

    key: OpKey
    rank: Rank
    chunks_verified: U64
    bytes_read: U64


@dataclass(frozen=True, slots=True)
class Withdraw:
    """This rank wants its published memory back: no new readers; Withdrawable answers when the old are gone.

    While that would lose a retained version, nothing changes; then, at the deadline, it is Refused (RetentionError).
    `abandon`: lose it. `closes`: what else this worker holds may go with it, and does not count as another holder.
    `hurry`: the same wish again, which waits no longer; without effect if it is answered already.
    """

    request: U64
    registration: Id
    generation: U64
    timeout_s: Seconds
    abandon: bool
    closes: bool
    hurry: bool


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The generation was changed and the owner's own accesses have ended (also sent after a local fence)."""

    registration: Id
    generation: U64


@dataclass(frozen=True, slots=True)
class CopyRefused:
    """This worker does not make that copy, or could not (no memory for it, no source)."""

    copy: Id
    reason: Text


@dataclass(frozen=True, slots=True)
class Kept:
    """The rank knows it, whatever becomes of the connection from now on. `telling`: which it answers."""

    registration: Id
    content_id: Id
    keep: bool
    telling: U64


@dataclass(frozen=True, slots=True)
class ReaderCut:
    """The owner serves this lease's reader no more."""

    lease: Id


@dataclass(frozen=True, slots=True)
class GetManifest:
    request: U64
    model: Name
    content_id: Id
    shard: Rank


@dataclass(frozen=True, slots=True)
class Watch:
    """Announce this model's newest visible version now, and whenever it changes."""

    model: Name


@dataclass(frozen=True, slots=True)
class Unwatch:
    """Announce this model no more over this connection."""

    model: Name


@dataclass(frozen=True, slots=True)
class Check:
    """Could `version` be published under this model now? Answered by Done or Refused (mutate checks first)."""

    request: U64
    model: Name
    version: U64


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask for one model, or all of them (None)."""

    request: U64
    model: Name | None


@dataclass(frozen=True, slots=True)
class Rollback:
    """Begin a new lineage of `model` whose mark is `to`. A retry carries its `ident`. Answered by Done or Refused."""

    request: U64
    ident: Id
    model: Name
    to: Number


@dataclass(frozen=True, slots=True)
class Retain:
    """Keep the newest `latest` versions of this model fetchable; the last one counts.

    Answered by Done, once it is durable and every live holder knows, or Refused.
    """

    request: U64
    model: Name
    latest: Number


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep this version, whatever `Retain` says, until Unpin or the worker's end. Said anew on each new connection: `pin`
    names it. Answered like Retain."""

    request: U64
    pin: Id
    model: Name
    version: Number


@dataclass(frozen=True, slots=True)
class Unpin:
    """That pin is over. Answered by Done or Refused."""

    request: U64
    pin: Id
    model: Name


# ---------------------------------------------------------------------------------------- coordinator -> worker


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Join. `epoch`: the coordinator's; `cluster` names its durable state; `known` False: new incarnation.

    `read_only`: this worker's token is: it may fetch and look, everything else is refused.
    """

    cluster: Id
    epoch: U64
    lease_s: Seconds
    known: bool
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Dismissed:
    """This incarnation is lost for good; the worker must come back as a new one (R11)."""

    reason: Text


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    sequence: U64


@dataclass(frozen=True, slots=True)
class Registered:
    """`sequence` is the group's next operation; `keep` False: what was announced as held is ordered out (R2).

    `retained`: what was announced as held is to be kept (as in Keep): the number of that telling, or None.
    """

    request: U64
    registration: Id
    epoch: U64
    sequence: U64
    keep: bool
    retained: U64 | None = None


@dataclass(frozen=True, slots=True)
class Done:
    request: U64


@dataclass(frozen=True, slots=True)
class Refused:
    request: U64
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class EpochChanged:
    """The group's next operation. Those of older epochs are aborted; a call that no operation took is made again."""

    model: Name
    group: Name
    epoch: U64
    sequence: U64


@dataclass(frozen=True, slots=True)
class Start:
    """The operation is bound. `write` True: nobody holds it back, overwrite at once; else wait for Write."""

    key: OpKey
    rank: Rank
    version: VersionInfo
    manifest_id: Id
    write: bool
    grants: Annotated[tuple[Grant, ...], Length(64)]


@dataclass(frozen=True, slots=True)
class Write:
    """Every rank is ready: fence the old version and fill."""

    key: OpKey
    rank: Rank
    grants: Annotated[tuple[Grant, ...], Length(64)]


@dataclass(frozen=True, slots=True)
class AddSource:
    key: OpKey
    rank: Rank
    grant: Grant


@dataclass(frozen=True, slots=True)
class DropSource:
    """This lease is over: the source leaves. What was verified stays verified."""

    key: OpKey
    rank: Rank
    lease: Id
    reason: Text


@dataclass(frozen=True, slots=True)
class Outcome:
    """The decision. `version` is set if committed; `changed` False: the rank held that content already.

    `retained`: what it holds now is to be kept (as in Keep): the number of that telling, or None.
    `unknown`: this coordinator has no record of that operation, a former one's, and none can come: nobody has committed it,
    and a rank may go on with its call under a new key.
    """

    key: OpKey
    rank: Rank
    committed: bool
    changed: bool
    version: VersionInfo | None
    error: ErrorInfo | None
    retained: U64 | None = None
    unknown: bool = False


@dataclass(frozen=True, slots=True)
class Withdrawable:
    """No lease counts on this memory any more (or the grace is over): fence and take it."""

    request: U64


@dataclass(frozen=True, slots=True)
class OrderedOut:
    """This content was retired (rolled back): whoever holds it under this registration fences it and forgets it."""

    registration: Id
    content_id: Id
    reason: Text


@dataclass(frozen=True, slots=True)
class MakeCopy:
    """Hold this shard in host memory, so that it is kept: register it as `copy`, with `medium` HOST and `purpose` RETENTION.

    `registration`: one of the worker's own which holds that content, to be copied from; "": read it from others, by a
    replicate call of the new registration. Done when the coordinator counts it; or answered by CopyRefused.
    """

    copy: Id
    version: VersionInfo
    shard: Rank
    registration: Id


@dataclass(frozen=True, slots=True)
class DropCopy:
    """That copy is not needed (any more): stop making it, or withdraw and deregister it, and free its memory."""

    copy: Id


@dataclass(frozen=True, slots=True)
class Keep:
    """What this registration holds is (`keep`), or is not any more, to be kept (R4): its owner does not take it back unasked
    while the coordinator may count on it. Answered by Kept; so is an Outcome or Registered that says `retained`. `telling`
    numbers what this registration is told, and comes back with the answer: one to an earlier telling does not count.
    """

    registration: Id
    content_id: Id
    keep: bool
    telling: U64


@dataclass(frozen=True, slots=True)
class DigestAgain:
    """A reader got this chunk without its digest: has the memory changed? Answered by DigestedAgain."""

    inquiry: Id
    registration: Id
    generation: U64
    chunk: U64


@dataclass(frozen=True, slots=True)
class CutReader:
    """This lease's reader is lost: close its connections, and say so."""

    lease: Id
    reader: Id


@dataclass(frozen=True, slots=True)
class ManifestReply:
    request: U64
    manifest: ManifestBlob


@dataclass(frozen=True, slots=True)
class Announce:
    """The newest visible version; None: there is none. After a rollback it is an older one than before."""

    model: Name
    newest: VersionInfo | None


@dataclass(frozen=True, slots=True)
class Description:
    request: U64
    models: Annotated[tuple[ModelInfo, ...], Length(2**16)]


# ------------------------------------------------------------------------------------------------ reader <-> owner


@dataclass(frozen=True, slots=True)
class Read:
    """Ask an owner for chunks, as (first, count) runs. It sends those that it has verified, in any order, and those that
    it verifies soon; StillWaiting ends the request if others are left. `request` numbers the reads of one connection."""

    request: U64
    lease: Id
    registration: Id
    generation: U64
    content_id: Id
    runs: Annotated[tuple[tuple[int, int], ...], Length(4096)]


@dataclass(frozen=True, slots=True)
class ChunksFollow:
    """The bytes of these chunks follow this frame, back to back. Digests are 0 where the manifest says "none"."""

    request: U64
    chunks: Annotated[tuple[tuple[int, int], ...], Length(1024)]  # (index, digest)


@dataclass(frozen=True, slots=True)
class FindMemory:
    """Ask an owner in which process it is, to read its memory one-sidedly. Answered by MemoryIs."""

    request: U64


@dataclass(frozen=True, slots=True)
class MemoryIs:
    """`pid` (in the owner's own namespace), and where that process has this nonce, which no other one has. 0: its memory is
    not to be read, at least not from there.
    """

    request: U64
    pid: Annotated[int, Range(0, 2**31 - 1)]
    address: U64
    nonce: Annotated[bytes, Length(16)]


@dataclass(frozen=True, slots=True)
class FindSegments:
    """Ask an owner for the shared memory in which a registration and the generation words are. Answered by SegmentsAre or
    ReadRefused.
    """

    request: U64
    registration: Id
    generation: U64


@dataclass(frozen=True, slots=True)
class SegmentsAre:
    """Where they are at the owner: (address, bytes). One byte with their descriptors follows, in this order. None, and no
    byte: not all of it is in shared memory.
    """

    request: U64
    segments: Annotated[tuple[tuple[int, int], ...], Length(SEGMENTS_MAX)]


@dataclass(frozen=True, slots=True)
class Locate:
    """As Read, but the bytes are not sent: ChunksLie says where they are."""

    request: U64
    lease: Id
    registration: Id
    generation: U64
    content_id: Id
    runs: Annotated[tuple[tuple[int, int], ...], Length(4096)]


@dataclass(frozen=True, slots=True)
class ChunksLie:
    """Where these chunks are in the owner's memory: (index, digest, address). What is read there counts only if the word at
    the address `word`, looked at afterwards, is the generation that was asked for.
    """

    request: U64
    chunks: Annotated[tuple[tuple[int, int, int], ...], Length(1024)]
    word: U64


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """The owner lives, and has none of what is left of this request, which is over: ask again, here or elsewhere.

    `has`: ascending (first, count) runs of chunks that it has verified, perhaps not all of them (R9).
    """

    request: U64
    has: Annotated[tuple[tuple[int, int], ...], Length(HAS_RUNS_MAX)]


@dataclass(frozen=True, slots=True)
class ReadRefused:
    """The owner does not hold this under this generation (any more)."""

    request: U64
    reason: Text


Handshake = ClientHello | ServerHello | Proof
FromWorker = (
    Join
    | Heartbeat
    | Leave
    | Register
    | Deregister
    | Publish
    | Fill
    | ReadyToWrite
    | Prepared
    | Abandon
    | Resolve
    | ReadFailed
    | DigestedAgain
    | Progress
    | Withdraw
    | Withdrawn
    | ReaderCut
    | GetManifest
    | Watch
    | Check
    | Describe
    | Rollback
    | Retain
    | Pin
    | Unpin
    | CopyRefused
    | Kept
    | Unwatch
)
FromCoordinator = (
    Welcome
    | Dismissed
    | HeartbeatAck
    | Registered
    | Done
    | Refused
    | EpochChanged
    | Start
    | Write
    | AddSource
    | DropSource
    | Outcome
    | Withdrawable
    | CutReader
    | DigestAgain
    | ManifestReply
    | Announce
    | Description
    | OrderedOut
    | MakeCopy
    | DropCopy
    | Keep
)
ToRank = (  # of these: what concerns one registration, whose machine takes it
    Registered
    | Refused
    | Done
    | EpochChanged
    | Start
    | Write
    | AddSource
    | DropSource
    | Outcome
    | Withdrawable
    | ManifestReply
    | OrderedOut
    | Keep
)
FromReader = Read | Locate | FindMemory | FindSegments
FromOwner = ChunksFollow | ChunksLie | MemoryIs | SegmentsAre | StillWaiting | ReadRefused
Message = Handshake | FromWorker | FromCoordinator | FromReader | FromOwner
