"""One object store, by its URL: `s3://bucket/prefix`, `gs://...`, `az://...` or `file:///directory`.

    Store.read          one small object
    Store.ranges        several ranges of one object at once
    Store.look, part    an object as it is now, and bytes of it while it is so
    Store.create        an object that must not exist yet; atomic, also between machines
    Store.put           an object of any size as a stream
    Store.objects, names, delete, now

Endpoint and credentials come from the environment variables of the Rust crate `object_store`, such
as AWS_ENDPOINT_URL, AWS_REGION and AWS_ACCESS_KEY_ID, or from `options`, named alike in lower case
and without their first word. Profiles in `~/.aws` are not read.

All calls block, and are made from any thread. The store's client retries a request that was
throttled (429, 503, SlowDown), failed (5xx) or found no connection, with growing pauses, and a call
ends within about `timeout_s` in each of its requests. A filesystem has no deadlines: a call for a
mount that hangs hangs, like every access to it. A store that has not answered yet, or failed last,
is named in the log after `SILENT_S`.

Every fault is a TensorHubError that names the URL and says what to do (`store_faults`).

Responsible for bytes under paths. Not responsible for what the bytes mean.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from secrets import token_hex
from threading import Timer
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote

from tensorhub.archives.store_faults import (
    MissingObject,
    checked_url,
    fault_of,
    name_of,
    quoted,
    too_short,
)
from tensorhub.errors import (
    ArchiveUnavailable,
    IntegrityError,
    StateError,
    install,
)
from tensorhub.logs import get_logger

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
Buffer = Any  # bytes, a memoryview, or the client's own buffer (the protocol is Python 3.12's)

TIMEOUT_S: Final = 120.0
SILENT_S: Final = 5.0
PART_BYTES_MIN: Final = 8 * 2**20  # of a stream: one request
PARTS_MAX: Final = 9000  # of one object; S3 takes 10,000
PARTS_AT_ONCE: Final = 4
DELETED_AT_ONCE: Final = 1000
OBJECTS_MAX: Final = 10**7  # of one list
SMALL_BYTES_MAX: Final = 64 * 2**20
_STAGED: Final = re.compile(r".*#\d+")  # what the client calls a file that is not whole yet

log = get_logger("tensorhub.archive")

_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}


@dataclass(frozen=True, slots=True)
class Stored:
    """One object. `modified`: by the server's clock. `tag`: changes when it is written."""

    path: str
    nbytes: int
    modified: datetime
    tag: str = ""


