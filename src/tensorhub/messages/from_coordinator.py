"""What the coordinator says to a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub.messages.values import DigestList, ErrorInfo, Grant, ManifestBlob, Rank, Root
from tensorhub.types import U64, Id, Length, ModelInfo, Name, OpKey, Seconds, Text, VersionInfo

NO_REQUEST = 0  # of a Refused that is about the whole session, which ends; requests count from 1


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

    `retained`: what was announced as held is to be kept (as in SetRetained): its number, or None.
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
    """The operation is bound. `write` True: nobody holds it back, overwrite at once; else wait for Write.

    `root`: of the publisher's digests, for a fetch, which is over at once where its own is the same; empty: wait for the
    Outcome.
    """

    key: OpKey
    rank: Rank
    version: VersionInfo
    manifest_id: Id
    write: bool
    grants: Annotated[tuple[Grant, ...], Length(64)]
    root: Root = b""


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

    `retained`: what it holds now is to be kept (as in SetRetained): its number, or None.
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
class LeaveGranted:
    """No lease counts on this memory any more (or the grace is over): fence and take it."""

    request: U64


@dataclass(frozen=True, slots=True)
class Revoked:
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
class SetRetained:
    """What this registration holds is (`keep`), or is not any more, to be kept (R4): its owner does not take it back unasked
    while the coordinator may count on it. RetainedAck answers it, and an Outcome or a Registered that says `retained`. `seq`
    numbers what this registration is told, and comes back with the answer: an answer to an earlier number does not count.
    """

    registration: Id
    content_id: Id
    keep: bool
    seq: U64


@dataclass(frozen=True, slots=True)
class DigestAgain:
    """A reader got this chunk without its digest: has the memory changed? Answered by DigestedAgain."""

    inquiry: Id
    registration: Id
    generation: U64
    chunk: U64


@dataclass(frozen=True, slots=True)
class TellChunks:
    """Which chunks can be read under this generation now? Asked of partial copies while nobody holds the whole of their
    shard. Answered by ChunksThere.
    """

    registration: Id
    generation: U64


@dataclass(frozen=True, slots=True)
class TellDigests:
    """What do the chunks of this memory have as digests? Answered by Digests, until one says that it is the last.

    `origin`: only of chunks that were read from that registration; "": of all that are here, and a publisher makes what is
    missing.
    """

    registration: Id
    generation: U64
    origin: Id


@dataclass(frozen=True, slots=True)
class Compare:
    """This rank's vote does not agree with the publisher's digests, of which these are a part: from chunk `first` on.
    Answered by Compared. `last`: there are no more.
    """

    key: OpKey
    rank: Rank
    first: U64
    digests: DigestList
    last: bool


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
    """Answer to Describe. Each model is as it is now; `more`: there are further ones, after the last of these."""

    request: U64
    models: Annotated[tuple[ModelInfo, ...], Length(2**16)]
    more: bool = False


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
    | LeaveGranted
    | CutReader
    | DigestAgain
    | TellChunks
    | TellDigests
    | Compare
    | ManifestReply
    | Announce
    | Description
    | Revoked
    | MakeCopy
    | DropCopy
    | SetRetained
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
    | Compare
    | Outcome
    | LeaveGranted
    | ManifestReply
    | Revoked
    | SetRetained
)
