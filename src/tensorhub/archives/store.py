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
mount that hangs hangs, like every access to it.

Every fault is a TensorHubError that names the URL and says what to do. It never repeats a secret:
only codes and messages of the server are quoted, without the queries of URLs.

Responsible for bytes under paths, and for what can go wrong with them. Not responsible for what the
bytes mean.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import unquote, urlsplit

from tensorhub.errors import (
    ArchiveUnavailable,
    IntegrityError,
    InvalidValue,
    StateError,
    install,
)
from tensorhub.types import printable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

T = TypeVar("T")
Buffer = Any  # bytes, a memoryview, or the client's own buffer (the protocol is Python 3.12's)

TIMEOUT_S: Final = 120.0
PART_BYTES_MIN: Final = 8 * 2**20  # of a stream: one request
PARTS_MAX: Final = 9000  # of one object; S3 takes 10,000
PARTS_AT_ONCE: Final = 4
DELETED_AT_ONCE: Final = 1000
OBJECTS_MAX: Final = 10**7  # of one list
SMALL_BYTES_MAX: Final = 64 * 2**20
_STAGED: Final = re.compile(r".*#\d+")  # what the client calls a file that is not whole yet

_CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (profiles in ~/.aws are not read)",
    "gs": "GOOGLE_SERVICE_ACCOUNT or GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "file": "the user of this process",
}
_BAD_CREDENTIALS: Final = re.compile(
    r"InvalidAccessKeyId|SignatureDoesNotMatch|ExpiredToken|InvalidToken|TokenRefreshRequired"
    r"|AuthenticationFailed|InvalidAuthenticationInfo|169\.254\.169\.254|[Cc]redential"
    r"|Account must be specified"
)
_NO_BUCKET: Final = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
_NOT_ALLOWED: Final = re.compile(r"AccessDenied|AuthorizationPermissionMismatch|AllAccessDisabled")
_FULL: Final = re.compile(r"QuotaExceeded|StorageFull|InsufficientStorage|AccountLimit")
_BEYOND: Final = re.compile(r"range was invalid|Out of range")
_IN_PASSING: Final = re.compile(
    r"SlowDown|InternalError|kind: (Connect|Timeout|Interrupted|Request|Decode)|timed out"
)


