"""The benchmark of chunks in pieces runs (the pulls verify what arrived)."""

import json
from pathlib import Path

import pytest

from benches import strided


@pytest.mark.parametrize("transport", ["tcp", "cma", "shm"])
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str) -> None:
    file = tmp_path / "figures.json"
    small = ["--rounds", "2", "--mib", "2", "--runs", "176", "65536"]
    assert strided.main(["--transport", transport, *small, "--json", str(file)]) == 0
    assert f"{transport}: 2 MiB" in capsys.readouterr().out
    assert set(json.loads(file.read_text())["seconds"]) == {"contiguous", "runs of 176", "runs of 65536"}
