"""A one-sided reader's channel: the owner says where chunks lie, and the reader copies them by itself.

The reader asks, waits and is refused as over tcp, on the two workers' own connection. After a copy the reader looks at the
generation word, and names the chunks only if the word is right (R3). So no fence waits for a reader.

Everything that the source says is hostile. The reader only ever reads from an address that the source names, in the source's
own memory, into the destination's own views, with the lengths of its own manifest. A lie gives an error, or bytes that do
not have their digest.
"""

from __future__ import annotations

import bisect
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import NamedTuple, Protocol

from tensorhub.cuda.device import Spread
from tensorhub.cuda.kernels import SPREAD_BYTES_MAX
from tensorhub.errors import ProtocolError
from tensorhub.memory.addresses import address_of
from tensorhub.memory.strided import Block, bounds
from tensorhub.memory.strided_device import batch_bytes_max, batches
from tensorhub.messages import ChunksLie, StillWaiting
from tensorhub.transport.base import Arrival, Destination, Lacking, ReadFailure, Scattering
from tensorhub.transport.read_client import ReadClient
from tensorhub.transport.staging import Rooms
from tensorhub.transport.streaming_digest import SMALL_BYTES, PiecewiseDigest, StreamingDigests
from tensorhub.transport.strided_source import StridedSource

GROUP_BYTES = 16 * 2**20  # that one thread copies at a time: small, so that all threads end at about the same time
CALL_BYTES = 8 * 2**20  # of one system call, which takes a millisecond or so: a reader notices only then that it is cut off
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


class Source(Protocol):
    """The memory of another process, named by that process' addresses. For several threads."""

    hot_bytes: int  # of one call, if the bytes are digested right after it
    call_bytes: int  # of one call otherwise
    group_bytes: int  # of the calls before one look at the word

    def copy(self, call: Sequence[Piece]) -> None:
        """Copy these pieces (see `cut_up`) into this process, without the GIL. OSError: not all could be read. TimeoutError:
        the source has stalled. Nothing is written here after an error.
        """

    def is_unchanged(self, word: int, generation: int) -> bool:
        """Whether it is still that process, and its word at that address is that generation. OSError: it cannot be read."""


class Gathering(Source, Protocol):
    """A source of which many pieces may be copied to one place."""

    def gather(self, made: Sequence[Block], here: int) -> None:
        """Copy the bytes of these blocks, which are the source's, to that address: of the destination's device, if it is on
        one. Errors as of `copy`.
        """


