"""The pure packages import nothing that could make two runs differ, not even in a function or to
annotate.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import tensorhub

SOURCE = Path(tensorhub.__file__).parent
PURE = ("coordinator", "worker", "scheduler", "deltas", "layouts", "flows")
JUDGED = tuple(f"tensorhub.{package}" for package in (*PURE, "runtime"))
FORBIDDEN = frozenset(
    "anyio asyncio concurrent datetime io logging multiprocessing os pathlib random secrets select "
    "selectors "
    "signal socket ssl structlog subprocess tempfile threading time torch trio uuid".split()
)


def impurities(source: str) -> Iterator[str]:
    """What `source` imports, anywhere in it, that is forbidden; and calls that do I/O without an
    import.
    """
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                imported = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                imported = [module]
            case ast.Call(func=ast.Name(id="__import__" | "input" | "open" | "print" as builtin)):
                yield f"line {node.lineno}: {builtin}()"
                continue
            case _:
                continue
        for name in imported:
            if name.partition(".")[0] in FORBIDDEN | {"importlib"}:
                yield f"line {node.lineno}: {name}"


@pytest.mark.parametrize("package", PURE)
def test_pure_packages_are_pure(package: str) -> None:
    found = [
        f"{path.relative_to(SOURCE)} {impurity}"
        for path in sorted((SOURCE / package).rglob("*.py"))
        for impurity in impurities(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_judges_import_no_number_and_no_text_from_what_they_judge() -> None:
    """A wrong constant would be wrong in the judge, too."""
    found = [
        f"{path.name}: {node.module}.{alias.name}"
        for path in sorted((SOURCE / "testing" / "sim" / "judges").glob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(JUDGED)
        for alias in node.names
        if alias.name.isupper()
    ]
    assert found == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time", ["line 1: time"]),
        ("import math, os.path as p", ["line 1: os.path"]),
        ("from random import Random", ["line 1: random"]),
        ("def f():\n    import socket", ["line 2: socket"]),
        ("if TYPE_CHECKING:\n    import torch.nn", ["line 2: torch.nn"]),
        ("import importlib", ["line 1: importlib"]),
        ("open('x')", ["line 1: open()"]),
        ("import math\nfrom . import time\nfrom tensorhub.types import Now\nx.open()", []),
    ],
)
def test_the_check_sees_every_way_of_importing(source: str, expected: list[str]) -> None:
    assert list(impurities(source)) == expected
