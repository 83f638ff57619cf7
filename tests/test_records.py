"""Records of the pure packages: how large they are, and which module changes which attribute."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "tensorhub"
ATTRIBUTES_MAX = 16
# variables by the record they hold
ALIASES = {"copy": "member", "known": "write", "asker": "session", "torn": "replica"}
# Layouts and digest lists are changed on behalf of several components; errors are no records.
COMMON = {"layout", "holdings", "testimony", "error"}


def dataclasses(path: Path) -> Iterator[ast.ClassDef]:
    for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(each, ast.ClassDef) and any(
            "dataclass" in ast.unparse(by) for by in each.decorator_list
        ):
            yield each


def attributes(record: ast.ClassDef) -> list[str]:
    return [
        each.target.id
        for each in record.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and not ast.unparse(each.annotation).startswith(("ClassVar", "InitVar"))
    ]


def assigned(path: Path) -> Iterator[tuple[str, str]]:
    """(record, attribute) of each assignment to an attribute of anything but `self`, by the name of
    the variable.
    """
    for each in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        targets = each.targets if isinstance(each, ast.Assign) else []
        targets += [each.target] if isinstance(each, ast.AugAssign | ast.AnnAssign) else []
        for target in [one for found in targets for one in ast.walk(found)]:
            if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store):
                of = target.value
                name = (
                    of.id
                    if isinstance(of, ast.Name)
                    else of.attr
                    if isinstance(of, ast.Attribute)
                    else ast.unparse(of)
                )
                yield ALIASES.get(name, name), target.attr


@pytest.mark.parametrize("package", ["coordinator", "worker"])
def test_no_record_has_more_than_16_attributes(package: str) -> None:
    found = [
        (each.name, attributes(each))
        for path in sorted((SRC / package).rglob("*.py"))
        for each in dataclasses(path)
    ]
    assert len(found) > 20
    assert [(name, len(of)) for name, of in found if len(of) > ATTRIBUTES_MAX] == []


@pytest.mark.parametrize("package", ["coordinator", "worker"])
def test_each_attribute_of_a_record_is_assigned_in_one_module(package: str) -> None:
    """A record's own methods may change it, too."""
    modules = defaultdict[tuple[str, str], set[str]](set)
    for path in sorted((SRC / package).rglob("*.py")):
        for record, attribute in assigned(path):
            if record != "self" and not record.startswith("_") and record not in COMMON:
                modules[record, attribute].add(path.stem)
    assert len(modules) > 5
    assert {name: sorted(by) for name, by in modules.items() if len(by) > 1} == {}
