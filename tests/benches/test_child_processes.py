"""Child processes of the benchmarks: none of them outlives its parent."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from benches.child_processes import ROOT
from tests.cli.processes import alive, eventually

# `json.tool` ends with its input, as every child does.
PARENT = """
import sys
from benches.child_processes import Process
print(Process("child", "json.tool").pid, flush=True)
sys.stdin.read()
"""


def test_a_child_that_is_stopped_ends_with_its_parent() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            os.kill(child, signal.SIGSTOP)  # which it need not have noticed when its parent ends
            parent.kill()
            parent.wait()
            assert eventually(lambda: not alive([child]))
        finally:
            parent.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
