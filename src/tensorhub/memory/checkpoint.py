"""The files that a version was published from, as its manifest's metadata describes them.

Responsible for finding a model's files, for checking that a sharded model's index agrees with them,
and for one encoding of both, from which a fetch of everything writes byte-equal files. What comes
out of a manifest is hostile: a name must be a plain file name, and a header is read like that of an
unknown file.
"""

from __future__ import annotations

import itertools
import json
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
from msgpack.exceptions import UnpackException

from tensorhub.errors import some
from tensorhub.memory.json_pieces import Pieces
from tensorhub.memory.safetensors import Header, open_file, parse_header
from tensorhub.model.manifest import TENSORS_MAX

# what the metadata of a version that was published from files begins with
FORMAT = b"safetensors/2\n"
SUFFIX = ".safetensors"
INDEX_SUFFIX = ".index.json"
INDEX_BYTES_MAX = 32 * 2**20
INDEX_METADATA_BYTES_MAX = 2**18  # what an index says beside its weight_map
FILES_MAX = 4096
FILE_NAME_BYTES_MAX = 255  # what the usual filesystems take


@dataclass(frozen=True, slots=True)
class Index:
    """A sharded model's index: which tensor is in which file. `text` is exactly what the file
    holds.
    """

    name: str
    text: bytes
    metadata: Mapping[str, Any]
    weight_map: Mapping[str, str]

    @classmethod
    def parse(cls, name: str, text: bytes) -> Index:
        """ValueError, with the reason, if it is not an index of safetensors files, names a file
        elsewhere, or says more.
        """
        if len(text) > INDEX_BYTES_MAX:
            raise ValueError(f"it has more than {INDEX_BYTES_MAX} bytes")
        if not text.lstrip().startswith(b"{"):
            raise ValueError("it is not a JSON object")
        pieces, weight_map, metadata = Pieces(text, "it"), dict[str, str](), dict[str, Any]()
        for said in pieces.members():
            if said == "weight_map" and pieces.next_is(b"{"):
                weight_map = _weight_map(pieces)
            elif said == "metadata" and pieces.next_is(b"{"):
                metadata = pieces.value(INDEX_METADATA_BYTES_MAX)
            else:
                raise ValueError(
                    f"it says {said[:64]!r}: an index has a weight_map and metadata, both objects, "
                    f"and nothing else"
                )
        pieces.end()
        if not weight_map:
            raise ValueError("it has no weight_map of tensors to files")
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
        """ValueError if this is not one model."""
        indexes = [(self.index.name, INDEX_SUFFIX)] if self.index else []
        for name, suffix in [*((name, SUFFIX) for name in self.headers), *indexes]:
            if fault := file_name_fault(name, suffix):
                raise ValueError(f"a file cannot be called {str(name)[:64]!r}: {fault}")
        if len(self.headers) > FILES_MAX:
            raise ValueError(f"there are more than {FILES_MAX} files")
        there: dict[str, str] = {}
        for name, header in self.headers.items():
            for entry in header.entries:
                if entry.name in there:
                    raise ValueError(
                        f"tensor {entry.name!r} is in {there[entry.name]} and in {name}"
                    )
                there[entry.name] = name
        if self.index is not None:
            if self.index.name in self.headers:
                raise ValueError(f"{self.index.name} is the index and a file of tensors")
            self.index.check(self.headers)

    def encode(self) -> bytes:
        """As a manifest's metadata: MessagePack texts one after the other, each as it is in its
        file.
        """
        said = [self.index.name, self.index.text] if self.index is not None else ["", b""]
        for name, header in self.headers.items():
            said += [name, header.text]
        return FORMAT + b"".join(map(msgpack.packb, said))

    @classmethod
    def decode(cls, metadata: bytes) -> Checkpoint | None:
        """What the publisher's files were; None if it had none. ValueError, with the reason, for
        what no publisher says.
        """
        if not metadata.startswith(FORMAT):
            return None
        unpacker = msgpack.Unpacker(
            max_buffer_size=len(metadata), max_array_len=0, max_map_len=0, max_ext_len=0
        )
        unpacker.feed(metadata[len(FORMAT) :])
        try:
            index_name, index_text, *said = itertools.islice(unpacker, 2 + 2 * (FILES_MAX + 1))
            files = dict(zip(said[::2], said[1::2], strict=True))
        except (ValueError, TypeError, UnpackException) as error:
            raise ValueError("it does not tell of files as it should") from error
        are_texts = all(
            isinstance(name, str) and isinstance(text, bytes) for name, text in files.items()
        )
        if len(files) != len(said) // 2 or not are_texts or not isinstance(index_text, bytes):
            raise ValueError("it tells of a file twice, or of one without a name or a header")
        headers = {name: parse_header(text) for name, text in files.items()}
        return cls(headers, Index.parse(index_name, index_text) if index_name != "" else None)


