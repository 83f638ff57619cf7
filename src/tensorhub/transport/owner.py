"""A transport as the owner of the memory sees it. `transport.base` describes the reader's side.

A worker has one `OwnerSide` for each of its transports. An `OwnerSide` makes an `OwnerSession` for
each reader's connection:

    side = transport.serve()             once per worker
    side.endpoint(...)                   the address for readers
    session = side.session(reader)       a reader has named this transport for the first time
    session.answer(request, asked)       the reader has sent a message of the transport's own dialect
    session.serve(request, access, ...)  the reader wants these chunks, and may touch them until this returns
    session.close()                      the reader is gone, or has to go

Every owner side keeps these rules:

1. It touches memory only within `serve`. Otherwise it leaves the memory to readers that look at the
   generation word after their copy (R3).
2. The digests that it sends are those of `ServedReader.digests_of`.
3. A reader's message is hostile. It is checked before it is used, and it costs no other reader
   anything.
4. Once `forget` has returned, no reader reads that registration's memory with this side's help.

Responsible for the contract only. The worker decides on permission to read, and has the accesses,
the digests and the connection. A side gets at them through `OwnedMemory` and `ServedReader`.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import FromReader
from tensorhub.model.accesses import Access, Refusal, Wait
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport.dialect import Dialect
from tensorhub.transport.generation_words import Header
from tensorhub.types import READ_ONLY, ContentId, Incarnation, RegistrationId


class CannotServe(Exception):
    """The memory is held, but this transport cannot give it to its readers. The reader is told
    why.
    """


class NotOpen(Exception):
    """The memory is not open under that generation. The reader is refused."""


class Lane:
    """One reader's connection at its owner, as the worker's other parts see it."""

    __slots__ = (
        "address",
        "connection",
        "empty_s",
        "given_bytes",
        "is_local",
        "is_stopped",
        "lease",
        "not_given",
        "reader",
        "rests_from",
        "secret",
    )

    def __init__(
        self,
        connection: BlockingConnection,
        *,
        is_local: bool = False,
        not_given: str = "",
        address: str = "",
    ) -> None:
        self.connection = connection
        self.address = address  # from which the reader has connected
        # why its process may not map this process' memory; "": it may, if its token allows it
        self.not_given = not_given
        self.is_local = is_local  # it comes from this host: only such a reader is told addresses
        self.reader: Incarnation | None = None  # known, and proved, after the handshake
        # by which, or by whose read-only secret, it has proved that
        self.secret: bytes | None = None
        self.lease = ""  # under which it was asked for chunks last
        # since when the reader asks for nothing; None: it is being answered
        self.rests_from: float | None = None
        self.is_stopped = False  # it must begin nothing new
        self.given_bytes = 0  # of chunks that the reader was told how to fetch
        self.empty_s = 0.0  # that its thread has waited for chunks of its own worker

    def __repr__(self) -> str:
        return f"<Lane to {self.reader or 'nobody yet'}{', stopped' if self.is_stopped else ''}>"

    @property
    def account(self) -> tuple[bytes | None, bool, str]:
        """To which this reader's work is charged: its token, full or read-only, and its address. (A
        reader chooses its incarnation itself.)
        """
        return self.secret, self.is_read_only, self.address

    @property
    def is_read_only(self) -> bool:
        """Whether the reader has proved only a read-only token."""
        return (self.reader or "").startswith(READ_ONLY)

    @property
    def withheld(self) -> tuple[str, bool]:
        """Why this reader is given no memory to map or to open, and whether that is as it should
        be. "": it is given some.

        A reader keeps what it has mapped. It sees later writes there, whatever becomes of its
        token.
        """
        if self.is_read_only:
            return "a read-only token gives no memory to map", True
        return self.not_given, False


class OpenMemory(NamedTuple):
    """What readers may read by themselves under one generation."""

    memory: ChunkMemory
    word: tuple[int, int]  # (address, bytes) of its generation word


class OwnedMemory(Protocol):
    """A worker's memory, and the right to read it. For any thread."""

    @property
    def header(self) -> Header | None:
        """How one-sided readers recognise this process. None: there are no such readers."""

    def find(self, registration: RegistrationId, generation: int) -> OpenMemory | Refusal:
        """What one-sided readers may read under that generation."""

    def holds(self, registration: RegistrationId, memory: ChunkMemory) -> bool:
        """Whether the registration still has that memory."""

    def word_of(self, access: Access) -> int:
        """Where the generation word of this access' registration is."""

    def select(
        self, reader: Lane, registration: RegistrationId, generation: int, name: str
    ) -> bool | Refusal:
        """Have this memory read in the chunks of the selection of that name from now on. False: the
        selection is not known.
        """

    def upload(
        self,
        reader: Lane,
        registration: RegistrationId,
        name: str,
        total: int,
        offset: int,
        piece: bytes,
    ) -> int | Refusal:
        """A piece of the encoding of a selection of that memory. Returns how much of it is there;
        all of it: the selection is known. ProtocolError: it is none.
        """

    def has(
        self, registration: RegistrationId, generation: int, runs_max: int, selection: str = ""
    ) -> tuple[tuple[int, int], ...]:
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
        selection: str = "",
    ) -> AbstractContextManager[tuple[Access, ChunkMemory] | Wait | Refusal]:
        """Some of the wanted chunks, to be read within the block. Waits at most `patience_s` for
        the first one. `selection`: of which they are. Its memory is strided.
        """

    def deltas_of(
        self, access: Access, memory: ChunkMemory, base: ContentId
    ) -> Mapping[int, tuple[bytes, ...]]:
        """Deltas that make chunks of the access of that content, to be applied in this order; of
        the chunks that have any. Missing ones are made and kept.
        """

    def digests_of(self, access: Access, memory: ChunkMemory) -> list[tuple[int, int]]:
        """The access' chunks with their digests (0: the manifest wants none). Missing digests are
        made and kept.

        CannotServe: the memory was written, replaced or freed meanwhile.
        """

    def keep_digest(self, access: Access, memory: ChunkMemory, chunk: int, made: int) -> int:
        """Keep this digest of a chunk of the access. Returns the digest that counts, which is the
        first. CannotServe: as `digests_of`.
        """


