"""The tutorial's blocks, in order, as a reader types them."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "tutorial.md"


async def test_the_blocks_run_one_after_the_other() -> None:
    names: dict[str, Any] = {"__name__": "tutorial"}
    text = PAGE.read_text(encoding="utf-8")
    for block in re.finditer(r"```python\n(.*?)```", text, re.DOTALL):
        # so that a traceback shows the page's own lines
        lines_before = "\n" * text.count("\n", 0, block.start(1))
        code = compile(
            lines_before + block[1], str(PAGE), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        result = eval(code, names)
        if inspect.iscoroutine(result):
            await result
