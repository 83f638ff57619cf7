"""A transport as somebody else would write it: nothing of it is in the package, which finds it by
an entry point.

A source copies what is asked for into a file of that reader's, and says where in it; the reader
takes it from there.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from tensorhub.errors import ProtocolError
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import ChunksLie, StillWaiting
from tensorhub.model.accesses import Access
from tensorhub.transport.base import Arrival, Channel, Destination, Lacking, ReadFailure
from tensorhub.transport.connected import ConnectedTransport, ReadClient
from tensorhub.transport.dialect import Dialect, Find
from tensorhub.transport.owner import OwnerSession, OwnerSide, ServedReader
from tensorhub.types import Length, Location


@dataclass(frozen=True, slots=True)
class FileIs:
    """What is located from now on is copied into that file."""

    path: Annotated[str, Length(4096)]


DIALECT = Dialect("spool", from_reader={Find: 1}, from_owner={FileIs: 2})


class SpoolTransport(ConnectedTransport):
    dialect = DIALECT

    def reaches(self, here: Location, there: Location) -> bool:
        return here.host == there.host

    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        said = client.find(FileIs)
        return _SpoolChannel(client, os.open(said.path, os.O_RDONLY), destination)

    def serve(self) -> OwnerSide:
        return SpoolOwner()


class _SpoolChannel:
    def __init__(self, client: ReadClient, file: int, destination: Destination) -> None:
        self._client = client
        self._file = file
        self._destination = destination
        # chunk, digest, offset: in the file, and not taken yet
        self._there: deque[tuple[int, int, int]] = deque()

    def submit(self, chunks: Sequence[int]) -> None:
        self._client.locate(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        with self._client.failures():
            if not self._there:
                match message := self._client.hear():
                    case StillWaiting():
                        return self._client.lacking(message)
                    case ChunksLie():
                        self._client.announced(
                            message.request, [chunk for chunk, _, _ in message.chunks]
                        )
                        self._there.extend(message.chunks)
                    case _:
                        raise ProtocolError(
                            f"it is asked where chunks are, and answers {type(message).__name__}"
                        )
        chunk, digest, offset = self._there.popleft()
        view = self._destination.buffer(chunk)
        if os.preadv(self._file, [view], offset) != view.nbytes:
            raise ReadFailure("lost", "the file is shorter than its source says")
        return Arrival([(chunk, digest)], 0.0, 0.0)

    def close(self) -> None:
        os.close(self._file)
        self._client.close()


class SpoolOwner(OwnerSide):
    dialect = DIALECT

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

    def answer(self, request: int, asked: Find) -> None:
        self._reader.connection.send(DIALECT.reply(request, FileIs(self._path)))

    def serve(self, request: int, access: Access, memory: ChunkMemory) -> None:
        places: list[tuple[int, int, int]] = []
        for chunk, digest in self._reader.digests_of(access, memory):
            places.append((chunk, digest, self._end))
            self._end += os.pwrite(self._file, memory.buffer(chunk), self._end)
        self._reader.connection.send(ChunksLie(request, tuple(places), 0))

    def close(self) -> None:
        os.close(self._file)
        os.unlink(self._path)
