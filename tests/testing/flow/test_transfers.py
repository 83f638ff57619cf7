"""When memories are full, against times worked out by hand: 1,000 bytes over links of 100 bytes per
second, a lag of 10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tensorhub.testing.flow.timeline import Timeline
from tensorhub.testing.flow.transfers import Flow, Memory, Transfers

BYTES, LAG = 1000.0, 10.0


class Wires:
    """Memories by name; `full`: when each was."""

    def __init__(self, capacities: list[float]) -> None:
        self.timeline = Timeline()
        self.transfers = Transfers(self.timeline, capacities)
        self.timeline.settled = self.transfers.settle
        self.full: dict[str, float] = {}
        self.lost: list[str] = []
        self.memories = {"a": Memory("a", BYTES)}
        self.transfers.put(self.memories["a"], BYTES)

    def memory(self, name: str) -> Memory:
        if name not in self.memories:
            self.memories[name] = Memory(
                name, BYTES, lambda: self.full.update({name: self.timeline.now})
            )
        return self.memories[name]

    def read(self, source: str, reader: str, *path: int, after_s: float = 0.0) -> Flow:
        broken = lambda: self.lost.append(reader)  # noqa: E731
        return self.transfers.open(
            self.memory(source), self.memory(reader), path, LAG, after_s, broken
        )

    def at(self, when: float, call: Callable[[], object]) -> None:
        def due() -> None:
            call()

        self.timeline.at(when, due)

    def run(self) -> dict[str, Any]:
        self.transfers.settle()
        self.timeline.run(1e6)
        return {name: pytest.approx(when) for name, when in self.full.items()}


def test_a_chain_of_three_costs_a_lag_for_each_hop() -> None:
    wires = Wires([100.0] * 6)
    for number, (source, reader) in enumerate((("a", "b"), ("b", "c"), ("c", "d"))):
        wires.read(source, reader, number, number + 3)
    assert wires.run() == {"b": 10.0, "c": 10.1, "d": 10.2}


def test_a_star_shares_its_uplink() -> None:
    wires = Wires([100.0] * 4)
    for number, reader in enumerate("bcd"):
        wires.read("a", reader, 0, number + 1)
    assert wires.run() == {"b": 30.0, "c": 30.0, "d": 30.0}


def test_who_comes_later_shares_what_is_left() -> None:
    """The first has half of its bytes when the second comes. Both then get half of the link, until
    the first is done.
    """
    wires = Wires([100.0] * 3)
    wires.read("a", "b", 0, 1)
    wires.read("a", "c", 0, 2, after_s=5.0)
    assert wires.run() == {"b": 15.0, "c": 20.0}


def test_a_thin_link_is_crossed_once_and_all_behind_it_follow() -> None:
    """The WAN, link 0, carries a tenth. Who reads from the one that crossed it is a lag behind."""
    wires = Wires([10.0, 100.0, 100.0, 100.0, 100.0])
    wires.read("a", "b", 0, 1)
    wires.read("b", "c", 2, 3)
    assert wires.run() == {"b": 100.0, "c": 100.1}
    assert wires.transfers.carried[0] == pytest.approx(BYTES)


def test_who_has_caught_up_with_its_source_gets_what_that_gets() -> None:
    """b fills at 10 from a; c comes at 50, runs through b's 490 bytes at 100, and is then as fast
    as b.
    """
    wires = Wires([10.0, 100.0, 100.0, 100.0])
    wires.read("a", "b", 0, 1)
    flow = wires.read("b", "c", 2, 3, after_s=50.0)
    rates: list[float] = []
    wires.at(51.0, lambda: rates.append(flow.rate))
    wires.at(60.0, lambda: rates.append(flow.rate))
    assert wires.run() == {"b": 100.0, "c": 100.1}
    assert rates == pytest.approx([100.0, 10.0])


def test_a_reader_waits_for_a_source_that_has_less() -> None:
    """At 5, c has 500 bytes from a. It is given b, which has 0 and begins then: c waits until b is
    a lag ahead.
    """
    wires = Wires([100.0] * 6)
    first = wires.read("a", "c", 0, 1)
    wires.at(5.0, lambda: wires.transfers.close(first))
    wires.at(5.0, lambda: wires.read("a", "b", 0, 2))
    wires.at(5.0, lambda: wires.read("b", "c", 3, 1))
    assert wires.run() == {"b": 15.0, "c": 15.1}


def test_a_lost_source_is_told_and_what_came_from_it_stays() -> None:
    wires = Wires([100.0] * 6)
    wires.read("a", "b", 0, 1)
    wires.read("b", "c", 2, 3)
    wires.at(5.0, lambda: wires.transfers.end(wires.memory("b")))
    wires.at(6.0, lambda: wires.read("a", "c", 0, 3))
    assert wires.run() == {"c": pytest.approx(6.0 + 5.1)}
    assert wires.lost == ["c"]


def test_the_last_fraction_of_a_byte_comes_from_a_whole_source() -> None:
    wires = Wires([100.0] * 2)
    wires.transfers.put(wires.memory("b"), BYTES - 0.5)
    wires.read("a", "b", 0, 1)
    assert wires.run() == {"b": 0.005}


def test_two_sources_bring_their_bytes_together() -> None:
    wires = Wires([100.0, 50.0, 100.0])
    other = Memory("z", BYTES)
    wires.transfers.put(other, BYTES)
    wires.memories["z"] = other
    wires.read("a", "b", 1)
    wires.read("z", "b", 0)
    assert wires.run() == {"b": pytest.approx(1000 / 150)}


def test_a_source_that_was_gone_before_is_told_as_one_that_is_lost() -> None:
    wires = Wires([100.0] * 2)
    wires.transfers.end(wires.memory("a"))
    wires.read("a", "b", 0, 1, after_s=2.0)
    assert wires.run() == {}
    assert (wires.lost, wires.timeline.now) == (["b"], 2.0)


def test_what_a_flow_has_carried_is_known_when_it_is_closed_and_one_that_carried_nothing_leaves_no_trace() -> (
    None
):
    wires = Wires([100.0] * 2)
    flow = wires.read("a", "b", 0, 1)
    wires.at(4.0, lambda: wires.transfers.close(flow))
    wires.at(4.0, lambda: wires.transfers.close(flow))
    wires.at(5.0, lambda: wires.transfers.close(wires.read("a", "b", 0, 1, after_s=1.0)))
    assert wires.run() == {}
    assert [
        (each.source, each.reader, each.nbytes, each.ended_s) for each in wires.transfers.edges
    ] == [("a", "b", 400.0, 4.0)]
    assert wires.memory("b").have == pytest.approx(400.0)
    assert wires.transfers.carried == pytest.approx([400.0, 400.0])


def test_a_flow_has_begun_when_its_first_byte_came_however_often_it_had_to_wait() -> None:
    """c reads from a from 1 on. Then b, which has less than c, is its only source, until b is
    ahead.
    """
    wires = Wires([100.0, 200.0, 100.0, 100.0])
    first = wires.read("a", "b", 0, 2)
    wires.read("b", "c", 3, 1)
    begun: list[float] = []
    wires.at(5.0, lambda: wires.transfers.close(first))  # c waits for more of b
    wires.at(7.0, lambda: wires.read("a", "b", 0, 2))
    wires.at(8.0, lambda: begun.extend(each.began for each in wires.memory("c").inflows))
    assert wires.run() == {"b": 12.0, "c": 12.1}
    assert begun == pytest.approx([0.1])


def test_who_follows_a_source_of_two_gets_what_both_bring() -> None:
    """b has 50 from a, and 50 more from z from 4 on; c, behind it, comes in as fast as b fills."""
    wires = Wires([50.0, 50.0, 100.0, 100.0])
    wires.memories["z"] = Memory("z", BYTES)
    wires.transfers.put(wires.memories["z"], BYTES)
    wires.read("a", "b", 0)
    wires.read("z", "b", 1, after_s=4.0)
    flow = wires.read("b", "c", 2, 3)
    rates: list[float] = []
    for when in (3.0, 5.0):
        wires.at(when, lambda: rates.append(flow.rate))
    assert wires.run() == {"b": 12.0, "c": 12.1}
    assert rates == pytest.approx([50.0, 100.0])


def test_a_source_that_loses_one_of_its_two_slows_its_reader_down() -> None:
    wires = Wires([50.0, 50.0, 100.0, 100.0])
    wires.memories["z"] = Memory("z", BYTES)
    wires.transfers.put(wires.memories["z"], BYTES)
    wires.read("a", "b", 0)
    second = wires.read("z", "b", 1)
    flow = wires.read("b", "c", 2, 3)
    rates: list[float] = []
    for when in (3.0, 5.0):
        wires.at(when, lambda: rates.append(flow.rate))
    wires.at(4.0, lambda: wires.transfers.close(second))
    assert wires.run() == {"b": 16.0, "c": pytest.approx(16.1)}
    assert rates == pytest.approx([100.0, 50.0])
