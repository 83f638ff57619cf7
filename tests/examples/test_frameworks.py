"""What an example of a framework asks of its user is short."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
LINES_MAX = 40


def statements(path: Path) -> int:
    """Lines of code: no imports, docstrings, comments and blank lines."""
    tree = ast.parse(path.read_text())
    lines: set[int] = set()
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text and not isinstance(node, ast.Import | ast.ImportFrom):
            body = getattr(node, "body", None)
            lines.update(range(node.lineno, (body[0].lineno if body else (node.end_lineno or 0) + 1)))
    return len(lines)


@pytest.mark.parametrize("name", ["ray_weights", "sglang_server", "trl_async_grpo", "verl_update", "vllm_server"])
def test_an_example_is_short(name: str) -> None:
    assert statements(EXAMPLES / f"{name}.py") <= LINES_MAX
