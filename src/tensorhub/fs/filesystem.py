"""The fsspec filesystem `tensorhub://HOST:PORT/MODEL/VERSION/FILE`, read-only."""

from __future__ import annotations

import errno
import os
from typing import Any
from urllib.parse import quote, unquote

from tensorhub.errors import InvalidType, InvalidValue, StateError, VersionUnavailable, install
from tensorhub.fs.local_files import LocalFiles
from tensorhub.fs.reader import Reader, Settings, close, reader_of
from tensorhub.fs.versions import Version
from tensorhub.types import VERSION_MAX, Selector, as_timeout_s, check_name, check_selector

try:
    from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
except ImportError as error:
    raise StateError(f"tensorhub.fs needs fsspec: {install('fs')}") from error

CACHE_BYTES = 2**30
PROTOCOL = "tensorhub://"


class TensorHubFileSystem(AbstractFileSystem):
    """Versions as directories of safetensors files, whose bytes come from the memory of the workers
    that hold the version, verified. Read-only.

    A path is MODEL/VERSION/FILE; in a URL, `tensorhub://HOST:PORT/MODEL/VERSION/FILE`. VERSION is a
    number, "latest", "latest-1" or "available". A "/" in a model's name is "%2F". A version that
    was published from files has these files, equal to the byte; any other version has
    `model.safetensors`. An open file stays the version that it was opened of: once that cannot be
    fetched any more, reads raise VersionUnavailable.

    `address`: as of `connect`; default: TENSORHUB_ADDRESS. `token_file`: the path of a token file;
    default: TENSORHUB_TOKEN. `files`: a local directory with what the loader needs besides weights,
    as a configuration and a tokenizer; weights in it are left out. `timeout`: seconds of each call
    and each fetch of bytes; a read ends within twice as many. `cache_bytes`: memory for fetched
    bytes, which all files of this process share.

    Calls raise FileNotFoundError for a model, a version or a file that is not there; otherwise as
    `tensorhub.Hub.fetch`.
    """

    protocol = "tensorhub"
    root_marker = ""

    def __init__(
        self,
        address: str | None = None,
        *,
        token_file: str | os.PathLike[str] | None = None,
        files: str | os.PathLike[str] | None = None,
        timeout: float = 60.0,
        cache_bytes: int = CACHE_BYTES,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        address = address or os.environ.get("TENSORHUB_ADDRESS")
        if not address:
            raise InvalidValue(
                "no coordinator to read from: give tensorhub://HOST:PORT/MODEL/VERSION/FILE, or "
                "set TENSORHUB_ADDRESS"
            )
        timeout = as_timeout_s(timeout, 60.0)
        if type(cache_bytes) is not int or cache_bytes < 1:
            raise InvalidType(f"cache_bytes={cache_bytes!r}: give a number of bytes, 1 or more")
        token = None if token_file is None else os.fspath(token_file)
        self._settings = Settings(address, token, timeout, cache_bytes)
        self._local = LocalFiles(files)
        self._reader: Reader | None = None

    @property
    def reader(self) -> Reader:
        """The connection to the cluster, which begins with the first call."""
        if self._reader is None:
            self._reader = reader_of(self._settings)
        return self._reader

    def close(self) -> None:
        """Leave the cluster, also for other filesystems of this process with these settings. The
        next call joins it again.
        """
        reader, self._reader = self._reader, None
        if reader is not None:
            close(reader)

    # ----------------------------------------------------------------------------------------------
    # paths

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = os.fspath(path)
        if text.startswith(PROTOCOL):
            text = text.removeprefix(PROTOCOL).partition("/")[2]
        return text.strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        host = path.removeprefix(PROTOCOL).partition("/")[0] if path.startswith(PROTOCOL) else ""
        return {"address": f"tcp://{host}"} if host else {}

    def unstrip_protocol(self, name: str) -> str:
        """The URL of a path."""
        path = self._strip_protocol(name)
        return f"{PROTOCOL}{self._settings.address.removeprefix('tcp://')}/{path}"

    def version(self, path: str) -> tuple[Version, str]:
        """The version that a path is in, and the rest of the path. Raises as `info`."""
        model, selector, *rest = self._strip_protocol(path).split("/")
        try:
            name = check_name("model", unquote(model))
            return self.reader.version(name, _selector(selector)), "/".join(rest)
        except (InvalidValue, VersionUnavailable) as error:
            raise _missing(path, str(error)) from error

    # ----------------------------------------------------------------------------------------------
    # what fsspec asks for

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """The entries of a directory: models, versions of a model that can be fetched, or files."""
        path = self._strip_protocol(path)
        match path.split("/") if path else []:
            case []:
                found = [_directory(_quoted(each.model)) for each in self.reader.models()]
            case [model]:
                found = self._versions(model)
            case [model, number, *_]:
                entries, root = self.entries(*self.version(path)), f"{model}/{number}"
                found = [{**each, "name": f"{root}/{each['name']}"} for each in entries]
        return found if detail else [each["name"] for each in found]

    def _versions(self, model: str) -> list[dict[str, Any]]:
        try:
            info = self.reader.model(check_name("model", unquote(model)))
        except (InvalidValue, VersionUnavailable) as error:
            raise _missing(model, str(error)) from error
        there = [str(each.version) for each in info.versions if each.state == "available"]
        return [_directory(f"{model}/{name}") for name in [*there, *(["latest"] if there else [])]]

    def entries(self, version: Version, within: str) -> list[dict[str, Any]]:
        """The files and directories in a directory of a version. Of a file: itself."""
        sizes = self._sizes(version)
        if within in sizes:
            return [_file(within, sizes[within], version)]
        below = f"{within}/" if within else ""
        there = [each.removeprefix(below) for each in sizes if each.startswith(below)]
        names = dict.fromkeys([each.partition("/")[0] for each in there])
        if not names:
            raise _missing(within, "no file of the version, or of files=, has this name")
        paths = [below + name for name in names]
        return [
            _file(path, sizes[path], version) if path in sizes else _directory(path)
            for path in paths
        ]

    def entry(self, version: Version, within: str) -> dict[str, Any]:
        """What that path of a version is."""
        first = self.entries(version, within)[0]
        return first if first["name"] == within else _directory(within)

    def _sizes(self, version: Version) -> dict[str, int]:
        """The bytes of each file of a version's directory: the version's own files, then others."""
        found = {name: file.nbytes for name, file in version.files.items()}
        return {**self._local.sizes(), **found}

    def local_file(self, version: Version, within: str) -> int | None:
        """A descriptor of the local file that is at that path; None: the version's file is.
        FileNotFoundError: no file is there.
        """
        if within in version.files:
            return None
        if within not in self._local.files:
            raise _missing(within, "no file of the version, or of files=, has this name")
        return self._local.open(within)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """What a path is: "name", "size", "type"; of a file also "version" and "content_id"."""
        path = self._strip_protocol(path)
        if "/" not in path:
            if path:
                self._versions(path)
            return _directory(path)
        return {**self.entry(*self.version(path)), "name": path}

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        if mode != "rb":
            raise OSError(errno.EROFS, "versions are read-only; publish writes them", path)
        if "/" not in path:
            raise _missing(path, "a file is MODEL/VERSION/FILE")
        version, within = self.version(path)
        local = self.local_file(version, within)
        return VersionFile(self, path, version, within) if local is None else os.fdopen(local, "rb")


class VersionFile(AbstractBufferedFile):
    """A file of a version that is open. Each read comes from the filesystem's memory, and is
    buffered nowhere else.
    """

    def __init__(self, fs: TensorHubFileSystem, path: str, version: Version, name: str) -> None:
        self._version = version
        self._name = name
        super().__init__(fs, path, cache_type="none", size=version.files[name].nbytes)

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._version.read(self._name, start, end)


def _selector(text: str) -> Selector:
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(VERSION_MAX))
    return check_selector(int(text) if is_number else text)


def _quoted(model: str) -> str:
    return model.replace(".", "%2E") if model in (".", "..") else quote(model, safe="")


def _directory(path: str) -> dict[str, Any]:
    return {"name": path, "size": 0, "type": "directory"}


def _file(path: str, nbytes: int, version: Version) -> dict[str, Any]:
    info = version.info
    return {
        "name": path,
        "size": nbytes,
        "type": "file",
        "version": info.version,
        "content_id": info.content_id,
    }


def _missing(path: str, why: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, why, path)
