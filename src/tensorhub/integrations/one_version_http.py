"""The trainer's calls to the engines of a fleet with one version, by HTTP: both sides.

Responsible for messages. Not responsible for what they do (`one_version_engine`).
"""

from __future__ import annotations

import hmac
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from tensorhub.errors import BY_NAME, AuthenticationFailed, InvalidValue, StateError, shown

BODY_MAX = 4096  # bytes of a call
CONNECTIONS_MAX = 64  # at the same time; further ones are closed
IDLE_S = 10.0  # a connection on which nothing comes is ended
MARGIN_S = 5.0  # an answer comes so much later than the call's own deadline, at most


class Called(Protocol):
    """An engine's calls."""

    @property
    def version(self) -> int | None: ...
    def stage(self, attempt: int) -> None: ...
    def flip(self, attempt: int) -> None: ...
    def settle(self, attempt: int, is_commit: bool) -> None: ...


class _Server(ThreadingHTTPServer):
    """A thread for each connection, and so many of them."""

    daemon_threads = True

    def __init__(self, place: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(place, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The caller is gone, and asks again."""


class Listener:
    """Takes calls: POST /stage, /flip and /settle with JSON, and GET /version. The token is not
    encrypted: use a network of your own.
    """

    def __init__(self, engine: Called, host: str, port: int, token: str | None) -> None:
        if token is None and host not in ("localhost", "::1") and not host.startswith("127."):
            raise InvalidValue(
                f"host={shown(host)} can be reached by other machines: give token=, here and to "
                f"the trainer's OneVersion"
            )
        expected = f"Bearer {token or ''}".strip().encode()

        class Handler(BaseHTTPRequestHandler):
            timeout = IDLE_S
            disable_nagle_algorithm = True
            wbufsize = -1  # an answer is one packet

            def do_GET(self) -> None:
                self._answer(lambda: {"version": engine.version})

            def do_POST(self) -> None:
                self._answer(self._call)

            def _call(self) -> dict[str, Any]:
                length = int(self.headers.get("Content-Length", 0))
                if not 0 <= length <= BODY_MAX:
                    raise InvalidValue(f"a call of {length} bytes: {BODY_MAX} at most")
                given = json.loads(self.rfile.read(length))
                name = self.path.strip("/")
                if name not in ("stage", "flip", "settle"):
                    raise InvalidValue(f"there is no call {shown(name)}")
                getattr(engine, name)(**given)
                return {}

            def _answer(self, call: Any) -> None:
                given = self.headers.get("Authorization", "Bearer").strip().encode()
                try:
                    if not hmac.compare_digest(given, expected):
                        raise AuthenticationFailed("the engine expects another token")
                    code, body = 200, call()
                except Exception as error:
                    code, body = 409, {"error": type(error).__name__, "text": f"{error}"}
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
            target=self._http.serve_forever, args=(0.05,), name="tensorhub-fleet-http"
        )
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class Remote:
    """An engine by its URL. Raises what the engine raises; StateError: it does not answer."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 300.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidValue(f'{shown(url)} is no URL of an engine: give "http://HOST:PORT"')
        self.name = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token or ''}".strip()}
        self._timeout_s = timeout_s + MARGIN_S

    @property
    def version(self) -> int | None:
        answer: int | None = self._ask("version")["version"]
        return answer

    def stage(self, attempt: int) -> None:
        self._ask("stage", attempt=attempt)

    def flip(self, attempt: int) -> None:
        self._ask("flip", attempt=attempt)

    def settle(self, attempt: int, is_commit: bool) -> None:
        self._ask("settle", attempt=attempt, is_commit=is_commit)

    def _ask(self, call: str, **given: Any) -> dict[str, Any]:
        data = json.dumps(given).encode() if given else None
        request = Request(f"{self.name}/{call}", data, self._headers)
        try:
            with urlopen(request, timeout=self._timeout_s) as answer:
                said: dict[str, Any] = json.load(answer)
                return said
        except HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            try:
                said = json.loads(text)
                raise BY_NAME.get(said["error"], StateError)(
                    f"{self.name}: {said['text']}"
                ) from error
            except (ValueError, KeyError, TypeError):
                raise StateError(f"{self.name} has answered {error.code}: {text[:500]}") from error
        except (URLError, OSError, ValueError) as error:
            raise StateError(
                f"{self.name} does not answer /{call}: is it up? ({error})", retryable=True
            ) from error
