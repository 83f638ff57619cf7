"""What the coordinator says to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub.messages.values import (
    NEEDS_MAX,
    PARTS_ASKED_MAX,
    DigestList,
    ErrorInfo,
    Grant,
    ManifestBlob,
    Number,
    PartIds,
    Rank,
    Root,
)
from tensorhub.observed import (
    EVENTS_PAGE_MAX,
    UPDATES_PAGE_MAX,
    ClusterEvent,
    Explanation,
    UnixTime,
    UpdateRow,
)
from tensorhub.types import (
    U64,
    Id,
    Length,
    ModelInfo,
    Name,
    OpKey,
    Seconds,
    Since,
    Text,
    VersionInfo,
)

NO_REQUEST = 0  # of a Refused that is about the whole session, which ends; requests count from 1


@dataclass(frozen=True, slots=True)
class Welcome:
    """Answer to Join. `epoch`: the coordinator's. `cluster` names its durable state. `known` False:
    a new incarnation. `said_at`: now, by the coordinator's clock; it means nothing to the worker,
    which repeats it in its heartbeats.

    `read_only`: this worker has a read-only token. It may fetch and look; everything else is
    refused. `term`: random, of this coordinator alone: on an older copy of its state an epoch may
    come again.
    """

    cluster: Id
    epoch: U64
    lease_s: Seconds
    known: bool
    read_only: bool = False
    said_at: Seconds = 0.0
    release: Annotated[Name, Since(19)] = ""  # of TensorHub, for people
    term: Annotated[Id, Since(19)] = ""


@dataclass(frozen=True, slots=True)
class Dismissed:
    """This incarnation is lost for good. The worker must come back as a new one (R11)."""

    reason: Text


@dataclass(frozen=True, slots=True)
class Advice:
    """What is wrong with this worker's settings, and what to set; for its log. Since version 19."""

    reason: Text
    advice: Text


@dataclass(frozen=True, slots=True)
class HeartbeatAck:
    """`said_at`: as in Welcome."""

    sequence: U64
    said_at: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Registered:
    """Answer to Register. `sequence`: the group's next operation. `keep` False: the rank must give
    up what it holds (R2).

    `retained`: what the rank holds is retained (see SetRetained), under this number. None: it is
    not. `in_lineage`: the model's. None: not known.
    """

    request: U64
    registration: Id
    epoch: U64
    sequence: U64
    keep: bool
    retained: U64 | None = None
    in_lineage: Annotated[Number | None, Since(19)] = None


@dataclass(frozen=True, slots=True)
class RegisterAgain:
    """Answer to a Register with an unknown manifest, or with `held` while the group's layout was
    unknown. The rank sends Register again, with its state of that time.

    `whole`: with the manifests themselves, which are not known yet. `part_ids`: with these parts,
    which are not known either.
    """

    request: U64
    whole: bool
    part_ids: Annotated[tuple[Id, ...], Length(PARTS_ASKED_MAX)] = ()


@dataclass(frozen=True, slots=True)
class Done:
    request: U64


@dataclass(frozen=True, slots=True)
class Refused:
    request: U64
    error: ErrorInfo


@dataclass(frozen=True, slots=True)
class EpochChanged:
    """The group's next operation. Operations of older epochs are aborted. A call that is in none of
    them is made again.
    """

    model: Name
    group: Name
    epoch: U64
    sequence: U64


@dataclass(frozen=True, slots=True)
class Start:
    """The operation is bound. `write`: overwrite at once, because no rank holds it back. Otherwise
    wait for Write.

    `root`: for a fetch, the root of the publisher's digests. The fetch is over as soon as its own
    root is equal. Empty: wait for the Outcome. `part_ids`: with `manifest_id`, what the memory will
    hold. `publication`: the rank's layout is not the published one; the id of the description of
    the published layout (GetPart). Then the rank says in ReadyToWrite which bytes it needs, and
    where they will lie.
    """

    key: OpKey
    rank: Rank
    version: VersionInfo
    manifest_id: Id
    write: bool
    grants: Annotated[tuple[Grant, ...], Length(NEEDS_MAX)]
    root: Root = b""
    part_ids: PartIds = ()
    publication: Id = ""


