"""What a reader and an owner say to each other, on the data plane's connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub.types import U64, Id, Length, Range, Text

HAS_RUNS_MAX = 1024  # of one StillWaiting
TRANSPORT_BYTES_MAX = 3 * 2**18  # of one message of a transport's own: it fits a frame
SELECTION_BYTES_MAX = 2**25  # of one selection's encoding
CHAIN_MAX = 8  # deltas of one chunk: from the reader's version to the next one, and so on

Digest = Annotated[int, Range(0, 2**256 - 1)]
Address = Annotated[int, Range(0, 2**62)]  # or a size: what is added to it stays within 64 bits


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Chunks of an owner, as (first, count) runs. `request` numbers the requests of one
    connection.
    """

    request: U64
    lease: Id
    registration: Id
    generation: U64
    content_id: Id
    runs: Annotated[tuple[tuple[int, int], ...], Length(4096)]


@dataclass(frozen=True, slots=True)
class Read(_Wanted):
    """Ask an owner for chunks. It sends the chunks that it has verified, in any order, and chunks
    that it verifies soon; StillWaiting ends the request if chunks are left.
    """

    selection: Id = ""  # of which the chunks are; "": of the content's own grid
    # the content that the reader's memory still has in all these chunks, so that the owner may send
    # DeltasFollow; "": none
    base: Id = ""


@dataclass(frozen=True, slots=True)
class Select:
    """The next requests name this selection of that memory. Answered by Selected or ReadRefused.

    `blob`: the next bytes of its encoding, from `offset` on of `total`; at first none, since the
    owner may know it.
    """

    request: U64
    registration: Id
    generation: U64
    selection: Id
    total: Annotated[int, Range(0, SELECTION_BYTES_MAX)]
    offset: Annotated[int, Range(0, SELECTION_BYTES_MAX)]
    blob: Annotated[bytes, Length(TRANSPORT_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class Selected:
    """`following`: the first byte of the selection's encoding that the owner lacks; `total`: none,
    it can be read.
    """

    request: U64
    following: Annotated[int, Range(0, SELECTION_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class ChunksFollow:
    """The bytes of these chunks follow this frame, back to back. Digests are 0 where the manifest
    says "none".
    """

    request: U64
    chunks: Annotated[tuple[tuple[int, Digest], ...], Length(1024)]  # (index, digest)


@dataclass(frozen=True, slots=True)
class DeltasFollow:
    """Deltas follow this frame, back to back: what makes these chunks of the request's `base`. The
    digests are those of the chunks that are made.
    """

    request: U64
    # (index, digest, bytes of each of its deltas, to be applied in this order)
    chunks: Annotated[
        tuple[tuple[int, Digest, Annotated[tuple[U64, ...], Length(CHAIN_MAX)]], ...], Length(1024)
    ]


@dataclass(frozen=True, slots=True)
class ChunkFollows:
    """The bytes of this chunk follow this frame, and ChunkDigest follows the bytes: the digest is
    made meanwhile.
    """

    request: U64
    chunk: U64


@dataclass(frozen=True, slots=True)
class ChunkDigest:
    """The digest of the chunk whose bytes have just been sent."""

    request: U64
    digest: Digest


@dataclass(frozen=True, slots=True)
class NotThisWay:
    """The owner cannot be read by that transport. `is_usual`: only this registration cannot, and
    nothing is wrong.
    """

    request: U64
    reason: Text
    is_usual: bool


@dataclass(frozen=True, slots=True)
class Locate(_Wanted):
    """As Read, but the bytes take that transport's way. ChunksLie, or a TransportReply, says where
    they are.
    """

    transport: Id
    selection: Id = ""  # as in Read


@dataclass(frozen=True, slots=True)
class TransportRequest:
    """A message that only readers by this transport send (see `transport.dialect`). Mostly answered
    by TransportReply, NotThisWay or ReadRefused.
    """

    request: U64
    transport: Id
    body: Annotated[bytes, Length(TRANSPORT_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class TransportReply:
    """A message that only owners that are read by this transport send (see `transport.dialect`)."""

    request: U64
    transport: Id
    body: Annotated[bytes, Length(TRANSPORT_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class ChunksLie:
    """Where these chunks are in the owner's memory: (index, digest, address). Bytes from there
    count only if the word at the address `word`, looked at afterwards, is the requested generation.
    """

    request: U64
    chunks: Annotated[tuple[tuple[int, Digest, Address], ...], Length(1024)]
    word: Address


@dataclass(frozen=True, slots=True)
class StillWaiting:
    """The request is over. The owner is alive, and lacks the chunks that are left: ask again, here
    or elsewhere.

    `has`: ascending (first, count) runs of chunks that it has verified, perhaps not all of them
    (R9).
    """

    request: U64
    has: Annotated[tuple[tuple[int, int], ...], Length(HAS_RUNS_MAX)]


@dataclass(frozen=True, slots=True)
class ReadRefused:
    """The owner does not hold this under this generation (any more). `is_damaged`: it does, but
    what it is loaded from was damaged, which the reason names.
    """

    request: U64
    reason: Text
    is_damaged: bool = False


@dataclass(frozen=True, slots=True)
class DoneReading:
    """The reader asks for nothing more under the lease of its last request, and keeps the
    connection. Not answered.
    """

    request: U64


Request = Read | Locate | Select | TransportRequest
FromReader = Request | DoneReading
FromOwner = (
    ChunksFollow
    | DeltasFollow
    | ChunkFollows
    | ChunkDigest
    | ChunksLie
    | Selected
    | TransportReply
    | NotThisWay
    | StillWaiting
    | ReadRefused
)
