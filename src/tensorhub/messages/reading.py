"""What a reader and an owner say to each other, on the data plane's connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub.types import U64, Id, Length, Range, Text

HAS_RUNS_MAX = 1024  # of one StillWaiting
ALLOCATIONS_MAX = 4096  # of one registration: they fit a frame
SEGMENTS_MAX = 64  # of one registration; the kernel passes 253 descriptors at a time
TRANSPORT_BYTES_MAX = 2**19  # of one message of a transport's own
AGENT_BYTES_MAX = 2**19  # of a NIXL agent's metadata

Digest = Annotated[int, Range(0, 2**256 - 1)]
Gid = Annotated[bytes, Length(16)]
ON_HOST = -1  # in place of a GPU's number
U32 = Annotated[int, Range(0, 2**32 - 1)]
Address = Annotated[int, Range(0, 2**62)]  # or a size: what is added to it stays within 64 bits
_U24 = Annotated[int, Range(0, 2**24 - 1)]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Chunks of an owner's, as (first, count) runs. `request` numbers what is asked for on one connection."""

    request: U64
    lease: Id
    registration: Id
    generation: U64
    content_id: Id
    runs: Annotated[tuple[tuple[int, int], ...], Length(4096)]


@dataclass(frozen=True, slots=True)
class Read(_Wanted):
    """Ask an owner for chunks. It sends those that it has verified, in any order, and those that it verifies soon;
    StillWaiting ends the request if others are left.
    """


@dataclass(frozen=True, slots=True)
class ChunksFollow:
    """The bytes of these chunks follow this frame, back to back. Digests are 0 where the manifest says "none"."""

    request: U64
    chunks: Annotated[tuple[tuple[int, Digest], ...], Length(1024)]  # (index, digest)


@dataclass(frozen=True, slots=True)
class ChunkFollows:
    """The bytes of this chunk follow this frame, and then ChunkDigest: its digest is made while it is sent."""

    request: U64
    chunk: U64


@dataclass(frozen=True, slots=True)
class ChunkDigest:
    """The digest of the chunk whose bytes have just been sent."""

    request: U64
    digest: Digest


@dataclass(frozen=True, slots=True)
class FindMemory:
    """Ask an owner in which process a registration is, to read its memory one-sidedly. Answered by MemoryIs."""

    request: U64
    registration: Id


@dataclass(frozen=True, slots=True)
class MemoryIs:
    """`pid` (in the owner's own namespace), and where that process has this nonce, which no other one has. 0: its memory is
    not to be read, at least not from there.
    """

    request: U64
    pid: Annotated[int, Range(0, 2**31 - 1)]
    address: Address
    nonce: Annotated[bytes, Length(16)]
    on_device: bool = False  # the registration's bytes are on a GPU, where a process' addresses say nothing


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
    byte: this reader is given none, for that reason; "": not all of it is in shared memory. `is_usual`: as of NotThisWay.
    """

    request: U64
    segments: Annotated[tuple[tuple[Address, Address], ...], Length(SEGMENTS_MAX)]
    reason: Text
    is_usual: bool


@dataclass(frozen=True, slots=True)
class FindAllocations:
    """Ask an owner for the GPU's allocations in which a registration is. Answered by AllocationsAre or ReadRefused."""

    request: U64
    registration: Id
    generation: U64


@dataclass(frozen=True, slots=True)
class AllocationsAre:
    """Each allocation's (address, bytes, IPC handle) at the owner, and its process: addresses are as good as handles there.

    `words`: (address, bytes) of the shared memory in which the registration's generation word is; its descriptor follows,
    with one byte. No allocations, and no byte: they cannot be opened from there, for that reason ("": it is not on a GPU).
    `is_usual`: as of NotThisWay.
    """

    request: U64
    process: Annotated[bytes, Length(16)]
    allocations: Annotated[
        tuple[tuple[Address, Address, Annotated[bytes, Length(64)]], ...],
        Length(ALLOCATIONS_MAX),
    ]
    words: tuple[Address, Address]
    reason: Text
    is_usual: bool


@dataclass(frozen=True, slots=True)
class FindAgent:
    """Ask an owner for the NIXL agent by which a registration and its generation word are read. Answered by AgentIs or
    ReadRefused.
    """

    request: U64
    registration: Id
    generation: U64


