"""torch is imported only when a tensor is really handled: coordinator and command line start without it."""

import subprocess
import sys

WITHOUT_TORCH = (
    "tensorhub",
    "tensorhub.cli",
    "tensorhub.cli.app",
    "tensorhub.coordinator",
    "tensorhub.layouts",
    "tensorhub.protocol",
    "tensorhub.runtime.control.server",
    "tensorhub.scheduler",
    "tensorhub.memory.file_target",
    "tensorhub.memory.files",
    "tensorhub.worker",
)


PROGRAM = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    print(module, *sorted({"cupy", "torch"} & sys.modules.keys()))
"""


def test_imports_without_torch() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.splitlines()) == (0, list(WITHOUT_TORCH)), done.stderr
