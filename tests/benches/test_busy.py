"""The busy loop is counted rightly, its arithmetic is right, and the benchmark runs."""

import json
import threading
import time
from pathlib import Path

import pytest

from benches import busy
from benches.busy import Loop, row_of


def test_the_loop_counts_while_it_runs() -> None:
    loop = Loop()
    thread = threading.Thread(target=loop.run)
    thread.start()
    loop.start()
    start = time.monotonic()
    while not loop.rate((start, time.monotonic())):
        pass
    end = time.monotonic()
    loop.stop()
    assert loop.rate((start, end)) > 0
    assert loop.rate((start - 2, start - 1)) == 0
    loop.end()
    thread.join()


def test_a_ratio_is_of_one_round() -> None:
    found = {
        "alone": [(0.3, 100.0), (0.3, 200.0)],
        "idle": [(1.0, 0.0), (2.0, 0.0)],
        "busy": [(2.0, 50.0), (4.0, 100.0)],
        "beside": [(0.5, 25.0), (1.0, 50.0)],
    }
    row = row_of(found, 2**30)
    assert row["GiB/s idle"] == [0.75, 0.5, 1.0]
    assert row["busy / idle"] == row["loop's speed, busy"] == [0.5, 0.5, 0.5]
    assert row["loop, busy / beside"] == [2.0, 2.0, 2.0]
    assert row["loop s lost per GiB, busy"] == [1.5, 1.0, 2.0]
    assert row["loop s lost per GiB, beside"] == [0.5625, 0.375, 0.75]


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert busy.main(["--rounds", "1", "--mib", "4", "--transports", "tcp", "--json", str(file)]) == 0
    assert "busy / idle" in capfd.readouterr().out
    row = json.loads(file.read_text())["transports"]["tcp"]
    assert all(low > 0 for name, (_, low, _) in row.items() if "lost" not in name)
