"""docs/reference.md: the public API, from its docstrings, signatures and examples."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Any

import tensorhub
from examples.reference import EXAMPLES, Example
from tensorhub import conversion, errors, sync, testing, types
from tensorhub.fs import TensorHubFileSystem
from tensorhub.integrations.fleet import FleetReport
from tensorhub.integrations.one_version_engine import Engine
from tensorhub.integrations.one_version_trainer import OneVersion
from tensorhub.integrations.sglang_server import Session
from tensorhub.model import read_plan

VALUES = (
    "Options Location VersionInfo FetchReport SourceReport ModelInfo VersionView ReplicaView "
    "ShardView LeaseView WorkerView "
    "Endpoint ModelSummary VersionSummary LayoutSummary CallsSummary SilentWorker"
).split()
PLANS = ("ReadPlan", "PlannedSource")
CONVERSION = ("register_converted", "cast", "Conversion", "ConvertedWeights", "ConversionReport")
TESTING = ("simulate", "RunningCluster", "VirtualLoop", "WorkerCrashed", "GuaranteeBroken")
FLEETS: dict[type, tuple[str, ...]] = {
    OneVersion: ("update", "close"),
    Engine: ("version", "use", "wait_until_served", "lost", "close"),
    Session: ("get_ready", "join_fleet", "update", "check", "load_adapter"),
}
INTRODUCTION = """# API reference

Generated from docstrings and from `examples/reference.py` by `python docs/generate.py`. Every example is run by a test. In
the examples `address` is a running coordinator's, and `trainer` and `rollout` are hubs connected to it.

Sizes are in bytes (`_bytes`, `nbytes`), times in seconds (`_s`). Tensors are registered in place, of any shape, and of
any dtype that torch has. They must be contiguous, or have padded rows. A call without a `timeout` gets
`Options.op_timeout_s`.
"""


def page() -> str:
    """The whole page, as it is committed."""
    return "\n".join([*_parts(), *_errors("## Errors", "###"), *_warnings("##"), *_rest()])


def page_without_errors() -> str:
    """The page of the site, which has the errors on a page of their own."""
    return "\n".join([*_parts(), *_rest()])


def errors_page() -> str:
    """A page of the site: each error and warning."""
    return "\n".join([*_errors("# Errors, and what to do", "##"), *_warnings("##")])


def _parts() -> Iterator[str]:
    yield INTRODUCTION
    for title, names in (
        (
            "Functions",
            [name for name in tensorhub.__all__ if inspect.isroutine(getattr(tensorhub, name))],
        ),
        ("Classes", [name for name in tensorhub.__all__ if _is_handle(getattr(tensorhub, name))]),
    ):
        yield f"## {title}\n"
        for name in names:
            yield from _entry(f"tensorhub.{name}", name, getattr(tensorhub, name), shown=set())
    yield "## Values\n"
    for name in VALUES:
        yield from _value(name, getattr(types, name))
    for name in PLANS:
        yield from _value(name, getattr(read_plan, name))
    yield from _conversion()
    yield from _filesystem()


def _rest() -> Iterator[str]:
    yield from _sync()
    yield from _integrations()
    yield from _testing()


def _is_handle(thing: object) -> bool:
    return (
        inspect.isclass(thing)
        and not dataclasses.is_dataclass(thing)
        and not issubclass(thing, Exception)
    )


def _entry(title: str, name: str, thing: Any, shown: set[Example]) -> Iterator[str]:
    """A function or a class with its members; an example that was shown under this class already is
    not shown again.
    """
    yield f"### `{title}`\n"
    yield from _body(name, thing, shown)
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            if not member.startswith("_"):
                yield f"#### `{name}.{member}`\n"
                yield from _body(f"{name}.{member}", value, shown)


def _body(name: str, thing: Any, shown: set[Example]) -> Iterator[str]:
    signature = _signature(thing)
    if signature:
        yield f"```python\n{signature}\n```\n"
    text = inspect.getdoc(thing)
    if not text:
        raise SystemExit(f"{name} has no docstring")
    yield text + "\n"
    example = EXAMPLES.get(name)
    if example is not None and example not in shown:
        shown.add(example)
        yield f"```python\n{_code(example)}```\n"


def _signature(thing: Any) -> str:
    if isinstance(thing, property) or inspect.isclass(thing):
        return ""
    function: Callable[..., Any] = inspect.unwrap(thing)
    made = inspect.signature(function)
    parameters = [p for p in made.parameters.values() if p.name != "self"]
    words = [_parameter(p) for p in parameters]
    first_named = next((n for n, p in enumerate(parameters) if p.kind is p.KEYWORD_ONLY), None)
    if first_named is not None:
        words.insert(first_named, "*")
    head = ("async " if inspect.iscoroutinefunction(function) else "") + function.__name__
    returns = _plain(made.return_annotation)
    line = f"{head}({', '.join(words)}) -> {returns}"
    return (
        line
        if len(line) <= 100
        else f"{head}(\n    " + ",\n    ".join(words) + f",\n) -> {returns}"
    )


def _parameter(given: inspect.Parameter) -> str:
    if given.default is given.empty or given.annotation is given.empty:
        return _plain(str(given))
    default = f'"{given.default}"' if isinstance(given.default, str) else f"{given.default!r}"
    return f"{_plain(str(given.replace(default=given.empty)))} = {default}"


_WIRE_TYPES = {
    "Name": "str",
    "Id": "str",
    "Text": "str",
    "U64": "int",
    "Seconds": "float",
    "contextlib.": "",
    "_async.": "",
}


def _plain(annotation: str) -> str:
    """A type as a user writes it: without quotes, and without what bounds it on the wire."""
    text = re.sub(
        r"Annotated\[([^\[\]]+(?:\[[^\[\]]*\])?), \w+\([^()]*\)\]",
        r"\1",
        annotation.replace("'", ""),
    )
    for wire, plain in _WIRE_TYPES.items():
        text = re.sub(rf"\b{re.escape(wire)}" + ("" if wire.endswith(".") else r"\b"), plain, text)
    return text


def _code(example: Example) -> str:
    """The body of an example's function."""
    lines = inspect.getsource(example).splitlines(keepends=True)
    start = next(
        number
        for number, line in enumerate(lines)
        if line.lstrip().startswith(("def ", "async def "))
    )
    while not lines[start].rstrip().endswith(":"):
        start += 1
    return textwrap.dedent("".join(lines[start + 1 :]))


