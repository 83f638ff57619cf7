"""What every endpoint has in common: access, headers, the forms of answers, and the static files.

Access: a client that has a token of the cluster, or the read-only token that belongs to one, may
read everything. Nothing can be changed over HTTP. In open access, which only loopback allows, a
request must name this machine as its host: else a page of another site, whose name leads here,
could read (DNS rebinding). There are no cookies and no permissions for other origins.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import mimetypes
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import lru_cache
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tensorhub.logs import Tally, get_logger
from tensorhub.protocol.secret import is_loopback, read_only_secret
from tensorhub.web.asking import Unanswered

SENT_AT_ONCE = 65_536  # bytes of an answer: what one connection keeps of it
HEAD_BYTES_MAX = 16_384  # of a request: its line and headers
STREAMS_MAX = 64  # answers that go on, such as /events
PARAMETER_CHARS_MAX = 512

# without a token, as is what lies below STATIC: a kubelet that probes has none
OPEN = ("/", "/healthz", "/readyz")
STATIC = "/static/"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; base-uri 'none'; "
    "form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}

log = get_logger("tensorhub.http")
Handler = Callable[[Request], Awaitable[Response]]


class Answer(Response):
    """Sent in pieces, so that a client that takes nothing costs little memory."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        body = bytes(self.body)
        for begin in range(0, max(1, len(body)), SENT_AT_ONCE):
            end = begin + SENT_AT_ONCE
            more = end < len(body)
            await send({"type": "http.response.body", "body": body[begin:end], "more_body": more})
            if more:
                await asyncio.sleep(0)  # others have a turn, and the end of the connection is seen


