"""What an import brings along: tensorhub itself next to nothing, and torch only where a tensor is
really handled.
"""

from __future__ import annotations

import ast
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import tensorhub
from tests.rig import WAIT_S

WITHOUT_TORCH = (
    "tensorhub.cli",
    "tensorhub.cli.app",
    "tensorhub.coordinator",
    "tensorhub.api.embedded",
    "tensorhub.api.hub",
    "tensorhub.layouts",
    "tensorhub.protocol",
    "tensorhub.runtime.control.server",
    "tensorhub.scheduler",
    "tensorhub.memory.file_target",
    "tensorhub.memory.files",
    "tensorhub.sync",
    "tensorhub.worker",
)
PROGRAM = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(module, *sorted({"cupy", "torch"} & sys.modules.keys()))
"""
NEW = """
import sys
before = set(sys.modules)
{program}
print(*sorted({{name.partition(".")[0] for name in set(sys.modules) - before}} - set(sys.stdlib_module_names)))
"""
DEPENDENCIES = {"anyio", "msgpack", "rich", "structlog", "typer", "xxhash"}
EVERYTHING_ELSE = {"cupy", "numpy", "obstore", "safetensors", "torch", "zstandard"}


def _python(program: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=WAIT_S
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.heavy
def test_imports_without_torch() -> None:
    assert _python(PROGRAM, *WITHOUT_TORCH).splitlines() == list(WITHOUT_TORCH)


def test_importing_tensorhub_imports_nothing() -> None:
    program = (
        "import sys; before = set(sys.modules); import tensorhub; "
        "print(*sorted(set(sys.modules) - before))"
    )
    assert _python(program).split() == ["tensorhub"]


def test_the_help_imports_none_of_the_commands_and_nothing_slow() -> None:
    program = (
        "import sys; from tensorhub.cli.app import app; app(['--help'], standalone_mode=False); "
        "print(*sys.modules)"
    )
    imported = set(_python(program).splitlines()[-1].split())
    mine = {name for name in imported if name.partition(".")[0] == "tensorhub"}
    assert mine == {
        "tensorhub",
        "tensorhub.cli",
        "tensorhub.cli.app",
        "tensorhub.cli.common",
        "tensorhub.errors",
    }
    assert not imported & {"anyio", "asyncio", "hashlib", "rich", "sqlite3", "ssl", "textual"}


@pytest.mark.parametrize(
    ("program", "brings"),
    [
        ("import tensorhub; tensorhub.VersionUnavailable", set()),
        ("import tensorhub; tensorhub.Options()", set()),
        ("import tensorhub.deltas", {"msgpack"}),
        ("import tensorhub.transport.built_in", {"msgpack", "rich", "structlog", "xxhash"}),
        ("from tensorhub.cli.app import app; app(['--help'], standalone_mode=False)", {"typer"}),
    ],
)
def test_a_name_brings_what_it_needs(program: str, brings: set[str]) -> None:
    brought = set(_python(NEW.format(program=program)).splitlines()[-1].split())
    assert brought & (DEPENDENCIES | EVERYTHING_ELSE) == brings


def test_every_public_name_is_there_and_the_same_to_type_checkers() -> None:
    """Names of functions, of classes and of modules; also for `import *` and for help."""
    tree = ast.parse(Path(tensorhub.__file__).read_text())
    (checked,) = [
        node for node in tree.body if isinstance(node, ast.If) and isinstance(node.test, ast.Name)
    ]
    typed = {
        alias.name: f"{node.module}"
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed.keys() == set(tensorhub.__all__)
    for name, module in typed.items():
        assert getattr(tensorhub, name) is getattr(sys.modules[module], name)
    star: dict[str, object] = {}
    exec("from tensorhub import *", star)
    assert star.keys() - {"__builtins__"} == set(tensorhub.__all__) <= set(dir(tensorhub))
    shown = pydoc.plain(pydoc.render_doc(tensorhub))
    assert "class Options" in shown
    assert "connect(" in shown


@pytest.mark.heavy
def test_a_public_module_needs_no_import_of_its_own() -> None:
    program = """
import os, sys, tensorhub
for module in sys.argv[1:]:
    if os.fork() == 0:  # where no other one has been imported
        assert getattr(tensorhub, module).__name__ == f"tensorhub.{module}"
        os._exit(0)
    assert os.wait()[1] == 0, module
"""
    _python(program, "conversion", "errors", "integrations", "sync", "testing", "types")


def test_a_wrong_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tensorhub' has no attribute 'conect'"):
        _ = tensorhub.conect  # type: ignore[attr-defined]
    with pytest.raises(ImportError, match="cannot import name 'conect'"):
        exec("from tensorhub import conect")


@pytest.mark.parametrize("module", ["typer", "tensorhub.cli.status", "anyio"])
def test_ctrl_c_during_an_import_prints_nothing(module: str) -> None:
    program = f"""
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
sys.argv = ["tensorhub", "status"]
from tensorhub.cli import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_S
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
