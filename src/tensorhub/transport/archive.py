"""The archive transport: a reader reads an archived version out of the bucket by itself, and the
worker that serves the archive takes no part.

The worker says where the version is. Any worker that has the token can say anything, and the reader
goes there with its own credentials. So it goes only where the URL begins as one of `Options.direct`
does, and only reads the version that has the right's content id. What is found there is hostile, as
whatever a source says: `archives` bounds it, and the lane compares digests.

No generation word is looked at: an archived version never changes. Whatever fails here, fails the
reader once: its next channel to that source is opened by another transport.

Responsible for who may read where, and for waiting. Not responsible for which objects make a chunk
(`archives.reading`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Final, TypeVar

from tensorhub import deltas
from tensorhub.archives.catalogue import Key, VersionCatalogue
from tensorhub.archives.reading import Reader, Readers
from tensorhub.archives.store import Store
from tensorhub.errors import (
    IntegrityError,
    TensorHubError,
    TransportUnavailable,
    VersionUnavailable,
    install,
    shown,
)
from tensorhub.memory.base import Base
from tensorhub.memory.chunks import ChunkMemory
from tensorhub.model.accesses import Access
from tensorhub.transport.base import (
    Arrival,
    Channel,
    Cutter,
    Destination,
    Lacking,
    NotShared,
    ReadFailure,
    ReadRight,
    Unusable,
)
from tensorhub.transport.connected import ConnectedTransport, ReadClient
from tensorhub.transport.dialect import Dialect, Find
from tensorhub.transport.owner import CannotServe, OwnerSession, OwnerSide, ServedReader
from tensorhub.transport.registry import Local, MeantTransportUnavailable
from tensorhub.types import (
    U64,
    Incarnation,
    Length,
    Location,
    Name,
    Range,
    RegistrationId,
    archive_place,
)

GROUP_BYTES: Final = 16 * 2**20  # that one thread reads at a time
LANES: Final = 4  # together as many requests as the archive's reader makes at once

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ArchivedPlace:
    """Where a shard of a version is: in that archive, of that model, as its manifests count."""

    url: Annotated[str, Length(2048)]
    model: Name
    lineage: U64
    number: U64
    shard: Annotated[int, Range(0, 2**20)]

    def __str__(self) -> str:
        return f"version {self.lineage}-{self.number} of {self.model!r} in {shown(self.url)}"


DIALECT = Dialect("archive", from_reader={Find: 1}, from_owner={ArchivedPlace: 2})

# --------------------------------------------------------------------------------------------------
# the owner


class ArchiveOwner(OwnerSide):
    """It tells the readers of archived copies where the originals are. They connect as tcp's do."""

    dialect = DIALECT

    def __init__(self) -> None:
        self._places: dict[str, ArchivedPlace] = {}  # by registration

    def endpoint(self, address: str, unix_address: str | None) -> str | None:
        return None

    def session(self, reader: ServedReader) -> OwnerSession:
        return _Session(reader, self._places)

    def offer(self, registration: str, place: ArchivedPlace) -> None:
        """That registration's content is there as well, until it is forgotten."""
        self._places[registration] = place

    def forget(self, registration: RegistrationId) -> None:
        self._places.pop(registration, None)


class _Session:
    bytes_max = 0
    refusal = "its bytes are in an archive: nothing is sent this way"

    def __init__(self, reader: ServedReader, places: dict[str, ArchivedPlace]) -> None:
        self._connection, self._places = reader.connection, places

    def answer(self, request: int, asked: Find) -> None:
        """Say where it is."""
        place = self._places.get(asked.registration)
        if place is None:
            raise NotShared("it is in no archive")
        self._connection.send(DIALECT.reply(request, place))

    def serve(self, request: int, access: Access, memory: ChunkMemory) -> None:
        raise CannotServe(self.refusal)

    def close(self) -> None:
        """Nothing was set up."""


# --------------------------------------------------------------------------------------------------
# the reader


class _Waiting:
    """Waits for a bucket: not for long if nothing comes from there, nor once the read is cut."""

    def __init__(self, cutter: Cutter, stall_s: float) -> None:
        self._cutter, self._stall_s = cutter, stall_s
        self._is_cut = Future[None]()
        self._came = 0.0  # when something came last
        cutter.attach(self._cut)

    def _cut(self) -> None:
        if not self._is_cut.done():
            self._is_cut.set_result(None)

    def check(self) -> None:
        if self._cutter.is_cut:
            raise ReadFailure("lost", "the read was given up")

    def result(self, job: Future[T]) -> T:
        """What the job returns. ReadFailure."""
        began, first = time.monotonic(), list[Future[Any]]([job, self._is_cut])
        while not job.done():
            left_s = max(began, self._came) + self._stall_s - time.monotonic()
            if left_s <= 0:
                raise ReadFailure("stalled", f"the bucket was silent for {self._stall_s:g} s")
            wait(first, left_s, FIRST_COMPLETED)
            self.check()
        self._came = time.monotonic()
        return job.result()


