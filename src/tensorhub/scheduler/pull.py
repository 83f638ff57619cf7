"""The reader's side of one shard: which chunk is asked of which source, and which chunks are
verified.

Theory of operation
-------------------
A chunk is wanted, in flight at exactly one source, or verified. The table below is the only way on:

    wanted -> in flight     `next_batch` hands it to a lane
    in flight -> verified   it arrived with its digest (G1; final: it is never asked for, nor written, again; G8)
    in flight -> wanted     it arrived with another digest, its source lacks it, or its lane has ended

A source is live or leaving. Leaving means: no new batch; but its lane may still be writing into the
destination of chunks that are in flight there. So these go back to wanted only with `lane_ended`,
and no two lanes ever write the same bytes. What such a lane still brings, with the right digest,
counts as verified like any other.

All live sources draw from one pool, the lowest wanted chunk first: several sources are striped, and
a chain of readers fills in the same order at every link. A lane that finds nothing for it in the
pool waits until that changes: another lane ends, bytes are bad, or another source lacks a chunk.

A source that is still filling may lack what it is asked for. Such a source waits for the chunk, but
not long; then it says what it has (`lacks`), and the chunks are wanted again. From then on the
source is *known*, until it brings a chunk that it did not have then. A known source is asked for
what it has. If nothing of that is wanted, it is asked for a chunk that no other source is thought
to have: one request at a time, and in turns, so that the source that was asked longest ago comes
first.

A source may bring only some of the chunks: one rank of another layout holds no more. Such a source
is complete, is asked for nothing else, and takes no turns.

So a chunk that no source has yet is waited for at some source, and no chunk stays bound to a source
that lacks it while another source has it. Readers that fill from one another complete one another,
whatever cycles they form (R9).

Responsible for the books only: lanes, sockets, digests and time belong to `runtime.data.lanes`.
"""  # noqa: E501 - a table

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from tensorhub.machine import IllegalStep, Story, count_transition, demand
from tensorhub.types import LeaseId

CHUNKS_PER_BATCH_MAX = 1024

Runs = Sequence[tuple[int, int]]
"""Ascending (first, count) runs of chunks."""

_WANTED: Final = 0
_IN_FLIGHT: Final = 1
_VERIFIED: Final = 2
_WANTED_BYTE: Final = bytes([_WANTED])


class SourceState(StrEnum):
    """One source of a pull. A chunk that it had in flight is wanted again only once its lane has
    ended.
    """

    LIVE = "live"  # is given batches of chunks
    LEAVING = "leaving"  # is given no more; its lane may still write
    ENDED = "ended"  # its lane has ended; kept for its counts


SOURCE: Final = "source"  # what this machine is called, where its transitions are counted
SOURCE_TABLE: Final[Mapping[SourceState, frozenset[SourceState]]] = {
    SourceState.LIVE: frozenset({SourceState.LEAVING, SourceState.ENDED}),
    SourceState.LEAVING: frozenset({SourceState.ENDED}),
    SourceState.ENDED: frozenset(),
}


@dataclass(slots=True)
class _Source:
    state: SourceState = SourceState.LIVE
    in_flight: set[int] = field(default_factory=set)
    # what it had when it lacked something; None: everything, or it is unknown
    has: Runs | None = None
    turn: int = 0  # when it was asked last; 0: never, its lane is not up
    bytes_read: int = 0  # payload that its lane took in, discarded included
    # the only chunks that are asked for there, ascending; None: all
    brings: Sequence[int] | None = None
    lowest: int = 0  # none of `brings[:lowest]` is wanted
    verified: int = 0  # all of `brings[:verified]` are

    @property
    def may_have(self) -> Runs | None:
        """What it is thought to have. None: everything."""
        if self.has is not None or self.brings is None:
            return self.has
        return [(chunk, 1) for chunk in self.brings]


