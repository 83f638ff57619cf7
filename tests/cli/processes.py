"""The command line as real processes, and who is left of them."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from typer.testing import CliRunner

from tensorhub.cli.app import app

PROGRAM = (sys.executable, "-c", "from tensorhub.cli import main; main()")
WAIT_S = 300.0  # beside busy processes, a command takes a minute


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The finished command, without an address or a secret in its environment."""
    return subprocess.run(
        [*PROGRAM, *arguments], capture_output=True, text=True, timeout=WAIT_S, env=environment()
    )


def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The same in this process, for what is refused at once: a process of its own would be a second
    of imports.
    """
    done = CliRunner().invoke(
        app, arguments, env=dict.fromkeys(os.environ.keys() - environment().keys())
    )
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return subprocess.CompletedProcess(arguments, done.exit_code, done.stdout, done.stderr)


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("TENSORHUB_")}


@contextlib.contextmanager
def started(*arguments: str, under: Sequence[str] = ()) -> Iterator[subprocess.Popen[str]]:
    """The running command in a session of its own; it and its session are killed at the end.
    `under`: what runs it.
    """
    process = subprocess.Popen(
        [*under, *PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def line_with(text: str, stream: Iterator[str] | None) -> str:
    """The next line of the stream that holds `text`."""
    seen = []
    for line in stream or ():
        if text in line:
            return line
        seen.append(line)
    raise AssertionError(f"no line with {text!r} in {seen}")


def children(pid: int) -> list[int]:
    """Every live process that this one has started, by /proc."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def alive(pids: Sequence[int]) -> list[int]:
    """Those of the processes that still run (one that waits to be collected does not)."""
    return [pid for pid in pids if _state(pid) not in (None, "Z", "X")]


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def eventually(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Whether the condition holds at last."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
