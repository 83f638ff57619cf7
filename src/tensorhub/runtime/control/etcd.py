"""A client of etcd, by its JSON gateway: keys, transactions and leases.

Responsible for finding a member that answers, within a deadline; for credentials; and for telling
apart what etcd has refused and what may have happened. Not responsible for what the keys mean.
"""

from __future__ import annotations

import base64
import json
import logging
import math
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import parse_qs, urlsplit

import anyio

from tensorhub.errors import (
    AuthenticationFailed,
    InvalidValue,
    StateError,
    TensorHubError,
    install,
    shown,
)
from tensorhub.protocol.secret import TOKEN_BYTES_MAX, check_protection
from tensorhub.types import parse_address

if TYPE_CHECKING:
    import httpx

LEASE_S = 5  # etcd needs 1 to 2 s to choose a leader of its own, a worker's lease is 10 s
ANSWER_S = 5.0  # for etcd to answer, where nothing presses
ATTEMPT_S = 1.0  # at least, for one member of several; then the next member is asked
PAGE_KEYS = 128  # in one answer; each has 512 KiB at most
ANSWER_BYTES_MAX = 2**27  # such a page in base64, and more
PAGES_S = 300.0  # for all pages of a state
TTL_S_MAX = 120  # an etcd with the longest election timeout grants 75 s
_USER, _PASSWORD = "TENSORHUB_ETCD_USER", "TENSORHUB_ETCD_PASSWORD"
_PASSWORD_FILE = "TENSORHUB_ETCD_PASSWORD_FILE"
_CA, _CERT, _KEY = "TENSORHUB_ETCD_CA", "TENSORHUB_ETCD_CERT", "TENSORHUB_ETCD_KEY"
_FORM = "give etcd://HOST:PORT[,HOST:PORT...]/PREFIX"
# below which a cluster that has the prefix up to there writes and deletes keys (`etcd_election`)
_OF_A_CLUSTER = re.compile(r"candidates|staged|state(\.\d+)?")
_MISFITS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
# gRPC's codes of refusals; all others leave open what has happened, or say that a member is away
_INVALID, _NOT_FOUND, _DENIED, _EXHAUSTED, _UNAUTHENTICATED = 3, 5, 7, 8, 16
_REFUSALS = {_INVALID, _NOT_FOUND, _DENIED, _EXHAUSTED, 9, 11, 12, 15, _UNAUTHENTICATED}

T = TypeVar("T")


class Unanswered(OSError):
    """No member has answered in time: what was asked for may have happened, or may still."""


class _Unsent(OSError):
    """A member could not be asked."""


class Refused(StateError):
    """etcd has refused a request. `surely`: nothing of it has happened, nor ever will."""

    def __init__(self, message: str, code: int, surely: bool) -> None:
        super().__init__(message)
        self.code, self.surely = code, surely

    def for_caller(self) -> TensorHubError:
        """The error that `serve` or `connect` raises."""
        return AuthenticationFailed(str(self)) if self.code == _UNAUTHENTICATED else self


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cluster's state is: what an `etcd://` URL says."""

    endpoints: tuple[str, ...]  # "host:port"
    prefix: str  # of all keys, without a slash at either end
    lease_s: int = LEASE_S

    def key(self, name: str) -> bytes:
        return f"{self.prefix}/{name}".encode()

    def __str__(self) -> str:
        return f"etcd://{','.join(self.endpoints)}/{self.prefix}"