@dataclass(frozen=True, slots=True)
class ReadyAgain:
    """Answer to a ReadyToWrite that names parts which were not known. The rank says it again, as
    things are then.

    `part_ids`: with these parts, which are not known yet.
    """

    key: OpKey
    rank: Rank
    part_ids: PartIds = ()


@dataclass(frozen=True, slots=True)
class CheckCoverage:
    """Do the ranks of this rank's group together read every byte of the publication? `readers`: the
    id of their description (GetPart), as Start names that of the publishers. In a publish: do they
    publish every byte? Answered by Covered, or by Abandon with the unread bytes, or with the fault
    of the publication.
    """

    key: OpKey
    rank: Rank
    readers: Id


@dataclass(frozen=True, slots=True)
class Write:
    """Every rank is ready: fence the old version and fill."""

    key: OpKey
    rank: Rank
    grants: Annotated[tuple[Grant, ...], Length(NEEDS_MAX)]


@dataclass(frozen=True, slots=True)
class AddSource:
    key: OpKey
    rank: Rank
    grant: Grant


@dataclass(frozen=True, slots=True)
class DropSource:
    """This lease is over: the source leaves, or another one is better. Verified chunks stay
    verified.
    """

    key: OpKey
    rank: Rank
    lease: Id
    reason: Text


@dataclass(frozen=True, slots=True)
class Outcome:
    """The decision. `version` is set if committed; `changed` False: the rank held that content
    already.

    `retained`: the rank's content is retained (see SetRetained), under this number. None: it is
    not. `unknown`: this coordinator has no record of that operation, a former one's, and none can
    come: no rank has committed it, and a rank may go on with its call under a new key. `again`:
    aborted for all ranks, since their sources are gone, and the selector names another version: the
    ranks repeat the call under the next key.

    `by_source`: no publisher has confirmed all that the rank holds now; the digests of those that
    it has read count.
    """

    key: OpKey
    rank: Rank
    committed: bool
    changed: bool
    version: VersionInfo | None
    error: ErrorInfo | None
    retained: U64 | None = None
    unknown: bool = False
    again: bool = False
    by_source: bool = False


@dataclass(frozen=True, slots=True)
class LeaveGranted:
    """No lease counts on this memory now, or the grace is over: fence the memory and take it
    back.
    """

    request: U64


@dataclass(frozen=True, slots=True)
class Revoked:
    """This content was retired by a rollback. The registration fences it and forgets it."""

    registration: Id
    content_id: Id
    reason: Text


@dataclass(frozen=True, slots=True)
class MakeCopy:
    """Keep this shard in host memory: register it as `copy`, with `medium` HOST and `purpose`
    RETENTION, and fill it by a replicate call. It is done when the coordinator counts the copy. Or
    CopyRefused answers.
    """

    copy: Id
    version: VersionInfo
    shard: Rank


@dataclass(frozen=True, slots=True)
class DropCopy:
    """That copy is not needed. Stop making it, or withdraw and deregister it. Free its memory."""

    copy: Id


@dataclass(frozen=True, slots=True)
class SetRetained:
    """Whether what this registration holds is retained (R4). If so, the coordinator may count on
    it, and the owner asks before it takes the memory back. RetainedAck answers this, and also an
    Outcome or a Registered with `retained`. `seq` numbers these messages for one registration and
    comes back with the answer. An answer to an earlier one does not count.
    """

    registration: Id
    content_id: Id
    keep: bool
    seq: U64


@dataclass(frozen=True, slots=True)
class DigestAgain:
    """A reader got this chunk with a wrong digest. Has the memory changed? Answered by
    DigestedAgain.
    """

    inquiry: Id
    registration: Id
    generation: U64
    chunk: U64
    selection: Id = ""  # of which the chunk is
    shard: Rank = 0  # of which class it is that selection