class _Archive:
    """One model's versions in one bucket, as this process reads them."""

    def __init__(self) -> None:
        self._opening = threading.Lock()
        self.readers: Readers | None = None

    def open(self, place: ArchivedPlace, timeout_s: float) -> tuple[Reader, ExitStack]:
        """A reader of that version, until the stack is closed. Raises as `Reader`."""
        key = Key(place.lineage, place.number)
        with ExitStack() as stack:
            with self._opening:
                if self.readers is None:
                    catalogue = VersionCatalogue(Store(place.url, timeout_s=timeout_s), place.model)
                    self.readers = Readers(catalogue, deltas.apply)
                if key not in self.readers:
                    self.readers.catalogue.find(key)
                reader = stack.enter_context(self.readers.reading(key))
            if place.shard < len(reader.version.shards):
                reader.prepare(place.shard)
            return reader, stack.pop_all()

    def close_idle(self) -> None:
        if self.readers is not None:
            self.readers.close_idle()


class ArchiveTransport(ConnectedTransport):
    """Reads archives in object storage that this process may read."""

    dialect = DIALECT
    lanes = LANES
    waits = True
    of_archives = True
    private = True  # as far as the URL of the bucket says https
    via = "tcp"

    def __init__(self, local: Local) -> None:
        if find_spec("obstore") is None:
            kind = MeantTransportUnavailable if local.options.direct else TransportUnavailable
            raise kind(f"archives need obstore: {install('archive')}")
        super().__init__(local)
        self._allowed = [archive_place(each) or () for each in local.options.direct]
        self._lock = threading.Lock()  # guards what follows
        self._archives: dict[tuple[str, str], _Archive] = {}  # by URL and model
        # why the next channel is to be another transport's
        self._faults: dict[tuple[Incarnation, RegistrationId], Unusable] = {}

    def reaches(self, here: Location, there: Location) -> bool:
        """Wherever the workers are, if this process may read any archive."""
        return bool(self._allowed)

    def serve(self) -> OwnerSide:
        return ArchiveOwner()

    def channel(self, client: ReadClient, destination: Destination) -> Channel:
        """Ask where it is, and open that version."""
        right, cutter = client.right, client.cutter
        with self._lock:
            fault = self._faults.pop((right.incarnation, right.registration), None)
        if fault is not None:
            raise fault
        place = client.find(ArchivedPlace)
        client.close()  # nothing else is asked of the owner
        self._check_allowed(place)
        waiting = _Waiting(cutter, self._options.stall_timeout_s)
        try:
            reader, stack = self._open(place, waiting)
            with stack:
                _check_same(place, reader, right, destination)
                read = _Read(reader, place.shard, destination, right.base, waiting)
                stack.callback(cutter.detach)
                return ArchiveChannel(read, stack.pop_all(), lambda why: self._failed(right, why))
        except BaseException:
            cutter.detach()
            raise

    def _check_allowed(self, place: ArchivedPlace) -> None:
        """NotShared: this process was not told that it may read there."""
        found = archive_place(place.url)
        if found is None or not any(found[: len(each)] == each for each in self._allowed if each):
            raise NotShared(
                f"{shown(place.url)} begins with none of Options.direct: its worker sends it"
            )

    def _open(self, place: ArchivedPlace, waiting: _Waiting) -> tuple[Reader, ExitStack]:
        """Unusable: the version cannot be read there."""
        with self._lock:
            archive = self._archives.setdefault((place.url, place.model), _Archive())
        pool = ThreadPoolExecutor(1, "tensorhub-archive-opening")
        job = pool.submit(archive.open, place, 2 * self._options.stall_timeout_s)
        try:
            reader, stack = waiting.result(job)
        except ReadFailure as failure:
            job.add_done_callback(_close_unused)
            if failure.reason == "stalled":
                raise Unusable(f"{place}: {failure.detail}") from failure
            raise
        except (IntegrityError, VersionUnavailable) as error:
            raise NotShared(str(error)) from error
        except TensorHubError as error:
            raise Unusable(str(error)) from error
        finally:
            pool.shutdown(wait=job.done())
        closing = ExitStack()
        closing.callback(self._left, (place.url, place.model), archive)
        closing.push(stack)
        return reader, closing

    def _left(self, at: tuple[str, str], archive: _Archive) -> None:
        """A channel has let go of that archive: nothing else may do so."""
        with self._lock:
            is_kept = self._archives.get(at) is archive
        if not is_kept:
            archive.close_idle()

    def _failed(self, right: ReadRight, why: Unusable) -> None:
        with self._lock:
            self._faults[right.incarnation, right.registration] = why

    def sweep(self) -> None:
        """See `Transport.sweep`."""
        super().sweep()
        self._drop()

    def close(self) -> None:
        """See `Transport.close`."""
        super().close()
        self._drop()

    def _drop(self) -> None:
        """What channels use goes with the last of them."""
        with self._lock:
            archives, self._archives = self._archives, {}
            self._faults.clear()
        for each in archives.values():
            each.close_idle()


