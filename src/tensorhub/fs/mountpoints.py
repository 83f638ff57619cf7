"""Directories that versions are mounted at.

Responsible for what Linux says of such a directory, and for unmounting. Not responsible for what is
mounted (`mounting`).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import subprocess
from pathlib import Path
from typing import Final

from tensorhub.errors import InvalidValue

KIND: Final = "tensorhub"  # as `mount` and `df` show it
MOUNTS: Final = Path("/proc/self/mountinfo")
DETACH: Final = 2  # MNT_DETACH, of Linux' umount2
UNMOUNT_S: Final = 2.0


def check_free(directory: Path) -> None:
    """Raise InvalidValue if a version is mounted there: a second one would hide it."""
    place = os.fsencode(os.path.realpath(directory))
    for line in MOUNTS.read_bytes().splitlines():
        about, _, its = line.partition(b" - ")
        at = about.split(b" ")[4].decode("unicode_escape").encode("latin-1")
        if its.split(b" ")[1] == KIND.encode() and at == place:
            raise InvalidValue(
                f"{directory} has a version mounted by another tensorhub mount: give another "
                f"directory, or end that one"
            )


def detach_stale(directory: Path) -> None:
    """Unmount what a process that was killed has left there."""
    try:
        directory.stat()
    except OSError as error:
        if is_stale(error):
            unmount(directory)


def is_stale(error: OSError) -> bool:
    """Whether it says that a process was killed that has mounted something there."""
    return error.errno == errno.ENOTCONN


def unmount(directory: Path) -> None:
    """Take the mount away from the names of files, as root itself, else by fusermount."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(directory), DETACH) and ctypes.get_errno() == errno.EPERM:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            command = ["fusermount3", "-u", "-z", str(directory)]
            subprocess.run(command, timeout=UNMOUNT_S, capture_output=True)
