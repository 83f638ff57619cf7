"""What a worker says to the coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub.messages.values import (
    DIGEST_RUNS_MAX,
    FLOWS_MAX,
    FORMER_KEYS_MAX,
    NEEDS_MAX,
    PARTS_ASKED_MAX,
    RESTORED_MAX,
    SHARED_MAX,
    STRAYS_MAX,
    Begun,
    DigestList,
    ErrorInfo,
    Flow,
    Held,
    ManifestBlob,
    Need,
    Number,
    Origin,
    PartIds,
    Rank,
    Restored,
    Root,
    SelectionRoot,
    Shared,
    Stray,
    WorldSize,
)
from tensorhub.observed import LINKS_MAX, LinkTiming, Phases, ServedTiming
from tensorhub.types import (
    U64,
    Endpoint,
    Id,
    Length,
    Location,
    Medium,
    Name,
    OpKey,
    OpKind,
    Purpose,
    Range,
    Seconds,
    Since,
    Text,
)

WATCHES_MAX = 4096  # models that one session follows


@dataclass(frozen=True, slots=True)
class Join:
    """A worker's first message after the handshake.

    `cluster`, `epoch`, `term`: of the coordinator that has welcomed it last. One of an earlier
    epoch, or of another term of that epoch, knows less than this worker.
    """

    name: Name
    location: Location
    endpoints: Annotated[tuple[Endpoint, ...], Length(16)]
    pid: U64
    host_bytes: U64  # for copies in host memory (MakeCopy, prefetch); 0: it makes none
    release: Annotated[Name, Since(19)] = ""  # of TensorHub, for people
    cluster: Annotated[Id, Since(19)] = ""
    epoch: Annotated[U64, Since(19)] = 0
    term: Annotated[Id, Since(19)] = ""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """`answers`: the `said_at` of the newest Welcome or HeartbeatAck that came over this
    connection.

    So however long a heartbeat lies unread, it proves no more than that its worker was there when
    that was said.
    """

    sequence: U64
    answers: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Leave:
    """The worker closes. All its registrations end at once."""

    reason: Text


@dataclass(frozen=True, slots=True)
class Register:
    """One rank's memory. `manifest` is encoded under the worker's own options, used when this rank
    publishes. If it is empty and has an id, the coordinator knows it by that, or asks for it
    (RegisterAgain), and the whole message comes again. So with that of `held`.

    `shard`: which shard of a version this memory holds. `serves` False: a fetch. No worker reads
    its memory. It is a group of its own, has no manifest, reads any `shard`, and is deregistered at
    its end. `medium` HOST: a copy in the library's own memory, which is never published. With
    `purpose` RETENTION, SEED or ARCHIVE it is a group of its own, of any `shard`.

    `layout_id`: which part of which tensors this rank has; those of all ranks together are the
    group's layout. `part_ids` name it in detail where the tensors are parts, and `parts` are those
    of them that RegisterAgain has asked for. `partial`: the group may leave published bytes unread.

    `committed`: the group's newest recorded operation of which this rank was told that it is
    committed. Publishes are recorded, and fills by several ranks.
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
    manifest_id: Id = ""
    part_ids: PartIds = ()
    parts: Annotated[tuple[ManifestBlob, ...], Length(PARTS_ASKED_MAX)] = ()
    partial: bool = False
    committed: Annotated[OpKey | None, Since(19)] = None


@dataclass(frozen=True, slots=True)
class Deregister:
    request: U64
    registration: Id
    abandon: bool


@dataclass(frozen=True, slots=True)
class Publish:
    """This rank's call of publish, and its vote: the memory is immutable under `generation` from
    now on.

    `in_lineage`: the call was made to another coordinator before, which has not recorded it. It
    counts in that lineage only, and with calls of one operation there only. None: it is new.
    `former`: the keys of earlier operations of this call; of a new one, the keys that it would have
    had at former coordinators.
    """

    key: OpKey
    rank: Rank
    registration: Id
    version: Number
    generation: U64
    timeout_s: Seconds
    in_lineage: Annotated[Number | None, Since(19)] = None
    former: Annotated[tuple[OpKey, ...], Length(FORMER_KEYS_MAX), Since(19)] = ()


