"""The trainer's calls to the engines of a fleet with one version, by HTTP: both sides.

Responsible for messages. Not responsible for what they do (`one_version_engine`).
"""

from __future__ import annotations

import hmac
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from tensorhub.errors import (
    BY_NAME,
    AuthenticationFailed,
    InvalidValue,
    StateError,
    TensorHubError,
    shown,
    text_of,
)
from tensorhub.integrations.http_calls import TEXT_MAX, call, checked_url
from tensorhub.integrations.one_version import ATTEMPTS, VERSION_MAX
from tensorhub.types import printable

BODY_MAX = 16_384  # bytes of a call
CONNECTIONS_MAX = 64  # whose call has not come yet; and as many calls at the same time
CALL_S = 10.0  # until a call has come
MARGIN_S = 5.0  # an answer comes so much later than the call's own deadline, at most


class Called(Protocol):
    """An engine's calls. `terms`: what its trainer has to have alike, by name."""

    terms: Mapping[str, Any]

    @property
    def version(self) -> int | None: ...
    def stage(self, attempt: int) -> None: ...
    def flip(self, attempt: int) -> None: ...
    def settle(self, attempt: int, is_commit: bool) -> None: ...


class _Server(ThreadingHTTPServer):
    """A thread for each connection. Where too many send no call, the oldest one of the address that
    has most of them is ended.
    """

    daemon_threads = True
    request_queue_size = 2 * CONNECTIONS_MAX

    def __init__(self, place: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.room = threading.BoundedSemaphore(CONNECTIONS_MAX)  # of calls
        self._waiting: dict[socket.socket, tuple[str, float]] = {}  # the oldest one first
        self._lock = threading.Lock()
        super().__init__(place, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._waiting[request] = client_address[0], time.monotonic() + CALL_S
            if len(self._waiting) > CONNECTIONS_MAX:
                most = Counter([host for host, _ in self._waiting.values()]).most_common(1)[0][0]
                self._end(next(each for each, (host, _) in self._waiting.items() if host == most))
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        with self._lock:
            now = time.monotonic()
            for each in [each for each, (_, until) in self._waiting.items() if until < now]:
                self._end(each)

    def _end(self, request: socket.socket) -> None:
        del self._waiting[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def has_come(self, request: Any) -> None:
        """This connection's call has come."""
        with self._lock:
            self._waiting.pop(request, None)

    def shutdown_request(self, request: Any) -> None:
        self.has_come(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The caller is gone, and asks again."""


def _checked(name: str, given: object) -> dict[str, Any]:
    """A call's arguments, if they are ones that a trainer gives. Raises InvalidValue."""
    names = {"stage": ["attempt", "terms"], "flip": ["attempt"], "settle": ["attempt", "is_commit"]}
    if name not in names:
        raise InvalidValue(f"there is no call {shown(name)}")
    if isinstance(given, dict) and sorted(given) == names[name]:
        attempt, is_commit = given["attempt"], given.get("is_commit", False)
        is_attempt = type(attempt) is int and 0 <= attempt < ATTEMPTS * VERSION_MAX
        if is_attempt and type(is_commit) is bool:
            return given
    raise InvalidValue(f"these are no arguments of {name}: {shown(given)}")


class Listener:
    """Takes calls: POST /stage, /flip and /settle with JSON, and GET /version. The token is not
    encrypted: use a network of your own.
    """

    def __init__(self, engine: Called, host: str, port: int, token: str | None) -> None:
        is_near = host in ("localhost", "::1") or host.startswith("127.")
        if not (token or "").strip() and not (token is None and is_near):
            raise InvalidValue(
                f"host={shown(host)} can be reached by other machines, or the token is empty: give "
                f"token= here (TENSORHUB_FLEET_TOKEN in an engine's environment), and the same to "
                f"the trainer's OneVersion(token=)"
            )
        expected = _bearer(token).encode()

        class Handler(BaseHTTPRequestHandler):
            timeout = CALL_S
            disable_nagle_algorithm = True
            wbufsize = -1  # an answer is one packet
            server: _Server

            def do_GET(self) -> None:
                self._answer(lambda: {"version": engine.version})

            def do_POST(self) -> None:
                self._answer(self._call)

            def _call(self) -> dict[str, Any]:
                length = self.headers.get("Content-Length", "")
                if not (length.isdecimal() and len(length) < 9 and int(length) <= BODY_MAX):
                    raise InvalidValue(f"a call has {BODY_MAX} bytes at most")
                data = self.rfile.read(int(length))
                self.server.has_come(self.connection)
                name = self.path.strip("/")
                try:
                    said = _checked(name, json.loads(data))
                except (ValueError, RecursionError) as error:
                    raise InvalidValue(f"this is no call: {text_of(error)}") from error
                given = {key: each for key, each in said.items() if key != "terms"}
                if (terms := said.get("terms", engine.terms)) != engine.terms:
                    raise InvalidValue(
                        f"the trainer has {shown(terms)}, and this engine {engine.terms}: give "
                        f"both the same"
                    )
                if not self.server.room.acquire(blocking=False):
                    raise StateError("too many calls at the same time", retryable=True)
                try:
                    getattr(engine, name)(**given)
                finally:
                    self.server.room.release()
                return {"done": name, **said}

            def _answer(self, make: Any) -> None:
                given = self.headers.get("Authorization", "Bearer").strip()
                try:
                    if not hmac.compare_digest(given.encode(), expected):
                        raise AuthenticationFailed("the engine expects another token")
                    code, body = 200, make()
                except Exception as error:
                    code, body = 409, {"error": type(error).__name__, "text": f"{error}"[:TEXT_MAX]}
                    if isinstance(error, TensorHubError):
                        body["retryable"] = error.retryable
                data = json.dumps(body).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        try:
            self._http = _Server((host, port), Handler)
        except OSError as error:
            raise StateError(f"host={shown(host)}, port={port}: {error}") from error
        self.url = f"http://{host}:{self._http.server_port}"
        self._thread = threading.Thread(
            target=self._http.serve_forever, args=(0.05,), name="tensorhub-fleet-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


def _bearer(token: str | None) -> str:
    """Raises InvalidValue, without the token."""
    text = (token or "").strip()
    if not (text.isascii() and text.isprintable()):
        raise InvalidValue("token= takes printable ASCII characters only")
    return f"Bearer {text}".strip()


class Remote:
    """An engine by its URL. Raises what the engine raises; StateError: it does not answer."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout_s: float = 300.0,
        terms: Mapping[str, Any] | None = None,
    ) -> None:
        self._terms = dict(terms or {})
        self.name = checked_url(url, "an engine")
        self._headers = {"Authorization": _bearer(token)}
        self._timeout_s = timeout_s + MARGIN_S

    @property
    def version(self) -> int | None:
        version = self._ask("version").get("version", "none")
        if version is not None and type(version) is not int:
            raise StateError(f"{self.name} is no engine of a fleet: it tells no version")
        return version

    def stage(self, attempt: int) -> None:
        self._ask("stage", attempt=attempt, terms=self._terms)

    def flip(self, attempt: int) -> None:
        self._ask("flip", attempt=attempt)

    def settle(self, attempt: int, is_commit: bool) -> None:
        self._ask("settle", attempt=attempt, is_commit=is_commit)

    def _ask(self, name: str, **given: Any) -> dict[str, Any]:
        """What an engine answers, which says what it has done: so does no other server's "ok"."""
        body = json.dumps(given).encode() if given else None
        url = f"{self.name}/{name}"
        answer = call(self.name, url, body, self._headers, self._timeout_s)
        kind: type[TensorHubError] = StateError
        retryable: bool | None = None
        text = f"is no engine of a fleet: to /{name} it has answered {answer.status}: {answer.text}"
        with suppress(ValueError, KeyError, TypeError):
            said = answer.fields
            if answer.status == 200 and (not given or said == {"done": name, **given}):
                return said
            if answer.status != 200:
                kind, text = BY_NAME.get(said["error"], StateError), f"has refused: {said['text']}"
                retryable = said.get("retryable") is True
        raise kind(f"{self.name} {printable(text[:TEXT_MAX])}", retryable=retryable)
