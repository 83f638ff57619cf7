"""Which workers are slower than most: each transfer between two workers tells something of both.

Theory of operation. A transfer goes over two workers' links. If it waits for nothing else and
carries little, one of the two is slow, and it does not say which. So it is held against a worker if
its peer can do clearly more: if the peer has *shown* so, as reader or as source, with a third
worker. (Links are as fast in both directions, mostly.) It is held against the worker until it has
shown more itself, with any peer.

A worker's own word, as the reader, is enough. What readers say of a source counts once two of them
say it, so that no reader has a source avoided. Nor does praise help: no worker is compared with
more than the rate that most workers tell of links over that distance (`links`). Slowness heals: a
slow worker reads on, and shows what it can.

It is told as the nearest power of two, so that a worker's changes seldom, and the order of sources
with it. Only transfers within a site tell something: within a host no link is used, and across
sites another one is the limit.

Responsible for the estimated slowness. Not responsible for its use (`choice`), nor for the right to
report (the caller).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tensorhub.scheduler.links import RATE_MAX, SECONDS_MIN, VOTE_S, Distance, bounded

CLEARLY = 1.5  # times as fast: rates that differ by less are taken for equal
SLOWNESS_MAX = 5  # a worker that is slower by more than this power of two counts as so slow
PEERS_MAX = 16  # a worker's remembered peers: the newest ones


@dataclass(frozen=True, slots=True)
class _Met:
    """What the transfers from one worker to another have shown."""

    shown: float  # bytes per second that were carried, or are likely
    most: float  # that could have been
    limited_at: float  # when that was told
    apart: Distance
    as_reader: bool
    said_at: float


class _Charge(NamedTuple):
    """One piece of evidence against a worker: at that time it was slower than a peer that could do
    so much.
    """

    said_at: float
    able: float


class Slowness:
    """What is known of workers' links."""

    def __init__(self) -> None:
        # by worker, by its peer, the oldest first; PEERS_MAX each
        self._met: dict[str, dict[str, _Met]] = {}
        self._slow: dict[str, int] = {}  # the slowness reported last, of workers that were slow

    def __repr__(self) -> str:
        return f"<Slowness: {len(self._met)} workers>"

    def heard(
        self,
        reader: str,
        source: str,
        apart: Distance,
        nbytes: int,
        seconds: float,
        sharers: int | None,
        now: float,
    ) -> None:
        """So many bytes came to `reader` from `source` in so many seconds, while at most `sharers`
        readers shared the source. None: the transfer may have waited for something else than these
        two workers.
        """
        if seconds < SECONDS_MIN or apart in (Distance.HOST, Distance.FAR):
            return
        least = bounded(nbytes / seconds)
        most = RATE_MAX if sharers is None else bounded(least * max(1, sharers))
        shown, limited_at, before = least, now, self._met.get(reader, {}).get(source)
        if before is not None and before.as_reader and before.said_at + VOTE_S > now:
            if sharers is None and CLEARLY * least <= before.shown:
                return  # this report says nothing new, and must not keep an old one alive
            shown = min(max(before.shown, least), most)
            if sharers != 1 and least <= CLEARLY * before.most and before.most < most:
                # that it has shared or waited refutes nothing
                most, limited_at = max(shown, before.most), before.limited_at
        for one, other in ((reader, source), (source, reader)):
            peers = self._met.setdefault(one, {})
            peers.pop(other, None)
            peers[other] = _Met(shown, most, limited_at, apart, one is reader, now)
            if len(peers) > PEERS_MAX:
                del peers[next(iter(peers))]

    def forget(self, worker: str) -> None:
        """It is gone for good."""
        self._met.pop(worker, None)
        self._slow.pop(worker, None)

    def of(self, worker: str, rates: Sequence[float], now: float) -> int:
        """How many times slower than most it is now, as a power of two. 0: it is not. `rates`: of
        links, by distance.
        """
        met = self._fresh(worker, now)
        by_itself, by_readers = list[_Charge](), list[_Charge]()
        for other, each in met.items():
            theirs = (
                o.shown
                for who, o in self._fresh(other, now).items()
                if who != worker and o.apart >= each.apart
            )
            able = min(max(theirs, default=0.0), rates[each.apart]) / (
                1 << self._slow.get(other, 0)
            )
            if CLEARLY * each.most <= able:
                (by_itself if each.as_reader else by_readers).append(_Charge(each.limited_at, able))
        if len(by_readers) > 1:
            one, other_one = sorted(by_readers)[-2:]
            by_itself.append(_Charge(one.said_at, min(one.able, other_one.able)))
        slowness = 0
        for charge in by_itself:
            shown = max(each.shown for each in met.values() if each.said_at >= charge.said_at)
            while slowness < SLOWNESS_MAX and shown * CLEARLY * (1 << slowness) <= charge.able:
                slowness += 1
        if slowness:
            self._slow[worker] = slowness
        else:
            self._slow.pop(worker, None)
        return slowness

    def _fresh(self, worker: str, now: float) -> dict[str, _Met]:
        return {
            other: each
            for other, each in self._met.get(worker, {}).items()
            if each.said_at + VOTE_S > now
        }
