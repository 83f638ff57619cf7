"""The sources of one content, kept in order, so that the best one for a reader is found without a
look at all of them.

Theory of operation. `choice` estimates when a reader would be done at a source. Where links carry
what their distance carries, the estimate depends on three things of a source: how far away it is,
its load (how many readers share it, and how slow it is), and its depth. So sources are kept in a
tree site / rack / host. Each node has, for each load, a sorted list: a host has one of its sources,
a rack or site one of its children, by the best source of each. A reader's candidates are then the
firsts of a few lists along the way from its host to the root, each without the child that was
looked at already. The sources of its host are found by the host's name: workers of one host may
name different racks and sites.

A change costs a few insertions in sorted lists, a choice a few looks. Neither grows with the number
of sources, but for the number of different loads, which is small. Where the reader refuses the best
ones, the next ones are looked at in order, so that a reader whom many sources have failed looks at
each of them once.

Responsible for the order. Not responsible for the set of sources, nor for what a certain reader
must not read: the caller answers that for the few sources that are met (`refuses`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from tensorhub.scheduler.choice import Load, Wanted, rank
from tensorhub.scheduler.links import Distance
from tensorhub.types import SAME_HOST_TRANSPORTS, Location

T = TypeVar("T")
Rank = tuple[int, int]  # depth, and how new it is, negated: of equals the newest comes first


class Standing(NamedTuple):
    """The properties of a source that the order depends on. `number`: larger is newer; each source
    has its own.
    """

    location: Location
    transports: frozenset[str]
    load: Load
    depth: int
    number: int

    @property
    def rank(self) -> Rank:
        return self.depth, -self.number


class _Node(Generic[T]):
    """A host, rack, site or everything. `first`: by load, ranks with what they are of, in order."""

    __slots__ = ("children", "first", "parent")

    def __init__(self, parent: _Node[T] | None) -> None:
        self.parent = parent
        self.children: dict[str, _Node[T]] = {}
        self.first: dict[Load, _Entries[T]] = {}

    def child(self, name: str) -> _Node[T]:
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = _Node(self)
        return found

    def change(self, load: Load, rank: Rank, what: _Node[T] | T, *, add: bool) -> None:
        """Enter or remove, here and above."""
        there = self.first.setdefault(load, [])
        before = there[0] if there else None
        if add:
            insort(there, (*rank, what))  # no two ranks are equal, so that nothing else is compared
        else:
            del there[bisect_left(there, rank)]
        after = there[0] if there else None
        if not there:
            del self.first[load]
        if self.parent is not None and before != after:
            if before is not None:
                self.parent.change(load, before[:2], self, add=False)
            if after is not None:
                self.parent.change(load, after[:2], self, add=True)


_Entries = list[tuple[int, int, _Node[T] | T]]


class _Way(NamedTuple, Generic[T]):
    """To the sources of one list: how far away they are, and the load of each."""

    apart: Distance
    load: Load
    felt: Load  # what a reader over this way feels of it
    nearer: _Node[T] | None  # what another list has
    beside: str | None  # the host whose sources other lists have, wherever it is


class Sources(Generic[T]):
    """Those of one content."""

    def __init__(self) -> None:
        # by the transports that they are offered over
        self._roots: dict[frozenset[str], _Node[T]] = {}
        self._there: dict[T, tuple[Standing, _Node[T]]] = {}  # how it stands, and its host
        # by transports and name; by site and rack: workers of one host may name different ones
        self._hosts: dict[tuple[frozenset[str], str], dict[tuple[str, str], _Node[T]]] = {}

    def __len__(self) -> int:
        return len(self._there)

    def __contains__(self, source: T) -> bool:
        return source in self._there

    def standing(self, source: T) -> Standing | None:
        """As it was put last; None: it is none of them."""
        standing, _ = self._there.get(source, (None, None))
        return standing

    def put(self, source: T, standing: Standing) -> None:
        """It is one of them from now on, or has changed."""
        before, host = self._there.get(source, (None, None))
        if before == standing:
            return
        if before is not None and (before.transports, before.location) != (
            standing.transports,
            standing.location,
        ):
            self.drop(source)
            host = None
        if before is None or host is None:
            host = self._host(standing)
        else:
            host.change(before.load, before.rank, source, add=False)
        self._there[source] = standing, host
        host.change(standing.load, standing.rank, source, add=True)

    def drop(self, source: T) -> None:
        """It is none of them any more; fine if it was none."""
        if source not in self._there:
            return
        standing, node = self._there.pop(source)
        where, key = standing.location, (standing.transports, standing.location.host)
        node.change(standing.load, standing.rank, source, add=False)
        if not node.first:
            del self._hosts[key][where.site, where.rack]
            if not self._hosts[key]:
                del self._hosts[key]
        for name in (where.host, where.rack, where.site):  # nothing is kept of where no source is
            if node.first or node.parent is None:
                return
            node = node.parent
            del node.children[name]

    def _host(self, standing: Standing) -> _Node[T]:
        """Where such a source is."""
        root = self._roots.get(standing.transports)
        if root is None:
            root = self._roots[standing.transports] = _Node(None)
        where = standing.location
        host = root.child(where.site).child(where.rack).child(where.host)
        named = self._hosts.setdefault((standing.transports, where.host), {})
        named[where.site, where.rack] = host
        return host

    def best(
        self,
        reader: Location,
        transports: frozenset[str],
        wanted: Wanted,
        rates: Sequence[float],
        refuses: Callable[[T], bool],
    ) -> T | None:
        """The source at which this reader would be done first, of those that it does not refuse and
        reaches over one of its `transports`; the newest of equals. None if there is none. Nothing
        may change meanwhile.
        """
        return next(
            (
                each
                for each in self._in_order(reader, transports, wanted, rates)
                if not refuses(each)
            ),
            None,
        )

    def _in_order(
        self, reader: Location, transports: frozenset[str], wanted: Wanted, rates: Sequence[float]
    ) -> Iterator[T]:
        """All that it reaches, the best first. Each takes a look at a few entries when it is asked
        for.
        """
        # A heap, of the next entry of each list.
        ahead: list[tuple[tuple[int, float], int, int, _Entries[T], int, _Way[T]]] = []
        looks = count()  # so that nothing else is compared

        def enter(entries: _Entries[T], place: int, way: _Way[T]) -> None:
            if place < len(entries) and entries[place][2] is way.nearer:
                place += 1
            if place < len(entries):
                depth, newness, _ = entries[place]
                best = rank(way.apart, way.felt, depth, wanted, rates)
                heappush(ahead, (best, newness, next(looks), entries, place, way))

        for entries, way in self._ways(reader, transports):
            enter(entries, 0, way)
        while ahead:
            *_, entries, place, way = heappop(ahead)
            what = entries[place][2]
            if isinstance(what, _Node):
                enter(what.first[way.load], 0, way)
            elif self._there[what][0].location.host != way.beside:
                yield what
            enter(entries, place + 1, way)

    def _ways(
        self, reader: Location, transports: frozenset[str]
    ) -> Iterator[tuple[_Entries[T], _Way[T]]]:
        """The lists in which all that it reaches are: one for each distance and load."""
        for theirs, root in self._roots.items():
            common = theirs & transports
            if not common:
                continue
            shares_memory = not SAME_HOST_TRANSPORTS.isdisjoint(common)
            for (there, _), node in self._hosts.get((theirs, reader.host), {}).items():
                apart = Distance.HOST if there == reader.site else Distance.FAR
                for load, entries in node.first.items():
                    felt = load._replace(readers=0) if shares_memory else load
                    yield entries, _Way(apart, load, felt, None, None)
            if common <= SAME_HOST_TRANSPORTS:
                continue
            site = root.children.get(reader.site)
            rack = site.children.get(reader.rack) if site is not None else None
            host = rack.children.get(reader.host) if rack is not None else None
            for within, nearer, apart in (
                (rack, host, Distance.RACK),
                (site, rack, Distance.SITE),
                (root, site, Distance.FAR),
            ):
                for load, entries in within.first.items() if within is not None else ():
                    yield entries, _Way(apart, load, load, nearer, reader.host)
