"""What a transport is, as its reader sees it; `transport.owner` says what it is to the owner of the memory.

A *channel* is one reader's way to one source under one read lease. One blocking thread (the lane) drives it, or as many as
`Transport.lanes` says:

    channel = transport.open(...)        connect, prove who is who
    channel.submit(chunks)               ask; several batches may be submitted before the first has arrived
    channel.receive(n)                   block until some of them are in the destination, in any order, or the source says
                                         that it lacks them
    channel.close()                      always, from the last thread that drives it

Semantics that every transport keeps:

1. Bytes go straight into the destination's views of the chunks that were submitted, and of no others. A
   chunk's views are written only between its `submit` and the `receive` that names it, or until the channel
   is closed.
2. `receive` names a chunk only when all its bytes were read under the right's generation: a two-sided source
   checks it for each send; a one-sided reader reads the generation word *after* the bytes, and discards them
   if it changed (R3).
3. The digest that `receive` gives is the publisher's, carried by the source. It is not checked here: the lane
   does it. A channel that copies in small pieces may make the digests of what has arrived as well.
4. Every failure is a `ReadFailure`, raised by the call that meets it; a channel that raised is only closed.
5. `Cutter.cut`, from any thread, makes a blocked call of the channel raise soon, also while it still
   connects.
6. No call blocks for more than `stall_timeout_s` unless the source shows that it lives.
7. A source that lacks submitted chunks says so within a second or so (`Lacking`): they are not submitted any
   more, and nothing is written into their views.
8. Where `lanes` is more than 1, so many threads may be inside `submit` and `receive` at a time. A `receive` that finds all
   that was submitted in other threads' hands returns an Arrival of nothing, and does not wait.

Responsible for the contract only. Not responsible for choosing a source, for digests, or for the books
(`Pull`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

from tensorhub.cuda.device import Device
from tensorhub.transport.owner import OwnerSide
from tensorhub.types import ContentId, Endpoint, Incarnation, LeaseId, Location, RegistrationId

BATCH_BYTES = 64 * 2**20  # of one request

Reason = Literal["lost", "stalled", "refused", "corrupt", "unreachable"]


class ReadFailure(Exception):
    """A source cannot be read (any more). `chunk`: the one with another digest, if `reason` is "corrupt".
    `bytes_discarded`: payload that came in, of chunks that no `receive` will name.
    """

    def __init__(self, reason: Reason, detail: str, chunk: int | None = None, bytes_discarded: int = 0) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: Reason = reason
        self.detail = detail
        self.chunk = chunk
        self.bytes_discarded = bytes_discarded


class Unusable(Exception):
    """This transport cannot be used between these two workers, whatever their locations say; another one may be. The text
    says why, and what to do.
    """


class NotShared(Unusable):
    """This transport cannot be used for this registration; for others of the same worker it may. Nothing is wrong."""


@dataclass(frozen=True, slots=True)
class ReadRight:
    """Under which right a reader reads: what each request names, and the owner checks."""

    lease: LeaseId
    incarnation: Incarnation  # the source's; whoever else answers is not the source
    registration: RegistrationId
    generation: int
    content_id: ContentId


class Destination(Protocol):
    """Where chunks go."""

    is_digested: bool  # their digests are XXH3-64, and will be compared

    @property
    def sizes(self) -> Sequence[int]:
        """Of each chunk, in bytes."""

    @property
    def device(self) -> Device | None:
        """On which they are: only a transport that `fills` devices is opened then. None: on none."""

    def buffer(self, chunk: int) -> memoryview:
        """The writable bytes of one chunk, exactly its size."""

    def address(self, chunk: int) -> int:
        """Where they are in this process."""

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """All of it as ascending (address, bytes); no chunk lies in two of them. For those who register memory."""


class Arrival(NamedTuple):
    """Chunks whose bytes are in the destination, each with the digest its source gave (None: the source has
    none).
    """

    chunks: Sequence[tuple[int, int | None]]
    wait_s: float  # until the first byte
    transfer_s: float  # from then on, without `digest_s`
    made: Mapping[int, int] = {}  # digests that the channel made of chunks as they are in the destination: out of the cache
    digest_s: float = 0.0  # what that took


class Lacking(NamedTuple):
    """The source has none of these submitted chunks (yet), and does not wait for them any longer."""

    chunks: Sequence[int]
    has: Sequence[tuple[int, int]]  # ascending (first, count) runs of what it has, perhaps not all of it


class Channel(Protocol):
    """One reader's way to one source; driven by one thread, or by `Transport.lanes`."""

    def submit(self, chunks: Sequence[int]) -> None:
        """Ask for these chunks (ascending, 1 to 1024 of them). Does not wait for them."""

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        """Wait for some of the submitted chunks: one at least, and beyond it no more than `bytes_max`; or for the word that
        some of them are not to be had here now.
        """

    def close(self) -> None:
        """Release everything. Nothing writes into the destination afterwards."""


Place = Literal["host", "device"]
HOST: Final[frozenset[Place]] = frozenset({"host"})
DEVICE: Final[frozenset[Place]] = frozenset({"device"})


class Transport(Protocol):
    """A kind of channel. Made once per incarnation of a worker. Inherit from it, for what is usual."""

    name: str
    lanes: int = 1  # how many threads of one reader get more out of one source than one does
    batch_bytes: int = BATCH_BYTES  # asked for at a time
    fills: frozenset[Place] = HOST  # what its channels' destinations may be

    def reaches(self, here: Location, there: Location) -> bool:
        """Whether a worker at `here` can read one at `there` this way, as far as their locations say."""

    def open(self, endpoint: Endpoint, right: ReadRight, destination: Destination, cutter: Cutter) -> Channel:
        """Connect to the source, in the calling thread. Raises ReadFailure; Unusable, before anything was asked for."""

    def serve(self) -> OwnerSide | None:
        """A new owner's side: a worker takes one, from the first of its incarnations. None: nobody is served this way."""
        return None


def can_fill(transport: Transport, destination: Destination) -> bool:
    return ("host" if destination.device is None else "device") in transport.fills


@runtime_checkable
class Keeping(Protocol):
    """What a transport also is that keeps something between reads: connections, mappings. For any thread."""

    def sweep(self) -> None:
        """Let go of what was not used for a while. Called now and then."""

    def close(self) -> None:
        """Let go of all that no channel uses, and keep nothing from now on. No channel is opened any more."""


class Cutter:
    """Ends, from any thread, what a lane blocks on.

    The lane attaches what ends its present call, and detaches it before it releases the thing: after `detach`
    has returned, `cut` does not touch it any more (a descriptor's number may then belong to somebody else).
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
