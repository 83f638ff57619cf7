"""A guest with RDMA devices, on a machine that has none: User-mode Linux with Soft-RoCE, built once
from Debian's sources.

The guest sees the host's files, and forgets what it writes to them; only one directory is the
host's to keep. It has a network and processes of its own, and one CPU. It needs no virtualization,
but root, for a pid namespace: whatever the guest has started ends with it. See docs/transports.md
for what to install.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CONFIG, BUILD, BOOT = HERE / "kernel.config", HERE / "build-kernel", HERE / "boot"
PACKAGES = "gcc make flex bison bc xz-utils iproute2 python3-pyverbs ibverbs-providers"
BUILD_S = 1800  # it takes some minutes of CPU, and a download
BUILDERS = ("apt-get", "bc", "bison", "dpkg", "flex", "gcc", "make", "xz")
RUNNERS = ("ip", "rdma", "taskset", "timeout", "unshare")
VERBS = Path("/usr/lib/python3/dist-packages/pyverbs")


class GuestFailed(Exception):
    """The guest did not end as it should. The text has the end of what it said."""


def why_not() -> str | None:
    """Why no guest can be had here, and what to do; None if one can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return (
            f"the guest is for Linux on x86-64, and this is {sys.platform} on {platform.machine()}"
        )
    if os.geteuid() != 0:
        return "the guest needs root, for a pid namespace"
    if os.environ.get("TENSORHUB_RDMA_GUEST") == "built" and not _kernel().exists():
        return "the guest's kernel is not built yet: `make rdma` does so"
    wanted = RUNNERS if _kernel().exists() else RUNNERS + BUILDERS
    if lacking := [name for name in wanted if shutil.which(name) is None]:
        return f"the guest needs {', '.join(lacking)}: apt-get install {PACKAGES}"
    if not list(
        VERBS.glob(f"device.cpython-{sys.version_info.major}{sys.version_info.minor}-*.so")
    ):
        return (
            f"there is no pyverbs for Python {platform.python_version()}: apt-get install "
            f"{PACKAGES}"
        )
    return None


def _kernel() -> Path:
    """Where the kernel is, once it is built from what is here now."""
    if given := os.environ.get("TENSORHUB_GUEST_KERNEL"):
        return Path(given)
    recipe = hashlib.sha256(CONFIG.read_bytes() + BUILD.read_bytes()).hexdigest()[:12]
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "tensorhub"
        / f"linux-uml-{recipe}"
    )


def is_built() -> bool:
    """Whether the kernel is there already."""
    return _kernel().exists()


def kernel() -> Path:
    """The guest's kernel, built if need be, in BUILD_S at most. GuestFailed."""
    found = _kernel()
    found.parent.mkdir(parents=True, exist_ok=True)
    with (found.parent / "building").open("w") as building:
        fcntl.flock(building, fcntl.LOCK_EX)
        if not found.exists():
            # it ends all that the build has started
            bounded = ["timeout", "--kill-after=30", str(BUILD_S)]
            built = subprocess.run([*bounded, BUILD, CONFIG, found], capture_output=True, text=True)
            if built.returncode:
                why = (
                    f"was not built within {BUILD_S} s"
                    if built.returncode in (124, 137)
                    else "cannot be built"
                )
                raise GuestFailed(
                    f"the guest's kernel {why}:\n{(built.stdout + built.stderr)[-4000:]}"
                )
    return found


def run(
    command: list[str], out: Path, limit_s: float, environment: dict[str, str] | None = None
) -> int:
    """Run a command in a new guest, in this directory, with `out` to write to, and return its exit
    status. GuestFailed.
    """
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "status").unlink(missing_ok=True)
    variables = [
        f"export {name}={shlex.quote(value)}" for name, value in (environment or {}).items()
    ]
    (out / "command.sh").write_text(
        "\n".join([f"cd {shlex.quote(os.getcwd())}", *variables, shlex.join(command), ""])
    )
    with (out / "console").open("wb") as console:
        # On one CPU: the guest's kernel and its processes take turns, and waking another CPU takes
        # longer than they run.
        on_one = ["taskset", "--cpu-list", str(max(os.sched_getaffinity(0)))]
        ended = subprocess.run(
            [*on_one, BOOT, kernel(), f"{limit_s:g}", out], stdout=console, stderr=subprocess.STDOUT
        )
    if not (out / "status").exists():
        said = (out / "console").read_text(errors="replace")[-4000:]
        why = (
            f"did not end within {limit_s:g} s"
            if ended.returncode == 137
            else f"ended with {ended.returncode}"
        )
        raise GuestFailed(f"the guest {why}:\n{said}")
    return int((out / "status").read_text())
