"""The picture: well-formed, with all three parts, and as it should be where there is little to show."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from tensorhub.testing.flow.plots import BINS, COLOURS, HATCHED, ROW, _means, draw
from tensorhub.testing.flow.run import SYSTEMS, run_one
from tensorhub.testing.flow.scenario import load

SVG = "{http://www.w3.org/2000/svg}"


def test_it_has_a_bar_for_each_rollout_and_a_dot_for_each_worker() -> None:
    scenario = replace(load("standalone"), versions=5, title="<& a title>")
    runs = [run_one(scenario, name) for name in ("tensorhub", "pull")]
    root = ElementTree.fromstring(draw(scenario, runs, ["a note"]))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert "standalone: <& a title>" in texts
    assert "a note" in texts
    tips = [each.text or "" for each in root.iter(f"{SVG}title")]
    assert sum(tip.startswith("rollout-") and tip.endswith(" s") for tip in tips) == 16
    assert "trainer-0" in tips


def test_who_has_done_nothing_has_a_hatched_bar_of_full_height_and_no_figure() -> None:
    """A missing bar would look like no stall at all. The trainer's one link is shared by eight, and the run ends before."""
    scenario = replace(load("standalone"), versions=3, every_copies=1.9)
    runs = [run_one(scenario, name) for name in ("tensorhub", "pull", "broadcast-poor")]  # the last is the slowest
    ours, theirs, _ = (run.row for run in runs)
    assert (ours.updates.done, ours.updates.unfinished, theirs.calls.done, theirs.calls.unfinished) == (6, 1, 0, 8)
    root = ElementTree.fromstring(draw(scenario, runs))
    texts = [each.text or "" for each in root.iter(f"{SVG}text")]
    assert texts.count("none done") == 1
    assert f"{ours.updates.mean_s:.3f} s" in texts
    assert any(each.endswith("; hatched: none done, cut short") for each in texts)
    hatched = [each for each in root.iter(f"{SVG}rect") if each.get("fill") == HATCHED]
    heights = [float(each.get("height", 0)) for each in hatched]
    assert heights[1:] == [ROW - 16] * 8
    assert heights[0] < ROW - 16  # the one that ours was about to do
    assert root.find(f"{SVG}defs/{SVG}pattern").get("id") in HATCHED  # type: ignore[union-attr, operator]


def test_every_system_has_a_colour_of_its_own() -> None:
    assert len(set(COLOURS)) == len(COLOURS) >= len(SYSTEMS)


def test_the_areas_under_the_links_are_the_bytes_that_crossed_them() -> None:
    found = run_one(replace(load("standalone"), versions=3), "tensorhub")
    for links in found.world.topology.watched().values():
        end = found.world.timeline.now
        area = sum(_means(found, frozenset(links), end)) * end / BINS
        assert area == pytest.approx(sum(found.world.transfers.carried[link] for link in links), rel=1e-6)
