"""torch is imported only when a tensor is really handled: coordinator and command line start without it."""

import importlib.util
import subprocess
import sys

import pytest

WITHOUT_TORCH = (
    "tensorhub",
    "tensorhub.cli",
    "tensorhub.cli.app",
    "tensorhub.coordinator",
    "tensorhub.protocol",
    "tensorhub.runtime.server",
    "tensorhub.scheduler",
    "tensorhub.memory.file_target",
    "tensorhub.memory.files",
    "tensorhub.worker",
)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_imports_without_torch(module: str) -> None:
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} does not exist yet")
    program = f"import sys, {module}; print(*sorted({{'cupy', 'torch'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
