"""One-sided transports: the owner says where chunks lie, and the reader copies them by itself.

The reader asks, waits and is refused as over tcp, on the two workers' own connection. After a copy
the reader looks at the generation word, and names the chunks only if the word is right (R3). So no
fence waits for a reader.

Everything that the source says is hostile. The reader only ever reads from an address that the
source names, in the source's own memory, into the destination's own views, with the lengths of its
own manifest. A lie gives an error, or bytes that do not have their digest. Where chunks of several
pieces are follows from their strips, which the reader knows, and from the addresses of the regions,
which the source says.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import chain
from typing import NamedTuple

from tensorhub.cuda.device import Spread
from tensorhub.cuda.kernels import SPREAD_BYTES_MAX
from tensorhub.errors import ProtocolError
from tensorhub.memory.addresses import address_of
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.memory.strided import Block, Stream, blocks, bounds, runs
from tensorhub.memory.strided_device import batch_bytes_max, batches
from tensorhub.messages import ChunksLie, StillWaiting
from tensorhub.model.accesses import Access
from tensorhub.model.strips import Strip
from tensorhub.transport.base import (
    Arrival,
    Channel,
    Destination,
    Lacking,
    NotShared,
    ReadFailure,
    Unusable,
)
from tensorhub.transport.connected import ConnectedTransport, ReadClient
from tensorhub.transport.dialect import REGIONS_MAX, Dialect, Find, FindRegions, RegionsAre
from tensorhub.transport.generation_words import WORD_BYTES
from tensorhub.transport.owner import OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.staging import Rooms
from tensorhub.transport.streaming_digest import SMALL_BYTES, PiecewiseDigest, StreamingDigests
from tensorhub.transport.tcp import TcpChannel
from tensorhub.types import Location, RegistrationId

RUN_BYTES_MIN = (
    # on average: where each run costs something, shorter ones come faster over the connection,
    # packed by their owner
    2048
)


class StridedSource:
    """Of one channel."""

    def __init__(self, client: ReadClient, destination: Destination) -> None:
        """Ask where the regions are. Raises as `ReadClient.ask`."""
        selection = client.right.selection
        numbers = range(len(destination.sizes))
        strips = map(destination.strips, numbers) if selection is None else selection.chunks
        self._strips: Sequence[Sequence[Strip]] = tuple(strips)
        self._regions = _regions(client, chain.from_iterable(self._strips))

    @property
    def run_bytes(self) -> float:
        """Of a run, on average."""
        found = [strip for strips in self._strips for strip in strips]
        return sum([strip.nbytes for strip in found]) / max(1, sum([strip.runs for strip in found]))

    def stream(self, chunk: int) -> Stream:
        """The bytes of a chunk, by the source's addresses."""
        return Stream(blocks(self._strips[chunk], self._regions))

    def blocks(self, chunks: Sequence[int], nbytes_max: int) -> Iterator[Block]:
        """All bytes of these chunks, in order, by the source's addresses, in blocks of `nbytes_max`
        at most.
        """
        return blocks(
            chain.from_iterable([self._strips[chunk] for chunk in chunks]),
            self._regions,
            nbytes_max,
        )