def place_of(url: str) -> Place:
    """Read an `etcd://` URL. Raises InvalidValue."""
    if "@" in url.partition("//")[2].partition("/")[0]:
        text = f"credentials do not belong in a URL: set {_USER}, and {_PASSWORD_FILE}"
        raise InvalidValue(f"the etcd:// URL has a user: {text}")
    try:
        parts = urlsplit(url)
        endpoints = tuple(parts.netloc.split(","))
        for each in endpoints:
            parse_address(f"tcp://{each}")
        query = parse_qs(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query))
        lease_s = int(query.pop("lease_s", [str(LEASE_S)])[0])
    except (StateError, ValueError) as error:
        raise InvalidValue(f"{shown(url)}: {error}; {_FORM}") from error
    prefix = parts.path.strip("/")
    if parts.scheme != "etcd" or not prefix or query or parts.fragment:
        raise InvalidValue(f"{shown(url)}: {_FORM}")
    if taken := [each for each in prefix.split("/") if _OF_A_CLUSTER.fullmatch(each)]:
        text = f"a cluster keeps its own keys below {taken[0]!r}"
        raise InvalidValue(f"{shown(url)}: {text}: give another prefix")
    if not 2 <= lease_s <= 60:
        raise InvalidValue(f"{shown(url)}: lease_s={lease_s}: give 2 to 60 whole seconds")
    return Place(endpoints, prefix, lease_s)


@dataclass(frozen=True, slots=True)
class KeyValue:
    key: bytes
    value: bytes
    created: int  # the revision of etcd that has created it
    lease: int  # 0: none


@dataclass(frozen=True, slots=True)
class Found:
    """What a transaction has done: its `then`, or its `otherwise`; and what its ranges gave."""

    succeeded: bool
    ranges: tuple[tuple[KeyValue, ...], ...]


def is_value(key: bytes, value: bytes) -> dict[str, Any]:
    """For a transaction: compare a key's value."""
    return {"target": "VALUE", "key": _text(key), "value": _text(value), "result": "EQUAL"}


def is_created(key: bytes, revision: int) -> dict[str, Any]:
    """For a transaction: compare the revision that has created a key; 0: there is none."""
    return {
        "target": "CREATE",
        "key": _text(key),
        "create_revision": str(revision),
        "result": "EQUAL",
    }


def put(key: bytes, value: bytes, lease: int = 0) -> dict[str, Any]:
    return {"request_put": {"key": _text(key), "value": _text(value), "lease": str(lease)}}


def delete(key: bytes, end: bytes = b"") -> dict[str, Any]:
    """Of one key, or of those from it up to `end`."""
    return {"request_delete_range": {"key": _text(key), "range_end": _text(end)}}


def get(key: bytes, end: bytes = b"", limit: int = 0) -> dict[str, Any]:
    """Of one key, or of those from it up to `end`."""
    return {"request_range": {"key": _text(key), "range_end": _text(end), "limit": str(limit)}}


