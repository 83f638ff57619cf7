"""What an update would have taken with one change: of where it reads from, or of what it waits for.

Theory of operation. What the change does not touch stays as it was measured. What it takes away is
taken off the critical path. A read is one flow from each source, over the source's link, the
reader's link, and the reader's own work (digests, codec, a core, the interpreter's lock), which is
a link as well: the bytes that it can take per second. Links have the capacities that the measured
rates show; so without a change the read takes what it took. Rates that the update itself does not
show come from other updates of the model; where there is none to go by, nothing is said.

Pure. Workers' claims go in; so figures are bounded, and a name is only ever text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import median

from tensorhub.flows.network import max_min
from tensorhub.observed import Explanation

HELPS = 0.9  # of the seconds: what leaves more is not worth saying
SAID_MAX = 3
COMPARED_MAX = 8  # other updates: so many are worth asking for
NAME_CHARS_MAX = 60
SAME_SHARE = 1.5  # as fast, but for so much
NO_LIMIT = 1e30  # bytes per second
DIRECT = "archive"  # the transport of readers that read an archive themselves

# the parts of a read
OWN = frozenset({"reader", "cpu", "gil", "digest", "codec"})
READ = OWN | {"upstream", "source busy", "source disk", "link", "loss"}
COPIED = READ | {"copy", "other"}  # what a read without a source is
BEFORE = READ | {"source", "digests"}  # what a prefetch does before the call


@dataclass(frozen=True, slots=True)
class Change:
    """`text` says what the change is, and has the seconds that the update would take with it."""

    name: str
    seconds: float
    text: str


def helping(
    found: Explanation, others: Sequence[Explanation] = (), sites: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """What would have helped this update, in words with figures, the best first: at most SAID_MAX.

    `others`: updates of the same model. `sites`: where workers are, by name, as far as known.
    """
    made = sorted(changes(found, others, sites), key=lambda each: each.seconds)
    useful = [each.text for each in made if each.seconds < HELPS * found.seconds]
    return tuple(useful[:SAID_MAX])


def changes(
    found: Explanation, others: Sequence[Explanation] = (), sites: Mapping[str, str] | None = None
) -> list[Change]:
    """All that can be predicted, also what helps little."""
    others = [each for each in others if each.key != found.key and each.model == found.model]
    made = [*_of_waits(found, others)]
    read = _Read.of(found, sites or {})
    if read is not None:
        known = [each for each in (_Read.of(other, sites or {}) for other in others) if each]
        made += _of_reads(read, known)
    return [
        Change(name, seconds, f"{text}: {seconds:.2g} s")
        for name, left_s, text in made
        for seconds in [min(found.seconds, max(0.0, left_s))]
    ]


Made = tuple[str, float, str]  # a change's name, the seconds, what it is


def _of_waits(found: Explanation, others: Sequence[Explanation]) -> Iterator[Made]:
    """Changes that take a part away."""
    by_name = _by_name(found)
    last = max((p for p in found.parts if p.name == "ranks"), key=lambda p: p.seconds, default=None)
    if last is not None and last.worker:
        text = f"with {last.worker[:NAME_CHARS_MAX]} calling when the others do"
        yield "ranks", found.seconds - by_name["ranks"], text
    if "before_write" in by_name:
        yield "hook", found.seconds - by_name["before_write"], "without before_write"
    if "store" in by_name:
        yield "store", found.seconds - by_name["store"], "with a faster store"
    if found.call == "update" and found.links:
        copies = [
            sum(part.seconds for part in other.parts if part.name in COPIED) / other.nbytes
            for other in others
            if other.call == "update" and other.nbytes and "copy" in _by_name(other)
            if not any(link.nbytes for link in other.links)
        ]
        if copies:
            gone_s = sum(by_name.get(name, 0.0) for name in BEFORE)
            left_s = found.seconds - gone_s + median(copies) * found.nbytes
            yield "ahead", left_s, "with a prefetch before it"


def _of_reads(read: _Read, known: Sequence[_Read]) -> Iterator[Made]:
    """Changes of sources and links. `known`: other reads of the model."""
    mine = [each.rate for each in known if each.worker == read.worker]
    link_rate = max([read.rate, *mine])  # what this reader's link is known to carry
    far = [source for source, site in read.sources.items() if site]
    if far and read.site:
        near = [each.rate for each in known if each.site == read.site and each.is_near]
        if near:
            left_s = read.left_s([median(near)])
            text = f"with a seed in {read.site[:NAME_CHARS_MAX]}, at {_shown(median(near))}"
            yield "seed", left_s, text
    elif mine:
        source = max(read.rates, key=lambda each: read.rates[each])
        beside = [each for each in known if each.worker != read.worker and source in each.rates]
        if any(each.rate <= SAME_SHARE * read.rate for each in beside):
            left_s = read.left_s([*read.rates.values(), link_rate], link_rate)
            text = f"with a second source beside {source[:NAME_CHARS_MAX]}"
            yield "second source", left_s, text
    if read.shared_s and read.link_s:
        times = (read.shared_s + read.link_s) / read.link_s
        limit = link_rate if mine else NO_LIMIT
        left_s = read.left_s([rate * times for rate in read.rates.values()], limit)
        yield "readers", left_s, f"with no other readers at {read.busiest[:NAME_CHARS_MAX]}"
    if read.loss_s:
        times = read.seconds / (read.seconds - read.loss_s / 2)
        left_s = read.left_s([rate * times for rate in read.rates.values()])
        yield "connections", left_s, "with twice the WAN connections, if the WAN carries that"
    yield from _of_other_bytes(read, known)


def _of_other_bytes(read: _Read, known: Sequence[_Read]) -> Iterator[Made]:
    """Changes of what is read."""
    with_deltas = [each for each in known if each.codec_s and each.share < read.share]
    if with_deltas and not read.codec_s:
        best = min(with_deltas, key=lambda each: each.share)
        ratio = best.share / read.share
        own_s = read.own_s + best.codec_s * read.nbytes / (best.nbytes / ratio)
        left_s = read.left_s(list(read.rates.values()), nbytes=read.nbytes * ratio, own_s=own_s)
        yield "deltas", left_s, f"with deltas, {ratio:.0%} of the bytes"
    direct = [each.rate for each in known if each.is_direct]
    if direct and read.is_archived and not read.is_direct:
        left_s = read.left_s([median(direct)])
        yield "direct", left_s, f"reading the archive directly, at {_shown(median(direct))}"


@dataclass(frozen=True, slots=True)
class _Read:
    """The read on an update's critical path.

    `seconds`: of the update's `wall_s`. `own_s`: of these, the reader's work. `shared_s`: the
    sources served others; `link_s`, `loss_s`: bytes were on their way.
    """

    worker: str
    site: str
    wall_s: float
    seconds: float
    own_s: float
    shared_s: float
    busiest: str  # the source that served others longest
    link_s: float
    loss_s: float
    codec_s: float
    nbytes: float
    share: float  # of the version's bytes
    rates: Mapping[str, float]  # bytes per second, by source
    sources: Mapping[str, str]  # its site, by source; "": the reader's
    kinds: frozenset[tuple[str, str]]  # transports, and kinds of sources

    @classmethod
    def of(cls, found: Explanation, sites: Mapping[str, str]) -> _Read | None:
        """None: it read nothing, or it is not known how."""
        links = [link for link in found.links if link.nbytes]
        sources = {link.source for link in links}
        read = [part for part in found.parts if part.name in READ]
        workers = [part.worker for part in read if part.peer in sources]
        seconds = sum(part.seconds for part in read)
        nbytes = float(sum(link.nbytes for link in links))
        if not workers or seconds <= 0.0 or not found.nbytes:
            return None
        mine = [part for part in read if part.worker == workers[0]]
        shared = [part for part in mine if part.name == "source busy" and "readers" in part.text]
        site = sites.get(workers[0], "")
        rates = dict.fromkeys(sources, 0.0)
        for link in links:
            rates[link.source] += link.nbytes / seconds
        return cls(
            workers[0],
            site,
            found.seconds,
            seconds,
            sum(part.seconds for part in mine if part.name in OWN),
            sum(part.seconds for part in shared),
            max(shared, key=lambda part: part.seconds).peer if shared else "",
            sum(part.seconds for part in mine if part.name == "link"),
            sum(part.seconds for part in mine if part.name == "loss"),
            sum(link.codec_s for link in links),
            nbytes,
            nbytes / found.nbytes,
            rates,
            {link.source: "" if link.site == site else link.site for link in links},
            frozenset((link.transport, link.kind) for link in links),
        )

    @property
    def rate(self) -> float:
        return self.nbytes / self.seconds

    @property
    def is_near(self) -> bool:
        return not any(self.sources.values())

    @property
    def is_archived(self) -> bool:
        return any(kind == "archive" for _, kind in self.kinds)

    @property
    def is_direct(self) -> bool:
        return all(transport == DIRECT for transport, _ in self.kinds)

    def left_s(
        self,
        rates: Sequence[float],
        link: float = NO_LIMIT,
        nbytes: float | None = None,
        own_s: float | None = None,
    ) -> float:
        """The update's seconds, if sources give bytes at these rates at most, and the reader's link
        carries so many.
        """
        size = self.nbytes if nbytes is None else nbytes
        work_s = self.own_s if own_s is None else own_s
        capacities = [link, size / work_s if work_s else NO_LIMIT, *rates]
        paths = {number: (0, 1, number) for number in range(2, len(capacities))}
        share = sum(max_min(paths, capacities).values())
        return self.wall_s - self.seconds + (size / share if share else inf)


def _by_name(found: Explanation) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for part in found.parts:
        seconds[part.name] = seconds.get(part.name, 0.0) + part.seconds
    return seconds


def _shown(rate: float) -> str:
    mbit = rate * 8e-6
    return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"
