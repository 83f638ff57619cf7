"""A version as files: which bytes of which file are a header's, and which are a tensor's.

A version that was published from files has these files, equal to the byte. Any other version has
one file, `model.safetensors`, whose tensors are in the order in which they are fetched.

Responsible for that, and for fetching a window of it. Not responsible for which windows are kept
(`cache`), nor for paths (`filesystem`).
"""

from __future__ import annotations

import io
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tensorhub import sync
from tensorhub.api.tools import fetch_into
from tensorhub.errors import VersionUnavailable
from tensorhub.fs.cache import AHEAD, Cache, Key
from tensorhub.layouts.joining import publication_of, reading_for
from tensorhub.layouts.pieces import Declaration
from tensorhub.layouts.publication import Publication
from tensorhub.layouts.published import Published
from tensorhub.layouts.whole import whole_manifest
from tensorhub.memory.file_target import plan
from tensorhub.memory.safetensors import Header
from tensorhub.memory.windows import Windows
from tensorhub.model.manifest import Manifest, TensorSpec
from tensorhub.runtime.loop_thread import finish_blocking
from tensorhub.types import VersionInfo

Parts = tuple[Published, Mapping[str, bytes]]


@dataclass(frozen=True, slots=True)
class File:
    """One file of a version. `head`: its first bytes. Byte `places[i]` of the file, and those after
    it, are byte `addresses[i]` of the version, and those after that.
    """

    head: bytes
    nbytes: int
    places: Sequence[int] = ()
    addresses: Sequence[int] = ()

    def pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """From which byte to which byte of the version these bytes of the file are, in order; none
        of them is of its head.
        """
        number = bisect_right(self.places, start) - 1
        while start < stop:
            end = stop
            if number + 1 < len(self.places):
                end = min(stop, self.places[number + 1])
            at = self.addresses[number] + start - self.places[number]
            yield at, at + end - start
            start, number = end, number + 1


def file_of(header: Header, address_of: Mapping[str, int]) -> File:
    """The file with that header. `address_of`: where each tensor begins in the version."""
    places, addresses, end = list[int](), list[int](), -1
    for entry in header.entries:
        address = address_of[entry.name]
        if entry.nbytes and address != end:
            places.append(header.data_at + entry.offset)
            addresses.append(address)
        if entry.nbytes:
            end = address + entry.nbytes
    return File(header.encode(), header.file_bytes, places, addresses)


class Section:
    """Some tensors of a version that one fetch can fill. See `cache.Section`."""

    def __init__(self, version: Version, names: tuple[str, ...] | None) -> None:
        """`names`: None: all, of a version of one rank."""
        self._version = version
        self._names = names
        self._lock = threading.Lock()
        self._windows: Windows | None = None

    @property
    def windows(self) -> Windows:
        """Where its bytes are; planned when they are wanted first."""
        with self._lock:
            if self._windows is None:
                self._windows = self._version.windows_of(self._names)
            return self._windows

    def fill(self, number: int) -> None:
        """See `cache.Section`."""
        self._version.fetch(self.windows, number, self._names)


