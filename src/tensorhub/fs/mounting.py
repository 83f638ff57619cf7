"""A version, or all versions of a model, mounted by FUSE: `tensorhub mount`. Read-only.

Responsible for the answers to the kernel, with errors as numbers, and for mounting and unmounting.
Each answer has the deadline of the filesystem behind it, so no reader hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import stat
import threading
import time
from collections.abc import Callable
from ctypes.util import find_library
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from tensorhub.errors import (
    AuthenticationFailed,
    StateError,
    TensorHubError,
    VersionUnavailable,
    install,
    text_of,
)
from tensorhub.fs.filesystem import TensorHubFileSystem
from tensorhub.fs.mountpoints import KIND, check_free, detach_stale, unmount
from tensorhub.fs.versions import Version
from tensorhub.logs import get_logger

if find_library("fuse3"):  # its requests are larger than those of libfuse 2
    os.environ.setdefault("FUSE_LIBRARY_NAME", "fuse3")
try:
    import mfusepy
except ImportError as error:
    raise StateError(f"tensorhub mount needs mfusepy: {install('mount')}") from error
except OSError as error:
    raise StateError(
        f"tensorhub mount needs libfuse ({error}): install the system's (Debian: fuse3)"
    ) from error

R = TypeVar("R")

LATEST = "latest"
MOUNT_S = 20.0  # until the kernel has taken a mount
PARTING_S = 2.0  # for programs that read while it is unmounted
READ_AHEAD_KB = 1024  # by the kernel, and so in one request
# without it, libfuse 3 prints a warning
IDLE_THREADS = {"max_idle_threads": 10} if mfusepy.fuse_version_major == 3 else {}

log = get_logger("tensorhub.fs")


def errno_of(error: Exception) -> int:
    """What the kernel tells the program whose call has failed so."""
    match error:
        case VersionUnavailable():
            return errno.ESTALE
        case AuthenticationFailed():
            return errno.EACCES
        case OSError(errno=int() as number) if not isinstance(error, TensorHubError):
            return number
        case _:
            return errno.EIO


def _answering(answer: Callable[..., R]) -> Callable[..., R]:
    """The answer, with what it raises as a number."""

    @functools.wraps(answer)
    def answered(*arguments: Any) -> R:
        try:
            return answer(*arguments)
        except Exception as error:
            number = errno_of(error)
            if isinstance(error, TensorHubError) or not isinstance(error, OSError):
                log.warning("mount_failed_read", path=arguments[1], reason=text_of(error))
            raise OSError(number, os.strerror(number)) from error

    return answered


class Files(mfusepy.Operations):
    """What is mounted. `version`: None: a directory for each version of the model that can be
    fetched, and the link `latest` to the newest of them.
    """

    use_ns = True

    def __init__(self, fs: TensorHubFileSystem, model: str, version: Version | None) -> None:
        self.mounted = threading.Event()
        self._fs = fs
        self._model = model  # as in a path
        self._version = version
        self._since_ns = time.time_ns() // 10**9 * 10**9
        self._open: dict[int, tuple[Version, str] | int] = {}  # or a descriptor of a local file
        self._numbers = count(1)

    def _find(self, path: str) -> tuple[Version, str] | None:
        """The version with that path, and the rest of it; None: all versions."""
        within = path.strip("/")
        if self._version is not None:
            return self._version, within
        number = within.partition("/")[0]
        if not number:
            return None
        if not number.isdecimal() or number != str(int(number)):
            raise FileNotFoundError(errno.ENOENT, path)
        return self._fs.version(f"{self._model}/{within}")

    def init(self, path: str) -> None:
        self.mounted.set()

    @_answering
    def getattr(self, path: str, fh: int | None = None) -> dict[str, int]:
        if self._version is None and path == f"/{LATEST}":
            return self._attributes(stat.S_IFLNK | 0o777, len(self.readlink(path)))
        found = self._find(path)
        if found is None:
            return self._attributes(stat.S_IFDIR | 0o555, 0)
        version, within = found
        info = self._fs.entry(version, within)
        mode = stat.S_IFREG | 0o444 if info["type"] == "file" else stat.S_IFDIR | 0o555
        return self._attributes(mode, info["size"], version)

    def _attributes(self, mode: int, nbytes: int, version: Version | None = None) -> dict[str, int]:
        # equal for equal contents only: the kernel keeps what it has read as long as this stays
        when = self._since_ns
        if version is not None:
            when += int.from_bytes(version.info.content_id.encode(), "big") % 10**9
        times = dict.fromkeys(("st_atime", "st_mtime", "st_ctime"), when)
        links = 2 if stat.S_ISDIR(mode) else 1
        owner = {"st_uid": os.getuid(), "st_gid": os.getgid()}
        return {"st_mode": mode, "st_size": nbytes, "st_nlink": links, **times, **owner}

    @_answering
    def readdir(self, path: str, fh: int) -> list[str]:
        found = self._find(path)
        if found is None:
            names = self._fs.ls(self._model, detail=False)
        else:
            names = [each["name"] for each in self._fs.entries(*found)]
        return [".", "..", *[name.rpartition("/")[2] for name in names]]

    @_answering
    def readlink(self, path: str) -> str:
        if path != f"/{LATEST}":
            raise OSError(errno.EINVAL, path)
        return str(self._fs.version(f"{self._model}/{LATEST}")[0].info.version)

    @_answering
    def open(self, path: str, flags: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, path)
        found = self._find(path)
        if found is None:
            raise OSError(errno.EISDIR, path)
        version, within = found
        number = next(self._numbers)
        local = self._fs.local_file(version, within)
        self._open[number] = (version, within) if local is None else local
        return number

    @_answering
    def read(self, path: str, into: memoryview, offset: int, fh: int) -> int:
        """Fill `into` as far as the file goes. How many bytes these were."""
        match self._open[fh]:
            case int() as descriptor:
                return os.preadv(descriptor, [into], offset)
            case version, name:
                rest = into

                def put(piece: memoryview) -> None:
                    nonlocal rest
                    rest[: len(piece)] = piece
                    rest = rest[len(piece) :]

                version.copy(name, offset, offset + len(into), put)
                return len(into) - len(rest)

    @_answering
    def release(self, path: str, fh: int) -> int:
        its = self._open.pop(fh)
        if isinstance(its, int):
            os.close(its)
        return 0

    @_answering
    def statfs(self, path: str) -> dict[str, int]:
        return {"f_bsize": 4096, "f_frsize": 4096, "f_namemax": 255}


class _Fuse(mfusepy.FUSE):
    def read(self, path: bytes, buf: Any, size: int, offset: int, fip: Any) -> int:
        """Into libfuse's own memory: bytes between would be one more copy."""
        into = (ctypes.c_char * size).from_address(ctypes.addressof(buf.contents))
        name, file = path.decode(self.encoding, self.errors), fip.contents.fh
        return int(self.operations.read(name, memoryview(into).cast("B"), offset, file))