@dataclass(frozen=True, slots=True)
class TellDigests:
    """Which digests do the chunks of this memory have? Answered by Digests, until one is the last.
    A publisher makes those that are missing. `selection`: of the chunks of that selection; a
    publisher that does not know it tells none.
    """

    registration: Id
    generation: U64
    selection: Id = ""
    shard: Rank = 0  # of which class it is that selection


@dataclass(frozen=True, slots=True)
class Compare:
    """This rank's vote differs from the publisher's digests. These are a page of them, from chunk
    `first` on. `last`: there is no further page. Answered by Compared.
    """

    key: OpKey
    rank: Rank
    first: U64
    digests: DigestList
    last: bool
    selection: Id = ""  # whose chunks they are of; "": those of the rank's own grid
    shard: Rank = 0  # of which class it is that selection


@dataclass(frozen=True, slots=True)
class CutReader:
    """This lease's reader is lost. Close its connections, and answer with ReaderCut."""

    lease: Id
    reader: Id


@dataclass(frozen=True, slots=True)
class ManifestReply:
    request: U64
    manifest: ManifestBlob


@dataclass(frozen=True, slots=True)
class PublicationReply:
    """`layout_id`: in which the version was published. `publication`: as Start names it."""

    request: U64
    version: VersionInfo
    layout_id: Name
    publication: ManifestBlob


@dataclass(frozen=True, slots=True)
class VersionReply:
    """The version that a CheckStamp asks for: it is that content."""

    request: U64
    version: VersionInfo


@dataclass(frozen=True, slots=True)
class Announce:
    """The newest visible version; None: there is none. After a rollback it is older than before.

    `in_lineage`: the model's. It and the number of the newest version together never go back.
    """

    model: Name
    newest: VersionInfo | None
    in_lineage: Annotated[Number | None, Since(19)] = None


@dataclass(frozen=True, slots=True)
class Description:
    """Answer to Describe, with the current state of each model. `more`: further models follow after
    the last of these. `is_cut`: of the last model, further workers follow after its last one.
    """

    request: U64
    models: Annotated[tuple[ModelInfo, ...], Length(2**16)]
    more: bool = False
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class Events:
    """Answer to GetEvents: the next ones, in their order; the oldest may be forgotten.

    `following`: the `after` of the next question. `epoch`: of the coordinator that counts them; a
    new one begins with 1 again. `more`: there are more already. `at`: its time now (0: not known).
    """

    request: U64
    events: Annotated[tuple[ClusterEvent, ...], Length(EVENTS_PAGE_MAX)]
    following: U64
    epoch: U64
    more: bool = False
    at: Annotated[UnixTime, Since(19)] = 0.0


@dataclass(frozen=True, slots=True)
class Explained:
    """Answer to Explain."""

    request: U64
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class Updates:
    """Answer to GetUpdates: the newest first."""

    request: U64
    rows: Annotated[tuple[UpdateRow, ...], Length(UPDATES_PAGE_MAX)]


FromCoordinator = (
    Welcome
    | Dismissed
    | Advice
    | HeartbeatAck
    | Registered
    | RegisterAgain
    | Done
    | Refused
    | EpochChanged
    | Start
    | ReadyAgain
    | CheckCoverage
    | Write
    | AddSource
    | DropSource
    | Outcome
    | LeaveGranted
    | CutReader
    | DigestAgain
    | TellDigests
    | Compare
    | ManifestReply
    | PublicationReply
    | VersionReply
    | Announce
    | Description
    | Events
    | Explained
    | Updates
    | Revoked
    | MakeCopy
    | DropCopy
    | SetRetained
)
ToRank = (  # of these: what concerns one registration, whose machine takes it
    Registered
    | RegisterAgain
    | Refused
    | Done
    | EpochChanged
    | Start
    | ReadyAgain
    | CheckCoverage
    | Write
    | AddSource
    | DropSource
    | Compare
    | Outcome
    | LeaveGranted
    | ManifestReply
    | Revoked
    | SetRetained
)
