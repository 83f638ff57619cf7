"""What may be changed in a function, one change at a time: over the syntax tree, so that a mutant is
named by what it changes and not by a line's number.

Left out is what no test should notice: what is logged, texts, annotations, `__repr__`, assertions
(they are for the type checker), and lines that say that they are never reached.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import tomllib
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.AsyncFunctionDef
Headed = ast.stmt | ast.ExceptHandler | ast.match_case

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
TWINS = {"min": "max", "max": "min", "any": "all", "all": "any"}
EMPTY = {"list": "[]", "tuple": "()", "dict": "{}", "set": "set()", "str": "''", "bytes": "b''"}
UNREACHED = {"AssertionError", "NotImplementedError", "assert_never"}
LEFT_OUT = {"annotation", "returns", "decorator_list", "args"}  # but the arguments of a call
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


@dataclass(frozen=True)
class Mutant:
    """One change. `path` is relative to the package; `at` finds the change in the file as it is,
    the other words in a file that has moved on.
    """

    path: str
    function: str
    operator: str
    before: str
    after: str
    line: int
    at: tuple[int, int]

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.path, self.function, self.before, self.after

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}"

    def diff(self, width: int = 70) -> str:
        """Before and after, from a little before where they differ."""
        pairs = zip(self.before, self.after, strict=False)
        same = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
        start = max(0, same - width // 3)
        cut = [text[start : start + width] for text in (self.before, self.after)]
        return " -> ".join(("…" if start else "") + text for text in cut)


@dataclass
class Site:
    """A change that can be carried out, once, in the tree that it was found in."""

    operator: str
    statement: Headed
    line: int
    change: Callable[[], ast.AST | None]
    function: str = ""
    at: tuple[int, int] = (0, 0)  # the function's number, and its own in there

    def carry_out(self) -> tuple[str, str]:
        """Change the tree; the statement's first line before and after."""
        before = headline(self.statement)
        new = self.change()
        return before, headline(new if isinstance(new, ast.stmt) else self.statement)


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """The functions of a module and its classes, not those within functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")
        elif isinstance(node, Function):
            yield prefix + node.name, node
        elif isinstance(node, ast.stmt):
            yield from functions(node, prefix)


def sites(tree: ast.Module, only: Collection[int] | None = None) -> Iterator[Site]:
    """Every change, or those in the functions of these numbers, in an order that depends on the
    tree alone.
    """
    for number, (name, function) in enumerate(functions(tree)):
        if name.endswith(("__repr__", "__str__")) or (only is not None and number not in only):
            continue
        inner = count()
        for index, statement in enumerate(function.body):
            for site in _within(statement, statement, _at(function.body, index), function):
                site.function, site.at = name, (number, next(inner))
                yield site


def _within(
    node: ast.AST, statement: Headed, put: Callable[[ast.AST], None], function: Function
) -> Iterator[Site]:
    """The changes at this node, which `put` replaces, and below it."""
    if isinstance(node, Headed):
        statement = node
    if isinstance(
        node, ast.JoinedStr | ast.Import | ast.ImportFrom | ast.Assert
    ) or _is_beneath_notice(node):
        return

    def putting(new: ast.AST) -> Callable[[], ast.AST]:
        def change() -> ast.AST:
            put(ast.copy_location(new, node))
            return new

        return change

    line = getattr(node, "lineno", function.lineno)
    if isinstance(node, ast.comprehension | ast.match_case):
        line = (node.target if isinstance(node, ast.comprehension) else node.pattern).lineno
    for operator, new in _variants(node, function):
        yield Site(operator, statement, line, putting(new))
    for operator, change in _edits(node):
        yield Site(operator, statement, line, change)
    if isinstance(node, ast.Raise):
        return  # the words of an error
    within = node if isinstance(node, Function) else function
    for field, value in ast.iter_fields(node):
        if field in LEFT_OUT and not isinstance(node, ast.Call):
            continue
        if isinstance(value, list):
            for index, child in enumerate(value):
                if isinstance(child, ast.AST):
                    yield from _within(child, statement, _at(value, index), within)
        elif isinstance(value, ast.AST):
            yield from _within(value, statement, _as(node, field), within)


def _at(items: list[Any], index: int | slice) -> Callable[[Any], None]:
    return lambda new: items.__setitem__(index, new)


def _as(node: ast.AST, field: str) -> Callable[[Any], None]:
    return lambda new: setattr(node, field, new)


def _is_beneath_notice(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise):
        call = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return isinstance(call, ast.Name) and call.id in UNREACHED
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        called = ast.unparse(node.value.func)
        return called in UNREACHED or called.split(".")[0].lstrip("_") in ("log", "warnings")
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # a docstring


def _variants(node: ast.AST, function: Function) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in this node's place."""
    match node:
        case ast.Constant(value=bool() as value):
            yield "constant", ast.Constant(not value)
        case ast.Constant(value=int() as value):
            yield "constant", ast.Constant(value + 1)
            if value > 1:
                yield "constant", ast.Constant(value - 1)
        case ast.Constant(value=float() as value):
            yield "constant", ast.Constant(value * 2 or 1.0)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "boolean", ast.BoolOp(other, node.values)
            for index in range(len(node.values)):
                rest = node.values[:index] + node.values[index + 1 :]
                yield "operand", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.UnaryOp(op=ast.Not()):
            yield "negation", node.operand
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield "arithmetic", ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right)
        case ast.Return(value=ast.expr() as value):
            if (new := _other_result(value, function.returns)) is not None:
                yield "result", ast.Return(new)
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript(), *_]) | ast.Delete():
            yield "statement", ast.Pass()
        case ast.AugAssign():
            yield "statement", ast.Pass()
            if type(node.op) in ARITHMETIC:
                other_op = ARITHMETIC[type(node.op)]()
                yield "arithmetic", ast.AugAssign(node.target, other_op, node.value)
        case ast.Raise():
            yield "exception swallowed", ast.Pass()
        case ast.Continue():
            yield "loop", ast.Break()
        case ast.Break():
            yield "loop", ast.Continue()