def _regions(client: ReadClient, strips: Iterable[Strip]) -> list[int]:
    """The addresses of the regions in which strips are."""
    pages: set[int] = set()
    last = -1
    for strip in strips:
        ends = sorted((strip.region, strip.region + (strip.length - 1) * strip.region_step))
        pages.update(range(ends[0] // REGIONS_MAX, ends[1] // REGIONS_MAX + 1))
        last = max(last, ends[1])
    found = [0] * (last + 1)
    for page in sorted(pages):
        first = page * REGIONS_MAX
        said = client.ask(
            FindRegions(client.right.registration, client.right.generation, first), RegionsAre
        ).addresses
        wanted = min(REGIONS_MAX, last + 1 - first)
        if len(said) < wanted:
            raise ProtocolError(
                f"a source with {first + len(said)} regions has chunks in {last + 1}"
            )
        found[first : first + wanted] = said[:wanted]
    return found


# that one thread copies at a time: small, so that all threads end at about the same time
GROUP_BYTES = 16 * 2**20
# of one system call, which takes a millisecond or so: a reader notices only then that it is cut off
CALL_BYTES = 8 * 2**20
CALL_PIECES_MAX = 1024  # Linux' IOV_MAX
LANES_MAX = 4  # of one source: more would take a trainer's cores for little more memory bandwidth


def lanes_here() -> int:
    """How many threads to copy by."""
    return min(LANES_MAX, len(os.sched_getaffinity(0)))


class Piece(NamedTuple):
    """Bytes to copy from an address at the source to an address here."""

    here: int
    there: int
    nbytes: int


def cut_up(pieces: Sequence[Piece], call_bytes: int = CALL_BYTES) -> Iterator[list[Piece]]:
    """The pieces in their order, grouped by system call: at most `call_bytes` and CALL_PIECES_MAX
    pieces in each.
    """
    call: list[Piece] = []
    room = call_bytes
    for piece in pieces:
        here, there, left = piece
        while left:
            taken = min(left, room)
            call.append(Piece(here, there, taken))
            here, there, left, room = here + taken, there + taken, left - taken, room - taken
            if not room or len(call) == CALL_PIECES_MAX:
                yield call
                call, room = [], call_bytes
    if call:
        yield call


class Source(ABC):
    """The memory of another process, named by that process' addresses. For several threads."""

    hot_bytes: int  # of one call, if the bytes are digested right after it
    call_bytes = CALL_BYTES  # of one call otherwise
    group_bytes = GROUP_BYTES  # of the calls before one look at the word

    @abstractmethod
    def copy(self, call: Sequence[Piece]) -> None:
        """Copy these pieces (see `cut_up`) into this process, without the GIL. OSError: not all
        could be read. TimeoutError: the source has stalled. Nothing is written here after an error.
        """

    def gather(self, made: Sequence[Block], here: int) -> None:
        """Copy the bytes of these blocks, which are the source's, to that address: of the
        destination's device, if it is on one. Errors as of `copy`.
        """
        pieces: list[Piece] = []
        for block in made:
            for there in runs(block):
                pieces.append(Piece(here, there, block.run))
                here += block.run
        self.copy(pieces)

    def rows_of(self, made: Sequence[Block]) -> list[Spread] | None:
        """These blocks, for the destination's device to gather. None: it is to be done by
        `gather`.
        """
        return None

    @abstractmethod
    def is_unchanged(self, word: int, generation: int) -> bool:
        """Whether it is still that process, and its word at that address is that generation.
        OSError: it cannot be read.
        """

    def close(self) -> None:
        """No channel reads it any more."""
        return


class Translated(Source):
    """A source's memory that this process has mapped at other addresses."""

    def __init__(self, places: Sequence[tuple[int, int, int]]) -> None:
        """`places`: (address at the source, bytes, address here)."""
        self._places = sorted(places)
        self._starts = [start for start, _, _ in self._places]
        self.is_short = False  # a place was asked for that is not mapped

    def is_unchanged(self, word: int, generation: int) -> bool:
        """See `Source.is_unchanged`. A process that has died has not written since."""
        return (
            generation != 0
            and ctypes.c_uint64.from_address(self._here(word, WORD_BYTES)).value == generation
        )

    def _here(self, there: int, nbytes: int) -> int:
        """The address here. OSError: it is not mapped."""
        number = bisect.bisect_right(self._starts, there) - 1
        if number >= 0:
            start, size, here = self._places[number]
            if there + nbytes <= start + size:
                return here + there - start
        self.is_short = True
        raise OSError(errno.EFAULT, "it is in nothing that was shared")

    def _block_here(self, block: Block) -> Block:
        """The block by its addresses here. OSError: a byte of it is not mapped."""
        below, above = bounds(block)
        return block._replace(
            cells=[self._here(cell + below, above - below) - below for cell in block.cells]
        )


class _Located(NamedTuple):
    chunk: int
    digest: int
    address: int
    word: int


class OneSidedChannel:
    """See `transport.base.Channel`. Several threads may drive it."""

    def __init__(
        self,
        client: ReadClient,
        source: Source,
        destination: Destination,
        places: StridedSource | None,
    ) -> None:
        """`places`: from where a strided destination is filled."""
        self._places = places
        self._client = client
        self._source = source
        self._right = client.right
        self._destination = destination
        self._cutter = client.cutter
        # guards the attributes below; one thread listens, other threads wait for its messages
        self._turn = threading.Lock()
        self._located: deque[_Located] = deque()  # chunks that no thread has taken yet
        self._rooms: Rooms | None = None  # of the destination's device
        if places is not None and destination.device is not None:
            self._rooms = Rooms(destination.device, batch_bytes_max(destination.sizes))

    def submit(self, chunks: Sequence[int]) -> None:
        self._client.locate(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        started = time.perf_counter()
        # On a GPU the digests are made when everything is there.
        is_small = (
            self._destination.is_digested
            and bytes_max <= SMALL_BYTES
            and self._destination.device is None
        )
        bytes_max = min(bytes_max, self._source.group_bytes)
        with self._turn:
            if not self._located:
                if self._client.is_answered:
                    return Arrival((), time.perf_counter() - started, 0.0)
                with self._client.failures():
                    message = self._client.hear()
                    if isinstance(message, StillWaiting):
                        return self._client.lacking(message)
                    self._enter(message)
            group = self._next_group(bytes_max)
        first_byte = time.perf_counter()
        calls = len(group)
        if self._places is not None:
            made, digest_s = self._gather(group, self._places)
        else:
            views = (
                [(located.chunk, self._destination.buffer(located.chunk)) for located in group]
                if is_small
                else []
            )
            digests = StreamingDigests(views)
            calls = self._copy(group, digests if is_small else None)
            made, digest_s = digests.made, digests.seconds
        seconds = time.perf_counter() - first_byte - digest_s
        chunks = [(located.chunk, located.digest) for located in group]
        return Arrival(chunks, first_byte - started, seconds, made, digest_s, calls=calls)

    def _enter(self, message: object) -> None:
        if not isinstance(message, ChunksLie):
            raise ProtocolError(f"a Locate is answered with {type(message).__name__}")
        self._client.announced(message.request, [chunk for chunk, _, _ in message.chunks])
        self._located.extend([_Located(*chunk, message.word) for chunk in message.chunks])

    def _next_group(self, bytes_max: int) -> list[_Located]:
        """Take the chunks to copy next, under one word: at least one, and further ones up to
        `bytes_max`.
        """
        group: list[_Located] = []
        while self._located and self._located[0].word == (group or self._located)[0].word:
            bytes_max -= self._destination.sizes[self._located[0].chunk]
            if group and bytes_max < 0:
                break
            group.append(self._located.popleft())
        return group

    def _copy(self, group: list[_Located], digests: StreamingDigests | None) -> int:
        """Copy these chunks, one behind the other. Returns by how many calls."""
        calls = 0
        here, sizes = self._destination.address, self._destination.sizes
        pieces = [
            Piece(here(located.chunk), located.address, sizes[located.chunk]) for located in group
        ]
        with self._proving(group[0].word) as copied:
            for call in cut_up(
                pieces, self._source.call_bytes if digests is None else self._source.hot_bytes
            ):
                self._check_cut()
                self._source.copy(call)
                calls += 1
                copied(sum(piece.nbytes for piece in call))
                if digests is not None:
                    digests.go_on([piece.nbytes for piece in call])
        return calls

    def _gather(self, group: list[_Located], places: StridedSource) -> tuple[dict[int, int], float]:
        """Copy chunks of strips. Returns their digests, and what making those took."""
        destination, made, digest_s = self._destination, dict[int, int](), 0.0
        with self._proving(group[0].word) as copied:
            if destination.device is not None:
                for batch in batches([located.chunk for located in group], destination.sizes):
                    made |= self._gather_on(batch, places)
                    copied(sum([destination.sizes[chunk] for chunk in batch]))
                return made, digest_s
            for located in group:
                stream, digest = places.stream(located.chunk), PiecewiseDigest()
                with closing(destination.incoming(located.chunk)) as calls:
                    for views in calls:
                        self._check_cut()
                        for view in views:
                            self._source.gather(stream.take(view.nbytes), address_of(view))
                            copied(view.nbytes)
                        if destination.is_digested:
                            digest.go_on(views)
                digest_s += digest.seconds
                if destination.is_digested:
                    made[located.chunk] = digest.made
        return made, digest_s

    def _gather_on(self, chunks: Sequence[int], places: StridedSource) -> Mapping[int, int]:
        """Copy chunks of strips to a device, which digests them while each is in one piece. Returns
        their digests.
        """
        destination = self._destination
        assert self._rooms is not None
        with self._rooms.taken() as room:
            self._check_cut()
            made = list(places.blocks(chunks, SPREAD_BYTES_MAX))
            rows = self._source.rows_of(made)
            if rows is None:
                self._source.gather(made, room)
            return destination.take_in(chunks, room, rows or ())

    def _check_cut(self) -> None:
        if self._cutter.is_cut:
            raise ReadFailure("lost", "the read was given up")

    @contextmanager
    def _proving(self, word: int) -> Iterator[Callable[[int], None]]:
        """Within the block bytes are copied, which is said as it is done; behind it the word
        decides. ReadFailure.
        """
        copied = 0

        def count(nbytes: int) -> None:
            nonlocal copied
            copied += nbytes

        try:
            yield count
            is_valid = self._source.is_unchanged(word, self._right.generation)
        except ReadFailure as failure:
            failure.bytes_discarded += copied
            raise
        except TimeoutError as error:
            raise ReadFailure("stalled", str(error.strerror), bytes_discarded=copied) from error
        except OSError as error:
            text = f"the source's memory cannot be read (any more): {error.strerror}"
            raise ReadFailure("lost", text, bytes_discarded=copied) from error
        if not is_valid:
            raise ReadFailure(
                "refused", "the memory has changed its generation", bytes_discarded=copied
            )

    def close(self) -> None:
        self._client.close()
        self._source.close()


class SameHostTransport(ConnectedTransport):
    """A one-sided transport within a host."""

    strides = True
    private = True

    def reaches(self, here: Location, there: Location) -> bool:
        """Between equal hosts."""
        return here.host == there.host


def open_channel(
    client: ReadClient, source: Source, destination: Destination, run_bytes_min: int = 0
) -> Channel:
    """The channel that reads this source, which it closes. `run_bytes_min`: runs that are shorter,
    on average, come over the connection instead, packed by their owner. Raises as `ReadClient.ask`.
    """
    places = StridedSource(client, destination) if destination.is_strided else None
    if places is not None and places.run_bytes < run_bytes_min:
        source.close()
        return TcpChannel(client, destination)
    return OneSidedChannel(client, source, destination, places)


LOCATE_BYTES = 2**40  # of the chunks in one answer: no byte of them is sent
NOT_FROM_THERE = "this worker's memory is not to be read from here: it is on another host"


def dialect_of(transport: str, answer: type) -> Dialect:
    """Of a transport whose owner answers a `Find` so."""
    return Dialect(
        transport, from_reader={Find: 1, FindRegions: 3}, from_owner={answer: 2, RegionsAre: 4}
    )


class OneSidedOwner(OwnerSide):
    """See `OwnerSide`."""

    is_one_sided = True
    strides = True
    sessions: type[OneSidedSession]

    def session(self, reader: ServedReader) -> OwnerSession:
        return self.sessions(reader, self.dialect)


class OneSidedSession(ABC):
    """See `OwnerSession`. A transport's own has `find`."""

    bytes_max: int = LOCATE_BYTES

    def __init__(self, reader: ServedReader, dialect: Dialect) -> None:
        self._reader = reader
        self._dialect = dialect
        self._lane = reader.lane
        self._connection = reader.connection
        self._memory = reader.memory

    @property
    def refusal(self) -> str:
        """Only readers on this host are told addresses."""
        return "" if self._memory.header is not None and self._lane.is_local else NOT_FROM_THERE

    def serve(self, request: int, access: Access, memory: ChunkMemory) -> None:
        """Say where an access' chunks are."""
        chunks = self._reader.digests_of(access, memory)
        # Where chunks of strips are follows from where the regions are (`FindRegions`).
        places = tuple(
            [
                (chunk, digest, 0 if memory.is_strided else memory.address(chunk))
                for chunk, digest in chunks
            ]
        )
        self._connection.send(ChunksLie(request, places, self._memory.word_of(access)))

    def answer(self, request: int, asked: Find | FindRegions) -> None:
        """Say where regions are; or how the registration is read, with descriptors behind that."""
        if isinstance(asked, FindRegions) and self.refusal:
            raise Unusable(self.refusal)
        found = self._reader.find(asked.registration, asked.generation)
        if isinstance(asked, FindRegions):
            regions = found.memory.addresses[asked.first : asked.first + REGIONS_MAX]
            self._connection.send(self._dialect.reply(request, RegionsAre(regions)))
            return
        said, descriptors = self.find(RegistrationId(asked.registration), *found)
        self._connection.send(self._dialect.reply(request, said))
        if descriptors:
            self._connection.send_descriptors(descriptors)

    @abstractmethod
    def find(
        self, registration: RegistrationId, memory: ChunkMemory, word: tuple[int, int]
    ) -> tuple[object, Sequence[int]]:
        """How that memory is read: the answer to `Find`, and descriptors that this reader is given.
        Raises as `answer`.
        """

    def _check_given(self) -> None:
        """Unusable (NotShared): this reader is given no memory to map or to open."""
        reason, is_usual = self._lane.withheld
        if reason:
            raise (NotShared if is_usual else Unusable)(reason)

    def close(self) -> None:
        """Nothing was set up."""
        return
