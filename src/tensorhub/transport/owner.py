"""What a transport is, as the owner of the memory sees it.

A worker has one `OwnerSide` of each of its transports, and that one has a `OwnerSession` for each reader's connection:

    side = transport.serve()             once per worker
    side.endpoint(...)                   what others are told to connect to
    session = side.session(reader)       a reader has asked for something that is this transport's
    session.answer(request, asked)       the reader has said something of the transport's own dialect
    session.serve(request, access, ...)  the reader wants these chunks, and may touch them until this returns
    session.close()                      the reader is gone, or has to go

Semantics that every owner side keeps:

1. It touches memory only within `serve`, or leaves it to readers that look at the generation word afterwards (R3).
2. The digests that it says are those of `ServedReader.digests_of`.
3. What a reader says is hostile: it is checked before it is used, and costs nobody else anything.
4. When `forget` has returned, nobody reads that registration's memory with this side's help any more.

Responsible for the contract only. Who may read, accesses, digests and the connection are the worker's, and come through
`OwnedMemory` and `ServedReader`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from tensorhub.accesses import Access, Refusal, Wait
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import FromReader
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport.dialect import Dialect
from tensorhub.transport.generation_words import Header
from tensorhub.types import READ_ONLY, ContentId, Incarnation, RegistrationId


class CannotServe(Exception):
    """The memory is held, and this transport cannot have it read. The reader is told why."""


class NotOpen(Exception):
    """The memory is not open under that generation. The reader is refused."""


class Endable(Protocol):
    """What can be ended from any thread."""

    def shutdown(self) -> None: ...


class Lane:
    """One reader's connection at its owner, as others see it."""

    __slots__ = ("connection", "is_local", "is_stopped", "not_given", "reader", "rests_from", "secret")

    def __init__(self, connection: Endable, *, is_local: bool = False, not_given: str = "") -> None:
        self.connection = connection
        self.not_given = not_given  # why its process may not map this one's memory; "": it may, if its token says so, too
        self.is_local = is_local  # it comes from this host: addresses here are of use there, and told nobody else
        self.reader: Incarnation | None = None  # known, and proved, after the handshake
        self.secret: bytes | None = None  # by which it has proved that
        self.rests_from: float | None = None  # since when nothing is asked; None: something is
        self.is_stopped = False  # it must begin nothing any more

    def __repr__(self) -> str:
        return f"<Lane to {self.reader or 'nobody yet'}{', stopped' if self.is_stopped else ''}>"

    @property
    def is_read_only(self) -> bool:
        """Whether its reader's token is."""
        return (self.reader or "").startswith(READ_ONLY)

    @property
    def withheld(self) -> tuple[str, bool]:
        """Why this reader is given no memory to map or to open ("": it is), and whether nothing is wrong with that.

        What it once has it keeps: what is written there later it sees, whatever becomes of its token.
        """
        if self.is_read_only:
            return "a read-only token gives no memory to map", True
        return self.not_given, False


class OpenMemory(NamedTuple):
    """What readers may read by themselves under one generation."""

    memory: ChunkMemory
    word: tuple[int, int]  # (address, bytes) of its generation word


class OwnedMemory(Protocol):
    """A worker's memory, and who may read it. For any thread."""

    @property
    def header(self) -> Header | None:
        """By what readers know this process that read its memory by themselves; None: there are none."""

    def find(self, registration: RegistrationId, generation: int) -> OpenMemory | Refusal:
        """What is open to them there."""

    def holds(self, registration: RegistrationId, memory: ChunkMemory) -> bool:
        """Whether that memory was not let go meanwhile."""

    def word_of(self, access: Access) -> int:
        """Where the generation word of this access' registration is."""

    def has(self, registration: RegistrationId, generation: int, runs_max: int) -> tuple[tuple[int, int], ...]:
        """Ascending (first, count) runs of chunks that may be read."""

    def access(
        self,
        lane: Lane | None,
        registration: RegistrationId,
        generation: int,
        content_id: ContentId,
        wanted: Sequence[int],
        bytes_max: int,
        patience_s: float,
    ) -> AbstractContextManager[tuple[Access, ChunkMemory] | Wait | Refusal]:
        """Have some of the chunks to read for the length of the block, after at most `patience_s` of waiting for one."""

    def digests_of(self, access: Access, memory: ChunkMemory) -> list[tuple[int, int]]:
        """The access' chunks with their digests (0: there are none); missing ones are made and kept."""

    def keep_digest(self, access: Access, chunk: int, made: int) -> int:
        """This digest was made of a chunk of the access. Returns the one that counts: the first."""


class ServedReader(Protocol):
    """One reader's connection, as its sessions have it. For the lane's thread."""

    lane: Lane
    connection: BlockingConnection
    memory: OwnedMemory

    def find(self, registration: str, generation: int) -> OpenMemory:
        """See `OwnedMemory.find`. NotOpen."""

    def digests_of(self, access: Access, memory: ChunkMemory) -> tuple[tuple[int, int], ...]:
        """See `OwnedMemory.digests_of`. CannotServe: a GPU has failed."""

    @property
    def is_contended(self) -> bool:
        """Whether another thread keeps the GIL: few calls then, and large ones."""

    def digested(self, nbytes: int, seconds: float) -> None:
        """The session has made a digest by itself."""

    def put_aside(self, asked: FromReader) -> None:
        """What the reader has asked for while something else was answered: it comes next. ProtocolError: it is too much."""


class OwnerSession(Protocol):
    """One reader's. For the lane's thread. Errors as of `BlockingConnection`; ProtocolError."""

    @property
    def bytes_max(self) -> int:
        """Of the chunks that are served at a time, once their digests are known."""

    @property
    def refusal(self) -> str:
        """Why this reader is not served this way; "": it is."""

    def answer(self, request: int, asked: Any) -> None:
        """Answer a message of the transport's dialect, which is one that readers say. NotOpen; Unusable (NotShared), which
        the reader's `open` raises.
        """

    def serve(self, request: int, access: Access, memory: ChunkMemory) -> None:
        """Have the reader read the chunks of this access. CannotServe, before anything of them is said."""

    def close(self) -> None:
        """Take apart what was set up for this reader."""


class OwnerSide(Protocol):
    """A transport's side at one worker that is read by it. For any thread. Inherit from it, for what is usual."""

    dialect: Dialect
    is_one_sided: bool = False  # its readers look at generation words
    shares_memory: bool = False  # so that words have to be in memory that can be shared; and they come by a Unix socket

    @property
    def name(self) -> str:
        """Of the transport."""
        return self.dialect.transport

    def endpoint(self, address: str, unix_address: str | None) -> str | None:
        """What its readers connect to, of the worker's two listeners, or its own; None: they cannot."""
        return unix_address if self.shares_memory else address

    def session(self, reader: ServedReader) -> OwnerSession:
        """That of one connection."""

    def forget(self, registration: RegistrationId) -> None:
        """Its memory is let go. It is fenced."""
        return

    def release(self, memory: ChunkMemory) -> None:
        """Nobody reads or fills it any more: what a device has registered of it is deregistered."""
        return

    def close(self) -> None:
        """This worker ends: nobody is served any more."""
        return
