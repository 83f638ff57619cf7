"""A transport as the reader sees it. `transport.owner` describes the owner's side.

A *channel* is one reader's way to one source under one read lease. A blocking thread (the lane)
drives it, or several, up to `Transport.lanes` (of several channels to one source,
`transport.parallel` makes one):

    channel = transport.open(...)        connect, authenticate both sides
    channel.submit(chunks)               ask; several batches may be submitted before the first has arrived
    channel.receive(n)                   block until some of them are in the destination, in any order, or the source says
                                         that it lacks them
    channel.close()                      always, from the last thread that drives it

Every transport keeps these rules:

1. Bytes go straight into the destination's views of submitted chunks, and into no other memory. A
   chunk's view is written only between its `submit` and the `receive` that names it, or until the
   channel is closed.
2. `receive` names a chunk only when all its bytes were read under the right's generation. A
   two-sided source checks the generation for each send. A one-sided reader reads the generation
   word *after* the bytes, and discards the bytes if the word has changed (R3).
3. The digest that `receive` gives is the publisher's, carried by the source. The lane checks it,
   not the channel. A channel that copies in small pieces may also make the digests of what has
   arrived.
4. Every failure of the source, or on the way to it, is a `ReadFailure`, raised by the call that
   meets it. After that, the channel may only be closed. A TensorHubError (a GPU has failed) or an
   OSError is this process' own failure: it ends the reader's call, and no source is blamed.
5. `Cutter.cut`, from any thread, makes a blocked call of the channel raise soon, even while the
  channel is connecting.
6. No call blocks for more than `stall_timeout_s` unless the source shows that it is alive.
7. A source that lacks submitted chunks says so within a second or so (`Lacking`). These chunks no
   longer count as submitted, and nothing is written into their views.
8. Up to `lanes` threads may be inside `submit` and `receive` at a time. If other threads are
   already reading all that was submitted, `receive` returns an empty Arrival at once.

Responsible for the contract only. Not responsible for choosing a source, for digests, or for the
books (`Pull`).
"""  # noqa: E501 - a table

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final, Literal, NamedTuple, Protocol

from tensorhub.cuda.device import Device, Spread
from tensorhub.deltas import Counts
from tensorhub.layouts.reading import Selection
from tensorhub.memory.base import Base
from tensorhub.model.strips import Strip
from tensorhub.transport.owner import OwnerSide
from tensorhub.types import (
    ContentId,
    DeltaUse,
    Endpoint,
    Incarnation,
    LeaseId,
    Location,
    RegistrationId,
)

BATCH_BYTES = 64 * 2**20  # of one request

Reason = Literal["lost", "stalled", "refused", "starved", "corrupt", "damaged", "unreachable"]


class ReadFailure(Exception):
    """A source cannot be read, or no longer. `chunk`: the chunk with a wrong digest, if `reason` is
    "corrupt". `bytes_discarded`: payload that arrived for chunks that no `receive` will name.
    """

    def __init__(
        self, reason: Reason, detail: str, chunk: int | None = None, bytes_discarded: int = 0
    ) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason
        self.detail = detail
        self.chunk = chunk
        self.bytes_discarded = bytes_discarded

    def alone(self) -> ReadFailure:
        """A copy without the traceback, to be kept: a traceback holds its frames' objects, and so
        the destination.
        """
        return ReadFailure(self.reason, self.detail, self.chunk, self.bytes_discarded)


class Unusable(Exception):
    """This transport does not work between these two workers, whatever their locations say. Another
    one may. The text says why, and what to do.
    """


class NotShared(Unusable):
    """This transport does not work for this registration. It may work for other registrations of
    the worker: nothing is wrong.
    """


@dataclass(frozen=True, slots=True)
class ReadRight:
    """What entitles a reader to read. Each request names it, and the owner checks it."""

    lease: LeaseId
    incarnation: Incarnation  # the source's: no other process may answer
    registration: RegistrationId
    generation: int
    content_id: ContentId
    selection: Selection | None = None  # of which the chunks are; None: of the content's own grid
    base: Base | None = None  # of the destination's chunks, where deltas are wanted
    # bytes/s at which whole chunks are thought to come, until that is measured
    full_rate: float = inf


