"""Where the seconds of one update went: its critical path over all machines.

The path begins with the call of the rank that took longest, and ends with its return. In between it
passes from rank to rank: through the one that called last, the one that was ready last, and the one
whose vote came last, by the coordinator's clock. Only the read of that rank is divided by its own
worker's timings, and by those of its sources; where a source waited for its own source, the path
goes on there. Durations of one machine are never compared with times of another one, but for what
is left of the wall time: messages, and the coordinator's own lateness. So the parts add up (G12).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from tensorhub.messages import Took
from tensorhub.observed import PARTS_MAX, Explanation, LinkTiming, Part, ServedTiming
from tensorhub.types import OpKey, VersionInfo

HOPS_MAX = 8  # from source to source
LOST_SHARE = 0.01  # of the segments: so many sent again are named
FAST_SHARE = 0.5  # of what others have at the same time: a slower reader's link is its own
RANKS_NAMED_MAX = 8
NAME_CHARS_MAX = 60  # of a name within a sentence
LANES_DIVIDED_MAX = 1024  # of one answer


@dataclass(slots=True, eq=False)
class Lane:
    """One rank's read of one source, under one lease."""

    source: str  # its worker's name
    incarnation: str  # the source's
    fills: tuple[OpKey, int] | None  # the call and rank that filled the source's memory meanwhile
    since: float
    until: float | None = None
    served: ServedTiming | None = None

    def is_beside(self, other: Lane) -> bool:
        """Whether it is another reader's, of the same source at the same time."""
        return (
            self is not other
            and self.incarnation == other.incarnation
            and self.since < (other.until or math.inf)
            and other.since < (self.until or math.inf)
        )


@dataclass(slots=True, eq=False)
class Rank:
    """When the coordinator handled what of one rank; None: not yet."""

    rank: int
    worker: str
    incarnation: str
    called_at: float
    hold: bool  # it has a `before_write`
    former: tuple[OpKey, ...]  # earlier operations of the same call
    ready_at: float | None = None
    leased_at: float | None = None
    verified_at: float | None = None
    agreed_at: float | None = None
    sourceless_at: float | None = None  # it has no source, since then
    sourceless_s: float = 0.0  # before, altogether
    lanes: dict[str, Lane] = field(default_factory=dict)  # by lease
    took: Took | None = None


@dataclass(slots=True, eq=False)
class Update:
    """One call of one group that fills memory. Once it has ended, its slowest ranks only."""

    key: OpKey
    call: str
    world_size: int
    is_staged: bool
    began_at: float
    info: VersionInfo | None = None  # set once it is bound
    bound_at: float | None = None
    written_at: float | None = None  # all ranks were told to write
    prepared_at: float | None = None
    ended_at: float | None = None
    outcome: str = "running"  # or "committed", or the name of the error
    calls: int = 0  # ranks that have called
    ranks: dict[int, Rank] = field(default_factory=dict)
    others: int = 0  # ranks that were dropped, and have not said yet how long they took
    waits: list[tuple[float, str]] = field(default_factory=list)  # all ranks, from then on
    bytes_read: int = 0  # of all ranks, as they say

    def seen_s(self, rank: Rank, now: float) -> float:
        """How long the coordinator has seen the rank's call run, up to now."""
        return (now if self.ended_at is None else self.ended_at) - rank.called_at

    def wall_s(self, now: float) -> float:
        """How long it took by the rank that took longest, up to now."""
        first = subject(self)
        told_s = first.took.seconds if first.took is not None else 0.0
        return max(told_s, self.seen_s(first, now))


def subject(update: Update) -> Rank:
    """The rank that took longest: as it says, or else the one that called first."""
    ranks = update.ranks.values()
    return max(ranks, key=lambda r: (r.took.seconds if r.took is not None else 0.0, -r.called_at))


