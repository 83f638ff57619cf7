"""Which source a reader is sent to: the one with the earliest estimated finish.

`finish = max(bytes / the share of the source's uplink that the reader would get, when the source itself is done) + hops`.
A hop takes a latency and one chunk's time: a chunk is passed on when it is whole. That one rule gives chains when uplinks
are the limit (a source with a child offers half, a partial replica without one offers all), shallow trees when latency is,
and near copies before far ones. A source that has failed comes after all that have failed less often. What links carry is
known to `links`. Not responsible for who is a candidate: the caller leaves out what must not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorhub.scheduler.links import LATENCY_S, Distance, distance
from tensorhub.types import Location


@dataclass(frozen=True, slots=True)
class Candidate:
    """A source that may be read. `readers`: who share its uplink. `depth`: how many fills stand between it and a complete
    copy (0: is complete).
    """

    ident: str
    location: Location
    readers: int
    depth: int
    failures: int
    bytes_missing: int  # what the source itself still lacks


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader is to read: so many bytes, in chunks of about that size."""

    nbytes: int
    chunk_bytes: float


def finish_s(apart: Distance, readers: int, depth: int, wanted: Wanted, rates: Sequence[float]) -> float:
    """Seconds until a reader would be done at a source that is so far away, has so many readers and is so deep, where links
    carry `rates`, by distance.
    """
    rate = rates[apart]
    return wanted.nbytes * (readers + 1) / rate + (LATENCY_S[apart] + wanted.chunk_bytes / rate) * (depth + 1)


def estimate_finish_s(reader: Location, candidate: Candidate, wanted: Wanted, rates: Sequence[float]) -> float:
    """Seconds until the reader would be done at this source, where links carry `rates`, by distance."""
    apart = distance(reader, candidate.location)
    own = candidate.bytes_missing / rates[apart]
    hop_s = LATENCY_S[apart] + wanted.chunk_bytes / rates[apart]
    return max(wanted.nbytes * (candidate.readers + 1) / rates[apart], own) + hop_s * (candidate.depth + 1)


def choose(reader: Location, candidates: Sequence[Candidate], wanted: Wanted, rates: Sequence[float]) -> Candidate | None:
    """Of the candidates that have failed least, the one with the earliest estimated finish; of equals, the first. None if
    there are no candidates.
    """
    return min(candidates, key=lambda c: (c.failures, estimate_finish_s(reader, c, wanted, rates)), default=None)
