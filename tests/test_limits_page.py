"""docs/limits.md says what the code says."""

from __future__ import annotations

import importlib
import re
from math import prod
from pathlib import Path
from typing import Any

from tensorhub.types import Options

PAGE = Path(__file__).parent.parent / "docs" / "limits.md"
ROWS = re.findall(r"^\| `([\w.]+)` \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def value_of(text: str) -> float:
    """Of a number, a power, or a product of those."""
    factors = re.findall(r"(\d+(?:\.\d+)?)(?:\*\*(\d+))?", text)
    return float(prod(float(base) ** int(power or 1) for base, power in factors))


def in_code(name: str) -> Any:
    path, _, constant = f"tensorhub.{name}".rpartition(".")
    if path.endswith(".Options"):
        return getattr(Options(), constant)
    return getattr(importlib.import_module(path), constant)


def test_every_row_has_the_value_of_the_code() -> None:
    assert len(ROWS) > 20
    assert {name: value_of(text) for name, text in ROWS} == {
        name: in_code(name) for name, _ in ROWS
    }


def test_how_values_are_read() -> None:
    assert [value_of(text) for text in ("4 * 2**30", "2**16", "10.0", "0.5", "65536")] == [
        2**32,
        2**16,
        10,
        0.5,
        65536,
    ]


def test_the_memory_limit_that_operating_names_is_above_the_large_bounds_together() -> None:
    kept = ("coordinator.limits.MANIFEST_BYTES_MAX", "coordinator.limits.DIGEST_BYTES_MAX")
    moving = (
        "UNDECODED_BYTES_MAX",
        "ANSWERS_BYTES_MAX",
        "READ_ONLY_UNDECODED_BYTES_MAX",
        "READ_ONLY_ANSWERS_BYTES_MAX",
    )
    bounds = sum(map(in_code, (*kept, *(f"runtime.control.server.{name}" for name in moving))))
    named = re.search(
        r"(\d+) GiB exceeds the sum of its \[bounds\]",
        (PAGE.parent / "operating.md").read_text(encoding="utf-8"),
    )
    assert named is not None
    assert bounds < int(named[1]) * 2**30
