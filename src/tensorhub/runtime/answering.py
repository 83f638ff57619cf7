"""What an owner answers one reader, in that lane's thread: the chunks themselves, or where they are.

A large chunk whose digest is not known yet is sent in pieces, each digested just before, and its digest is said behind the
bytes. Responsible for which bytes go out under which access. Not responsible for who may read
(`SharedOwner`), nor for the connection's life (`acceptor`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing

from tensorhub.accesses import CHUNKS_PER_ACCESS_MAX, Access, Refusal, Wait
from tensorhub.cuda.device import Allocation, Device
from tensorhub.errors import ProtocolError, StateError
from tensorhub.logs import Tally, get_logger
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.messages import (
    ALLOCATIONS_MAX,
    HAS_RUNS_MAX,
    SEGMENTS_MAX,
    AgentIs,
    AllocationsAre,
    ChunkDigest,
    ChunkFollows,
    ChunksFollow,
    ChunksLie,
    ChunksPinned,
    FindAgent,
    FindAllocations,
    FindMemory,
    FindPorts,
    FindSegments,
    FromReader,
    Locate,
    MemoryIs,
    Pair,
    PieceTaken,
    Read,
    ReadRefused,
    SegmentsAre,
    StillWaiting,
)
from tensorhub.protocol.blocking import BlockingConnection
from tensorhub.protocol.codec import FROM_READER
from tensorhub.protocol.lost import ConnectionLost
from tensorhub.runtime.data.serving import Lane, SharedOwner
from tensorhub.runtime.pairing import Pairing
from tensorhub.transport.cuda_ipc import allocations as ipc
from tensorhub.transport.nixl.agents import Exposed, fault_with
from tensorhub.transport.shm.segments import Segment, segments_of
from tensorhub.transport.staging import Place, Staging
from tensorhub.transport.streaming_digest import HOT_BYTES, GilWatch, StreamingDigests, cut
from tensorhub.types import READ_ONLY, ContentId, RegistrationId

SEND_BYTES = 16 * 2**20  # of one send call whose digests are known; a fence may have to wait for it
LOCAL_SEND_BYTES = 64 * 2**20  # the same within a host, in some 20 ms: beside a busy Python thread each call costs 5 ms more
FIRST_SEND_BYTES = HOT_BYTES  # of one whose digests are made before; a larger chunk goes by itself, and its digest behind it
FIRST_LOCATE_BYTES = 16 * 2**20  # of one answer without sending, at most: the reader copies while the next digests are made
LOCATE_BYTES = 2**40  # of one answer that says where chunks lie, and sends none
PENDING_MAX = 16  # requests that come while a reader is waited for
NOT_ONE_SIDED = "this worker's memory is not to be read from here: its transports are others, or it is on another host"

log = get_logger("tensorhub.owner")
not_served = Tally(log.warning, "read_not_served")


class _CannotRegister(Exception):
    """Memory that is to be read by RDMA; or buffers for a GPU's cannot be had."""


