"""The files that a version was published from, as its manifest's metadata tells of them.

Responsible for finding a model's files, for the agreement of a sharded model's index with them, and for the one encoding of
what they were. A fetch of everything writes byte-equal files from it. What comes out of a manifest is hostile: names are
plain names of files, and headers are read as headers of files are.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorhub.transport.safetensors import Header, open_file, parse_header

FORMAT = "safetensors/1"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
INDEX_BYTES_MAX = 32 * 2**20
FILES_MAX = 4096
FILE_NAME_BYTES_MAX = 255  # what the usual filesystems take


@dataclass(frozen=True, slots=True)
class Index:
    """A sharded model's index: which tensor is in which file. `text` is exactly what the file holds."""

    name: str
    text: bytes
    metadata: Mapping[str, Any]
    weight_map: Mapping[str, str]

    @classmethod
    def parse(cls, name: str, text: bytes) -> Index:
        """ValueError, with the reason, if it is not an index of safetensors files, or names a file elsewhere."""
        try:
            said = json.loads(text.decode())
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not JSON ({str(error)[:200]})") from error
        weight_map = said.get("weight_map") if isinstance(said, dict) else None
        metadata = said.get("metadata", {}) if isinstance(said, dict) else None
        if not isinstance(weight_map, dict) or not weight_map or not isinstance(metadata, dict):
            raise ValueError("it has no weight_map of tensors to files")
        for file in weight_map.values():
            if fault := file_name_fault(file):
                raise ValueError(f"it names {str(file)[:64]!r}: {fault}")
        return cls(name, text, metadata, weight_map)

    def check(self, headers: Mapping[str, Header]) -> None:
        """ValueError unless these files hold exactly the index' tensors, each where it says."""
        there = {entry.name: file for file, header in headers.items() for entry in header.entries}
        for tensor, file in self.weight_map.items():
            if there.get(tensor) != file:
                where = f"it is in {there[tensor]}" if tensor in there else "it is in none"
                raise ValueError(f"it says that tensor {tensor[:64]!r} is in {file}, but {where}")
        for tensor, file in there.items():
            if tensor not in self.weight_map:
                raise ValueError(f"{file} has tensor {tensor!r}, of which it says nothing")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One model in files: each file's name and header, and the index if it has one."""

    headers: Mapping[str, Header]
    index: Index | None = None

    def __post_init__(self) -> None:
        """ValueError for what is not one model."""
        for name in (*self.headers, *([self.index.name] if self.index else ())):
            if fault := file_name_fault(name):
                raise ValueError(f"a file cannot be called {str(name)[:64]!r}: {fault}")
        if len(self.headers) > FILES_MAX:
            raise ValueError(f"there are more than {FILES_MAX} files")
        there: dict[str, str] = {}
        for name, header in self.headers.items():
            for entry in header.entries:
                if entry.name in there:
                    raise ValueError(f"tensor {entry.name!r} is in {there[entry.name]} and in {name}")
                there[entry.name] = name
        if self.index is not None:
            if self.index.name in self.headers:
                raise ValueError(f"{self.index.name} is the index and a file of tensors")
            self.index.check(self.headers)

    def encode(self) -> bytes:
        """As a manifest's metadata: JSON, with each text as it is in its file."""
        files = [{"name": name, "header": header.text.decode()} for name, header in self.headers.items()]
        said: dict[str, object] = {"format": FORMAT, "files": files}
        if self.index is not None:
            said["index"] = {"name": self.index.name, "text": self.index.text.decode()}
        return json.dumps(said, ensure_ascii=False, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, metadata: bytes) -> Checkpoint | None:
        """What the publisher's files were; None if it had none. ValueError, with the reason, for what no publisher says."""
        try:
            said = json.loads(metadata.decode())
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict) or said.get("format") != FORMAT:
            return None
        try:
            files = [(file["name"], file["header"].encode()) for file in said["files"]]
            index = said.get("index")
            named = None if index is None else (index["name"], index["text"].encode())
        except (KeyError, TypeError, AttributeError, UnicodeEncodeError) as error:
            raise ValueError("it does not tell of files as it should") from error
        if not all(isinstance(name, str) for name, _ in files) or len(dict(files)) != len(files):
            raise ValueError("it tells of a file twice, or of one without a name")
        headers = {name: parse_header(header) for name, header in files}
        return cls(headers, None if named is None else Index.parse(*named))


def file_name_fault(name: object) -> str | None:
    """Why this is not the plain name of a file in a directory; None if it is."""
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\\" in name:
        return "only a plain file name, without a directory, will do"
    if not name.isprintable() or len(name.encode()) > FILE_NAME_BYTES_MAX or name.startswith("."):
        return f"give 1 to {FILE_NAME_BYTES_MAX} bytes of printable text that does not begin with a dot"
    return None


# ---------------------------------------------------------------------------------------------------------- finding


def find_files(path: Path) -> tuple[Sequence[Path], Index | None]:
    """A model's files: those of a file, a directory, or an index. ValueError, saying what to give; OSError."""
    if path.is_dir():
        if (index := _index_in(path)) is not None:
            return _indexed(index)
        files = sorted(file for file in path.iterdir() if file.name.endswith(SUFFIX) and not file.name.startswith("."))
        if not files:
            raise ValueError(f"{path} has no *{SUFFIX} and no *{INDEX_SUFFIX}")
        return files, None
    return _indexed(path) if path.name.endswith(".json") else ([path], None)


def _index_in(directory: Path) -> Path | None:
    found = sorted(file for file in directory.iterdir() if file.name.endswith(INDEX_SUFFIX))
    ours = [file for file in found if file.name.endswith(SUFFIX + INDEX_SUFFIX)]
    # Beside it, a model may have the index of its pickled form.
    found = ours or [file for file in found if not file.name.endswith(".bin" + INDEX_SUFFIX)]
    if len(found) > 1:
        raise ValueError(f"{directory} has several indexes ({', '.join(file.name for file in found)}): give one of them")
    return found[0] if found else None


def _indexed(path: Path) -> tuple[Sequence[Path], Index]:
    descriptor = open_file(path)  # which never waits, as for the other end of a pipe
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(f"{path} is not an index of safetensors files: it is not a file at all")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            text = file.read(INDEX_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    try:
        if len(text) > INDEX_BYTES_MAX:
            raise ValueError(f"it has more than {INDEX_BYTES_MAX} bytes")
        index = Index.parse(path.name, text)
    except ValueError as error:
        raise ValueError(f"{path} is not an index of safetensors files: {error}") from error
    files = [path.with_name(name) for name in sorted(set(index.weight_map.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path} names files that are not there: {', '.join(missing[:10])}{_more(missing)}")
    return files, index


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 10} more)" if len(names) > 10 else ""


def rewritten(index: Index, files: Mapping[str, Header]) -> bytes:
    """The text of an index of these files only, which hold some of its tensors. ValueError if its metadata is too deep: some
    Pythons read what they cannot write.
    """
    weight_map = {entry.name: name for name, header in files.items() for entry in header.entries}
    total = sum(entry.nbytes for header in files.values() for entry in header.entries)
    said = {"metadata": {**index.metadata, "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    try:
        return (json.dumps(said, indent=2) + "\n").encode()
    except RecursionError as error:
        raise ValueError(f"the metadata of {index.name} is nested too deeply") from error


def agreed(metadata: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """What every one of several files says, and all alike."""
    first, *others = metadata
    return {key: text for key, text in first.items() if all(other.get(key) == text for other in others)}


def sync_directory(path: Path) -> None:
    """Make renames in it durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
