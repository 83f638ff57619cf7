"""Which source a reader is sent to: chains, trees, near before far, what failed last."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tensorhub.scheduler.choice import Candidate, Distance, choose, distance, estimate_finish_s
from tensorhub.types import Location

GB = 10**9
HERE = Location("east", "r1", "h1")
RACK = Location("east", "r1", "h2")
SITE = Location("east", "r2", "h3")
FAR = Location("west", "r1", "h1")


def at(where: Location, ident: str = "", *, readers: int = 0, depth: int = 0, failures: int = 0, left: int = 0) -> Candidate:
    return Candidate(ident or f"{where.host}@{where.site}", where, readers, depth, failures, left)


def chosen(nbytes: int, *candidates: Candidate) -> str:
    best = choose(HERE, candidates, nbytes)
    assert best is not None
    return best.ident


@pytest.mark.parametrize(
    ("other", "apart"),
    [(HERE, Distance.HOST), (RACK, Distance.RACK), (SITE, Distance.SITE), (FAR, Distance.FAR)],
)
def test_distances(other: Location, apart: Distance) -> None:
    assert distance(HERE, other) is apart
    assert distance(other, HERE) is apart


def test_nobody_is_chosen_from_nobody() -> None:
    assert choose(HERE, [], GB) is None


def test_of_equals_the_first() -> None:
    assert chosen(GB, at(RACK, "a"), at(RACK, "b")) == "a"


def test_a_chain_when_the_uplink_is_the_limit() -> None:
    """A source with a child would share its uplink; the child, half done, offers all of its own."""
    publisher, child = at(RACK, "publisher", readers=1), at(RACK, "child", depth=1, left=50 * GB)
    assert chosen(100 * GB, publisher, child) == "child"


def test_a_shallow_tree_when_hops_are_the_limit() -> None:
    publisher, child = at(RACK, "publisher", readers=1), at(RACK, "child", depth=1, left=500)
    assert chosen(1000, publisher, child) == "publisher"


def test_a_chain_grows_at_its_end() -> None:
    chain = [at(RACK, str(n), readers=1, depth=n, left=100 * GB) for n in range(5)]
    assert chosen(100 * GB, *chain, at(RACK, "end", depth=5, left=100 * GB)) == "end"


def test_near_before_far() -> None:
    assert chosen(100 * GB, at(FAR), at(SITE), at(RACK)) == "h2@east"
    assert chosen(100 * GB, at(RACK), at(HERE)) == "h1@east"
    assert chosen(100, at(RACK), at(HERE)) == "h1@east"


def test_a_near_partial_replica_before_another_crossing_of_the_wan() -> None:
    """Across sites one reader crosses; the rest of its site chains behind it."""
    crossing = at(RACK, "crossing", depth=1, left=100 * GB)
    assert chosen(100 * GB, at(FAR, "publisher", readers=1), crossing) == "crossing"


def test_a_busy_near_source_before_an_idle_far_one() -> None:
    assert chosen(100 * GB, at(FAR, "idle"), at(RACK, "busy", readers=3)) == "busy"


def test_what_has_failed_comes_last() -> None:
    assert chosen(GB, at(RACK, "failed", failures=1), at(FAR, "untried")) == "untried"
    assert chosen(GB, at(RACK, "twice", failures=2), at(RACK, "once", failures=1)) == "once"


def test_more_of_anything_bad_is_never_sooner() -> None:
    base = at(RACK, left=GB)
    for worse in (
        replace(base, readers=1),
        replace(base, depth=1),
        replace(base, failures=1),
        replace(base, bytes_missing=200 * GB),
        replace(base, location=FAR),
    ):
        assert estimate_finish_s(HERE, worse, 100 * GB) > estimate_finish_s(HERE, base, 100 * GB)