class Translated:
    """A source's memory that this process has mapped at other addresses. For a `Source` to inherit from."""

    def __init__(self, places: Sequence[tuple[int, int, int]]) -> None:
        """`places`: (address at the source, bytes, address here)."""
        self._places = sorted(places)
        self._starts = [start for start, _, _ in self._places]
        self.is_short = False  # a place was asked for that is not mapped

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, {len(self._places)} places>"

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
        return block._replace(cells=[self._here(cell + below, above - below) - below for cell in block.cells])


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
        gathering: tuple[Gathering, StridedSource] | None = None,
        rows_of: Callable[[Sequence[Block]], list[Spread]] | None = None,
    ) -> None:
        """`gathering`: by what a strided destination is filled, and from where. `rows_of`: blocks of the source, for the
        destination's device to gather by itself (OSError: it does not reach them).
        """
        self._gathering = gathering
        self._rows_of = rows_of
        self._client = client
        self._source = source
        self._right = client.right
        self._destination = destination
        self._cutter = client.cutter
        # guards the attributes below; one thread listens, other threads wait for its messages
        self._turn = threading.Lock()
        self._located: deque[_Located] = deque()  # chunks that no thread has taken yet
        self._rooms: Rooms | None = None  # of the destination's device
        if gathering is not None and destination.device is not None:
            self._rooms = Rooms(destination.device, batch_bytes_max(destination.sizes))

    def __repr__(self) -> str:
        return f"<OneSidedChannel to {self._source!r}, {self._client!r}>"

    def submit(self, chunks: Sequence[int]) -> None:
        self._client.locate(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        started = time.perf_counter()
        # On a GPU the digests are made when everything is there.
        is_small = self._destination.is_digested and bytes_max <= SMALL_BYTES and self._destination.device is None
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
        if self._gathering is not None:
            made, digest_s = self._gather(group, *self._gathering)
            seconds = time.perf_counter() - first_byte - digest_s
            chunks = [(located.chunk, located.digest) for located in group]
            return Arrival(chunks, first_byte - started, seconds, made, digest_s)
        views = [(located.chunk, self._destination.buffer(located.chunk)) for located in group] if is_small else []
        digests = StreamingDigests(views) if is_small else None
        self._copy(group, digests)
        seconds = time.perf_counter() - first_byte
        chunks = [(located.chunk, located.digest) for located in group]
        if digests is None:
            return Arrival(chunks, first_byte - started, seconds)
        return Arrival(chunks, first_byte - started, seconds - digests.seconds, digests.made, digests.seconds)

    def _enter(self, message: object) -> None:
        if not isinstance(message, ChunksLie):
            raise ProtocolError(f"a Locate is answered with {type(message).__name__}")
        self._client.announced(message.request, [chunk for chunk, _, _ in message.chunks])
        self._located.extend([_Located(*chunk, message.word) for chunk in message.chunks])

    def _next_group(self, bytes_max: int) -> list[_Located]:
        """Take the chunks to copy next, under one word: at least one, and further ones up to `bytes_max`."""
        group: list[_Located] = []
        while self._located and self._located[0].word == (group or self._located)[0].word:
            bytes_max -= self._destination.sizes[self._located[0].chunk]
            if group and bytes_max < 0:
                break
            group.append(self._located.popleft())
        return group

    def _copy(self, group: list[_Located], digests: StreamingDigests | None) -> None:
        here, sizes = self._destination.address, self._destination.sizes
        pieces = [Piece(here(located.chunk), located.address, sizes[located.chunk]) for located in group]
        with self._proving(group[0].word) as copied:
            for call in cut_up(pieces, self._source.call_bytes if digests is None else self._source.hot_bytes):
                self._check_cut()
                self._source.copy(call)
                copied(sum(piece.nbytes for piece in call))
                if digests is not None:
                    digests.go_on([piece.nbytes for piece in call])

    def _gather(self, group: list[_Located], source: Gathering, places: StridedSource) -> tuple[dict[int, int], float]:
        """Copy chunks of strips. Returns their digests, and what making those took."""
        destination, made, digest_s = self._destination, dict[int, int](), 0.0
        with self._proving(group[0].word) as copied:
            if destination.device is not None:
                for batch in batches([located.chunk for located in group], destination.sizes):
                    made |= self._gather_on(batch, source, places)
                    copied(sum([destination.sizes[chunk] for chunk in batch]))
                return made, digest_s
            for located in group:
                stream, digest = places.stream(located.chunk), PiecewiseDigest()
                with closing(destination.incoming(located.chunk)) as calls:
                    for views in calls:
                        self._check_cut()
                        for view in views:
                            source.gather(stream.take(view.nbytes), address_of(view))
                            copied(view.nbytes)
                        if destination.is_digested:
                            digest.go_on(views)
                digest_s += digest.seconds
                if destination.is_digested:
                    made[located.chunk] = digest.made
        return made, digest_s

    def _gather_on(self, chunks: Sequence[int], source: Gathering, places: StridedSource) -> Mapping[int, int]:
        """Copy chunks of strips to a device, which digests them while each is in one piece. Returns their digests."""
        destination, rows = self._destination, list[Spread]()
        assert self._rooms is not None
        assert isinstance(destination, Scattering)
        with self._rooms.taken() as room:
            self._check_cut()
            made = list(places.blocks(chunks, SPREAD_BYTES_MAX))
            if self._rows_of is None:
                source.gather(made, room)
            else:
                rows = self._rows_of(made)
            return destination.take_in(chunks, room, rows)

    def _check_cut(self) -> None:
        if self._cutter.is_cut:
            raise ReadFailure("lost", "the read was given up")

    @contextmanager
    def _proving(self, word: int) -> Iterator[Callable[[int], None]]:
        """Within the block bytes are copied, which is said as it is done; behind it the word decides. ReadFailure."""
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
            raise ReadFailure("refused", "the memory has changed its generation", bytes_discarded=copied)

    def close(self) -> None:
        self._client.close()
