"""When a reader would be done at a source: it is sent to the one with the earliest estimated finish.

`finish = bytes / the share of the source's uplink that the reader would get + hops`. A hop takes a latency and one chunk's
time: a chunk is passed on when it is whole. That one rule gives chains when uplinks are the limit (a source with a child
offers half, a partial replica without one offers all), shallow trees when latency is, and near copies before far ones. What
links carry is known to `links`; `sources` finds the best source. Not responsible for who is a source: the caller leaves out
what must not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tensorhub.scheduler.links import LATENCY_S, Distance


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader is to read: so many bytes, in chunks of about that size."""

    nbytes: int
    chunk_bytes: float


def finish_s(apart: Distance, readers: int, depth: int, wanted: Wanted, rates: Sequence[float]) -> float:
    """Seconds until a reader would be done at a source. `apart`: the distance between the two. `readers`: how many share
    the source's uplink already. `depth`: hops from the source to a complete copy. `rates`: bytes per second of a link, by
    distance.
    """
    rate = rates[apart]
    return wanted.nbytes * (readers + 1) / rate + (LATENCY_S[apart] + wanted.chunk_bytes / rate) * (depth + 1)
