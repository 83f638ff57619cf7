"""The picture: well-formed, with all three parts, and as it should be where there is little to show."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from tensorhub.testing.flow.plots import BINS, _means, draw
from tensorhub.testing.flow.run import run_one
from tensorhub.testing.flow.scenario import load

SVG = "{http://www.w3.org/2000/svg}"


def test_it_has_a_bar_for_each_rollout_and_a_dot_for_each_worker() -> None:
    scenario = replace(load("standalone"), versions=3, title="<& a title>")
    runs = [run_one(scenario, name) for name in ("tensorhub", "pull")]
    root = ElementTree.fromstring(draw(scenario, runs, ["a note"]))
    texts = [each.text for each in root.iter(f"{SVG}text")]
    assert "standalone: <& a title>" in texts
    assert "a note" in texts
    tips = [each.text or "" for each in root.iter(f"{SVG}title")]
    assert sum(tip.startswith("rollout-") and tip.endswith(" s") for tip in tips) == 16
    assert "trainer-0" in tips


def test_the_areas_under_the_links_are_the_bytes_that_crossed_them() -> None:
    found = run_one(replace(load("standalone"), versions=3), "tensorhub")
    for links in found.world.topology.watched().values():
        end = found.world.timeline.now
        area = sum(_means(found, frozenset(links), end)) * end / BINS
        assert area == pytest.approx(sum(found.world.transfers.carried[link] for link in links), rel=1e-6)
