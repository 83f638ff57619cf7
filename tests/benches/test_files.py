"""The benchmark runs, and what it fetches is what was published (it looks itself)."""

import json
from pathlib import Path

import pytest

from benches import files


def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "figures.json"
    assert files.main(["--rounds", "1", "--mib", "1", "--folder", str(tmp_path), "--json", str(path)]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert row["MiB"] == 1
    assert 1 < row["publisher's anonymous MiB"][0] < 500
    assert "copy / fetch into a file" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