@dataclass(frozen=True, slots=True)
class Fill:
    """This rank's call of replicate, update, prefetch or fetch.

    `generation`: under which the memory will be filled. `hold`: this rank has a `before_write`, and
    wants to hear of the bound version before the first byte changes. `at_least`: wait for that
    number. `former`: the keys of earlier operations of this call. `resume`: the progress under one
    of them.
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
class BegunWith:
    """The manifest that this rank's next Fill names in `resume`. If the coordinator has no room for
    it, that Fill fails.
    """

    registration: Id
    manifest: ManifestBlob


@dataclass(frozen=True, slots=True)
class ReadyToWrite:
    """This rank's manifest fits and its before_write has returned. Where its layout is not the
    published one, `needs` says what it reads of which shards; and `part_ids`, if other ranks may
    read its memory, where those bytes lie in it. `parts` are those of them that ReadyAgain has
    asked for.
    """

    key: OpKey
    rank: Rank
    needs: Annotated[tuple[Need, ...], Length(NEEDS_MAX)] = ()
    part_ids: PartIds = ()
    parts: Annotated[tuple[ManifestBlob, ...], Length(3)] = ()


@dataclass(frozen=True, slots=True)
class Covered:
    """Answer to CheckCoverage, which has named these `readers`: they read, or publish, every byte.
    `shared`: what this rank publishes and ranks of other shards do, too. `shares`: whether any rank
    has such bytes, with digests.
    """

    key: OpKey
    rank: Rank
    readers: Id
    shares: bool = False
    shared: Annotated[tuple[Shared, ...], Length(SHARED_MAX)] = ()


@dataclass(frozen=True, slots=True)
class Prepared:
    """This rank's vote: every chunk is there, and verified against its source.

    `root`: of all its chunks' digests. Empty: chunks have none, or not all chunks are here (a fetch
    by name). `roots`: of each selection instead, where its layout is not the published one.
    """

    key: OpKey
    rank: Rank
    root: Root = b""
    roots: Annotated[tuple[SelectionRoot, ...], Length(NEEDS_MAX)] = ()


@dataclass(frozen=True, slots=True)
class Abandon:
    """This rank ends the operation, unless that is decided already. Answered by an Outcome."""

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
    # "lost" | "stalled" | "refused" | "starved" | "corrupt" | "damaged" (what its source loads it
    # from) | "unreachable" | "dropped"
    reason: Name
    detail: Text
    chunk: U64 | None = None  # that came without its digest, if that is the reason


@dataclass(frozen=True, slots=True)
class DigestedAgain:
    """Answer to DigestAgain. `changed`: whether the bytes' digest differs now from the one that is
    sent with them (R8). None: unknown, since the memory is no longer held under that generation, or
    has no digests.

    `inquiry`: "": without a question; the owner has found out that the memory of that `generation`
    has changed.
    """

    inquiry: Id
    registration: Id
    changed: bool | None
    digest: Annotated[bytes, Length(32)] = b""  # that is sent with the chunk
    # where the chunk was read; None: its publisher's, or not known any more
    origin: Origin | None = None
    generation: U64 = 0


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of chunks of this memory. A publisher sends them as it makes them; a replica, in
    answer to TellDigests.

    `runs`: (first, count) of chunks, whose digests lie back to back. `chunks`: of the whole
    content, or of this `selection` of it. `last`: there are no more.
    """

    registration: Id
    generation: U64
    chunks: Annotated[int, Range(0, 2**24)]
    runs: Annotated[tuple[tuple[int, int], ...], Length(DIGEST_RUNS_MAX)]
    digests: DigestList
    last: bool
    selection: Id = ""
    shard: Rank = 0  # as in TellDigests; a worker that holds the published layout need not know it


