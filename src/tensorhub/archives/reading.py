"""The bytes of any chunk of any version: ranges of the anchor, then each frame of the chain, then
the digest.

A result is compared with the publisher's digest of the version that is read, and only then handed
out. If it differs, the chunk is read again version by version, so that the error names the object
that was damaged. Frames are opaque: the caller's `apply(frames, target)` turns a chunk of the first
frame's base, in `target`, into the chunk of the last one's version, and raises TensorHubError or
ValueError for a frame that is none. A frame as long as its chunk is the chunk itself.

Responsible for that, and for how much is fetched at once. Not responsible for which chunks are
read, nor for the codec.
"""

from __future__ import annotations

import os
import struct
import threading
from array import array
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain
from operator import gt
from typing import Any, Final, ParamSpec, Protocol, Self, TypeVar

from tensorhub.archives.anchors import REST, ChunkPlaces, Whole
from tensorhub.archives.catalogue import FRAME_LENGTH_BYTES, Anchor, Key, Version, VersionCatalogue
from tensorhub.archives.store import Buffer
from tensorhub.errors import IntegrityError, TensorHubError, some
from tensorhub.layouts import publication_of
from tensorhub.memory.safetensors import HEADERS_BYTES_MAX, Header, header_in
from tensorhub.model.digests import WIDTHS, hasher, unpack
from tensorhub.model.manifest import Chunk, Manifest

BATCH_BYTES: Final = 64 * 2**20  # that are fetched before they are put together; two at a time
REQUEST_BYTES: Final = 4 * 2**20
REQUESTS_AT_ONCE: Final = 16
BUILDERS: Final = min(8, len(os.sched_getaffinity(0)))  # threads that put chunks together
BUILT_BYTES: Final = 2**20  # by one of them, before the next ones are another's
CHUNKS_AHEAD: Final = 8  # of all ranks together
IDLE_READERS_MAX: Final = 2
TABLES_BYTES_MAX: Final = 2**30  # of a chain

P = ParamSpec("P")
T = TypeVar("T")

Apply = Callable[[Sequence[memoryview], memoryview], object]
# waits for what was asked of the store, and returns it; raises what ends the read
Wait = Callable[[Future[list[Buffer]]], list[Buffer]]


@dataclass(frozen=True)
class _Frames:
    """Where the frames of one shard of one version are. `ends`: beyond each chunk's frame, counted
    through all objects.
    """

    paths: Sequence[str]
    begins: Sequence[int]  # of each object
    ends: Sequence[int]

    def place(self, chunk: int) -> tuple[str, int, int]:
        """Object, offset and length; the length is 0 where the chunk is its base's."""
        begin = self.ends[chunk - 1] if chunk else 0
        if (length := self.ends[chunk] - begin) == 0:
            return "", 0, 0
        part = bisect_right(self.begins, begin) - 1
        return self.paths[part], begin - self.begins[part], length


@dataclass(frozen=True)
class _Wanted:
    """A chunk, its target, and for each version of the chain the ranges that make it; and how they
    are waited for.
    """

    chunk: int
    target: memoryview
    ranges: Sequence[Sequence[tuple[str, int, int]]]
    wait: Wait

    @property
    def nbytes(self) -> int:
        return sum(nbytes for each in self.ranges for _, _, nbytes in each)


@dataclass(frozen=True)
class _Batch:
    """Chunks, and the ranges of each object that make them, in their order."""

    wanted: Sequence[_Wanted] = ()
    got: Mapping[str, Iterator[Buffer]] = field(default_factory=dict)

    def pieces(self) -> Iterator[list[list[Buffer]]]:
        """Of each chunk, for each version of the chain: waits until they are there."""
        for its in self.wanted:
            yield [[next(self.got[path]) for path, _, _ in each] for each in its.ranges]