class Store:
    """See above. `writable`: a directory is made if only its last part is missing."""

    def __init__(
        self,
        url: str,
        *,
        options: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        writable: bool = False,
    ) -> None:
        """InvalidValue: the URL is none of these. StateError: obstore is not installed.
        ArchiveUnavailable: it cannot be used.
        """
        try:
            import obstore
        except ImportError:
            raise StateError(f"archives need obstore: {install('archive')}") from None
        parts = checked_url(url)
        self.url = url.rstrip("/")
        self._kind, self._api = parts.scheme, obstore
        self._endpoint, self._timeout_s = _endpoint(parts.scheme, options or {}), timeout_s
        self._is_answering = self._is_told = False  # that it is silent
        self._directory = Path(unquote(parts.path)) if parts.scheme == "file" else None
        if self._directory is not None and os.path.isfile(self._directory):
            raise ArchiveUnavailable(f"{self.url} is a file: give a directory")
        if self._directory is not None and writable:
            try:
                self._directory.mkdir(exist_ok=True)
            except OSError as error:
                raise ArchiveUnavailable(f"{self.url} cannot be made: {error.strerror}") from None
        self._store = self._called(
            "open", "", lambda: self._opened(options or {}, timeout_s), is_watched=False
        )

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    def _opened(self, options: Mapping[str, str], timeout_s: float) -> ObjectStore:
        from obstore.store import LocalStore, from_url

        if self._directory is not None:
            return LocalStore(self._directory, automatic_cleanup=True)
        # Half for the retries, half for the last try.
        seconds = timedelta(seconds=timeout_s / 2)
        first, longest = timedelta(seconds=timeout_s / 500), timedelta(seconds=timeout_s / 20)
        opened: ObjectStore = from_url(
            self.url,
            config=dict(options) or None,  # type: ignore[call-overload]  # of each kind of store
            client_options={
                "timeout": seconds,
                "connect_timeout": min(seconds, timedelta(seconds=5)),
                # Asked for by an address without TLS.
                "allow_http": any(
                    each.startswith("http://") for each in [*options.values(), self._endpoint]
                ),
            },
            retry_config={
                "max_retries": 1000,
                "retry_timeout": seconds,
                "backoff": {"init_backoff": first, "max_backoff": longest, "base": 2},
            },
        )
        return opened

    # ----------------------------------------------------------------------------------------------
    # reading

    def read(self, path: str, bytes_max: int = SMALL_BYTES_MAX) -> bytes:
        """A whole object. MissingObject; IntegrityError: it has more bytes than that."""

        def got() -> bytes:
            found = self._api.get(self._store, path)
            if (size := found.meta["size"]) > bytes_max:
                raise IntegrityError(
                    f"{self.name(path)} has {size} bytes, and not {bytes_max} at most: it is not "
                    f"what TensorHub wrote"
                )
            return bytes(found.bytes())

        return self._called("read", path, got)

    def ranges(self, path: str, ranges: Sequence[tuple[int, int]]) -> list[Buffer]:
        """Bytes of one object: so many from each offset on, in this order. MissingObject;
        IntegrityError: the object is shorter.
        """
        wanted = [each for each in ranges if each[1]]
        found: Iterator[Buffer] = iter(())
        if wanted:
            starts, lengths = zip(*wanted, strict=True)
            got = self._called(
                "read",
                path,
                lambda: self._api.get_ranges(self._store, path, starts=starts, lengths=lengths),
            )
            if [len(each) for each in got] != list(lengths):
                raise too_short(self.name(path))
            found = iter(got)
        return [next(found) if nbytes else b"" for _, nbytes in ranges]

    def look(self, path: str) -> Stored:
        """An object as it is now. MissingObject."""
        found = self._called("read", path, lambda: self._api.head(self._store, path))
        return _stored(path, found)

    def part(self, of: Stored, offset: int, nbytes: int) -> Buffer:
        """Bytes of an object. MissingObject; IntegrityError: it is not what it was when it was
        looked at.
        """

        def got() -> tuple[Stored, Buffer]:
            place = {"range": (offset, offset + nbytes)}
            found = self._api.get(self._store, of.path, options=place)
            return _stored(of.path, found.meta), found.bytes()

        now, data = self._called("read", of.path, got)
        self.check_same(of, now)
        if len(data) != nbytes:
            raise too_short(self.name(of.path))
        return data

    def check_same(self, of: Stored, now: Stored) -> None:
        """IntegrityError unless an object is as it was."""
        if (of.nbytes, of.tag) != (now.nbytes, now.tag):
            raise IntegrityError(
                f"{self.name(of.path)} has changed while it was read: another process writes it"
            )

    def names(self) -> list[str]:
        """The names of the objects that are here, and not further below."""
        found = self._called("list", "", lambda: self._api.list_with_delimiter(self._store))
        # some servers list the directory itself
        return [each["path"] for each in found["objects"] if each["path"]]

    def objects(self, prefix: str, most: int = OBJECTS_MAX) -> Iterator[Stored]:
        """The objects below a path, in any order. IntegrityError: there are more than `most`."""
        pages, count = self._api.list(self._store, prefix, chunk_size=1000), 0
        while (page := self._called("list", prefix, lambda: next(pages, None))) is not None:
            count += len(page)
            if count > most:
                raise IntegrityError(
                    f"{self.name(prefix)} has more than {most} objects: delete those that are not "
                    f"TensorHub's, or keep fewer versions"
                )
            for each in page:
                yield _stored(each["path"], each)

    # ----------------------------------------------------------------------------------------------
    # writing

    def create(self, path: str, data: bytes) -> bool:
        """Make this object. False: there is another one, which stays as it is.

        `data` is unlike what any other writer writes there: after an answer that was lost, this
        finds its own object, and returns True.
        """
        for _ in range(3):
            with suppress(FileExistsError):
                self._called(
                    "write", path, lambda: self._api.put(self._store, path, data, mode="create")
                )
                self._settle(path)
                return True
            try:
                return self.read(path, max(len(data), SMALL_BYTES_MAX)) == data
            except MissingObject:
                continue  # the other one is not made yet, or gone again
        raise ArchiveUnavailable(
            f"{self.name(path)} is made and deleted again and again by another process: end it",
            retryable=True,
        )

    def put(self, path: str, pieces: Iterable[Buffer], nbytes: int = 0) -> int:
        """Make an object of these pieces, or replace it, and return its size. It is there when all
        of it is. `nbytes`: about how many there will be; a few parts of them are in memory at once.

        Pieces are not copied: each stays as it is until the call returns.
        """
        size, raised = 0, list[Exception]()

        def counted() -> Iterator[Buffer]:
            nonlocal size
            try:
                for piece in pieces:
                    size += len(piece)
                    yield piece
            except Exception as error:
                raised.append(error)
                raise

        part_bytes = max(PART_BYTES_MIN, -(-nbytes // PARTS_MAX))
        try:
            self._called(
                "write",
                path,
                lambda: self._api.put(
                    self._store,
                    path,
                    counted(),
                    chunk_size=part_bytes,
                    max_concurrency=PARTS_AT_ONCE,
                ),
                is_watched=False,
            )
        except BaseException:
            if raised:
                raise raised[0] from None
            raise
        self._settle(path)
        return size

    def delete(self, paths: Iterable[str]) -> None:
        """Delete these objects, or files of `unfinished`, in no order. It is no error if some are
        not there.
        """
        rest = list[str]()
        for path in paths:
            if self._directory is not None and _STAGED.fullmatch(path):
                self._directory.joinpath(path).unlink(missing_ok=True)
            else:
                rest.append(path)
        while rest:
            some, rest = rest[:DELETED_AT_ONCE], rest[DELETED_AT_ONCE:]
            try:
                self._called("delete", some[0], partial(self._api.delete, self._store, some))
            except MissingObject:  # of several, some may not have been tried
                for path in some:
                    with suppress(MissingObject):
                        self._called("delete", path, partial(self._api.delete, self._store, path))

    def now(self) -> datetime:
        """The time by the server's clock, with which `Stored.modified` is compared. It writes an
        object to learn it.
        """
        path = f"clock/{token_hex(8)}"
        self.put(path, [b"?"])
        try:
            return self.look(path).modified
        finally:
            self.delete([path])

    def unfinished(self, prefix: str) -> Iterator[Stored]:
        """Files below a path that a writer has not finished; lists leave them out. In buckets such
        parts are not seen: there a lifecycle rule (AbortIncompleteMultipartUpload) removes them.
        """
        if self._directory is None:
            return
        for path in self._directory.joinpath(prefix).rglob("*#*"):
            if _STAGED.fullmatch(path.name):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    yield Stored(
                        str(path.relative_to(self._directory)),
                        status.st_size,
                        datetime.fromtimestamp(status.st_mtime).astimezone(),
                    )

    def _settle(self, path: str) -> None:
        """Bring a file and its name to the disk, as a bucket does by itself."""
        if self._directory is None:
            return

        def synced() -> None:
            place = self._directory / path  # type: ignore[operator]
            for each in (place, *place.parents):
                descriptor = os.open(each, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                if each == self._directory:
                    break

        self._called("write", path, synced)

    # ----------------------------------------------------------------------------------------------
    # faults

    def name(self, path: str) -> str:
        """How errors name an object."""
        return name_of(self.url, path)

    def _called(
        self, doing: str, path: str, call: Callable[[], T], *, is_watched: bool = True
    ) -> T:
        errors = (self._api.exceptions.BaseError, OSError, ValueError, NotImplementedError)
        try:
            with self._telling(doing, path) if is_watched else nullcontext():
                return call()
        except errors as error:
            fault = fault_of(error, doing, path, url=self.url, kinds=self._api.exceptions)
        self._is_answering = not (isinstance(fault, ArchiveUnavailable) and fault.retryable)
        raise fault  # outside, so that the client's own error is not part of it

    @contextmanager
    def _telling(self, doing: str, path: str) -> Iterator[None]:
        """Say once that the store does not answer, if it did not before either."""
        if self._is_answering:
            yield
            return
        timer = Timer(SILENT_S, self._tell, (doing, path))
        timer.daemon = True
        timer.start()
        try:
            yield
            self._is_answering, self._is_told = True, False
        finally:
            timer.cancel()
            timer.join()

    def _tell(self, doing: str, path: str) -> None:
        if not self._is_told:
            self._is_told = True
            log.warning(
                "archive_silent",
                url=self.url,
                endpoint=self._endpoint,
                trying=f"to {doing} {path}".strip(),
                since_s=SILENT_S,
                gives_up_after_s=self._timeout_s if self._directory is None else None,
            )


def _stored(path: str, meta: Mapping[str, Any]) -> Stored:
    modified: datetime = meta["last_modified"]
    return Stored(path, meta["size"], modified, meta["e_tag"] or modified.isoformat())


def _endpoint(kind: str, options: Mapping[str, str]) -> str:
    """The address that is asked, as it was given."""
    given = [value for name, value in options.items() if "endpoint" in name]
    given += [os.environ.get(name, "") for name in _ENDPOINTS.get(kind, ())]
    usual = "this machine" if kind == "file" else f"the usual one of {kind}://"
    return quoted(next(filter(None, given), usual))
