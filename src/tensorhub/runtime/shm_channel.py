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
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.runtime.asking import Asking, Failures, connect
from tensorhub.runtime.hot import HOT_BYTES
from tensorhub.runtime.one_sided import OneSidedChannel, lanes_here
from tensorhub.transport import shm
from tensorhub.transport.base import Channel, Cutter, Destination, NotShared, ReadRight, Unusable
from tensorhub.transport.cma import CALL_BYTES, GROUP_BYTES, WORD_BYTES, Piece
from tensorhub.transport.registry import Local
from tensorhub.types import Endpoint, Location

KEPT_S = 60.0  # of a mapping that nobody reads


class ShmTransport:
    """Mappings of memory that the source's process has allocated as shared; between processes on one host."""

    name = "shm"

    def __init__(self, local: Local) -> None:
        if (fault := shm.fault_here()) is not None:
            raise TransportUnavailable(fault)
        self._local = local
        self.lanes = lanes_here()
        self._lock = threading.Lock()
        self._mapped: dict[tuple[int, int], tuple[float, shm.MappedSegment]] = {}  # by memfd: when used last

    def reaches(self, here: Location, there: Location) -> bool:
        """Between equal hosts."""
        return here.host == there.host

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect, prove who is who, and map what is to be read. Unusable (NotShared); see `Transport.open`."""
        connection, _ = connect(self._local, endpoint.address, right, cutter)
        try:
            with Failures(connection):
                source = Mapped(self._find(connection, right))
        except BaseException:
            cutter.detach()
            connection.close()
            raise
        return OneSidedChannel(connection, source, right, destination, cutter)

    def _find(self, connection: BlockingConnection, right: ReadRight) -> list[tuple[int, shm.MappedSegment]]:
        """The source's segments, each with its address there."""
        connection.send(FindSegments(0, right.registration, right.generation))
        message = Asking(connection, right).hear()
        if not isinstance(message, SegmentsAre):
            raise ProtocolError(f"it is asked for its segments, and answers {type(message).__name__}")
        if not message.segments:
            raise NotShared("its tensors are not in shared memory: allocate them by tensorhub.shared_empty_like")
        descriptors = connection.receive_descriptors(len(message.segments))
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

    def sweep(self) -> None:
        """Give up mappings that were not used for a while. Called now and then."""
        before = time.monotonic() - KEPT_S
        with self._lock:
            for key in [key for key, (used, _) in self._mapped.items() if used < before]:
                del self._mapped[key]


class Mapped:
    """See `one_sided.Source`."""

    hot_bytes = 2 * HOT_BYTES  # a copy takes half as long as by cma, and what Python does between two as long
    call_bytes = CALL_BYTES
    group_bytes = GROUP_BYTES

    def __init__(self, segments: Sequence[tuple[int, shm.MappedSegment]]) -> None:
        """Each with its address at the source."""
        self._segments = sorted(segments, key=lambda each: each[0])
        self._starts = [start for start, _ in self._segments]

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
        raise OSError(errno.EFAULT, "it is in no segment that was shared")
