"""The admission gate: under uvicorn, over real HTTP; and message by message, as a server with
trailers sees it.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tensorhub import sync
from tensorhub.errors import InvalidType, InvalidValue, StateError
from tensorhub.integrations.admission import VersionGate, sse_ending
from tensorhub.model.stamps import Stamp
from tests.rig import OPTIONS
from tests.runtime.data_rig import WAIT_S

uvicorn = pytest.importorskip("uvicorn", reason="the extra http is not installed")


class Engine:
    """An ASGI application, and the version of its weights; None: there is none now."""

    def __init__(self, version: int | None = 11) -> None:
        self.version = version
        self.calls = 0
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def stamp(self) -> Stamp:
        if self.version is None:
            raise StateError("a call is changing the memory", retryable=True)
        return Stamp("m", 0, self.version, f"content {self.version}", bytes(32))

    def text(self, version: int | None = None) -> str:
        return str(
            Stamp(
                "m",
                0,
                version or self.version or 0,
                f"content {version or self.version}",
                bytes(32),
            )
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.calls += 1
        path = scope["path"]
        kind = b"text/event-stream" if path == "/sse" else b"application/json"
        headers = [(b"content-type", kind)]
        if path == "/sized":
            headers.append((b"content-length", b"6"))
        if path == "/breaks":
            raise RuntimeError("the engine is broken")
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if path == "/whole":
            await send({"type": "http.response.body", "body": b"{}"})
            return
        await send({"type": "http.response.body", "body": b"{1}", "more_body": True})
        self.begun.set()
        await asyncio.to_thread(self.goes_on.wait, WAIT_S)
        await send({"type": "http.response.body", "body": b"{2}", "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@contextmanager
def served(app: Any) -> Iterator[http.client.HTTPConnection]:
    """The application under uvicorn; a connection to it."""
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="critical", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        pause = threading.Event()
        while not server.started and thread.is_alive():
            pause.wait(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
        yield connection
        connection.close()
    finally:
        server.should_exit = True
        thread.join()


def get(
    connection: http.client.HTTPConnection,
    path: str,
    accepts: str | None = None,
    method: str = "GET",
) -> tuple[int, dict[str, str], bytes]:
    headers = {} if accepts is None else {"TensorHub-Version": accepts}
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    said = {name.lower(): value for name, value in answer.getheaders()}
    return answer.status, said, answer.read()


# --------------------------------------------------------------------------------------------------
# over HTTP


def test_who_is_let_in() -> None:
    engine = Engine(11)
    with served(VersionGate(engine, engine.stamp, retry_after_s=1.5)) as connection:
        for accepts in (None, ">=11", "=11", ">= 0", "=  11"):
            status, said, body = get(connection, "/whole", accepts)
            assert (status, body) == (200, b"{}")
            assert said["tensorhub-version-start"] == said["tensorhub-version-end"] == engine.text()
        calls = engine.calls
        for accepts in (">=12", "=12", "=10"):
            status, said, body = get(connection, "/whole", accepts)
            assert (status, said["retry-after"]) == (409, "2")
            assert (
                body.decode() == f"this engine has version 11, and the request accepts {accepts}\n"
            )
            assert said["tensorhub-version-start"] == said["tensorhub-version-end"] == engine.text()
        engine.version = None
        status, said, body = get(connection, "/whole", ">=0")
        assert (status, said["tensorhub-version-start"]) == (409, "none")
        assert b"no version now" in body
        assert engine.calls == calls
        assert get(connection, "/whole")[:1] == (200,)  # it does not care


@pytest.mark.parametrize(
    "accepts",
    [
        "12",
        ">12",
        "<=12",
        "=-1",
        "=1.5",
        "==1",
        ">=",
        "=9223372036854775808",
        "=" + "9" * 400,
        "=1,=2",
        "\xe9",
        "",
    ],
)
def test_a_header_that_cannot_be_understood(accepts: str) -> None:
    engine = Engine(11)
    with served(VersionGate(engine, engine.stamp)) as connection:
        status, said, body = get(connection, "/whole", accepts)
        assert (status, engine.calls) == (400, 0)
        assert said["content-type"].startswith("text/plain")
        assert b"give >=N or =N" in body
        assert len(body) < 500


def test_two_headers_contradict_each_other() -> None:
    engine = Engine(11)
    with served(VersionGate(engine, engine.stamp)) as connection:
        connection.putrequest("GET", "/whole")
        connection.putheader("TensorHub-Version", ">=1")
        connection.putheader("TensorHub-Version", ">=2")
        connection.endheaders()
        assert connection.getresponse().status == 400


@pytest.mark.parametrize("path", ["/sse", "/json", "/sized"])
def test_a_streamed_answer_that_spans_an_update(path: str) -> None:
    """uvicorn has no trailers over HTTP/1.1."""
    engine = Engine(11)
    with served(VersionGate(engine, engine.stamp, ending=sse_ending)) as connection:
        connection.request("GET", path, headers={"TensorHub-Version": ">=11"})
        answer = connection.getresponse()
        assert answer.getheader("TensorHub-Version-Start") == engine.text(11)
        assert answer.getheader("TensorHub-Version-End") is None
        assert answer.getheader("Trailer") is None
        assert answer.read(3) == b"{1}"  # before the engine has made the second piece
        engine.version = 12
        engine.goes_on.set()
        rest = answer.read()
        if path != "/sse":
            assert rest == b"{2}"
            return
        body, _, event = rest.partition(b"event: tensorhub\ndata: ")
        assert body == b"{2}"
        assert json.loads(event) == {"start": engine.text(11), "end": engine.text(12)}


def test_a_head_request_and_an_engine_that_breaks() -> None:
    engine = Engine(11)
    with served(VersionGate(engine, engine.stamp)) as connection:
        status, said, body = get(connection, "/whole", "=11", method="HEAD")
        assert (status, body, said["tensorhub-version-end"]) == (200, b"", engine.text())
        assert get(connection, "/whole", "=1", method="HEAD")[0] == 409
        assert get(connection, "/breaks")[0] == 500
        assert get(connection, "/whole")[0] == 200


def test_an_engine_that_follows_a_trainer() -> None:
    with (
        sync.serve(token="", options=OPTIONS) as coordinator,
        sync.connect(coordinator.address, name="t", token="", options=OPTIONS) as trainer,
        sync.connect(coordinator.address, name="r", token="", options=OPTIONS) as rollout,
    ):
        source = trainer.register("m", {"w": np.ones(8)})
        source.publish(1)
        weights = rollout.register("m", {"w": np.zeros(8)})
        engine = Engine()
        with served(VersionGate(engine, weights.stamp)) as connection:
            assert get(connection, "/whole", ">=1")[0] == 409
            weights.update()
            status, said, _ = get(connection, "/whole", ">=1")
            assert (status, said["tensorhub-version-end"]) == (200, str(weights.stamp()))
            stamp = Stamp.parse(said["tensorhub-version-end"])
            assert sync.check_stamp(stamp, rollout).version == 1
            assert get(connection, "/whole", ">=2")[0] == 409
            with source.mutate(2):
                pass
            weights.update()
            assert get(connection, "/whole", ">=2")[0] == 200


# --------------------------------------------------------------------------------------------------
# message by message


def sent(app: Any, *, trailers: bool, kind: str = "http") -> list[dict[str, Any]]:
    """What a server is told."""
    said: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        said.append(dict(message))

    async def receive() -> Any:
        return {"type": "http.request"}

    extensions: Any = {"http.response.trailers": {}} if trailers else None
    scope: Any = {"type": kind, "path": "/", "headers": [], "extensions": extensions}
    asyncio.run(app(scope, receive, send))
    return said


def application(*messages: dict[str, Any]) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in messages:
            await send(message)

    return app


HEAD = {"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]}
FIRST = {"type": "http.response.body", "body": b"1", "more_body": True}
LAST = {"type": "http.response.body", "body": b"2"}
ITS = {"type": "http.response.trailers", "headers": [(b"x", b"y")], "more_trailers": True}
ITS_LAST = {"type": "http.response.trailers", "headers": [(b"z", b"z")]}


def ends(headers: list[tuple[bytes, bytes]]) -> bool:
    return b"tensorhub-version-end" in dict(headers)


def test_a_server_with_trailers_gets_the_end_as_one() -> None:
    engine = Engine(11)
    said = sent(VersionGate(application(HEAD, FIRST, LAST), engine.stamp), trailers=True)
    head, first, last, end = said
    assert head["trailers"]
    assert dict(head["headers"])[b"trailer"] == b"tensorhub-version-end"
    assert (first, last) == (FIRST, LAST)
    assert end["type"] == "http.response.trailers"
    assert dict(end["headers"]) == {b"tensorhub-version-end": engine.text().encode()}


@pytest.mark.parametrize("its_own", [False, True])
def test_a_streamed_answer_with_trailers_that_spans_an_update(its_own: bool) -> None:
    engine = Engine(11)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({**HEAD, "trailers": its_own})
        await send(FIRST)
        engine.version = 12
        await send(LAST)
        if its_own:
            engine.version = 13
            await send(ITS_LAST)

    head, *_, end = sent(VersionGate(app, engine.stamp), trailers=True)
    assert dict(head["headers"])[b"tensorhub-version-start"] == engine.text(11).encode()
    assert dict(end["headers"])[b"tensorhub-version-end"] == engine.text().encode()


def test_an_applications_own_trailers_stay() -> None:
    engine = Engine(11)
    its = {**HEAD, "trailers": True}
    app = VersionGate(application(its, FIRST, LAST, ITS, ITS_LAST), engine.stamp)
    *_, more, end = sent(app, trailers=True)
    assert more == ITS
    assert ends(end["headers"])
    assert dict(end["headers"])[b"z"] == b"z"
    # in one piece: the end is a header, and the trailers are as they were
    head, *rest = sent(VersionGate(application(its, LAST, ITS_LAST), engine.stamp), trailers=True)
    assert ends(head["headers"])
    assert rest == [LAST, ITS_LAST]


def test_a_streamed_answer_with_a_length_keeps_its_bytes() -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"content-length", b"2")]
    app = application({**HEAD, "headers": headers}, FIRST, LAST)
    said = sent(VersionGate(app, Engine(11).stamp, ending=sse_ending), trailers=False)
    assert said[1:] == [FIRST, LAST]


def test_stamps_of_another_gate_give_way() -> None:
    """As a proxy passes them on: an answer has one of each."""
    engine = Engine(11)
    others = [(b"TensorHub-Version-Start", b"m:0:9:c:"), (b"tensorhub-version-end", b"m:0:9:c:")]
    its = {**HEAD, "headers": [*others, (b"a", b"b")], "trailers": True}
    trailers = {**ITS_LAST, "headers": others}
    gate = VersionGate(application(its, FIRST, LAST, trailers), engine.stamp)
    head, _, _, end = sent(gate, trailers=True)
    stamp = engine.text().encode()
    assert head["headers"] == [
        (b"a", b"b"),
        (b"tensorhub-version-start", stamp),
        (b"trailer", b"tensorhub-version-end"),
    ]
    assert end["headers"] == [(b"tensorhub-version-end", stamp)]


def test_other_messages_and_scopes_pass() -> None:
    engine = Engine(11)
    hint = {"type": "http.response.early_hint", "links": []}
    path = {"type": "http.response.pathsend", "path": "/f"}
    first, head, body = sent(
        VersionGate(application(hint, HEAD, path), engine.stamp), trailers=True
    )
    assert (first, body) == (hint, path)
    assert ends(head["headers"])
    assert HEAD["headers"] == [(b"a", b"b")]  # the application's own message is untouched
    assert sent(VersionGate(application(LAST), engine.stamp), trailers=False, kind="websocket") == [
        LAST
    ]


def test_arguments() -> None:
    engine = Engine()
    with pytest.raises(InvalidType, match=r"weights\.stamp"):
        VersionGate(engine, engine.stamp())  # type: ignore[arg-type]
    for wrong in (-1, float("inf"), float("nan")):
        with pytest.raises(InvalidValue, match="retry_after_s"):
            VersionGate(engine, engine.stamp, retry_after_s=wrong)


def test_a_request_with_a_body_is_refused_before_its_body_is_read() -> None:
    engine = Engine(11)
    with served(VersionGate(engine, engine.stamp)) as connection:
        headers = {"TensorHub-Version": "=1"}
        connection.request("POST", "/whole", body=b"x" * 2**20, headers=headers)
        answer = connection.getresponse()
        assert (answer.status, engine.calls) == (409, 0)
        answer.read()
        assert get(connection, "/whole")[0] == 200  # over the same connection, or a new one