class _Step:
    """One version of a chain, with its tables."""

    def __init__(self, catalogue: VersionCatalogue, version: Version) -> None:
        self._catalogue, self.version = catalogue, version
        self.tables = catalogue.tables(version)

    def frames(self, shard: int, chunk_sizes: Sequence[int]) -> _Frames:
        version, table = self.version, self.tables[shard][1]
        lengths = array("I", struct.unpack(f"<{len(table) // FRAME_LENGTH_BYTES}I", table))
        ends, begins = (
            array("Q", accumulate(lengths)),
            [*accumulate(version.shards[shard].frames, initial=0)],
        )
        # each frame is in one object, and no longer than its chunk
        fits = ends[-1:] == array("Q", begins[-1:]) and {*begins} <= {0, *ends}
        if (lengths and not fits) or any(map(gt, lengths, chunk_sizes)):
            raise self._catalogue.changed(version.path)
        parts = range(len(begins) - 1)
        return _Frames([version.frames(shard, part) for part in parts], begins, ends)

    def digest(self, shard: int, chunk: int) -> bytes:
        width = WIDTHS[self.version.digest]
        return self.tables[shard][0][chunk * width : (chunk + 1) * width]


class Reader:
    """Reads one version. Its calls may come from several threads.

    `uses`: the paths of the manifests of its chain, which retention leaves as they are while it
    reads.
    """

    def __init__(self, catalogue: VersionCatalogue, key: Key, apply: Apply) -> None:
        """VersionUnavailable, IntegrityError, ArchiveUnavailable."""
        self.catalogue, self._apply = catalogue, apply
        found = catalogue.chain(key)
        self.version, self.uses = found[-1], frozenset([each.path for each in found])
        if len({tuple([shard.manifest for shard in each.shards]) for each in found}) > 1:
            raise IntegrityError(
                f"{catalogue.name(self.version.path)} is based on a version of other tensors"
            )
        if sum(each.index_bytes for each in found) > TABLES_BYTES_MAX:
            raise IntegrityError(
                f"{catalogue.name(self.version.path)} is based on versions with more than "
                f"{TABLES_BYTES_MAX} bytes of digests and lengths: it is not what TensorHub wrote"
            )
        self._headers_left = HEADERS_BYTES_MAX
        self._pool = ThreadPoolExecutor(REQUESTS_AT_ONCE, "tensorhub-archive")
        self._builders = ThreadPoolExecutor(BUILDERS, "tensorhub-archive")
        self._asked = set[Future[Any]]()  # requests that are not answered
        self._first = found[0]
        try:
            self._headers = [
                self._ask(self._header, path, size)
                for path, size in zip(self._files, self._anchor.files.values(), strict=True)
            ]
            self._steps = [*self._pool.map(partial(_Step, catalogue), found)]
        except BaseException:
            self.close()
            raise
        self.manifest = lru_cache(None)(lambda shard: catalogue.manifest(self.version, shard))
        self._places = lru_cache(None)(self._make_places)
        self._frames = lru_cache(None)(
            lambda step, shard: self._steps[step].frames(shard, self.manifest(shard).sizes)
        )

    def __repr__(self) -> str:
        return f"<Reader of {self.version.key} through {len(self._steps)} versions>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the threads; a running read ends first. Requests that no read waits for any
        more end by themselves.
        """
        self._builders.shutdown()
        self._pool.shutdown(wait=not self._asked)

    def digests(self, shard: int) -> list[int]:
        """The publisher's digests of a shard's chunks; empty: there are none."""
        width = WIDTHS[self.version.digest]
        return unpack(self._steps[-1].tables[shard][0], width) if width else []

    def prepare(self, shard: int) -> None:
        """Read by what the shard's chunks are found. After that, `read` waits for nothing but
        their bytes. Raises as `read`.
        """
        self._places(shard)

    def read(
        self,
        shard: int,
        chunks: Sequence[int],
        targets: Sequence[memoryview],
        wait: Wait = Future.result,
    ) -> None:
        """Fill each target with that chunk of that shard. After an error no target is written any
        more. `wait`: for each request, in this thread or another one.

        IntegrityError: an object of the chain was damaged, or is missing; the error names it.
        ArchiveUnavailable; what `wait` raises.
        """
        sizes, batch, size = self.manifest(shard).sizes, list[_Wanted](), 0
        fetched = _Batch()
        for chunk, target in zip(chunks, targets, strict=True):
            if target.nbytes != sizes[chunk]:
                raise ValueError(
                    f"chunk {chunk} has {sizes[chunk]} bytes, and its target {target.nbytes}"
                )
            batch.append(self._wanted(shard, chunk, target, wait))
            size += batch[-1].nbytes
            if size >= BATCH_BYTES:
                following = self._fetch(batch)  # while the one before is put together
                self._fill(shard, fetched)
                fetched, batch, size = following, [], 0
        following = self._fetch(batch)
        self._fill(shard, fetched)
        self._fill(shard, following)

    def _wanted(self, shard: int, chunk: int, target: memoryview, wait: Wait) -> _Wanted:
        steps = range(len(self._steps))
        ranges = [[*self._ranges(step, shard, chunk)] for step in steps]
        return _Wanted(chunk, target, ranges, wait)

    def _ask(self, call: Callable[P, T], *given: P.args, **named: P.kwargs) -> Future[T]:
        job = self._pool.submit(call, *given, **named)
        self._asked.add(job)
        job.add_done_callback(self._asked.discard)
        return job

    def _fetch(self, chunks: Sequence[_Wanted]) -> _Batch:
        wanted: dict[str, list[tuple[int, int]]] = {}  # of each object, ranges
        for step in reversed(range(len(self._steps))):  # frames first: every chunk needs all
            for each in chunks:
                for path, offset, nbytes in each.ranges[step]:
                    wanted.setdefault(path, []).append((offset, nbytes))
        store, at = self.catalogue.store, self.catalogue.at
        got: dict[str, Iterator[Buffer]] = {}
        for path, ranges in wanted.items():
            jobs = [self._ask(store.ranges, at(path), each) for each in _requests(ranges)]
            got[path] = chain.from_iterable(map(chunks[0].wait, jobs))
        return _Batch(chunks, got)

    def _fill(self, shard: int, batch: _Batch) -> None:
        jobs, some, size = list[Future[None]](), list[tuple[_Wanted, list[list[Buffer]]]](), 0
        try:
            for each in zip(batch.wanted, batch.pieces(), strict=True):
                some.append(each)
                size += each[0].target.nbytes
                if size >= BUILT_BYTES:
                    jobs.append(self._builders.submit(self._fill_some, shard, some))
                    some, size = [], 0
            jobs.append(self._builders.submit(self._fill_some, shard, some))
        finally:
            wait(jobs)  # whatever happens, no target is written after the call
        for job in jobs:
            job.result()

    def _fill_some(
        self, shard: int, chunks: Sequence[tuple[_Wanted, Sequence[Sequence[Buffer]]]]
    ) -> None:
        for each, pieces in chunks:
            try:
                self._build(0, pieces, each.target)
                is_right = self._is_right(-1, shard, each.chunk, each.target)
            except (ValueError, TensorHubError):
                is_right = False
            if not is_right:
                self._read_slowly(shard, each)

    def _read_slowly(self, shard: int, wanted: _Wanted) -> None:
        """Once more, with a look at each version, to find the object that is damaged."""
        chunk, target = wanted.chunk, wanted.target
        (steps,) = self._fetch([wanted]).pieces()
        for step, pieces in enumerate(steps):
            reason = "has not the publisher's digest"
            try:
                self._build(step, [pieces], target)
                is_right = self._is_right(step, shard, chunk, target)
            except (ValueError, TensorHubError) as error:
                is_right, reason = False, f"cannot be decoded ({error})"
            if not is_right:
                version = self._steps[step].version
                paths = [path for path, _, _ in wanted.ranges[step]] or [version.index]
                objects = [self.catalogue.name(path) for path in dict.fromkeys(paths)]
                raise IntegrityError(
                    f"chunk {chunk} of shard {shard} of version {version.key} of "
                    f"{version.model!r} {reason}: {some(objects)} was damaged, or changed by "
                    f"another process"
                )

    # ----------------------------------------------------------------------------------------------
    # one chunk

    def _ranges(self, step: int, shard: int, chunk: int) -> Iterator[tuple[str, int, int]]:
        if step == 0:
            for file, offset, nbytes in self._places(shard).places(chunk):
                path = self._first.rest(shard) if file == REST else self._files[file]
                yield path, offset, nbytes
        elif (place := self._frames(step, shard).place(chunk))[2]:
            yield place

    def _build(self, first: int, pieces: Sequence[Sequence[Buffer]], target: memoryview) -> None:
        """Make the chunk in `target`, with the pieces of the chain's versions from `first` on."""
        frames = list[memoryview]()
        for step, its in enumerate(pieces, first):
            if step and its and len(its[0]) < len(target):
                frames.append(memoryview(its[0]))
            elif its:
                frames, at = [], 0
                for piece in its:
                    target[at : at + len(piece)] = memoryview(piece)
                    at += len(piece)
        if frames:
            self._apply(frames, target)

    def _is_right(self, step: int, shard: int, chunk: int, target: memoryview) -> bool:
        algorithm = self.version.digest
        if algorithm == "none":
            return True
        digest = hasher(algorithm)
        digest.update(target)
        return digest.digest() == self._steps[step].digest(shard, chunk)

    # ----------------------------------------------------------------------------------------------
    # the anchor

    @property
    def _anchor(self) -> Anchor:
        anchor = self._first.anchor
        assert anchor is not None  # or it would have a base, and the chain would go on
        return anchor

    @cached_property
    def _files(self) -> list[str]:
        return [f"{self._anchor.directory}/{name}" for name in self._anchor.files]

    @cached_property
    def _whole(self) -> Whole:
        catalogue, wholes = self.catalogue, self.catalogue.wholes
        if (whole := wholes.get(self._first.publication)) is None:
            published = catalogue.published(self._first)
            parts = catalogue.parts(self._first)
            try:
                whole = Whole(published, publication_of(published, parts))
            except TensorHubError as error:
                raise IntegrityError(f"{catalogue.name(self._first.path)}: {error}") from None
            wholes[self._first.publication] = whole
        assert isinstance(whole, Whole)
        return whole

    def _header(self, path: str, size: int) -> Header:
        def read(offset: int, nbytes: int) -> bytes:
            (found,) = self.catalogue.store.ranges(self.catalogue.at(path), [(offset, nbytes)])
            return bytes(found)

        try:
            header = header_in(size, read, self._headers_left)
        except ValueError as error:
            raise IntegrityError(f"{self.catalogue.changed(path)} (it is {error})") from None
        self._headers_left -= len(header.text)
        return header

    def _make_places(self, shard: int) -> ChunkPlaces:
        whole, headers = self._whole, [each.result() for each in self._headers]
        places = ChunkPlaces(whole, headers, self.manifest(shard), shard)
        if places.missing or places.rest_bytes != self._first.shards[shard].rest:
            raise IntegrityError(
                f"{self.catalogue.name(self._anchor.directory)} does not hold what "
                f"{self.catalogue.name(self._first.path)} says"
            )
        return places


