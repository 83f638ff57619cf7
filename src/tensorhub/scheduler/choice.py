"""Which source a reader is sent to: the one with the earliest estimated finish.

`finish = max(what is left / the share of the source's uplink that the reader would get, when the source itself is done)
+ a hop's latency`. Links have a class per distance. That one rule gives chains when uplinks are the limit (a source
with a child offers half, a partial replica without one offers all), shallow trees when latency is, and near copies
before far ones. Not responsible for who is a candidate: the caller leaves out what must not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tensorhub.types import Location

# Bytes per second and seconds per hop: the order of what one link of that class carries in a GPU cluster. Only the
# ratios matter until bandwidths are learnt from transfers.
BANDWIDTH_BY_DISTANCE = (40e9, 20e9, 15e9, 1e9)
LATENCY_S_BY_DISTANCE = (0.0005, 0.001, 0.002, 0.05)
FAILURE_PENALTY_S = 60.0  # one failed read outweighs any distance, so that an untried source always comes first


class Distance(IntEnum):
    HOST = 0
    RACK = 1
    SITE = 2
    FAR = 3


def distance(a: Location, b: Location) -> Distance:
    """How far apart two locations are in the tree site / rack / host."""
    if a.site != b.site:
        return Distance.FAR
    if a.host == b.host:
        return Distance.HOST
    return Distance.RACK if a.rack == b.rack else Distance.SITE


@dataclass(frozen=True, slots=True)
class Candidate:
    """A source that may be read. `depth`: how many fills stand between it and a complete copy (0: is complete)."""

    ident: str
    location: Location
    readers: int
    depth: int
    failures: int
    bytes_missing: int  # what the source itself still lacks


def estimate_finish_s(reader: Location, candidate: Candidate, nbytes: int) -> float:
    """Seconds until a reader of `nbytes` bytes would be done at this source."""
    apart = distance(reader, candidate.location)
    share = BANDWIDTH_BY_DISTANCE[apart] / (candidate.readers + 1)
    own = candidate.bytes_missing / BANDWIDTH_BY_DISTANCE[apart]
    hops = LATENCY_S_BY_DISTANCE[apart] * (candidate.depth + 1)
    return max(nbytes / share, own) + hops + candidate.failures * FAILURE_PENALTY_S


def choose(reader: Location, candidates: Sequence[Candidate], nbytes: int) -> Candidate | None:
    """The candidate with the earliest estimated finish; the first of equals. None if there is none."""
    return min(candidates, key=lambda c: estimate_finish_s(reader, c, nbytes), default=None)