def after(prefix: bytes) -> bytes:
    """The end of the range of keys that begin with a prefix, which ends in no byte of 255."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


class _Body:
    """A request's body that is no async generator, as httpx's are: where sending fails, trio warns
    of those.
    """

    def __init__(self, content: bytes) -> None:
        self._left = [content]

    def __aiter__(self) -> _Body:
        return self

    async def __anext__(self) -> bytes:
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop()


class Etcd:
    """A connection to a cluster of etcd, of one loop. Requests go to a member that answers."""

    def __init__(self, place: Place) -> None:
        """Raises StateError: the extra is not installed, a certificate cannot be used."""
        try:
            import httpx
        except ImportError as error:
            raise StateError(f"etcd:// needs httpx: {install('ha')}") from error
        self._errors: tuple[type[Exception], ...] = (httpx.HTTPError, OSError)
        self._unsent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
        # as an etcd ends a connection that it does not want
        self._broken = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
        requests = logging.getLogger("httpx")
        if not requests.level:  # each request is a line
            requests.setLevel(logging.WARNING)
        tls = _tls()
        self._scheme = "http" if tls is None else "https"
        self._body = type("Body", (_Body, httpx.AsyncByteStream), {})
        self._endpoints = place.endpoints
        self._at = 0  # the endpoint that has answered last
        self._token = ""
        self._has_answered = False  # any member
        self._client: httpx.AsyncClient = httpx.AsyncClient(verify=tls or False, trust_env=False)

    async def aclose(self) -> None:
        await self._client.aclose()

    # -- what etcd offers

    async def transact(
        self,
        compare: Sequence[Mapping[str, Any]],
        then: Sequence[Mapping[str, Any]],
        otherwise: Sequence[Mapping[str, Any]] = (),
        *,
        within_s: float = ANSWER_S,
    ) -> Found:
        """One transaction. Raises Unanswered, Refused."""
        body = {"compare": compare, "success": then, "failure": otherwise}

        def read(answer: Any) -> Found:
            succeeded = answer.get("succeeded", False) is True
            asked = then if succeeded or not compare else otherwise
            return Found(
                succeeded,
                tuple(
                    _key_values(each["response_range"])
                    for ask, each in zip(asked, answer.get("responses", ()), strict=True)
                    if "request_range" in ask
                ),
            )

        return await self._call("kv/txn", body, within_s, read)

    async def values(self, prefix: bytes) -> list[KeyValue]:
        """All keys that begin with a prefix, in their order. Raises Unanswered, Refused."""
        found: list[KeyValue] = []
        key, end = prefix, after(prefix)
        with anyio.move_on_after(PAGES_S):
            while True:
                page = get(key, end, PAGE_KEYS)["request_range"]
                more, values = await self._call(
                    "kv/range", page, ANSWER_S, lambda told: (told.get("more"), _key_values(told))
                )
                if values and not key <= values[0].key <= values[-1].key < end:
                    raise Unanswered("etcd answers with other keys than those that were asked for")
                found += values
                if not more or not values:
                    return found
                key = values[-1].key + b"\0"
        raise Unanswered(f"etcd has not told all of {shown(prefix)} within {PAGES_S:g} s")

    async def grant(self, seconds: int) -> tuple[int, float]:
        """A new lease: its id, and how long it is, which may be more."""
        body = {"TTL": str(seconds)}
        return await self._call(
            "lease/grant", body, ANSWER_S, lambda answer: (int(answer["ID"]), _ttl(answer, 1))
        )

    async def keep_alive(self, lease: int, *, within_s: float) -> float:
        """Renew a lease; how long it is from now. 0: there is no such lease any more."""
        try:
            return await self._call(
                "lease/keepalive",
                {"ID": str(lease)},
                within_s,
                lambda answer: _ttl(answer["result"], 0),
            )
        except Refused as error:
            if error.code == _NOT_FOUND:
                return 0.0
            raise

    async def revoke(self, lease: int) -> None:
        """End a lease, with its keys. It may have ended already."""
        try:
            await self._call("lease/revoke", {"ID": str(lease)}, 2 * ATTEMPT_S, bool)
        except Refused as error:
            if error.code != _NOT_FOUND:
                raise

    # -- one request

    async def _call(
        self, path: str, body: Mapping[str, Any], within_s: float, read: Callable[[Any], T]
    ) -> T:
        """Ask one member after the other, each once, until one answers with what `read` can
        read.
        """
        surely, reason, begin = True, "no time was left", anyio.current_time()
        attempt_s = max(ATTEMPT_S, within_s / len(self._endpoints))
        first = self._at
        for step in range(len(self._endpoints)):
            left_s = within_s - (anyio.current_time() - begin)
            if left_s <= 0:
                break
            at = (first + step) % len(self._endpoints)
            try:
                with anyio.fail_after(min(attempt_s, left_s)):
                    answer = read(await self._ask(self._endpoints[at], path, body, surely))
            except TimeoutError:
                surely, reason = False, f"{self._endpoints[at]}: no answer in time"
            except OSError as error:
                surely = surely and isinstance(error, _Unsent)
                reason = f"{self._endpoints[at]}: {error}"
            except _MISFITS as error:
                surely = False
                reason = f"{self._endpoints[at]}: no answer that etcd gives: {shown(error)}"
            else:
                self._at, self._has_answered = at, True
                return answer
        raise Unanswered(f"etcd does not answer ({reason})")

    def _said(self, error: Exception) -> str:
        """What went wrong with a connection, and which setting may be missing."""
        tls = _tls_error(error)
        text = f"{type(error).__name__}: {error}" if str(error) or tls is None else str(tls)
        if "CERTIFICATE_VERIFY_FAILED" in text:
            return f"{text}: is {_CA}={shown(os.environ.get(_CA))} the authority of etcd?"
        if tls is None and (self._has_answered or not isinstance(error, self._broken)):
            return text
        if self._scheme == "http":
            return f"{text}: if etcd speaks TLS, set {_CA}"
        if not os.environ.get(_CERT):
            return f"{text}: if etcd asks for a client's certificate, set {_CERT} and {_KEY}"
        return f"{text}: is {_CERT}={shown(os.environ[_CERT])} valid now, and one that etcd trusts?"

    async def _ask(self, member: str, path: str, body: Mapping[str, Any], surely: bool) -> Any:
        """Ask one member. With a token that has ended, a second time with a new one."""
        for is_second in (False, True):
            if not self._token and os.environ.get(_USER):
                await without_frames(self._authenticate(member, surely))
            try:
                return await without_frames(self._post(member, path, body, surely))
            except Refused as error:
                has_ended = error.code == _UNAUTHENTICATED or "auth revision" in str(error).lower()
                if not (has_ended and self._token) or is_second:
                    raise _explained(error) from error
                self._token = ""
        raise AssertionError("unreachable")

    async def _post(self, member: str, path: str, body: Mapping[str, Any], surely: bool) -> Any:
        url = f"{self._scheme}://{member}/v3/{path}"
        headers = {"Authorization": self._token} if self._token else {}
        left_s = anyio.current_effective_deadline() - anyio.current_time()
        # two steps that must not be cancelled: a connection that is being made would be leaked
        timeout = (0.4 * left_s, left_s, left_s, left_s)
        content = json.dumps(body).encode()
        request = self._client.build_request(
            "POST", url, content=content, headers=headers, timeout=timeout
        )
        request.stream = self._body(content)
        try:
            status, answer = await answered(self._client, request)
        except self._errors as error:
            kind = _Unsent if isinstance(error, self._unsent) else OSError
            raise kind(self._said(error)) from error
        if not isinstance(answer, dict):
            raise OSError(f"it answers {status} and {shown(answer)}")
        if status == 200 and "error" not in answer:
            return answer
        said = answer.get("error", answer)
        said = said if isinstance(said, dict) else answer  # a stream's error is an object
        text = str(said.get("message") or said.get("error") or status)
        code = said.get("code", said.get("grpc_code", math.inf))
        text = shown(text, 200)
        if type(code) is not int or code not in _REFUSALS or "too many requests" in text:
            raise OSError(text)
        raise Refused(f"etcd refuses it: {text}", code, surely)

    async def _authenticate(self, member: str, surely: bool) -> None:
        path = os.environ.get(_PASSWORD_FILE)
        try:
            password = _read(path) if path else os.environ.get(_PASSWORD, "")
        except (OSError, ValueError, AuthenticationFailed) as error:
            text = f"{_PASSWORD_FILE}={shown(path)} cannot be read: {error}"
            raise Refused(text, _UNAUTHENTICATED, surely) from error
        try:
            body = {"name": os.environ[_USER], "password": password}
            answer = await self._post(member, "auth/authenticate", body, surely)
            self._token = checked_token(answer["token"], "the token of etcd")
        except Refused as error:
            if "not enabled" not in str(error):
                text = f"{error}: set {_USER}, and {_PASSWORD} or {_PASSWORD_FILE}"
                raise Refused(text, _UNAUTHENTICATED, surely) from error


async def without_frames(call: Awaitable[T]) -> T:
    """Await a call that has a password or a token. Its errors come without their causes, and
    without the frames that raised them: the locals there, and httpx's, have the secret.
    """
    try:
        return await call
    except BaseException as error:
        raised = error
    if isinstance(raised, Exception):  # of a cancellation, anyio looks at the context
        raised.__cause__ = raised.__context__ = None
    each: BaseException | None = raised
    while each is not None:
        each.__traceback__ = None
        each = each.__context__
    raise raised


def checked_token(token: str, source: str) -> str:
    """A token that may be sent in a header. Raises ValueError without it, where h11 would show
    it.
    """
    if not token.isascii() or not token.isprintable():
        raise ValueError(f"{source} is not text that a token may be")
    return token


async def answered(client: httpx.AsyncClient, request: httpx.Request) -> tuple[int, Any]:
    """A status, and the JSON with it; None: it is none, or too long."""
    content = bytearray()
    with anyio.CancelScope() as scope:

        async def heed(event: str, _: object) -> None:
            # httpcore leaks a socket whose handshake is cancelled; the handshake has a timeout
            scope.shield = event == "connection.start_tls.started"

        request.extensions["trace"] = heed
        response = await client.send(request, stream=True)
        try:
            async for part in response.aiter_raw():  # not unpacked, which may make it far larger
                if len(content) <= ANSWER_BYTES_MAX:  # then nothing more is kept
                    content += part
        finally:
            await response.aclose()
    if len(content) > ANSWER_BYTES_MAX:
        return response.status_code, None
    try:
        return response.status_code, json.loads(content)
    except (ValueError, RecursionError):
        return response.status_code, None


def _explained(error: Refused) -> Refused:
    if error.code not in (_DENIED, _UNAUTHENTICATED) and "user name is empty" not in str(error):
        return error
    user = os.environ.get(_USER)
    text = f"give user {user!r} a role for the prefix" if user else f"set {_USER}"
    return Refused(f"{error}: {text}", _UNAUTHENTICATED, error.surely)


def _ttl(answer: Mapping[str, Any], least: int) -> int:
    """Raises ValueError: no lease of etcd's is so long, or so short."""
    seconds = int(answer.get("TTL", 0))
    if not least <= seconds <= TTL_S_MAX:
        raise ValueError(f"a lease of {seconds} s")
    return seconds