@dataclass(frozen=True, slots=True)
class Compared:
    """Answer to Compare. `following`: the first chunk that was not compared yet. `strays`: one
    chunk of each source that sent chunks with other digests. `rereads`: all is compared; this
    rank's vote is void, and it reads those chunks again.
    """

    key: OpKey
    rank: Rank
    following: U64
    strays: Annotated[tuple[Stray, ...], Length(STRAYS_MAX)]
    rereads: bool = False
    selection: Id = ""  # as in Compare
    shard: Rank = 0  # as in Compare


@dataclass(frozen=True, slots=True)
class Progress:
    """For scheduling and display only. Correctness never depends on it."""

    key: OpKey
    rank: Rank
    chunks_verified: U64
    bytes_read: U64
    flows: Annotated[tuple[Flow, ...], Length(FLOWS_MAX)] = ()


@dataclass(frozen=True, slots=True)
class Took:
    """How long this rank's call took, once it has ended, well or not. For display only; no answer.

    `key`: of its last operation. `links`: the lanes that took longest, if there were more.
    """

    key: OpKey
    rank: Rank
    seconds: Seconds
    phases: Phases = ()
    links: Annotated[tuple[LinkTiming, ...], Length(LINKS_MAX)] = ()


@dataclass(frozen=True, slots=True)
class Served:
    """What serving a reader cost this worker, once that has ended. For display only; no answer."""

    timing: ServedTiming


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """This rank wants its published memory back. It gets no new readers. LeaveGranted answers when
    its present readers are gone.

    While that would lose a retained version, nothing happens, until the deadline: Refused
    (RetentionError). `abandon`: lose the version. `closes`: the worker may close altogether, so
    that none of its registrations counts as another holder. A new request takes the place of the
    one before it, which is not answered any more.
    """

    request: U64
    registration: Id
    generation: U64
    timeout_s: Seconds
    abandon: bool
    closes: bool


@dataclass(frozen=True, slots=True)
class Fenced:
    """The generation was changed and the owner's own accesses have ended (also sent after a local
    fence).
    """

    registration: Id
    generation: U64


@dataclass(frozen=True, slots=True)
class CopyRefused:
    """This worker does not make that copy, or could not (no memory, no source)."""

    copy: Id
    reason: Text


@dataclass(frozen=True, slots=True)
class RetainedAck:
    """The rank has taken note of a SetRetained, and remembers it if the connection is lost. `seq`:
    of that message.
    """

    registration: Id
    content_id: Id
    keep: bool
    seq: U64


@dataclass(frozen=True, slots=True)
class ReaderCut:
    """The owner no longer serves this lease's reader."""

    lease: Id


@dataclass(frozen=True, slots=True)
class GetManifest:
    request: U64
    model: Name
    content_id: Id
    shard: Rank


@dataclass(frozen=True, slots=True)
class GetPart:
    """Ask for what Start names: a publication's description, a catalogue, an arrangement,
    coordinates, or a manifest. Answered by ManifestReply or Refused.
    """

    request: U64
    part_id: Id


@dataclass(frozen=True, slots=True)
class GetPublication:
    """Ask which visible version a selector means, and for the description of its publication.
    Answered by PublicationReply or Refused.
    """

    request: U64
    model: Name
    selector: int | Name


@dataclass(frozen=True, slots=True)
class Watch:
    """Announce this model's newest visible version now, and whenever it changes. `lineage`,
    `version`: the model's lineage and newest version as this worker was told; None: of none.
    """

    model: Name
    lineage: Annotated[Number, Since(19)] = 0
    version: Annotated[Number | None, Since(19)] = None


@dataclass(frozen=True, slots=True)
class Unwatch:
    """Stop announcing this model over this connection."""

    model: Name


@dataclass(frozen=True, slots=True)
class Check:
    """Could `version` be published under this model now? Answered by Done or Refused (mutate checks
    first).
    """

    request: U64
    model: Name
    version: U64