class Mount:
    """A mounted directory, until `unmount`."""

    def __init__(self, files: Files, directory: Path, *, allow_other: bool = False) -> None:
        """StateError: it cannot be mounted there; libfuse says on stderr why. InvalidValue: a
        version is mounted there.
        """
        self._directory = directory
        self._fault = ""  # what has ended it
        detach_stale(directory)
        check_free(directory)
        options = {"allow_other": allow_other, "auto_cache": True, "ro": True, **IDLE_THREADS}
        # a daemon: a program that reads on does not keep this process alive
        self._thread = threading.Thread(
            target=self._serve, args=(files, options), name="tensorhub-mount", daemon=True
        )
        self._thread.start()
        deadline = time.monotonic() + MOUNT_S
        while not files.mounted.wait(0.05):
            if not self.is_mounted or time.monotonic() > deadline:
                self.unmount()
                raise StateError(f"{directory} cannot be mounted: {self._fault or 'no answer'}")
        device = directory.stat().st_dev
        devices = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}")
        with contextlib.suppress(OSError):  # not as root, or in a container
            (devices / "read_ahead_kb").write_text(f"{READ_AHEAD_KB}")

    def _serve(self, files: Files, options: dict[str, int]) -> None:
        try:
            _Fuse(files, str(self._directory), foreground=True, fsname=KIND, **options)
        except Exception as error:
            self._fault = text_of(error)

    @property
    def is_mounted(self) -> bool:
        """False once a process has unmounted it."""
        return self._thread.is_alive()

    def unmount(self) -> None:
        """Unmount it. Files that are open can be read until the process ends."""
        if self.is_mounted:
            unmount(self._directory)
        self._thread.join(PARTING_S)
