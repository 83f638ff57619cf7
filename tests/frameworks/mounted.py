"""`tensorhub mount` as a process, in the environment that has what it needs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from ctypes.util import find_library
from importlib.util import find_spec
from pathlib import Path

from tests.frameworks.__main__ import ENVIRONMENTS

WAIT_S = 60.0
_OTHER = ENVIRONMENTS / "fs" / "bin" / "python"


def lacks() -> str:
    """Why nothing can be mounted here; "": it can."""
    if not Path("/dev/fuse").exists():
        return "no /dev/fuse"
    if os.geteuid() != 0:
        return "not root"
    if find_library("fuse3") is None and find_library("fuse") is None:
        return "no libfuse (Debian: apt install fuse3)"
    if find_spec("mfusepy") is None and not _OTHER.exists():
        return "no mfusepy; `make frameworks FRAMEWORKS=fs` installs it"
    return ""


def start(address: str, what: str, directory: Path, *options: str) -> subprocess.Popen[str]:
    """The command, which has printed its first line."""
    with contextlib.suppress(FileExistsError):  # also if a killed process has left it
        directory.mkdir()
    python = sys.executable if find_spec("mfusepy") is not None else str(_OTHER)
    command = [python, "-m", "tensorhub", "mount", what, str(directory), "--address", address]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    if not process.stdout.readline():
        raise AssertionError(process.stderr.read())
    return process


def end(process: subprocess.Popen[str], directory: Path) -> str:
    """Stop it by SIGTERM; nothing is mounted any more. Returns what it wrote to stderr."""
    process.send_signal(signal.SIGTERM)
    try:
        _, said = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, said
    assert not directory.is_mount()
    return said


@contextlib.contextmanager
def mounted(address: str, what: str, directory: Path, *options: str) -> Iterator[Path]:
    """A version, or all versions of a model."""
    process = start(address, what, directory, *options)
    try:
        yield directory
    finally:
        end(process, directory)
