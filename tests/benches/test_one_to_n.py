"""The benchmark's arithmetic; and that it runs at all."""

import json
from pathlib import Path

import pytest

from benches import one_to_n
from benches.one_to_n import BARE, WAYS, Figure, ratios, table
from benches.size_profiles import SizeProfile


def test_half_of_the_tensors_are_tiny_and_all_bytes_are_there() -> None:
    for nbytes in (2**20, 10 * 2**20, 2**30):
        each = SizeProfile(nbytes).sizes()
        assert (len(each), sum(each)) == (300, nbytes)
        assert sum(size <= 8192 for size in each) == (150 if nbytes > 2**20 else 300)
        assert all(size % 4 == 0 for size in each)


def test_the_tensors_are_those_of_a_model() -> None:
    profile = SizeProfile(2**26, "Kimi-K2", 64)
    each = profile.sizes()
    assert str(profile) == "Kimi-K2 of one of 64 ranks"
    assert (len(each), 0.99 * 2**26 < sum(each) <= 2**26) == (3503, True)
    assert all(size % 4 == 0 for size in each)


def test_a_ratio_compares_neighbours() -> None:
    figures = [Figure(way.name, 1, number, 0.5 * number * (n + 1), 1.0) for number in (1, 2) for n, way in enumerate(WAYS)]
    assert ratios(figures, WAYS[0], BARE, 1) == [5.0, 5.0]
    row = table(figures, [1], 2**30)[0]
    assert row["seconds"] == [0.75, 0.5, 1.0]
    assert row["GiB/s"] == [1.5, 1.0, 2.0]
    assert row["speed of bare"] == [5.0, 5.0, 5.0]
    assert row["ms over 2 x bare"] == [-6750.0, -9000.0, -4500.0]


@pytest.mark.slow  # seven interpreters, five of which import torch
def test_a_small_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    sizes = ["--mib", "4", "10000000", "--receivers", "1", "2"]
    assert one_to_n.main(["--transport", "shm", "--rounds", "1", *sizes, "--json", str(file)]) == 0
    shown = capfd.readouterr().out
    assert "1 -> 2  TensorHub, integrity=False" in shown
    assert "10000000 MiB: there is memory for these numbers of receivers only: none" in shown
    written = json.loads(file.read_text())
    assert len(written["rows"]) == len(written["figures"]) == 10
    assert all(row["receiver's extra MiB"] < 64 for row in written["rows"])
