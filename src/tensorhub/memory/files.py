"""Safetensors files as published memory: mapped, and served where they are. Without torch, and
without a copy.

Nothing that serves this memory reads the mapping in user space, because that would end the process
with SIGBUS if the file was truncated. A send call from the mapping only fails, with EFAULT, and
costs its reader a retry. Digests are made by reading the file, all of them before the publish. If a
file is changed while it is served, its readers fail (a digest does not fit, or the source is lost),
but no reader gets other bytes.

Responsible for opening files, for their digests, and for noticing that they were written. Not
responsible for their format.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from tensorhub.errors import ManifestMismatch, RegistrationError
from tensorhub.memory.checkpoint import Checkpoint, find_files
from tensorhub.memory.regions import CallersMemory, MappedRegions
from tensorhub.memory.safetensors import Entry, Header, open_file, read_from
from tensorhub.model.digests import hasher
from tensorhub.model.manifest import Chunk, Manifest, TensorDescription

READ_BYTES = 4 * 2**20  # of one read that is then digested, out of the cache

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class _OpenFile:
    path: Path
    descriptor: int
    header: Header
    mapping: memoryview
    stamp: tuple[int, int]
    base: int  # the bytes of all files before: stands for an address

    @classmethod
    def open(cls, path: Path, base: int) -> _OpenFile:
        descriptor = open_file(path)
        try:
            stamp = _stamp(descriptor)  # before the header is read: later writes are noticed
            header = read_from(descriptor, path)
            mapping = memoryview(mmap.mmap(descriptor, header.file_bytes, prot=mmap.PROT_READ))
        except BaseException:
            os.close(descriptor)
            raise
        return cls(path, descriptor, header, mapping, stamp, base)

    def is_changed(self) -> bool:
        return _stamp(self.descriptor) != self.stamp


def _stamp(descriptor: int) -> tuple[int, int]:
    """What every write changes. Not the ctime: a rename over the path leaves this file intact, and
    changes its ctime.
    """
    now = os.fstat(descriptor)
    return now.st_size, now.st_mtime_ns


class FileMemory(CallersMemory):
    """The tensors of a safetensors file, a directory of them, or an index, as memory that can be
    published.

    OSError for an unreadable file; ValueError, naming file and reason, for files that are not one
    whole model. Close it after the hub that serves it.
    """

    digests_first = True

    def __init__(self, path: Path) -> None:
        # told of the digests, by the thread that makes them
        self.progress: Progress = lambda done, total: None
        self._files: list[_OpenFile] = []
        self._digests: tuple[str, list[int]] | None = None  # of this manifest
        try:
            paths, index = find_files(path)
            base = 0
            for each in paths:
                self._files.append(_OpenFile.open(each, base))
                base += self._files[-1].header.file_bytes
            checkpoint = Checkpoint({file.path.name: file.header for file in self._files}, index)
        except ValueError as error:
            self.close()
            raise ValueError(
                str(error) if str(path) in str(error) else f"{path}: {error}"
            ) from error
        except BaseException:
            self.close()
            raise
        self.metadata = checkpoint.encode()
        self._places = {
            entry.name: (file, entry) for file in self._files for entry in file.header.entries
        }
        if not self._places:
            self.close()
            raise ValueError(f"{path} holds no tensor")
        self.descriptions = tuple(
            [_described(file, entry) for file, entry in self._places.values()]
        )

    def __repr__(self) -> str:
        return f"<FileMemory of {len(self._files)} files, {len(self.descriptions)} tensors>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the files. Mappings stay readable for running reads."""
        while self._files:
            os.close(self._files.pop().descriptor)

    @property
    def names(self) -> tuple[str, ...]:
        """The files, as they were opened."""
        return tuple([str(file.path) for file in self._files])

    # ----------------------------------------------------------------------------------------------
    # changes

    def changed(self) -> str | None:
        """Which file was written since it was opened, as a sentence; None if none was. A file that
        was renamed, removed or replaced stays open here, and does not count.
        """
        for file in self._files:
            if file.is_changed():
                return (
                    f"{file.path} was written since it was opened; its readers may have failed, "
                    f"none has other bytes"
                )
        return None

    def check_unreplaced(self) -> None:
        """RegistrationError if a file was written."""
        if (change := self.changed()) is not None:
            raise RegistrationError(f"{change}. Publish it again")

    def versions(self, tensors: Iterable[int] | None = None) -> tuple[int, ...]:
        """When each tensor's file was written last, in nanoseconds."""
        times = {file.path: _stamp(file.descriptor)[1] for file in self._files}
        counts = [times[file.path] for file, _ in self._places.values()]
        return tuple(counts if tensors is None else [counts[number] for number in tensors])

    # ----------------------------------------------------------------------------------------------
    # digests

    def digests(self, manifest: Manifest, check: Callable[[], object]) -> Sequence[int] | None:
        """Every chunk's digest, by reading the files. `check` is called between two reads, and ends
        it by raising.

        RegistrationError if a file changes meanwhile.
        """
        if manifest.digest == "none":
            return None
        if self._digests is None or self._digests[0] != manifest.manifest_id:
            self._digests = manifest.manifest_id, list(self._make_digests(manifest, check))
        self.check_unreplaced()
        return self._digests[1]

    def _make_digests(self, manifest: Manifest, check: Callable[[], object]) -> Iterator[int]:
        buffer = memoryview(bytearray(READ_BYTES))
        done = told = 0

        def went_on(count: int) -> None:
            nonlocal done, told
            done += count
            if done - told >= READ_BYTES:
                told = done
                check()
                self.progress(done, manifest.nbytes)

        for chunk in manifest.chunks:
            yield self._read_digest(manifest, chunk, buffer, went_on)
        self.progress(done, manifest.nbytes)

    def digest(self, manifest: Manifest, chunk: int) -> int | None:
        """A chunk's digest as the file is now, by reading it. None if it cannot be read (any
        more).
        """
        buffer = memoryview(bytearray(READ_BYTES))
        try:
            return self._read_digest(manifest, manifest.chunks[chunk], buffer, lambda count: None)
        except RegistrationError:
            return None

    def _read_digest(
        self, manifest: Manifest, chunk: Chunk, buffer: memoryview, went_on: Callable[[int], object]
    ) -> int:
        file, at = self._place(manifest.by_region[chunk.region][0].name)
        digest = hasher(manifest.digest)
        for part in _read(file, at + chunk.offset, chunk.nbytes, buffer):
            digest.update(part)
            went_on(len(part))
        return int.from_bytes(digest.digest(), "big")

    def _place(self, tensor: str) -> tuple[_OpenFile, int]:
        file, entry = self._places[tensor]
        return file, file.header.data_at + entry.offset

    # ----------------------------------------------------------------------------------------------
    # mapping

    def map(self, manifest: Manifest) -> MappedRegions:
        """The regions, which cannot be written. ManifestMismatch for any manifest but this memory's
        own.
        """
        regions = []
        for region, tensors in zip(manifest.regions, manifest.by_region, strict=True):
            if len(tensors) != 1 or tensors[0].name not in self._places:
                raise ManifestMismatch(
                    f"{self!r} is not what tensor {tensors[0].name!r} is in, and cannot be filled"
                )
            file, at = self._place(tensors[0].name)
            regions.append(file.mapping[at : at + region.nbytes])
        return MappedRegions(tuple(regions), ())


def _read(file: _OpenFile, at: int, nbytes: int, buffer: memoryview) -> Iterator[memoryview]:
    """These bytes of the file, a buffer at a time."""
    while nbytes:
        try:
            count = os.preadv(file.descriptor, [buffer[: min(nbytes, READ_BYTES)]], at)
        except OSError as error:
            raise RegistrationError(f"{file.path} cannot be read: {error.strerror}") from error
        if not count:
            raise RegistrationError(
                f"{file.path} became shorter while it was read. Publish it again"
            )
        yield buffer[:count]
        at, nbytes = at + count, nbytes - count


def _described(file: _OpenFile, entry: Entry) -> TensorDescription:
    address = file.base + file.header.data_at + entry.offset
    return TensorDescription(entry.name, entry.dtype, entry.shape, address, entry.nbytes)
