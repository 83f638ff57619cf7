"""What can go wrong with a store, as errors that name its URL and say what to do. They never repeat
a secret: only codes and messages of the server are quoted, without the queries of URLs.
"""

from __future__ import annotations

import re
from typing import Any, Final
from urllib.parse import urlsplit

from tensorhub.errors import ArchiveUnavailable, IntegrityError, InvalidValue
from tensorhub.types import printable

CREDENTIALS: Final = {
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


def name_of(url: str, path: str) -> str:
    """How errors name an object."""
    return f"{url}/{path}" if path else url


def too_short(name: str) -> IntegrityError:
    return IntegrityError(f"{name} is shorter than it should be: another process has changed it")


def fault_of(error: Exception, doing: str, path: str, *, url: str, kinds: Any) -> Exception:
    """What the client's `error` says, of that URL; `kinds`: the module with its exceptions."""
    text, name, kind = str(error), name_of(url, path), urlsplit(url).scheme
    found = re.search(r"status code: (\d{3})", text)
    status = int(found[1]) if found else 0
    found = re.search(r"(?:os error|Os \{\s*code:) (\d+)", text)
    number = int(found[1]) if found else getattr(error, "errno", None) or 0
    if isinstance(error, kinds.AlreadyExistsError):
        return FileExistsError(name)
    if _NO_BUCKET.search(text) or (doing == "open" and number == 2):
        what = "is no directory" if kind == "file" else "has no such bucket"
        return ArchiveUnavailable(
            f"{url} {what}: make it first, or correct the URL (or the endpoint, such as "
            f"AWS_ENDPOINT_URL)"
        )
    if "RequestTimeTooSkewed" in text:
        return ArchiveUnavailable(
            f"{url} refuses to {doing}, because this machine's clock is wrong by many "
            f"minutes: set it"
        )
    said = quoted(text)
    if isinstance(error, kinds.UnauthenticatedError) or _BAD_CREDENTIALS.search(text):
        because = f" ({said})" if path else ""  # before that, it may quote a key
        return ArchiveUnavailable(
            f"{url} does not accept these credentials, or there are none{because}: set "
            f"{CREDENTIALS[kind]}"
        )
    if isinstance(error, FileNotFoundError):
        return MissingObject(
            f"{name} is not there: another process has deleted it, or it never was"
        )
    if number in (1, 13, 30) or status == 403 or _NOT_ALLOWED.search(text):
        return ArchiveUnavailable(
            f"{url} does not let this process {doing} {path} ({said}): give it the right "
            f"to, or credentials that have it ({CREDENTIALS[kind]})"
        )
    if number in (28, 122) or status == 507 or _FULL.search(text):
        return ArchiveUnavailable(
            f"{url} is full ({said}): make room there, or keep fewer versions. What was "
            f"archived before is intact",
            retryable=True,
        )
    if status == 416 or _BEYOND.search(text):
        return too_short(name)
    if status in (408, 429) or status >= 500 or _IN_PASSING.search(text):
        return ArchiveUnavailable(
            f"{url} does not answer as it should ({said}), after retries: try again later",
            retryable=True,
        )
    return ArchiveUnavailable(f"cannot {doing} {name}: {said}")


def checked_url(url: str) -> Any:
    """The parts of the URL. An error does not repeat what may hold a secret."""
    try:
        parts = urlsplit(url)
        place = parts.path.startswith("/") if parts.scheme == "file" else bool(parts.netloc)
    except ValueError:
        raise InvalidValue("this is not a URL") from None
    if parts.scheme not in CREDENTIALS or not place or (parts.scheme == "file" and parts.netloc):
        raise InvalidValue(
            f"{printable(url.partition('?')[0].rpartition('@')[2])[:200]} is not where an archive "
            f"can be: give s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX "
            f"or file:///DIRECTORY"
        )
    if parts.query or parts.fragment or "@" in parts.netloc:
        raise InvalidValue(
            f"the URL of an archive has no user, query or fragment: set "
            f"{CREDENTIALS[parts.scheme]} instead"
        )
    return parts


def quoted(text: str) -> str:
    """What the server, or else the client, says of it: no addresses with queries, no secrets."""
    code, message = (re.search(rf"<{what}>([^<]*)</{what}>", text) for what in ("Code", "Message"))
    if code is not None:
        said = f"{code[1]}: {message[1]}" if message is not None else code[1]
    else:
        said = text.partition("\n\nDebug source")[0]
    said = re.sub(r"\?[^\s)\"']*|//[^/\s@]*@", "", said)
    return printable(" ".join(said.split()))[:300]
