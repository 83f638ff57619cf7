"""The command line's own options."""

import subprocess
import sys

import tensorhub


def test_version() -> None:
    program = "import sys; from tensorhub.cli import main; sys.argv = ['tensorhub', '--version']; main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"tensorhub {tensorhub.__version__}\n"), done.stderr
