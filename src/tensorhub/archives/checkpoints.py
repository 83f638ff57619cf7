"""A checkpoint in a store as published memory: its tensors are read by ranges into host memory, and
no file is written.

When it is opened, the headers are read. The tensors are read, and digested as they arrive, when the
digests are asked for, which is before the publish is. Each range must be of the object that was
opened, and each object must still be that when all is read. Later changes of the objects do not
matter.

Responsible for that. Not responsible for the memory, which the caller gives, nor for the files'
format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Final, Self
from urllib.parse import unquote

from tensorhub.archives.store import TIMEOUT_S, Store, Stored
from tensorhub.archives.store_faults import MissingObject
from tensorhub.errors import ArchiveUnavailable, ManifestMismatch
from tensorhub.memory.checkpoint import (
    FILES_MAX,
    INDEX_BYTES_MAX,
    SUFFIX,
    Checkpoint,
    Index,
    choose,
)
from tensorhub.memory.regions import CallersMemory, MappedRegions
from tensorhub.memory.safetensors import HEADERS_BYTES_MAX, Entry, Header, header_in
from tensorhub.model.digests import hasher
from tensorhub.model.manifest import Chunk, Manifest, TensorDescription

REQUEST_BYTES: Final = 8 * 2**20  # if no chunk has more
REQUESTS_AT_ONCE: Final = 16
CHECK_S: Final = 0.25  # between looks whether the load is still wanted
ALIGNMENT: Final = 64  # of each file's tensors in memory

Progress = Callable[[int, int], None]  # bytes done, bytes in all


@dataclass(frozen=True, slots=True)
class _File:
    """`base`: where in memory its tensors begin."""

    stored: Stored
    header: Header
    base: int


@dataclass(frozen=True, slots=True)
class _Run:
    """Chunks that follow one another in one file, from this byte of its tensors on to that one."""

    file: _File
    begin: int
    end: int
    chunks: Sequence[Chunk]


class CheckpointMemory(CallersMemory):
    """The tensors of a safetensors object, a directory of them, or an index, at a URL.

    ArchiveUnavailable: nothing is there, or it cannot be read. ValueError, naming object and
    reason: the objects are not one whole model. IntegrityError: they change meanwhile.
    """

    digests_first = True

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        # told of what is read, by the thread that waits for it
        self.progress: Progress = lambda done, total: None
        self._bytes = memoryview(b"")
        self._digests: tuple[str, list[int]] | None = None  # of this manifest
        directory, name = url.rstrip("/"), ""
        if directory.endswith((SUFFIX, ".json")):
            directory, _, name = directory.rpartition("/")
        self._store = Store(f"{directory}/", timeout_s=timeout_s)
        try:
            checkpoint = self._open(unquote(name))
        except MissingObject as error:
            raise ArchiveUnavailable(f"{error}; correct the URL") from None
        if not self._places:
            raise ValueError(f"{url} holds no tensor")
        self.metadata = checkpoint.encode()
        self.descriptions = tuple(
            [
                TensorDescription(
                    entry.name, entry.dtype, entry.shape, file.base + entry.offset, entry.nbytes
                )
                for file, entry in self._places.values()
            ]
        )

    def __repr__(self) -> str:
        return f"<CheckpointMemory of {len(self._files)} files at {self._store.url}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _open(self, name: str) -> Checkpoint:
        url, index = self._store.name(name), None
        if not name:
            if not (names := self._store.names()):
                raise ArchiveUnavailable(f"there is nothing in {url}: correct the URL")
            name, files = choose(names, url)
        if name.endswith(".json"):
            try:
                index = Index.parse(name, self._store.read(name, INDEX_BYTES_MAX))
            except ValueError as error:
                said = f"{self._store.name(name)} is not an index of safetensors files: {error}"
                raise ValueError(said) from error
            files = sorted(set(index.weight_map.values()))
        elif name:
            files = [name]
        if len(files) > FILES_MAX:
            raise ValueError(f"{url} has more than {FILES_MAX} files")
        self._files, base = list[_File](), 0
        self._headers_left = HEADERS_BYTES_MAX
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, "tensorhub-checkpoint") as pool:
            for stored, header in pool.map(self._header, files):
                self._files.append(_File(stored, header, base))
                base += -(-(header.file_bytes - header.data_at) // ALIGNMENT) * ALIGNMENT
        self.memory_bytes = base
        self._places: dict[str, tuple[_File, Entry]] = {
            entry.name: (file, entry) for file in self._files for entry in file.header.entries
        }
        try:
            return Checkpoint({file.stored.path: file.header for file in self._files}, index)
        except ValueError as error:
            raise ValueError(f"{url}: {error}") from error

    def _header(self, name: str) -> tuple[Stored, Header]:
        stored = self._store.look(name)
        try:
            header = header_in(
                stored.nbytes,
                lambda at, n: bytes(self._store.part(stored, at, n)),
                self._headers_left,
            )
        except ValueError as error:
            raise ValueError(f"{self._store.name(name)} is {error}") from error
        self._headers_left -= len(header.text)
        return stored, header

    @property
    def names(self) -> tuple[str, ...]:
        """The objects, by their URLs."""
        return tuple([self._store.name(file.stored.path) for file in self._files])

    def take(self, memory: memoryview) -> None:
        """Use this memory, of `memory_bytes` bytes, from now on."""
        self._bytes = memory

    def changed(self) -> str | None:
        """As of files; what is served is memory of this process, which nothing else writes."""
        return None

    # ----------------------------------------------------------------------------------------------
    # reading

    def digests(self, manifest: Manifest, check: Callable[[], object]) -> Sequence[int] | None:
        """Every chunk's digest, by reading all objects into memory. `check` is called four times a
        second, and ends it by raising.

        ArchiveUnavailable; IntegrityError if an object changes meanwhile.
        """
        if self._digests is None or self._digests[0] != manifest.manifest_id:
            self._digests = manifest.manifest_id, self._load(manifest, check)
        return self._digests[1] if manifest.digest != "none" else None

    def _load(self, manifest: Manifest, check: Callable[[], object]) -> list[int]:
        digests, done = [0] * manifest.chunk_count, 0
        runs, reading = self._runs(manifest), set[Future[int]]()
        with ThreadPoolExecutor(REQUESTS_AT_ONCE, "tensorhub-checkpoint") as pool:
            while True:
                for run in islice(runs, REQUESTS_AT_ONCE - len(reading)):
                    reading.add(pool.submit(self._read, run, manifest.digest, digests))
                if not reading:
                    break
                over, reading = wait(reading, CHECK_S, FIRST_COMPLETED)
                check()
                done += sum(each.result() for each in over)
                self.progress(done, manifest.nbytes)
            files = [file.stored for file in self._files]
            for was, now in zip(files, pool.map(self._look_again, files), strict=True):
                self._store.check_same(was, now)
        return digests

    def _look_again(self, stored: Stored) -> Stored:
        return self._store.look(stored.path)

    def _runs(self, manifest: Manifest) -> Iterator[_Run]:
        chunks, begin, end = list[Chunk](), 0, 0
        last = self._files[0]
        for chunk in manifest.chunks:
            file, entry = self._places[manifest.by_region[chunk.region][0].name]
            at = entry.offset + chunk.offset
            if file is not last or at != end or at + chunk.nbytes - begin > REQUEST_BYTES:
                if chunks:
                    yield _Run(last, begin, end, chunks)
                chunks, begin, last = [], at, file
            chunks.append(chunk)
            end = at + chunk.nbytes
        if chunks:
            yield _Run(last, begin, end, chunks)

    def _read(self, run: _Run, algorithm: str, digests: list[int]) -> int:
        file, nbytes, at = run.file, run.end - run.begin, run.file.base + run.begin
        data = self._store.part(file.stored, file.header.data_at + run.begin, nbytes)
        self._bytes[at : at + nbytes] = memoryview(data)
        for chunk in run.chunks:
            if algorithm != "none":
                digest = hasher(algorithm)
                digest.update(self._bytes[at : at + chunk.nbytes])
                digests[chunk.index] = int.from_bytes(digest.digest(), "big")
            at += chunk.nbytes
        return nbytes

    # ----------------------------------------------------------------------------------------------
    # mapping

    def map(self, manifest: Manifest) -> MappedRegions:
        """The regions. ManifestMismatch for any manifest but this memory's own."""
        regions = []
        for region, tensors in zip(manifest.regions, manifest.by_region, strict=True):
            if len(tensors) != 1 or tensors[0].name not in self._places:
                raise ManifestMismatch(
                    f"{self!r} is not what tensor {tensors[0].name!r} is in, and cannot be filled"
                )
            file, entry = self._places[tensors[0].name]
            at = file.base + entry.offset
            regions.append(self._bytes[at : at + region.nbytes].toreadonly())
        return MappedRegions(tuple(regions), ())
