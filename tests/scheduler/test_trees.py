"""What comes of the choices: readers that come one after the other, whom each reads from, and when
the last has everything.

A fluid model: each worker's link carries so much in each direction, the readers of a source share
its link (whoever takes less leaves the rest to the others), and nobody is filled faster than its
source.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, strategies as st

from tensorhub.scheduler.choice import Load, Wanted
from tensorhub.scheduler.links import LATENCY_S, Distance
from tensorhub.scheduler.sources import Sources, Standing
from tensorhub.types import Location

TCP = frozenset({"tcp"})
RATE = 1e9  # bytes per second, of a link that is not slow
RATES = (40e9, RATE, RATE, RATE)


@dataclass
class Tree:
    """Workers of one rack by number; `slowness` of each. The first ones have everything."""

    slowness: list[int]
    complete: int
    wanted: Wanted
    sources: Sources[int] = field(default_factory=Sources)
    parent: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for worker in range(self.complete):
            self.stand(worker)

    def join(self) -> None:
        """All others come, in order. Slow ones make way for whoever is not slow."""
        for worker in range(self.complete, len(self.slowness)):
            source = self.best(worker)
            self.read(worker, source)
            if self.slowness[worker]:
                continue
            for other in [each for each in self.readers(source) if self.slowness[each]]:
                better = self.best(other)
                if self.load(better) < self.load(source, without=other):
                    self.read(other, better)

    def best(self, reader: int) -> int:
        found = self.sources.best(
            self.place(reader), TCP, self.wanted, RATES, self.below(reader).__contains__
        )
        assert found is not None
        return found

    def read(self, reader: int, source: int) -> None:
        before = self.parent.get(reader)
        self.parent[reader] = source
        for each in (reader, source, before):
            if each is not None:
                self.stand(each)

    def stand(self, worker: int) -> None:
        self.sources.put(
            worker, Standing(self.place(worker), TCP, self.load(worker), self.depth(worker), worker)
        )

    @staticmethod
    def place(worker: int) -> Location:
        return Location("s", "r", f"host {worker}")

    def readers(self, source: int) -> list[int]:
        return [reader for reader, each in self.parent.items() if each == source]

    def below(self, worker: int) -> set[int]:
        found = {worker}
        for each in (todo := [worker]):
            more = self.readers(each)
            todo += more
            found.update(more)
        return found

    def above(self, worker: int) -> list[int]:
        """Those through whom it is filled, from the nearest one on."""
        found = []
        while worker in self.parent:
            worker = self.parent[worker]
            found.append(worker)
        return found

    def depth(self, worker: int) -> int:
        return len(self.above(worker))

    def load(self, worker: int, without: int | None = None) -> Load:
        readers = [each for each in self.readers(worker) if each != without]
        readers = [each for each in readers if self.slowness[worker] or not self.slowness[each]]
        return Load(
            len(readers), max(self.slowness[each] for each in (worker, *self.above(worker)))
        )

    def rates(self) -> dict[int, float]:
        """With which each is filled."""
        found = dict.fromkeys(range(self.complete), float("inf"))
        for source in (todo := list(range(self.complete))):
            readers = sorted(self.readers(source), key=lambda each: -self.slowness[each])
            left = RATE / (1 << self.slowness[source])
            for number, reader in enumerate(readers):  # who can take least comes first
                share = min(
                    left / (len(readers) - number),
                    RATE / (1 << self.slowness[reader]),
                    found[source],
                )
                found[reader] = share
                left -= share
            todo += readers
        return found

    def ends_s(self) -> dict[int, float]:
        """When each has everything."""
        rates, hop_s = self.rates(), LATENCY_S[Distance.RACK] + self.wanted.chunk_bytes / RATE
        return {
            each: self.wanted.nbytes / rates[each] + hop_s * self.depth(each)
            for each in self.parent
        }


def star(tree: Tree) -> Tree:
    """The same with everybody at complete sources, those that are not slow and have the fewest
    readers first.
    """
    found = Tree(tree.slowness, tree.complete, tree.wanted)
    for reader in range(tree.complete, len(tree.slowness)):
        one = min(
            range(tree.complete),
            key=lambda each: (len(found.readers(each)) + 1) << tree.slowness[each],
        )
        found.read(reader, one)
    return found


def joined(
    slowness: list[int], complete: int = 1, *, nbytes: int = 64 * 2**30, chunks: int = 8192
) -> Tree:
    tree = Tree(slowness, complete, Wanted(nbytes, nbytes / chunks))
    tree.join()
    return tree


@pytest.mark.parametrize("slow", range(1, 9))
@pytest.mark.parametrize("slowness", [1, 3, 5])
def test_one_slow_machine_among_eight_costs_the_others_nothing(slow: int, slowness: int) -> None:
    """Wherever it comes in the order: nobody reads from it, and nobody shares a source with it."""
    tree = joined([slowness if each == slow else 0 for each in range(9)])
    without = joined([0] * 8)
    assert not tree.readers(slow)
    assert max(seconds for each, seconds in tree.ends_s().items() if each != slow) <= 1.05 * max(
        without.ends_s().values()
    )
    assert tree.rates()[slow] == RATE / (1 << slowness)


@given(
    st.lists(st.sampled_from([0, 0, 0, 0, 1, 3, 5]), min_size=2, max_size=14),
    st.integers(1, 3),
    st.integers(1, 2**36),
    st.integers(1, 10_000),
)
@example([3, 3, 1, 1], 2, 500_066, 3825)  # two readers that are less slow than their sources
def test_no_star_is_sooner_through(
    slowness: list[int], complete: int, nbytes: int, chunks: int
) -> None:
    """However many are slow, and among the sources, too."""
    tree = joined(slowness, min(complete, len(slowness) - 1), nbytes=nbytes, chunks=chunks)
    hops_s = (LATENCY_S[Distance.RACK] + tree.wanted.chunk_bytes / RATE) * len(slowness)
    assert max(tree.ends_s().values()) <= 1.000001 * max(star(tree).ends_s().values()) + hops_s


@given(st.lists(st.integers(0, 5), min_size=2, max_size=20), st.integers(1, 3))
def test_nobody_waits_in_a_circle_and_everybody_has_a_source(
    slowness: list[int], complete: int
) -> None:
    tree = joined(slowness, min(complete, len(slowness) - 1))
    assert set(tree.parent) == set(range(tree.complete, len(slowness)))
    assert all(tree.above(each)[-1] < tree.complete for each in tree.parent)
