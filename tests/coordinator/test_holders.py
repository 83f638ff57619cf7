"""The holdings of one shard: what is news for those who wait for a source, whom the choice passes over, and the ring."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tensorhub.coordinator.holders import Counted, Counts, Holders
from tensorhub.scheduler.choice import Load, Wanted
from tensorhub.scheduler.links import SUPPOSED_BYTES_PER_S
from tensorhub.scheduler.sources import Standing
from tensorhub.types import Location

TCP = frozenset({"tcp"})
NOTHING, COMPLETE, SOURCE, LIVE = (False,) * 3, (True, False, False), (True, True, False), (True,) * 3
# How a holding counts, whether it can be read, and whether it lacks a source.
Way = tuple[Counts, bool, bool]
GONE, STRANDED, FED = (NOTHING, False, False), (NOTHING, True, True), (NOTHING, True, False)


@dataclass(eq=False)
class Held:
    name: str
    number: int = 0


def held(there: Holders[Held], name: str) -> Held:
    holding = Held(name)
    there.add(holding, 100, 2)
    return holding


def count(there: Holders[Held], holding: Held, way: Way) -> bool:
    counts, can_be_read, is_stranded = way
    standing = Standing(Location(host=holding.name), TCP, Load(0, 0), 0, holding.number) if can_be_read else None
    return there.count(holding, Counted(counts, standing, is_stranded, is_steady=False))


@pytest.mark.parametrize(
    ("before", "after", "is_news"),
    [
        (GONE, STRANDED, True),  # others may read what it has, while nobody has everything
        (GONE, FED, True),
        (STRANDED, FED, True),  # it leads to a whole copy now
        (FED, (COMPLETE, True, False), True),
        ((COMPLETE, True, False), (LIVE, True, False), True),  # committed: the version may be written from now on
        ((SOURCE, False, False), (LIVE, True, False), True),  # its worker is heard of again
        (FED, FED, False),
        (FED, STRANDED, False),
        (STRANDED, GONE, False),
        ((LIVE, True, False), (SOURCE, False, False), False),
    ],
)
def test_who_waits_is_told_of_what_can_be_read_now_and_of_nothing_else(before: Way, after: Way, is_news: bool) -> None:
    there = Holders[Held]()
    holding = held(there, "a")
    count(there, holding, before)
    assert count(there, holding, after) is is_news


def test_one_that_all_were_refused_is_found_by_the_next_reader() -> None:
    there = Holders[Held]()
    for name in "ab":
        count(there, held(there, name), FED)

    def best(refused: str) -> str | None:
        wanted = Wanted(there.nbytes, there.nbytes / there.chunks)
        found = there.best(Location(host="c"), TCP, wanted, SUPPOSED_BYTES_PER_S, lambda h: h.name in refused)
        return None if found is None else found.name

    assert [best("ab"), best("b"), best("a"), best("")] == [None, "a", "b", "b"]  # of equals the newest


def test_the_ring_begins_with_the_next_one_and_leads_to_everybody() -> None:
    there = Holders[Held]()
    a, b, c = (held(there, name) for name in "abc")
    assert [[h.name for h in there.after(each)] for each in (a, b, c)] == [["b", "c"], ["c", "a"], ["a", "b"]]
    there.remove(b)
    assert [[h.name for h in there.after(each)] for each in (a, c, None)] == [["c"], ["a"], ["a", "c"]]


def test_a_shard_is_as_large_as_the_largest_that_was_there() -> None:
    """What one holder says of its own size makes the shard no smaller for others."""
    there = Holders[Held]()
    for name, nbytes, chunks in (("a", 50, 3), ("b", 100, 2), ("c", 10, 1)):
        there.add(Held(name), nbytes, chunks)
    assert (there.nbytes, there.chunks) == (100, 3)