def _weight_map(pieces: Pieces) -> dict[str, str]:
    found: dict[str, str] = {}
    files: dict[str, str] = {}  # one text for each name, however often it is there
    for tensor in pieces.members():
        file = pieces.string() if pieces.next_is(b'"') else ""
        if file not in files:
            if fault := file_name_fault(file, SUFFIX):
                raise ValueError(f"it names {file[:64]!r}: {fault}")
            if len(files) == FILES_MAX:
                raise ValueError(f"it names more than {FILES_MAX} files")
        if len(found) == TENSORS_MAX:
            raise ValueError(f"it has more than {TENSORS_MAX} tensors")
        found[tensor] = files.setdefault(file, file)
    return found


def file_name_fault(name: object, suffix: str) -> str | None:
    """Why a publisher's file cannot have this name in a reader's directory; None if it can.

    Only this suffix will do, so that a publisher of weights cannot replace other files, such as a
    model's tokenizer.
    """
    if not isinstance(name, str) or not name or name in (".", "..") or "/" in name or "\\" in name:
        return "only a plain file name, without a directory, will do"
    if not name.isprintable() or len(name.encode()) > FILE_NAME_BYTES_MAX or name.startswith("."):
        return (
            f"give 1 to {FILE_NAME_BYTES_MAX} bytes of printable text "
            "that does not begin with a dot"
        )
    if not name.endswith(suffix):
        return f"give a name that ends in {suffix}"
    return None


# --------------------------------------------------------------------------------------------------
# finding


def find_files(path: Path) -> tuple[Sequence[Path], Index | None]:
    """A model's files: those of a file, a directory, or an index. ValueError, saying what to give;
    OSError.
    """
    if path.is_dir():
        index, files = choose([file.name for file in path.iterdir()], path)
        return _indexed(path / index) if index else ([path / name for name in files], None)
    return _indexed(path) if path.name.endswith(".json") else ([path], None)


def choose(names: Sequence[str], directory: object) -> tuple[str, list[str]]:
    """Of the files of a directory its index or, if it has none (""), its files of tensors.
    ValueError, saying what to give.
    """
    found = sorted(name for name in names if name.endswith(INDEX_SUFFIX))
    ours = [name for name in found if name.endswith(SUFFIX + INDEX_SUFFIX)]
    # Beside it, a model may have the index of its pickled form.
    found = ours or [name for name in found if not name.endswith(".bin" + INDEX_SUFFIX)]
    if len(found) > 1:
        raise ValueError(f"{directory} has several indexes ({some(found)}): give one of them")
    files = sorted(name for name in names if name.endswith(SUFFIX) and not name.startswith("."))
    if not found and not files:
        raise ValueError(f"{directory} has no *{SUFFIX} and no *{INDEX_SUFFIX}")
    return (found[0], []) if found else ("", files)


def _indexed(path: Path) -> tuple[Sequence[Path], Index]:
    descriptor = open_file(path)  # which never waits, as it would for a writer of a pipe
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError(
                f"{path} is not an index of safetensors files: it is not a file at all"
            )
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            text = file.read(INDEX_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    try:
        index = Index.parse(path.name, text)
    except ValueError as error:
        raise ValueError(f"{path} is not an index of safetensors files: {error}") from error
    files = [path.with_name(name) for name in sorted(set(index.weight_map.values()))]
    if missing := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"{path} names files that are not there: {some(missing)}")
    return files, index


def rewritten(index: Index, files: Mapping[str, Header]) -> bytes:
    """The text of an index of these files only, which hold some of its tensors. ValueError if its
    metadata is too deep: some Pythons read what they cannot write.
    """
    weight_map = {entry.name: name for name, header in files.items() for entry in header.entries}
    total = sum(entry.nbytes for header in files.values() for entry in header.entries)
    said = {
        "metadata": {**index.metadata, "total_size": total},
        "weight_map": dict(sorted(weight_map.items())),
    }
    try:
        return (json.dumps(said, indent=2) + "\n").encode()
    except RecursionError as error:
        raise ValueError(f"the metadata of {index.name} is nested too deeply") from error


def agreed(metadata: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """What every one of several files says, and all alike."""
    first, *others = metadata
    return {
        key: text for key, text in first.items() if all(other.get(key) == text for other in others)
    }


def sync_directory(path: Path) -> None:
    """Make renames in it durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