class MissingObject(IntegrityError):
    """An object is not there: it never was, or it was deleted."""


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
        self._directory = Path(unquote(parts.path)) if parts.scheme == "file" else None
        if self._directory is not None and writable:
            try:
                self._directory.mkdir(exist_ok=True)
            except OSError as error:
                raise ArchiveUnavailable(f"{self.url} cannot be made: {error.strerror}") from None
        self._store = self._called("open", "", lambda: self._opened(options or {}, timeout_s))

    def __repr__(self) -> str:
        return f"<Store {self.url}>"

    def _opened(self, options: Mapping[str, str], timeout_s: float) -> ObjectStore:
        from obstore.store import LocalStore, from_url

        if self._directory is not None:
            return LocalStore(self._directory, automatic_cleanup=True)
        # Half for the retries, half for the last try.
        seconds = timedelta(seconds=timeout_s / 2)
        first, longest = timedelta(seconds=timeout_s / 500), timedelta(seconds=timeout_s / 20)
        endpoints = [
            os.environ.get(name, "")
            for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        ]
        opened: ObjectStore = from_url(
            self.url,
            config=dict(options) or None,  # type: ignore[call-overload]  # of each kind of store
            client_options={
                "timeout": seconds,
                "connect_timeout": min(seconds, timedelta(seconds=5)),
                # Asked for by an address without TLS.
                "allow_http": any(
                    each.startswith("http://") for each in [*options.values(), *endpoints]
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
                raise self._too_short(path)
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
            raise self._too_short(of.path)
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
        return f"{self.url}/{path}" if path else self.url

    def _too_short(self, path: str) -> IntegrityError:
        return IntegrityError(
            f"{self.name(path)} is shorter than it should be: another process has changed it"
        )

    def _called(self, doing: str, path: str, call: Callable[[], T]) -> T:
        errors = (self._api.exceptions.BaseError, OSError, ValueError, NotImplementedError)
        try:
            return call()
        except errors as error:
            fault = self._fault(doing, path, error)
        raise fault  # outside, so that the client's own error is not part of it

    def _fault(self, doing: str, path: str, error: Exception) -> Exception:
        kinds, text, name = self._api.exceptions, str(error), self.name(path)
        found = re.search(r"status code: (\d{3})", text)
        status = int(found[1]) if found else 0
        found = re.search(r"(?:os error|Os \{\s*code:) (\d+)", text)
        number = int(found[1]) if found else getattr(error, "errno", None) or 0
        if isinstance(error, kinds.AlreadyExistsError):
            return FileExistsError(name)
        if _NO_BUCKET.search(text) or (doing == "open" and number == 2):
            what = "is no directory" if self._kind == "file" else "has no such bucket"
            return ArchiveUnavailable(
                f"{self.url} {what}: make it first, or correct the URL (or the endpoint, such as "
                f"AWS_ENDPOINT_URL)"
            )
        if "RequestTimeTooSkewed" in text:
            return ArchiveUnavailable(
                f"{self.url} refuses to {doing}, because this machine's clock is wrong by many "
                f"minutes: set it"
            )
        said = _quoted(text)
        if isinstance(error, kinds.UnauthenticatedError) or _BAD_CREDENTIALS.search(text):
            because = f" ({said})" if path else ""  # before that, it may quote a key
            return ArchiveUnavailable(
                f"{self.url} does not accept these credentials, or there are none{because}: set "
                f"{_CREDENTIALS[self._kind]}"
            )
        if isinstance(error, FileNotFoundError):
            return MissingObject(
                f"{name} is not there: another process has deleted it, or it never was"
            )
        if number in (1, 13, 30) or status == 403 or _NOT_ALLOWED.search(text):
            return ArchiveUnavailable(
                f"{self.url} does not let this process {doing} {path} ({said}): give it the right "
                f"to, or credentials that have it ({_CREDENTIALS[self._kind]})"
            )
        if number in (28, 122) or status == 507 or _FULL.search(text):
            return ArchiveUnavailable(
                f"{self.url} is full ({said}): make room there, or keep fewer versions. What was "
                f"archived before is intact",
                retryable=True,
            )
        if status == 416 or _BEYOND.search(text):
            return self._too_short(path)
        if status in (408, 429) or status >= 500 or _IN_PASSING.search(text):
            return ArchiveUnavailable(
                f"{self.url} does not answer as it should ({said}), after retries: try again later",
                retryable=True,
            )
        return ArchiveUnavailable(f"cannot {doing} {name}: {said}")


def _stored(path: str, meta: Mapping[str, Any]) -> Stored:
    modified: datetime = meta["last_modified"]
    return Stored(path, meta["size"], modified, meta["e_tag"] or modified.isoformat())


def checked_url(url: str) -> Any:
    """The parts of the URL. An error does not repeat what may hold a secret."""
    try:
        parts = urlsplit(url)
        place = parts.path.startswith("/") if parts.scheme == "file" else bool(parts.netloc)
    except ValueError:
        raise InvalidValue("this is not a URL") from None
    if parts.scheme not in _CREDENTIALS or not place or (parts.scheme == "file" and parts.netloc):
        raise InvalidValue(
            f"{printable(url.partition('?')[0].rpartition('@')[2])[:200]} is not where an archive "
            f"can be: give s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX "
            f"or file:///DIRECTORY"
        )
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise InvalidValue(
            f"the URL of an archive has no user, query or fragment: set "
            f"{_CREDENTIALS[parts.scheme]} instead"
        )
    return parts


def _quoted(text: str) -> str:
    """What the server, or else the client, says of it: no addresses with queries, no secrets."""
    code, message = (re.search(rf"<{what}>([^<]*)</{what}>", text) for what in ("Code", "Message"))
    if code is not None:
        said = f"{code[1]}: {message[1]}" if message is not None else code[1]
    else:
        said = text.partition("\n\nDebug source")[0]
    said = re.sub(r"\?[^\s)\"']*|//[^/\s@]*@", "", said)
    return printable(" ".join(said.split()))[:300]
