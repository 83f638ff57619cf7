"""What workers, the coordinator and one another's readers say: the one vocabulary of the control plane.

The coordinator and the worker machines take and emit these values directly; `tensorhub.protocol` turns them into
frames and back, and checks every bound on the way in. A message is a frozen dataclass; its fields' annotations are its
validation. Not responsible for bytes, sockets or order. All are imported from here; the modules are one for each speaker.

Ids: a `request` is minted by the asking worker and comes back on the answer; an `OpKey` names a group operation, and a
message about an operation that is decided is answered with its outcome (a retry is not a second call).
"""

from __future__ import annotations

from tensorhub.messages.from_coordinator import (
    NO_REQUEST as NO_REQUEST,
    AddSource as AddSource,
    Announce as Announce,
    CutReader as CutReader,
    Description as Description,
    DigestAgain as DigestAgain,
    Dismissed as Dismissed,
    Done as Done,
    DropCopy as DropCopy,
    DropSource as DropSource,
    EpochChanged as EpochChanged,
    FromCoordinator as FromCoordinator,
    HeartbeatAck as HeartbeatAck,
    Keep as Keep,
    MakeCopy as MakeCopy,
    ManifestReply as ManifestReply,
    OrderedOut as OrderedOut,
    Outcome as Outcome,
    Refused as Refused,
    Registered as Registered,
    Start as Start,
    ToRank as ToRank,
    Welcome as Welcome,
    Withdrawable as Withdrawable,
    Write as Write,
)
from tensorhub.messages.from_worker import (
    WATCHES_MAX as WATCHES_MAX,
    Abandon as Abandon,
    Check as Check,
    CopyRefused as CopyRefused,
    Deregister as Deregister,
    Describe as Describe,
    DigestedAgain as DigestedAgain,
    Fill as Fill,
    FromWorker as FromWorker,
    GetManifest as GetManifest,
    Heartbeat as Heartbeat,
    Join as Join,
    Kept as Kept,
    Leave as Leave,
    Pin as Pin,
    Prepared as Prepared,
    Progress as Progress,
    Publish as Publish,
    ReaderCut as ReaderCut,
    ReadFailed as ReadFailed,
    ReadyToWrite as ReadyToWrite,
    Register as Register,
    Resolve as Resolve,
    Retain as Retain,
    Rollback as Rollback,
    Unpin as Unpin,
    Unwatch as Unwatch,
    Watch as Watch,
    Withdraw as Withdraw,
    Withdrawn as Withdrawn,
)
from tensorhub.messages.handshake import (
    PROTOCOL_VERSION as PROTOCOL_VERSION,
    ClientHello as ClientHello,
    Handshake as Handshake,
    Nonce as Nonce,
    Proof as Proof,
    ServerHello as ServerHello,
)
from tensorhub.messages.reading import (
    AGENT_BYTES_MAX as AGENT_BYTES_MAX,
    ALLOCATIONS_MAX as ALLOCATIONS_MAX,
    HAS_RUNS_MAX as HAS_RUNS_MAX,
    SEGMENTS_MAX as SEGMENTS_MAX,
    AgentIs as AgentIs,
    AllocationsAre as AllocationsAre,
    ChunkDigest as ChunkDigest,
    ChunkFollows as ChunkFollows,
    ChunksFollow as ChunksFollow,
    ChunksLie as ChunksLie,
    FindAgent as FindAgent,
    FindAllocations as FindAllocations,
    FindMemory as FindMemory,
    FindSegments as FindSegments,
    FromOwner as FromOwner,
    FromReader as FromReader,
    Locate as Locate,
    MemoryIs as MemoryIs,
    Read as Read,
    ReadRefused as ReadRefused,
    SegmentsAre as SegmentsAre,
    StillWaiting as StillWaiting,
)
from tensorhub.messages.values import (
    FLOWS_MAX as FLOWS_MAX,
    FORMER_KEYS_MAX as FORMER_KEYS_MAX,
    Begun as Begun,
    ErrorInfo as ErrorInfo,
    Flow as Flow,
    Grant as Grant,
    Held as Held,
    ManifestBlob as ManifestBlob,
    Number as Number,
    Rank as Rank,
    WorldSize as WorldSize,
)

Message = Handshake | FromWorker | FromCoordinator | FromReader | FromOwner
