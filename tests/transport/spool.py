"""A transport as somebody else would write it: nothing of it is in the package, which finds it by an entry point.

A source copies what is asked for into a file of that reader's, and says where in it; the reader takes it from there.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Sequence

from tensorhub.accesses import Access
from tensorhub.errors import ProtocolError
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import ChunksLie, FromReader, StillWaiting, TransportReply, TransportRequest
from tensorhub.transport.base import Arrival, Channel, Cutter, Destination, Lacking, ReadFailure, ReadRight, Transport
from tensorhub.transport.owner import OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.peers import Peers
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.registry import Local
from tensorhub.types import Endpoint, Location


class SpoolTransport(Transport):
    name = "spool"

    def __init__(self, local: Local) -> None:
        self._peers = Peers(local, self.name)

    def reaches(self, here: Location, there: Location) -> bool:
        return here.host == there.host

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        client = ReadClient(self._peers, self._peers.open(endpoint.address, right, cutter), right, cutter)
        try:
            file = os.open(client.request(b"which file?"), os.O_RDONLY)
        except BaseException:
            client.close()
            raise
        return _SpoolChannel(client, file, destination)

    def serve(self) -> OwnerSide:
        return SpoolOwner()

    def sweep(self) -> None:
        self._peers.sweep()

    def close(self) -> None:
        self._peers.close()


class _SpoolChannel:
    def __init__(self, client: ReadClient, file: int, destination: Destination) -> None:
        self._client = client
        self._file = file
        self._destination = destination
        self._there: deque[tuple[int, int, int]] = deque()  # chunk, digest, offset: in the file, and not taken yet

    def submit(self, chunks: Sequence[int]) -> None:
        self._client.locate(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        with self._client.failures():
            if not self._there:
                match message := self._client.hear():
                    case StillWaiting():
                        return self._client.lacking(message)
                    case ChunksLie():
                        self._client.announced(message.request, [chunk for chunk, _, _ in message.chunks])
                        self._there.extend(message.chunks)
                    case _:
                        raise ProtocolError(f"it is asked where chunks are, and answers {type(message).__name__}")
        chunk, digest, offset = self._there.popleft()
        view = self._destination.buffer(chunk)
        if os.preadv(self._file, [view], offset) != view.nbytes:
            raise ReadFailure("lost", "the file is shorter than its source says")
        return Arrival([(chunk, digest)], 0.0, 0.0)

    def close(self) -> None:
        os.close(self._file)
        self._client.close()


class SpoolOwner(OwnerSide):
    name = "spool"

    def session(self, reader: ServedReader) -> OwnerSession:
        return _SpoolSession(reader)


class _SpoolSession:
    bytes_max = 2**20

    def __init__(self, reader: ServedReader) -> None:
        self._reader = reader
        self._file, self._path = tempfile.mkstemp()
        self._end = 0

    @property
    def refusal(self) -> str:
        return "" if self._reader.lane.is_local else "the file is on another host"

    def answer(self, asked: FromReader) -> None:
        assert isinstance(asked, TransportRequest)
        self._reader.connection.send(TransportReply(asked.request, asked.transport, self._path.encode()))

    def serve(self, request: int, access: Access, memory: ChunkMemory) -> None:
        places: list[tuple[int, int, int]] = []
        for chunk, digest in self._reader.digests_of(access, memory):
            places.append((chunk, digest, self._end))
            self._end += os.pwrite(self._file, memory.buffer(chunk), self._end)
        self._reader.connection.send(ChunksLie(request, tuple(places), 0))

    def close(self) -> None:
        os.close(self._file)
        os.unlink(self._path)
