"""An owner's answers to one reader, in the lane's thread. Each request goes to the transport that
it names.

Responsible for which chunks are served under which access, and for refusals. Not responsible for
how chunks get to the reader (`OwnerSession`), for permission to read (`OwnedMemory`), nor for the
connection's life.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from tensorhub.errors import ProtocolError, StateError
from tensorhub.logs import Tally, get_logger
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import (
    HAS_RUNS_MAX,
    FromReader,
    Locate,
    NotThisWay,
    Read,
    ReadRefused,
    Request,
    Select,
    Selected,
    StillWaiting,
    TransportRequest,
)
from tensorhub.model.accesses import CHUNKS_PER_ACCESS_MAX, Access, Refusal, Wait
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.transport.base import NotShared, Unusable
from tensorhub.transport.owner import (
    CannotServe,
    Lane,
    NotOpen,
    OpenMemory,
    OwnedMemory,
    OwnerSession,
    OwnerSide,
)
from tensorhub.transport.streaming_digest import FIRST_SEND_BYTES, GilWatch
from tensorhub.transport.tcp import TcpSession
from tensorhub.types import ContentId, RegistrationId

# of one answer without sending, at most: the reader copies while the next digests are made
FIRST_LOCATE_BYTES = 16 * 2**20
PENDING_MAX = 16  # requests that are put aside for one reader
REASON_CHARS_MAX = 1000  # of a refusal's reason
NOT_OFFERED = "this worker's memory is not to be read this way: its transports are others"
NOT_STRIDED = "chunks of several pieces of memory are not served this way: tcp serves them"

not_served = Tally(get_logger("tensorhub.owner").warning, "read_not_served")


class ReadServer:
    """Answers one reader. To that reader's sessions it is their `ServedReader`."""

    def __init__(
        self,
        lane: Lane,
        connection: BlockingConnection,
        memory: OwnedMemory,
        sides: Sequence[OwnerSide],
        patience_s: float,
        granted: Callable[[str], object] = lambda lease: None,
    ) -> None:
        """`patience_s`: how long one request waits for chunks that the owner lacks. `granted` hears
        under which lease the reader may have some, each time before it gets or lacks them.
        """
        self.lane = lane
        self.connection = connection
        self.memory = memory
        self._sides = {side.dialect.transport: side for side in sides}
        self._sessions: dict[str, OwnerSession] = {}
        self._sender = TcpSession(self)  # any reader may ask for bytes over its connection
        self._patience_s = patience_s
        self._granted = granted
        # the chunks served last had their digests already, so the next ones will have them, too
        self._is_digested = False
        # of the last answer that had digests made: small, so that it comes soon
        self._locate_bytes = FIRST_SEND_BYTES // 8
        self._gil = GilWatch()
        self._pending: deque[FromReader] = deque()  # requests that were put aside

    def answer(self, asked: Request) -> None:
        """Answer this request in full. Errors as of `BlockingConnection`; ProtocolError."""
        if isinstance(asked, Read):
            self._serve(asked, self._sender, strides=True)
            return
        if isinstance(asked, Select):
            self._select(asked)
            return
        session = self._session(asked.transport)
        if session is None:
            self.connection.send(NotThisWay(asked.request, NOT_OFFERED, is_usual=False))
        elif isinstance(asked, TransportRequest):
            self._answer(asked, session)
        elif session.refusal:
            self.connection.send(ReadRefused(asked.request, session.refusal))
        else:
            self._serve(asked, session, strides=self._sides[asked.transport].strides)

    def _select(self, asked: Select) -> None:
        if not asked.total:
            raise ProtocolError("a selection without bytes is none")
        registration = RegistrationId(asked.registration)
        if asked.blob or asked.offset:
            said = asked.selection, asked.total, asked.offset, asked.blob
            following = self.memory.upload(self.lane, registration, *said)
            if isinstance(following, Refusal):
                self._refuse(asked.request, following)
                return
            if following < asked.total:
                self.connection.send(Selected(asked.request, following))
                return
        match self.memory.select(self.lane, registration, asked.generation, asked.selection):
            case Refusal() as refusal:
                self._refuse(asked.request, refusal)
            case is_known:
                self.connection.send(Selected(asked.request, asked.total if is_known else 0))

    def _refuse(self, request: int, refusal: Refusal) -> None:
        not_served.count(reader=self.lane.reader, reason=refusal.reason)
        self.connection.send(ReadRefused(request, refusal.reason))

    def _answer(self, asked: TransportRequest, session: OwnerSession) -> None:
        try:
            session.answer(asked.request, self._sides[asked.transport].dialect.message(asked))
        except NotOpen as error:
            self.connection.send(ReadRefused(asked.request, str(error)))
        except Unusable as error:
            reason = str(error)[:REASON_CHARS_MAX]
            self.connection.send(
                NotThisWay(asked.request, reason, is_usual=isinstance(error, NotShared))
            )

    def pending(self) -> FromReader | None:
        """The next request that was put aside."""
        return self._pending.popleft() if self._pending else None

    def close(self) -> None:
        """The reader is gone, or has to go."""
        for session in self._sessions.values():
            session.close()

    def _session(self, name: str) -> OwnerSession | None:
        if name not in self._sessions and name in self._sides:
            self._sessions[name] = self._sides[name].session(self)
        return self._sessions.get(name)

    # -------------------------------------------------------------------------------------------
    # see `ServedReader`

    @property
    def is_contended(self) -> bool:
        return self._gil.is_contended

    def find(self, registration: str, generation: int) -> OpenMemory:
        found = self.memory.find(RegistrationId(registration), generation)
        if isinstance(found, Refusal):
            raise NotOpen(found.reason)
        return found

    def digests_of(self, access: Access, memory: ChunkMemory) -> tuple[tuple[int, int], ...]:
        is_first = bool(memory.width) and None in access.digests
        started = time.perf_counter()
        try:
            chunks = tuple(self.memory.digests_of(access, memory))
        except (
            StateError
        ) as error:  # a GPU's; nothing is announced yet, so that its reader can be told
            raise CannotServe(str(error)[:REASON_CHARS_MAX]) from error
        if is_first and memory.device is None:
            self.digested(
                sum([memory.sizes[chunk] for chunk in access.chunks]), time.perf_counter() - started
            )
        else:
            self._is_digested = True  # a GPU digests as much as is sent at a time
        return chunks

    def digested(self, nbytes: int, seconds: float) -> None:
        self._is_digested = False
        self._gil.digested(nbytes, seconds)

    def put_aside(self, asked: FromReader) -> None:
        if len(self._pending) >= PENDING_MAX:
            raise ProtocolError(
                f"more than {PENDING_MAX} requests are waiting, and no piece is taken"
            )
        self._pending.append(asked)

    # ----------------------------------------------------------------------------------------------
    # chunks

    def _serve(self, read: Read | Locate, session: OwnerSession, *, strides: bool) -> None:
        """Serve the chunks that are available, or become so within the patience; or refuse the
        request.
        """
        self.lane.lease = read.lease
        try:
            self._serve_all(read, session, strides=strides)
        except CannotServe as error:
            not_served.count(reader=self.lane.reader, reason=str(error))
            self.connection.send(ReadRefused(read.request, str(error)))

    def _serve_all(self, read: Read | Locate, session: OwnerSession, *, strides: bool) -> None:
        waited_until = time.monotonic() + self._patience_s
        wanted: Sequence[int] = _chunks_of(read)
        registration, content_id = RegistrationId(read.registration), ContentId(read.content_id)
        right = (self.lane, registration, read.generation, content_id)
        while wanted:
            bytes_max = self._bytes_max(read, session)
            patience_s = waited_until - time.monotonic()
            with self.memory.access(
                *right, wanted, bytes_max, patience_s, read.selection
            ) as answer:
                if not isinstance(answer, Refusal):
                    self._granted(read.lease)
                if isinstance(answer, tuple):
                    if answer[1].is_strided and not strides:
                        raise CannotServe(NOT_STRIDED)
                    access, memory = answer
                    if isinstance(read, Read) and read.base:
                        base = ContentId(read.base)
                        access = self._sender.serve_deltas(read.request, access, memory, base)
                    if access.chunks:
                        session.serve(read.request, access, memory)
                        if session is not self._sender:
                            self.lane.given_bytes += sum([memory.sizes[c] for c in access.chunks])
                    wanted = access.rest
            if isinstance(answer, Wait):
                has = self.memory.has(registration, read.generation, HAS_RUNS_MAX, read.selection)
                self.connection.send(StillWaiting(read.request, has))
                return
            if isinstance(answer, Refusal):
                self.connection.send(ReadRefused(read.request, answer.reason, answer.is_damaged))
                return

    def _bytes_max(self, read: Read | Locate, session: OwnerSession) -> int:
        """Of the next access."""
        if self._is_digested or self._gil.is_contended:
            return session.bytes_max
        if isinstance(read, Read):
            return FIRST_SEND_BYTES
        self._locate_bytes = min(2 * self._locate_bytes, FIRST_LOCATE_BYTES)
        return self._locate_bytes


def _chunks_of(read: Read | Locate) -> list[int]:
    if not 0 < sum(count for _, count in read.runs) <= CHUNKS_PER_ACCESS_MAX or any(
        first < 0 or count < 1 for first, count in read.runs
    ):
        raise ProtocolError(
            f"a read names 1 to {CHUNKS_PER_ACCESS_MAX} chunks, in runs of one or more"
        )
    return [chunk for first, count in read.runs for chunk in range(first, first + count)]
