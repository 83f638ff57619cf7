"""Which source a reader is sent to: chains, trees, near before far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from tensorhub.scheduler.choice import Load, Wanted, finish_s
from tensorhub.scheduler.links import SUPPOSED_BYTES_PER_S, Distance, distance
from tensorhub.scheduler.sources import Sources, Standing
from tensorhub.types import Location

GB = 10**9
HERE = Location("east", "r1", "h1")
RACK = Location("east", "r1", "h2")
SITE = Location("east", "r2", "h3")
FAR = Location("west", "r1", "h1")


@dataclass(frozen=True)
class At:
    """A source, somewhere."""

    where: Location
    ident: str
    readers: int = 0
    depth: int = 0
    slowness: int = 0


def at(
    where: Location, ident: str = "", *, readers: int = 0, depth: int = 0, slowness: int = 0
) -> At:
    return At(where, ident or f"{where.host}@{where.site}", readers, depth, slowness)


def chosen(
    nbytes: int, *candidates: At, rates: Sequence[float] = SUPPOSED_BYTES_PER_S, chunks: int = 1000
) -> str:
    """The first is the newest."""
    sources, tcp = Sources[str](), frozenset({"tcp"})
    for number, each in enumerate(reversed(candidates)):
        sources.put(
            each.ident,
            Standing(each.where, tcp, Load(each.readers, each.slowness), each.depth, number),
        )
    best = sources.best(HERE, tcp, Wanted(nbytes, nbytes / chunks), rates, lambda _: False)
    assert best is not None
    return best


def joined(
    readers: int, nbytes: int, *, chunks: int, rates: Sequence[float] = SUPPOSED_BYTES_PER_S
) -> Counter[str]:
    """So many readers come at once, each in a rack's other host: how many read from whom."""
    places = {"publisher": at(RACK, "publisher")}
    for number in range(readers):
        source = chosen(nbytes, *reversed(places.values()), rates=rates, chunks=chunks)
        places[source] = replace(places[source], readers=places[source].readers + 1)
        places[f"reader {number}"] = at(RACK, f"reader {number}", depth=places[source].depth + 1)
    return Counter({name: place.readers for name, place in places.items()})


@pytest.mark.parametrize("apart", Distance)
def test_only_a_reader_in_another_site_shares_with_those_that_yield(apart: Distance) -> None:
    alone, beside = [
        finish_s(apart, Load(0, 0, yielding), 0, Wanted(GB, GB / 1000), SUPPOSED_BYTES_PER_S)
        for yielding in (0, 3)
    ]
    assert (beside > alone) is (apart is Distance.FAR)


@pytest.mark.parametrize(
    ("other", "apart"),
    [(HERE, Distance.HOST), (RACK, Distance.RACK), (SITE, Distance.SITE), (FAR, Distance.FAR)],
)
def test_distances(other: Location, apart: Distance) -> None:
    assert distance(HERE, other) is apart
    assert distance(other, HERE) is apart


def test_a_chain_when_the_uplink_is_the_limit() -> None:
    """A source with a child would share its uplink; the child, half done, offers all of its own."""
    publisher, child = at(RACK, "publisher", readers=1), at(RACK, "child", depth=1)
    assert chosen(100 * GB, publisher, child) == "child"


def test_a_shallow_tree_when_hops_are_the_limit() -> None:
    publisher, child = at(RACK, "publisher", readers=1), at(RACK, "child", depth=1)
    assert chosen(1000, publisher, child) == "publisher"


def test_near_before_far() -> None:
    assert chosen(100 * GB, at(FAR), at(SITE), at(RACK)) == "h2@east"
    assert chosen(100 * GB, at(RACK), at(HERE)) == "h1@east"
    assert chosen(100, at(RACK), at(HERE)) == "h1@east"


