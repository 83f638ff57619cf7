"""The sources of one content, kept in order, so that the best one for a reader is found without a look at all of them.

Theory of operation. `choice` estimates when a reader would be done at a source. Where links carry what their distance
carries, the estimate depends on three things of a source: how far away it is, how many readers share it, and its depth. So
sources are kept in a tree site / rack / host. Each node has, for each number of readers, a sorted list: a host of its
sources, the others of their children, by the best source of each. A reader's candidates are then the firsts of a few lists
along the way from its host to the root, each without the child that was looked at already.

A change costs a few insertions in sorted lists, a choice a few looks. Neither grows with the number of sources, but for the
number of different counts of readers, which is small.

Responsible for the order. Not responsible for who is a source, nor for who must not be read by a certain reader: the caller
says so of the few that are met (`refuses`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from tensorhub.scheduler.choice import Wanted, finish_s
from tensorhub.scheduler.links import Distance
from tensorhub.types import SAME_HOST_TRANSPORTS, Location

T = TypeVar("T")
Rank = tuple[int, int]  # depth, and how new it is, negated: of equals the newest comes first


@dataclass(frozen=True, slots=True)
class Standing:
    """What the order depends on. `number`: larger is newer; no two sources have the same."""

    location: Location
    transports: frozenset[str]
    readers: int
    depth: int
    number: int


class _Node(Generic[T]):
    """A host, rack, site or everything. `first`: by number of readers, ranks with what they are of, in order."""

    __slots__ = ("children", "first", "parent")

    def __init__(self, parent: _Node[T] | None) -> None:
        self.parent = parent
        self.children: dict[str, _Node[T]] = {}
        self.first: dict[int, list[tuple[int, int, _Node[T] | T]]] = {}

    def child(self, name: str) -> _Node[T]:
        found = self.children.get(name)
        if found is None:
            found = self.children[name] = _Node(self)
        return found

    def change(self, readers: int, rank: Rank, what: _Node[T] | T, *, add: bool) -> None:
        """Enter or remove, here and above."""
        there = self.first.setdefault(readers, [])
        before = there[0] if there else None
        if add:
            insort(there, (*rank, what), key=_rank)
        else:
            del there[bisect_left(there, rank, key=_rank)]
        after = there[0] if there else None
        if not there:
            del self.first[readers]
        if self.parent is not None and before != after:
            if before is not None:
                self.parent.change(readers, before[:2], self, add=False)
            if after is not None:
                self.parent.change(readers, after[:2], self, add=True)


def _rank(entry: tuple[int, int, object]) -> Rank:
    return entry[:2]


class Sources(Generic[T]):
    """Those of one content."""

    def __init__(self) -> None:
        self._roots: dict[frozenset[str], _Node[T]] = {}  # by the transports that they are offered over
        self._standing: dict[T, Standing] = {}

    def __len__(self) -> int:
        return len(self._standing)

    def __contains__(self, source: T) -> bool:
        return source in self._standing

    def standing(self, source: T) -> Standing | None:
        """As it was put last; None: it is none of them."""
        return self._standing.get(source)

    def put(self, source: T, standing: Standing) -> None:
        """It is one of them from now on, or has changed."""
        before = self._standing.get(source)
        if before != standing:
            if before is not None:
                self.drop(source)
            self._standing[source] = standing
            self._change(source, standing, add=True)

    def drop(self, source: T) -> None:
        """It is none of them any more; fine if it was none."""
        standing = self._standing.pop(source, None)
        if standing is not None:
            self._change(source, standing, add=False)

    def _change(self, source: T, standing: Standing, *, add: bool) -> None:
        where = standing.location
        root = self._roots.get(standing.transports)
        if root is None:
            root = self._roots[standing.transports] = _Node(None)
        names = (where.site, where.rack, where.host)
        node = root
        for name in names:
            node = node.child(name)
        node.change(standing.readers, (standing.depth, -standing.number), source, add=add)
        for name in reversed(names):  # nothing is kept of where no source is
            if node.first or node.parent is None:
                return
            node = node.parent
            del node.children[name]

    def best(
        self,
        reader: Location,
        transports: frozenset[str],
        wanted: Wanted,
        rates: Sequence[float],
        refuses: Callable[[T], bool],
    ) -> T | None:
        """The source at which this reader would be done first, of those that it does not refuse and reaches over one of
        its `transports`; the newest of equals. None if there is none.
        """
        aside: dict[T, Standing] = {}
        try:
            while True:
                found = min(self._candidates(reader, transports, wanted, rates), key=_order, default=None)
                if found is None or not refuses(found[2]):
                    return None if found is None else found[2]
                aside[found[2]] = self._standing[found[2]]
                self.drop(found[2])
        finally:
            for source, standing in aside.items():
                self.put(source, standing)

    def _candidates(
        self, reader: Location, transports: frozenset[str], wanted: Wanted, rates: Sequence[float]
    ) -> Iterator[tuple[float, int, T]]:
        """The best of each distance and number of readers: when it would be done, how new it is, and what it is."""
        for theirs, root in self._roots.items():
            common = theirs & transports
            if not common:
                continue
            shares_memory = not SAME_HOST_TRANSPORTS.isdisjoint(common)
            site = root.children.get(reader.site)
            rack = site.children.get(reader.rack) if site is not None else None
            host = rack.children.get(reader.host) if rack is not None else None
            if host is not None:
                for readers, there in host.first.items():
                    yield _candidate(there[0], Distance.HOST, 0 if shares_memory else readers, readers, wanted, rates)
            if common <= SAME_HOST_TRANSPORTS:
                continue
            for node, nearer, apart in (
                (rack, host, Distance.RACK),
                (site, rack, Distance.SITE),
                (root, site, Distance.FAR),
            ):
                for readers, there in node.first.items() if node is not None else ():
                    entry = there[0]
                    if entry[2] is nearer:
                        if len(there) == 1:
                            continue
                        entry = there[1]
                    yield _candidate(entry, apart, readers, readers, wanted, rates)


def _candidate(
    entry: tuple[int, int, _Node[T] | T], apart: Distance, shared: int, readers: int, wanted: Wanted, rates: Sequence[float]
) -> tuple[float, int, T]:
    depth, newness, what = entry
    while isinstance(what, _Node):
        what = what.first[readers][0][2]
    return finish_s(apart, shared, depth, wanted, rates), newness, what


def _order(candidate: tuple[float, int, object]) -> tuple[float, int]:
    return candidate[:2]
