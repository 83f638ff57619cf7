"""The cma transport's channel: the owner says where chunks lie, and the reader copies them out of its memory by itself.

Asking, waiting, refusing and ending are as over tcp, on the two workers' own connection. What was copied is named only if
the owner's nonce and the generation word, looked at afterwards, are as they must be (R3); so no fence waits for a reader.

Everything that the source says is hostile. An address that it names is only ever read from, in the process that has its
nonce, into the destination's own views, with the lengths of the reader's own manifest: a lie gives an error, or bytes
without their digest.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import xxhash

from tensorhub.errors import ProtocolError, TransportUnavailable
from tensorhub.messages import ChunksLie, FindMemory, Locate, MemoryIs, StillWaiting
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.runtime.asking import Asking, Failures, connect
from tensorhub.transport import cma
from tensorhub.transport.base import Arrival, Channel, Cutter, Destination, Lacking, ReadFailure, ReadRight, Unusable
from tensorhub.transport.registry import Local
from tensorhub.types import Endpoint, Location

HOT_BYTES = 2**20  # copied by one call and then digested: they are still in the nearest cache
SMALL_BYTES = 4 * 2**20  # whoever wants more at a time does not get along with many small calls
LANES_MAX = 4  # of one source: more would take a trainer's cores for little more memory bandwidth


class CmaTransport:
    """process_vm_readv; between processes of one user on one host."""

    name = "cma"

    def __init__(self, local: Local) -> None:
        if (fault := cma.fault_here()) is not None:
            raise TransportUnavailable(fault)
        self._local = local
        self.lanes = min(LANES_MAX, len(os.sched_getaffinity(0)))

    def reaches(self, here: Location, there: Location) -> bool:
        """Between equal hosts."""
        return here.host == there.host

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect, prove who is who, and find the process. Unusable if it is out of reach; see `Transport.open`."""
        connection, is_local = connect(self._local, endpoint.address, right, cutter)
        try:
            if not is_local:
                raise Unusable("it is connected from another host: workers on different hosts need different Location.host")
            with Failures(connection):
                header = _find(connection, Asking(connection, right))
            try:
                is_there = cma.Look(header).is_there()
            except OSError as error:
                raise Unusable(cma.why_not(error)) from error
            if not is_there:
                raise Unusable("its process is another one here: workers in different pid namespaces need different hosts")
        except BaseException:
            cutter.detach()
            connection.close()
            raise
        return CmaChannel(connection, header, right, destination, cutter)


def _find(connection: BlockingConnection, asking: Asking) -> cma.Header:
    connection.send(FindMemory(0))
    message = asking.hear()
    if not isinstance(message, MemoryIs):
        raise ProtocolError(f"it is asked for its memory, and answers {type(message).__name__}")
    if not message.pid or len(message.nonce) != cma.NONCE_BYTES:
        raise Unusable("it lets nobody read its memory from here: to it, this is another host")
    return cma.Header(message.pid, message.address, message.nonce)


class _Located(NamedTuple):
    chunk: int
    digest: int
    address: int
    word: int


class _Digests:
    """Those of a group's chunks, made of each piece as it is copied, while it is in the nearest cache."""

    def __init__(self, group: list[_Located], views: list[memoryview]) -> None:
        self.made: dict[int, int] = {}
        self.seconds = 0.0
        self._left = deque([(located.chunk, view) for located, view in zip(group, views, strict=True) if view.nbytes])
        self._hash = xxhash.xxh3_64()  # of the first chunk that is left, up to `_at`
        self._at = 0

    def go_on(self, sizes: Sequence[int]) -> None:
        """So many bytes more have been copied, none of them across the end of a chunk."""
        started = time.perf_counter()
        for size in sizes:
            chunk, view = self._left[0]
            self._hash.update(view[self._at : self._at + size])
            self._at += size
            if self._at == view.nbytes:
                self.made[chunk] = self._hash.intdigest()
                self._hash.reset()
                self._left.popleft()
                self._at = 0
        self.seconds += time.perf_counter() - started


class CmaChannel:
    """See `transport.base.Channel`. Several threads may drive it."""

    def __init__(
        self,
        connection: BlockingConnection,
        header: cma.Header,
        right: ReadRight,
        destination: Destination,
        cutter: Cutter,
    ) -> None:
        self._connection = connection
        self._header = header
        self._right = right
        self._asking = Asking(connection, right)
        self._destination = destination
        self._cutter = cutter
        self._turn = threading.Lock()  # guards hearing and what was heard: one listens, the others wait for what it hears
        self._located: deque[_Located] = deque()  # and not taken yet

    def __repr__(self) -> str:
        return f"<CmaChannel to process {self._header.pid}, {self._asking!r}>"

    def submit(self, chunks: Sequence[int]) -> None:
        self._asking.ask(Locate, chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        started = time.perf_counter()
        with self._turn:
            if not self._located:
                if self._asking.is_answered:
                    return Arrival((), time.perf_counter() - started, 0.0)
                with Failures(self._connection):
                    message = self._asking.hear()
                    if isinstance(message, StillWaiting):
                        return self._asking.lacking(message)
                    self._enter(message)
            group, views = self._next_group(bytes_max)
        first_byte = time.perf_counter()
        digests = _Digests(group, views) if self._destination.is_digested and bytes_max <= SMALL_BYTES else None
        self._copy(group, views, digests)
        seconds = time.perf_counter() - first_byte
        chunks = [(located.chunk, located.digest) for located in group]
        if digests is None:
            return Arrival(chunks, first_byte - started, seconds)
        return Arrival(chunks, first_byte - started, seconds - digests.seconds, digests.made, digests.seconds)

    def _enter(self, message: object) -> None:
        if not isinstance(message, ChunksLie):
            raise ProtocolError(f"a Locate is answered with {type(message).__name__}")
        self._asking.announced(message.request, [chunk for chunk, _, _ in message.chunks])
        self._located.extend([_Located(*chunk, message.word) for chunk in message.chunks])

    def _next_group(self, bytes_max: int) -> tuple[list[_Located], list[memoryview]]:
        """Take what is copied next, under one word, and where to: one chunk at least, then up to `bytes_max`."""
        group: list[_Located] = []
        views: list[memoryview] = []
        while self._located and self._located[0].word == (group or self._located)[0].word:
            view = self._destination.buffer(self._located[0].chunk)
            bytes_max -= view.nbytes
            if group and bytes_max < 0:
                break
            group.append(self._located.popleft())
            views.append(view)
        return group, views

    def _copy(self, group: list[_Located], views: list[memoryview], digests: _Digests | None) -> None:
        copied, pid = 0, self._header.pid
        here = self._destination.address
        places = zip(group, views, strict=True)
        pieces = [cma.Piece(here(located.chunk), located.address, view.nbytes) for located, view in places]
        try:
            for call in cma.cut_up(pieces, cma.CALL_BYTES if digests is None else HOT_BYTES):
                if self._cutter.is_cut:
                    raise ReadFailure("lost", "the read was given up", bytes_discarded=copied)
                cma.copy(pid, call)
                copied += sum(piece.nbytes for piece in call)
                if digests is not None:
                    digests.go_on([piece.nbytes for piece in call])
            is_valid = cma.Look(self._header).is_unchanged(group[0].word, self._right.generation)
        except OSError as error:
            text = f"the source's memory cannot be read (any more): {error.strerror}"
            raise ReadFailure("lost", text, bytes_discarded=copied) from error
        if not is_valid:
            raise ReadFailure("refused", "the memory has changed its generation", bytes_discarded=copied)

    def close(self) -> None:
        self._cutter.detach()
        self._connection.close()
