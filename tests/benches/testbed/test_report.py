"""Results as rows, tables and pictures."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from benches.testbed import picture, prediction, report
from benches.testbed.accounting import Waits
from benches.testbed.report import Row
from benches.testbed.run import Result
from benches.testbed.sizes import SIZES, fitted, with_slow
from benches.testbed.ways import WAYS
from tensorhub.testing.flow.plots import HATCHED
from tensorhub.testing.flow.scenario import load
from tests.benches.testbed.test_accounting import END, begin, done, publish

STANDALONE = fitted(load("standalone"), SIZES["standalone"])
FAR = fitted(load("cross-datacenter"), SIZES["cross-datacenter"])


def result(way: str, *seconds: float, far_floor_s: float | None = None) -> Result:
    """One update of each of the first rollouts, of so many seconds."""
    events: list[dict[str, Any]] = [publish(2, wait=0.5)]
    for number, each in enumerate(seconds):
        events += [begin(f"rollout-{number}", 10.0), done(f"rollout-{number}", 10.0, 10.0 + each, transfer=each)]
    return Result(way, [*events, END], 1.0, far_floor_s, 100.0, 0.1, 0.2)


def test_a_row_is_of_the_round_in_the_middle() -> None:
    results = [result("sockets", seconds) for seconds in (9.0, 3.0, 4.0)]
    row = report.row(STANDALONE, WAYS["sockets"], results)
    assert row.stalls is not None
    assert (row.rounds, row.stalls.total_s, row.floor_s, row.per_update_s) == (3, 4.5, 1.0, 4.5)
    assert row.updates is not None
    assert (row.updates.done, row.updates.median_s) == (3, 4.0)  # of all rounds


def test_a_slow_machine_does_not_count_itself() -> None:
    row = report.row(with_slow(STANDALONE, 4.0), WAYS["tensorhub"], [result("tensorhub", 9.0, 1.5)])
    assert row.stalls is not None
    assert (row.stalls.updates, row.stalls.total_s) == (1, 2.0)  # rollout-1's, and the trainer's


@pytest.mark.parametrize(("way", "floor_s"), [("tensorhub", 20.0), ("sockets", 20.0), ("tensorhub+seeds", 1.0)])
def test_the_floor_is_over_the_wan_where_nothing_in_the_site_can_have_the_version(way: str, floor_s: float) -> None:
    found = report.floors(FAR, WAYS[way], result(way, 1.0, far_floor_s=20.0))
    assert set(found.values()) == {floor_s}


def test_every_rank_of_a_group_has_a_floor() -> None:
    assert {"rollout-0", "rollout-0.1"} <= set(report.floors(STANDALONE, WAYS["tensorhub+groups"], result("x")))


def test_tables_compare_with_the_first_row() -> None:
    ours = report.row(STANDALONE, WAYS["tensorhub"], [result("tensorhub", 1.0, 1.0)])
    theirs = report.row(STANDALONE, WAYS["sockets"], [result("sockets", 3.0, 4.5)])
    failed = Row("nixl", "not installed: ...")
    head, first, second, third = report.table([ours, theirs, failed])
    assert head.split()[:5] == ["system", "updates", "stall", "s", "each"]
    assert first.split()[1:7] == ["2", "2.50", "1.250", "1.000", "1.25", "1.00"]
    assert second.removeprefix(WAYS["sockets"].title).split()[:6] == ["2", "8.00", "4.000", "1.000", "4.00", "3.20"]
    assert third.endswith("not installed: ...")
    lines = report.waits_table([ours, theirs, failed])
    assert [line.split()[-2:] for line in lines if "updates" in line] == [["1.00", "1.00"], ["3.00", "4.50"]]
    assert [line.split()[-2:] for line in lines if "both" in line] == [["1.00", "1.00"], ["3.00", "4.50"]]


def test_what_is_not_known_has_no_ratio() -> None:
    never = Waits(1, 0, 9, 2.0, float("inf"))
    rows = [Row(way, joins=never, updates=never) for way in ("tensorhub", "sockets")]
    assert [line.split()[-4:] for line in report.waits_table(rows)[1:]] == [["2.00", "inf", "1.00", "-"]] * 4


def test_pictures_are_svg_and_name_every_system() -> None:
    rows = [report.row(STANDALONE, WAYS[way], [result(way, 2.0)]) for way in ("tensorhub", "sockets")]
    drawn = picture.bars([*rows, Row("nixl", "no")], "standalone & more", ["a < b"])
    ElementTree.fromstring(drawn)
    assert all(WAYS[way].title in drawn for way in ("tensorhub", "sockets"))
    curve = picture.curves({"ours": [(1, 1.0), (8, 1.1)], "theirs": [(1, 1.0), (8, float("inf"))]}, "t", "n", "s")
    ElementTree.fromstring(curve)
    assert picture.bars([], "nothing", [])


def test_who_has_done_nothing_does_not_look_fast() -> None:
    unfinished = Result("sockets", [publish(2, wait=0.5), begin("rollout-0", 99.0), END], 1.0, None, 100.0, 0.1, 0.2)
    rows = [report.row(STANDALONE, WAYS[each.way], [each]) for each in (result("tensorhub", 2.0), unfinished)]
    drawn = picture.bars([*rows, Row("redis", "not installed: redis")], "t", [])
    assert drawn.count(HATCHED) == 1
    assert ">none done<" in drawn
    assert "none done, 1 cut short" in drawn
    assert "not installed: redis" in drawn


def test_curves_of_many_systems_can_be_told_apart() -> None:
    lines = {f"system {number}": [(1.0, 1.0), (8.0, 2.0)] for number in range(11)} | {"last": [(1.0, float("inf"))]}
    root = ElementTree.fromstring(picture.curves(lines, "t", "n", "s"))
    styles = {(each.get("stroke"), each.get("stroke-dasharray")) for each in root.iter() if each.get("stroke-dasharray")}
    assert len(styles) == 12
    assert "last; none done at 1" in [each.text for each in root.iter() if each.text]


def test_what_is_predicted_is_beside_what_was_measured() -> None:
    measured = [result("tensorhub", 1.0, 1.2), result("chain-waits", 4.0)]
    rows = [report.row(STANDALONE, WAYS[each.way], [each]) for each in measured]
    _, ours, chain = prediction.table(STANDALONE, [*rows, Row("nixl", "no")], measured)
    assert ours.split()[:3] == ["TensorHub", "updates", "1.100"]
    assert 0.8 <= float(ours.split()[3]) < 0.85  # one copy, and what it costs to begin it
    assert "updates" in chain
    assert 4.0 < float(chain.split()[-2]) < 8.0  # it waits for the slowest of eight