def _other_result(value: ast.expr, returns: ast.expr | None) -> ast.expr | None:
    said = ast.unparse(returns) if returns is not None else "None"
    if said == "bool":
        return ast.UnaryOp(ast.Not(), value)
    if said in ("int", "float"):
        return ast.BinOp(value, ast.Add(), ast.Constant(1))
    empty = None if said.endswith("| None") else EMPTY.get(said.split("[")[0])
    new = ast.parse(empty or "None", mode="eval").body
    return None if ast.unparse(value) == ast.unparse(new) else new


def _edits(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """What may change within this node."""
    match node:
        case ast.Compare():
            for index, op in enumerate(node.ops):
                for other in COMPARISONS[type(op)]:
                    yield "comparison", partial(_at(node.ops, index), other())
        case ast.If() | ast.While() | ast.IfExp() if not isinstance(node.test, ast.Constant):
            for forced in (True, False):
                new = ast.copy_location(ast.Constant(forced), node.test)
                yield "branch", partial(setattr, node, "test", new)
        case ast.comprehension():
            for index in range(len(node.ifs)):
                yield "filter", partial(_at(node.ifs, slice(index, index + 1)), [])
        case ast.ExceptHandler() if not isinstance(node.body[0], ast.Raise):
            again = ast.copy_location(ast.Raise(), node.body[0])
            yield "handler", partial(setattr, node, "body", [again])
        case ast.Call():
            if isinstance(node.func, ast.Name) and node.func.id in TWINS:
                twin = ast.copy_location(ast.Name(TWINS[node.func.id], ast.Load()), node.func)
                yield "function", partial(setattr, node, "func", twin)
            for index, (one, two) in enumerate(pairwise(node.args)):
                same = isinstance(node.func, ast.Name) and node.func.id in ("min", "max")
                starred = isinstance(one, ast.Starred) or isinstance(two, ast.Starred)
                if not (starred or same) and ast.unparse(one) != ast.unparse(two):
                    here = slice(index, index + 2)
                    yield "arguments", partial(_at(node.args, here), [two, one])
            for index, keyword in enumerate(node.keywords):
                if keyword.arg not in (None, "strict"):
                    dropped = partial(_at(node.keywords, slice(index, index + 1)), [])
                    yield "argument dropped", dropped


def headline(statement: Headed) -> str:
    """A statement in one line, without the statements in it."""
    if isinstance(statement, ast.Try | ast.TryStar):
        return "try:"
    if isinstance(statement, ast.Match):
        return f"match {ast.unparse(statement.subject)}:"
    head = copy.copy(statement)
    for block in BLOCKS:
        if inside := getattr(head, block, None):
            first = inside[:1] if isinstance(head, ast.ExceptHandler) else [ast.Pass()]
            setattr(head, block, first if block == "body" else [])
    said = " ".join(ast.unparse(head).split())
    return said if isinstance(head, ast.Pass) else said.removesuffix(" pass")


def draw(package: Path, parts: Sequence[str], seed: int, sample: int) -> list[Mutant]:
    """So many mutants of these packages and modules, of a line each: uniformly over the lines, and
    over what may change in a line.

    A line is drawn by its own text, wherever it stands: a commit changes the sample only where it
    changes the lines.
    """
    lines = list[tuple[bytes, Path, list[tuple[int, int]]]]()
    for path in sorted({path for part in parts for path in _modules(package / part)}):
        text, seen = path.read_text().splitlines(), Counter[tuple[str, str]]()
        at = dict[int, list[Site]]()
        for site in sites(ast.parse(path.read_bytes())):
            at.setdefault(site.line, []).append(site)
        for line, changes in at.items():
            here = changes[0].function, text[line - 1].strip()
            seen[here] += 1
            words = seed, str(path.relative_to(package)), *here, seen[here]
            digest = hashlib.sha256(repr(words).encode()).digest()
            lines.append((digest, path, [site.at for site in changes]))
    lines.sort(key=lambda each: each[0])
    return [
        make(package, path, places[int.from_bytes(digest) % len(places)])[0]
        for digest, path, places in lines[:sample]
    ]


def _modules(part: Path) -> list[Path]:
    if part.is_dir():
        return list(part.rglob("*.py"))
    module = part.with_name(f"{part.name}.py")
    if not module.exists():
        raise SystemExit(f"there is no {part} in the package: name packages or modules of it")
    return [module]


def make(package: Path, path: Path, at: tuple[int, int]) -> tuple[Mutant, ast.Module]:
    """A mutant, and its module's tree with the change in it."""
    tree = ast.parse(path.read_bytes())
    site = next(site for site in sites(tree, [at[0]]) if site.at == at)
    _, function = list(functions(tree))[at[0]]
    uses = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    before, after = site.carry_out()
    if "super" in uses:  # with the same closure, also where the change has removed it
        function.body += ast.parse("if False: __class__").body
    relative = str(path.relative_to(package))
    mutant = Mutant(relative, site.function, site.operator, before, after, site.line, at)
    return mutant, tree


def explained(path: Path) -> dict[tuple[str, str, str, str], str]:
    """The reasons why no test need notice these mutants, by their keys."""
    entries = tomllib.loads(path.read_text()).get("mutant", [])
    return {
        (each["path"], each["function"], each["before"], each["after"]): each["reason"]
        for each in entries
    }


def find(package: Path, key: tuple[str, str, str, str]) -> Mutant | None:
    """The mutant of that key, if the code still has its line."""
    path, function, before, _ = key
    if not (package / path).exists():
        return None
    tree = ast.parse((package / path).read_bytes())
    numbers = [number for number, (name, _) in enumerate(functions(tree)) if name == function]
    for site in sites(tree, numbers):
        if headline(site.statement) == before:
            mutant, _ = make(package, package / path, site.at)
            if mutant.key == key:
                return mutant
    return None
