"""The benchmark's arithmetic; and that it runs at all, and leaves no namespace behind."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from benches import capped
from benches.capped import Figure, table
from benches.chaos import namespaces


def test_a_row_is_of_one_number_of_readers() -> None:
    figures = [Figure(readers, number, 2.0 * readers + number, 2.0, 0.1) for number in (0, 1, 2) for readers in (2, 1)]
    rows = table(figures)
    assert [row["readers"] for row in rows] == [1, 2]
    assert rows[1]["seconds"] == [5.0, 4.0, 6.0]
    assert rows[1]["ratio"] == [2.5, 2.0, 3.0]


@pytest.mark.parametrize("wrong", ["--readers 0", "--rounds 0", "--mbit -1"])
def test_what_cannot_be_measured_is_refused(wrong: str) -> None:
    with pytest.raises(SystemExit):
        capped.main(wrong.split())


@pytest.mark.slow
@pytest.mark.root
def test_a_small_run(tmp_path: Path) -> None:
    if (reason := capped.why_not()) is not None:
        pytest.skip(reason)
    file = tmp_path / "figures.json"
    assert capped.main([*"--readers 1 2 --rounds 1 --mib 8 --json".split(), str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["readers"] for row in rows] == [1, 2]
    assert all(row["ratio"][0] > 0.9 for row in rows)  # nothing is faster than the link
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"{namespaces.SPACE}{os.getpid()}-" not in left