@dataclass(slots=True)
class Known:
    """What one answer goes by. `find`: another update. `late`: from when to when the coordinator
    came to nothing of what waited for it. `rates_beside`: of other readers of a lane's source, in
    bytes per second. `lanes_left`: that may still be divided.
    """

    find: Callable[[OpKey], Update | None]
    late: Sequence[tuple[float, float]]
    rates_beside: Callable[[Update, Lane], list[float]]
    lanes_left: int = LANES_DIVIDED_MAX


def explanation(update: Update, now: float, wall_offset_s: float, known: Known) -> Explanation:
    """Of this update."""
    first, end = subject(update), now if update.ended_at is None else update.ended_at
    path = _Path(first.called_at, known)
    for key in first.former if known.lanes_left > 0 else ():
        before = known.find(key)
        rank = before.ranks.get(first.rank) if before is not None else None
        if before is not None and rank is not None and before.ended_at is not None:
            path.to(rank.called_at, "control", first.worker)
            path.follow(before, rank, before.ended_at)
    path.to(first.called_at, "control", first.worker)
    path.follow(update, first, end)
    if first.took is not None:
        path.finish(update, first, first.took)
    parts, seconds = _merged(path.parts)
    critical = path.critical.took if path.critical is not None else None
    return Explanation(
        model=update.key.model,
        version=update.info.version if update.info is not None else 0,
        group=update.key.group,
        call=update.call,
        key=update.key,
        ended_at=max(0.0, end + wall_offset_s),
        seconds=seconds,
        sentence=_sentence(update, parts, seconds),
        parts=tuple(parts),
        links=critical.links if critical is not None else (),
        unsure_s=sum(part.seconds for part in parts if part.name in ("control", "coordinator")),
        nbytes=update.info.nbytes if update.info is not None else 0,
        lineage=update.info.lineage if update.info is not None else 0,
    )


