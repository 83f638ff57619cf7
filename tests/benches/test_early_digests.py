"""The benchmark runs at all."""

import json
from pathlib import Path

import pytest

from benches import early_digests


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert early_digests.main(["--rounds", "1", "--mib", "16", "--seconds", "0.2", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["MiB"] for row in rows] == [16, 16]
