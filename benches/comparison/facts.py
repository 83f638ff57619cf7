"""What a figure depends on besides the code: the machine, and the versions of what ran."""

import importlib.metadata
import os
import platform
from pathlib import Path

import tensorhub


def facts() -> dict[str, object]:
    """Facts about this machine and its software, to print and keep with every figure."""
    return {
        "cpu": _first(Path("/proc/cpuinfo"), "model name"),
        "cores": len(os.sched_getaffinity(0)),
        "memory": _first(Path("/proc/meminfo"), "MemTotal"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": _version("torch"),
        "tensorhub": tensorhub.__version__,
        "default congestion control": _text(Path("/proc/sys/net/ipv4/tcp_congestion_control")),
        "load average at the start": round(os.getloadavg()[0], 2),
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"


def _first(path: Path, key: str) -> str:
    lines = (line for line in _text(path).splitlines() if line.startswith(key))
    return next(lines, "unknown").partition(":")[2].strip() or "unknown"