class _Path:
    """A critical path, as far as it is known up to the time `at` of the coordinator's clock."""

    def __init__(self, at: float, known: Known) -> None:
        self.parts: list[Part] = []
        self.at = self.began_at = at
        self.critical: Rank | None = None  # whose vote came last
        self._known = known

    def to(self, until: float, name: str, worker: str = "", text: str = "") -> None:
        """Up to then it was one thing, but for the time that the message which ended it waited for
        its turn.
        """
        seconds = until - self.at
        if seconds > 0.0:
            waited = [until - max(a, self.at) for a, b in self._known.late if a <= until <= b]
            late_s = max(waited, default=0.0)
            self.parts += [Part(name, seconds - late_s, worker, "", text)]
            self.parts += [Part("coordinator", late_s)]
            self.at = until

    def _late_s(self, since: float, until: float) -> float:
        """For how long it was late then: whatever it said, or should have heard, may have waited
        so long.
        """
        return sum(max(0.0, min(b, until) - max(a, since)) for a, b in self._known.late)

    def _wait(self, update: Update, until: float) -> None:
        """Up to then all ranks waited, as noted."""
        name = "version"
        for since, other in update.waits:
            if since > self.at:
                self.to(min(since, until), name)
            name = other
        self.to(until, name)

    def follow(self, update: Update, first: Rank, end: float) -> None:
        """From the call of that rank up to the end of this operation."""
        self.at = first.called_at
        if not self.parts:
            self.began_at = self.at
        ranks = list(update.ranks.values())
        last = max(ranks, key=lambda rank: rank.called_at)
        if update.calls < update.world_size:
            self.to(end, "ranks", "", _missing(update))
            return
        self.to(last.called_at, "ranks", last.worker)
        self._wait(update, end if update.bound_at is None else update.bound_at)
        if update.bound_at is None:
            return
        self._until_written(update, ranks, end)
        readers = [rank for rank in ranks if rank.leased_at is not None]
        if update.written_at is None or not readers:
            self._wait(update, end)
            return
        self.critical = slow = max(readers, key=lambda rank: rank.agreed_at or math.inf)
        if slow.leased_at is not None:
            self.to(slow.leased_at, "source", slow.worker)
        self._read(update, slow, end if slow.verified_at is None else slow.verified_at)
        self.to(end if slow.agreed_at is None else slow.agreed_at, "digests", slow.worker)
        decided_at = end if update.prepared_at is None else update.prepared_at
        self.to(decided_at, "fence" if update.is_staged else "others")
        self.to(end, "store")

    def _until_written(self, update: Update, ranks: list[Rank], end: float) -> None:
        """From the bound version until all ranks may write."""
        if update.written_at is not None and update.written_at <= self.at:
            return
        busy = [r for r in ranks if r.ready_at is None and r.agreed_at is None]
        if update.written_at is None and busy:
            self._get_ready(busy[0], end)
        ready = [rank for rank in ranks if rank.ready_at is not None]
        if ready:
            last = max(ready, key=lambda rank: rank.ready_at or 0.0)
            self._get_ready(last, min(last.ready_at or 0.0, update.written_at or end))
        self._wait(update, end if update.written_at is None else update.written_at)

    def _get_ready(self, rank: Rank, until: float) -> None:
        """The rank plans, and runs its caller's hook."""
        hook_s = until - self.at if rank.hold else 0.0
        if rank.took is not None:
            hook_s = dict(rank.took.phases).get("hook", 0.0)
        self.to(min(until, self.at + hook_s), "before_write", rank.worker)
        self.to(until, "control", rank.worker, "planning, and messages")

    def _read(self, update: Update, rank: Rank, until: float) -> None:
        """The read of this rank, up to then."""
        seconds = until - self.at
        if seconds > 0.0:
            open_s = 0.0 if rank.sourceless_at is None else max(0.0, until - rank.sourceless_at)
            alone_s = min(seconds, rank.sourceless_s + open_s)
            self.parts += [Part("source", alone_s, rank.worker)]
            self.parts += self._divided(
                update, rank, seconds - alone_s, self._late_s(self.at, until)
            )
            self.at = until

    def finish(self, update: Update, first: Rank, took: Took) -> None:
        """What the wall time of the rank has beyond that: before its first message was handled, and
        after the decision.
        """
        left = max(0.0, took.seconds - (self.at - self.began_at))
        before_s = self._late_s(self.began_at - left, self.began_at)
        late_s = min(left, before_s + self._late_s(self.at, self.at + left))
        self.parts.append(Part("coordinator", late_s))
        left -= late_s
        if update.is_staged:  # it is put in place after the decision
            for name, phase in (("fence", "fence"), ("copy", "apply")):
                seconds = min(left, dict(took.phases).get(phase, 0.0))
                self.parts.append(Part(name, seconds, first.worker))
                left -= seconds
        self.parts.append(Part("control", left, first.worker))

    # -- a read, by the timings of workers

    def _divided(
        self, update: Update, rank: Rank, seconds: float, late_s: float, hops: int = HOPS_MAX
    ) -> list[Part]:
        """Parts of so many seconds in which this rank has read."""
        took, me, can_be_divided = rank.took, rank.worker, self._known.lanes_left > 0
        self._known.lanes_left -= 1 + len(took.links if took is not None else ())
        if took is None or not can_be_divided or not (took.phases or took.links):
            lanes = [lane.source for lane in rank.lanes.values()]
            text = "its worker has not said what took how long"
            text = f"not divided: {text if can_be_divided else 'this answer is too long'}"
            return [Part("link", seconds, me, lanes[-1] if lanes else "", text)]
        parts, left, phases = list[Part](), seconds, Counter(dict(took.phases))

        def add(name: str, most: float, text: str = "") -> None:
            nonlocal left
            parts.append(Part(name, min(left, max(0.0, most)), me, "", text))
            left -= parts[-1].seconds

        if update.is_staged:
            add("before_write", phases["hook"])
        else:
            add("fence", phases["fence"])
        add("other", phases["room"], "making room in host memory")
        add("copy", phases["copy"] + phases["unpack"])
        shares = [self._shares(update, rank, link) for link in took.links]
        total = sum(part.seconds for share in shares for part in share)
        scale = min(1.0, left / total) if total else 0.0
        # the path goes on at the source that lacked most, and its own source
        upstream = [sum(p.seconds for p in share if p.name == "upstream") for share in shares]
        if any(upstream) and hops:
            place = upstream.index(max(upstream))
            shares[place] = self._followed(rank, took.links[place], shares[place], hops)
        parts += [_scaled(part, scale) for share in shares for part in share]
        left -= total * scale
        add("digest", phases["verify"] - sum(link.digest_s for link in took.links))
        parts.append(Part("coordinator", min(left, late_s)))
        left -= parts[-1].seconds
        messages_s = max(0.0, took.seconds - update.seen_s(rank, self.at))
        read_s = phases["wait"] + phases["transfer"] + phases["verify"]
        laneless_s = max(0.0, read_s - sum(link.seconds for link in took.links))
        add("control", phases["prepare"] + messages_s + laneless_s)
        return [*parts, Part("other", max(0.0, left), me)]

    def _followed(self, rank: Rank, link: LinkTiming, share: list[Part], hops: int) -> list[Part]:
        """The same, with the time in which the source lacked chunks divided as its own read was."""
        fills = rank.lanes[link.lease].fills
        above = self._known.find(fills[0]) if fills is not None else None
        source = above.ranks.get(fills[1]) if above is not None and fills is not None else None
        if above is None or source is None or source.leased_at is None:
            return share
        until = source.verified_at or above.ended_at or self.at
        seconds = max(until - source.leased_at, 1e-9)
        # each hop once: what it lacked by its own account and by its source's is one wait
        lacked_s = sum(part.seconds for part in share if part.name == "upstream")
        divided = self._divided(above, source, seconds, 0.0, hops - 1)
        followed = [_scaled(each, lacked_s / seconds) for each in divided if each.seconds > 0.0]
        return [*followed, *(part for part in share if part.name != "upstream")]

    def _shares(self, update: Update, rank: Rank, link: LinkTiming) -> list[Part]:
        """What one lane's seconds were; they add up to its wall time, or less."""
        lane, me, source = rank.lanes[link.lease], rank.worker, link.source
        own = {
            "cpu": link.cpu_s + link.delay_s,
            "gil": link.gil_s,
            "digest": link.digest_s,
            "codec": link.codec_s,
        }
        threads_s = sum(own.values()) + link.link_s + link.empty_s
        parts = [Part(name, seconds, me) for name, seconds in own.items()]
        if link.delay_s > link.cpu_s:
            parts[0] = replace(parts[0], text="mostly waiting for a core")
        parts += [Part("upstream", link.empty_s, me, source)]
        parts += self._waits_for_bytes(update, me, link, lane, max(0.0, link.seconds - threads_s))
        scale = min(1.0, link.seconds / threads_s) if threads_s else 0.0
        return [_scaled(part, scale) for part in parts if part.seconds > 0.0]

    def _waits_for_bytes(
        self, update: Update, me: str, link: LinkTiming, lane: Lane, idle_s: float
    ) -> Iterator[Part]:
        """Why a lane's threads waited for bytes, by what the source says. Where that overlaps, it
        is shared out.
        """
        rate = link.nbytes / link.seconds if link.seconds else 0.0
        served = lane.served or ServedTiming(link.lease, 0, 0.0)
        busy_s = served.delay_s + served.gil_s
        lacked_s = max(0.0, served.empty_s - link.empty_s)
        at_source_s = busy_s + lacked_s + served.disk_s
        claimed = max(link.link_s, at_source_s + served.blocked_s)
        share = link.link_s / claimed if claimed else 0.0
        yield Part("source busy", busy_s * share, me, link.source, "it lacked a core, or the GIL")
        yield Part("source disk", served.disk_s * share, me, link.source)
        yield Part("upstream", lacked_s * share, me, link.source)
        on_way_s = max(0.0, link.link_s - at_source_s * share)
        reader_s = min(served.window_s, on_way_s)
        idle_s = min(idle_s, served.window_s - reader_s)  # it did not even ask
        yield Part("reader", reader_s + idle_s, me, link.source)
        on_way_s -= reader_s
        if served.segments and served.resent / served.segments >= LOST_SHARE:
            lost = f"{served.resent / served.segments:.1%} of the segments sent again"
            yield Part("loss", on_way_s, me, link.source, f"{lost}, {_rate(rate)}")
            return
        beside = self._known.rates_beside(update, lane) if served.readers else []
        others_s = 0.0
        if not beside or rate >= FAST_SHARE * sum(beside) / len(beside):
            others_s = on_way_s * served.readers / (served.readers + 1.0)
        text = f"{served.readers:.1f} other readers at a time"
        yield Part("source busy", others_s, me, link.source, text)
        where = f", from {link.site}" if link.site else ""
        yield Part("link", on_way_s - others_s, me, link.source, f"{_rate(rate)}{where}")