class ServedReader(Protocol):
    """One reader's connection, as its sessions have it. For the lane's thread."""

    lane: Lane
    connection: BlockingConnection
    memory: OwnedMemory

    def find(self, registration: str, generation: int) -> OpenMemory:
        """See `OwnedMemory.find`. NotOpen."""

    def digests_of(self, access: Access, memory: ChunkMemory) -> tuple[tuple[int, int], ...]:
        """See `OwnedMemory.digests_of`. CannotServe: also if a GPU has failed."""

    @property
    def is_contended(self) -> bool:
        """Whether another thread keeps the GIL. Then a few large calls are better than many small
        ones.
        """

    def digested(self, nbytes: int, seconds: float) -> None:
        """The session has made a digest by itself."""

    def put_aside(self, asked: FromReader) -> None:
        """Answer this request later: the reader made it while another one was being answered.
        ProtocolError: too many.
        """


class OwnerSession(Protocol):
    """One reader's. For the lane's thread. Errors as of `BlockingConnection`; ProtocolError."""

    @property
    def bytes_max(self) -> int:
        """The most bytes of chunks to serve at a time, once their digests are known."""

    @property
    def refusal(self) -> str:
        """Why this reader is not served this way; "": it is."""

    def answer(self, request: int, asked: Any) -> None:
        """Answer a message of the transport's dialect, which is one that readers say. NotOpen;
        Unusable (NotShared), which the reader's `open` raises.
        """

    def serve(self, request: int, access: Access, memory: ChunkMemory) -> None:
        """Give the chunks of this access to the reader. CannotServe may be raised only before
        anything is said of them, or where the digest of a chunk is to follow its bytes.
        """

    def close(self) -> None:
        """Release the resources of this reader."""


class OwnerSide(Protocol):
    """A transport's side at an owner. For any thread. Inherit from it to get the defaults."""

    dialect: Dialect
    is_one_sided: bool = False  # its readers look at generation words
    strides: bool = False  # its sessions serve strided memory, and so selections
    # the words must be in memory that can be shared, and readers come by a Unix socket
    shares_memory: bool = False

    @property
    def name(self) -> str:
        """Of the transport."""
        return self.dialect.transport

    def endpoint(self, address: str, unix_address: str | None) -> str | None:
        """The address for its readers: one of the worker's two listeners, or one of its own. None:
        no reader can connect.
        """
        return unix_address if self.shares_memory else address

    def session(self, reader: ServedReader) -> OwnerSession:
        """That of one connection."""

    def forget(self, registration: RegistrationId) -> None:
        """The registration lets go of its memory, which is fenced."""
        return

    def release(self, memory: ChunkMemory) -> None:
        """Deregister what a device has registered of this memory, which is neither read nor filled
        any more.
        """
        return

    def close(self) -> None:
        """This worker ends: serve no reader any more."""
        return