def _read(path: str) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        check_protection("file", Path(path), os.fstat(file.fileno()))
        return file.read(TOKEN_BYTES_MAX).decode().strip()


def _tls() -> ssl.SSLContext | None:
    ca, cert, key = (os.environ.get(name) for name in (_CA, _CERT, _KEY))
    if not ca:
        if cert:
            raise StateError(f"{_CERT} is set, and {_CA} is not: set {_CA}, the authority of etcd")
        return None

    def passphrase() -> NoReturn:
        raise ValueError("the key needs a passphrase; give one without")

    try:
        context = ssl.create_default_context(cafile=ca)
        if cert:
            context.load_cert_chain(cert, key, passphrase)
    except (OSError, ValueError) as error:
        text = f"{_CA}={shown(ca)}, {_CERT}={shown(cert)}, {_KEY}={shown(key)}"
        raise StateError(f"{text}: {error}") from error
    return context


def _tls_error(error: BaseException | None) -> ssl.SSLError | None:
    """Among an error and its causes."""
    while error is not None:
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLWantReadError):
            return error
        error = error.__cause__ or error.__context__
    return None


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()


def _key_values(answer: Mapping[str, Any]) -> tuple[KeyValue, ...]:
    return tuple(
        KeyValue(
            base64.b64decode(each["key"], validate=True),
            base64.b64decode(each.get("value", ""), validate=True),
            int(each.get("create_revision", 0)),
            int(each.get("lease", 0)),
        )
        for each in answer.get("kvs", ())
    )
