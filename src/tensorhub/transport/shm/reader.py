"""The shm transport: a reader maps the segments in which a source's tensors are, and copies out of the mapping.

Descriptors come over a Unix socket. A mapping is kept for the next version, since its pages are
found already. An unused mapping is given up after a while, so that it does not hold a source's
freed memory for ever.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from tensorhub.errors import StateError, TransportUnavailable
from tensorhub.memory.strided import Block, gather
from tensorhub.transport.base import Channel, Destination, Unusable
from tensorhub.transport.connected import ConnectedTransport
from tensorhub.transport.generation_words import WORD_BYTES
from tensorhub.transport.kept import KEPT_S, Kept
from tensorhub.transport.one_sided import CALL_BYTES, GROUP_BYTES, OneSidedChannel, Piece, Translated, lanes_here
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.registry import Local
from tensorhub.transport.shm import segments as shm
from tensorhub.transport.shm.messages import DIALECT, SegmentsAre
from tensorhub.transport.shm.owner import ShmOwner
from tensorhub.transport.streaming_digest import HOT_BYTES
from tensorhub.transport.strided_source import StridedSource
from tensorhub.types import Incarnation, Location, RegistrationId


class ShmTransport(ConnectedTransport):
    """Mappings of memory that the source's process has allocated as shared; between processes on one host."""

    dialect = DIALECT
    strides = True

    def __init__(self, local: Local) -> None:
        if (fault := shm.fault_here()) is not None:
            raise TransportUnavailable(fault)
        super().__init__(local)
        self.lanes = lanes_here()
        self._mapped: Kept[tuple[int, int], shm.MappedSegment] = Kept()  # by memfd
        self._sources: Kept[tuple[str, Incarnation, RegistrationId], Mapped] = Kept()  # by address and source

    def reaches(self, here: Location, there: Location) -> bool:
        """Between equal hosts."""
        return here.host == there.host

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
        if not destination.is_strided:
            return OneSidedChannel(client, source, destination)
        return OneSidedChannel(client, source, destination, (source, StridedSource(client, destination)))

    def _find(self, client: ReadClient) -> list[tuple[int, shm.MappedSegment]]:
        """The source's segments, each with its address there."""
        said = client.find(SegmentsAre)
        descriptors = client.connection.receive_descriptors(len(said.segments))
        try:
            places = zip(descriptors, said.segments, strict=True)
            return [(address, self._map(descriptor, nbytes)) for descriptor, (address, nbytes) in places]
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

    def sweep(self) -> None:
        self._mapped.sweep(KEPT_S)
        self._sources.sweep(KEPT_S)
        super().sweep()

    def close(self) -> None:
        """See `Keeping`. A channel's mappings go with the last one that uses them."""
        self._mapped.sweep(0.0)
        self._sources.sweep(0.0)
        super().close()


class Mapped(Translated):
    """See `transport.one_sided.Source`."""

    hot_bytes = 2 * HOT_BYTES  # a copy takes half as long as by cma, and what Python does between two as long
    call_bytes = CALL_BYTES
    group_bytes = GROUP_BYTES

    def __init__(self, segments: Sequence[tuple[int, shm.MappedSegment]]) -> None:
        """Each with its address at the source."""
        super().__init__([(address, segment.nbytes, segment.address) for address, segment in segments])
        self._segments = tuple(segments)  # keeps them mapped

    def copy(self, call: Sequence[Piece]) -> None:
        for here, there, nbytes in call:
            ctypes.memmove(here, self._here(there, nbytes), nbytes)

    def gather(self, made: Sequence[Block], here: int) -> None:
        for block in made:
            gather(self._block_here(block), here)
            here += block.nbytes

    def is_unchanged(self, word: int, generation: int) -> bool:
        """See `Source.is_unchanged`. A process that has died has not written since."""
        return generation != 0 and ctypes.c_uint64.from_address(self._here(word, WORD_BYTES)).value == generation