def _requests(ranges: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """These ranges in requests that are made at once."""
    request, size = list[tuple[int, int]](), 0
    for offset, nbytes in ranges:
        request.append((offset, nbytes))
        size += nbytes
        if size >= REQUEST_BYTES:
            yield request
            request, size = [], 0
    if request:
        yield request


class Readers:
    """Readers of one model's versions, of which a few stay open. For any thread."""

    def __init__(self, catalogue: VersionCatalogue, apply: Apply, idle_max: int = IDLE_READERS_MAX):
        self.catalogue, self._apply, self._idle_max = catalogue, apply, idle_max
        self._lock = threading.Lock()
        self._opening: dict[Key, threading.Lock] = {}
        self._open: dict[Key, Reader] = {}  # the last used is last
        self._begun: dict[Key, frozenset[str]] = {}  # what readers use that are being opened
        self._users = Counter[Key]()

    def __repr__(self) -> str:
        return f"<Readers of {self.catalogue!r}: {len(self._open)} open>"

    @contextmanager
    def reading(self, key: Key) -> Iterator[Reader]:
        """A reader of that version, which is open within the block. Raises as `Reader`."""
        with self._lock:
            self._users[key] += 1
            opening = self._opening.setdefault(key, threading.Lock())
        try:
            with opening:
                if (reader := self._open.get(key)) is None:
                    reader = self._begin(key)
                with self._lock:
                    self._begun.pop(key, None)
                    self._open.pop(key, None)
                    self._open[key] = reader
            yield reader
        finally:
            with self._lock:
                self._users[key] -= 1
            self.close_idle(self._idle_max)

    def _begin(self, key: Key) -> Reader:
        """A new one, whose chain is in use from before it is read."""
        with self._lock:
            chain = self.catalogue.chain(key)
            self._begun[key] = frozenset([each.path for each in chain])
        try:
            return Reader(self.catalogue, key, self._apply)
        except BaseException:
            with self._lock:
                del self._begun[key]
            raise

    def __contains__(self, key: Key) -> bool:
        """Whether a reader of that version is open."""
        return key in self._open

    @property
    def uses(self) -> frozenset[str]:
        """See `Reader.uses`, of all that are open, or are being opened."""
        with self._lock:
            is_open = (each.uses for each in self._open.values())
            return frozenset().union(*self._begun.values(), *is_open)

    def close_idle(self, but: int = 0) -> None:
        """Close the readers that nothing uses, but for so many that were used last."""
        with self._lock:
            idle = [key for key in self._open if not self._users[key]]
            gone = [self._open.pop(key) for key in idle[: max(0, len(idle) - but)]]
            for key in [key for key, users in self._users.items() if not users]:
                del self._users[key], self._opening[key]
        for reader in gone:
            reader.close()


class Held(Protocol):
    """A version that can be read chunk by chunk, as by a `Reader`."""

    def manifest(self, shard: int, /) -> Manifest: ...

    def read(self, shard: int, chunks: Sequence[int], targets: Sequence[memoryview], /) -> None: ...


class Views:
    """A version as the memory of its ranks, to make an anchor of it. A few chunks of each rank are
    in memory.
    """

    def __init__(self, reader: Held, ranks: int) -> None:
        self._reader = reader
        self._starts: dict[int, list[tuple[int, int]]] = {}
        self._kept: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        self._ahead = max(1, CHUNKS_AHEAD // ranks)
        self._kept_max = 2 * self._ahead * ranks

    def __call__(self, rank: int, region: int, offset: int, nbytes: int) -> Iterator[memoryview]:
        manifest: Manifest = self._reader.manifest(rank)
        if rank not in self._starts:
            self._starts[rank] = [(each.region, each.offset) for each in manifest.chunks]
        number = bisect_right(self._starts[rank], (region, offset)) - 1
        while nbytes:
            chunk = manifest.chunks[number]
            at = offset - chunk.offset
            taken = min(nbytes, chunk.nbytes - at)
            yield self._chunk(rank, chunk)[at : at + taken]
            number, offset, nbytes = number + 1, offset + taken, nbytes - taken

    def _chunk(self, rank: int, chunk: Chunk) -> memoryview:
        """The chunk. With it, the following ones of its region are fetched."""
        if (rank, chunk.index) not in self._kept:
            chunks = self._reader.manifest(rank).chunks[chunk.index :][: self._ahead]
            found = [
                (each.index, memoryview(bytearray(each.nbytes)))
                for each in chunks
                if each.region == chunk.region
            ]
            self._reader.read(rank, [index for index, _ in found], [view for _, view in found])
            self._kept.update(((rank, index), view) for index, view in found)
            while len(self._kept) > self._kept_max:
                self._kept.popitem(last=False)
        self._kept.move_to_end((rank, chunk.index))
        return self._kept[rank, chunk.index]