@pytest.mark.parametrize("nbytes", [100, 100 * GB])
@pytest.mark.parametrize(
    ("live", "archived", "expected"),
    [(SITE, HERE, "live"), (FAR, FAR, "live"), (FAR, SITE, "archived")],
)
def test_an_archived_version_comes_after_the_live_ones_that_are_as_near(
    nbytes: int, live: Location, archived: Location, expected: str
) -> None:
    """However busy, deep and slow those are; only another site is worse."""
    sources, tcp = Sources[str](), frozenset({"tcp"})
    sources.put("live", Standing(live, tcp, Load(20, 2), 3, 1))
    sources.put("archived", Standing(archived, tcp, Load(0, 0, archived=True), 0, 2))
    wanted = Wanted(nbytes, nbytes / 1000)
    assert sources.best(HERE, tcp, wanted, SUPPOSED_BYTES_PER_S, lambda _: False) == expected


@pytest.mark.parametrize("nbytes", [100, 100 * GB])
def test_the_own_rack_first_although_other_racks_have_links_as_fast_and_newer_sources(
    nbytes: int,
) -> None:
    """So do readers that know nothing of their links keep off those that all racks share."""
    equal = [1e9] * 4
    assert chosen(nbytes, at(SITE, "another rack"), at(RACK, "own rack"), rates=equal) == "own rack"
    assert (
        chosen(nbytes, at(FAR, "another site"), at(SITE, "another rack"), rates=equal)
        == "another rack"
    )
    assert chosen(nbytes, at(RACK, "own rack"), at(HERE, "own host"), rates=equal) == "own host"


def test_another_rack_rather_than_a_shared_source_of_the_own_one() -> None:
    assert chosen(100 * GB, at(SITE, "idle"), at(RACK, "busy", readers=1)) == "idle"


def test_a_near_partial_replica_before_another_crossing_of_the_wan() -> None:
    """Across sites one reader crosses; the rest of its site chains behind it."""
    crossing = at(RACK, "crossing", depth=1)
    assert chosen(100 * GB, at(FAR, "publisher", readers=1), crossing) == "crossing"


def test_a_busy_near_source_before_an_idle_far_one() -> None:
    assert chosen(100 * GB, at(FAR, "idle"), at(RACK, "busy", readers=3)) == "busy"


def test_a_slow_source_comes_after_those_that_fewer_share() -> None:
    """It gives as little as a fast one that so many share. Within a host nobody's link is used."""
    assert chosen(100 * GB, at(RACK, "slow", slowness=1), at(RACK, "other")) == "other"
    assert chosen(100 * GB, at(RACK, "slow", slowness=2), at(RACK, "shared", readers=2)) == "shared"
    assert chosen(100 * GB, at(RACK, "slow", slowness=2), at(RACK, "shared", readers=4)) == "slow"
    assert chosen(100 * GB, at(HERE, "slow", slowness=5), at(RACK, "other")) == "slow"


@pytest.mark.parametrize("readers", [2, 4, 8, 30])
@pytest.mark.parametrize(
    "rates", [SUPPOSED_BYTES_PER_S, (1e9, 25e6, 25e6, 25e6)], ids=["supposed", "slow"]
)
def test_readers_that_come_at_once_form_one_chain(readers: int, rates: Sequence[float]) -> None:
    """Also before anything is known of the links: a shared one would cost each of them its bytes
    again.
    """
    assert max(joined(readers, 64 * 2**20, chunks=256, rates=rates).values()) == 1


def test_readers_of_little_share_a_source() -> None:
    assert joined(8, 10_000, chunks=10)["publisher"] == 8


def test_fast_links_make_a_tree() -> None:
    """A hundred hops would take longer than sending it some times."""
    fast = [40e9, 20e9, 15e9, 1e9]
    tree = joined(100, 64 * 2**20, chunks=256, rates=fast)
    assert 2 <= max(tree.values()) <= 10


def test_few_chunks_make_a_chain_no_faster_than_a_star() -> None:
    """A chunk is passed on when it is whole: behind a source with one chunk, everything begins when
    that is done.
    """
    slow = (1e9, 25e6, 25e6, 25e6)
    assert max(joined(8, 64 * 2**20, chunks=1, rates=slow).values()) > 1
    assert max(joined(8, 64 * 2**20, chunks=8, rates=slow).values()) == 1
