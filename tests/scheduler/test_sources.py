"""The order of sources chooses as a look at all of them would, and its cost does not grow with
their number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from tensorhub.scheduler.choice import Load, Wanted, rank
from tensorhub.scheduler.links import SUPPOSED_BYTES_PER_S, distance
from tensorhub.scheduler.sources import Sources, Standing
from tensorhub.types import SAME_HOST_TRANSPORTS, Location

NAMES = st.integers(0, 2).map(str)
# also workers of one host that name different sites and racks
LOCATIONS = st.builds(Location, NAMES, NAMES, NAMES) | st.builds(
    lambda site, rack, host: Location(site, rack, f"{site}.{rack}.{host}"), NAMES, NAMES, NAMES
)
TRANSPORTS = st.frozensets(st.sampled_from(["tcp", "rdma", "cma", "shm"]), max_size=3)
RATES = st.tuples(*[st.floats(1e5, 1e12)] * 4) | st.just(SUPPOSED_BYTES_PER_S)
WANTED = st.builds(
    lambda nbytes, chunks: Wanted(nbytes, nbytes / chunks),
    st.integers(0, 2**40),
    st.integers(1, 10_000),
)
LOADS = st.builds(Load, st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.booleans())
# at None it stays where it is
PUT = st.tuples(st.integers(0, 11), LOCATIONS | st.none(), TRANSPORTS, LOADS, st.integers(0, 4))
CHANGES = st.lists(PUT | st.integers(0, 11), max_size=40)


def scanned(
    there: dict[int, Standing],
    reader: Location,
    transports: frozenset[str],
    wanted: Wanted,
    rates: tuple[float, ...],
    refuses: Callable[[int], bool],
) -> int | None:
    """The same by a look at all of them."""
    found = []
    for source, at in there.items():
        common = at.transports & transports
        if at.location.host != reader.host:
            common -= SAME_HOST_TRANSPORTS
        if common and not refuses(source):
            load = at.load._replace(readers=0) if common & SAME_HOST_TRANSPORTS else at.load
            order = rank(distance(reader, at.location), load, at.depth, wanted, rates)
            found.append((order, -at.number, source))
    return min(found)[2] if found else None


@given(CHANGES, LOCATIONS, TRANSPORTS, WANTED, RATES, st.frozensets(st.integers(0, 11), max_size=4))
def test_it_chooses_as_a_look_at_all_would(
    changes: list[tuple[int, Location | None, frozenset[str], Load, int] | int],
    reader: Location,
    transports: frozenset[str],
    wanted: Wanted,
    rates: tuple[float, ...],
    refused: frozenset[int],
) -> None:
    sources, there = Sources[int](), dict[int, Standing]()
    for number, change in enumerate(changes):
        if isinstance(change, int):
            sources.drop(change)
            there.pop(change, None)
        else:
            source, place, theirs, load, depth = change
            before = there.get(source)
            location = place or (Location("0", "0", "0.0.0") if before is None else before.location)
            there[source] = Standing(location, theirs, load, depth, number)
            sources.put(source, there[source])
        for refuses in (lambda source: source in refused, lambda source: False):
            expected = scanned(there, reader, transports, wanted, rates, refuses)
            assert sources.best(reader, transports, wanted, rates, refuses) == expected
        assert {source: sources.standing(source) for source in there} == there
        assert len(sources) == len(there)
    for source in there:
        sources.drop(source)
    assert not any(root.first or root.children for root in sources._roots.values())
    assert not sources._hosts


def test_a_source_that_is_back_with_other_transports_is_found_over_these_only() -> None:
    here, sources = Location("s", "r", "h"), Sources[str]()
    for theirs in ({"rdma", "tcp"}, {"tcp"}, {"rdma"}):
        sources.put("a", Standing(here, frozenset(theirs), Load(0, 0), 0, 1))
        wanted = Wanted(10**9, 10**6)
        found = {
            mine
            for mine in ("rdma", "tcp")
            if sources.best(here, frozenset({mine}), wanted, SUPPOSED_BYTES_PER_S, lambda _: False)
        }
        assert found == theirs


@pytest.mark.parametrize("there", [Location("s", "q", "h"), Location("t", "r", "h")])
def test_a_source_on_the_same_host_is_found_whichever_rack_and_site_its_worker_names(
    there: Location,
) -> None:
    here, shm, sources = Location("s", "r", "h"), frozenset({"shm"}), Sources[str]()
    sources.put("a", Standing(there, shm, Load(0, 0), 0, 1))
    wanted = Wanted(10**9, 10**6)
    assert sources.best(here, shm, wanted, SUPPOSED_BYTES_PER_S, lambda _: False) == "a"


def test_whoever_shares_memory_shares_no_uplink() -> None:
    here, sources = Location("s", "r", "h"), Sources[str]()
    sources.put("busy", Standing(here, frozenset({"shm", "tcp"}), Load(3, 0), 0, 1))
    sources.put("deep", Standing(here, frozenset({"shm", "tcp"}), Load(0, 0), 1, 2))
    best = [
        sources.best(
            here,
            frozenset({transport}),
            Wanted(10**9, 10**6),
            SUPPOSED_BYTES_PER_S,
            lambda _: False,
        )
        for transport in ("shm", "tcp")
    ]
    assert best == ["busy", "deep"]


@dataclass
class Calls:
    """How many calls of Python functions were made."""

    count: int = 0

    def __call__(self, frame: object, event: str, arg: object) -> None:
        self.count += event == "call"


@pytest.mark.parametrize("sources_per_host", [1, 8])
def test_a_change_and_a_choice_cost_the_same_among_many(sources_per_host: int) -> None:
    def cost(count: int) -> int:
        sources = Sources[int]()
        for number in range(count):
            host = number // sources_per_host
            at = Location("s", f"r{host // 16}", f"h{host}")
            sources.put(
                number,
                Standing(at, frozenset({"tcp"}), Load(min(1, number % 7), 0), number % 5, number),
            )
        calls = Calls()
        sys.setprofile(calls)
        try:
            at = Location("s", "r0", "h0")
            for number in range(50):
                found = sources.best(
                    at,
                    frozenset({"tcp"}),
                    Wanted(10**9, 10**6),
                    SUPPOSED_BYTES_PER_S,
                    lambda _: False,
                )
                assert found is not None
                sources.put(
                    found,
                    Standing(
                        at, frozenset({"tcp"}), Load(1 + number % 3, 0), number % 5, count + number
                    ),
                )
        finally:
            sys.setprofile(None)
        return calls.count

    assert cost(8192) <= 1.3 * cost(128)


def test_each_source_that_is_refused_costs_a_few_looks() -> None:
    """A reader whom a thousand sources have failed kept a coordinator busy for a tenth of a second
    with each message.
    """

    def cost(refused: int) -> int:
        sources = Sources[int]()
        for number in range(1024):
            at = Location("s", f"r{number // 128}", f"h{number // 8}")
            sources.put(number, Standing(at, frozenset({"tcp"}), Load(0, 0), number % 5, number))
        met: set[int] = set()

        def refuses(source: int) -> bool:
            met.add(source)
            return len(met) <= refused

        calls = Calls()
        sys.setprofile(calls)
        try:
            at = Location("s", "r0", "h0")
            found = sources.best(
                at, frozenset({"tcp"}), Wanted(10**9, 10**6), SUPPOSED_BYTES_PER_S, refuses
            )
        finally:
            sys.setprofile(None)
        assert (found is None) == (refused == 1024)
        assert len(met) == min(refused + 1, 1024)
        return calls.count

    assert cost(1024) - cost(0) < 10 * 1024
