"""Which lines of an example are there for TensorHub, as docs/frameworks.md counts them.

A line is if it names what is TensorHub's: what is imported from it, "tensorhub" in a string, and whatever such a line has
made (a variable, or an attribute of that name). Imports, docstrings, comments and blank lines are no lines of code.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

OURS = "tensorhub"


def user_code(path: Path) -> tuple[list[int], int]:
    """The numbers of the lines that are there for TensorHub, and how many lines of code there are."""
    tree = ast.parse(path.read_text())
    imports, others = list[ast.stmt](), list[ast.stmt]()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            (imports if isinstance(node, ast.Import | ast.ImportFrom) else others).append(node)
    code = set[int]().union(*map(_own_lines, others))
    return sorted(_ours([*imports, *others]) & code), len(code)


def _ours(statements: Sequence[ast.stmt]) -> set[int]:
    names, found, before = set[str](), set[int](), -1
    while len(names) > before:  # what is made of it may be named further up
        before = len(names)
        for statement in statements:
            own = list(_own_nodes(statement))
            if any(_is_ours(node, names) for node in own):
                found |= _own_lines(statement)
                names.update(name for node in own for name in _made(node))
    return found


def _own_nodes(statement: ast.stmt) -> Iterator[ast.AST]:
    """Those of a statement without those of the statements within it, and without docstrings."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return
    yield statement
    queue: list[ast.AST] = [each for each in ast.iter_child_nodes(statement) if not isinstance(each, ast.stmt)]
    while queue:
        node = queue.pop()
        yield node
        queue += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.stmt)]


def _own_lines(statement: ast.stmt) -> set[int]:
    if next(_own_nodes(statement), None) is None:
        return set()
    within = [each.lineno for each in ast.iter_child_nodes(statement) if isinstance(each, ast.stmt)]
    if within:  # its header
        decorated = [each.lineno for each in getattr(statement, "decorator_list", ())]
        return set(range(min([statement.lineno, *decorated]), max(statement.lineno, min(within) - 1) + 1))
    assert statement.end_lineno is not None
    return set(range(statement.lineno, statement.end_lineno + 1))


def _is_ours(node: ast.AST, names: set[str]) -> bool:
    match node:
        case ast.Import():
            return any(each.name.split(".")[0] == OURS for each in node.names)
        case ast.ImportFrom():
            return (node.module or "").split(".")[0] == OURS
        case ast.Name():
            return node.id in names
        case ast.Attribute():
            return node.attr in names
        case ast.Constant():
            return isinstance(node.value, str) and OURS in node.value.lower()
        case _:
            return False


def _made(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.alias():
            yield node.asname or node.name.split(".")[0]
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.Attribute(ctx=ast.Store()):
            yield node.attr
        case _:
            return
