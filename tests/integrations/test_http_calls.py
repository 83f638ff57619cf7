"""What answers a trainer's call may be no engine, and what calls an engine may be no trainer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tensorhub.errors import AuthenticationFailed, InvalidValue, StateError
from tensorhub.integrations import http_calls, one_version_http, vllm_session
from tensorhub.integrations.one_version_http import CONNECTIONS_MAX, Listener, Remote
from tensorhub.integrations.vllm_session import ExtensionClient, HttpClient

WAIT_S = 20.0
TOKEN = "a token of at least this length"


class Rogue:
    """A server with one answer to all calls. `answer`: what comes after the status line."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str, str | None]] = []
        self.status, self.body = 200, b"{}"
        self.headers: dict[str, str] = {}
        self.goes_on = threading.Event()  # an answer without end
        self.goes_on.set()
        rogue = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                rogue.calls.append((self.command, self.path, self.headers.get("Authorization")))
                self.send_response(rogue.status)
                for name, value in rogue.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(rogue.body)
                while not rogue.goes_on.wait(0.01):
                    self.wfile.write(b" ")

            def do_GET(self) -> None:
                self.do_POST()

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.goes_on.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def rogue() -> Iterator[Rogue]:
    made = Rogue()
    yield made
    made.close()


CALLS: dict[str, Callable[[str], object]] = {
    "stage": lambda url: Remote(url, TOKEN).stage(5),
    "version": lambda url: Remote(url, TOKEN).version,
    "pause": lambda url: HttpClient(url).pause_generation(mode="abort", clear_cache=True),
    "state": lambda url: ExtensionClient(url).state(),
    "check": lambda url: ExtensionClient(url).init_weight_transfer_engine({"check": "actor"}),
    "update": lambda url: ExtensionClient(url).update_weights({"version": 5}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "body",
    [b"<html>", b"[1]", b"null", b"[" * 200_000, b"\xff", b"{", b'{"results": 1}'],
    ids=lambda body: body[:8].decode(errors="replace"),
)
def test_a_server_that_is_no_engine(rogue: Rogue, call: str, body: bytes) -> None:
    rogue.body = body
    if (call, body[:3]) == ("pause", b'{"r'):
        return  # vLLM's own answers to it differ between releases
    with pytest.raises(StateError, match=rogue.url):
        CALLS[call](rogue.url)


@pytest.mark.parametrize("call", ["stage", "update", "check"])
@pytest.mark.parametrize(
    "said",
    [
        {},
        {"results": []},
        {"results": [None]},
        {"results": [{"version": 4}, {"version": "5"}]},
        {"done": "stage", "attempt": 4, "terms": {}},
    ],
    ids=json.dumps,
)
def test_an_ok_of_an_engine_that_has_not_done_it(
    rogue: Rogue, call: str, said: dict[str, Any]
) -> None:
    rogue.body = json.dumps(said).encode()
    with pytest.raises(StateError, match=rogue.url):
        CALLS[call](rogue.url)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_call_is_sent_on(rogue: Rogue, call: str, status: int) -> None:
    """With the token, to any place."""
    rogue.status, rogue.headers = status, {"Location": f"{rogue.url}/other"}
    with pytest.raises(StateError, match=r"it leads to .*/other'"):
        CALLS[call](rogue.url)
    assert len(rogue.calls) == 1


@pytest.mark.parametrize("call", ["stage", "pause"])
def test_an_answer_has_a_size_and_an_end(
    rogue: Rogue, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_calls, "ANSWER_MAX", 1000)
    rogue.body = b"x" * 1001
    with pytest.raises(StateError, match="more than 1000 bytes"):
        CALLS[call](rogue.url)
    rogue.body, rogue.headers = b"{}", {"Content-Length": "9"}
    with pytest.raises(StateError, match="lacks 7 bytes"):
        CALLS[call](rogue.url)
    rogue.headers = {}
    rogue.goes_on.clear()
    for module in (one_version_http, vllm_session):
        monkeypatch.setattr(module, "MARGIN_S", 0.2 - 300)
    monkeypatch.setattr(http_calls, "ANSWER_MAX", 2**20)
    with pytest.raises(StateError, match="timed out"):
        CALLS[call](rogue.url)


def test_a_machine_that_is_gone_is_noticed_before_a_long_deadline(
    rogue: Rogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the system, as a look at a connection shows: here no machine can be taken away."""
    sockets: list[dict[str, int]] = []
    request = HTTPConnection.request

    def looked_at(self: Any, *given: Any) -> None:
        options = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
        found = {
            each: self.sock.getsockopt(socket.IPPROTO_TCP, getattr(socket, each))
            for each in options
        }
        assert self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        sockets.append(found)
        request(self, *given)

    monkeypatch.setattr(HTTPConnection, "request", looked_at)
    HttpClient(rogue.url, timeout_s=300.0).resume_generation()
    (its,) = sockets
    assert its["TCP_KEEPIDLE"] + its["TCP_KEEPINTVL"] * its["TCP_KEEPCNT"] <= 30
    assert its["TCP_USER_TIMEOUT"] == 30_000


@pytest.mark.parametrize("status", [200, 409])
def test_a_call_that_was_answered_leaves_no_thread_behind(rogue: Rogue, status: int) -> None:
    before = set(threading.enumerate())
    rogue.status, rogue.body = status, b'{"version": 3}'
    with nullcontext() if status == 200 else pytest.raises(StateError):
        assert Remote(rogue.url, TOKEN).version == 3
    for each in set(threading.enumerate()) - before:  # it ends long before the call's deadline
        each.join(WAIT_S)
        assert not each.is_alive()


def test_an_error_of_an_engine_is_printable_and_short(rogue: Rogue) -> None:
    rogue.status = 409
    rogue.body = json.dumps({"error": "InvalidValue", "text": "a\x1b[31m " * 10**5}).encode()
    with pytest.raises(InvalidValue, match=r"has refused: a\\x1b") as error:
        CALLS["stage"](rogue.url)
    assert len(f"{error.value}") < 2 * http_calls.TEXT_MAX
    rogue.body = b'{"error": ["StateError"], "text": 1}'
    with pytest.raises(StateError, match="is no engine of a fleet: to /stage it has answered 409"):
        CALLS["stage"](rogue.url)


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:1", "ftp://a", "http://", "http://a b", "http://a:x", "http://a:99999"),
        *("http://[a", "http://a/\nX: y", "http://\u00e9", "http://a?b", "http://a#b", None, 1),
    ],
)
def test_urls(url: Any) -> None:
    for make in (Remote, HttpClient):
        with pytest.raises(InvalidValue, match="is not the URL of"):
            make(url)


def test_no_error_shows_a_secret() -> None:
    for make in (
        lambda: Remote("http://me:secret@127.0.0.1"),
        lambda: HttpClient("http://me:secret@127.0.0.1"),
        lambda: Remote("http://127.0.0.1", "se\ncret"),
        lambda: Remote("http://127.0.0.1", "secret\u20ac"),
    ):
        with pytest.raises(InvalidValue) as error:
            make()
        assert "cret" not in f"{error.value}"


# ---------------------------------------------------------------------------------------------
# an engine's listener


TERMS: Mapping[str, Any] = {"model": "actor", "lease_s": 3.0}


class Called:
    terms = TERMS

    def __init__(self) -> None:
        self.version: int | None = 3
        self.calls: list[tuple[object, ...]] = []
        self.fault: Exception | None = None

    def stage(self, attempt: int) -> None:
        if self.fault is not None:
            raise self.fault
        self.calls.append(("stage", attempt))

    def flip(self, attempt: int) -> None:
        self.calls.append(("flip", attempt))

    def settle(self, attempt: int, is_commit: bool) -> None:
        self.calls.append(("settle", attempt, is_commit))


@pytest.fixture
def engine() -> Called:
    return Called()


@pytest.fixture
def listener(engine: Called) -> Iterator[Listener]:
    made = Listener(engine, "127.0.0.1", 0, TOKEN)
    yield made
    made.close()


def sends(listener: Listener, text: bytes) -> bytes:
    with connected(listener) as connection:
        connection.sendall(text)
        return connection.recv(2**16)


def connected(listener: Listener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(listener.url.rpartition(":")[2])), WAIT_S)


def request(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST /{path} HTTP/1.0", f"Authorization: Bearer {TOKEN}", *headers]
    lines += [] if headers else [f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


@pytest.mark.parametrize(
    "given",
    [
        *({}, [1], 1, {"self": 1}, {"attempt": 7, "is_commit": True}, {"attempt": 7}),
        *(
            {"terms": TERMS, "attempt": each}
            for each in ("7", True, float("nan"), -1, 10**40, 7.0, None)
        ),
    ],
    ids=str,
)
def test_arguments_that_no_trainer_gives(listener: Listener, engine: Called, given: object) -> None:
    answer = sends(listener, request("stage", json.dumps(given).encode()))
    assert b"these are no arguments of stage" in answer
    assert engine.calls == []


@pytest.mark.parametrize(
    "text",
    [
        request("settle", b'{"attempt": 1, "is_commit": "no"}'),
        request("settle", b'{"attempt": 1}'),
        request("stage", b"[" * 4000),
        request("stage", b"\xff"),
        request("stage", b"", "Content-Length: x"),
        request("stage", b"", "Content-Length: -1"),
        request("stage", b"", "Content-Length: " + "9" * 5000),
        request("stage", b"", "Transfer-Encoding: chunked"),
        request("close", b'{"attempt": 1}'),
        request("stage", b"", *[f"X-{number}: y" for number in range(200)]),
        b"x" * 70_000,
    ],
    ids=lambda text: text[:200],
)
def test_calls_that_no_trainer_makes(listener: Listener, engine: Called, text: bytes) -> None:
    assert b" 200 " not in sends(listener, text)
    assert engine.calls == []
    assert Remote(listener.url, TOKEN).version == 3


def test_calls_that_fail_keep_no_later_one_away(listener: Listener, engine: Called) -> None:
    engine.fault = StateError("not now")
    for _ in range(CONNECTIONS_MAX + 1):
        with pytest.raises(StateError, match="not now"):
            Remote(listener.url, TOKEN, WAIT_S, TERMS).stage(5)
    engine.fault = None
    Remote(listener.url, TOKEN, WAIT_S, TERMS).stage(5)
    assert engine.calls == [("stage", 5)]


@pytest.mark.parametrize("begun", [b"", b"G", b"POST /stage HTTP/1.0\r\nX: y\r\n"])
def test_connections_without_a_call_keep_no_trainer_away(
    listener: Listener, engine: Called, begun: bytes
) -> None:
    idle = [connected(listener) for _ in range(2 * CONNECTIONS_MAX)]
    for each in idle:
        each.sendall(begun)
    Remote(listener.url, TOKEN, WAIT_S, TERMS).stage(5)
    assert engine.calls == [("stage", 5)]
    for each in idle[:CONNECTIONS_MAX]:
        assert each.recv(1) == b""  # the oldest ones were ended
    for each in idle:
        each.close()


def test_a_call_that_drips_in_is_ended(engine: Called, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_version_http, "CALL_S", 0.3)
    listener = Listener(engine, "127.0.0.1", 0, TOKEN)
    with connected(listener) as connection:
        connection.settimeout(0.01)
        is_ended = False
        while not is_ended:  # the test's own deadline ends it otherwise
            try:
                connection.sendall(b"G")
                is_ended = connection.recv(1) == b""
            except TimeoutError:
                pass
            except OSError:
                is_ended = True
    listener.close()


def test_tokens(engine: Called, listener: Listener) -> None:
    for host, token in (("0.0.0.0", ""), ("127.0.0.1", " "), ("", None), ("0.0.0.0", None)):
        with pytest.raises(InvalidValue, match="give token="):
            Listener(engine, host, 0, token)
    for wrong in (None, TOKEN[:-1], TOKEN + "x"):
        with pytest.raises(AuthenticationFailed):
            Remote(listener.url, wrong).stage(5)
    Remote(listener.url, f"{TOKEN}\n", terms=TERMS).stage(5)  # as of a file
    assert engine.calls == [("stage", 5)]


@pytest.mark.parametrize(
    "said", [[], ["Authorization:"], [f"Authorization: {TOKEN}"], [f"Authorization: Basic {TOKEN}"]]
)
@pytest.mark.parametrize("call", ["POST /settle", "GET /version"])
def test_a_call_without_the_token_changes_and_learns_nothing(
    listener: Listener, engine: Called, call: str, said: list[str]
) -> None:
    body = b'{"attempt": 1, "is_commit": true}'
    lines = [f"{call} HTTP/1.0", *said, f"Content-Length: {len(body)}", "", ""]
    answer = sends(listener, "\r\n".join(lines).encode() + body)
    assert b"AuthenticationFailed" in answer
    assert b"version" not in answer
    assert engine.calls == []