class Destination(Protocol):
    """Where chunks go.

    A *strided* one has chunks of several pieces of memory, which is the host's or a device's. Only
    transports with `strides` are given it.
    """

    is_digested: bool  # their digests are XXH3-64, and will be compared

    @property
    def sizes(self) -> Sequence[int]:
        """Of each chunk, in bytes."""

    @property
    def device(self) -> Device | None:
        """The device that the chunks are on, which the transport must be able to fill (`fills`).
        None: host memory.
        """

    @property
    def is_strided(self) -> bool:
        """Whether chunks have neither `buffer` nor `address`, but `incoming`."""

    def strips(self, chunk: int) -> tuple[Strip, ...]:
        """Of a strided destination: where a chunk is in its regions, which a source of this layout
        has, too.
        """

    def incoming(self, chunk: int) -> Generator[list[memoryview]]:
        """Room for the bytes of a chunk of a strided destination, in order, in lists of writable
        views. When the next list is asked for, the last one has been filled. Nothing is written
        once the generator is closed.
        """

    def take_in(
        self, chunks: Sequence[int], at: int, gathered: Sequence[Spread] = ()
    ) -> Mapping[int, int]:
        """Of a strided destination on a device: have the device gather these rows at that address,
        digest what is there, of these chunks one behind the other, and copy it to where it belongs.
        Returns the digests: none, if this memory has none.
        """

    def buffer(self, chunk: int) -> memoryview:
        """The writable bytes of one chunk, exactly its size."""

    def address(self, chunk: int) -> int:
        """Where they are in this process."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """The whole destination as ascending (address, bytes), for transports that register memory.
        A chunk lies in one.
        """


class Arrival(NamedTuple):
    """Chunks whose bytes are in the destination, each with the digest that its source gave (None:
    it has none).
    """

    chunks: Sequence[tuple[int, int | None]]
    wait_s: float  # until the first byte
    transfer_s: float  # from then on, without `digest_s`
    # digests that the channel made of these chunks while their bytes were in the cache
    made: Mapping[int, int] = {}
    digest_s: float = 0.0  # what that took
    discarded_bytes: int = 0  # that came in vain, of chunks that a later `receive` names
    # of each chunk that was made from its base: the deltas that came instead of it
    deltas: Mapping[int, tuple[bytes, ...]] = {}
    codec_s: float = 0.0  # what applying them took, a part of `transfer_s`
    counts: Counts = Counts()  # of the words of these deltas
    use: DeltaUse = DeltaUse.UNDECIDED  # why chunks came whole, where the right has a base
    calls: int = 1  # of the kernel and others that gave the GIL away, about


class Lacking(NamedTuple):
    """The source has none of these submitted chunks (yet), and does not wait for them any
    longer.
    """

    chunks: Sequence[int]
    # ascending (first, count) runs of what it has, perhaps not all of it
    has: Sequence[tuple[int, int]]
    calls: int = 1  # as of Arrival


class Channel(Protocol):
    """One reader's way to one source; driven by one thread, or by `Transport.lanes`."""

    def submit(self, chunks: Sequence[int]) -> None:
        """Ask for these chunks (ascending, 1 to 1024 of them). Does not wait for them."""

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        """Wait for submitted chunks: at least one, and further ones up to `bytes_max`. Or for word
        that the source lacks some of them now.
        """

    def close(self) -> None:
        """Release everything. Nothing writes into the destination afterwards."""


Place = Literal["host", "device"]
HOST: Final[frozenset[Place]] = frozenset({"host"})
DEVICE: Final[frozenset[Place]] = frozenset({"device"})


class Transport(Protocol):
    """A way to read. Made once per incarnation of a worker. Inherit from it to get the defaults."""

    name: str
    lanes: int = 1  # threads of one reader that read faster from one source than one thread does
    connections: int = 1  # of one reader to one source in another site; each has a thread
    batch_bytes: int = BATCH_BYTES  # of one request
    fills: frozenset[Place] = HOST  # where its channels' destinations may be
    strides: bool = False  # its channels read selections, and fill strided destinations
    deltas: bool = False  # its channels apply deltas to the right's base
    waits: bool = False  # its channels' threads wait for a network, and need no core each
    of_archives: bool = False  # it reads versions in archives, and nothing else
    # its bytes stay in their host, or TLS covers them where there is TLS
    private: bool = False
    via: str = ""  # the transport to whose endpoints it connects; "": it has its own

    def reaches(self, here: Location, there: Location) -> bool:
        """Whether a worker at `here` can read one at `there` this way, judging by their
        locations.
        """

    def open(
        self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter
    ) -> Channel:
        """Connect to the source, in the calling thread. Raises ReadFailure; Unusable, before
        anything was asked for.
        """

    def serve(self) -> OwnerSide | None:
        """A new owner's side. A worker asks for one, once, for all its incarnations. None: no
        reader is served this way.
        """
        return None

    def sweep(self) -> None:
        """Let go of things that were kept between reads and not used for a while. Called now and
        then, by any thread.
        """
        return

    def close(self) -> None:
        """Let go of all that no channel uses, and keep nothing from now on. No channel is opened
        after this. For any thread.
        """
        return


def can_fill(transport: Transport, destination: Destination) -> bool:
    """Whether a transport reads into a destination. The bytes for a strided destination are in
    several pieces at the source as well, or belong to a selection.
    """
    place: Place = "host" if destination.device is None else "device"
    return place in transport.fills and (transport.strides or not destination.is_strided)


class Cutter:
    """Ends, from any thread, what a lane blocks on.

    The lane attaches what ends its present call, and detaches it before it releases the resource.
    Once `detach` has returned, `cut` no longer touches that resource, so a descriptor's number may
    be used for something else.
    """

    __slots__ = ("_end", "_is_cut", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], None] | None = None
        self._is_cut = False

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    def attach(self, end: Callable[[], None]) -> None:
        """Have `end` called by `cut` (now, if it came first). `end` must not block."""
        with self._lock:
            self._end = end
            if self._is_cut:
                end()

    def detach(self) -> None:
        with self._lock:
            self._end = None

    def cut(self) -> None:
        """End the lane's blocking call, and every later one. May be called any number of times."""
        with self._lock:
            self._is_cut = True
            if self._end is not None:
                self._end()