class Version:
    """The files of one version. Any thread may read."""

    def __init__(
        self, hub: sync.Hub, info: VersionInfo, parts: Parts, cache: Cache, timeout_s: float
    ) -> None:
        """Raises ManifestMismatch: the version cannot be put together, or not be written as
        safetensors files.
        """
        self.info = info
        self._hub = hub
        self._cache = cache
        self._timeout_s = timeout_s
        self._published = parts[0]
        self._publication: Publication | None = None  # of several ranks, or of parts of tensors
        if len(parts[0].shards) == 1 == len(parts[0].part_ids):
            self._manifest = Manifest.decode(parts[1][parts[0].part_ids[0]])
        else:
            self._publication = publication_of(*parts)
            self._manifest = whole_manifest(parts[0], self._publication, None)
        # where each region begins, laid end to end, and where the last one ends
        starts = [region.nbytes for region in self._manifest.regions]
        self._starts = tuple(accumulate(starts, initial=0))
        self._sections, self._firsts = self._cut()
        planned = plan(self._manifest, self._manifest.tensors, None, in_order=True)
        tensors = self._manifest.tensors
        address_of = {each.name: self._starts[each.region] + each.offset for each in tensors}
        self.files = {name: file_of(header, address_of) for name, header in planned.headers.items()}
        if planned.index is not None:
            name, text = planned.index
            self.files[name] = File(text, len(text))

    def __repr__(self) -> str:
        return f"<Version {self.info.version} of {self.info.model!r}, {len(self.files)} files>"

    def read(self, name: str, start: int, stop: int) -> bytes:
        """These bytes of a file, as far as it has them. Raises as `copy`."""
        made = io.BytesIO()
        self.copy(name, start, stop, made.write)
        return made.getvalue()

    def copy(self, name: str, start: int, stop: int, put: Callable[[memoryview], object]) -> None:
        """`put` these bytes of a file, as far as it has them, piece by piece.

        Raises VersionUnavailable: the version cannot be fetched any more, or its number was
        published anew. OperationTimeout, IntegrityError, CoordinatorUnavailable.
        """
        file = self.files[name]
        start, stop = max(0, start), min(stop, file.nbytes)
        if stop <= start:
            return
        # a fetch ends by itself, and says why; the rest is for those that it waits for
        deadline = time.monotonic() + 2 * self._timeout_s
        put(memoryview(file.head)[start:stop])
        for at, end in file.pieces(max(start, len(file.head)), stop):
            self._copy(at, end, put, deadline)

    def _copy(
        self, at: int, end: int, put: Callable[[memoryview], object], deadline: float
    ) -> None:
        """`put` these bytes of the version, window by window."""
        while at < end:
            key, first = self._place(at)
            window = key.section.windows.windows[key.number]
            stop = min(end, first + window.stop)
            following = self._following(first + window.start, first + window.stop)
            self._cache.read(key, at - first, stop - first, put, following, deadline)
            at = stop

    def _place(self, at: int) -> tuple[Key, int]:
        """The window with that byte, and where its section begins."""
        number = bisect_right(self._firsts, at) - 1
        section, first = self._sections[number], self._firsts[number]
        return Key(section, section.windows.number(at - first)), first

    def _following(self, start: int, stop: int) -> list[Key]:
        """The windows after these bytes, if the window before them was read, too."""
        found: list[Key] = []
        if start and not self._cache.holds(self._place(start - 1)[0]):
            return found
        while len(found) < AHEAD and stop < self._starts[-1]:
            key, first = self._place(stop)
            found.append(key)
            stop = first + key.section.windows.windows[key.number].stop
        return found

    # ----------------------------------------------------------------------------------------------
    # fetching

    def _cut(self) -> tuple[list[Section], list[int]]:
        """The sections, and where each begins. Of one rank's version, chunks are read as they are
        published. Of another, each reader's tensors have chunks of their own, so tensors that are
        read together are a section.
        """
        if self._publication is None:
            return [Section(self, None)], [0]
        groups, firsts = list[list[TensorSpec]](), list[int]()
        for start, stop, tensors in zip(
            self._starts, self._starts[1:], self._manifest.by_region, strict=False
        ):
            if not groups or (start > firsts[-1] and stop - firsts[-1] > self._cache.window_bytes):
                groups.append([])
                firsts.append(start)
            groups[-1] += tensors
        return [Section(self, tuple([each.name for each in group])) for group in groups], firsts

    def windows_of(self, names: tuple[str, ...] | None) -> Windows:
        """Memory for the tensors of these names, which are a section."""
        manifest, window_bytes = self._manifest, self._cache.window_bytes
        if self._publication is not None:
            manifest = whole_manifest(self._published, self._publication, names)
            if manifest.region_bytes > window_bytes:
                declared = Declaration(partial=True)
                manifest = reading_for(self._published, self._publication, manifest, declared)
        return Windows(manifest, window_bytes)

    def fetch(self, windows: Windows, number: int, names: tuple[str, ...] | None) -> None:
        """Fill a window. Raises as `read`."""
        info = self.info
        call = fetch_into(
            self._hub._async,
            info.model,
            info.version,
            windows.memory(number, names),
            rank=0 if self._publication is None else None,
            timeout=self._timeout_s,
        )
        found, _ = finish_blocking(call)
        if found.content_id != info.content_id:
            raise VersionUnavailable(
                f"version {info.version} of {info.model!r} was published anew since this file was "
                f"opened: open it again",
                retryable=False,
            )