def _missing(update: Update) -> str:
    """The ranks that have not called."""
    if len(update.ranks) < update.calls:
        return f"no call of {update.world_size - update.calls} ranks"
    missing = (str(rank) for rank in range(update.world_size) if rank not in update.ranks)
    named = list(islice(missing, RANKS_NAMED_MAX))
    more = ", ..." if update.world_size - update.calls > len(named) else ""
    return f"no call of rank {', '.join(named)}{more}"


def _scaled(part: Part, by: float) -> Part:
    return Part(part.name, part.seconds * by, part.worker, part.peer, part.text)


def _rate(bytes_per_s: float) -> str:
    mbit = bytes_per_s * 8e-6
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"


def _merged(parts: list[Part]) -> tuple[list[Part], float]:
    """The parts without empty ones, equal ones as one, and their sum. What is too much for the
    list is not attributed.
    """
    found: dict[tuple[str, str, str], Part] = {}
    for part in parts:
        if part.seconds > 0.0:
            key = part.name, part.worker, part.peer
            before = found.get(key, part)
            both = part.seconds + (before.seconds if before is not part else 0.0)
            longer = before if before.seconds >= part.seconds else part
            found[key] = replace(longer, seconds=both)
    kept = set(sorted(found, key=lambda key: -found[key].seconds)[: PARTS_MAX - 1])
    merged = [part for key, part in found.items() if key in kept]
    rest = [part.seconds for key, part in found.items() if key not in kept]
    if rest:
        merged.append(Part("other", sum(rest)))
    return merged, sum(part.seconds for part in merged)