class Stream(Response):
    """Server-sent events: pieces that come when they come. Each piece must be taken in time."""

    media_type = "text/event-stream"

    def __init__(self, pieces: AsyncGenerator[bytes, None]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        now = asyncio.get_running_loop().time
        deadline, start = scope["deadline"], self.raw_headers
        most_s = deadline.when() - now()
        await send({"type": "http.response.start", "status": 200, "headers": start})
        deadline.reschedule(None)
        async with aclosing(self._pieces):
            async for piece in self._pieces:
                deadline.reschedule(now() + most_s)
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                deadline.reschedule(None)


def json_answer(value: object, status: int = 200) -> Answer:
    return Answer(json.dumps(value), status, media_type="application/json")


def text_answer(text: str, status: int = 200) -> Answer:
    return Answer(text, status, media_type="text/plain")


async def healthz(request: Request) -> Response:
    """Whether the process lives: a loop that is late is no reason to kill it."""
    return text_answer("ok\n")


def readiness(request: Request, why: str, **more: object) -> Answer:
    """Ready (no `why`) or not. Clients without a token are told nothing more."""
    about = {**more, "why": why} if request.scope.get("may_read") else {}
    return json_answer({"ready": not why, **about}, 503 if why else 200)


def text_of(request: Request, name: str) -> str | None:
    """A parameter of the query. Raises HTTPException if it is no name."""
    value = request.query_params.get(name)
    if value is not None and (len(value) > PARAMETER_CHARS_MAX or not value.isprintable()):
        raise HTTPException(400, f"{name}: give at most {PARAMETER_CHARS_MAX} printable characters")
    return value or None


def number_of(request: Request, name: str) -> int | None:
    """A parameter of the query. Raises HTTPException if it is no number from 0 to 2**63 - 1."""
    value = request.query_params.get(name)
    if value is None or value == "":
        return None
    if not (value.isascii() and value.isdecimal() and len(value) <= 19) or int(value) >= 2**63:
        raise HTTPException(400, f"{name}: give a number, 0 to 2**63 - 1")
    return int(value)


def host_of(request: Request) -> str:
    """From where it comes."""
    return request.client.host if request.client is not None else ""


def application(routes: Mapping[str, Handler], secrets: Sequence[bytes], host: str) -> ASGIApp:
    """Answers these paths, each by GET. `host`: where it listens."""

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        answer = json_answer({"error": error.detail}, error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    async def unanswered(request: Request, error: Exception) -> Response:
        answer = json_answer({"error": str(error)}, 503)
        answer.headers["Retry-After"] = "2"
        return answer

    inner = Starlette(
        routes=[Route(path, handler, methods=["GET"]) for path, handler in routes.items()],
        exception_handlers={HTTPException: refused, Unanswered: unanswered},
    )
    inner.router.redirect_slashes = False
    return _Guard(inner, secrets, host)


class _Guard:
    """Refuses what may not read, and puts the headers on every answer."""

    def __init__(self, inner: ASGIApp, secrets: Sequence[bytes], host: str) -> None:
        self._inner = inner
        self._secrets = secrets
        self._host = host
        self._refusals = Tally(log.warning, "http_client_refused")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        is_static = path == "/" or path.startswith(STATIC)

        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = HEADERS | {"Cache-Control": "no-cache" if is_static else "no-store"}
                message["headers"] = [
                    *message["headers"],
                    *((name.lower().encode(), value.encode()) for name, value in headers.items()),
                ]
            await send(message)

        refusal = self._refusal(scope, may_be_open=is_static or path in OPEN)
        await (refusal or self._inner)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope, *, may_be_open: bool) -> Response | None:
        sizes = [len(name) + len(value) for name, value in scope["headers"]]
        if sum(sizes) + len(scope["raw_path"]) + len(scope["query_string"]) > HEAD_BYTES_MAX:
            return json_answer({"error": f"more than {HEAD_BYTES_MAX} bytes of headers"}, 431)
        secrets = tuple(self._secrets)
        if not secrets[0]:
            named = [value for name, value in scope["headers"] if name == b"host"]
            if len(named) != 1 or not self._is_here(named[0].decode("latin-1")):
                text = (
                    "access is open, so the host must be this machine's loopback, such as "
                    "127.0.0.1; elsewhere set a token"
                )
                return json_answer({"error": text}, 403)
            self._let_read(scope)
            return None
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, token = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if kind.lower() == b"bearer" and is_accepted(token.strip(), secrets):
            self._let_read(scope)
            return None
        if may_be_open:
            return None
        text = (
            "this token is not accepted: give the cluster's token, or its read-only token "
            "(tensorhub token read-only)"
            if token
            else "give a token of the cluster, the read-only one is enough: "
            "'Authorization: Bearer TOKEN'"
        )
        if token:
            self._refusals.count(advice="a client has another token than this cluster")
        answer = json_answer({"error": text}, 401)
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer

    def _let_read(self, scope: Scope) -> None:
        scope["keep_place"]()
        scope["may_read"] = True

    def _is_here(self, named: str) -> bool:
        host = named.rpartition(":")[0] if named.rpartition(":")[2].isdecimal() else named
        return is_loopback(host) or host.strip("[]") == self._host


def is_accepted(token: bytes, secrets: Sequence[bytes]) -> bool:
    """Whether it is one of these, or the read-only one that belongs to one. How long that takes
    says nothing of them.
    """
    given = hashlib.sha256(token).digest()
    found = False
    for secret in secrets:
        for each in (secret, read_only_secret(secret)):
            found |= hmac.compare_digest(given, hashlib.sha256(each).digest())
    return found


@lru_cache
def _static_files() -> dict[str, tuple[bytes, str]]:
    """The dashboard's files by name, with their types. There are no others to be had."""
    directory = resources.files("tensorhub.web") / "static"
    return {
        file.name: (
            file.read_bytes(),
            mimetypes.guess_type(file.name)[0] or "application/octet-stream",
        )
        for file in directory.iterdir()
        if file.is_file()
    }


async def static(request: Request) -> Response:
    """One of the dashboard's files; at "/" its page."""
    found = _static_files().get(request.path_params.get("name", "index.html"))
    if found is None:
        raise HTTPException(404, "there is no such file")
    body, kind = found
    return Answer(body, media_type=kind)