def _value(name: str, kind: Any) -> Iterator[str]:
    yield f"### `{name}`\n"
    yield (inspect.getdoc(kind) or "") + "\n"
    comments = _field_comments(kind)
    yield "| field | type | default | |\n|---|---|---|---|"
    for field in dataclasses.fields(kind):
        known = str(field.default) if isinstance(field.default, StrEnum) else field.default
        default = "" if known is dataclasses.MISSING else f"`{known!r}`"
        if name == "Location":
            default = f"`TENSORHUB_{field.name.upper()}`"
        kind_text = _plain(str(field.type)).replace("|", "\\|")
        yield f"| `{field.name}` | `{kind_text}` | {default} | {comments.get(field.name, '')} |"
    yield ""


def _field_comments(kind: Any) -> dict[str, str]:
    """What stands behind each field in the source."""
    found = {}
    for line in inspect.getsource(kind).splitlines():
        code, mark, comment = line.partition("  # ")
        if mark and ":" in code:
            found[code.split(":")[0].strip()] = comment.replace("|", "\\|")
    return found


def _errors(head: str, level: str) -> Iterator[str]:
    """Each error: what it means, what to do, an example (once, if it shows several errors)."""
    about = textwrap.dedent((errors.__doc__ or "").partition("\n")[2]).strip()
    tree, _, prose = about.partition("\n\n")
    yield f"{head}\n"
    yield f"{prose}\n"
    yield f"```text\n{tree}\n```\n"
    shown = set[Example]()
    for name, kind in errors.BY_NAME.items():
        meaning, _, remedy = (inspect.getdoc(kind) or "").partition("What to do: ")
        retryable = "Retryable" if kind.retryable_by_default else "Not retryable"
        yield f"{level} `{name}`\n"
        yield f"{meaning.strip()}\n"
        yield f"**What to do:** {remedy}\n\n{retryable} by default.\n"
        example = EXAMPLES.get(name)
        if example is not None and example not in shown:
            shown.add(example)
            yield f"```python\n{_code(example)}```\n"


def _warnings(level: str) -> Iterator[str]:
    yield f"{level} Warnings\n"
    for kind in (errors.StaleWeightsWarning, errors.LeftOutStateWarning):
        yield f"{level}# `{kind.__name__}`\n"
        yield (inspect.getdoc(kind) or "") + "\n"
        yield f"```python\n{_code(EXAMPLES[kind.__name__])}```\n"


def _sync() -> Iterator[str]:
    yield "## `tensorhub.sync`\n"
    yield (inspect.getdoc(sync) or "") + "\n"
    for example in dict.fromkeys(
        example for name, example in EXAMPLES.items() if name.startswith("sync.")
    ):
        yield f"```python\n{_code(example)}```\n"


def _filesystem() -> Iterator[str]:
    yield "## `tensorhub.fs`\n"
    name = TensorHubFileSystem.__name__
    yield f"### `tensorhub.fs.{name}`\n"
    yield from _body(name, TensorHubFileSystem, set())


def _conversion() -> Iterator[str]:
    yield "## `tensorhub.conversion`\n"
    yield (
        "To publish other bytes than the trainer's own; without an event loop: "
        "`tensorhub.sync.register_converted`.\n"
    )
    for name in CONVERSION:
        thing = getattr(conversion, name)
        made = (
            _value(name, thing)
            if dataclasses.is_dataclass(thing)
            else _entry(f"tensorhub.conversion.{name}", name, thing, set())
        )
        yield from made


def _integrations() -> Iterator[str]:
    yield "## `tensorhub.integrations`\n"
    yield "For [several engines](frameworks/fleets.md). `Session`: an engine of SGLang.\n"
    for kind, members in FLEETS.items():
        name = kind.__name__
        yield f"### `{kind.__module__}.{name}`\n"
        made = (
            _signature(vars(kind)["__init__"]).replace("__init__", name, 1).removesuffix(" -> None")
        )
        yield f"```python\n{made}\n```\n"
        yield (inspect.getdoc(kind) or "") + "\n"
        for member in members:
            yield f"#### `{name}.{member}`\n"
            yield from _body(f"{name}.{member}", vars(kind)[member], set())
    yield from _value(FleetReport.__name__, FleetReport)


def _testing() -> Iterator[str]:
    yield "## `tensorhub.testing`\n"
    yield (
        "For tests of code that uses TensorHub: see "
        "[operating.md](operating.md#test-your-own-orchestrator).\n"
    )
    for name in TESTING:
        yield from _entry(f"tensorhub.testing.{name}", name, getattr(testing, name), shown=set())
    yield "### `tensorhub.testing.SimulatedCluster`\n"
    yield (
        "Made of a seed, kinds of faults (None: all) and the coordinator's options (None: drawn).\n"
    )
    yield "#### `SimulatedCluster.running`\n"
    yield from _body("SimulatedCluster.running", testing.SimulatedCluster.running, set())
