"""What packing does to whole models is arithmetic; and the benchmark runs at all."""

import json
from pathlib import Path

import pytest

from benches import tiny


def test_each_packed_tensor_is_a_region_and_a_read_less() -> None:
    rows = {row["model"]: row for row in tiny.of_real_size(16 * 1024)}
    assert rows["Qwen2.5-0.5B"] == {
        "model": "Qwen2.5-0.5B",
        "ranks": 1,
        "GiB": 0.9,
        "tiny": 121,
        "regions, each by itself": 290,
        "reads, each by itself": 394,
        "regions, packed": 170,
        "reads, packed": 274,
        "MiB more": 0.14,
    }
    assert (rows["DeepSeek-V3"]["tiny"], rows["DeepSeek-V3"]["reads, packed"]) == (1487, 2008)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    assert tiny.main(["--rounds", "1", "--mib", "64", "--tensors", "20", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["tensors"] for row in rows] == [290, 339, 2739, 2731, 3503, 20, 20, 20, 20]
