"""The estimated finish of a reader at a source: a reader is sent to the source in its site with the
earliest finish.

`finish = bytes / the share of the source's uplink that the reader would get + hops`. A hop takes a
latency and one chunk's time: a chunk is passed on when it is whole. That one rule gives chains when
uplinks are the limit (a source with a child offers half, a partial replica without one offers all),
shallow trees when latency is, and near copies before far ones. A slow source offers a part only, as
if so many shared it: so slow workers stand at the ends of chains. Only a reader without a source in
its site reads from another site, whatever the estimate: no two groups bring a byte into a site.
Within the site, or outside it, an archived version comes after all others.
`links` knows the rates of links, and `slowness` the slow workers; `sources` finds the best source.
Not responsible for the set of sources: the caller leaves out holdings that must not be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tensorhub.scheduler.links import LATENCY_S, Distance


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reader is to read: so many bytes, in chunks of about that size."""

    nbytes: int
    chunk_bytes: float


class Load(NamedTuple):
    """The load of a source. `readers`: how many share its uplink already. `slowness`: its own, or
    that of a source upstream of it, as a power of two. `yielding`: how many more readers leave its
    uplink to other readers: only a reader in another site has to share with them. `archived`: its
    memory may have to be read from an archive first.
    """

    readers: int
    slowness: int
    yielding: int = 0
    archived: bool = False


def finish_s(
    apart: Distance, load: Load, depth: int, wanted: Wanted, rates: Sequence[float]
) -> float:
    """Seconds until a reader would be done at a source. `apart`: the distance between the two.
    `depth`: hops from the source to a complete copy. `rates`: bytes per second of a link, by
    distance. (Within a host no link is used.)
    """
    rate = rates[apart]
    readers = load.readers + (load.yielding if apart is Distance.FAR else 0)
    part = (readers + 1) << (0 if apart is Distance.HOST else load.slowness)
    return wanted.nbytes * part / rate + (LATENCY_S[apart] + wanted.chunk_bytes / rate) * (
        depth + 1
    )


def rank(
    apart: Distance, load: Load, depth: int, wanted: Wanted, rates: Sequence[float]
) -> tuple[int, float]:
    """The source of which this is the least is the best one."""
    group = 2 * (apart is Distance.FAR) + load.archived
    return group, finish_s(apart, load, depth, wanted, rates)
