"""Values that several messages carry, and the bounds of their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub import errors
from tensorhub.types import (
    U64,
    VERSION_MAX,
    DeltaUse,
    Endpoint,
    Id,
    Length,
    Location,
    Name,
    OpKey,
    Purpose,
    Range,
    Seconds,
    Since,
    Text,
    VersionInfo,
    printable,
)

Rank = Annotated[int, Range(0, 2**20)]
Number = Annotated[int, Range(0, VERSION_MAX)]
WorldSize = Annotated[int, Range(1, 2**20)]
ManifestBlob = Annotated[bytes, Length(48 * 2**20)]
FORMER_KEYS_MAX = 16  # of one call
FLOWS_MAX = 64  # of one Progress
DIGEST_RUNS_MAX = 4096  # of one Digests
DIGESTS_BYTES_MAX = 2**19  # of one Digests or Compare
STRAYS_MAX = 64  # of one Compared
DigestList = Annotated[bytes, Length(DIGESTS_BYTES_MAX)]
Root = Annotated[bytes, Length(32)]
PartIds = Annotated[tuple[Id, ...], Length(3)]
"""The ids of a rank's catalogue, arrangement and coordinates (`tensorhub.layouts`). Empty: whole or
rank-local tensors, as its manifest says. Of what was read from another layout they are always
there, and its catalogue is that of the publication.
"""
SHARED_MAX = 4096  # parts that one rank's shard has in common with others
NEEDS_MAX = 4096  # shard classes of which one rank reads something
RESTORED_MAX = 64  # of one Restore
RESTORED_SHARDS_MAX = 2**14  # of one Restored
DIFFERENCES_TOLD_MAX = 64  # between tensors, that one rank tells the others of its group
# of one Register: of what is registered, and of what is held; and what describes its origin
PARTS_ASKED_MAX = 7


def digests_bytes_max(frame_bytes_max: int) -> int:
    """Of one message, where frames are no larger than that: its runs have room beside them."""
    return min(DIGESTS_BYTES_MAX, frame_bytes_max // 4)


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
        causes = (
            tuple(sorted(error.causes.items())) if isinstance(error, errors.GroupAborted) else ()
        )
        differences = error.differences if isinstance(error, errors.ManifestMismatch) else ()
        # An error may tell of anything, also of text that UTF-8 cannot say: of a file's name, for
        # example.
        text = str(error).encode(errors="backslashreplace").decode()
        return cls(
            type(error).__name__, text[:16_000], error.retryable, causes[:4096], differences[:1024]
        )

    def brief(self, chars_max: int) -> ErrorInfo:
        """A copy with at most so many characters of text, and of the texts for ranks and tensors
        the first few.
        """
        causes = tuple((rank, text[: chars_max // 8]) for rank, text in self.causes[:8])
        differences = tuple(
            text[: chars_max // 8] for text in self.differences[:DIFFERENCES_TOLD_MAX]
        )
        return ErrorInfo(self.kind, self.message[:chars_max], self.retryable, causes, differences)

    def error(self, memory: errors.Memory = "intact") -> errors.TensorHubError:
        """The exception that this describes, in printable words; an unknown kind becomes a
        ProtocolError.
        """
        kind, message = errors.BY_NAME.get(self.kind, errors.ProtocolError), printable(self.message)
        if issubclass(kind, errors.GroupAborted):
            causes = {rank: printable(text) for rank, text in self.causes}
            return kind(message, causes=causes, retryable=self.retryable, memory=memory)
        if issubclass(kind, errors.ManifestMismatch):
            differences = tuple(map(printable, self.differences))
            return kind(message, differences=differences, retryable=self.retryable, memory=memory)
        return kind(message, retryable=self.retryable, memory=memory)


@dataclass(frozen=True, slots=True)
class Grant:
    """A read lease as its reader sees it: the source, and the generation to read under (R3)."""

    lease: Id
    source: Name  # the source worker's name, for people
    incarnation: Id
    registration: Id
    generation: U64
    endpoints: Annotated[tuple[Endpoint, ...], Length(16)]
    location: Location
    complete: bool  # False: the source is still filling; the reader waits there for what it lacks
    # of another layout: that selection is read there; "": chunks of the reader's own grid
    selection: Id = ""
    # whose selection it is: of the class that the reader's `Need` names so; equal ones have equal
    # ids
    shard: Rank = 0
    purpose: Purpose = Purpose.USE  # of the source's memory


@dataclass(frozen=True, slots=True)
class Flow:
    """What has come under one lease since its first bytes were there, in how much time up to the
    last ones, and whether as deltas.
    """

    lease: Id
    nbytes: U64
    seconds: Seconds
    deltas: DeltaUse = DeltaUse.UNDECIDED


@dataclass(frozen=True, slots=True)
class Origin:
    """The memory from which a chunk was read, and under which generation."""

    registration: Id
    generation: U64


@dataclass(frozen=True, slots=True)
class Stray:
    """A chunk that has another digest than its publisher's, and where it came from; None: that is
    not known any more.
    """

    chunk: U64
    origin: Origin | None


@dataclass(frozen=True, slots=True)
class Held:
    """What a registration holds, as it is announced again after a lost connection.

    `voted`: it has voted for that content, and does not know the outcome: a coordinator that does
    not know it either must not count on it. `published`: by this very registration; else it was
    read from others. `root`: of its chunks' digests, where it was read.
    """

    version: U64
    content_id: Id
    generation: U64
    world_size: WorldSize
    nbytes: U64
    manifest: ManifestBlob
    voted: bool = False
    published: bool = False
    root: Root = b""
    manifest_id: Id = ""
    part_ids: PartIds = ()
    # from which its grid follows (`Start`); "": it has that of what was published
    publication: Id = ""
    # of the version; None: it may be of a cluster before this one
    lineage: Annotated[Number | None, Since(19)] = None


@dataclass(frozen=True, slots=True)
class Need:
    """What a rank reads of the shards of one class, where its layout is not the published one.

    `shard`: the first shard of the class. `chunks`: of the selection, which have so many bytes
    together.
    """

    shard: Rank
    selection: Id
    chunks: Annotated[int, Range(1, 2**24)]
    nbytes: U64


@dataclass(frozen=True, slots=True)
class SelectionRoot:
    """The root of the digests of a selection's chunks, of the class that the reader's `Need` names
    so.
    """

    selection: Id
    root: Root
    shard: Rank = 0


@dataclass(frozen=True, slots=True)
class Shared:
    """The digest of bytes that ranks of several shards publish, under one number. `what`: for an
    error.
    """

    number: U64
    what: Text
    digest: Root


@dataclass(frozen=True, slots=True)
class Restored:
    """A version as it was published. `manifest_ids`: of each shard, the ids of its manifest and of
    its last part (zeros: it has no parts). `roots`: of each shard's digests; empty: not known.
    """

    version: VersionInfo
    layout_id: Name
    manifest_ids: Annotated[bytes, Length(32 * RESTORED_SHARDS_MAX)]
    roots: Annotated[bytes, Length(32 * RESTORED_SHARDS_MAX)]

    @property
    def lineage(self) -> int:
        return self.version.lineage


@dataclass(frozen=True, slots=True)
class Begun:
    """How far a rank came with a fill that goes on in another operation: its coordinator has no
    record of the first operation (it is a new one).

    `key`: the operation in which all ranks were bound to that content. `manifest_id`: of its
    manifest, which a rank that serves others has said before (BegunWith). `written`: its memory is
    being filled with that, or is complete; else not a byte of it has changed yet. `publication`: as
    the rank has planned with it (Start).
    """

    key: OpKey
    version: Number
    content_id: Id
    manifest_id: Id
    written: bool
    publication: Id = ""
