"""The plan of a mixture of experts of 1.01T parameters, as docs/layouts.md shows it: the cells and the runs of each row."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benches.plan import PUBLISHERS, READING, SOURCES, checked, rank_of
from tensorhub.layouts import plan

DOCS = Path(__file__).parents[2] / "docs" / "layouts.md"


def row(name: str) -> list[str]:
    """The cells of that row of the table."""
    (found,) = re.findall(rf"^\| {re.escape(name)} \|(.*)\|$", DOCS.read_text(), re.MULTILINE)
    return [cell.strip() for cell in found.split("|")]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("publisher", PUBLISHERS)
def test_a_trillion_parameters(publisher: str) -> None:
    publication = checked(PUBLISHERS[publisher](SOURCES))
    sources = [each.coordinates for each in publication.classes]
    for name, held in READING.items():
        reader = rank_of(held(0), publication.catalogue)
        made = plan(reader, sources, turn=0)
        assert made.nbytes == reader.nbytes  # each byte is read, and once
        *_, cells, runs = row(f"{publisher} -> {name}")
        assert f"{made.cell_count:,}" == cells
        shown = made.run_count / 1e6
        assert runs == (f"{shown:.0f} M" if shown > 10 else f"{shown:.2f} M")