SENTENCES = {
    "ranks": "waiting for {worker} to call",
    "version": "waiting for a version",
    "source": "{worker} waited for a worker to read from",
    "before_write": "before_write on {worker}",
    "fence": "ending the reads of the old version on {worker}",
    "upstream": "{worker} waited for chunks that {peer} did not have yet",
    "source busy": "{peer}, from which {worker} read, was busy",
    "source disk": "the disk of {peer}, from which {worker} read",
    "link": "the link from {peer} to {worker}",
    "loss": "the link from {peer} to {worker}, which loses segments",
    "reader": "{peer} waited for {worker} to take bytes",
    "cpu": "the CPU of {worker}",
    "gil": "{worker} waited for its interpreter's lock (GIL)",
    "digest": "digests on {worker}",
    "codec": "applying deltas on {worker}",
    "copy": "copies on {worker}",
    "digests": "{worker} waited for the publisher's digests",
    "others": "waiting for other ranks of the group",
    "store": "the coordinator's store",
    "coordinator": "the coordinator was late",
    "control": "messages between {worker} and the coordinator",
    "other": "not attributed",
}


def _sentence(update: Update, parts: list[Part], seconds: float) -> str:
    """About the longest part."""
    state = "" if update.outcome == "committed" else f"{update.outcome}: "
    if not parts:
        return f"{state}it took no time"
    longest = max(parts, key=lambda part: part.seconds)
    worker = longest.worker[:NAME_CHARS_MAX] or "a worker"
    what = SENTENCES[longest.name].format(worker=worker, peer=longest.peer[:NAME_CHARS_MAX])
    figures = f", {longest.text}" if longest.text else ""
    return f"{state}{longest.seconds:.3g} of {seconds:.3g} s: {what}{figures}"
