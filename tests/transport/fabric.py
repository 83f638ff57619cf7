"""A fabric without devices: its queue pairs copy within this process, where memory is registered,
and fail as real ones.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from tensorhub.transport.rdma.messages import QueueCard
from tensorhub.transport.rdma.owner import RdmaOwner
from tensorhub.transport.rdma.ports import Move, Port
from tensorhub.transport.rdma.queues import Fabric, Queue, ReaderQueue
from tensorhub.transport.rdma.verbs import Device, Keys, Landing, Registered, Spanned

GID = bytes(10) + b"\xff\xff\x0a\x00\x00\x01"
PORT = Port("fake0", 1, "ethernet", 1, GID, 100.0, "ACTIVE")
FLUSHED, ACCESS_ERROR, NO_ANSWER = 5, 10, 12


class _Region:
    """Registered memory. Keys are numbers that are never used twice."""

    known: dict[int, tuple[int, int, int]] = {}  # noqa: RUF012 - (address, bytes, shift) by key: it is all one process
    last = 1000

    def __init__(self, address: int, nbytes: int, shift: int = 0) -> None:
        _Region.last += 1
        self.lkey = self.rkey = _Region.last
        self.known[self.lkey] = address, nbytes, shift

    @classmethod
    def find(cls, key: int, address: int, nbytes: int) -> int | None:
        """Where that is; None: not in what is registered under that key."""
        start, size, shift = cls.known.get(key, (0, 0, 0))
        found = address - shift
        return found if start <= found and found + nbytes <= start + size else None

    def close(self) -> None:
        self.known.pop(self.lkey, None)


class FakeRegistered(Registered):
    def __init__(self, memory: Spanned) -> None:
        super().__init__(None, memory)
        self._memory = weakref.ref(memory)

    def _registered(self, start: int, size: int) -> tuple[Any, Keys]:
        shift = 0
        if self._device is not None:
            if getattr(self._device, "unreachable", ""):
                raise OSError(14, f"{self._device.name} and this device do not reach each other")
            shift = 100 - start  # as if it began within a dma-buf
        region = _Region(start, size, shift)
        return region, Keys(region.lkey, region.rkey, shift)


class _Landing(Landing):
    def __init__(self, nbytes: int) -> None:
        self._bytes = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._bytes))
        self._region = _Region(self.address, nbytes)
        self.key = self._region.lkey


class _Device(Device):
    def __init__(self) -> None:
        self.name, self.lock = "fake0", threading.RLock()
        self.reads_made = self.reads_answered = self.depth = 16
        self._memories = weakref.WeakKeyDictionary()
        self._pages: dict[int, Any] = {}
        self.fault: OSError | None = None  # of each registration from now on
        self.before_read: Callable[[], object] = lambda: None  # each work request

    def keys(self, memory: Spanned, address: int, nbytes: int) -> Keys:
        if self.fault is not None:
            raise self.fault
        return self._memories.setdefault(memory, FakeRegistered(memory)).keys(address, nbytes)

    def page_key(self, address: int) -> int:
        page = address - address % mmap.PAGESIZE
        found = self._pages.setdefault(page, None) or _Region(page, mmap.PAGESIZE)
        self._pages[page] = found
        return int(found.rkey)

    def landing(self, nbytes: int) -> Landing:
        return _Landing(nbytes)

    def close(self) -> None:
        for registered in self._memories.values():
            registered.close()
        for page in self._pages.values():
            page.close()


_queues: dict[int, Queue] = {}  # that are open, by their number


class _Queue(Queue):
    def _make(self) -> None:
        number = max(_queues, default=100) + 1
        _queues[number] = self
        self.card = QueueCard(number, 7, self.port.gid, 0, 5, 16)
        self.is_connected = False

    def connect(self, theirs: QueueCard) -> None:
        self.theirs, self.is_connected = theirs.number, True

    def close(self) -> None:
        _queues.pop(self.card.number, None)


class _ReaderQueue(_Queue, ReaderQueue):
    """Reads at once; each completion waits to be polled for."""

    is_reader = True

    def _make(self) -> None:
        super()._make()
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK)
        self._completed: list[tuple[int, int]] = []
        self._has_failed = False

    def post(
        self, moves: Sequence[Move], first: int, signaled: frozenset[int], fenced: frozenset[int]
    ) -> None:
        for number, move in enumerate(moves, first):
            assert isinstance(self.device, _Device)
            self.device.before_read()
            status = self._read(move)
            self._has_failed = self._has_failed or status != 0
            if status or number in signaled:
                self._completed.append((number, status))
        if self._completed:
            os.eventfd_write(self.descriptor, 1)

    def _read(self, move: Move) -> int:
        theirs = _queues.get(self.theirs)
        if self._has_failed:
            return FLUSHED
        if not isinstance(theirs, _Queue) or getattr(theirs, "theirs", None) != self.card.number:
            return NO_ANSWER
        there = _Region.find(move.there_key, move.there, move.nbytes)
        if there is None:
            return ACCESS_ERROR
        here = _Region.find(move.here_key, move.here, move.nbytes)
        assert here is not None
        ctypes.memmove(here, there, move.nbytes)
        return 0

    def fail(self) -> None:
        self._has_failed = True

    def poll(self) -> list[tuple[int, int]]:
        found, self._completed = self._completed, []
        return found

    def arm(self) -> None:
        pass

    def take_event(self) -> None:
        os.eventfd_read(self.descriptor)

    def close(self) -> None:
        if self.card.number in _queues:
            os.close(self.descriptor)
        super().close()


class FakeFabric(Fabric):
    """One device with one port."""

    def __init__(self, port: Port = PORT) -> None:
        super().__init__([port])
        self.only = _Device()

    def device(self, port: Port) -> Device:
        return self._devices.setdefault(port.device, self.only)

    def reader(self, port: Port) -> ReaderQueue:
        return _ReaderQueue(self.device(port), port)

    def source(self, port: Port) -> Queue:
        return _Queue(self.device(port), port)


def open_queues() -> int:
    """How many ends of queue pairs are not closed."""
    return len(_queues)


class OwnRdma(RdmaOwner):
    """An owner's side whose ports are its own: it closes them."""

    def close(self) -> None:
        self.fabric.close()