class Answering:
    """One reader's answers."""

    def __init__(self, lane: Lane, connection: BlockingConnection, owner: SharedOwner, patience_s: float) -> None:
        """`patience_s`: how long one request waits for chunks that the owner lacks."""
        self._lane = lane
        self._connection = connection
        self._owner = owner
        self._patience_s = patience_s
        self._pairing = Pairing(owner)
        self._is_digested = False  # what was sent last had its digests: what is next has them, too
        self._staging: Staging | None = None  # for what is on a GPU
        self._locate_bytes = FIRST_SEND_BYTES // 8  # of the last answer that had digests made: the first ones come soon
        self._gil = GilWatch()  # where another thread keeps the GIL: few calls, and large ones
        self._pending: deque[FromReader] = deque()  # what has come meanwhile
        self._knows_agent = False  # the reader has been told of an agent, and so of addresses

    def answer(self, read: FromReader) -> None:
        """Say and send all that this request asks for. Errors as of `BlockingConnection`; ProtocolError."""
        match read:
            case FindMemory():
                self._find(read)
            case FindSegments():
                self._share(read)
            case FindAllocations():
                self._export(read)
            case FindAgent():
                self._expose(read)
            case FindPorts():
                self._connection.send(self._pairing.ports(read))
            case Pair():
                self._connection.send(self._pairing.pair(read))
            case PieceTaken():
                self._pairing.taken()
            case _:
                self._serve(read)

    def pending(self) -> FromReader | None:
        """What the reader has asked for while something else was answered."""
        return self._pending.popleft() if self._pending else None

    def close(self) -> None:
        """The reader is gone, or has to go."""
        self._pairing.close()

    def _find(self, read: FindMemory) -> None:
        """Say in which process this is, so that the reader can prove that it reads that one; or that it may not."""
        header, on_device = self._owner.header, self._owner.is_on_device(RegistrationId(read.registration))
        process = header if header is not None and self._lane.is_local else (0, 0, b"")
        self._connection.send(MemoryIs(read.request, *process, on_device))

    @property
    def _withheld(self) -> tuple[str, bool]:
        """Why this reader is given no memory to map or to open ("": it is), and whether nothing is wrong with that.

        What it once has it keeps: what is written there later it sees, whatever becomes of its token.
        """
        if (self._lane.reader or "").startswith(READ_ONLY):
            return "a read-only token gives no memory to map", True
        return self._lane.not_given, False

    def _share(self, read: FindSegments) -> None:
        """Hand over the descriptors of the memory in which a registration is, if that can be shared."""
        can_share = self._connection.passes_descriptors
        found = self._owner.segments_of(RegistrationId(read.registration), read.generation) if can_share else ()
        if isinstance(found, Refusal):
            self._connection.send(ReadRefused(read.request, found.reason))
            return
        found = found if len(found) <= SEGMENTS_MAX else ()
        reason, is_usual = self._withheld if found else ("", False)
        found = () if reason else found
        said = SegmentsAre(read.request, tuple([(each.address, each.nbytes) for each in found]), reason, is_usual)
        self._connection.send(said)
        if found:
            self._connection.send_descriptors([segment.descriptor for segment in found])

    def _export(self, read: FindAllocations) -> None:
        """Say how the GPU's memory in which a registration is may be opened, and hand over that of its generation word."""
        registration = RegistrationId(read.registration)
        found = self._owner.lies(registration, read.generation) if self._connection.passes_descriptors else None
        if isinstance(found, Refusal):
            self._connection.send(ReadRefused(read.request, found.reason))
            return
        is_on_gpu = found is not None and found[0].device is not None
        reason, is_usual = self._withheld if is_on_gpu else ("", False)
        try:
            exported = None if reason else _exported(found)
        except StateError as error:
            exported, reason = None, str(error)[:1000]
        if exported is None:
            self._connection.send(AllocationsAre(read.request, ipc.this_process(), (), (0, 0), reason, is_usual))
            return
        allocations, words = exported
        place = (words.address, words.nbytes)
        said = AllocationsAre(read.request, ipc.this_process(), tuple(allocations), place, "", is_usual)
        self._connection.send(said)
        self._connection.send_descriptors([words.descriptor])

    def _expose(self, read: FindAgent) -> None:
        """Tell of the agent by which a registration is read, if there may be one."""
        registration = RegistrationId(read.registration)
        if (self._lane.reader or "").startswith(READ_ONLY):  # whoever has an agent's metadata can write, too
            found: tuple[Exposed, int] | str | Refusal = "a token that is read-only gives no access to memory"
        elif (fault := fault_with(is_near=self._lane.is_local and not self._owner.is_on_device(registration))) is not None:
            found = fault
        else:
            found = self._owner.agent_of(registration, read.generation)
        match found:
            case Refusal():
                self._connection.send(ReadRefused(read.request, found.reason))
            case str():
                self._connection.send(AgentIs(read.request, "", b"", 0, found))
            case _:
                self._knows_agent = True
                exposed, word = found
                self._connection.send(AgentIs(read.request, exposed.name, exposed.metadata, word, "", exposed.device))

    def _serve(self, read: Read | Locate) -> None:
        """Send what is asked for, or say where it is, as far as it is available and becomes so within the patience; or
        refuse it.
        """
        try:
            self._serve_all(read)
        except _CannotRegister as error:
            not_served.count(reader=self._lane.reader, reason=str(error))
            self._connection.send(ReadRefused(read.request, str(error)))

    def _serve_all(self, read: Read | Locate) -> None:
        is_near = self._owner.header is not None and self._lane.is_local
        if isinstance(read, Locate) and not (is_near or self._knows_agent or self._pairing.is_made):
            self._connection.send(ReadRefused(read.request, NOT_ONE_SIDED))
            return
        waited_until = time.monotonic() + self._patience_s
        wanted: Sequence[int] = _chunks_of(read)
        registration, content_id = RegistrationId(read.registration), ContentId(read.content_id)
        right = (self._lane, registration, read.generation, content_id)
        while wanted:
            bytes_max = self._bytes_max(read)
            with self._owner.access(*right, wanted, bytes_max, waited_until - time.monotonic()) as answer:
                if isinstance(answer, tuple):
                    self._send(read, *answer)
                    wanted = answer[0].rest
            if isinstance(answer, Wait):
                has = self._owner.has(registration, read.generation, HAS_RUNS_MAX)
                self._connection.send(StillWaiting(read.request, has))
                return
            if isinstance(answer, Refusal):
                self._connection.send(ReadRefused(read.request, answer.reason))
                return

    def _bytes_max(self, read: Read | Locate) -> int:
        """Of the next access."""
        if not self._is_digested and not self._gil.is_contended:
            if isinstance(read, Locate):
                self._locate_bytes = min(2 * self._locate_bytes, FIRST_LOCATE_BYTES)
                return self._locate_bytes
            return FIRST_SEND_BYTES
        if isinstance(read, Locate) and not self._pairing.has_buffers:
            return LOCATE_BYTES
        return LOCAL_SEND_BYTES if self._lane.is_local else SEND_BYTES

    def _send(self, read: Read | Locate, access: Access, memory: ChunkMemory) -> None:
        """Send an access' chunks, or say where they are."""
        is_first = bool(memory.width) and None in access.digests
        nbytes = sum([memory.sizes[chunk] for chunk in access.chunks])
        is_large = len(access.chunks) == 1 and nbytes > FIRST_SEND_BYTES and memory.is_digested and memory.device is None
        if is_first and is_large and isinstance(read, Read) and not self._gil.is_contended:
            self._send_one(read, access, memory)
            return
        started = time.perf_counter()
        try:
            chunks = tuple(self._owner.digests_of(access, memory))
            if memory.device is not None and isinstance(read, Read):
                self._prepare_staging(memory.device)
        except StateError as error:  # a GPU's; nothing is announced yet, so that its reader can be told
            raise _CannotRegister(str(error)[:1000]) from error
        digest_s = time.perf_counter() - started
        if isinstance(read, Locate) and self._pairing.stages(memory):
            self._stage(read.request, chunks, access, memory)
        elif isinstance(read, Locate):
            self._connection.send(self._located(read.request, chunks, access, memory))
        elif memory.device is not None:
            self._connection.send(ChunksFollow(read.request, chunks))
            self._send_staged([(memory.address(chunk), memory.sizes[chunk]) for chunk in access.chunks])
        else:
            buffers = [memory.buffer(chunk) for chunk in access.chunks]
            self._connection.send_with_payload(ChunksFollow(read.request, chunks), buffers)
        self._is_digested = not is_first or memory.device is not None  # a GPU digests as much as is sent at a time
        if is_first and memory.device is None:
            self._gil.digested(nbytes, digest_s)

    def _located(
        self, request: int, chunks: tuple[tuple[int, int], ...], access: Access, memory: ChunkMemory
    ) -> ChunksLie | ChunksPinned:
        word = self._owner.word_of(access)
        if not self._pairing.is_made:
            return ChunksLie(request, tuple([(chunk, digest, memory.address(chunk)) for chunk, digest in chunks]), word)
        try:
            return ChunksPinned(request, self._pairing.places(memory, chunks), word, self._pairing.word_key(word))
        except OSError as error:
            raise _CannotRegister(error.strerror) from error

    def _stage(self, request: int, chunks: Sequence[tuple[int, int]], access: Access, memory: ChunkMemory) -> None:
        """Have a reader by RDMA read what is on a GPU out of buffers: the next piece is copied there while one is read."""
        places = [(memory.address(chunk), memory.sizes[chunk]) for chunk in access.chunks]
        word = self._owner.word_of(access)
        try:
            staging = self._pairing.staging(memory)
            self._connection.send(ChunksFollow(request, tuple(chunks)))
            with closing(staging.outgoing(places)) as pieces:
                for piece in pieces:
                    self._connection.send(self._pairing.staged(request, piece, word))
                    while not self._pairing.has_room:
                        self._hear_meanwhile()
        except OSError as error:
            raise _CannotRegister(error.strerror) from error

    def _hear_meanwhile(self) -> None:
        """Wait for the reader to take a piece; what else it says is answered later. OperationTimeout."""
        match read := self._connection.receive(FROM_READER):
            case PieceTaken():
                self._pairing.taken()
            case None:
                raise ConnectionLost("the reader has left while pieces were staged for it")
            case _ if len(self._pending) < PENDING_MAX:
                self._pending.append(read)
            case _:
                raise ProtocolError(f"more than {PENDING_MAX} requests are waiting, and no piece is taken")

    def _prepare_staging(self, device: Device) -> None:
        """Have buffers for what is on that GPU. StateError: no memory."""
        if self._staging is None or self._staging.device is not device:
            self._staging = Staging(device)

    def _send_staged(self, places: Sequence[Place]) -> None:
        """Send what is on a GPU: the next piece is copied to the host while one is sent."""
        assert self._staging is not None
        with closing(self._staging.outgoing(places)) as pieces:
            for piece in pieces:
                self._connection.send_payload([piece])

    def _send_one(self, read: Read, access: Access, memory: ChunkMemory) -> None:
        """Send a large chunk, and make its digest of each piece just before that is sent: it is read from memory once."""
        (chunk,) = access.chunks
        view = memory.buffer(chunk)
        digests = StreamingDigests([(chunk, view)])
        self._connection.send(ChunkFollows(read.request, chunk))
        for call in cut([view]):
            digests.go_on([piece.nbytes for piece in call])
            self._connection.send_payload(call)
        digest = self._owner.keep_digest(access, chunk, digests.made[chunk])
        self._connection.send(ChunkDigest(read.request, digest))
        self._is_digested = False
        self._gil.digested(view.nbytes, digests.seconds)


def _exported(found: tuple[ChunkMemory, tuple[int, int]] | None) -> tuple[list[Allocation], Segment] | None:
    """The GPU's allocations, and where the word is. None: it is in host memory, or nobody reads it by himself. StateError,
    with the reason: it cannot be opened by others.
    """
    if found is None or found[0].device is None:
        return None
    memory, word = found
    if not (segments := segments_of([word])):
        raise StateError("its generation words are not in shared memory")
    allocations = ipc.export(found[0].device, memory.places)
    if len(allocations) > ALLOCATIONS_MAX:
        raise StateError(f"its tensors are in {len(allocations)} allocations, more than {ALLOCATIONS_MAX}")
    return allocations, segments[0]


def _chunks_of(read: Read | Locate) -> list[int]:
    if not 0 < sum(count for _, count in read.runs) <= CHUNKS_PER_ACCESS_MAX or any(
        first < 0 or count < 1 for first, count in read.runs
    ):
        raise ProtocolError(f"a read names 1 to {CHUNKS_PER_ACCESS_MAX} chunks, in runs of one or more")
    return [chunk for first, count in read.runs for chunk in range(first, first + count)]
