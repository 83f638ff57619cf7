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
JUDGED = tuple(f"tensorhub.{each}" for each in (*PURE, "runtime", "machine", "observed"))
# All that judges know of what they judge: data, and the machines that hold it.
DATA = {
    "coordinator": "Action CloseSession Coordinator Decision Disconnected Durable Entry Event LookFor "
    "Outlived Persist Persisted Pinned Publication Received Restoration Retention Rollback Send Tick "
    "WorkerLost",
    "coordinator.entities": "Holding Member",
    "coordinator.states": "ReplicaState WorkerState",
    "layouts.reading": "Part ReshardedManifest",
    "worker.calls": "Action Call CloseCall Fence FillCall PublishCall Say UnpublishCall",
    "worker.filling": "Filling",
    "worker.member": "Member",
    "worker.member_memory": "Content",
    "worker.owner": "Owner",
    "worker.registration_session": "Shard",
}
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


def imports_of_judges() -> Iterator[tuple[Path, str, str]]:
    """What the modules that demand something import from what they judge."""
    judges = SOURCE / "testing" / "sim" / "judges"
    for path in sorted((SOURCE / "testing").rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        if path.parent == judges or " demand(" in source:
            for node in ast.walk(ast.parse(source)):
                match node:
                    case ast.ImportFrom(module=str(module)) if module.startswith(JUDGED):
                        yield from ((path, module, alias.name) for alias in node.names)
                    case ast.Import(names=names):
                        yield from (
                            (path, each.name, "") for each in names if each.name.startswith(JUDGED)
                        )
                    case _:
                        pass


def test_judges_import_data_alone_from_what_they_judge() -> None:
    """A number, a text or a function that is wrong there would be wrong in the judge, too."""
    known = {f"tensorhub.{module}": names.split() for module, names in DATA.items()}
    found = [*imports_of_judges()]
    assert [
        (path.name, *what) for path, *what in found if what[1] not in known.get(what[0], ())
    ] == []
    assert {(module, name) for _, module, name in found} == {
        (module, name) for module, names in known.items() for name in names
    }


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