@dataclass(frozen=True, slots=True)
class CheckStamp:
    """Was this content published as that version? Answered by VersionReply, or Refused.

    `root`: of the digests of one shard, as its reader has verified them; empty: not known.
    """

    request: U64
    model: Name
    lineage: Number
    version: Number
    content_id: Id
    root: Root


@dataclass(frozen=True, slots=True)
class Describe:
    """Ask for one model, or for all (None), in pages ordered by name: the models after `after`.

    Of one model a part may be asked for: what concerns `version`, and of its workers the next
    `workers_max` (None: all), with their holdings and reads. The next workers are those after the
    name `after`; or, of the workers with that name, those after `incarnation`, and all with later
    names. `workers_max` 0: counts only, of any number of models.
    """

    request: U64
    model: Name | None
    after: Name | None = None
    incarnation: Id | None = None
    version: U64 | None = None
    workers_max: U64 | None = None


@dataclass(frozen=True, slots=True)
class GetEvents:
    """What has happened since the event with the number `after`? Answered by Events."""

    request: U64
    after: U64


@dataclass(frozen=True, slots=True)
class Explain:
    """Where did the seconds go of the newest update to `version` by `group`? Answered by Explained,
    or Refused (VersionUnavailable). None: of any version, or of the group that took longest.
    """

    request: U64
    model: Name
    version: U64 | None = None
    group: Name | None = None


@dataclass(frozen=True, slots=True)
class GetUpdates:
    """Which updates ran lately, of one model or of all (None)? Answered by Updates."""

    request: U64
    model: Name | None = None


@dataclass(frozen=True, slots=True)
class Rollback:
    """Begin a new lineage of `model` whose mark is `to`. A retry carries its `ident`. Answered by
    Done or Refused.
    """

    request: U64
    ident: Id
    model: Name
    to: Number


@dataclass(frozen=True, slots=True)
class Retain:
    """Keep the newest `latest` versions of this model fetchable. The last such message counts.

    Answered by Done, once this is durable and every live holder knows it, or by Refused.
    """

    request: U64
    model: Name
    latest: Number


@dataclass(frozen=True, slots=True)
class Pin:
    """Keep this version, whatever `Retain` says, until Unpin or the worker's end. It is repeated,
    with its `pin`, on each new connection. Answered like Retain.
    """

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


@dataclass(frozen=True, slots=True)
class Restore:
    """These versions of `model` were published in that cluster, and are in an archive. `lineage`
    and `mark`: its newest lineage and number, as far as the archive knows. The newest versions come
    first.

    The coordinator adds those that it does not know. Answered by Done, once that is durable, or by
    Refused.
    """

    request: U64
    model: Name
    cluster: Id
    lineage: Number
    mark: Number
    versions: Annotated[tuple[Restored, ...], Length(RESTORED_MAX)]


FromAnybody = (
    Join
    | Heartbeat
    | Watch
    | Unwatch
    | Describe
    | GetManifest
    | GetPart
    | GetPublication
    | Check
    | GetEvents
    | Explain
    | GetUpdates
    | CheckStamp
)
"""What a session may say before a worker has joined over it, too."""
AboutOperation = (
    Publish
    | Fill
    | ReadyToWrite
    | Covered
    | Prepared
    | Compared
    | Abandon
    | Resolve
    | ReadFailed
    | Progress
)
"""What a rank says of the operation that it takes part in."""
FromJoined = (
    AboutOperation
    | Took
    | Served
    | Leave
    | Register
    | Deregister
    | BegunWith
    | DigestedAgain
    | Digests
    | LeaveRequest
    | Fenced
    | ReaderCut
    | Rollback
    | Retain
    | Pin
    | Unpin
    | Restore
    | CopyRefused
    | RetainedAck
)
"""What only a worker that has joined may say."""
FromWorker = FromAnybody | FromJoined
