"""The shm transport: a reader maps the segments in which a source's tensors are, and copies out of
the mapping.

Descriptors come over a Unix socket. A mapping is kept for the next version, since its pages are
found already. An unused mapping is given up after a while, so that it does not hold a source's
freed memory for ever.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tensorhub.errors import StateError, TransportUnavailable
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.strided import Block, gather
from tensorhub.messages import Address
from tensorhub.transport import segments as shm
from tensorhub.transport.base import Channel, Destination, NotShared, Unusable
from tensorhub.transport.connected import ReadClient
from tensorhub.transport.one_sided import (
    OneSidedOwner,
    OneSidedSession,
    Piece,
    SameHostTransport,
    Translated,
    dialect_of,
    lanes_here,
    open_channel,
)
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.peers import Kept
from tensorhub.transport.registry import Local
from tensorhub.transport.segments import segments_of
from tensorhub.transport.streaming_digest import HOT_BYTES
from tensorhub.types import Incarnation, Length, RegistrationId

SEGMENTS_MAX = 64  # of one registration; the kernel passes 253 descriptors at a time


@dataclass(frozen=True, slots=True)
class SegmentsAre:
    """The shared memory in which the registration and its generation word are: (address, bytes) at
    the owner. One byte with the segments' descriptors follows, in this order.
    """

    segments: Annotated[tuple[tuple[Address, Address], ...], Length(SEGMENTS_MAX)]


DIALECT = dialect_of("shm", SegmentsAre)


class _ShmSession(OneSidedSession):
    def find(
        self, registration: RegistrationId, memory: ChunkMemory, word: tuple[int, int]
    ) -> tuple[object, Sequence[int]]:
        """What the registration and its generation word are in."""
        segments = segments_of([*memory.places, word])
        if not self._connection.passes_descriptors or not segments or len(segments) > SEGMENTS_MAX:
            raise NotShared(
                "its tensors are not in shared memory: allocate them by tensorhub.shared_empty_like"
            )
        self._check_given()
        said = SegmentsAre(tuple([(each.address, each.nbytes) for each in segments]))
        return said, [segment.descriptor for segment in segments]


class ShmOwner(OneSidedOwner):
    """It hands over the descriptors of the shared memory in which a registration lies."""

    dialect = DIALECT
    sessions = _ShmSession
    shares_memory = True


class ShmTransport(SameHostTransport):
    """Mappings of memory that the source's process has allocated as shared; between processes on
    one host.
    """

    dialect = DIALECT

    def __init__(self, local: Local) -> None:
        if (fault := shm.fault_here()) is not None:
            raise TransportUnavailable(fault)
        super().__init__(local)
        self.lanes = lanes_here()
        self._mapped: Kept[tuple[int, int], shm.MappedSegment] = Kept()  # by memfd
        # by address and source
        self._sources: Kept[tuple[str, Incarnation, RegistrationId], Mapped] = Kept()
        self._kept = self._mapped, self._sources

    def serve(self) -> OwnerSide:
        return ShmOwner()

    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """Map the registration's segments. A registration's memory does not move, so its mappings
        are used again, unless a read has met a place that they lack.
        """
        key = (client.peer.address, client.right.incarnation, client.right.registration)
        source = self._sources.find(key, lambda known: not known.is_short)
        if source is None:
            source = Mapped(self._find(client))
            self._sources.put(key, source)
        return open_channel(client, source, destination)

    def _find(self, client: ReadClient) -> list[tuple[int, shm.MappedSegment]]:
        """The source's segments, each with its address there."""
        said = client.find(SegmentsAre)
        descriptors = client.connection.receive_descriptors(len(said.segments))
        try:
            places = zip(descriptors, said.segments, strict=True)
            return [
                (address, self._map(descriptor, nbytes)) for descriptor, (address, nbytes) in places
            ]
        except StateError as error:
            raise Unusable(str(error)) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, descriptor: int, nbytes: int) -> shm.MappedSegment:
        """The mapping that there is of it, or a new one."""
        status = os.fstat(descriptor)
        return self._mapped.find_or_make(
            (status.st_dev, status.st_ino),
            lambda known: known.nbytes == nbytes,
            lambda: shm.MappedSegment(descriptor, nbytes),
        )


class Mapped(Translated):
    """See `transport.one_sided.Source`."""

    # a copy takes half as long as by cma, and what Python does between two as long
    hot_bytes = 2 * HOT_BYTES

    def __init__(self, segments: Sequence[tuple[int, shm.MappedSegment]]) -> None:
        """Each with its address at the source."""
        super().__init__(
            [(address, segment.nbytes, segment.address) for address, segment in segments]
        )
        self._segments = tuple(segments)  # keeps them mapped

    def copy(self, call: Sequence[Piece]) -> None:
        for here, there, nbytes in call:
            ctypes.memmove(here, self._here(there, nbytes), nbytes)

    def gather(self, made: Sequence[Block], here: int) -> None:
        for block in made:
            gather(self._block_here(block), here)
            here += block.nbytes