@dataclass(frozen=True, slots=True)
class AgentIs:
    """The agent's name, its metadata as NIXL has made it, and where the word is. No metadata: there is no agent, and why.
    `device`: the number of the source's GPU on which the chunks are; ON_HOST: they are in host memory. The word always is.
    """

    request: U64
    name: Id
    metadata: Annotated[bytes, Length(AGENT_BYTES_MAX)]
    word: Address
    why_not: Text
    device: Annotated[int, Range(ON_HOST, 2**16)] = ON_HOST


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port by which a worker's memory can be reached. `link`: "ethernet" or "infiniband"."""

    link: Annotated[str, Length(16)]
    gid: Gid
    gbits: Annotated[float, Range(0, 10**6)]  # per second


@dataclass(frozen=True, slots=True)
class QueueCard:
    """What one end of a queue pair must know of the other."""

    number: _U24
    sequence: _U24  # of its first packet
    gid: Gid
    lid: Annotated[int, Range(0, 2**16 - 1)]
    mtu: Annotated[int, Range(1, 5)]  # 256 << mtu - 1 bytes
    reads: Annotated[int, Range(1, 255)]  # that it answers, or makes, at a time


@dataclass(frozen=True, slots=True)
class FindPorts:
    """Ask an owner for its RDMA ports. Answered by PortsAre."""

    request: U64


@dataclass(frozen=True, slots=True)
class PortsAre:
    """An owner's RDMA ports; none: it is not read by RDMA."""

    request: U64
    ports: Annotated[tuple[RdmaPort, ...], Length(16)]


@dataclass(frozen=True, slots=True)
class Pair:
    """Ask an owner for a queue pair to this end, by one of its ports, to read a registration with; it lives as long as the
    connection. Said again with the same card, another registration is asked about. Answered by Paired, NotThisWay or
    ReadRefused.
    """

    request: U64
    registration: Id
    generation: U64
    port: Annotated[int, Range(0, 15)]
    card: QueueCard


@dataclass(frozen=True, slots=True)
class Paired:
    """The owner's end is ready; through it, the owner's nonce can be read at that address. What is located from now on is
    said by ChunksPinned; or, where it has to be copied to the host first, by ChunksFollow and PieceStaged.
    """

    request: U64
    card: QueueCard
    address: Address
    key: U32
    nonce: Annotated[bytes, Length(16)]


@dataclass(frozen=True, slots=True)
class NotThisWay:
    """The owner cannot be read by that transport. `is_usual`: it concerns that registration only, and nothing is wrong."""

    request: U64
    reason: Text
    is_usual: bool


@dataclass(frozen=True, slots=True)
class Locate(_Wanted):
    """As Read, but the bytes are not sent: the owner has them read as that transport does. ChunksLie, or ChunksPinned, says
    where they are.
    """

    transport: Id


@dataclass(frozen=True, slots=True)
class TransportRequest:
    """What only readers by that transport say. Answered by TransportReply, or ReadRefused."""

    request: U64
    transport: Id
    body: Annotated[bytes, Length(TRANSPORT_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class TransportReply:
    """What only owners that are read by that transport say."""

    request: U64
    transport: Id
    body: Annotated[bytes, Length(TRANSPORT_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class ChunksLie:
    """Where these chunks are in the owner's memory: (index, digest, address). What is read there counts only if the word at
    the address `word`, looked at afterwards, is the generation that was asked for.
    """

    request: U64
    chunks: Annotated[tuple[tuple[int, Digest, Address], ...], Length(1024)]
    word: Address


@dataclass(frozen=True, slots=True)
class ChunksPinned:
    """As ChunksLie, for whoever reads by a queue pair: (index, digest, address, remote key), and the word's own key."""

    request: U64
    chunks: Annotated[tuple[tuple[int, Digest, Address, U32], ...], Length(1024)]
    word: Address
    key: U32


@dataclass(frozen=True, slots=True)
class PieceStaged:
    """The next bytes of the chunks that follow (ChunksFollow) are at that address, to be read there under the rule of
    ChunksPinned; they stay until PieceTaken.
    """

    request: U64
    address: Address
    nbytes: Annotated[int, Range(1, 2**32)]
    key: U32
    word: Address
    word_key: U32


@dataclass(frozen=True, slots=True)
class PieceTaken:
    """The piece that was staged for longest is read: its room can have other bytes."""

    request: U64


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


FromReader = (
    Read
    | Locate
    | TransportRequest
    | FindMemory
    | FindSegments
    | FindAllocations
    | FindAgent
    | FindPorts
    | Pair
    | PieceTaken
)
FromOwner = (
    ChunksFollow
    | ChunkFollows
    | ChunkDigest
    | ChunksLie
    | ChunksPinned
    | PieceStaged
    | TransportReply
    | MemoryIs
    | SegmentsAre
    | AllocationsAre
    | AgentIs
    | PortsAre
    | Paired
    | NotThisWay
    | StillWaiting
    | ReadRefused
)
