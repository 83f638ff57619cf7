"""Safetensors files that a fetch fills: planned when the version is known, filled in place, renamed
when whole.

Everything is made in a temporary directory beside the output, on the output's filesystem. All
blocks of the files are allocated before the first byte arrives. So a full disk is an error, and
never a SIGBUS in a lane that writes a mapping. After an interruption the arrived bytes stay there,
and the next fetch to that output goes on (`unfinished`).

Responsible for the contents of the files, for their place, and for leaving nothing else behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Self

from tensorhub.errors import StateError
from tensorhub.layouts.whole import choose
from tensorhub.memory.allocated import patterns
from tensorhub.memory.checkpoint import SUFFIX, Checkpoint, agreed, rewritten, sync_directory
from tensorhub.memory.regions import FilledMemory, MappedRegions, mapped, mismatch
from tensorhub.memory.safetensors import LENGTH_BYTES, Header, make_header
from tensorhub.memory.unfinished import Unfinished, stem_of
from tensorhub.model.digests import WIDTHS
from tensorhub.model.dtypes import itemsize
from tensorhub.model.manifest import Manifest, TensorSpec

ONE_FILE = "model" + SUFFIX  # of a directory, where the publisher had no file names

# --------------------------------------------------------------------------------------------------
# planning


@dataclass(frozen=True, slots=True)
class Plan:
    """The header of each file to write, and (name, text) of the index if there is one."""

    headers: Mapping[str, Header]
    index: tuple[str, bytes] | None = None

    @property
    def nbytes(self) -> int:
        return sum(header.file_bytes for header in self.headers.values())


def plan(
    manifest: Manifest, wanted: Sequence[TensorSpec], name: str | None, *, in_order: bool = False
) -> Plan:
    """The files that hold the `wanted` tensors: one called `name`, or (None) the publisher's, else
    one.

    A file of which everything is wanted is as it was published. `in_order`: a file that the
    publisher has not told of has the tensors in the order of the regions, as far as the format
    aligns them. ManifestMismatch if the format cannot hold a tensor, or for metadata that is not
    what a publisher says of these tensors.
    """
    if not wanted:
        raise mismatch("this version holds no tensor: there is nothing to write")
    try:
        source = Checkpoint.decode(manifest.metadata)
        if source is None and in_order:
            return Plan({name or ONE_FILE: _header_in_order(wanted)})
        if source is None:
            return Plan({name or ONE_FILE: _header(wanted, {})})
        _check(source, manifest)
        chosen = {tensor.name: tensor for tensor in wanted}
        whole = len(chosen) == len(manifest.tensors)
        headers = {
            file: _part(header, chosen)
            for file, header in source.headers.items()
            if whole or _has(header, chosen)
        }
        if name is None and source.index is not None:
            text = source.index.text if whole else rewritten(source.index, headers)
            return Plan(headers, (source.index.name, text))
    except ValueError as error:
        raise mismatch(f"this version cannot be written as safetensors files: {error}") from error
    if name is not None:
        (first, *others) = headers.values()
        merged = (
            _header(wanted, agreed(header.metadata for header in headers.values()))
            if others
            else first
        )
        return Plan({name: merged})
    return Plan(headers)


def _header(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> Header:
    return make_header([(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors], metadata)


def _header_in_order(wanted: Sequence[TensorSpec]) -> Header:
    """Some loaders ask for the format that this says."""
    tensors = sorted(wanted, key=lambda tensor: (tensor.region, tensor.offset))
    # every loader finds each tensor aligned: what would move the next ones comes last
    tensors.sort(key=lambda each: -itemsize(each.dtype) if each.nbytes % LENGTH_BYTES else -inf)
    shapes = [(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]
    return make_header(shapes, {"format": "pt"}, in_order=True)


def _has(header: Header, chosen: Mapping[str, TensorSpec]) -> bool:
    return any(entry.name in chosen for entry in header.entries)


def _part(header: Header, chosen: Mapping[str, TensorSpec]) -> Header:
    """The header for the chosen tensors of a file: the file's own, to the byte, if all are
    chosen.
    """
    entries = [entry for entry in header.entries if entry.name in chosen]
    return (
        header
        if len(entries) == len(header.entries)
        else _header([chosen[e.name] for e in entries], header.metadata)
    )


def _check(source: Checkpoint, manifest: Manifest) -> None:
    """ValueError unless the publisher's files hold this manifest's tensors."""
    said = {
        entry.name: (entry.dtype, entry.shape)
        for header in source.headers.values()
        for entry in header.entries
    }
    there = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors}
    if said != there:
        differs = sorted(name for name in {*said, *there} if said.get(name) != there.get(name))
        raise ValueError(
            f"what its publisher says of its files is not true of tensor {differs[0]!r}"
        )


# --------------------------------------------------------------------------------------------------
# writing


class FileTarget(FilledMemory):
    """The output of a fetch, as memory that is made when the version is known. See `Memory`; it is
    never published.

    `out`: one file if it ends in .safetensors, else a directory. `names`: as `Hub.fetch` takes
    them. `force`: replace an existing output. Use as a context manager: at its end uncommitted
    files are kept for the next fetch to that output, or removed if nothing has arrived. Raises
    StateError, before anything is fetched, if the output exists or cannot be made, or another fetch
    writes there.
    """

    def __init__(
        self, out: Path, names: str | Sequence[str] | None = None, *, force: bool = False
    ) -> None:
        self._is_file = out.name.endswith(SUFFIX)
        self._out = Path(os.path.abspath(out) if self._is_file else os.path.realpath(out))
        self._force = force
        self.patterns = patterns(names)
        self._check_free()
        self._in_place = self._is_kept()
        place, other = (
            (self._out, self._out.parent) if self._in_place else (self._out.parent, self._out)
        )
        self._plan = Plan({})
        self._mappings: dict[str, mmap.mmap] = {}
        with _explained(f"nothing can be written in {place}"):
            self._unfinished = Unfinished(place, self._out.name)
        self._temporary = self._unfinished.directory
        try:
            with _explained(f"{other} cannot be cleared"):
                # left by a fetch that found the output otherwise
                if Unfinished.is_in(other, self._out.name):
                    Unfinished(other, self._out.name).remove()
        except BaseException:
            self._unfinished.keep()
            raise

    def __repr__(self) -> str:
        return f"<FileTarget {self._out}, {len(self._mappings)} files>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_free(self) -> None:
        with _explained(f"{self._out} cannot be looked at"):
            try:
                self._out.lstat()
            except FileNotFoundError:
                return
            if self._is_file and self._out.is_dir():
                raise StateError(
                    f"{self._out} is a directory: a name that ends in {SUFFIX} is one file"
                )
            if not self._is_file and not self._out.is_dir():
                raise StateError(
                    f"{self._out} is not a directory: give one, or a name that ends in {SUFFIX} "
                    f"for one file"
                )
            if not self._force and (self._is_file or self._holds_something()):
                what = "exists" if self._is_file else "exists and is not empty"
                raise StateError(
                    f"{self._out} {what}: take another place, or replace what is there (--force)"
                )

    def _is_kept(self) -> bool:
        """Whether the output is a directory that cannot be replaced as a whole: it has something in
        it, is of a filesystem of its own, or is a process' working directory.
        """
        if self._is_file or not self._out.is_dir():
            return False
        return self._holds_something() or self._out.is_mount() or self._out.samefile(".")

    def _holds_something(self) -> bool:
        stem = stem_of(self._out.name)
        return any(not path.name.startswith(stem) for path in self._out.iterdir())

    # ----------------------------------------------------------------------------------------------
    # as memory

    def map(self, manifest: Manifest) -> MappedRegions:
        """Make the files, with all their blocks, and find the wanted tensors' regions in them.

        Raises ManifestMismatch (a name that no tensor has; what the format cannot hold), StateError
        (no room, naming the bytes that are needed and that are free).
        """
        wanted = choose(self.patterns, manifest)
        self._plan = plan(manifest, wanted, self._out.name if self._is_file else None)
        self._mappings.clear()
        with _explained(f"{self._temporary} cannot be cleared"):
            for path in self._temporary.iterdir():  # of another version, perhaps
                if path.name not in self._plan.headers:
                    shutil.rmtree(
                        path
                    ) if path.is_dir() and not path.is_symlink() else path.unlink()
        for name, header in self._plan.headers.items():
            self._mappings[name] = self._allocate(self._temporary / name, header)
        views = {
            entry.name: memoryview(mapping)[at + entry.offset : at + entry.offset + entry.nbytes]
            for name, mapping in self._mappings.items()
            for at in [self._plan.headers[name].data_at]
            for entry in self._plan.headers[name].entries
        }
        return mapped(
            manifest,
            lambda tensors: [views[tensor.name] for tensor in tensors if tensor.name in views],
        )

    def _allocate(self, path: Path, header: Header) -> mmap.mmap:
        """The file, mapped. Bytes of an existing file stay: each is overwritten, or digested
        again.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o666)
            try:
                os.ftruncate(descriptor, header.file_bytes)
                os.posix_fallocate(descriptor, 0, header.file_bytes)
                mapping = mmap.mmap(descriptor, header.file_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            free = os.statvfs(self._temporary)
            rooms = (
                f"{self._plan.nbytes} bytes are needed, {free.f_bavail * free.f_frsize} are "
                f"free there"
            )
            raise StateError(f"{self._out} cannot be made: {rooms} ({error.strerror})") from error
        begin = header.encode()
        mapping[: len(begin)] = begin
        return mapping

    def recall(self, content_id: str, manifest: Manifest) -> Sequence[int | None] | None:
        """See `FilledMemory`."""
        if manifest.digest == "none":
            return None
        headers = [(name, header.encode()) for name, header in self._plan.headers.items()]
        key = sha256(
            repr((content_id, manifest.grid_id, manifest.digest, headers)).encode()
        ).digest()
        return self._unfinished.recall(key, manifest.chunk_count, WIDTHS[manifest.digest])

    def note(self, digests: Sequence[int | None]) -> None:
        """See `FilledMemory`."""
        self._unfinished.note(digests)

    # ----------------------------------------------------------------------------------------------
    # ending

    @property
    def files(self) -> tuple[Path, ...]:
        """Where the files are, once they are committed; the index last."""
        if self._is_file:
            return (self._out,)
        names = [*self._plan.headers, *([self._plan.index[0]] if self._plan.index else ())]
        return tuple([self._out / name for name in names])

    @property
    def nbytes(self) -> int:
        """Bytes of all files of tensors, headers included."""
        return self._plan.nbytes

    def commit(self) -> None:
        """Make everything durable and put it where it belongs. StateError if that cannot be
        done.
        """
        self._mappings.clear()
        with _explained(f"{self._out} cannot be written"):
            if self._plan.index is not None:
                (self._temporary / self._plan.index[0]).write_bytes(self._plan.index[1])
            for file in self.files:
                _sync(self._temporary / file.name)
            sync_directory(self._temporary)
            self._check_free()  # another process may have been faster
            if self._is_file or self._in_place:
                for file in self.files:
                    os.replace(self._temporary / file.name, file)
                    sync_directory(file.parent)
                self._temporary.rmdir()
            else:
                os.rename(self._temporary, self._out)
                sync_directory(self._out.parent)
            self._unfinished.remove()

    def close(self) -> Path | None:
        """Leave nothing behind but committed files, or arrived bytes: then the place of these is
        returned.
        """
        self._mappings.clear()
        return self._temporary if self._unfinished.keep() else None


def _sync(path: Path) -> None:
    """Bring a file to the disk, also writes through its mapping: Linux keeps both in one set of
    pages.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StateError(f"{what}: {error.strerror or error}") from error
