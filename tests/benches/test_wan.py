"""The benchmark's arithmetic; what it refuses; and (slow) that it runs at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benches import wan
from benches.testbed import network
from benches.wan import Figure, table


def test_a_row_compares_within_rounds() -> None:
    figures = [
        Figure("cubic", 0.001, connections, number, 1.0, mbit)
        for number, mbits in ((1, (10.0, 30.0)), (2, (20.0, 40.0)), (3, (40.0, 40.0)))
        for connections, mbit in zip((1, 4), mbits, strict=True)
    ]
    assert table(figures)[1].split() == "cubic 0.001 20, 1.00 [1.00-1.00] 40, 2.00 [1.00-3.00]".split()


@pytest.mark.parametrize(
    "wrong", ["--connections 0", "--connections 17", "--rounds 0", "--mbit -1", "--loss 1", "--loss -0.1"]
)
def test_what_cannot_be_measured_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        wan.main(wrong.split())
    assert f"error: {wrong}: give " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.root
def test_a_small_run(tmp_path: Path) -> None:
    if (reason := network.why_not()) is not None:
        pytest.skip(reason)
    file = tmp_path / "figures.json"
    options = "--congestion cubic --loss 0 --connections 1 4 --rounds 1 --mib 8 --chunk-mib 0.0625 --round-trip-ms 10 --json"
    assert wan.main([*options.split(), str(file)]) == 0
    figures = json.loads(file.read_text())["figures"]
    assert {figure["connections"] for figure in figures} == {1, 4}
    assert all(0 < figure["mbit"] < 210 for figure in figures)  # nothing is faster than the line
