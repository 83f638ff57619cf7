"""What a reader by rdma and an owner say to each other: how to set up a queue pair, and where to
read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tensorhub.messages import Address, Digest
from tensorhub.transport.dialect import Dialect, Find
from tensorhub.transport.generation_words import NONCE_BYTES
from tensorhub.types import Length, Range

GID_BYTES = 16
PORTS_MAX = 16  # of one worker

Gid = Annotated[bytes, Length(GID_BYTES)]
U24 = Annotated[int, Range(0, 2**24 - 1)]
U32 = Annotated[int, Range(0, 2**32 - 1)]


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port by which a worker's memory can be reached. `link`: "ethernet" or "infiniband"."""

    link: Annotated[str, Length(16)]
    gid: Gid
    gbits: Annotated[float, Range(0, 10**6)]  # per second


@dataclass(frozen=True, slots=True)
class QueueCard:
    """What one end of a queue pair must know of its peer."""

    number: U24
    sequence: U24  # of its first packet
    gid: Gid
    lid: Annotated[int, Range(0, 2**16 - 1)]
    mtu: Annotated[int, Range(1, 5)]  # 256 << mtu - 1 bytes
    reads: Annotated[int, Range(1, 255)]  # that it answers, or makes, at a time


# --------------------------------------------------------------------------------------------------
# from a reader


@dataclass(frozen=True, slots=True)
class FindPorts:
    """Ask an owner for its RDMA ports. Answered by PortsAre."""


@dataclass(frozen=True, slots=True)
class Pair(Find):
    """Ask an owner for a queue pair to this end, by one of its ports, to read a registration with.
    The queue pair lives as long as the connection. Sent again with an unchanged card, it asks for
    another registration. Answered by Paired.
    """

    port: Annotated[int, Range(0, PORTS_MAX - 1)]
    card: QueueCard


@dataclass(frozen=True, slots=True)
class PieceTaken:
    """The piece that was staged first is read: its buffer may be used again. Not answered."""


# --------------------------------------------------------------------------------------------------
# from an owner


@dataclass(frozen=True, slots=True)
class PortsAre:
    """The owner's RDMA ports."""

    ports: Annotated[tuple[RdmaPort, ...], Length(PORTS_MAX)]


@dataclass(frozen=True, slots=True)
class Paired:
    """The owner's end is ready, and the owner's nonce can be read through it at that address. A
    Locate is answered by ChunksPinned from now on; or by ChunksFollow and PieceStaged, where chunks
    are copied to the host first.
    """

    card: QueueCard
    address: Address
    key: U32
    nonce: Annotated[bytes, Length(NONCE_BYTES)]


@dataclass(frozen=True, slots=True)
class ChunksPinned:
    """As ChunksLie, with what a device needs besides: (index, digest, address, remote key), and the
    word's own key.
    """

    chunks: Annotated[tuple[tuple[int, Digest, Address, U32], ...], Length(1024)]
    word: Address
    key: U32


@dataclass(frozen=True, slots=True)
class PieceStaged:
    """The next bytes of the chunks that were announced (ChunksFollow) are at that address, to be
    read there as of ChunksPinned. They stay until PieceTaken.
    """

    address: Address
    nbytes: Annotated[int, Range(1, 2**32)]
    key: U32
    word: Address
    word_key: U32


DIALECT = Dialect(
    "rdma",
    from_reader={FindPorts: 1, Pair: 2, PieceTaken: 3},
    from_owner={PortsAre: 4, Paired: 5, ChunksPinned: 6, PieceStaged: 7},
)
