"""What links carry, by the distance that they cover: assumed rates, and what transfers have shown
since.

A reader knows how many bytes came in how many seconds. That is a bound from below: the link carries
at least so much. Times the number of readers that shared the link, it is a bound from above.
(Nothing bounds the rate from above if the source was still filling, or was not the only one: the
reader may have waited for something else.) A report moves its reader's *vote* just into these
bounds. So shared links are not taken for slow, slow links are not taken for fast because nobody has
had one alone, and no average has to be tuned.

A distance's rate is the lower median of the newest votes and of the assumed rate. So one reader
alone cannot make it large, and a few that lie among many change nothing. Why the lower one? Errors
are not alike. Links that are taken for too slow make a longer chain than is best, which costs some
latencies. Links that are taken for too fast make readers share a source, and all of them take
several times as long. So the assumed rates, too, are those of modest networks. (Within a host there
is no uplink: all its workers share its memory and its cores.)

Rates belong to distances, not to pairs or workers. A reader meets few sources, each perhaps once,
and what it says of one source would be believed of that source alone. A slow machine is thus one
vote; `slowness` finds it.

Responsible for the estimated rates. Not responsible for their use (`choice`), nor for the right to
report (the caller).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tensorhub.messages import Flow
from tensorhub.types import Location

SUPPOSED_BYTES_PER_S = (40e9, 1.25e9, 1e9, 0.1e9)  # by distance; a network of 10 Gbit/s
# of a hop, by distance: until a chunk that is there is on its way to the next one
LATENCY_S = (0.0005, 0.001, 0.002, 0.05)
VOTES_MAX = 16  # of one distance: so many are believed, the newest ones
VOTE_S = 600.0  # how long one is
SECONDS_MIN = 0.02  # what took less time tells nothing
# bytes per second; whatever is said, no link is taken for slower or faster
RATE_MIN, RATE_MAX = 1e5, 1e12


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
class _Vote:
    bytes_per_s: float
    said_at: float


class FlowMeter:
    """What comes over the link from one source, as its reader tells it: from the first bytes on."""

    def __init__(self) -> None:
        self._began_at: float | None = None  # when its first bytes were there
        self._seconds = 0.0  # from then up to the last ones
        self._nbytes = 0  # that came in that time

    def __repr__(self) -> str:
        return f"<FlowMeter: {self._nbytes} bytes in {self._seconds:.3f} s>"

    def arrived(self, nbytes: int, now: float) -> None:
        if self._began_at is None:
            self._began_at = now
        else:
            self._nbytes += nbytes
            self._seconds = max(self._seconds, now - self._began_at)

    def flow(self, lease: str) -> Flow | None:
        """The flow to report, once the transfer has lasted long enough to tell something."""
        return Flow(lease, self._nbytes, self._seconds) if self._seconds >= SECONDS_MIN else None


class Links:
    """What is known of a cluster's links."""

    def __init__(self) -> None:
        # by voter, the oldest first; VOTES_MAX each
        self._votes: tuple[dict[str, _Vote], ...] = tuple({} for _ in Distance)
        # as of the last vote, until the oldest of them all is too old
        self._rates: tuple[float, ...] = ()
        self._until = -math.inf

    def heard(
        self,
        voter: str,
        apart: Distance,
        nbytes: int,
        seconds: float,
        sharers: int | None,
        now: float,
    ) -> None:
        """So many bytes came to `voter` in so many seconds, over a link that at most `sharers`
        readers shared. None: it may have waited for something else than the link.
        """
        if seconds < SECONDS_MIN:
            return
        votes = self._votes[apart]
        least = bounded(nbytes / seconds)
        most = RATE_MAX if sharers is None else bounded(least * max(1, sharers))
        vote = votes.get(voter)
        before = (
            self.rates(now)[apart]
            if vote is None or vote.said_at + VOTE_S <= now
            else vote.bytes_per_s
        )
        if sharers is None and least <= before:
            return  # this says nothing new, and must not keep an old vote alive
        self._until = -math.inf
        votes.pop(voter, None)
        votes[voter] = _Vote(min(max(before, least), most), now)
        if len(votes) > VOTES_MAX:
            del votes[next(iter(votes))]

    def rates(self, now: float) -> tuple[float, ...]:
        """Bytes per second that a link carries, by distance; never more over a larger distance.

        If a smaller distance of the network turned out slower than assumed, the rates assumed for
        larger ones shrink alike.
        """
        if now >= self._until:
            ends = (vote.said_at + VOTE_S for votes in self._votes for vote in votes.values())
            self._rates, self._until = (
                self._counted(now),
                min((end for end in ends if end > now), default=math.inf),
            )
        return self._rates

    def _counted(self, now: float) -> tuple[float, ...]:
        rates: list[float] = []
        nearer, scale = RATE_MAX, 1.0
        for apart, votes, supposed in zip(Distance, self._votes, SUPPOSED_BYTES_PER_S, strict=True):
            fresh = [vote.bytes_per_s for vote in votes.values() if vote.said_at + VOTE_S > now]
            nearer = min(nearer, _lower_median([bounded(supposed * scale), *fresh]))
            scale = 1.0 if apart is Distance.HOST else min(1.0, nearer / supposed)
            rates.append(nearer)
        return tuple(rates)

    def __repr__(self) -> str:
        counts = zip(Distance, self._votes, strict=True)
        return f"<Links {', '.join(f'{d.name} {len(votes)} votes' for d, votes in counts)}>"


def bounded(bytes_per_s: float) -> float:
    """Nothing is taken for slower or faster than that."""
    return min(max(bytes_per_s, RATE_MIN), RATE_MAX)


def _lower_median(values: Sequence[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]