class Pull:
    """The chunks of one shard of one content, on their way into this reader's memory."""

    def __init__(self, sizes: Sequence[int], verified: Iterable[int] = ()) -> None:
        """`sizes`: bytes per chunk. `verified`: chunks that the destination holds, and that were
        verified, already.
        """
        self._sizes = sizes
        self._states = bytearray(len(sizes))  # one of _WANTED, _IN_FLIGHT, _VERIFIED per chunk
        self._sources: dict[LeaseId, _Source] = {}
        self._partial: list[_Source] = []  # those that bring only some chunks
        self._turns = 0  # the largest `turn`
        self.story = Story()
        for chunk in verified:
            self._states[chunk] = _VERIFIED
        self._lowest = 0  # no chunk below this is wanted
        # always the number of chunks not verified
        self._unverified = len(sizes) - self._states.count(_VERIFIED)
        self.bytes_wanted: Final = sum(
            n for n, s in zip(sizes, self._states, strict=True) if s != _VERIFIED
        )
        self.bytes_verified = 0  # the part of `bytes_wanted` that is verified
        self.bytes_read = 0  # always the sum over sources, ended ones included
        self.reread_bytes = 0  # the part of it that had been verified before; G8 keeps it 0
        self.retries = 0  # chunks that had to be asked for again

    # ----------------------------------------------------------------------------------------------
    # sources

    def add_source(
        self, lease: LeaseId, complete: bool, brings: Sequence[int] | None = None
    ) -> None:
        """Read from this lease's source as well. `complete` False: it is still filling itself.
        `brings`: the only chunks that it can bring, ascending; None: all.
        """
        if lease in self._sources:
            raise IllegalStep(f"lease {lease} was a source before", self.story)
        self._sources[lease] = source = _Source(brings=brings)
        if brings is not None:
            self._partial.append(source)
        self.story.tell("source", lease, "complete" if complete else "filling")

    def drop_source(self, lease: LeaseId) -> None:
        """Ask nothing more of this source. Its chunks in flight stay so until its lane has
        ended.
        """
        source = self._source(lease)
        if source.state is SourceState.LIVE:
            self._step(lease, source, SourceState.LEAVING)

    def lane_ended(self, lease: LeaseId) -> tuple[int, ...]:
        """The lane of this source has ended and writes no more: its chunks in flight are wanted
        again. Returns those chunks.
        """
        source = self._source(lease)
        if source.state is SourceState.ENDED:
            return ()
        self._step(lease, source, SourceState.ENDED)
        back = tuple(sorted(source.in_flight))
        for chunk in back:
            self._give_back(source, chunk)
        return back

    def _step(self, lease: LeaseId, source: _Source, state: SourceState) -> None:
        if state not in SOURCE_TABLE[source.state]:
            raise IllegalStep(
                f"source {lease} cannot go from {source.state} to {state}", self.story
            )
        count_transition(SOURCE, source.state, state)
        source.state = state
        self.story.tell(lease, state, "in flight", len(source.in_flight))

    def _source(self, lease: LeaseId) -> _Source:
        try:
            return self._sources[lease]
        except KeyError:
            raise IllegalStep(f"lease {lease} is no source of this pull", self.story) from None

    # ----------------------------------------------------------------------------------------------
    # chunks

    def next_batch(self, lease: LeaseId, bytes_max: int) -> tuple[int, ...]:
        """Chunks to ask of this source now, ascending: the lowest wanted one for it, then more up
        to `bytes_max`.

        Empty: the source is leaving, every chunk is verified or in flight somewhere, or other
        sources have the wanted chunks.
        """
        source = self._source(lease)
        if source.state is not SourceState.LIVE:
            return ()
        self._turns += 1
        if source.brings is not None:
            batch = self._take_brought(source, source.brings, bytes_max)
        elif source.has is None:
            batch = self._take(bytes_max, [(self._lowest, len(self._sizes))])
            self._lowest = self._find_wanted(
                batch[-1] + 1 if batch else self._lowest, len(self._sizes)
            )
        else:
            batch = self._take(bytes_max, source.has) or self._take_unheld(source, bytes_max)
        if batch or not source.turn:
            source.turn = self._turns
        source.in_flight.update(batch)
        return tuple(batch)

    def _take(self, bytes_max: int, runs: Iterable[tuple[int, int]]) -> list[int]:
        """The first wanted chunks of these runs, one at least if there is one; in flight from now
        on.
        """
        batch: list[int] = []
        for first, count in runs:
            end = min(first + count, len(self._sizes))
            chunk = self._find_wanted(max(first, self._lowest), end)
            while chunk < end:
                bytes_max -= self._sizes[chunk]
                if len(batch) == CHUNKS_PER_BATCH_MAX or (batch and bytes_max < 0):
                    return batch
                batch.append(chunk)
                self._states[chunk] = _IN_FLIGHT
                chunk = self._find_wanted(chunk + 1, end)
        return batch

    def _take_brought(self, source: _Source, brings: Sequence[int], bytes_max: int) -> list[int]:
        """As `_take`, of the chunks that this source brings."""
        states = self._states
        while source.lowest < len(brings) and states[brings[source.lowest]] != _WANTED:
            source.lowest += 1
        return self._take(bytes_max, ((brings[at], 1) for at in range(source.lowest, len(brings))))

    def _find_wanted(self, start: int, end: int) -> int:
        """The first wanted chunk of a range; its end if there is none."""
        found = self._states.find(_WANTED_BYTE, start, end)
        return end if found < 0 else found

    def _take_unheld(self, source: _Source, bytes_max: int) -> list[int]:
        """Chunks that all sources lack, as far as is known, if it is this source's turn to be
        waited at.
        """
        if source.in_flight:
            return []
        others = [
            s
            for s in self._sources.values()
            if s is not source and s.state is SourceState.LIVE and s.turn
        ]
        if source.has is None or any(
            s.brings is None and (s.has is None or (not s.in_flight and s.turn < source.turn))
            for s in others
        ):
            return []
        return self._take(
            bytes_max, _between([run for s in others for run in s.may_have or ()], len(self._sizes))
        )

    def lacks(self, lease: LeaseId, chunks: Iterable[int], has: Runs) -> None:
        """The source lacks these chunks, which are in flight there, and has stopped waiting for
        them. `has`: what it has.
        """
        source = self._source(lease)
        if source.brings is None:
            source.has = tuple(has)
        for chunk in chunks:
            self._check_in_flight(source, lease, chunk)
            self._want_again(source, chunk)

    @property
    def is_patchy(self) -> bool:
        """Whether a source is known to lack something: then a batch for one lane may make it
        another lane's turn.
        """
        return any(source.has is not None for source in self._sources.values())

    def arrived(self, lease: LeaseId, chunk: int, ok: bool, came: int | None = None) -> None:
        """A chunk in flight at this source is in the destination; `ok`: it has its digest. Its lane
        is done with it. `came`: the bytes that came for it, if that is not its size.
        """
        source = self._source(lease)
        self._check_in_flight(source, lease, chunk)
        if source.has is not None and not _is_in(chunk, source.has):
            source.has = None  # it has got on since
        nbytes = self._sizes[chunk]
        source.bytes_read += nbytes if came is None else came
        self.bytes_read += nbytes if came is None else came
        if self._states[chunk] == _VERIFIED:
            self.reread_bytes += nbytes
        if not ok:
            self.story.tell("bad chunk", chunk, lease)
            self._give_back(source, chunk)
            return
        source.in_flight.discard(chunk)
        self._states[chunk] = _VERIFIED
        self._unverified -= 1
        self.bytes_verified += nbytes
        if not self._unverified:
            self.story.tell("all verified")

    def discarded(self, lease: LeaseId, nbytes: int) -> None:
        """Bytes of a chunk in flight came in, but the rest of it never will."""
        self._source(lease).bytes_read += nbytes
        self.bytes_read += nbytes

    def _check_in_flight(self, source: _Source, lease: LeaseId, chunk: int) -> None:
        if chunk not in source.in_flight:
            raise IllegalStep(f"chunk {chunk} is not in flight at {lease}", self.story)

    def _give_back(self, source: _Source, chunk: int) -> None:
        self._want_again(source, chunk)
        self.retries += 1

    def _want_again(self, source: _Source, chunk: int) -> None:
        source.in_flight.discard(chunk)
        self._states[chunk] = _WANTED
        self._lowest = min(self._lowest, chunk)
        for each in self._partial:
            each.lowest = min(each.lowest, bisect_left(each.brings or (), chunk))

    # ---------------------------------------------------------------------------------------------
    # inspection

    @property
    def done(self) -> bool:
        """Whether every chunk is verified."""
        return self._unverified == 0

    def is_through(self, lease: LeaseId) -> bool:
        """Whether all that this source can bring is verified, wherever it came from."""
        source = self._source(lease)
        if source.brings is None:
            return self.done
        while (
            source.verified < len(source.brings)
            and self._states[source.brings[source.verified]] == _VERIFIED
        ):
            source.verified += 1
        return source.verified == len(source.brings)

    @property
    def chunks_verified(self) -> int:
        return len(self._sizes) - self._unverified

    @property
    def verified(self) -> bytes:
        """One byte per chunk, 1 if it is verified."""
        return bytes(state == _VERIFIED for state in self._states)

    def in_flight(self, lease: LeaseId) -> frozenset[int]:
        """The chunks that only this source's lane may write now."""
        return frozenset(self._source(lease).in_flight)

    def source_bytes(self, lease: LeaseId) -> int:
        """Payload taken in from this source, discarded included."""
        return self._source(lease).bytes_read

    def check_invariants(self) -> None:
        """Raise InvariantBroken if this object's own books disagree."""
        held = [chunk for source in self._sources.values() for chunk in source.in_flight]
        sources, states = self._sources.values(), self._states
        is_one = len(held) == len(set(held)) == states.count(_IN_FLIGHT)
        demand(is_one, "a chunk is in flight at one source", self)
        are_in_flight = not held or all(states[chunk] == _IN_FLIGHT for chunk in held)
        demand(are_in_flight, "what a source has in flight is in flight", self)
        over = [s for s in sources if s.in_flight and s.state is SourceState.ENDED]
        demand(not over, "a source ends with nothing", self)
        first = states.find(_WANTED_BYTE, 0, self._lowest)
        demand(first == -1, "no chunk below the lowest one is wanted", self)
        passed = [chunk for s in self._partial for chunk in (s.brings or ())[: s.lowest]]
        is_past = not passed or all(states[chunk] != _WANTED for chunk in passed)
        demand(is_past, "no chunk below a source's lowest one is wanted", self)
        partial = [s for s in sources if s.in_flight and s.brings is not None]
        brought = not partial or all(s.in_flight <= set(s.brings or ()) for s in partial)
        demand(brought, "a source is asked for what it brings", self)
        left = len(self._sizes) - states.count(_VERIFIED)
        demand(self._unverified == left, "chunks that are not verified are counted", self)
        nbytes = sum([source.bytes_read for source in sources])
        demand(self.bytes_read == nbytes, "the bytes of each source are counted", self)
        demand(self.reread_bytes == 0, "no chunk is read twice", self)  # G8

    def __repr__(self) -> str:
        live = sum(source.state is SourceState.LIVE for source in self._sources.values())
        flying = self._states.count(_IN_FLIGHT)
        verified = f"{self.chunks_verified} of {len(self._sizes)} verified"
        return f"<Pull {verified}, {flying} in flight, {live} sources>"


def _is_in(chunk: int, runs: Runs) -> bool:
    return any(first <= chunk < first + count for first, count in runs)


def _between(runs: Iterable[tuple[int, int]], count: int) -> Iterator[tuple[int, int]]:
    """The gaps that these runs, in any order, leave among `count` chunks."""
    at = 0
    for first, length in sorted(runs):
        if first > at:
            yield at, first - at
        at = max(at, first + length)
    if at < count:
        yield at, count - at
