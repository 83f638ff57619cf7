"""The benchmark's arithmetic; and that it runs at all."""

import json
from pathlib import Path

import pytest

from benches import calls
from benches.calls import IDLE_TRIP, LAST_OF_TWO, TRIP, table


def test_a_call_is_compared_with_a_round_trip_of_its_own_round_and_process() -> None:
    figures = {"publish": [0.5, 2.0], TRIP: [0.25, 0.5], LAST_OF_TWO: [3.0, 3.0], IDLE_TRIP: [1.0, 1.5]}
    rows = {row["call"]: row for row in table(figures)}
    assert rows["publish"]["of a round trip"] == [3.0, 2.0, 4.0]
    assert rows["publish"]["us"] == [1.25e6, 0.5e6, 2e6]
    assert rows[LAST_OF_TWO]["of a round trip"] == [2.5, 2.0, 3.0]


@pytest.mark.slow
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert calls.main(["--rounds", "1", "--tensors", "10", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {row["call"] for row in rows} >= {"publish, 10 tensors", "update, nothing new", LAST_OF_TWO, "newest"}
    assert "newest" in capsys.readouterr().out
