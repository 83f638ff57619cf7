"""The examples for frameworks are as short as docs/frameworks.md says: their statements are counted,
without imports and docstrings.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"\[(examples/\w+\.py)\]\(\.\./\1\) \|.* (\d+) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs" / "frameworks.md").read_text(encoding="utf-8"))


def test_each_hook_has_an_example() -> None:
    assert len(ROWS) >= 6


@pytest.mark.parametrize(("example", "told"), ROWS)
def test_an_example_has_at_most_40_statements(example: str, told: str) -> None:
    tree = ast.parse((ROOT / example).read_text(encoding="utf-8"))
    counted = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    assert len(counted) == int(told)
    assert len(counted) <= 40
