"""The vocabulary of the log: each event in the code is in the table, as it is there."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import tensorhub
from tensorhub.log_events import EVENTS

SRC = Path(tensorhub.__file__).parent
LEVELS = {name: name for name in ("debug", "info", "warning", "error")} | {"exception": "error"}
ANY = "*"  # a field: others, whose names are not in the code
# what logs an event that it is given, and so has no name of its own
PASS_ON = {"logs.py", "runtime/worker/host_copies.py"}


@dataclass
class Call:
    """One place where an event is logged. `level` None: it is decided elsewhere."""

    where: str
    level: str | None
    event: str | None = None  # None: it is not in this call
    fields: set[str] = field(default_factory=set)


def calls_in(source: str, where: str) -> Iterator[Call]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        place, first = f"{where}:{node.lineno}", node.args[0]
        fields = {each.arg or ANY for each in node.keywords}
        called, name = ast.unparse(node.func), _text(first)
        owner, _, method = called.rpartition(".")
        if method in LEVELS and (owner == "log" or owner.startswith("get_logger(")):
            yield Call(place, LEVELS[method], name, fields)
        elif called == "Tally" and len(node.args) == 2:  # else another one
            level = ast.unparse(first).rpartition(".")[2]
            yield Call(place, LEVELS.get(level), _text(node.args[1]))
        elif called == "LogEvent" and name is not None:
            yield Call(place, None, name, {"registration", "reason"})
        elif called == "say" and name is not None:
            yield Call(place, None, name, fields)
        elif called == "self._quietly":
            yield Call(place, None, _text(node.args[2]), {"registration", "reason"})


def _text(node: ast.expr) -> str | None:
    value: object = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None


@functools.cache
def calls() -> list[Call]:
    found: list[Call] = []
    for path in sorted(SRC.rglob("*.py")):
        where = str(path.relative_to(SRC))
        if where.partition("/")[0] not in ("cli", "testing"):  # their logs are other things
            found += calls_in(path.read_text(encoding="utf-8"), where)
    return found


def faults_of(call: Call) -> Iterator[str]:
    if call.event is None:
        if call.where.rpartition(":")[0] not in PASS_ON:
            yield f"{call.where}: give the event's name as a constant"
    elif (known := EVENTS.get(call.event)) is None:
        yield f"{call.where}: {call.event} is not in log_events.py"
    else:
        if call.level is not None and call.level not in known.level.split():
            yield f"{call.where}: {call.event} is {known.level}, and logged as {call.level}"
        if unknown := call.fields - {*known.fields.split(), "times"}:
            yield f"{call.where}: {call.event} has no fields {sorted(unknown)}"


def test_each_event_that_is_logged_is_in_the_table() -> None:
    assert len(calls()) > 80
    assert not [fault for call in calls() for fault in faults_of(call)]


def test_each_event_of_the_table_is_logged() -> None:
    assert EVENTS.keys() == {call.event for call in calls() if call.event is not None}


@pytest.mark.heavy
def test_what_is_counted_has_its_fields() -> None:
    """Of a Tally: the fields are where it is counted."""
    counted = {call.event for call in calls() if call.event and not call.fields}
    known = set[str]().union(*[EVENTS[name].fields.split() for name in counted])
    for path in sorted(SRC.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".count"):
                assert {each.arg for each in node.keywords} <= known, f"{path}:{node.lineno}"


@pytest.mark.parametrize(
    ("source", "fault"),
    [
        ("log.info('no_such_event')", "is not in log_events.py"),
        ("log.info('worker_lost', reason='')", "logged as info"),
        ("log.warning('worker_lost', colour='')", "no fields ['colour']"),
        ("log.error(f'worker {name} lost')", "as a constant"),
        ("Tally(log.info, 'peer_refused')", "logged as info"),
        ("LogEvent('evicted', ident, reason)", "is not in log_events.py"),
    ],
)
def test_what_it_would_find(source: str, fault: str) -> None:
    (call,) = calls_in(source, "x.py")
    assert [fault in each for each in faults_of(call)] == [True]


@pytest.mark.parametrize("name", sorted(EVENTS))
def test_the_table_says_what_can_be_said(name: str) -> None:
    event = EVENTS[name]
    assert set(event.level.split()) <= {*LEVELS.values()}
    assert event.fields.split() == sorted(
        event.fields.split(), key=lambda each: (each == ANY, each)
    )
    assert event.meaning.endswith(".")
    assert event.told_by in ("", "coordinator", "worker")
    assert event.told_by or not event.remedy
