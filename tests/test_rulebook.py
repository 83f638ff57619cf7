"""docs/guarantees.md and docs/glossary.md: what they name exists, what cites them leads there, and nothing is left out."""

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
CODES = [*(f"G{n}" for n in range(1, 12)), *(f"R{n}" for n in range(1, 16))]
CODE = re.compile(r"\b[GR]\d+\b")
LABELS = ["Enforced in", "Tests", "Checks", "Deliberate bugs"]
ENTRIES = {
    code: (anchor, name, text)
    for anchor, code, name, text in re.findall(
        r'^<a id="(\w+)"></a>\n### (\w+) ([^\n]+)\n(.*?)(?=^<a id|^## |\Z)', PAGE, re.MULTILINE | re.DOTALL
    )
}
NAMES = {code: name.lower() for code, (_, name, _) in ENTRIES.items()}  # as violations begin


def named(code: str, label: str) -> list[str]:
    """What stands in backquotes under that label."""
    (text,) = re.findall(rf"^- \*\*{label}\*\*:(.*?)(?=^- |\Z)", ENTRIES[code][2], re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`]+)`", text)


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defined(body: list[ast.stmt]) -> dict[str, ast.stmt]:
    """What a module or class defines, by name."""
    found: dict[str, ast.stmt] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found.update({target.id: node for target in node.targets if isinstance(target, ast.Name)})
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node
    return found


def exists(name: str) -> bool:
    """Whether this is a module below `tensorhub`, or something that one defines."""
    parts, path = name.split("."), SRC
    while parts and (path / parts[0]).is_dir():
        path /= parts.pop(0)
    path = path / f"{parts.pop(0)}.py" if parts else path / "__init__.py"
    body = tree(path).body if path.exists() else None
    for part in parts:
        node = defined(body or []).get(part)
        body = node.body if isinstance(node, ast.ClassDef) else [] if node is not None else None
    return body is not None


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions and methods of a module below `tensorhub`, with their names from there."""
    module = ".".join(path.relative_to(SRC).with_suffix("").parts)
    for name, node in defined(tree(path).body).items():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{module}.{name}", node
        elif isinstance(node, ast.ClassDef):
            for inner, method in defined(node.body).items():
                if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield f"{module}.{name}.{inner}", method


def violations() -> Iterator[tuple[str, str]]:
    """Where the simulator says that something is broken, and how that text begins."""
    for path in sorted((SRC / "testing").rglob("*.py")):
        for where, function in functions(path):
            for call in ast.walk(function):
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.args:
                    text = {"demand": call.args[-1], "GuaranteeBroken": call.args[0]}.get(call.func.id)
                    if isinstance(text, ast.JoinedStr):
                        text = text.values[0]
                        yield where, str(text.value) if isinstance(text, ast.Constant) else ""
                    elif isinstance(text, ast.Constant):
                        yield where, str(text.value)


def test_every_guarantee_and_rule_is_stated_once() -> None:
    assert [*ENTRIES] == CODES
    assert len(re.findall("^### ", PAGE, re.MULTILINE)) == len(CODES)
    assert [anchor for anchor, _, _ in ENTRIES.values()] == [code.lower() for code in CODES]
    assert dict(re.findall(r"^\| \[(\w+)\]\(#\w+\) ([^|]+) \|", PAGE, re.MULTILINE)) == NAMES


@pytest.mark.parametrize("code", CODES)
def test_what_an_entry_names_exists(code: str) -> None:
    assert re.findall(r"^- \*\*(.+?)\*\*", ENTRIES[code][2], re.MULTILINE) == LABELS
    assert named(code, "Enforced in")
    assert [name for label in ("Enforced in", "Checks") for name in named(code, label) if not exists(name)] == []
    tests = [name.partition("::") for name in named(code, "Tests")]
    assert tests
    for path, _, function in tests:
        assert (ROOT / path).is_file(), path
        assert not function or function in defined(tree(ROOT / path).body), f"{path}::{function}"


def test_names_are_looked_up_in_the_tree() -> None:
    for name in (
        "worker.owner",
        "worker.owner.Owner.begin",
        "errors.TensorHubError",
        "worker.registration_session.LEASE_MARGIN",
    ):
        assert exists(name), name
    for name in ("worker.nobody", "worker.owner.Nobody", "worker.owner.Owner.nothing", "worker.owner.Owner.begin.more"):
        assert not exists(name), name


@pytest.mark.parametrize("code", CODES)
def test_an_entry_lists_the_bugs_that_break_it(code: str) -> None:
    assert sorted(named(code, "Deliberate bugs")) == sorted(n for n, bug in BUGS.items() if code in CODE.findall(bug.breaks))


def test_each_bug_breaks_something_that_is_stated() -> None:
    assert [name for name, bug in BUGS.items() if not CODE.findall(bug.breaks.partition(":")[0])] == []


def test_each_check_of_the_simulator_is_listed_with_what_it_names() -> None:
    codes = {name: code for code, name in NAMES.items()}
    found = [(where, text.partition(":")[0]) for where, text in violations()]
    assert len(found) > 50
    assert [(where, name) for where, name in found if name not in codes] == []
    assert sorted({f"{codes[name]}: {where}" for where, name in found if not is_listed(codes[name], where)}) == []


def test_each_invariant_that_cites_a_code_is_listed() -> None:
    path = SRC / "coordinator" / "invariants.py"
    lines = path.read_text(encoding="utf-8").splitlines()
    cited = {
        (code, where)
        for where, function in functions(path)
        for line in lines[function.lineno : function.end_lineno]
        for code in CODE.findall(line.partition("  # ")[2])
    }
    assert len(cited) > 10
    assert sorted((code, where) for code, where in cited if not is_listed(code, where)) == []


def is_listed(code: str, where: str) -> bool:
    """Itself, or the class or module that it is in."""
    return any(f"{where}.".startswith(f"{name}.") for name in named(code, "Checks"))


def test_every_code_that_is_cited_is_stated() -> None:
    sources = [path for name in ("src", "tests", "benches", "examples", "docs") for path in (ROOT / name).rglob("*.py")]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "benches" / "README.md"]
    unknown = {code for path in [*sources, *pages] for code in CODE.findall(path.read_text(encoding="utf-8"))} - {*CODES}
    assert unknown == set()


def test_pages_cite_codes_as_links() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        if path.name in ("CHANGELOG.md", "guarantees.md"):
            continue
        for code, target in re.findall(r"\[([GR]\d+)\]\(([^)]*)\)", text):
            page, _, anchor = target.partition("#")
            assert (path.parent / page).resolve() == ROOT / "docs" / "guarantees.md", f"{path.name}: {target}"
            assert anchor == code.lower(), f"{path.name}: {target}"
        bare = CODE.findall(re.sub(r"\[[GR]\d+\]\([^)]*\)", "", text))
        assert not bare, f"{path.name} cites {bare} without a link to docs/guarantees.md"


def test_no_text_for_users_needs_a_code() -> None:
    """Docstrings of the public API are in docs/reference.md, which is one of the pages above."""
    found = []
    for path in SRC.rglob("*.py"):
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found += [f"{path.relative_to(SRC)}:{node.lineno}" for _ in CODE.findall(node.value)]
    assert found == []


def test_each_term_is_defined_once() -> None:
    rows = re.findall(r"^\| \*\*([^*]+)\*\* \| ([^|]+) \|$", GLOSSARY, re.MULTILINE)
    terms = [term for term, _ in rows]
    assert 40 < len(terms) <= 60
    assert sorted(terms) == sorted(set(terms))
    assert re.findall(r"\*\*([^*]+)\*\*", GLOSSARY) == terms  # nothing else is bold
    for term, meaning in rows:
        assert meaning.endswith("."), term
