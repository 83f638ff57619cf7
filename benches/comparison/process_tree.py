"""Trees of processes, by /proc: who belongs to one, what its processes use, and their end."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Final

TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")
# fields after the name, in /proc/PID/stat
_STATE, _PARENT, _SESSION, _USER, _SYSTEM = 0, 1, 3, 11, 12


def members(roots: Collection[int]) -> set[int]:
    """Those of these processes that are there, whoever descends from them, and whoever is in a
    session of one of them.
    """
    stats = {int(place.name): _stat(place) for place in _PROC.iterdir() if place.name.isdigit()}
    found = {
        pid
        for pid, stat in stats.items()
        if stat and (pid in roots or int(stat[_SESSION]) in roots)
    }
    while (
        more := {pid for pid, stat in stats.items() if stat and int(stat[_PARENT]) in found} - found
    ):
        found |= more
    return found


def cpu_s(pids: Collection[int]) -> float:
    """CPU seconds of these so far, in steps of a tick (10 ms)."""
    stats = [stat for pid in pids if (stat := _stat(_PROC / str(pid)))]
    return sum(int(stat[_USER]) + int(stat[_SYSTEM]) for stat in stats) * TICK_S


def memory_bytes(pids: Collection[int], scratch: Path) -> int:
    """What these take together: each page counts once (PSS), and of files in `scratch` also those
    that nobody has mapped.
    """
    private = shared = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
            sizes = {
                line.split(":")[0]: int(line.split()[1]) * 1024
                for line in lines
                if line.startswith("Pss")
            }
            private += sizes.get("Pss", 0) - sizes.get("Pss_Shmem", 0)
            shared += sizes.get("Pss_Shmem", 0)
    return private + max(shared, _files_bytes(scratch))


def end(pids: Collection[int]) -> None:
    """Kill them."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _files_bytes(scratch: Path) -> int:
    total = 0
    for place in scratch.rglob("*"):
        with contextlib.suppress(OSError):
            total += place.lstat().st_blocks * 512
    return total


def _stat(place: Path) -> list[str] | None:
    """None: it is gone, or only waits to be collected."""
    try:
        fields = (place / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[_STATE] in "ZX" else fields
