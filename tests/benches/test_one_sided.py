"""The benchmarks of the data plane run (they look at what arrived themselves)."""

import json
from pathlib import Path

import pytest

from benches import one_sided
from benches.one_sided import MODES


@pytest.mark.parametrize("transport", ["cma", "shm"])
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str], transport: str) -> None:
    file, readers = tmp_path / "figures.json", "2" if transport == "shm" else "1"
    small = ["--rounds", "2", "--mib", "2", "--tensors", "6", "--tiny", "3", "--readers", readers]
    assert one_sided.main(["--transport", transport, *small, "--json", str(file)]) == 0
    assert f"{transport}: 2 MiB, 6 tensors, {readers} reader(s)" in capsys.readouterr().out
    rows = json.loads(file.read_text())["rows"]
    assert tuple(rows) == MODES
    assert all(len(row["ratios"]) == 2 for row in rows.values())
    assert all(max(ratios) == 1 for ratios in zip(rows["bare 1"]["ratios"], rows["bare 2"]["ratios"], strict=True))
