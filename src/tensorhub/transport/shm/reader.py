"""The shm transport: a reader maps the segments in which a source's tensors are, and copies out of the mapping.

Descriptors come over a Unix socket. A mapping is kept for the next version, since its pages are found already; one that
was not used for `KEPT_S` is given up, so that what a source has freed is not held for ever.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
import threading
import time
from collections.abc import Sequence

from tensorhub.errors import ProtocolError, StateError, TransportUnavailable
from tensorhub.messages import FindSegments, SegmentsAre
from tensorhub.transport.base import Channel, Cutter, Destination, NotShared, ReadRight, Transport, Unusable
from tensorhub.transport.generation_words import WORD_BYTES
from tensorhub.transport.one_sided import CALL_BYTES, GROUP_BYTES, OneSidedChannel, Piece, lanes_here
from tensorhub.transport.owner import OwnerSide
from tensorhub.transport.peers import Peers
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.registry import Local
from tensorhub.transport.shm import segments as shm
from tensorhub.transport.shm.owner import ShmOwner
from tensorhub.transport.streaming_digest import HOT_BYTES
from tensorhub.types import Endpoint, Incarnation, Location, RegistrationId

KEPT_S = 60.0  # of a mapping that nobody reads


class ShmTransport(Transport):
    """Mappings of memory that the source's process has allocated as shared; between processes on one host."""

    name = "shm"

    def __init__(self, local: Local) -> None:
        if (fault := shm.fault_here()) is not None:
            raise TransportUnavailable(fault)
        self._peers = Peers(local, self.name)
        self.lanes = lanes_here()
        self._lock = threading.Lock()
        self._mapped: dict[tuple[int, int], tuple[float, shm.MappedSegment]] = {}  # by memfd: when used last
        # By address, incarnation and registration: when used last.
        self._sources: dict[tuple[str, Incarnation, RegistrationId], tuple[float, Mapped]] = {}

    def reaches(self, here: Location, there: Location) -> bool:
        """Between equal hosts."""
        return here.host == there.host

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect, prove who is who, and map what is to be read. Unusable (NotShared); see `Transport.open`."""
        peer = self._peers.open(endpoint.address, right, cutter)
        client = ReadClient(self._peers, peer, right, cutter)
        try:
            with client.failures():
                source = self._known(endpoint.address, right) or self._learn(endpoint.address, right, client)
        except BaseException:
            client.close()
            raise
        return OneSidedChannel(client, source, right, destination, cutter)

    def _known(self, address: str, right: ReadRight) -> Mapped | None:
        """What is mapped of this registration, if that has been all that was read: it stays where it is until its end."""
        key = (address, right.incarnation, right.registration)
        with self._lock:
            _, source = self._sources.pop(key, (0.0, None))
            if source is None or source.is_short:
                return None
            self._sources[key] = time.monotonic(), source
        return source

    def _learn(self, address: str, right: ReadRight, client: ReadClient) -> Mapped:
        source = Mapped(self._find(client, right))
        with self._lock:
            self._sources[address, right.incarnation, right.registration] = time.monotonic(), source
        return source

    def _find(self, client: ReadClient, right: ReadRight) -> list[tuple[int, shm.MappedSegment]]:
        """The source's segments, each with its address there."""
        message = client.ask(FindSegments(0, right.registration, right.generation))
        if not isinstance(message, SegmentsAre):
            raise ProtocolError(f"it is asked for its segments, and answers {type(message).__name__}")
        if message.reason:
            raise (NotShared if message.is_usual else Unusable)(message.reason)
        if not message.segments:
            raise NotShared("its tensors are not in shared memory: allocate them by tensorhub.shared_empty_like")
        descriptors = client.connection.receive_descriptors(len(message.segments))
        try:
            places = zip(descriptors, message.segments, strict=True)
            return [(address, self._map(descriptor, nbytes)) for descriptor, (address, nbytes) in places]
        except StateError as error:
            raise Unusable(str(error)) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map(self, descriptor: int, nbytes: int) -> shm.MappedSegment:
        """The mapping that there is of it, or a new one."""
        now, status = time.monotonic(), os.fstat(descriptor)
        key = (status.st_dev, status.st_ino)
        with self._lock:
            _, mapped = self._mapped.get(key, (now, None))
            if mapped is None or mapped.nbytes != nbytes:
                mapped = shm.MappedSegment(descriptor, nbytes)
            self._mapped[key] = (now, mapped)
        return mapped

    def serve(self) -> OwnerSide:
        """See `Transport.serve`."""
        return ShmOwner()

    def sweep(self) -> None:
        """See `Keeping`."""
        before = time.monotonic() - KEPT_S
        with self._lock:
            self._mapped = {key: each for key, each in self._mapped.items() if each[0] >= before}
            self._sources = {key: each for key, each in self._sources.items() if each[0] >= before}
        self._peers.sweep()

    def close(self) -> None:
        """See `Keeping`."""
        with self._lock:
            self._mapped, self._sources = {}, {}
        self._peers.close()


class Mapped:
    """See `transport.one_sided.Source`."""

    hot_bytes = 2 * HOT_BYTES  # a copy takes half as long as by cma, and what Python does between two as long
    call_bytes = CALL_BYTES
    group_bytes = GROUP_BYTES

    def __init__(self, segments: Sequence[tuple[int, shm.MappedSegment]]) -> None:
        """Each with its address at the source."""
        self._segments = sorted(segments, key=lambda each: each[0])
        self._starts = [start for start, _ in self._segments]
        self.is_short = False  # something was looked for that is in none of them

    def __repr__(self) -> str:
        return f"<Mapped, {len(self._segments)} segments>"

    def copy(self, call: Sequence[Piece]) -> None:
        """See `Source.copy`."""
        for here, there, nbytes in call:
            ctypes.memmove(here, self._here(there, nbytes), nbytes)

    def is_unchanged(self, word: int, generation: int) -> bool:
        """See `Source.is_unchanged`. A process that has died has not written since."""
        return generation != 0 and ctypes.c_uint64.from_address(self._here(word, WORD_BYTES)).value == generation

    def _here(self, there: int, nbytes: int) -> int:
        """Where that is mapped. OSError: nowhere."""
        place = bisect.bisect_right(self._starts, there) - 1
        if place >= 0:
            start, segment = self._segments[place]
            if there + nbytes <= start + segment.nbytes:
                return segment.address + there - start
        self.is_short = True
        raise OSError(errno.EFAULT, "it is in no segment that was shared")
