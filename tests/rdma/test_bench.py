"""The benchmark of rdma runs (it looks at what arrived itself)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benches import one_sided
from benches.one_sided import MODES

pytestmark = pytest.mark.rdma


def test_it_runs(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    small = ["--rounds", "1", "--mib", "32", "--tensors", "6", "--tiny", "3", "--json", str(file)]
    assert one_sided.main(["--transport", "rdma", *small]) == 0
    assert tuple(json.loads(file.read_text())["rows"]) == MODES