def _close_unused(job: Future[tuple[Reader, ExitStack]]) -> None:
    """The version was opened too late."""
    if job.exception() is None:
        job.result()[1].close()


def _check_same(
    place: ArchivedPlace, reader: Reader, right: ReadRight, destination: Destination
) -> None:
    """NotShared: what is there is another version, or cannot be read here."""
    if reader.version.content_id != right.content_id:
        raise NotShared(f"{place} is another version of that number")
    if place.shard >= len(reader.version.shards) or (
        list(reader.manifest(place.shard).sizes) != list(destination.sizes)
    ):
        raise NotShared(f"{place} has other chunks than the worker says")
    if reader.version.base is not None and (fault := deltas.fault_here()) is not None:
        raise NotShared(f"{place} is a delta: {fault}")


@dataclass(frozen=True, slots=True)
class _Read:
    """What one channel reads, and into what."""

    reader: Reader
    shard: int
    destination: Destination
    base: Base | None
    waiting: _Waiting

    def __call__(self, chunks: Sequence[int]) -> None:
        """Fill these chunks. ReadFailure; TensorHubError: the bucket's."""
        self.waiting.check()
        for chunk in chunks if self.base is not None else ():
            self.base.spoil(chunk)  # type: ignore[union-attr]
        views = [self.destination.buffer(chunk) for chunk in chunks]
        self.reader.read(self.shard, chunks, views, self.waiting.result)


class ArchiveChannel:
    """See `transport.base.Channel`. Each of its threads reads a group of chunks at a time."""

    def __init__(self, read: _Read, stack: ExitStack, failed: Callable[[Unusable], None]) -> None:
        """`stack` is closed with it; `failed` hears why it cannot be read any more."""
        self._read, self._stack, self._failed = read, stack, failed
        self._sizes = read.destination.sizes
        self._digests = read.reader.digests(read.shard) or [0] * len(self._sizes)
        self._lock = threading.Lock()  # guards both
        self._wanted: deque[int] = deque()  # that no thread reads yet
        self._there: deque[int] = deque()  # that no `receive` has named yet

    def submit(self, chunks: Sequence[int]) -> None:
        with self._lock:
            self._wanted.extend(chunks)

    def receive(self, bytes_max: int) -> Arrival | Lacking:
        began = time.perf_counter()
        while True:
            with self._lock:
                named = self._take(self._there, bytes_max)
                group = [] if named else self._take(self._wanted, GROUP_BYTES)
            if not group:
                chunks = [(chunk, self._digests[chunk]) for chunk in named]
                return Arrival(chunks, 0.0, time.perf_counter() - began)
            self._fill(group)
            with self._lock:
                self._there.extend(group)

    def _take(self, chunks: deque[int], bytes_max: int) -> list[int]:
        """The next ones: at least one if there is any, and further ones up to `bytes_max`."""
        found = list[int]()
        while chunks:
            bytes_max -= self._sizes[chunks[0]]
            if found and bytes_max < 0:
                break
            found.append(chunks.popleft())
        return found

    def _fill(self, group: Sequence[int]) -> None:
        try:
            self._read(group)
        except ReadFailure as failure:
            if failure.reason == "stalled":
                self._failed(Unusable(failure.detail))
            failure.bytes_discarded += self._discarded()
            raise
        except TensorHubError as error:
            is_of_version = isinstance(error, IntegrityError)
            self._failed((NotShared if is_of_version else Unusable)(str(error)))
            text = str(error)
            raise ReadFailure("lost", text, bytes_discarded=self._discarded()) from error

    def _discarded(self) -> int:
        """Bytes that have come, and will not be named."""
        with self._lock:
            found = sum([self._sizes[chunk] for chunk in self._there])
            self._there.clear()
        return found

    def close(self) -> None:
        self._stack.close()
