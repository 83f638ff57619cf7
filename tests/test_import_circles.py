"""The contract against circles of imports finds planted ones: of modules, of packages, also if only
for type checking.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tensorhub

pytest.importorskip("importlinter")

SOURCE = Path(tensorhub.__file__).parent
CONTRACTS = SOURCE.parent.parent / "pyproject.toml"
LINT = (
    "import sys; from importlinter.cli import lint_imports_command; "
    "sys.exit(lint_imports_command())"
)

PLANTED = {
    "two modules": ("transport/base.py", "import tensorhub.transport.peers", "tensorhub.transport"),
    "in a function": (
        "protocol/forms.py",
        "def late():\n    import tensorhub.protocol.codec",
        "tensorhub.protocol",
    ),
    "for type checking": (
        "memory/tensors.py",
        "if TYPE_CHECKING:\n import tensorhub.memory.allocated",
        "tensorhub.memory",
    ),
    "two packages": (
        "runtime/data/acceptor.py",
        "import tensorhub.runtime.worker.worker",
        "tensorhub.runtime",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_circle_is_found(tmp_path: Path, name: str) -> None:
    where, planted, found = PLANTED[name]
    package = tmp_path / "tensorhub"
    shutil.copytree(SOURCE, package, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / where).open("a") as module:
        module.write(f"\n\n{planted}\n")
    command = [sys.executable, "-c", LINT, "--no-cache", "--no-logo", "--config", str(CONTRACTS)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "No circles of imports BROKEN" in done.stdout
    assert f"No cycles are allowed in {found}." in done.stdout
