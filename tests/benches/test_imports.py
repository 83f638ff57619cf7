"""The benchmark's arithmetic; and that it runs at all."""

import json
from pathlib import Path

import pytest

from benches import imports
from benches.imports import EMPTY, PROGRAMS, table


def test_a_program_is_compared_with_the_empty_one_of_its_own_round() -> None:
    rows = {row["program"]: row for row in table({EMPTY: [0.25, 0.5], "import tensorhub": [0.5, 1.5]})}
    assert rows["import tensorhub"]["ms"] == [1000.0, 500.0, 1500.0]
    assert rows["import tensorhub"]["ms over the empty one"] == [625.0, 250.0, 1000.0]
    assert rows["import tensorhub"]["of the empty one"] == [2.5, 2.0, 3.0]
    assert rows["import tensorhub"]["aim"] == 150


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert imports.main(["--rounds", "1", "--json", str(path)]) == 0
    assert [row["program"] for row in json.loads(path.read_text())["rows"]] == list(PROGRAMS)
    assert "tensorhub --help" in capsys.readouterr().out
