"""A call to an engine by HTTP. What answers may be no engine, or may be hostile: an answer has a
deadline and a size, and no call is sent on to another place. Proxies of the environment are not
used: calls bear tokens.

Responsible for one call. Not responsible for what engines are asked (`vllm_session`,
`sglang_server`, `one_version_http`).
"""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from tensorhub.errors import InvalidValue, StateError, shown
from tensorhub.types import printable

ANSWER_MAX = 16 * 2**20  # bytes
TEXT_MAX = 100_000  # characters of it that an error shows
GONE_S = 30  # until a machine that is gone is noticed, while its answer is awaited


@dataclass(frozen=True)
class Answer:
    status: int
    text: str

    @property
    def fields(self) -> dict[str, Any]:
        """What it says as JSON; ValueError: it is no JSON object."""
        found = parsed(self.text)
        if not isinstance(found, dict):
            raise ValueError(f"its JSON is a {type(found).__name__}, and no object")
        return found

    @property
    def shown(self) -> str:
        return printable(self.text[:TEXT_MAX])


def parsed(text: str | bytes) -> Any:
    """JSON; ValueError: it is none."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its JSON is too deep") from error


def checked_url(url: object, whose: str) -> str:
    """The URL without "/" at its end. Raises InvalidValue."""
    try:
        assert isinstance(url, str)
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_good = is_good and (parts.port or 1) > 0 and not parts.query and not parts.fragment
        is_good = is_good and url.isascii() and url.isprintable() and " " not in url
    except (AssertionError, ValueError):
        is_good = False
    if "@" in str(url):  # perhaps with a password, which no error shows
        raise InvalidValue(f'the URL of {whose} takes no user: give "http://HOST:PORT"')
    if is_good and parts.path.rstrip("/").endswith("/v1"):  # of its OpenAI routes
        raise InvalidValue(f'the URL of {whose} has no /v1: give "http://HOST:PORT" only')
    if not is_good:
        raise InvalidValue(f'{shown(url)} is not the URL of {whose}: give "http://HOST:PORT"')
    return str(url).rstrip("/")


def call(
    whose: str, url: str, body: bytes | None, headers: Mapping[str, str], timeout_s: float
) -> Answer:
    """POST a body, or GET. Connecting has `timeout_s`, and so has the rest.

    Raises StateError: there was no answer, or one that is too long, or leads to another place.
    """
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    deadline = math.inf
    try:
        connection = kind(str(parts.hostname), parts.port, timeout=timeout_s)
        try:
            connection.connect()
            _notice_if_gone(connection.sock)
            deadline = time.monotonic() + timeout_s
            watch = threading.Timer(timeout_s, _end, (connection.sock,))
            watch.daemon = True
            watch.start()
            try:
                method = "GET" if body is None else "POST"
                connection.request(method, path, body, dict(headers))
                answer = connection.getresponse()
                data = answer.read(ANSWER_MAX + 1)
            finally:
                watch.cancel()
            if time.monotonic() >= deadline:
                raise TimeoutError
        finally:
            connection.close()
        if len(data) > ANSWER_MAX:
            raise ValueError(f"its answer has more than {ANSWER_MAX} bytes")
        if answer.length:
            raise ValueError(f"its answer lacks {answer.length} bytes")
        if 300 <= answer.status < 400:
            raise ValueError(f"it leads to {shown(answer.getheader('Location'))}: give that URL")
    except (OSError, HTTPException, ValueError) as error:
        text = "timed out" if time.monotonic() >= deadline else printable(str(error))
        raise StateError(
            f"{whose} does not answer {parts.path}: is it up? ({text})",
            retryable=True,
        ) from error
    return Answer(answer.status, data.decode(errors="replace"))


def _notice_if_gone(sock: socket.socket) -> None:
    """A process that ends closes its connections; a machine that is gone does not."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, GONE_S // 3),
        (socket.TCP_KEEPINTVL, GONE_S // 6),
        (socket.TCP_KEEPCNT, 4),
        (socket.TCP_USER_TIMEOUT, 1000 * GONE_S),
    ):
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _end(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
