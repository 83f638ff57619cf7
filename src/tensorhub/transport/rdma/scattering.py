"""Chunks of many pieces at a reader by rdma: bytes that have landed in a buffer, and are proved, go
on to their places.

The parts of a chunk come in their order, one chunk after the other. Digests are made of bytes in
one piece. Not responsible for the proof (`rdma.reads`).
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Generator

from tensorhub.cuda.device import Device, DeviceBytes
from tensorhub.memory.addresses import address_of
from tensorhub.transport.base import Destination, Scattering
from tensorhub.transport.staging import Staging
from tensorhub.transport.streaming_digest import PiecewiseDigest


class Scatter:
    """Of one channel, whose destination is strided."""

    def __init__(self, destination: Destination) -> None:
        self.made: dict[int, int] = {}  # digests of whole chunks
        self.digest_s = 0.0  # what making those took
        self._destination = destination
        self._calls: Generator[list[memoryview]] | None = None  # of the present chunk, in host memory
        self._views: deque[memoryview] = deque()  # of it: room for what comes next
        self._digest = PiecewiseDigest()
        self._room: DeviceBytes | None = None  # of a device: for one chunk

    def __repr__(self) -> str:
        return f"<Scatter of {len(self.made)} chunks>"

    def put(self, staging: Staging | None, chunk: int, offset: int, source: int, nbytes: int) -> None:
        """The chunk's next bytes are at that address of the host. `staging`: for its device. StateError: that has failed."""
        device = self._destination.device
        if staging is not None and device is not None:
            self._put_on(device, staging, chunk, offset, source, nbytes)
            return
        if not offset:
            self._calls, self._digest = self._destination.incoming(chunk), PiecewiseDigest()
        assert self._calls is not None
        end = offset + nbytes
        while nbytes:
            if not self._views:
                self._views.extend(next(self._calls))
            view = self._views.popleft()
            if view.nbytes > nbytes:
                self._views.appendleft(view[nbytes:])
                view = view[:nbytes]
            ctypes.memmove(address_of(view), source, view.nbytes)
            source, nbytes = source + view.nbytes, nbytes - view.nbytes
            if self._destination.is_digested:
                self._digest.go_on([view])
        if end == self._destination.sizes[chunk]:
            next(self._calls, None)  # the last of it goes where it belongs
            if self._destination.is_digested:
                self.made[chunk] = self._digest.made
                self.digest_s += self._digest.seconds

    def _put_on(self, device: Device, staging: Staging, chunk: int, offset: int, source: int, nbytes: int) -> None:
        if self._room is None:
            self._room = device.allocate(max(self._destination.sizes))
        at, size = self._room.address, self._destination.sizes[chunk]
        staging.scatter([(at + offset, source, nbytes)])
        if offset + nbytes == size:
            assert isinstance(self._destination, Scattering)
            self.made |= self._destination.take_in([chunk], at)

    def close(self) -> None:
        """Nothing is written afterwards."""
        if self._calls is not None:
            self._calls.close()
