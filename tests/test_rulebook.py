"""docs/guarantees.md and docs/glossary.md: each code is stated once, enforced, tested and cited by
a link.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.testing.bugs import every_bug

BUGS = every_bug()

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "tensorhub"
PAGE = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
CODES = [*(f"G{n}" for n in range(1, 13)), *(f"R{n}" for n in range(1, 16))]
CODE = re.compile(r"\b[GR]\d+\b")
ANCHOR = r'<a id="(\w+)"></a>'
STATED = re.findall(
    rf"^\| {ANCHOR}(\w+) \| ([^|]+) \||^{ANCHOR}\n\*\*(\w+) ([^*]+)\.\*\*", PAGE, re.MULTILINE
)
# as violations begin
NAMES = {code or rule: name or title for _, code, name, _, rule, title in STATED}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def violations() -> Iterator[tuple[Path, str]]:
    """What the simulator demands, and where."""
    for path in sorted((SRC / "testing").rglob("*.py")):
        for call in ast.walk(tree(path)):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "demand":
                text = call.args[1]
                assert isinstance(text, ast.Constant), f"{path.name}:{call.lineno}: no name"
                yield path, str(text.value)


@cache
def cited(root: Path) -> dict[Path, set[str]]:
    return {
        path: set(CODE.findall(path.read_text(encoding="utf-8"))) for path in root.rglob("*.py")
    }


def cites(root: Path, code: str) -> list[Path]:
    return [path for path, codes in cited(root).items() if code in codes]


def test_every_guarantee_and_rule_is_stated_once() -> None:
    assert [code or rule for _, code, _, _, rule, _ in STATED] == CODES
    assert [anchor or other for anchor, _, _, other, _, _ in STATED] == [
        code.lower() for code in CODES
    ]


@pytest.mark.parametrize("code", CODES)
def test_the_code_that_enforces_it_and_the_tests_that_show_it_cite_it(code: str) -> None:
    assert [path for path in cites(SRC, code) if not path.is_relative_to(SRC / "testing")]
    assert [path for path in cites(ROOT / "tests", code) if path.name.startswith("test_")]


def test_each_bug_breaks_something_that_is_stated() -> None:
    assert [
        name for name, bug in BUGS.items() if not CODE.findall(bug.breaks.partition(":")[0])
    ] == []


def test_each_violation_begins_with_the_name_of_what_it_breaks() -> None:
    found = [(path.name, text.partition(":")[0]) for path, text in violations()]
    assert len(found) > 50
    assert [(where, name) for where, name in found if name not in NAMES.values()] == []


def test_every_code_that_is_cited_is_stated() -> None:
    sources = [
        path
        for name in ("src", "tests", "benches", "examples", "docs")
        for path in (ROOT / name).rglob("*.py")
    ]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benches" / "README.md"]
    unknown = {
        code
        for path in [*sources, *pages]
        for code in CODE.findall(path.read_text(encoding="utf-8"))
    } - {*CODES}
    assert unknown == set()


def test_pages_cite_codes_as_links() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        if path.name in ("CHANGELOG.md", "guarantees.md"):
            continue
        for code, target in re.findall(r"\[([GR]\d+)\]\(([^)]*)\)", text):
            page, _, anchor = target.partition("#")
            assert (path.parent / page).resolve() == ROOT / "docs" / "guarantees.md", (
                f"{path.name}: {target}"
            )
            assert anchor == code.lower(), f"{path.name}: {target}"
        bare = CODE.findall(re.sub(r"\[[GR]\d+\]\([^)]*\)", "", text))
        assert not bare, f"{path.name} cites {bare} without a link to docs/guarantees.md"


@pytest.mark.heavy
def test_no_text_for_users_needs_a_code() -> None:
    """Docstrings of the public API are in docs/reference.md, which is one of the pages above.
    `promises` gives each code's sentence.
    """
    found = []
    for path in sorted({*SRC.rglob("*.py")} - {SRC / "testing/sim/promises.py"}):
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree(path)):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
            ):
                found += [
                    f"{path.relative_to(SRC)}:{node.lineno}" for _ in CODE.findall(node.value)
                ]
    assert found == []


def test_each_term_is_defined_once() -> None:
    rows = re.findall(r"^- \*\*([^*]+)\*\*: (.+)$", GLOSSARY, re.MULTILINE)
    terms = [term for term, _ in rows]
    assert 40 < len(terms) <= 60
    assert sorted(terms) == sorted(set(terms))
    assert re.findall(r"\*\*([^*]+)\*\*", GLOSSARY) == terms  # nothing else is bold
    for term, meaning in rows:
        assert meaning.endswith("."), term
